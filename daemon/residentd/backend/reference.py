"""A toy language model in numpy: deterministic, fast, and with physical KV slots, so that contamination shows.

Each cached position holds a mix of its token and place; the next token is a hash of the sum over the whole prefix as
the slot holds it. One wrong, missing or foreign cache entry therefore changes every later token. `next_token` says the
same from the tokens alone: the oracle of every test that runs on this backend.
"""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt

from residentd.backend.base import Logits
from residentd.errors import BackendLostError, StepRetryableError, StoreError
from residentd.models.manifest import Engine
from residentd.types import Limits, StepPlan

MODEL_BYTES_MAX = 1 << 16
STEP_MS_MAX = 60_000

_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio, odd: SplitMix64's increment
_FINAL = np.uint64(0xBF58476D1CE4E5B9)  # SplitMix64's first multiplier
_SHIFT = np.uint64(31)

Int64 = npt.NDArray[np.int64]
Uint64 = npt.NDArray[np.uint64]
Fault = Callable[[StepPlan], None]
"""Called before each step computes; may raise, sleep or end the process."""


class PlannedFault(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Happens in every step whose number since the load is `step`, or that reads the token `token`."""

    kind: Literal["crash", "hang", "lost", "retryable", "error"]
    step: int | None = None
    token: int | None = None


class ReferenceModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The engine file. The logits of the next token t are peaks[0] at t, peaks[1] at t + 1, …, and 0 elsewhere.

    Tokens below `first` are never produced: ids of bytes or control tokens that a test wants to keep out.
    """

    seed: int = 0
    peaks: tuple[float, ...] = (16.0,)
    first: int = 0
    step_ms: float = 0.0
    faults: tuple[PlannedFault, ...] = ()


class ReferenceBackend:
    """Implements backend.base.Backend. Copes with any number of slots; a step costs a few microseconds a row."""

    def __init__(self, model: ReferenceModel, limits: Limits, *, fault: Fault | None = None) -> None:
        assert 0 < len(model.peaks) <= limits.vocab - model.first, "peaks and first leave no token to produce"
        self._model = model
        self._limits = limits
        self._fault = fault or _planned(model.faults)
        self._stride = limits.capacity + 1  # the extra place lets a full slot's end be an index, too
        self._cache = np.zeros(limits.slots * self._stride, np.uint64)
        self._logits = np.zeros((limits.slots, limits.vocab), np.float32)
        self._set: tuple[Int64, Int64] | None = None
        self._peaks = np.array(model.peaks, np.float32)
        self._offsets = np.arange(len(model.peaks))

    @property
    def limits(self) -> Limits:
        return self._limits

    def step(self, plan: StepPlan) -> Logits:
        self._fault(plan)
        if self._model.step_ms:
            time.sleep(self._model.step_ms / 1000)
        lengths = np.array([len(row.tokens) for row in plan.rows])
        first = np.array([row.slot for row in plan.rows]) * self._stride
        starts = np.array([row.start for row in plan.rows])
        self._check(first, starts, lengths)
        self._write(plan, first, starts, lengths)
        samples = np.array([row.samples for row in plan.rows], bool)
        return self._fill(self._sums(first[samples], (first + starts + lengths)[samples]))

    def close(self) -> None:
        """Nothing is held."""

    def _check(self, first: Int64, starts: Int64, lengths: Int64) -> None:
        limits = self._limits
        assert len(set(first.tolist())) == first.size > 0, "a step has rows, and at most one a slot"
        assert 0 <= first.min() <= first.max() < limits.slots * self._stride, "a slot beyond the model's"
        assert lengths.min() > 0, "a row without tokens"
        assert starts.min() >= 0, "a position before the sequence"
        assert (starts + lengths).max() <= limits.capacity, "a row past its slot's capacity"
        assert lengths.sum() <= limits.step_tokens_max, "more tokens than step_tokens_max"

    def _write(self, plan: StepPlan, first: Int64, starts: Int64, lengths: Int64) -> None:
        tokens = np.array(list(itertools.chain.from_iterable(row.tokens for row in plan.rows)), np.uint64)
        packed = np.arange(tokens.size)
        positions = packed + (starts - lengths.cumsum() + lengths).repeat(lengths)
        self._cache[positions + first.repeat(lengths)] = mix(tokens, positions.astype(np.uint64))

    def _sums(self, begins: Int64, ends: Int64) -> Uint64:
        """The sum of the cache over each [begin, end), in one pass over the slots between the first and the last."""
        if begins.size == 0:
            return np.zeros(0, np.uint64)
        order = begins.argsort()
        bounds = np.stack([begins[order], ends[order]], axis=1).reshape(-1)
        sums = np.empty(begins.size, np.uint64)
        sums[order] = np.add.reduceat(self._cache[: bounds[-1] + 1], bounds)[::2]
        return sums

    def _fill(self, sums: Uint64) -> Logits:
        if self._set is not None:
            self._logits[self._set] = 0
        tokens = _choose(sums, self._model, self._limits.vocab)
        rows = np.arange(sums.size)[:, None]
        span = self._limits.vocab - self._model.first
        columns = self._model.first + (tokens[:, None] - self._model.first + self._offsets) % span
        self._logits[rows, columns] = self._peaks
        self._set = (rows, columns)
        return self._logits[: sums.size]


def load(directory: Path, engine: Engine) -> ReferenceBackend:
    """The backend of a version in the store. Raises StoreError."""
    path = directory / engine.path
    try:
        with path.open("rb") as file:
            model = msgspec.json.decode(file.read(MODEL_BYTES_MAX), type=ReferenceModel)
    except (OSError, msgspec.DecodeError) as error:
        raise StoreError(f"the toy model cannot be read ({error}). Install the version again") from error
    if not 0 <= model.step_ms <= STEP_MS_MAX:
        raise StoreError(f"the toy model's step_ms is {model.step_ms}; 0 to {STEP_MS_MAX} are allowed")
    limits = engine.limits
    return ReferenceBackend(model, Limits(limits.slots, limits.context, limits.step_tokens_max, limits.vocab))


def next_token(prefix: Sequence[int], model: ReferenceModel, vocab: int) -> int:
    """The greedy token after `prefix`, from the tokens alone."""
    positions = np.arange(len(prefix), dtype=np.uint64)
    total = mix(np.array(prefix, np.uint64), positions).sum(dtype=np.uint64)
    return int(_choose(np.array([total], np.uint64), model, vocab)[0])


def continuation(prompt: Sequence[int], count: int, model: ReferenceModel, vocab: int) -> tuple[int, ...]:
    """The `count` greedy tokens after `prompt`."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens, model, vocab))
    return tuple(tokens[len(prompt) :])


def mix(tokens: Uint64, positions: Uint64) -> Uint64:
    mixed = (tokens + np.uint64(1)) * _MULTIPLIER + (positions + np.uint64(1)) * _FINAL
    mixed ^= mixed >> _SHIFT
    return mixed * _MULTIPLIER


def _choose(sums: Uint64, model: ReferenceModel, vocab: int) -> Int64:
    mixed = (sums ^ np.uint64(model.seed)) * _FINAL
    mixed ^= mixed >> _SHIFT
    return model.first + (mixed % np.uint64(vocab - model.first)).astype(np.int64)


def _planned(faults: tuple[PlannedFault, ...]) -> Fault:
    done = 0

    def happen(plan: StepPlan) -> None:
        nonlocal done
        done += 1
        for fault in faults:
            if fault.step == done or (fault.token is not None and _reads(plan, fault.token)):
                carry_out(fault)

    return happen


def _reads(plan: StepPlan, token: int) -> bool:
    return any(token in row.tokens for row in plan.rows)


def carry_out(fault: PlannedFault) -> None:
    match fault.kind:
        case "crash":
            os.kill(os.getpid(), signal.SIGKILL)
        case "hang":
            threading.Event().wait()
        case "lost":
            raise BackendLostError("the toy model lost its backend, as planned")
        case "retryable":
            raise StepRetryableError("the toy model asks for the step again, as planned")
        case "error":
            raise RuntimeError("the toy model met a bug, as planned")
