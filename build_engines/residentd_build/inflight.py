"""Whether a quantised engine answers in flight as it does alone: its kernels round with the batch, and only round.

The rounds are those of `verify`: ragged, staggered, mixed and chunked steps, slots reused over what others left there,
over NaN and over large numbers, and one slot filled to its last position.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import numpy as np

from residentd.errors import AccuracyError
from residentd.types import RequestId, Row, StepPlan
from residentd_build.quality import divergences
from residentd_build.verify import FULL, ROUNDS, TOKEN_BY_TOKEN, Comparison, Track, run_round

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from residentd.backend.base import Backend, Logits
    from residentd.backend.modes import OpenBackend
    from residentd_build.verify import Round

SLOTS = 4  # fewer than the tracks
CONTEXT_MAX = 192  # the goldens fit as well
PROMPTS = (1, 9, 33, 70, 130)  # tokens of text
OUTPUT_TOKENS = 8
KL_IN_FLIGHT_MAX = 0.05
"""Nats, of the worst position. A fault of batching shows another place of the text, which is nats away."""


class Divergence(Comparison):
    """Keeps the worst KL divergence; raises at the first position past the bound."""

    def __init__(self) -> None:
        super().__init__(KL_IN_FLIGHT_MAX)
        self.worst = 0.0

    def check(self, found: Logits, expected: Logits, where: str) -> None:
        """Raises AccuracyError naming `where`."""
        # NaN first: it compares false with every bound.
        is_finite = bool(np.isfinite(found).all())
        kl = float(divergences(expected[None], found[None])[0]) if is_finite else float("inf")
        if not kl <= self.bound:
            raise AccuracyError(
                f"the quantised engine answers otherwise in flight than alone: KL divergence {kl:.2g}, the bound is "
                f"{self.bound:.2g}: {where}. Nothing was published: use another --precision, and report the model, its "
                "exporter and the exporter's version"
            )
        self.worst = max(self.worst, kl)


def check_in_flight(backend: OpenBackend, passages: Sequence[tuple[int, ...]]) -> float:
    """The worst KL divergence of a position in flight from the same alone. Raises AccuracyError past the bound.

    `backend` has SLOTS slots.
    """
    tracks = [_alone(backend, track) for track in _tracks(passages, backend.limits.capacity)]
    short = tracks[1:]
    divergence = Divergence()
    passes: list[tuple[Round, list[Track]]] = [(plan, short) for plan in ROUNDS]
    passes += [(TOKEN_BY_TOKEN, [track for track in short if len(track.fed) <= 2 * OUTPUT_TOKENS]), (FULL, tracks)]
    for plan, chosen in passes:
        run_round(backend, chosen, plan, divergence, _ignored)
    return divergence.worst


def _ignored(_fraction: float, _message: str) -> None:
    """A round here takes seconds."""


def _tracks(passages: Sequence[tuple[int, ...]], context: int) -> Iterator[Track]:
    """Without logits yet. The first fills a slot to its last position; `passages` are repeated as often as needed."""
    outputs = min(OUTPUT_TOKENS, context // 2)
    lengths = (context - outputs + 1, *(min(count, context - outputs) for count in PROMPTS))
    names = ("the full context", *(f"{count} tokens of text" for count in PROMPTS))
    for index, (name, count) in enumerate(zip(names, lengths, strict=True)):
        text = [token for turn in range(len(passages)) for token in passages[(index + turn) % len(passages)]]
        text *= 1 + (count + outputs) // len(text)
        yield Track(name, tuple(text[:count]), tuple(text[count : count + outputs]), np.zeros((0, 0), np.float32))


def _alone(backend: Backend, track: Track) -> Track:
    """`track` with the logits that the engine gives when nothing else runs: the prompt as one, then token by token."""
    logits = []
    prompt = len(track.prompt)
    step_tokens = backend.limits.step_tokens_max
    edges = [*range(0, prompt, step_tokens), *range(prompt, len(track.fed) + 1)]
    for step, (start, end) in enumerate(itertools.pairwise(edges)):
        row = Row(RequestId(0), 0, start, track.fed[start:end], samples=True)
        answer = backend.step(StepPlan(step, (row,)))[0]
        if end >= prompt:
            logits.append(answer.copy())
    return Track(track.name, track.prompt, track.output, np.stack(logits))
