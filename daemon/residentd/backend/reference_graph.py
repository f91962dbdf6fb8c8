"""A toy encoder in numpy: each token's vector is a hash of it and its place, and padding is NaN, so that it shows."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np

from residentd.backend.graph import Array
from residentd.backend.reference import MODEL_BYTES_MAX, STEP_MS_MAX, PlannedFault, carry_out, mix
from residentd.errors import StoreError

SCALE = float(1 << 53)


class ReferenceEncoder(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The engine file. `faults` happen in the run of that number since the load, or that reads that token."""

    width: int
    run_ms: float = 0.0
    row_ms: float = 0.0
    faults: tuple[PlannedFault, ...] = ()


class ReferenceGraph:
    """Implements backend.graph.Graph for input_ids and attention_mask; its one output is [B, S, width]."""

    def __init__(self, model: ReferenceEncoder) -> None:
        self._model = model
        self._runs = 0

    def run(self, feeds: Mapping[str, Array], outputs: Sequence[str]) -> list[Array]:
        ids, mask = feeds["input_ids"], feeds["attention_mask"]
        self._runs += 1
        for fault in self._model.faults:
            if fault.step == self._runs or (fault.token is not None and bool((ids == fault.token).any())):
                carry_out(fault)
        wait_ms = self._model.run_ms + len(ids) * self._model.row_ms
        if wait_ms:
            time.sleep(wait_ms / 1000)
        hidden = token_vectors(ids, self._model.width)
        hidden[mask == 0] = np.nan
        return [hidden for _ in outputs]

    def close(self) -> None:
        """Nothing is held."""


def token_vectors(ids: Array, width: int) -> Array:
    """float32 [..., S, width] in [-1, 1) of int64 ids [..., S]: the oracle of tests that run on this graph."""
    places = np.arange(ids.shape[-1], dtype=np.uint64)
    mixed = mix(ids.astype(np.uint64), places)[..., None]
    numbers = mix(mixed, np.arange(width, dtype=np.uint64)) >> np.uint64(10)
    return (numbers.astype(np.float64) / SCALE - 1).astype(np.float32)


def load(path: Path) -> ReferenceGraph:
    """The graph of a version in the store. Raises StoreError."""
    try:
        with path.open("rb") as file:
            model = msgspec.json.decode(file.read(MODEL_BYTES_MAX), type=ReferenceEncoder)
    except (OSError, msgspec.DecodeError) as error:
        raise StoreError(f"the toy encoder cannot be read ({error}). Install the version again") from error
    if not (0 <= model.run_ms <= STEP_MS_MAX and 0 <= model.row_ms <= STEP_MS_MAX):
        raise StoreError(f"the toy encoder's times are {model.run_ms} and {model.row_ms} ms; at most {STEP_MS_MAX}")
    return ReferenceGraph(model)
