"""What bench's time stamps say: arithmetic over recorded arrivals, no clock."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from residentd.cli.statistics import (
    Arrival,
    Trace,
    decode_rate,
    message_gaps,
    percentile,
    report,
    summary,
    token_intervals,
)

# Whole milliseconds: sums of a few thousand of them are exact in float64, so equality needs no tolerance.
ARRIVALS = st.lists(st.tuples(st.integers(0, 1000), st.integers(1, 20)), max_size=30).map(
    lambda steps: tuple(
        Arrival(float(sum(gap for gap, _ in steps[: index + 1])), tokens) for index, (_, tokens) in enumerate(steps)
    )
)


@pytest.mark.parametrize(
    ("arrivals", "intervals", "gaps"),
    [
        ((), [], []),
        ((Arrival(5.0, 1),), [], []),
        ((Arrival(5.0, 3),), [0.0, 0.0], []),
        ((Arrival(1.0, 1), Arrival(2.0, 1), Arrival(4.0, 1)), [1.0, 2.0], [1.0, 2.0]),
        ((Arrival(1.0, 1), Arrival(7.0, 3)), [2.0, 2.0, 2.0], [6.0]),
        ((Arrival(1.0, 2), Arrival(2.0, 2)), [0.0, 0.5, 0.5], [1.0]),
    ],
)
def test_a_coalesced_message_shares_its_gap(
    arrivals: tuple[Arrival, ...], intervals: list[float], gaps: list[float]
) -> None:
    """k tokens after a gap g are k intervals of g / k; extra tokens of a first message are intervals of 0."""
    assert list(token_intervals(arrivals)) == intervals
    assert list(message_gaps(arrivals)) == gaps


@given(ARRIVALS)
def test_intervals_count_tokens_and_sum_to_the_time(arrivals: tuple[Arrival, ...]) -> None:
    """n tokens have n - 1 intervals, and their sum is the time from the first message to the last."""
    intervals = list(token_intervals(arrivals))
    assert len(intervals) == max(0, sum(arrival.tokens for arrival in arrivals) - 1)
    span = arrivals[-1].at_s - arrivals[0].at_s if arrivals else 0.0
    # At most 600 divisions, each within half an ulp of a gap of at most 1000: far below 1e-9 of the sum of them.
    assert math.isclose(math.fsum(intervals), span, rel_tol=1e-9, abs_tol=1e-12)


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=50), st.sampled_from([0, 50, 95, 99, 100]))
def test_percentiles_are_numpys(values: list[float], percent: int) -> None:
    """The linear interpolation of NumPy's default, an independent implementation."""
    # Both compute a + (b - a) * t with a, b <= 1e6: they differ by a few ulps of 1e6 (1.2e-10) at most.
    assert percentile(sorted(values), percent) == pytest.approx(np.percentile(values, percent), abs=1e-9)


def test_summary_of_nothing_is_nan() -> None:
    """Percentiles of no samples are not a number, rather than a good-looking 0."""
    empty = summary([])
    assert empty.count == 0
    assert all(math.isnan(value) for value in (empty.mean, empty.p50, empty.p95, empty.p99, empty.min, empty.max))


@pytest.mark.parametrize(
    ("arrivals", "rate"),
    [
        ((), None),
        ((Arrival(1.0, 8),), None),
        ((Arrival(1.0, 4), Arrival(1.0, 4)), None),
        ((Arrival(1.0, 1), Arrival(3.0, 4)), 2.0),
        ((Arrival(0.0, 9), Arrival(1.0, 2), Arrival(2.0, 4)), 3.0),
    ],
)
def test_decode_rate_leaves_the_first_message_out(arrivals: tuple[Arrival, ...], rate: float | None) -> None:
    """Tokens after the first message over the time after it; undefined where there is neither."""
    assert decode_rate(arrivals) == rate


def test_report_of_a_recorded_run() -> None:
    """TTFT from each request's own start, aggregate rates over the wall time, failed requests in no figure."""
    traces = [
        Trace(prompt_tokens=10, sent_s=0.0, ended_s=3.0, arrivals=(Arrival(1.0, 1), Arrival(3.0, 2))),
        Trace(prompt_tokens=30, sent_s=1.0, ended_s=5.0, arrivals=(Arrival(4.0, 1), Arrival(5.0, 4))),
        Trace(prompt_tokens=99, sent_s=1.0, ended_s=1.5, arrivals=(Arrival(1.25, 7),), failure="no room"),
    ]
    result = report(traces)
    assert (result.requests, result.failures) == (3, (("no room", 1),))
    assert (result.wall_s, result.prompt_tokens, result.output_tokens, result.messages) == (5.0, 40, 8, 4)
    assert (result.output_tokens_per_s, result.prompt_tokens_per_s) == (8 / 5, 40 / 5)
    assert (result.ttft_ms.count, result.ttft_ms.min, result.ttft_ms.max) == (2, 1000.0, 3000.0)
    assert (result.itl_ms.count, result.itl_ms.p50, result.itl_ms.max) == (6, 250.0, 1000.0)
    assert (result.message_gap_ms.count, result.message_gap_ms.mean) == (2, 1500.0)
    assert (result.request_tokens_per_s.min, result.request_tokens_per_s.max) == (1.0, 4.0)


def test_report_of_failures_alone_divides_by_nothing() -> None:
    """A run in which every request failed still has a report."""
    trace = Trace(prompt_tokens=1, sent_s=1.0, ended_s=1.0, arrivals=(), failure="gone")
    result = report([trace, trace])
    assert (result.wall_s, result.output_tokens_per_s, result.ttft_ms.count) == (0.0, 0.0, 0)
    assert result.failures == (("gone", 2),)
