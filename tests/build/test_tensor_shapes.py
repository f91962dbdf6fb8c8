"""Sizes of free axes that nobody named: how many are tried, in how much memory, and what their failure is."""

from __future__ import annotations

import itertools
import tracemalloc
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from residentd.backend.graph import GraphError
from residentd.errors import MachineError, SourceError, StepRetryableError
from residentd.models.encoder import TensorSpec
from residentd_build.encoders import tensor_source
from residentd_build.encoders.tensor_source import TRIES_MAX, shapes_that_run

PEAK_BYTES_MAX = 64 << 20  # of it 50 are the largest inputs that are tried


class Picky:
    """A graph that runs where `wants` holds of the shapes of its inputs, and counts what it is asked."""

    def __init__(self, wants: Any, error: Exception | None = None) -> None:
        self.wants, self.error, self.asked = wants, error or GraphError("other sizes, please"), 0

    def run(self, feeds: Mapping[str, Any], _outputs: Sequence[str]) -> list[Any]:
        self.asked += 1
        if not self.wants([array.shape for array in feeds.values()]):
            raise self.error
        return []

    def close(self) -> None:
        """Nothing is held."""


def source(*shapes: tuple[int | str, ...]) -> Any:
    specs = [TensorSpec(name=f"x{place}", dtype="float32", shape=shape) for place, shape in enumerate(shapes)]
    return SimpleNamespace(inputs=specs, outputs=specs[:1], file=SimpleNamespace(path="model.onnx"))


@pytest.mark.parametrize("axes", [6, 200])
def test_many_free_axes_are_tried_within_the_limits(axes: int) -> None:
    """15 sizes of 200 axes are more than anybody counts: no more tries than TRIES_MAX, and no list of all."""
    graph = Picky(lambda _shapes: False)
    tracemalloc.start()
    try:
        with pytest.raises(SourceError, match="--shape"):
            shapes_that_run(graph, source(*(("n", f"len{place}") for place in range(axes))), {})
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert graph.asked == TRIES_MAX
    assert peak < PEAK_BYTES_MAX


def test_many_free_axes_that_take_any_size_are_found_at_once() -> None:
    """Of 200 inputs, with their own axes each."""
    graph = Picky(lambda _shapes: True)
    shapes, _ = shapes_that_run(graph, source(*((f"b{place}", f"c{place}") for place in range(200))), {})
    assert graph.asked == 1
    assert set(shapes.values()) == {(1, 64)}


def test_time_ends_the_tries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them may take long."""
    clock = itertools.count(0, 25)
    monkeypatch.setattr(tensor_source, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    graph = Picky(lambda _shapes: False)
    with pytest.raises(SourceError):
        shapes_that_run(graph, source(("n", "a", "b")), {})
    assert graph.asked == 2


def test_sizes_that_are_too_large_are_no_tries() -> None:
    """Five axes of 64 are 4 GB; the first that is small enough is tried first."""
    graph = Picky(lambda shapes: shapes[0] == (1, 16, 16, 16, 16, 16))
    shapes, _ = shapes_that_run(graph, source(("n", "a", "b", "c", "d", "e")), {})
    assert shapes == {"x0": (1, 16, 16, 16, 16, 16)}
    assert graph.asked <= 4


def test_sizes_that_the_memory_does_not_hold_are_the_machines_fault() -> None:
    """Not the model's, where nothing else runs; where a smaller one does, that is taken."""
    lacking = StepRetryableError("a run of the export ran out of memory (bad_alloc)")
    with pytest.raises(MachineError, match="ran out of memory") as caught:
        shapes_that_run(Picky(lambda _shapes: False, lacking), source(("n", "a")), {})
    assert not isinstance(caught.value, StepRetryableError)
    shapes, _ = shapes_that_run(Picky(lambda shapes: shapes[0][1] < 20, lacking), source(("n", "a")), {})
    assert shapes == {"x0": (1, 16)}
