"""How much prefill the next step may carry: sized from measured step costs, so that decodes keep their pace.

Pure: the caller measures; nothing here reads a clock.

The model is cost(decode rows, prefill tokens) = decode_us(rows) + prefill_token_us * tokens. Both terms are medians of
the last few measurements, so that single hiccups count for nothing. Measurements need no separate phase:
- a step without prefill measures decode_us;
- where prefill never pauses, one step in PROBE_STEPS carries a single prefill token, the least there is;
- any other mixed step measures prefill_token_us around the chunk size in use.
Two decode steps in a row, or two mixed ones, that miss their prediction by SURPRISE in the same direction mean another
machine (a neighbour, a clock, a longer context): everything learnt is forgotten, and learning anew takes PROBES_MIN
probes and a few doubling chunks. One surprising decode step asks for a probe at once, to know soon.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Collection
from typing import Final, TypeVar

from residentd.errors import OperatorError
from residentd.types import StepRecord

SLOWDOWN: Final = 2.5
"""A mixed step aims at this multiple of a decode step. 3 is allowed at the 95th percentile; the rest is for noise."""

CHUNK_TOKENS_MIN: Final = 8
"""Prefill progresses by this much whatever it costs; smaller chunks measure nothing either."""

PROBE_STEPS: Final = 32
PROBE_TOKENS: Final = 1
PROBES_MIN: Final = 3
"""A first measurement may be a hiccup, and decodes that look too dear let chunks grow: until the median of so many is
known, every other step is a probe."""

SURPRISE: Final = 1.5
WINDOW: Final = 9


_Value = TypeVar("_Value", float, tuple[int, int])


class Profile(enum.StrEnum):
    """What a step's prefill is sized for."""

    THROUGHPUT = "throughput"  # as large as allowed
    INTERACTIVE = "interactive"  # as large as the decodes' pace allows


class StepKind(enum.Enum):
    """What a step beside decodes measures."""

    DECODE = enum.auto()  # the decodes by themselves: no prefill, or a probe
    MIXED = enum.auto()  # prefill on top of them


class Pacer:
    """Answers the prefill budget of the next step; owns what it learnt from the steps before."""

    def __init__(self, *, profile: Profile, prefill_tokens_max: int, slowdown: float = SLOWDOWN) -> None:
        if prefill_tokens_max < 1:
            raise OperatorError(f"prefill_tokens_max is {prefill_tokens_max:,}; at least 1 is needed. Raise it")
        if slowdown <= 1:
            raise OperatorError(f"slowdown is {slowdown}; more than 1 is needed, as prefill costs something. Raise it")
        self.profile = profile
        self._prefill_tokens_max = prefill_tokens_max
        self._slowdown = slowdown
        self._costs = StepCosts()
        self._surprises = dict.fromkeys(StepKind, 0)  # of the last step of each kind: dearer 1, cheaper -1

    def prefill_budget(self, decode_rows: int) -> int:
        """Prefill tokens that the next step may carry beside `decode_rows` decodes; at least 1."""
        if self.profile is Profile.THROUGHPUT or decode_rows == 0:
            return self._prefill_tokens_max
        decode_us = self._costs.decode_us(decode_rows)
        if decode_us is None or self._costs.decode_age(decode_rows) >= self._probe_steps(decode_rows):
            return PROBE_TOKENS
        chunk = CHUNK_TOKENS_MIN
        token_us = self._costs.prefill_token_us
        if token_us is not None:
            affordable = (self._slowdown - 1) * decode_us / max(token_us, 1e-9)
            chunk = max(chunk, int(min(affordable, 2 * self._costs.chunk_tokens_max)))
        return min(chunk, self._prefill_tokens_max)

    def _probe_steps(self, decode_rows: int) -> int:
        doubt = self._surprises[StepKind.DECODE] != 0 or self._costs.decode_samples(decode_rows) < PROBES_MIN
        return 1 if doubt else PROBE_STEPS

    def observe(self, record: StepRecord) -> None:
        """Learn from a committed step."""
        if self.profile is Profile.THROUGHPUT or record.decode_rows == 0:
            return
        kind, surprise = kind_of(record), self._surprise_of(record)
        if surprise and surprise == self._surprises[kind]:
            self._costs = StepCosts()
        self._surprises[kind] = surprise
        self._costs.add(record)

    def _surprise_of(self, record: StepRecord) -> int:
        predicted_us = self._costs.predict_us(record)
        if predicted_us is None:
            return 0
        return (record.elapsed_us > predicted_us * SURPRISE) - (record.elapsed_us * SURPRISE < predicted_us)


class StepCosts:
    """What steps cost lately: decode steps by their number of rows, and one prefill token on top of them."""

    def __init__(self) -> None:
        self._decodes: dict[int, deque[tuple[int, int]]] = {}  # by bucket: elapsed_us, prefill tokens in it (0 or 1)
        self._decode_seen: dict[int, int] = {}
        self._token_us: deque[float] = deque(maxlen=WINDOW)
        self._chunk_tokens: deque[int] = deque(maxlen=WINDOW)
        self._steps = 0

    @property
    def prefill_token_us(self) -> float | None:
        return _median(self._token_us)

    @property
    def chunk_tokens_max(self) -> int:
        """The largest chunk behind `prefill_token_us`, which says nothing about chunks far beyond it."""
        return max(self._chunk_tokens, default=0)

    def decode_us(self, rows: int) -> float | None:
        """What a step of `rows` decodes costs; a probe's token is taken off as soon as its price is known."""
        decode = _median(self._decodes.get(bucket(rows), ()))
        return None if decode is None else decode[0] - decode[1] * (self.prefill_token_us or 0)

    def decode_samples(self, rows: int) -> int:
        """Measurements behind `decode_us(rows)`, at most WINDOW."""
        return len(self._decodes.get(bucket(rows), ()))

    def decode_age(self, rows: int) -> int:
        """Steps since `decode_us(rows)` was last measured."""
        return self._steps - self._decode_seen.get(bucket(rows), 0)

    def predict_us(self, record: StepRecord) -> float | None:
        """What a step like `record` should cost; None while that is unknown."""
        decode_us, token_us = self.decode_us(record.decode_rows), self.prefill_token_us
        if decode_us is None or (token_us is None and kind_of(record) is StepKind.MIXED):
            return None
        return decode_us + (token_us or 0) * record.prefill_tokens

    def add(self, record: StepRecord) -> None:
        self._steps += 1
        key = bucket(record.decode_rows)
        if kind_of(record) is StepKind.DECODE:
            window = self._decodes.setdefault(key, deque(maxlen=WINDOW))
            window.append((record.elapsed_us, record.prefill_tokens))
            self._decode_seen[key] = self._steps
        elif record.prefill_tokens >= CHUNK_TOKENS_MIN and (decode := _median(self._decodes.get(key, ()))) is not None:
            slope = (record.elapsed_us - decode[0]) / (record.prefill_tokens - decode[1])
            self._token_us.append(slope)
            self._chunk_tokens.append(record.prefill_tokens)


def kind_of(record: StepRecord) -> StepKind:
    return StepKind.DECODE if record.prefill_tokens <= PROBE_TOKENS else StepKind.MIXED


def bucket(rows: int) -> int:
    """The largest number of rows that is measured together with `rows`, two of them an octave."""
    octave = 1 << (rows - 1).bit_length()  # 1 2 3 4 6 8 12 16 24 32 …: within a bucket, rows differ by less than half
    return octave * 3 // 4 if rows <= octave * 3 // 4 else octave


def _median(values: Collection[_Value]) -> _Value | None:
    """The lower one of two: hiccups make steps dearer, never cheaper."""
    return sorted(values)[(len(values) - 1) // 2] if values else None
