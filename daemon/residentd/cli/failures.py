"""What a gRPC error means to the person at the terminal: one table from status to exit code, and the rich details."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import cast

import grpc
from google.protobuf.message import DecodeError, Message
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from residentd.cli.exits import ExitCode, Failure, Problem
from residentd.cli.formats import plural

EXIT_BY_STATUS: Mapping[grpc.StatusCode, ExitCode] = MappingProxyType(
    {
        grpc.StatusCode.INVALID_ARGUMENT: ExitCode.USAGE,
        grpc.StatusCode.OUT_OF_RANGE: ExitCode.USAGE,
        grpc.StatusCode.RESOURCE_EXHAUSTED: ExitCode.MACHINE,
        grpc.StatusCode.UNAVAILABLE: ExitCode.UNREACHABLE,
        grpc.StatusCode.DATA_LOSS: ExitCode.MACHINE,
    }
)
"""Everything else is FAILED. The details refine it, see `failure_from_rpc`."""

EXIT_BY_REASON: Mapping[str, ExitCode] = MappingProxyType(
    {
        "SOURCE": ExitCode.SOURCE_REFUSED,
        "ACCURACY": ExitCode.ACCURACY,
        "MACHINE": ExitCode.MACHINE,
        "STORE": ExitCode.MACHINE,
        "OPERATOR": ExitCode.USAGE,
        "LOAD": ExitCode.MACHINE,
    }
)
"""google.rpc.ErrorInfo.reason (the class of residentd.errors), where it says more than the status can."""

NEXT_STEPS: Mapping[grpc.StatusCode, str] = MappingProxyType(
    {
        grpc.StatusCode.UNIMPLEMENTED: "The daemon does not know this call. Upgrade it to the version of residentctl",
        grpc.StatusCode.DEADLINE_EXCEEDED: "Raise --timeout, or ask for less",
        grpc.StatusCode.UNAVAILABLE: "The daemon went away, or speaks TLS: see its journal, or give --tls-ca",
    }
)


@dataclass(frozen=True, slots=True)
class _Details:
    problems: tuple[Problem, ...] = ()
    reason: str = ""
    retry_after_ms: int | None = None


def failure_from_rpc(error: grpc.RpcError) -> Failure:
    """The Failure of one call that ended with `error`.

    A retry hint makes RESOURCE_EXHAUSTED and UNAVAILABLE temporary. Violations on FAILED_PRECONDITION are a refused
    source. An ErrorInfo reason of EXIT_BY_REASON decides before both.
    """
    status = error.code()
    details = _details(error)
    message = (error.details() or "").strip() or f"the daemon answered {status.name} without saying why"
    if details.reason in EXIT_BY_REASON:
        code = EXIT_BY_REASON[details.reason]
    elif details.retry_after_ms is not None and status in _TEMPORARY:
        code = ExitCode.OVERLOADED
    elif details.problems and status is grpc.StatusCode.FAILED_PRECONDITION:
        code = ExitCode.SOURCE_REFUSED
    else:
        code = EXIT_BY_STATUS.get(status, ExitCode.FAILED)
    problems = tuple(problem for problem in details.problems if problem.text != message)
    if code is ExitCode.SOURCE_REFUSED and problems:
        message = (
            f"the source cannot be installed: {plural(len(problems), 'finding')}. Put right what is listed, then retry"
        )
    elif status in NEXT_STEPS and code is not ExitCode.OVERLOADED:
        message = f"{message.rstrip('.')}. {NEXT_STEPS[status]}"
    return Failure(message, code=code, problems=problems, retry_after_ms=details.retry_after_ms, status=status.name)


_TEMPORARY = frozenset({grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE})


def _details(error: grpc.RpcError) -> _Details:
    try:
        status = rpc_status.from_call(cast("grpc.Call", error))
    except (ValueError, DecodeError):
        status = None  # details that contradict the status or cannot be read: the plain status is what is left
    if status is None:
        return _Details()
    info = error_details_pb2.ErrorInfo()
    retry = error_details_pb2.RetryInfo()
    bad_request = error_details_pb2.BadRequest()
    _unpack(status, info)
    _unpack(status, bad_request)
    retry_after_ms = retry.retry_delay.ToMilliseconds() if _unpack(status, retry) else None
    problems = tuple(Problem(where=item.field, text=item.description) for item in bad_request.field_violations)
    return _Details(problems=problems, reason=info.reason, retry_after_ms=retry_after_ms)


def _unpack(status: status_pb2.Status, into: Message) -> bool:
    """Read the detail of `into`'s type; False where there is none, or none that can be read."""
    try:
        return any(detail.Unpack(into) for detail in status.details)
    except DecodeError:
        into.Clear()
        return False
