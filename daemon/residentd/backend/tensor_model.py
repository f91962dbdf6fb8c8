"""Plain tensor models over any graph: arrays in, arrays out, and the made-up inputs of their goldens."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import numpy as np

from residentd.backend.graph import Array, Graph
from residentd.calls import Tensor
from residentd.models.encoder import Tensors, TensorSpec

NARROW: Final[Mapping[str, int]] = MappingProxyType({"bool": 1, "int8": 127})
NOISE_MULTIPLIER: Final = 2654435761  # 2^32 / golden ratio (Knuth, TAOCP 6.4)


@dataclass(frozen=True, slots=True)
class TensorModel:
    """One loaded graph."""

    tensors: Tensors
    graph: Graph

    def outputs(self, feeds: Mapping[str, Array], names: Sequence[str] = ()) -> list[Array]:
        """The arrays of `names`, or of all outputs. Raises GraphError and what the graph raises."""
        return self.graph.run(feeds, names or [spec.name for spec in self.tensors.outputs])


def array_of(tensor: Tensor) -> Array:
    """A read-only view of the tensor's bytes."""
    return np.frombuffer(tensor.data, np.dtype(tensor.dtype).newbyteorder("<")).reshape(tensor.shape)


def golden_feeds(
    specs: Sequence[TensorSpec], shapes: Mapping[str, tuple[int, ...]], seed: int, whole_max: int
) -> dict[str, Array]:
    """Contents that are the same on every machine and with every library: integer arithmetic alone.

    Floats are in [-1, 1), whole numbers in 0 … `whole_max`, or as far as their type goes.
    """
    feeds: dict[str, Array] = {}
    for place, spec in enumerate(specs):
        shape = shapes[spec.name]
        counter = np.arange(math.prod(shape), dtype=np.uint64) + np.uint64((seed << 20) + (place << 16) + 1)
        noise = (counter * np.uint64(NOISE_MULTIPLIER)) & np.uint64(0xFFFFFFFF)
        if spec.dtype.startswith("float"):
            numbers = noise.astype(np.float64) / (1 << 31) - 1
        else:
            most = whole_max if spec.dtype not in NARROW else min(whole_max, NARROW[spec.dtype])
            numbers = ((noise >> np.uint64(8)) % np.uint64(most + 1)).astype(np.float64)
        feeds[spec.name] = numbers.astype(spec.dtype).reshape(shape)
    return feeds
