"""Random numbers in a graph: refused for every kind of model, unless they reach no output or change nothing."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from residentd.errors import SourceError
from residentd_build.encoders import tensor_build
from residentd_build.kinds import build
from residentd_build.options import Options
from support import tensor_graphs
from support.installed import EXPORTS

MODELS = {
    "generate": EXPORTS / "llama",
    "embed": EXPORTS.parent / "encoders" / "embed-bert",
    "classify": EXPORTS.parent / "encoders" / "classify-distilbert",
}
N = helper.make_node
YES, NO = np.array(True), np.array(False)
HALF, NOTHING = np.array(0.5, np.float32), np.array(0.0, np.float32)


def compiled(source: Path, stage: Path) -> None:
    stage.mkdir()
    build(source, stage, Options("m"), lambda *_arguments: None, lambda _bytes: None)


def refusals(source: Path, tmp_path: Path) -> str:
    with pytest.raises(SourceError) as caught:
        compiled(source, tmp_path / "stage")
    return "\n".join(map(str, caught.value.findings))


def small(tmp_path: Path, nodes: list[onnx.NodeProto], **weights: np.ndarray) -> Path:
    axes = ["n", 4]
    inputs, outputs = [("x", TensorProto.FLOAT, axes)], [("y", TensorProto.FLOAT, axes)]
    return tensor_graphs.write(tmp_path / "x" / "model.onnx", nodes, inputs, outputs, **weights)


@pytest.mark.parametrize("kind", MODELS)
def test_no_kind_of_model_may_draw(kind: str, tmp_path: Path) -> None:
    """The finding names the node and says how to export, of a language model as of an encoder."""
    source = Path(shutil.copytree(MODELS[kind], tmp_path / kind))
    model = onnx.load(source / "model.onnx")
    output = model.graph.output[0]
    for node in model.graph.node:
        node.output[:] = ["steady" if name == output.name else name for name in node.output]
    model.graph.node.append(N("RandomNormalLike", ["steady"], ["noise"], name="/noise/RandomNormalLike", scale=1e-3))
    model.graph.node.append(N("Add", ["steady", "noise"], [output.name]))
    onnx.save(model, source / "model.onnx")
    text = refusals(source, tmp_path)
    assert "it draws random numbers in every run: RandomNormalLike /noise/RandomNormalLike" in text
    assert "Export it for inference" in text


@pytest.mark.parametrize(
    ("nodes", "weights"),
    [
        ([N("RandomUniformLike", ["x"], ["r"]), N("Mul", ["x", "r"], ["y"])], {}),
        ([N("Sigmoid", ["x"], ["p"]), N("Bernoulli", ["p"], ["y"])], {}),
        ([N("Dropout", ["x", "share", "training"], ["y"])], {"share": HALF, "training": YES}),
        ([N("Dropout", ["x", "", "training"], ["y"])], {"training": YES}),
        ([N("Not", ["no"], ["training"]), N("Dropout", ["x", "share", "training"], ["y"])], {"share": HALF, "no": NO}),
    ],
)
def test_what_draws_is_refused(nodes: list[onnx.NodeProto], weights: dict[str, np.ndarray], tmp_path: Path) -> None:
    """Also a dropout of which only a run knows whether it is one in training."""
    assert "it draws random numbers" in refusals(small(tmp_path, nodes, **weights), tmp_path)


def test_a_branch_that_draws_is_refused(tmp_path: Path) -> None:
    """It may be taken."""
    value = helper.make_tensor_value_info("a", TensorProto.FLOAT, None)
    other = helper.make_tensor_value_info("b", TensorProto.FLOAT, None)
    drawn = helper.make_graph([N("RandomNormalLike", ["x"], ["a"])], "t", [], [value])
    plain = helper.make_graph([N("Identity", ["x"], ["b"])], "e", [], [other])
    nodes = [N("If", ["no"], ["y"], then_branch=drawn, else_branch=plain)]
    assert "RandomNormalLike a" in refusals(small(tmp_path, nodes, no=NO), tmp_path)


@pytest.mark.parametrize(
    ("nodes", "weights"),
    [
        ([N("RandomNormalLike", ["x"], ["unused"]), N("Neg", ["x"], ["y"])], {}),
        ([N("Dropout", ["x"], ["y"])], {}),
        ([N("Dropout", ["x", "share", "training"], ["y"])], {"share": HALF, "training": NO}),
        ([N("Dropout", ["x", "share", "training"], ["y"])], {"share": NOTHING, "training": YES}),
        (
            [
                N("Constant", [], ["c"], value=numpy_helper.from_array(NO)),
                N("Identity", ["c"], ["training"]),
                N("Dropout", ["x", "share", "training"], ["y"]),
            ],
            {"share": HALF},
        ),
    ],
)
def test_what_changes_nothing_is_taken(
    nodes: list[onnx.NodeProto], weights: dict[str, np.ndarray], tmp_path: Path
) -> None:
    """Numbers that no output needs, and dropouts that drop nothing."""
    compiled(small(tmp_path, nodes, **weights), tmp_path / "stage")


def test_a_tensor_model_is_asked_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever makes it unsteady: the same inputs must give the same numbers."""
    real, runs = tensor_build.ExportGraph.run, []

    def run(graph: object, feeds: dict[str, np.ndarray], outputs: list[str]) -> list[np.ndarray]:
        runs.append(feeds)
        return [array + np.float32(len(runs)) for array in real(graph, feeds, outputs)]  # type: ignore[arg-type]

    monkeypatch.setattr(tensor_build.ExportGraph, "run", run)
    assert "output y is not the same when the same inputs are given twice" in refusals(
        tensor_graphs.linear(tmp_path / "x" / "m.onnx"), tmp_path
    )
