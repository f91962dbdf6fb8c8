"""Rows of calls that share a run: which graphs are proven to keep them apart, and what a trial of an engine catches."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from residentd.backend.graph import GraphError
from residentd.errors import MachineError, StepRetryableError
from residentd.models.manifest import Manifest
from residentd_build.encoders import company
from residentd_build.encoders.company import Company
from residentd_build.encoders.interface import port_of
from residentd_build.encoders.margins import FP32
from residentd_build.encoders.rows import Doubt, doubt_of
from residentd_build.kinds import build
from residentd_build.options import Options

FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64
N = helper.make_node
X = ("x", FLOAT, ["n", 4])
RNG = np.random.default_rng(3)


def whole(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int64)


def real(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


@dataclass(frozen=True)
class Case:
    """A graph from x, unless `inputs` says more, to y. `says` is a part of the doubt; empty: its rows keep apart."""

    nodes: Sequence[onnx.NodeProto]
    says: str = ""
    weights: Mapping[str, np.ndarray] | None = None
    inputs: Sequence[tuple[str, int, list[Any]]] = (X,)
    opset: int = 20
    kind: int = FLOAT

    def model(self) -> onnx.ModelProto:
        graph = helper.make_graph(
            list(self.nodes),
            "g",
            [helper.make_tensor_value_info(*entry) for entry in self.inputs],
            [helper.make_tensor_value_info("y", self.kind, None)],
            [numpy_helper.from_array(array, name) for name, array in (self.weights or {}).items()],
        )
        opsets = [helper.make_opsetid("", self.opset), helper.make_opsetid("com.microsoft", 1)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=9)


def doubt(model: onnx.ModelProto) -> Doubt | None:
    inputs = {value.name: port_of(value).shape or () for value in model.graph.input}
    return doubt_of(ir.from_proto(model), inputs, [value.name for value in model.graph.output])


PICTURE = (("x", FLOAT, ["n", 3, "h", "w"]),)
SEQUENCE = (("x", FLOAT, ["n", "t", 4]),)
ROW_COUNT = [N("Shape", ["x"], ["s"]), N("Gather", ["s", "zero"], ["b"], axis=0)]
CASES: dict[str, Case] = {
    "a layer": Case(
        [N("Gemm", ["x", "w", "b"], ["z"]), N("Relu", ["z"], ["y"])], weights={"w": real(4, 3), "b": real(3)}
    ),
    "a layer that turns the rows to columns": Case(
        [N("Gemm", ["w", "x"], ["z"], transB=1), N("Transpose", ["z"], ["y"])], weights={"w": real(3, 4)}
    ),
    "softmax over classes": Case([N("Softmax", ["x"], ["y"], axis=-1)]),
    "a convolution and a pool": Case(
        [
            N("Conv", ["x", "w"], ["c"], pads=[1, 1, 1, 1]),
            N("BatchNormalization", ["c", "one", "one", "one", "one"], ["bn"]),
            N("MaxPool", ["bn"], ["p"], kernel_shape=[2, 2], strides=[2, 2]),
            N("GlobalAveragePool", ["p"], ["g"]),
            N("Flatten", ["g"], ["y"]),
        ],
        weights={"w": real(5, 3, 3, 3), "one": np.ones(5, np.float32)},
        inputs=PICTURE,
    ),
    "shapes that are computed, as exporters write them": Case(
        [
            N("Shape", ["x"], ["s"]),
            N("Gather", ["s", "zero"], ["b"], axis=0),
            N("Unsqueeze", ["b", "at"], ["b1"]),
            N("Concat", ["b1", "rest"], ["shape"], axis=0),
            N("Reshape", ["x", "shape"], ["r"]),
            N("Transpose", ["r"], ["t"], perm=[0, 2, 1]),
            N("Reshape", ["t", "flat"], ["y"]),
        ],
        weights={"zero": np.array(0, np.int64), "at": whole(0), "rest": whole(2, 2), "flat": whole(-1, 4)},
    ),
    "heads beside the batch on one axis": Case(
        [
            N("Shape", ["x"], ["s"]),
            N("Gather", ["s", "zero"], ["b"]),
            N("Gather", ["s", "one"], ["t"]),
            N("Mul", ["b", "two"], ["bh"]),
            N("Unsqueeze", ["bh", "at"], ["bh1"]),
            N("Unsqueeze", ["t", "at"], ["t1"]),
            N("Unsqueeze", ["b", "at"], ["b1"]),
            N("Transpose", ["x"], ["xt"], perm=[1, 0, 2]),
            N("Concat", ["t1", "bh1", "two1"], ["split"], axis=0),
            N("Reshape", ["xt", "split"], ["heads"]),
            N("Transpose", ["heads"], ["q"], perm=[1, 0, 2]),
            N("Transpose", ["heads"], ["k"], perm=[1, 2, 0]),
            N("MatMul", ["q", "k"], ["scores"]),
            N("Softmax", ["scores"], ["p"], axis=-1),
            N("MatMul", ["p", "q"], ["o"]),
            N("Transpose", ["o"], ["ot"], perm=[1, 0, 2]),
            N("Concat", ["t1", "b1", "four1"], ["joined"], axis=0),
            N("Reshape", ["ot", "joined"], ["j"]),
            N("Transpose", ["j"], ["y"], perm=[1, 0, 2]),
        ],
        weights={
            "zero": np.array(0, np.int64),
            "one": np.array(1, np.int64),
            "two": np.array(2, np.int64),
            "at": whole(0),
            "two1": whole(2),
            "four1": whole(4),
        },
        inputs=SEQUENCE,
    ),
    "a class token for each row": Case(
        [
            *ROW_COUNT,
            N("Unsqueeze", ["b", "at"], ["b1"]),
            N("Concat", ["b1", "rest"], ["shape"], axis=0),
            N("Expand", ["token", "shape"], ["tokens"]),
            N("Concat", ["tokens", "x"], ["y"], axis=1),
        ],
        weights={"zero": np.array(0, np.int64), "at": whole(0), "rest": whole(1, 4), "token": real(1, 1, 4)},
        inputs=SEQUENCE,
    ),
    "a recurrent layer": Case(
        [
            N("Transpose", ["x"], ["xt"], perm=[1, 0, 2]),
            N("LSTM", ["xt", "w", "r"], ["", "h"], hidden_size=2),
            N("Squeeze", ["h", "at"], ["y"]),
        ],
        weights={"w": real(1, 8, 4), "r": real(1, 8, 2), "at": whole(0)},
        inputs=SEQUENCE,
    ),
    "a picture made twice as large": Case(
        [N("Resize", ["x", "", "scales"], ["y"], mode="nearest")],
        weights={"scales": np.array([1, 1, 2, 2], np.float32)},
        inputs=PICTURE,
    ),
    "static scales": Case(
        [N("QuantizeLinear", ["x", "s", "z"], ["q"]), N("DequantizeLinear", ["q", "s", "z"], ["y"])],
        weights={"s": np.array(0.1, np.float32), "z": np.array(0, np.uint8)},
    ),
    "an equation": Case([N("Einsum", ["x", "w"], ["y"], equation="nk,kj->nj")], weights={"w": real(4, 2)}),
    # ---- and those that mix, whatever their company shows ----------------------------------------------------------
    "the largest of all": Case(
        [N("ReduceMax", ["x"], ["m"], keepdims=0), N("Div", ["x", "m"], ["y"])], "ReduceMax m reduces over the rows"
    ),
    "the mean of the batch": Case(
        [N("ReduceMean", ["x", "axis"], ["m"]), N("Sub", ["x", "m"], ["y"])], "reduces", {"axis": whole(0)}
    ),
    "a batch axis counted from the end": Case(
        [N("ReduceMean", ["x", "axis"], ["m"]), N("Sub", ["x", "m"], ["y"])], "reduces", {"axis": whole(-2)}
    ),
    "one scale for a run": Case(
        [
            N("DynamicQuantizeLinear", ["x"], ["q", "s", "z"]),
            N("DequantizeLinear", ["q", "s", "z"], ["y"]),
        ],
        "measures one scale",
    ),
    "softmax over the batch": Case([N("Softmax", ["x"], ["y"], axis=0)], "normalises over the rows"),
    "softmax from the batch on, in an old operator set": Case(
        [N("Softmax", ["x"], ["y"], axis=0)], "normalises over the rows", opset=12
    ),
    "a running sum over the batch": Case(
        [N("CumSum", ["x", "axis"], ["y"])], "sums along the rows", {"axis": np.array(0, np.int64)}
    ),
    "the best of the batch": Case(
        [N("TopK", ["x", "k"], ["y", "places"], axis=0)], "chooses from the rows", {"k": whole(1)}
    ),
    "every row with every other": Case(
        [N("Transpose", ["x"], ["t"]), N("MatMul", ["x", "t"], ["y"])], "pairs every row"
    ),
    "products of rows": Case([N("Transpose", ["x"], ["t"]), N("MatMul", ["t", "x"], ["y"])], "sums over the rows"),
    "statistics of the batch": Case(
        [N("BatchNormalization", ["x", "o", "o", "o", "o"], ["y", "a", "b"], training_mode=1)],
        "as in training",
        {"o": np.ones(4, np.float32)},
    ),
    "mean and variance of the batch": Case(
        [N("MeanVarianceNormalization", ["x"], ["y"])], "normalises over the rows", inputs=PICTURE
    ),
    "the number of rows": Case(
        [*ROW_COUNT, N("Cast", ["b"], ["f"], to=FLOAT), N("Mul", ["x", "f"], ["y"])],
        "computes with the number of rows",
        {"zero": np.array(0, np.int64)},
    ),
    "otherwise from four rows on": Case(
        [*ROW_COUNT, N("Greater", ["b", "three"], ["g"]), N("Where", ["g", "x", "w"], ["y"])],
        "computes with the number of rows",
        {"zero": np.array(0, np.int64), "three": np.array(3, np.int64), "w": real(4)},
    ),
    "otherwise for seven rows": Case(
        [*ROW_COUNT, N("Equal", ["b", "seven"], ["g"]), N("Where", ["g", "x", "w"], ["y"])],
        "computes with the number of rows",
        {"zero": np.array(0, np.int64), "seven": np.array(7, np.int64), "w": real(4)},
    ),
    "the place of a row": Case(
        [
            *ROW_COUNT,
            N("Range", ["zero", "b", "one"], ["r"]),
            N("Unsqueeze", ["r", "at"], ["c"]),
            N("Cast", ["c"], ["f"], to=FLOAT),
            N("Add", ["x", "f"], ["y"]),
        ],
        "computes with the number of rows",
        {"zero": np.array(0, np.int64), "one": np.array(1, np.int64), "at": whole(1)},
    ),
    "rows turned round": Case(
        [N("Slice", ["x", "start", "end", "axis", "step"], ["y"])],
        "cuts some of the rows out",
        {"start": whole(-1), "end": whole(-(1 << 62)), "axis": whole(0), "step": whole(-1)},
    ),
    "rows cut apart": Case([N("Reshape", ["x", "s"], ["y"])], "cut the rows apart", {"s": whole(-1, 8)}),
    "rows dealt out in columns": Case(
        [N("Transpose", ["x"], ["t"]), N("Reshape", ["t", "s"], ["y"])], "not simply a part", {"s": whole(-1, 4)}
    ),
    "an axis of another length": Case([N("Add", ["x", "w"], ["y"])], "another length", {"w": real(3, 4)}),
    "detections of all rows": Case(
        [
            N("Reshape", ["x", "flat"], ["f"]),
            N("Greater", ["f", "half"], ["c"]),
            N("Compress", ["f", "c"], ["y"], axis=0),
        ],
        "Compress y",
        {"flat": whole(-1), "half": np.array(0.5, np.float32)},
    ),
    "places of what is not zero": Case([N("NonZero", ["x"], ["y"])], "is not known to treat", kind=INT64),
    "a branch": Case(
        [
            N("ReduceMax", ["x"], ["m"], keepdims=0),
            N("Cast", ["m"], ["c"], to=TensorProto.BOOL),
            N(
                "If",
                ["c"],
                ["y"],
                then_branch=helper.make_graph(
                    [N("Identity", ["x"], ["a"])], "t", [], [helper.make_tensor_value_info("a", FLOAT, None)]
                ),
                else_branch=helper.make_graph(
                    [N("Neg", ["x"], ["b"])], "e", [], [helper.make_tensor_value_info("b", FLOAT, None)]
                ),
            ),
        ],
        "reduces over the rows",
    ),
    "indices through the whole batch": Case(
        [N("MaxPool", ["x"], ["m", "y"], kernel_shape=[2, 2])],
        "numbers places through all the rows",
        inputs=(("x", FLOAT, ["n", 3, 8, 8]),),
        kind=INT64,
    ),
    "rows resized": Case(
        [N("Resize", ["x", "", "scales"], ["y"], mode="nearest")],
        "resize the axis of the rows",
        {"scales": np.array([2, 1, 1, 1], np.float32)},
        inputs=PICTURE,
    ),
    "a part of the batch": Case(
        [N("Resize", ["x", "roi", "scales"], ["y"], coordinate_transformation_mode="tf_crop_and_resize")],
        "resizes in a way",
        {"scales": np.ones(4, np.float32), "roi": np.array([0.5, 0, 0, 0, 1, 1, 1, 1], np.float32)},
        inputs=PICTURE,
    ),
    "rows along another axis of the output": Case(
        [N("Transpose", ["x"], ["y"])], "the first axis of output y is not shown"
    ),
    "an output that has no rows": Case(
        [N("Shape", ["x"], ["y"])], "the first axis of output y is not shown", kind=INT64
    ),
    "more rows than came in": Case([N("Tile", ["x", "r"], ["y"])], "repeats the rows", {"r": whole(2, 1)}),
    "pairs of nodes": Case(
        [N("MatMul", ["x", "x"], ["y"])], "as long along another axis", inputs=(("x", FLOAT, ["n", "n"]),)
    ),
    "a number": Case([N("Mul", ["x", "k"], ["y"])], "k is a single number", inputs=(X, ("k", FLOAT, []))),
    "a fixed first axis": Case([N("Add", ["x", "k"], ["y"])], "k is fixed", inputs=(X, ("k", FLOAT, [1, 4]))),
}


@pytest.mark.parametrize("name", CASES)
def test_rows_are_followed_from_the_inputs_to_the_outputs(name: str) -> None:
    """Every graph is one that ONNX Runtime loads; what mixes is named, and what keeps rows apart has no doubt."""
    case = CASES[name]
    model = case.model()
    ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    found = doubt(model)
    assert (found is None) == (not case.says), found
    assert found is None or case.says in found.why


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if not case.says])
def test_what_is_proven_is_so(name: str) -> None:
    """Rows in company against each alone, on ONNX Runtime: one of NaN and one of 1e30 reach no other."""
    case = CASES[name]
    session = ort.InferenceSession(case.model().SerializeToString(), providers=["CPUExecutionProvider"])
    (entry,) = case.inputs
    shape = [size if isinstance(size, int) else 6 for size in entry[2][1:]]
    rows = [real(1, *shape) for _ in range(5)]
    rows[1][:] = np.nan
    rows[3][:] = 1e30
    (together,) = session.run(None, {"x": np.concatenate(rows)})
    assert len(together) == 5
    for place in (0, 2, 4):
        (alone,) = session.run(None, {"x": rows[place]})
        assert together[place] == pytest.approx(alone[0], abs=2e-5, rel=2e-5)


def test_a_free_axis_is_not_taken_for_another() -> None:
    """[n, t, 4] as rows of 8 numbers would join two texts wherever t is odd."""
    case = Case([N("Reshape", ["x", "s"], ["y"])], weights={"s": whole(-1, 8)}, inputs=SEQUENCE)
    found = doubt(case.model())
    assert found is not None
    assert "cut the rows apart" in found.why


# ---- the trial of the engine ---------------------------------------------------------------------------------------


class Mixing:
    """A graph of one input and one output [n, 4], whose rows meet as `mix` has it."""

    def __init__(self, mix: Any) -> None:
        self._mix = mix
        self.sizes: set[int] = set()

    def run(self, feeds: Mapping[str, Any], _outputs: Sequence[str]) -> list[Any]:
        self.sizes.add(len(feeds["x"]))
        with np.errstate(all="ignore"):
            return [np.asarray(self._mix(feeds["x"]), np.float32)]

    def close(self) -> None:
        """Nothing is held."""


def _first_wins(x: Any) -> Any:
    return np.where(np.abs(x).max() > 100, x / 2, x)


def _raise(error: Exception) -> Any:
    raise error


@pytest.mark.parametrize(
    ("mix", "says"),
    [
        (lambda x: 2 * x, ""),
        (
            lambda x: x + (1e-3 * x.mean(axis=0) if len(x) == 4 else 0),
            "of 4 calls in one run is not what each gives alone",
        ),
        (lambda x: x + np.float32(1e-3) * (len(x) == 16), "of 16 calls in one run"),
        (lambda x: x + np.float32(1e-3) * (len(x) == 40), "of 40 calls in one run"),
        (_first_wins, "of 2 calls in one run is not what each gives alone; every second row of it was 1e30"),
        (lambda x: np.where(np.abs(x).min() < 0.01, 0, x), "1,000 times as small"),
        (lambda x: x - 0 * x.sum(), "was NaN"),
        (lambda x: x[np.isfinite(x).all(axis=1)], "has not a row for each"),
        (lambda x: np.concatenate([x, np.where(len(x) > 2, x.mean(axis=0), 0) + 0 * x], axis=1), "of 3 calls"),
        (lambda x: x if len(x) == 1 else _raise(GraphError("one row, please")), "fail (one row, please)"),
        (lambda x: x if np.isfinite(x).all() else _raise(GraphError("no NaN, please")), ""),
    ],
)
def test_the_engine_is_tried_beside_hostile_rows(mix: Any, says: str) -> None:
    """Runs of every size to 16, and of as many as --slots allows; a call that is refused alone proves nothing."""
    graph = Mixing(mix)
    reason = Company(graph, ["y"], 40, FP32, 255).reason([{"x": 1 + np.abs(real(1, 4))} for _ in range(3)])
    assert says in reason
    assert bool(says) == bool(reason)
    assert says or graph.sizes == {*range(1, 17), 40}


def test_a_slow_model_is_not_tried_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its proof is the graph's; the smallest runs come first, beside every kind of row."""
    clock = itertools.count(0, 13)
    monkeypatch.setattr(company, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    graph = Mixing(lambda x: x)
    assert Company(graph, ["y"], 16, FP32, 255).reason([{"x": real(1, 4)}]) == ""
    assert graph.sizes == {1, 2, 3}


def test_a_mask_in_an_output_hides_nothing_beside_it() -> None:
    """One number of -1e9, and a mean over the run that is a ten-thousandth of the others."""

    def mix(x: Any) -> Any:
        y = x + 1e-3 * (x.mean(axis=0) - x)
        y[:, 0] = -1e9
        return y

    assert "is not what each gives alone" in Company(Mixing(mix), ["y"], 4, FP32, 1).reason([{"x": real(1, 4)}] * 3)


def test_an_output_that_jumps_hides_nothing_beside_it() -> None:
    """Half of the output is rounding noise of a thousand; the other half is held to its own."""

    def mix(x: Any) -> Any:
        return np.concatenate([np.fmod(np.floor(x * np.float32(1e9)), 1000), x + 1e-3 * x[:1] * (len(x) > 1)], axis=1)

    wrong = Company(Mixing(mix), ["y"], 4, FP32, 1).reason([{"x": real(1, 4)} for _ in range(3)])
    assert "is not what each gives alone" in wrong


def test_a_run_that_the_memory_does_not_hold_is_no_reason_to_run_calls_alone() -> None:
    """It is the machine's."""
    lacking = StepRetryableError("a run of the graph ran out of memory (bad_alloc)")
    graph = Mixing(lambda x: x if len(x) < 3 else _raise(lacking))
    with pytest.raises(MachineError, match="fewer --slots") as caught:
        Company(graph, ["y"], 4, FP32, 1).reason([{"x": real(1, 4)}] * 3)
    assert not isinstance(caught.value, StepRetryableError)


def test_whole_numbers_have_neighbours_of_the_largest_and_of_0() -> None:
    """There is no NaN of them; the largest that the goldens have is one that the model takes."""
    seen: set[int] = set()

    class Graph(Mixing):
        def run(self, feeds: Mapping[str, Any], outputs: Sequence[str]) -> list[Any]:
            seen.update(np.unique(feeds["x"]).tolist())
            return super().run(feeds, outputs)

    feeds = [{"x": np.array([[7, 8]], np.int8)}]
    assert Company(Graph(lambda x: x), ["y"], 16, FP32, 255).reason(feeds) == ""
    assert seen == {0, 7, 8, 127}


# ---- in a build ----------------------------------------------------------------------------------------------------


def built(model: onnx.ModelProto, tmp_path: Path, **options: Any) -> Manifest:
    (tmp_path / "source").mkdir()
    (tmp_path / "stage").mkdir()
    onnx.save(model, tmp_path / "source" / "model.onnx")
    given = Options("m", **options)
    return build(tmp_path / "source", tmp_path / "stage", given, lambda *_arguments: None, lambda _bytes: None)


@pytest.mark.parametrize(
    "name",
    ["the largest of all", "one scale for a run", "otherwise from four rows on", "detections of all rows", "a layer"],
)
def test_a_version_says_why_its_calls_run_alone(name: str, tmp_path: Path) -> None:
    """The node and what it does; where rows keep apart, that several calls run together."""
    case = CASES[name]
    model = case.model()
    y = model.graph.output[0]
    for _ in range(1 if name == "detections of all rows" else 2):
        y.type.tensor_type.shape.dim.add().dim_param = "rows"
    manifest = built(model, tmp_path)
    tensors = manifest.content.tensors
    assert tensors is not None
    assert case.says in tensors.alone
    assert bool(tensors.alone) == bool(case.says)
    (line,) = [line for line in manifest.build.passes if line.startswith("runs: ")]
    assert ("one call each" in line) == bool(case.says)
