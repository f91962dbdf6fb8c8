"""One streamed answer: to the terminal as it comes, or as JSON lines."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from rich.table import Table
from rich.text import Text

from resident.v1 import inference_pb2
from resident.v1.inference_pb2 import Finish, GenerateResponse, Started, TokenLogprobs
from residentd.cli import formats
from residentd.cli.exits import Failure
from residentd.cli.output import Output, fields_of

_REASONS = {inference_pb2.FINISH_REASON_STOP: "stop", inference_pb2.FINISH_REASON_LENGTH: "length"}


@dataclass(slots=True)
class Answer:
    """What has arrived so far; whole once `finish` is set. Owned by whoever reads the stream."""

    text: str = ""
    started: Started = field(default_factory=Started)
    finish: Finish | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)


def stream(output: Output, responses: Iterable[GenerateResponse], answer: Answer) -> None:
    """Show `responses` as they come, and keep them in `answer`. Raises Failure where the stream ends without its end.

    `answer` is the caller's, so that what has arrived before an interruption is not lost.
    """
    for response in responses:
        if response.HasField("started"):
            answer.started = response.started
        answer.text += response.text
        answer.logprobs.extend(response.logprobs)
        if output.as_json:
            _emit(output, response)
        elif response.text:
            output.text(response.text)
        if response.HasField("finish"):
            answer.finish = response.finish
    if answer.finish is None:
        raise Failure("the answer stopped in the middle. See the daemon's journal, then ask again")


def _emit(output: Output, response: GenerateResponse) -> None:
    """Up to three events, in the order of the stream."""
    if response.HasField("started"):
        output.emit({"event": "started", **fields_of(response.started)})
    if response.text or response.token_ids or response.logprobs:
        delta: dict[str, object] = {
            "event": "delta",
            "text": response.text,
            "token_ids": list(response.token_ids),
        }
        if response.logprobs:
            delta["logprobs"] = [fields_of(entry) for entry in response.logprobs]
        output.emit(delta)
    if response.HasField("finish"):
        output.emit({"event": "finished", **fields_of(response.finish), "reason": reason(response.finish)})


def reason(finish: Finish) -> str:
    """`stop`, `length`, or the name of a reason that this client does not know."""
    number = finish.reason
    if number in _REASONS:
        return _REASONS[number]
    known = inference_pb2.FinishReason.DESCRIPTOR.values_by_number
    return known[number].name.removeprefix("FINISH_REASON_").lower() if number in known else f"reason {number}"


def summary(answer: Answer) -> str:
    """`smollm2@1 · 42 tokens · first after 82 ms · 33.1 tokens/s · stop`."""
    finish = answer.finish
    if finish is None:
        return answer.started.model_version
    timing = finish.timing
    parts = [
        answer.started.model_version,
        formats.plural(finish.usage.completion_tokens, "token"),
        f"first after {formats.milliseconds(timing.ttft_ms)}",
        f"{formats.rate(timing.decode_tokens_per_s)} tokens/s",
        f"stopped at {finish.stop!r}" if finish.stop else reason(finish),
    ]
    if timing.resumed_count:
        parts.append(f"resumed {timing.resumed_count} times")
    return " · ".join(part for part in parts if part)


def logprobs_table(logprobs: Iterable[TokenLogprobs]) -> Table:
    """One row a token: its id, its log-probability, and the likeliest alternatives."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for header, justify in (("TOKEN", "right"), ("LOGPROB", "right"), ("ALTERNATIVES", "left")):
        table.add_column(header, justify=justify, overflow="fold")  # type: ignore[arg-type]
    for entry in logprobs:
        top = "  ".join(f"{alternative.token_id} {alternative.logprob:.3f}" for alternative in entry.top)
        table.add_row(str(entry.token_id), f"{entry.logprob:.4f}", Text(top, style="dim"))
    return table
