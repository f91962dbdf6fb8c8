"""The contract of a graph that answers in one run: named arrays in, arrays out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

Array: TypeAlias = npt.NDArray[Any]
Floats: TypeAlias = npt.NDArray[np.float32]


class GraphError(Exception):
    """The runtime refused this run of the graph; the next may be right. The text carries no path."""


class Graph(Protocol):
    """A loaded graph. `run` gives the arrays of `outputs` in their order. Used by one thread.

    Raises GraphError, StepRetryableError (out of memory: may pass) or BackendLostError.
    """

    def run(self, feeds: Mapping[str, Array], outputs: Sequence[str]) -> list[Array]: ...

    def close(self) -> None: ...
