"""Goldens through a backend, each fed its own recorded output, so that one wrong token counts once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt

from residentd.backend.base import Backend
from residentd.models.manifest import Golden
from residentd.types import Limits, RequestId, Row, StepPlan


@dataclass(frozen=True, slots=True)
class Cut:
    """How goldens share steps: at most so many at once, and so many of a golden's tokens in one step."""

    rows_max: int = 1 << 30
    chunk_tokens: int = 1 << 30


AT_ONCE = Cut()


@dataclass(frozen=True, slots=True)
class Answer:
    """The logits [vocab] before output token `output` of golden `golden`; the backend's own until the next one."""

    golden: int
    output: int
    logits: npt.NDArray[Any]


def replay(backend: Backend, goldens: Sequence[Golden], cut: Cut = AT_ONCE) -> Iterator[Answer]:
    """Every golden, in batches of as many as there are slots; each must fit one."""
    rows = min(backend.limits.slots, backend.limits.step_tokens_max, cut.rows_max)
    for first in range(0, len(goldens), rows):
        yield from _batch(backend, goldens[first : first + rows], first, cut)


def _batch(backend: Backend, goldens: Sequence[Golden], first: int, cut: Cut) -> Iterator[Answer]:
    fed = [golden.prompt + golden.output[:-1] for golden in goldens]
    computed = [0] * len(goldens)
    step = 0
    while rows := _rows(backend.limits, goldens, fed, computed, cut):
        step += 1
        logits = backend.step(StepPlan(step=-step, rows=tuple(rows)))
        for row in rows:
            computed[row.slot] += len(row.tokens)
        for row, answer in zip((row for row in rows if row.samples), logits, strict=True):
            yield Answer(first + row.slot, computed[row.slot] - len(goldens[row.slot].prompt), answer)


def _rows(
    limits: Limits, goldens: Sequence[Golden], fed: Sequence[tuple[int, ...]], computed: Sequence[int], cut: Cut
) -> list[Row]:
    budget = limits.step_tokens_max
    rows: list[Row] = []
    for slot, golden in enumerate(goldens):
        start = computed[slot]
        left = len(golden.prompt) - start if start < len(golden.prompt) else 1
        tokens = fed[slot][start : start + min(left, budget, cut.chunk_tokens)]
        if tokens and golden.output:
            budget -= len(tokens)
            samples = start + len(tokens) >= len(golden.prompt)
            rows.append(Row(RequestId(slot), slot, start, tokens, samples))
    return rows
