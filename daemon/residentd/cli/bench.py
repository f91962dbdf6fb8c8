"""bench: concurrent streams with ragged prompts, and what they measured at this end of the wire."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import grpc
import typer
from rich.progress import Progress

from resident.v1 import admin_pb2, inference_pb2, inference_pb2_grpc
from residentd.cli.bench_view import report_view
from residentd.cli.channels import UNARY_S_MAX, admin_stub, async_inference_channel, inference_stub
from residentd.cli.command import Session
from residentd.cli.exits import Failure, usage
from residentd.cli.failures import failure_from_rpc
from residentd.cli.generate import ModelOption, TimeoutOption
from residentd.cli.output import Output, finite
from residentd.cli.statistics import Arrival, Report, Trace, report
from residentd.cli.tables import model_reference
from residentd.cli.target import Target

CONCURRENCY_MAX = 4096
REQUESTS_MAX = 1_000_000
STREAMS_PER_CHANNEL = 64  # below limits.streams_max, so that a request waits in the scheduler and not in HTTP/2


@dataclass(frozen=True, slots=True)
class Span:
    """An inclusive range of token counts."""

    low: int
    high: int

    def __str__(self) -> str:
        return f"{self.low:,}" if self.low == self.high else f"{self.low:,} to {self.high:,}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Everything that decides a run's requests."""

    model: inference_pb2.Model
    concurrency: int
    requests: int
    warmup: int
    prompt_tokens: Span
    output_tokens: Span
    seed: int
    temperature: float
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """A run: its traces, and the share of one core that this client used. 1 and above: it was the bottleneck."""

    report: Report
    client_cores: float
    batch_rows_max: int | None  # None where the Admin service could not be asked


def bench(
    session: Session,
    *,
    model: ModelOption = "",
    concurrency: Annotated[
        int, typer.Option("--concurrency", "-c", min=1, max=CONCURRENCY_MAX, help="Streams at a time.")
    ] = 8,
    requests: Annotated[int, typer.Option("--requests", "-n", min=1, max=REQUESTS_MAX, help="Requests in all.")] = 32,
    prompt_tokens: Annotated[
        str, typer.Option(metavar="MIN:MAX", help="Length of a prompt, drawn evenly. One number: every prompt.")
    ] = "32:256",
    output_tokens: Annotated[
        str, typer.Option(metavar="N|MIN:MAX", help="Length of an answer; end-of-sequence is ignored.")
    ] = "64",
    seed: Annotated[int, typer.Option(min=0, help="Same seed, same prompts.")] = 0,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.0,
    warmup: Annotated[int, typer.Option(min=0, max=1000, help="Requests before the clock starts, one by one.")] = 1,
    timeout: TimeoutOption = 3600.0,
) -> None:
    """Measure TTFT, ITL and tokens/s of N concurrent streams with ragged prompts.

    Prompts are random token ids (so their lengths are exact, and no two share a prefix). Every stream starts its next
    request when the last one has ended. Times are taken in this client, the wire included.
    """
    target = session.target()
    plan = Plan(
        model=_model(target, model),
        concurrency=concurrency,
        requests=requests,
        warmup=warmup,
        prompt_tokens=span(prompt_tokens, "--prompt-tokens"),
        output_tokens=span(output_tokens, "--output-tokens"),
        seed=seed,
        temperature=temperature,
        timeout_s=timeout,
    )
    _check(plan)
    outcome = _run(session.output, target, plan)
    if session.output.as_json:
        session.output.emit(_json(plan, outcome))
    else:
        view = report_view(
            outcome.report, title=_title(plan), client_cores=outcome.client_cores, rows=outcome.batch_rows_max
        )
        session.output.out.print(view)
    if outcome.report.failures:
        failed = sum(times for _, times in outcome.report.failures)
        raise Failure(f"{failed:,} of {plan.requests:,} requests failed; first: {outcome.report.failures[0][0]}")


def span(text: str, option: str) -> Span:
    """`MIN:MAX` or `N`, each at least 1. Raises Failure (usage)."""
    low, _, high = text.partition(":")
    try:
        value = Span(int(low), int(high or low))
    except ValueError:
        raise usage(f"{option} {text!r} is not MIN:MAX, two numbers of tokens. For example 32:256") from None
    if not 1 <= value.low <= value.high:
        raise usage(f"{option} {text!r}: MIN is at least 1 and MAX not below it. For example 32:256")
    return value


def _model(target: Target, wanted: str) -> inference_pb2.Model:
    """The served model that `wanted` names, or the only one."""
    with inference_stub(target) as inference:
        models = inference.ListModels(inference_pb2.ListModelsRequest(), timeout=UNARY_S_MAX).models
    if not models:
        raise Failure("no model is served. Load one: residentctl load NAME")
    references = ", ".join(model_reference(model) for model in models)
    named = [model for model in models if not wanted or wanted in {model.name, model_reference(model)}]
    if not named:
        raise Failure(f"model {wanted} is not served. Served: {references}. Load it: residentctl load NAME")
    if len(named) > 1 and not wanted:
        raise usage(f"{len(named)} models are served: {references}. Name one with --model")
    return named[0]


def _check(plan: Plan) -> None:
    needed = plan.prompt_tokens.high + plan.output_tokens.high
    if needed > plan.model.context:
        raise usage(
            f"{plan.prompt_tokens.high:,} prompt and {plan.output_tokens.high:,} output tokens make {needed:,}; "
            f"{model_reference(plan.model)} has a context of {plan.model.context:,}. Lower --prompt-tokens or "
            f"--output-tokens"
        )


def _title(plan: Plan) -> str:
    return (
        f"{model_reference(plan.model)} · {plan.requests:,} requests, {plan.concurrency:,} at a time · "
        f"prompts of {plan.prompt_tokens} tokens · answers of {plan.output_tokens} · seed {plan.seed}"
    )


def _run(output: Output, target: Target, plan: Plan) -> Outcome:
    total = plan.requests + plan.warmup
    bar = Progress(console=output.err, transient=True, disable=not output.interactive)
    with bar:
        task = bar.add_task("requests", total=total)
        traces, client_cores = asyncio.run(_drive(target, plan, lambda: bar.advance(task)))
    return Outcome(report(traces), client_cores, _batch_rows_max(target, plan))


async def _drive(target: Target, plan: Plan, ended: Callable[[], None]) -> tuple[list[Trace], float]:
    """Warm up, then keep `concurrency` streams busy until the requests are used up; and this client's own CPU share."""
    messages = request_messages(plan)
    async with contextlib.AsyncExitStack() as stack:
        channels_count = -(-plan.concurrency // STREAMS_PER_CHANNEL)
        channels = [await stack.enter_async_context(async_inference_channel(target)) for _ in range(channels_count)]
        stubs = [inference_pb2_grpc.InferenceStub(channel) for channel in channels]
        for _, message in zip(range(plan.warmup), messages, strict=False):
            await _one(stubs[0], message, plan.timeout_s)
            ended()
        traces: list[Trace] = []

        async def stream(stub: inference_pb2_grpc.InferenceAsyncStub) -> None:
            for message in messages:
                traces.append(await _one(stub, message, plan.timeout_s))
                ended()

        cpu_s, wall_s = time.process_time(), time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for number in range(min(plan.concurrency, plan.requests)):
                group.create_task(stream(stubs[number % channels_count]))
        return traces, (time.process_time() - cpu_s) / (time.perf_counter() - wall_s)


def request_messages(plan: Plan) -> Iterator[inference_pb2.GenerateRequest]:
    """The warm-up requests and the measured ones, in order; decided by the plan alone."""
    random_source = random.Random(plan.seed)  # noqa: S311 - not a secret
    for _ in range(plan.warmup + plan.requests):
        length = random_source.randint(plan.prompt_tokens.low, plan.prompt_tokens.high)
        answer = random_source.randint(plan.output_tokens.low, plan.output_tokens.high)
        ids = random_source.choices(range(plan.model.vocabulary), k=length)
        yield inference_pb2.GenerateRequest(
            model=model_reference(plan.model),
            token_ids=inference_pb2.TokenIds(ids=ids),
            sampling=inference_pb2.Sampling(max_tokens=answer, ignore_eos=True, temperature=plan.temperature, seed=0),
            return_token_ids=True,
        )


async def _one(
    stub: inference_pb2_grpc.InferenceAsyncStub, message: inference_pb2.GenerateRequest, timeout_s: float
) -> Trace:
    arrivals: list[Arrival] = []
    failure = ""
    sent_s = time.perf_counter()
    try:
        async for response in stub.Generate(message, timeout=timeout_s):
            if response.token_ids:
                arrivals.append(Arrival(time.perf_counter(), len(response.token_ids)))  # noqa: PERF401 - kept on error
    except grpc.RpcError as error:
        failure = failure_from_rpc(error).message
    return Trace(
        prompt_tokens=len(message.token_ids.ids),
        sent_s=sent_s,
        ended_s=time.perf_counter(),
        arrivals=tuple(arrivals),
        failure=failure or _short(sum(arrival.tokens for arrival in arrivals), message.sampling.max_tokens),
    )


def _short(got: int, wanted: int) -> str:
    return "" if got == wanted else f"an answer had {got:,} tokens where {wanted:,} were asked for"


def _batch_rows_max(target: Target, plan: Plan) -> int | None:
    """From the engine of the same digest, where this user may ask the Admin service at all."""
    with contextlib.suppress(Failure), admin_stub(target) as admin:
        engines: Sequence[admin_pb2.EngineStatus] = admin.Status(admin_pb2.StatusRequest(), timeout=UNARY_S_MAX).engines
        return next((engine.batch_rows_max for engine in engines if engine.digest == plan.model.digest), None)
    return None


def _json(plan: Plan, outcome: Outcome) -> dict[str, Any]:
    figures = dataclasses.asdict(outcome.report)
    figures["failures"] = [{"message": text, "requests": times} for text, times in outcome.report.failures]
    result: dict[str, Any] = finite(
        {
            "model": model_reference(plan.model),
            "concurrency": plan.concurrency,
            "warmup": plan.warmup,
            "prompt_tokens_range": [plan.prompt_tokens.low, plan.prompt_tokens.high],
            "output_tokens_range": [plan.output_tokens.low, plan.output_tokens.high],
            "seed": plan.seed,
            "temperature": plan.temperature,
            **figures,
            "client_cores": outcome.client_cores,
            "batch_rows_max": outcome.batch_rows_max,
        }
    )
    return result
