"""Statistics of logits: none moves further than the logits themselves, and what is recorded is what was there."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from residentd.models.manifest import LogitStatistics
from residentd.models.statistics import (
    LIKELY_RANGE,
    SAMPLED_COUNT,
    TOP_COUNT,
    Difference,
    is_clear,
    statistics_of,
    worst_difference,
)

HALF_DIGIT = 5e-7  # of a number: half a unit in the seventh digit

rows = st.lists(st.floats(-60, 60, width=32), min_size=1, max_size=40).map(lambda values: np.array(values, np.float32))


@given(rows, st.integers(0, 10_000), st.floats(0, 10), st.integers(0, 2**32 - 1))
def test_no_statistic_moves_further_than_the_logits(row: np.ndarray, place: int, reach: float, seed: int) -> None:
    """One bound in logits is right for all of them: the difference found is at most the largest |Δlogit|."""
    moved = row + np.random.default_rng(seed).uniform(-reach, reach, row.size)
    largest = float(np.abs(moved - row).max())
    found = worst_difference(moved, statistics_of(row, place)).value
    assert found <= largest + HALF_DIGIT * 64 + 1e-12


@given(rows, st.integers(0, 10_000))
def test_a_row_agrees_with_its_own_statistics(row: np.ndarray, place: int) -> None:
    """Up to the seventh digit; the best tokens come first, and no token twice."""
    recorded = statistics_of(row, place)
    assert worst_difference(row, recorded).value <= HALF_DIGIT * 64
    assert row[recorded.ids[0]] == row.max()
    best = min(TOP_COUNT, row.size)
    assert list(recorded.logits[:best]) == sorted(recorded.logits, reverse=True)[:best]
    assert len(set(recorded.ids)) == len(recorded.ids) == len(recorded.logits) <= TOP_COUNT + SAMPLED_COUNT


@pytest.mark.parametrize("ruled_out", [-1e9, -65504.0, float(np.finfo(np.float32).min)])
def test_tokens_that_are_ruled_out_hide_nothing(ruled_out: float) -> None:
    """An export may set what is never drawn to any depth: differences of the others are found as ever."""
    row = np.linspace(-5, 5, 40, dtype=np.float32)
    masked = row.copy()
    masked[[0, 7]] = ruled_out
    recorded = statistics_of(masked, 0)
    assert max(abs(logit) for logit in recorded.logits) < LIKELY_RANGE
    assert worst_difference(masked, recorded).value <= HALF_DIGIT * 200
    moved = masked.copy()
    moved[recorded.ids[0]] -= 0.01
    assert worst_difference(moved, recorded).value == pytest.approx(0.01, rel=1e-2)


def test_what_is_ruled_out_only_now_is_seen() -> None:
    """A token that was likely and is not, or the other way round, is far past any bound."""
    row = np.linspace(-5, 5, 8, dtype=np.float32)
    changed = row.copy()
    changed[-1] = -1e9
    assert worst_difference(changed, statistics_of(row, 0)).value > 1
    assert worst_difference(row, statistics_of(changed, 0)).value > 1


@given(st.integers(2, 40), st.integers(0, 39), st.floats(0.01, 50))
def test_the_logit_of_a_recorded_token_is_seen(size: int, token: int, shift: float) -> None:
    """A recorded token whose logit alone moved is found with the size of its move."""
    row = np.linspace(-5, 5, size)
    recorded = statistics_of(row, 7)
    token = recorded.ids[token % len(recorded.ids)]
    moved = row.copy()
    moved[token] -= shift
    assert worst_difference(moved, recorded).value == pytest.approx(shift, rel=1e-6, abs=HALF_DIGIT * 10)


def test_other_positions_sample_other_tokens() -> None:
    """Over 128 positions nearly every one of 500 tokens is compared at least once."""
    row = np.zeros(500)
    row[:4] = (4, 3, 2, 1)
    seen = {token for place in range(128) for token in statistics_of(row, place).ids}
    assert len(seen) > 400


def test_a_token_that_rises_past_the_recorded_best_is_seen() -> None:
    """The largest logit is compared wherever it stands now."""
    row = np.zeros(1000)
    row[3] = 5.0
    recorded = statistics_of(row, 0)
    moved = row.copy()
    other = next(token for token in range(1000) if token not in recorded.ids)
    moved[other] = 9.0
    assert worst_difference(moved, recorded) == Difference("largest logit", 4.0)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_nan_and_infinity_are_infinitely_far(value: float) -> None:
    """NaN compares false with every bound: it is looked for first."""
    row = np.zeros(8, np.float32)
    recorded = statistics_of(row, 0)
    row[5] = value
    assert worst_difference(row, recorded).value == math.inf


def test_moments_by_hand() -> None:
    """Two logits of ln 3 and 0: logsumexp ln 4, mean and deviation half of ln 3."""
    recorded = statistics_of(np.array([math.log(3), 0.0]), 0)
    assert recorded.logsumexp == pytest.approx(math.log(4), rel=1e-6)
    assert recorded.mean == recorded.deviation == pytest.approx(math.log(3) / 2, rel=1e-6)


@pytest.mark.parametrize(
    ("logits", "bound", "clear"),
    [((1.0, 0.5), 0.2, True), ((1.0, 0.5), 0.25, False), ((1.0,), 9.0, True), ((1.0, 1.0), 0.0, False)],
)
def test_a_token_is_clear_beyond_twice_the_bound(logits: tuple[float, ...], bound: float, *, clear: bool) -> None:
    """Two logits within the bound can close a gap of two bounds, and no more."""
    recorded = LogitStatistics(ids=tuple(range(len(logits))), logits=logits, logsumexp=0.0, mean=0.0, deviation=0.0)
    assert is_clear(recorded, bound) is clear
