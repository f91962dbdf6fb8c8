"""Values of models that answer in one run: what a call brings and what it gets. Frozen, plain."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, TypeAlias

from residentd.types import RequestId

ITEM_BYTES: Final[Mapping[str, int]] = MappingProxyType(
    {
        "bool": 1,
        "int8": 1,
        "uint8": 1,
        "int16": 2,
        "uint16": 2,
        "float16": 2,
        "int32": 4,
        "uint32": 4,
        "float32": 4,
        "int64": 8,
        "uint64": 8,
        "float64": 8,
    }
)


@dataclass(frozen=True, slots=True)
class TextRow:
    """Token ids of one text or pair, special tokens included. `types` empty: all 0."""

    ids: tuple[int, ...]
    types: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Tensor:
    """`data` is row-major, little-endian, and exactly as long as shape and dtype say."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: bytes

    @property
    def bytes_expected(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


Value: TypeAlias = bytes | tuple[Tensor, ...]
"""The answer for one piece of a call: float32 numbers of a text, little-endian; or the outputs for tensors."""


@dataclass(frozen=True, slots=True)
class Call:
    """One request, as the engine sees it: texts, or tensors and the names of the outputs that are wanted.

    `places` says which of the request's pieces are asked for: `rows` has one for each, and tensors are piece 0 alone.
    Those that were delivered before a worker was lost are not asked for again. `deadline_ms` is on the clock that is
    passed to `Batcher.expire`.
    """

    id: RequestId
    places: tuple[int, ...]
    rows: tuple[TextRow, ...] = ()
    tensors: tuple[Tensor, ...] = ()
    outputs: tuple[str, ...] = ()  # empty: all
    deadline_ms: int | None = None
    resumed: int = 0  # times a worker was lost under it


@dataclass(frozen=True, slots=True)
class RunRecord:
    """What one run did, for metrics and tests: proof by counts, not by wall time. `weight` includes padding."""

    run: int
    rows: int
    weight: int
    elapsed_us: int
    waiting: int
    ids: tuple[RequestId, ...] = ()
