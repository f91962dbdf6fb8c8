"""Small ONNX files for tensor models: one whose rows are independent, one with a state, one that refuses inputs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

WEIGHTS = np.linspace(-1, 1, 12, dtype=np.float32).reshape(4, 3)


def write(path: Path, nodes: list[onnx.NodeProto], inputs: list, outputs: list, **weights: np.ndarray) -> Path:
    """An ONNX file of opset 17; inputs and outputs are (name, type, shape)."""
    values = [[helper.make_tensor_value_info(*value) for value in side] for side in (inputs, outputs)]
    initializers = [numpy_helper.from_array(array, name) for name, array in weights.items()]
    graph = helper.make_graph(nodes, "small", *values, initializer=initializers)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    onnx.save(model, path)
    return path


def linear(path: Path) -> Path:
    """y [n, 3] = tanh(x [n, 4] @ w): calls may share a run."""
    nodes = [helper.make_node("MatMul", ["x", "w"], ["z"]), helper.make_node("Tanh", ["z"], ["y"])]
    return write(path, nodes, [("x", TensorProto.FLOAT, ["n", 4])], [("y", TensorProto.FLOAT, ["n", 3])], w=WEIGHTS)


def centred(path: Path) -> Path:
    """y [n, 4] = x less the mean of all rows: what one call gets depends on its company."""
    nodes = [
        helper.make_node("ReduceMean", ["x"], ["m"], axes=[0], keepdims=1),
        helper.make_node("Sub", ["x", "m"], ["y"]),
    ]
    return write(path, nodes, [("x", TensorProto.FLOAT, ["n", 4])], [("y", TensorProto.FLOAT, ["n", 4])])


def detections(path: Path) -> Path:
    """y [found] = what of x [n, 4] is above a half, all rows together: how much is whose, no shape tells."""
    nodes = [
        helper.make_node("Reshape", ["x", "flat"], ["f"]),
        helper.make_node("Greater", ["f", "half"], ["c"]),
        helper.make_node("Compress", ["f", "c"], ["y"], axis=0),
    ]
    weights = {"flat": np.array([-1], np.int64), "half": np.array(0.5, np.float32)}
    inputs, outputs = [("x", TensorProto.FLOAT, ["n", 4])], [("y", TensorProto.FLOAT, ["found"])]
    return write(path, nodes, inputs, outputs, **weights)


def largest(path: Path) -> Path:
    """y [n, 4] = x over the largest of the whole run: the made-up inputs of a build all have the same."""
    nodes = [
        helper.make_node("Abs", ["x"], ["a"]),
        helper.make_node("ReduceMax", ["a"], ["m"], keepdims=0),
        helper.make_node("Div", ["x", "m"], ["y"]),
    ]
    return write(path, nodes, [("x", TensorProto.FLOAT, ["n", 4])], [("y", TensorProto.FLOAT, ["n", 4])])


def counter(path: Path) -> Path:
    """out [1] = state [1] + step, and the new state: the caller carries it, as with silero-vad."""
    nodes = [
        helper.make_node("Add", ["state", "step"], ["next"]),
        helper.make_node("Mul", ["next", "next"], ["out"]),
    ]
    inputs = [("step", TensorProto.FLOAT, []), ("state", TensorProto.FLOAT, [1])]
    return write(path, nodes, inputs, [("out", TensorProto.FLOAT, [1]), ("next", TensorProto.FLOAT, [1])])


def lookup(path: Path) -> Path:
    """y [n, 2, 3] = table[ids [n, 2]]: an id beyond the 300 rows is an error of the run."""
    table = np.arange(900, dtype=np.float32).reshape(300, 3)
    nodes = [helper.make_node("Gather", ["table", "ids"], ["y"])]
    inputs, outputs = [("ids", TensorProto.INT64, ["n", 2])], [("y", TensorProto.FLOAT, ["n", 2, 3])]
    return write(path, nodes, inputs, outputs, table=table)


def reshaped(path: Path) -> Path:
    """y [n, 2, 15] of x [n, s], which only runs for s = 30: no size that is tried by itself fits."""
    nodes = [helper.make_node("Reshape", ["x", "shape"], ["y"])]
    inputs, outputs = [("x", TensorProto.FLOAT, ["n", "s"])], [("y", TensorProto.FLOAT, ["n", 2, 15])]
    return write(path, nodes, inputs, outputs, shape=np.array([-1, 2, 15], np.int64) * np.array([0, 1, 1]))
