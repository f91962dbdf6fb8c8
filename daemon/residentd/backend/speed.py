"""How fast a loaded engine steps: tokens a second, for the operator's listing and for `--precision auto`."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import numpy as np

from residentd.backend.base import Backend
from residentd.models.checks import Speeds
from residentd.types import RequestId, Row, StepPlan

ROWS_MAX: Final = 8  # of a decode step
PROMPT_TOKENS: Final = 256
HISTORY_TOKENS: Final = 32  # before a row's first decode step
STEPS: Final = 24
PREFILLS: Final = 3
SECONDS_MAX: Final = 10.0  # of each of the three; one step more may begin before
UNDISTURBED_PERCENTILE: Final = 25.0  # of the seconds of steps: other processes slow the rest, or may

Clock = Callable[[], float]


def measure_speeds(backend: Backend, tokens: Sequence[int], clock: Clock = time.perf_counter) -> Speeds:
    """Steps of one row, of ROWS_MAX rows and of a prompt, made of `tokens`, over whatever the slots hold.

    Takes some 50 steps, and half a minute at most where a step takes less than that. Raises what a step raises.
    """
    limits = backend.limits
    text = list(itertools.islice(itertools.cycle(tokens or (0,)), PROMPT_TOKENS + STEPS))
    prompt = tuple(text[: min(PROMPT_TOKENS, limits.step_tokens_max, limits.capacity)])
    rows = min(ROWS_MAX, limits.slots, limits.step_tokens_max)
    return Speeds(
        decode_one=_rate(1, _decodes(backend, text, 1, clock)),
        decode_many=_rate(rows, _decodes(backend, text, rows, clock)),
        rows=rows,
        prefill=_rate(len(prompt), _timed(backend, ((_row(0, 0, prompt),) for _ in range(PREFILLS)), clock)),
    )


def _decodes(backend: Backend, text: Sequence[int], rows: int, clock: Clock) -> Iterator[float]:
    """Seconds of steps of `rows` rows that go on after the same few tokens."""
    history = min(HISTORY_TOKENS, max(0, backend.limits.capacity - STEPS))
    part = max(1, backend.limits.step_tokens_max // rows)
    for start in range(0, history, part):
        tokens = tuple(text[start : min(start + part, history)])
        backend.step(StepPlan(-1, tuple(_row(slot, start, tokens) for slot in range(rows))))
    places = range(history, min(history + STEPS, backend.limits.capacity))
    steps = (tuple(_row(slot, place, (text[place],)) for slot in range(rows)) for place in places)
    yield from _timed(backend, steps, clock)


def _timed(backend: Backend, steps: Iterator[tuple[Row, ...]], clock: Clock) -> Iterator[float]:
    started = clock()
    for rows in steps:
        begun = clock()
        backend.step(StepPlan(-1, rows))
        yield clock() - begun
        if clock() - started > SECONDS_MAX:
            return


def _row(slot: int, start: int, tokens: tuple[int, ...]) -> Row:
    return Row(RequestId(slot), slot, start, tokens, samples=True)


def _rate(tokens: int, seconds: Iterator[float]) -> float:
    """Tokens a second of the step at the edge of the fastest quarter."""
    return tokens / max(float(np.percentile(list(seconds) or [math.inf], UNDISTURBED_PERCENTILE)), 1e-9)
