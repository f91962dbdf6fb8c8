"""One graph on ONNX Runtime: how it fails to load, and how a run is ended from outside."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest

from residentd.backend.graph import GraphError
from residentd.backend.onnxruntime_graph import OnnxRuntimeGraph
from residentd.errors import MachineError
from support.tensor_graphs import linear


@pytest.mark.parametrize(
    ("given", "expected"), [({}, "Install the version again"), ({"remedy": "Export it again"}, "Export it again")]
)
def test_what_cannot_be_loaded_says_what_to_do(given: dict[str, str], expected: str, tmp_path: Path) -> None:
    """To whom it may concern: who serves it installs it again, who installs it has to export it again."""
    (tmp_path / "model.onnx").write_bytes(b"no model")
    with pytest.raises(MachineError) as caught:
        OnnxRuntimeGraph(tmp_path / "model.onnx", **given)
    assert str(caught.value).endswith(f". {expected}")
    assert str(tmp_path) not in str(caught.value)


def test_a_run_can_be_ended_by_its_options(tmp_path: Path) -> None:
    """The graph goes on to be used."""
    graph = OnnxRuntimeGraph(linear(tmp_path / "model.onnx"))
    options = ort.RunOptions()
    options.terminate = True
    feeds = {"x": np.ones((1, 4), np.float32)}
    with pytest.raises(GraphError, match="terminate"):
        graph.run_with(feeds, ["y"], options)
    assert graph.run(feeds, ["y"])[0].shape == (1, 3)
