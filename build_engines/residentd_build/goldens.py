"""What every later check of a version compares with: the statistics of its logits on the goldens, as it was built."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from residentd.backend.replay import AT_ONCE, Cut, replay
from residentd.errors import AccuracyError
from residentd.models.checks import CHAT, FILES, OUTPUTS, STATISTICS, TOKENIZER, TOKENS, Part
from residentd.models.manifest import Golden, Tolerance
from residentd.models.statistics import scale_of, statistics_of, worst_difference

if TYPE_CHECKING:
    from collections.abc import Sequence

    from residentd.backend.base import Backend, Logits
    from residentd.backend.modes import OpenBackend
    from residentd.models.manifest import Content, LogitStatistics
    from residentd.types import Limits, StepPlan

WORST_FACTOR = 4  # of the worst of some 130 positions: a tail, which one draw of rounding doubles against another
RMS_FACTOR = 2
"""Of their root mean square, which hardly varies: tiny llama and qwen3, int8 and int4, draws of 1e-6 to 8e-6, gave 0.1
to 0.8 of the bound, and one matrix of eight that is 5 % off 1.5 and more (2026-12)."""
TOKENS_SPARE = 4  # golden tokens: none turned of some 200 still leaves 3 in 200 likely (the rule of three)
JITTER = 2.0**-18
"""Relative, of every key and value after every step. What another order of summing leaves is ten times less, and turns
8-bit activations to their next step all the same: over 30 layers any rounding ends as the same noise (SmolLM2-135M
int8: root mean square 0.75 logits at 2^-22, 0.81 at 2^-18; largest logit 38)."""
FLOOR_RELATIVE = 2e-5  # of the largest logit: what roundings of fp32 alone explain (verify.FLOOR_RELATIVE)
CEILING_RELATIVE = 0.25
"""Of the largest logit. An engine whose root mean square is past it after a rounding has no answer to check."""
SEED = 20261202
SIGNS = np.array([-1, 1], np.float32)
OTHER_CUTS = (Cut(rows_max=3, chunk_tokens=16), Cut(rows_max=1))
PROMPT_TOKENS_MAX = 64  # of the goldens that the other cuts read again


def record(
    backend: OpenBackend, goldens: Sequence[Golden], *, bound: float | None
) -> tuple[tuple[Golden, ...], Tolerance]:
    """`goldens` with the statistics that `backend` gives, and how far a later replay may be from them.

    `bound` None: it follows from what rounding does to this engine, which is measured here (quantised kernels amplify
    it). Raises AccuracyError when the engine does not agree with itself.
    """
    found: list[list[LogitStatistics]] = [[] for _ in goldens]
    for place, answer in enumerate(replay(backend, goldens, AT_ONCE)):
        found[answer.golden].append(statistics_of(answer.logits, place))
    recorded = tuple(
        msgspec.structs.replace(golden, statistics=tuple(statistics))
        for golden, statistics in zip(goldens, found, strict=True)
    )
    if bound is not None:
        spread = max((position.difference for position in _compare(backend, recorded, OTHER_CUTS[:1])), default=0.0)
        _check_agreement(spread, bound)
        return recorded, Tolerance(bound=bound, spread=spread)
    return recorded, _measured(backend, recorded)


def _measured(backend: OpenBackend, goldens: Sequence[Golden]) -> Tolerance:
    """Of an engine that amplifies rounding. Raises AccuracyError."""
    scale = max(1.0, *(scale_of(np.array(entry.logits)) for golden in goldens for entry in golden.statistics))
    longest = max(len(golden.prompt) + len(golden.output) for golden in goldens)
    batched = _compare(backend, goldens, OTHER_CUTS)
    jittered = _compare(_Jittering(backend, longest), goldens, OTHER_CUTS)
    rms = math.sqrt(sum(position.difference**2 for position in jittered) / len(jittered))
    _check_agreement(rms, CEILING_RELATIVE * scale)
    spread = max(position.difference for position in (*batched, *jittered))
    turned = sum(position.is_turned for position in jittered) / len(jittered)
    positions = sum(len(golden.output) for golden in goldens)
    floor = FLOOR_RELATIVE * scale
    return Tolerance(
        bound=max(WORST_FACTOR * spread, floor),
        spread=spread,
        bound_rms=max(RMS_FACTOR * rms, floor),
        tokens_missed_max=math.ceil(RMS_FACTOR * turned * positions) + TOKENS_SPARE,
    )


def _check_agreement(difference: float, limit: float) -> None:
    if difference > limit:
        raise AccuracyError(
            f"the engine's logits differ by {difference:.2g} when the same prompts are batched or rounded otherwise, "
            f"the bound is {limit:.2g}. Nothing was published: use another --precision, or report the model and its "
            "exporter with their versions"
        )


class _Jittering:
    """A backend whose cached keys and values another processor seems to have rounded; `length` positions of each."""

    def __init__(self, backend: OpenBackend, length: int) -> None:
        self._backend = backend
        self._length = length
        self._rng = np.random.default_rng(SEED)

    @property
    def limits(self) -> Limits:
        return self._backend.limits

    def step(self, plan: StepPlan) -> Logits:
        logits = self._backend.step(plan)
        rows = max(row.slot for row in plan.rows) + 1
        for cache in self._backend.caches:
            used = cache[:rows, :, : self._length]
            used *= 1 + max(JITTER, np.finfo(cache.dtype).eps) * self._rng.choice(SIGNS, used.shape[1:])
        return logits

    def close(self) -> None:
        """The backend is its owner's."""


def parts_of(content: Content) -> tuple[Part, ...]:
    """What a build of `content` has shown: the first of the version's checks."""
    counted = {
        FILES: len(content.files),
        TOKENIZER: len(content.text_goldens),
        CHAT: len(content.chat_goldens),
        TOKENS: sum(len(golden.output) for golden in content.goldens),
    }
    if content.encoder is not None:
        counted |= {TOKENIZER: len(content.encoder.texts), OUTPUTS: len(content.encoder.goldens)}
    if content.tensors is not None:
        counted[OUTPUTS] = len(content.tensors.goldens)
    parts = [Part(name=name, checked=count, missed=0) for name, count in counted.items() if count]
    if content.tolerance is not None:
        parts.append(
            Part(
                name=STATISTICS,
                checked=sum(len(golden.statistics) for golden in content.goldens),
                missed=0,
                worst=content.tolerance.spread,
                bound=content.tolerance.bound,
                detail="of the build from itself, batched otherwise",
            )
        )
    return tuple(parts)


@dataclass(frozen=True, slots=True)
class _Position:
    """The worst statistic of a position, and whether another token wins there."""

    difference: float
    is_turned: bool


def _compare(backend: Backend, goldens: Sequence[Golden], cuts: Sequence[Cut]) -> list[_Position]:
    """Every position when the goldens go through the engine in other company."""
    short = [golden for golden in goldens if len(golden.prompt) <= PROMPT_TOKENS_MAX] or list(goldens[:1])
    found = []
    for cut in cuts:
        for answer in replay(backend, short, cut):
            recorded = short[answer.golden].statistics[answer.output]
            is_turned = int(answer.logits.argmax()) != recorded.ids[0]
            found.append(_Position(worst_difference(answer.logits, recorded).value, is_turned))
    return found
