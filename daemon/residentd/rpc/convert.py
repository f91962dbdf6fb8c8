"""The one place where errors become gRPC statuses, with rich details, and where our values become messages."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final, NoReturn, TypeAlias

import grpc
import msgspec
import structlog
from google.protobuf import any_pb2, duration_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2

from resident.v1 import admin_pb2, inference_pb2
from residentd.errors import (
    AccuracyError,
    CallerError,
    ConflictError,
    DeadlineError,
    Finding,
    MachineError,
    NotFoundError,
    OperatorError,
    OverloadedError,
    ResidentError,
    SourceError,
    UnavailableError,
)
from residentd.models.checks import Check
from residentd.types import SamplingParams, TokenLogprobs

log = structlog.get_logger("residentd.rpc")

# Most specific first: the first row whose type matches decides.
STATUS_BY_ERROR: Final[tuple[tuple[type[ResidentError], grpc.StatusCode], ...]] = (
    (NotFoundError, grpc.StatusCode.NOT_FOUND),
    (CallerError, grpc.StatusCode.INVALID_ARGUMENT),
    (OverloadedError, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (UnavailableError, grpc.StatusCode.UNAVAILABLE),
    (DeadlineError, grpc.StatusCode.DEADLINE_EXCEEDED),
    (ConflictError, grpc.StatusCode.ALREADY_EXISTS),
    (SourceError, grpc.StatusCode.FAILED_PRECONDITION),
    (AccuracyError, grpc.StatusCode.FAILED_PRECONDITION),
    (OperatorError, grpc.StatusCode.FAILED_PRECONDITION),
    (MachineError, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (ResidentError, grpc.StatusCode.INTERNAL),
)
STATUS_DETAILS_KEY: Final = "grpc-status-details-bin"  # grpc/grpc doc/PROTOCOL-HTTP2.md, status-details
MESSAGE_CHARACTERS_MAX: Final = 1000
DETAILS_BYTES_MAX: Final = 3500
"""Both travel in trailers, which a client takes up to 8 kB of by default; details are base64 there."""

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


@asynccontextmanager
async def reporting(context: Context) -> AsyncIterator[None]:
    """Turn any ResidentError raised inside into the call's status. The rest is INTERNAL, logged, and says nothing."""
    try:
        yield
    except ResidentError as error:
        await abort(context, error)
    except (grpc.aio.AbortError, grpc.aio.UsageError):
        raise
    except Exception:
        log.exception("internal_error")
        await context.abort(grpc.StatusCode.INTERNAL, "internal error; the server's log has the reason")


async def abort(context: Context, error: ResidentError) -> NoReturn:
    code = next(code for kind, code in STATUS_BY_ERROR if isinstance(error, kind))
    message = _message_of(error)
    status = status_pb2.Status(code=getattr(code_pb2, code.name), message=message, details=_details(error))
    await context.abort(code, message, trailing_metadata=((STATUS_DETAILS_KEY, status.SerializeToString()),))
    raise AssertionError("abort does not return")


def _message_of(error: ResidentError) -> str:
    if isinstance(error, SourceError):
        return f"the source cannot be installed: {len(error.findings):,} findings. Put right what is listed, then retry"
    return str(error)[:MESSAGE_CHARACTERS_MAX]


def _violations(findings: Sequence[Finding]) -> Iterator[error_details_pb2.BadRequest.FieldViolation]:
    """The findings that fit into the trailers, and a last one that counts the rest."""
    left = DETAILS_BYTES_MAX
    for index, finding in enumerate(findings):
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=finding.where, description=f"{finding.what}. {finding.remedy}"
        )
        left -= violation.ByteSize() + 4
        if left < 0:
            rest = f"{len(findings) - index:,} more findings; put these right first"
            yield error_details_pb2.BadRequest.FieldViolation(field="…", description=rest)
            return
        yield violation


def _details(error: ResidentError) -> Iterable[any_pb2.Any]:
    violation = error_details_pb2.BadRequest.FieldViolation
    match error:
        case SourceError(findings=findings):
            yield _packed(error_details_pb2.BadRequest(field_violations=_violations(findings)))
        case CallerError(field=field) if field:
            yield _packed(
                error_details_pb2.BadRequest(field_violations=[violation(field=field, description=str(error))])
            )
        case OverloadedError(retry_after_ms=delay_ms) | UnavailableError(retry_after_ms=delay_ms):
            delay = duration_pb2.Duration(seconds=delay_ms // 1000, nanos=delay_ms % 1000 * 1_000_000)
            yield _packed(error_details_pb2.RetryInfo(retry_delay=delay))
    reason = type(error).__name__.removesuffix("Error").upper()
    yield _packed(error_details_pb2.ErrorInfo(reason=reason, domain="residentd"))


def _packed(
    message: error_details_pb2.BadRequest | error_details_pb2.RetryInfo | error_details_pb2.ErrorInfo,
) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message)
    return packed


def logprobs_message(token: int, logprobs: TokenLogprobs) -> inference_pb2.TokenLogprobs:
    alternative = inference_pb2.TokenLogprobs.Alternative
    return inference_pb2.TokenLogprobs(
        token_id=token,
        logprob=logprobs.chosen,
        top=[alternative(token_id=other, logprob=value) for other, value in logprobs.top],
    )


def sampling_message(params: SamplingParams, *, ignore_eos: bool) -> inference_pb2.Sampling:
    """The effective parameters, as they are echoed to the caller."""
    return inference_pb2.Sampling(
        max_tokens=params.tokens_max,
        min_tokens=params.tokens_min,
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        repetition_penalty=params.repetition_penalty,
        frequency_penalty=params.frequency_penalty,
        presence_penalty=params.presence_penalty,
        logit_bias=dict(params.logit_bias),
        seed=params.seed,
        stop_token_ids=sorted(params.stop_ids),
        ignore_eos=ignore_eos,
        logprobs=params.logprobs,
    )


def check_message(check: Check) -> admin_pb2.Check:
    return admin_pb2.Check(
        occasion=check.occasion,
        checked=check.checked,
        passed=check.passed,
        message=check.message,
        parts=[admin_pb2.CheckPart(**msgspec.structs.asdict(part)) for part in check.parts],
        environment=check.environment,
        changes=[admin_pb2.EnvironmentChange(**msgspec.structs.asdict(change)) for change in check.changes],
        first=check.first,
        since=check.since,
    )
