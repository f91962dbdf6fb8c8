"""What is measured of a loaded engine's speed, on a clock of the test's own."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import numpy as np
import pytest

from residentd.backend import speed as module
from residentd.backend.speed import HISTORY_TOKENS, PREFILLS, PROMPT_TOKENS, ROWS_MAX, STEPS, measure_speeds
from residentd.types import Limits, StepPlan

VOCAB = 8


class FakeEngine:
    """Keeps the shape of every step, and insists on the contract: a row begins where its slot's history can reach."""

    def __init__(self, limits: Limits, seconds: Iterator[float] | None = None) -> None:
        self.limits = limits
        self.shapes: list[tuple[int, int]] = []  # rows, tokens of each
        self.now = 0.0
        self._seconds = seconds
        self._held: dict[int, int] = {}

    def clock(self) -> float:
        return self.now

    def step(self, plan: StepPlan) -> np.ndarray:
        assert sum(len(row.tokens) for row in plan.rows) <= self.limits.step_tokens_max
        for row in plan.rows:
            assert row.start <= self._held.get(row.slot, 0)
            assert row.start + len(row.tokens) <= self.limits.capacity
            self._held[row.slot] = row.start + len(row.tokens)
        self.shapes.append((len(plan.rows), len(plan.rows[0].tokens)))
        self.now += 0.25 if self._seconds is None else next(self._seconds)
        return np.zeros((len(plan.rows), VOCAB), np.float32)

    def close(self) -> None:
        """Nothing is held."""


def test_speeds_are_tokens_by_seconds_of_a_step() -> None:
    """Steps of a quarter of a second: 4 tokens/s a row, 4 prompts/s; each kind of step as often as it says."""
    engine = FakeEngine(Limits(16, 2048, 512, VOCAB))
    speeds = measure_speeds(engine, (1, 2, 3), clock=engine.clock)
    assert (speeds.decode_one, speeds.decode_many, speeds.rows) == (4.0, 4.0 * ROWS_MAX, ROWS_MAX)
    assert speeds.prefill == 4.0 * PROMPT_TOKENS
    assert [engine.shapes.count(shape) for shape in ((1, 1), (ROWS_MAX, 1), (1, PROMPT_TOKENS))] == [
        STEPS,
        STEPS,
        PREFILLS,
    ]


def test_a_disturbed_quarter_does_not_count() -> None:
    """Half of the steps at a tenth of the pace, as other processes make them: the speed is that of the others."""
    engine = FakeEngine(Limits(1, 512, 512, VOCAB), (0.1 if index % 2 else 1.0 for index in count()))
    assert measure_speeds(engine, (1,), clock=engine.clock).decode_one == pytest.approx(10)


def test_a_slow_engine_is_not_asked_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once SECONDS_MAX is over, a kind of step is not tried again; one step of each is."""
    monkeypatch.setattr(module, "SECONDS_MAX", 1.0)
    engine = FakeEngine(Limits(8, 512, 512, VOCAB), (5.0 for _ in count()))
    speeds = measure_speeds(engine, (1,), clock=engine.clock)
    assert speeds.decode_one == 0.2
    assert len(engine.shapes) == 5  # the two histories and one of each kind


@pytest.mark.parametrize(
    "limits",
    [Limits(1, 8, 2, VOCAB), Limits(3, 16, 4, VOCAB), Limits(2, HISTORY_TOKENS, 512, VOCAB), Limits(12, 40, 9, VOCAB)],
)
def test_small_engines_are_measured_within_their_limits(limits: Limits) -> None:
    """Few slots, short contexts and small steps: fewer rows, histories and prompts; no step past a limit."""
    engine = FakeEngine(limits)
    speeds = measure_speeds(engine, (), clock=engine.clock)
    assert speeds.rows == min(ROWS_MAX, limits.slots, limits.step_tokens_max)
    assert speeds.decode_one == 4.0
    assert speeds.prefill == 4.0 * min(limits.capacity, limits.step_tokens_max)
