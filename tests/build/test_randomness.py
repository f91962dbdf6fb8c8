"""Which nodes answer differently every time, and what is said of an export that has them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper

from residentd.errors import AccuracyError
from residentd_build import verify
from residentd_build.randomness import random_nodes
from residentd_build.verify import Track


def model(*nodes: onnx.NodeProto, training: bool = True) -> ir.Model:
    """A graph of x to y with `nodes`."""
    value = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [4]) for name in "xy"]
    constants = {"ratio": np.array(0.5, np.float32), "training": np.array(training)}
    initializers = [numpy_helper.from_array(array, name) for name, array in constants.items()]
    graph = helper.make_graph(list(nodes), "small", value[:1], value[1:], initializers)
    return ir.from_proto(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)]))


def dropout(*more: str) -> onnx.NodeProto:
    return helper.make_node("Dropout", ["x", *more], ["y"], name="drop")


def constant_dropout(*, training: bool) -> ir.Model:
    made = helper.make_node("Constant", [], ["mode"], value=numpy_helper.from_array(np.array(training)))
    return model(made, dropout("ratio", "mode"))


NOISE = [helper.make_node("RandomNormalLike", ["x"], [f"r{index}"], name=f"noise{index}") for index in range(5)]
CASES: dict[str, tuple[Callable[[], ir.Model], str]] = {
    "none": (lambda: model(helper.make_node("Relu", ["x"], ["y"])), ""),
    "noise": (lambda: model(*NOISE[:1]), "noise0 (RandomNormalLike)"),
    "much noise": (
        lambda: model(*NOISE),
        "noise0 (RandomNormalLike), noise1 (RandomNormalLike), noise2 (RandomNormalLike) and 2 more",
    ),
    "dropout for training": (lambda: model(dropout("ratio", "training")), "drop (Dropout)"),
    "dropout switched off": (lambda: model(dropout("ratio", "training"), training=False), ""),
    "dropout for inference": (lambda: model(dropout()), ""),
    "dropout as a node says": (lambda: constant_dropout(training=True), "drop (Dropout)"),
    "dropout that a node switches off": (lambda: constant_dropout(training=False), ""),
    "dropout as a computation says": (
        lambda: model(helper.make_node("Not", ["training"], ["mode"]), dropout("ratio", "mode")),
        "drop (Dropout)",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_random_nodes_are_named(name: str) -> None:
    """The first three; a dropout only where it may be active."""
    build, expected = CASES[name]
    assert random_nodes(build()) == expected


@pytest.mark.parametrize(
    ("unsteady", "said"), [("drop (Dropout)", "It is random, by drop"), ("", "caches do not work, or a token's answer")]
)
def test_an_export_that_disagrees_with_itself_is_told_why(unsteady: str, said: str) -> None:
    """Random nodes are the reason where there are any; else it is one of two."""
    tracks = [Track("t", (1,), (2,), np.full((1, 4), 10.0, np.float32))]
    with pytest.raises(AccuracyError, match=said):
        verify._bound(tracks, 1.0, unsteady=unsteady)
