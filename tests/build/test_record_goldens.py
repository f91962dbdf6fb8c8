"""What a build records of itself for every later check, and which engines it cannot be recorded of."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from residentd.backend.base import Logits
from residentd.backend.reference import ReferenceBackend, ReferenceModel, continuation
from residentd.errors import AccuracyError
from residentd.models.checks import STATISTICS, TOKENS
from residentd.models.manifest import Golden
from residentd.types import Limits, StepPlan
from residentd_build.goldens import CEILING_RELATIVE, RMS_FACTOR, TOKENS_SPARE, WORST_FACTOR, parts_of, record
from support.manifests import plain_manifest

VOCAB = 200
MODEL = ReferenceModel(peaks=(16.0, 12.0))
LIMITS = Limits(slots=4, capacity=64, step_tokens_max=32, vocab=VOCAB)
GOLDENS = tuple(
    Golden(prompt=prompt, output=continuation(prompt, 5, MODEL, VOCAB))
    for prompt in ((1,), (2, 3), tuple(range(20)), (9, 9, 9), (4,) * 30)
)


class Toy:
    """The toy model with floating-point caches that nothing reads but `amplify`, as quantised kernels read rounding."""

    def __init__(self, *, amplify: float = 0.0, by_rows: float = 0.0, lower_best: float = 0.0) -> None:
        self._inner = ReferenceBackend(MODEL, LIMITS)
        self._amplify, self._by_rows, self._lower_best = amplify, by_rows, lower_best
        self.limits = LIMITS
        self.caches = (np.ones((LIMITS.slots, 2, LIMITS.capacity, 4), np.float32),)

    def step(self, plan: StepPlan) -> Logits:
        logits = self._inner.step(plan).copy()
        for slot, row in enumerate(row for row in plan.rows if row.samples):
            rounded = float((self.caches[0][row.slot, :, :8] != 1).mean())
            logits[slot] += self._amplify * rounded + self._by_rows * (len(plan.rows) == 1)
            logits[slot, logits[slot].argmax()] -= self._lower_best * rounded
        self.caches[0][[row.slot for row in plan.rows if row.start == 0]] = 1.0
        return logits

    def close(self) -> None:
        """Nothing is held."""


def test_every_output_token_gets_its_statistics() -> None:
    """Prompts and outputs stay; a given bound is kept as it is."""
    recorded, tolerance = record(Toy(), GOLDENS, bound=1e-3)
    assert [msgspec.structs.replace(golden, statistics=()) for golden in recorded] == list(GOLDENS)
    for golden in recorded:
        assert [entry.ids[0] for entry in golden.statistics] == list(golden.output)
    assert tolerance.bound == 1e-3
    assert tolerance.spread < 1e-5
    assert tolerance.bound_rms == 0.0


def test_an_engine_that_rounding_does_not_move_gets_the_bound_of_rounding() -> None:
    """Nothing was measured, so the floor of fp32 stands: 2e-5 of the largest logit."""
    _, tolerance = record(Toy(), GOLDENS, bound=None)
    assert (tolerance.bound, tolerance.bound_rms) == (2e-5 * 16, 2e-5 * 16)
    assert tolerance.spread < 1e-5


def test_what_rounding_does_sets_the_bounds() -> None:
    """An engine that turns a rounding of its caches into 0.1 of a logit may differ by a stated multiple of that."""
    _, tolerance = record(Toy(amplify=0.1), GOLDENS, bound=None)
    assert tolerance.spread == pytest.approx(0.1, rel=0.01)
    assert tolerance.bound == pytest.approx(WORST_FACTOR * 0.1, rel=0.01)
    # The first output of a prompt that is read in one step has seen no rounding.
    assert 0.5 * RMS_FACTOR * 0.1 < tolerance.bound_rms < RMS_FACTOR * 0.1


def test_what_batching_does_sets_the_worst_too() -> None:
    """A difference between alone and together counts as rounding does."""
    _, tolerance = record(Toy(by_rows=0.05), GOLDENS, bound=None)
    assert tolerance.bound == pytest.approx(WORST_FACTOR * 0.05, rel=0.01)


def test_tokens_that_rounding_turns_may_be_missed_later() -> None:
    """Where the best logit falls below the second, so does the token: twice as many as were turned are allowed."""
    _, never = record(Toy(lower_best=3.9), GOLDENS, bound=None)
    _, often = record(Toy(lower_best=4.1), GOLDENS, bound=None)
    assert never.tokens_missed_max == TOKENS_SPARE
    # Not the first position of a prompt that one step reads, nor where two roundings of a key undid each other.
    assert 2 * 10 <= often.tokens_missed_max - TOKENS_SPARE <= 2 * 25
    assert record(Toy(lower_best=4.1), GOLDENS, bound=100.0)[1].tokens_missed_max == 0


def test_an_engine_past_its_own_bound_is_refused() -> None:
    """Nothing is published of an fp32 engine that answers otherwise in other company."""
    with pytest.raises(AccuracyError, match=r"differ by 0\.0[0-9]+ .*the bound is 0\.001.*Nothing was published"):
        record(_Chunked(), GOLDENS, bound=1e-3)


class _Chunked(Toy):
    def step(self, plan: StepPlan) -> Logits:
        logits = super().step(plan)
        return logits + 0.01 * (len(plan.rows) == 3)


@pytest.mark.parametrize(("share", "refused"), [(0.9, False), (1.5, True)])
def test_an_engine_that_cannot_be_checked_is_refused(share: float, *, refused: bool) -> None:
    """Up to a quarter of its largest logit rounding is noise; past it no fault could be told from it.

    The root mean square is a little below what rounding does to a position: some have seen none.
    """
    toy = Toy(amplify=share * CEILING_RELATIVE * 16)
    if not refused:
        record(toy, GOLDENS, bound=None)
        return
    with pytest.raises(AccuracyError, match="rounded otherwise"):
        record(toy, GOLDENS, bound=None)


def test_the_first_check_counts_what_was_recorded() -> None:
    """What `residentctl list` shows before the first load: every part, and the measured spread."""
    recorded, tolerance = record(Toy(), GOLDENS, bound=1e-3)
    content = msgspec.structs.replace(plain_manifest({}).content, goldens=recorded, tolerance=tolerance)
    parts = {part.name: part for part in parts_of(content)}
    assert (parts[TOKENS].checked, parts[STATISTICS].checked) == (25, 25)
    assert (parts[STATISTICS].worst, parts[STATISTICS].bound) == (tolerance.spread, 1e-3)
    assert all(part.passed for part in parts.values())
