"""Goldens replayed through the backend that will serve: the last check before READY."""

from __future__ import annotations

from collections.abc import Sequence

from residentd.backend.base import Backend
from residentd.errors import AccuracyError
from residentd.models.manifest import Golden
from residentd.types import RequestId, Row, StepPlan

DISAGREEMENT_MAX = 0.1
"""Share of golden tokens that a quantised build may miss: its kernels round with the batch (facts: solo equals batched
for 3 to 5 of 8 requests)."""


def probe_goldens(backend: Backend, goldens: Sequence[Golden], *, exact: bool) -> None:
    """Generate every golden greedily, as many at once as there are slots. Raises AccuracyError with the count.

    Without goldens one step runs all the same: READY is never said of an engine that has not computed.
    """
    if not goldens:
        backend.step(StepPlan(step=-1, rows=(Row(RequestId(0), 0, 0, (0,), samples=True),)))
    slots = backend.limits.slots
    missed = total = 0
    for first in range(0, len(goldens), slots):
        batch = goldens[first : first + slots]
        for golden, output in zip(batch, _generate(backend, batch), strict=True):
            total += len(golden.output)
            missed += sum(got != want for got, want in zip(output, golden.output, strict=True))
    if missed > (0 if exact else DISAGREEMENT_MAX * total):
        raise AccuracyError(
            f"{missed} of {total} golden tokens differ from those recorded at install. "
            "The engine does not compute here what it computed then: reinstall this version"
        )


def _generate(backend: Backend, goldens: Sequence[Golden]) -> list[list[int]]:
    """Greedy outputs, teacher-forced on the golden so that one miss counts once. One slot each."""
    outputs: list[list[int]] = [[] for _ in goldens]
    computed = [0] * len(goldens)
    targets = [golden.prompt + golden.output for golden in goldens]
    lengths = [len(golden.prompt) for golden in goldens]
    step = 0
    while any(len(output) < len(golden.output) for output, golden in zip(outputs, goldens, strict=True)):
        step += 1
        rows = _rows(backend, goldens, computed, lengths, targets)
        logits = backend.step(StepPlan(step=-step, rows=tuple(rows)))
        sampling = [row.slot for row in rows if row.samples]
        for row in rows:
            computed[row.slot] += len(row.tokens)
        for slot, token in zip(sampling, logits.argmax(axis=1).tolist(), strict=True):
            outputs[slot].append(token)
            lengths[slot] += 1
    return outputs


def _rows(
    backend: Backend,
    goldens: Sequence[Golden],
    computed: Sequence[int],
    lengths: Sequence[int],
    targets: Sequence[tuple[int, ...]],
) -> list[Row]:
    budget = backend.limits.step_tokens_max
    rows: list[Row] = []
    for slot, golden in enumerate(goldens):
        done = lengths[slot] - len(golden.prompt) == len(golden.output)
        tokens = () if done else targets[slot][computed[slot] : lengths[slot]][:budget]
        if tokens:
            budget -= len(tokens)
            samples = computed[slot] + len(tokens) == lengths[slot]
            rows.append(Row(RequestId(slot), slot, computed[slot], tokens, samples))
    return rows
