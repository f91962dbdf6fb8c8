"""Goldens replayed through the backend that will serve: the last check before READY."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from residentd.backend.base import Backend
from residentd.backend.replay import AT_ONCE, Answer, Cut, replay
from residentd.models.checks import STATISTICS, STATISTICS_RMS, TOKENS, Part
from residentd.models.manifest import Content, Golden, LogitStatistics, Tolerance
from residentd.models.statistics import is_clear, worst_difference
from residentd.types import RequestId, Row, StepPlan


@dataclass(slots=True)
class _Tally:
    """Grows with each position."""

    checked: int = 0
    missed: int = 0
    worst: float = 0.0
    squares: float = 0.0
    detail: str = ""


def probe(backend: Backend, content: Content, cut: Cut = AT_ONCE) -> tuple[Part, ...]:
    """Replay every golden and compare tokens and, where they were recorded, the statistics of the logits.

    Without goldens one step runs all the same: READY is never said of an engine that has not computed.
    """
    goldens, tolerance = content.goldens, content.tolerance
    if not any(golden.output for golden in goldens):
        backend.step(StepPlan(step=-1, rows=(Row(RequestId(0), 0, 0, (0,), samples=True),)))
        return ()
    tokens, statistics = _Tally(), _Tally()
    bound = 0.0 if tolerance is None else tolerance.bound
    # Within its noise a quantised build has hardly a token that wins clearly: all count, and some may be turned.
    unclear = 0.0 if tolerance is None or tolerance.bound_rms else bound
    for answer in replay(backend, goldens, cut):
        golden = goldens[answer.golden]
        recorded = golden.statistics[answer.output] if golden.statistics else None
        _count_token(tokens, answer, golden, recorded, unclear)
        if recorded is not None:
            _count_statistics(statistics, answer, recorded, bound)
    missed_max = 0 if tolerance is None else tolerance.tokens_missed_max
    return tuple(_parts(tokens, statistics, missed_max=missed_max, tolerance=tolerance))


def _count_token(tally: _Tally, answer: Answer, golden: Golden, recorded: LogitStatistics | None, bound: float) -> None:
    """Only where `bound` lets no other token win does the engine's choice mean anything; 0: everywhere."""
    if bound and recorded is not None and not is_clear(recorded, bound):
        return
    expected = golden.output[answer.output] if recorded is None else recorded.ids[0]
    found = int(answer.logits.argmax())
    tally.checked += 1
    if found != expected:
        tally.missed += 1
        tally.detail = tally.detail or f"first: {_place(answer)} is {found} instead of {expected}"


def _count_statistics(tally: _Tally, answer: Answer, recorded: LogitStatistics, bound: float) -> None:
    difference = worst_difference(answer.logits, recorded)
    tally.checked += 1
    tally.missed += difference.value > bound
    tally.squares += difference.value**2
    if difference.value > tally.worst or not tally.detail:
        tally.worst = difference.value
        tally.detail = f"{difference.name}, {_place(answer)}"


def _parts(tokens: _Tally, statistics: _Tally, *, missed_max: int, tolerance: Tolerance | None) -> Iterator[Part]:
    yield Part(name=TOKENS, checked=tokens.checked, missed=tokens.missed, missed_max=missed_max, detail=tokens.detail)
    if not statistics.checked or tolerance is None:
        return
    checked = statistics.checked
    yield Part(
        name=STATISTICS,
        checked=checked,
        missed=statistics.missed,
        worst=statistics.worst,
        bound=tolerance.bound,
        detail=statistics.detail,
    )
    if tolerance.bound_rms:
        rms = math.sqrt(statistics.squares / checked)
        missed = 0 if rms <= tolerance.bound_rms else checked
        yield Part(
            name=STATISTICS_RMS, checked=checked, missed=missed, worst=rms, bound=tolerance.bound_rms, detail="over all"
        )


def _place(answer: Answer) -> str:
    return f"golden {answer.golden + 1}, token {answer.output + 1}"


def longest_golden(goldens: Sequence[Golden]) -> int:
    """Positions that a slot needs for any of `goldens`."""
    return max((len(golden.prompt) + len(golden.output) for golden in goldens), default=1)
