"""What a benchmark's time stamps say. Pure: traces in, a report out. Times are seconds on one monotonic clock."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Arrival:
    """A message that brought `tokens` output tokens, one or more."""

    at_s: float
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """One request as its client saw it. `failure` is "" for one that came to its end."""

    prompt_tokens: int
    sent_s: float
    ended_s: float
    arrivals: tuple[Arrival, ...]
    failure: str = ""

    @property
    def output_tokens(self) -> int:
        return sum(arrival.tokens for arrival in self.arrivals)


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Percentiles by linear interpolation between the closest ranks (NumPy's default); NaN of nothing."""

    count: int
    mean: float
    p50: float
    p95: float
    p99: float
    min: float
    max: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A whole run. Latencies in ms, rates in tokens a second. Failed requests count in `failures` alone."""

    requests: int
    failures: tuple[tuple[str, int], ...]  # message, how often; most frequent first
    wall_s: float
    prompt_tokens: int
    output_tokens: int
    messages: int
    ttft_ms: Summary
    itl_ms: Summary  # per token, see `token_intervals`
    message_gap_ms: Summary
    request_tokens_per_s: Summary  # see `decode_rate`
    output_tokens_per_s: float  # of all requests together, over the wall time
    prompt_tokens_per_s: float


def report(traces: Sequence[Trace]) -> Report:
    """The report of one run; its wall time lasts from the first request sent to the last one ended."""
    done = [trace for trace in traces if not trace.failure]
    failed = Counter(trace.failure for trace in traces if trace.failure)
    wall_s = max(trace.ended_s for trace in traces) - min(trace.sent_s for trace in traces) if traces else 0.0
    prompt_tokens = sum(trace.prompt_tokens for trace in done)
    output_tokens = sum(trace.output_tokens for trace in done)
    rates = [decode_rate(trace.arrivals) for trace in done]
    return Report(
        requests=len(traces),
        failures=tuple(failed.most_common()),
        wall_s=wall_s,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        messages=sum(len(trace.arrivals) for trace in done),
        ttft_ms=summary([1e3 * (trace.arrivals[0].at_s - trace.sent_s) for trace in done if trace.arrivals]),
        itl_ms=summary([1e3 * interval for trace in done for interval in token_intervals(trace.arrivals)]),
        message_gap_ms=summary([1e3 * gap for trace in done for gap in message_gaps(trace.arrivals)]),
        request_tokens_per_s=summary([rate for rate in rates if rate is not None]),
        output_tokens_per_s=output_tokens / wall_s if wall_s > 0 else 0.0,
        prompt_tokens_per_s=prompt_tokens / wall_s if wall_s > 0 else 0.0,
    )


def token_intervals(arrivals: Sequence[Arrival]) -> Iterator[float]:
    """One interval for each token after the first: n tokens have n - 1.

    A message of k tokens that comes g after the one before counts as k intervals of g / k: the sum is the time that
    passed. The k - 1 further tokens of a first message came with the first token, and count as intervals of 0.
    """
    if arrivals:
        yield from (0.0 for _ in range(arrivals[0].tokens - 1))
    for gap, arrival in zip(message_gaps(arrivals), arrivals[1:], strict=True):
        yield from (gap / arrival.tokens for _ in range(arrival.tokens))


def message_gaps(arrivals: Sequence[Arrival]) -> Iterator[float]:
    """The time between each message with tokens and the next: what a reader sees, whatever is in the messages."""
    for before, after in itertools.pairwise(arrivals):
        yield after.at_s - before.at_s


def decode_rate(arrivals: Sequence[Arrival]) -> float | None:
    """Tokens a second after the first message; None where everything came in one."""
    if len(arrivals) < 2 or arrivals[-1].at_s <= arrivals[0].at_s:
        return None
    return sum(arrival.tokens for arrival in arrivals[1:]) / (arrivals[-1].at_s - arrivals[0].at_s)


def summary(values: Sequence[float]) -> Summary:
    if not values:
        nan = math.nan
        return Summary(count=0, mean=nan, p50=nan, p95=nan, p99=nan, min=nan, max=nan)
    ordered = sorted(values)
    return Summary(
        count=len(ordered),
        mean=math.fsum(ordered) / len(ordered),
        p50=percentile(ordered, 50),
        p95=percentile(ordered, 95),
        p99=percentile(ordered, 99),
        min=ordered[0],
        max=ordered[-1],
    )


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Of values in ascending order, at least one."""
    position = (len(ordered) - 1) * percent / 100
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)
