"""A step plan as the packed arrays that an engine reads: all new tokens of all rows, one after the other."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from residentd.types import Limits, Row

Int64 = npt.NDArray[np.int64]
Int32 = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class StepArrays:
    """T new tokens, of which R yield logits; B slots, up to the highest one in use, with at most S queries each.

    Views into the buffers of the `StepArranger` that made them, valid until its next call.
    """

    input_ids: Int64  # [1, T]
    position_ids: Int64  # [1, T]
    pack_index: Int64  # [B, S]: packed index of a slot's i-th query; 0 where there is none
    unpack_index: Int64  # [T]: slot * S + i
    query_lengths: Int32  # [B]: queries of each slot; 0 when idle
    seqlens_k: Int32  # [B]: length after the step, less one; 0 when idle
    logits_index: Int64  # [R]: packed indices of the last tokens of the sampling rows, in the plan's order

    @property
    def slots_used(self) -> int:
        return int(self.query_lengths.shape[0])


LONE_QUERY_PERIOD = 8
"""A query stands alone where its row's length is 1 past a multiple of the kernel's block of queries.

The block is twice the head size, or what fits the cache (onnxruntime gqa_attention_base.h, 1.32). 8 divides every one
met so far; the tests of built engines compare bits.
"""


def queries_count(length: int, *, exact: bool) -> int:
    """Queries that a row of `length` tokens asks."""
    return length + (exact and length % LONE_QUERY_PERIOD == 1)


def runs_that_fit(rows: Sequence[Row], capacity: int, *, exact: bool) -> tuple[tuple[Row, ...], ...]:
    """`rows` in as few runs as keep every row's start plus its run's width within `capacity`; nearly always one.

    ONNX Runtime refuses a run whose padding would not fit behind a slot's cached tokens, though it writes none of it.
    The widest row of any run fits, so each run takes at least one row.
    """
    runs: list[tuple[Row, ...]] = []
    left = tuple(rows)
    while left:
        width = max(queries_count(len(row.tokens), exact=exact) for row in left)
        if max(row.start for row in left) + width <= capacity:
            return (*runs, left)
        runs.append(tuple(row for row in left if row.start + width <= capacity))
        left = tuple(row for row in left if row.start + width > capacity)
        assert runs[-1], "a row past its slot's capacity"
    return tuple(runs)


class StepArranger:
    """Arranges plans within `limits`. Owns its buffers; nothing is allocated per step in proportion to the model.

    `exact`: where ONNX Runtime would take a row's last query alone, it is asked twice; the copy's K/V lands one place
    past the row's end and its answer is dropped. One query is multiplied by another kernel than several, which rounds
    differently (|Δlogit| 5e-5 on SmolLM2-135M, 1.32.0). Then decode, chunks of any size and mixed steps are bit-equal.
    """

    def __init__(self, limits: Limits, *, exact: bool = False) -> None:
        tokens, slots = limits.step_tokens_max, limits.slots
        self._limits = limits
        self._exact = exact
        self._ids = np.zeros((1, tokens), np.int64)
        self._positions = np.zeros((1, tokens), np.int64)
        self._unpack = np.zeros(tokens, np.int64)
        self._pack = np.zeros(slots * (tokens + exact), np.int64)
        self._query_lengths = np.zeros(slots, np.int32)
        self._seqlens_k = np.zeros(slots, np.int32)
        self._logits_index = np.zeros(slots, np.int64)
        self._packed = np.arange(tokens, dtype=np.int64)

    def arrange(self, rows: Sequence[Row]) -> StepArrays:
        """The arrays of a plan's rows. Rows outside the limits or of one slot twice are our own bug."""
        lengths = np.array([len(row.tokens) for row in rows])
        slots = np.array([row.slot for row in rows])
        starts = np.array([row.start for row in rows])
        self._check(slots, starts, lengths)
        last = lengths.cumsum() - 1
        queries = lengths + (lengths % LONE_QUERY_PERIOD == 1) if self._exact else lengths
        tokens, width = int(last[-1]) + 1, int(queries.max())
        used = int(slots.max()) + 1

        packed = self._packed[:tokens]
        ids, positions, unpack = self._ids[:, :tokens], self._positions[:, :tokens], self._unpack[:tokens]
        ids[0] = list(itertools.chain.from_iterable(row.tokens for row in rows))
        first = last + 1 - lengths
        np.add(packed, (starts - first).repeat(lengths), out=positions[0])
        np.add(packed, (slots * width - first).repeat(lengths), out=unpack)
        pack = self._pack[: used * width]
        pack.fill(0)
        pack[unpack] = packed
        repeated = queries > lengths
        pack[slots[repeated] * width + lengths[repeated]] = last[repeated]

        query_lengths, seqlens_k = self._query_lengths[:used], self._seqlens_k[:used]
        query_lengths.fill(0)
        seqlens_k.fill(0)
        query_lengths[slots] = queries
        seqlens_k[slots] = starts + queries - 1
        sampling = last[[row.samples for row in rows]]
        logits_index = self._logits_index[: sampling.size]
        logits_index[:] = sampling
        return StepArrays(ids, positions, pack.reshape(used, width), unpack, query_lengths, seqlens_k, logits_index)

    def _check(self, slots: Int64, starts: Int64, lengths: Int64) -> None:
        limits = self._limits
        assert 0 < slots.size <= limits.slots, "a step has between one row and one row a slot"
        assert slots.min() >= 0, "a slot is counted from 0"
        assert np.bincount(slots, minlength=limits.slots).max() == 1, "a slot has at most one row in a step"
        assert slots.max() < limits.slots, "a slot beyond the engine's"
        assert lengths.min() > 0, "a row without tokens"
        assert lengths.sum() <= limits.step_tokens_max, "more tokens than step_tokens_max"
        assert starts.min() >= 0, "a position before the sequence"
        assert (starts + lengths).max() <= limits.capacity, "a row past its slot's capacity"
