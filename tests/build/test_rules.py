"""What a rule says of an operator, against the operator: ONNX's reference implementation on permuted tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from onnx.reference import ReferenceEvaluator

from residentd_build.facts import TOKENS, Dim, of_array, of_dims
from residentd_build.passes import attention, experts, norms, operators, rowwise
from residentd_build.recognise import gqa
from residentd_build.rules import RULES
from residentd_build.trace import trace

COUNTS = (5, 7)  # two numbers of tokens, no other dimension of a sample, so that neither can be taken for one
OPSET = 18
SIZES = (1, 2, 3)
Draw = Callable[[st.SearchStrategy[Any]], Any]
Sample = tuple[list[Any], dict[str, Any]]
"""Further inputs (arrays, or "x" again) and attributes of one operator."""


def axis_of(draw: Draw, dims: tuple[Dim, ...]) -> int:
    return int(draw(st.integers(-len(dims), len(dims) - 1)))


def axes_of(draw: Draw, dims: tuple[Dim, ...]) -> Any:
    axes = draw(st.lists(st.integers(0, len(dims) - 1), max_size=len(dims), unique=True))
    return np.array([axis - (len(dims) if draw(st.booleans()) else 0) for axis in axes], np.int64)


def reduction(draw: Draw, dims: tuple[Dim, ...]) -> Sample:
    flags = {"keepdims": draw(st.integers(0, 1)), "noop_with_empty_axes": draw(st.integers(0, 1))}
    return draw(st.sampled_from([[], [axes_of(draw, dims)]])), flags


def window(draw: Draw, dims: tuple[Dim, ...]) -> Sample:
    axes = axes_of(draw, dims)
    bounds = st.sampled_from([0, 1, -1, 2, -2, 1 << 40, -(1 << 40)])
    starts, ends = ([draw(bounds) for _ in axes] for _ in range(2))
    steps = [draw(st.sampled_from([1, 1, 2, -1])) for _ in axes]
    assume(len(axes))
    return [*(np.array(part, np.int64) for part in (starts, ends)), axes, np.array(steps, np.int64)], {}


def target(draw: Draw, dims: tuple[Dim, ...]) -> Sample:
    """A new shape, at most one dimension inferred."""
    known = [dim for dim in dims if isinstance(dim, int)]
    wanted = draw(st.permutations([*known, -1]))
    return [np.array(draw(st.sampled_from([wanted, [0] * len(dims), [-1], [*wanted, 1]])), np.int64)], {}


def constant(draw: Draw, dims: tuple[Dim, ...]) -> Sample:
    """An operand that broadcasts, mostly."""
    shape = [1 if draw(st.booleans()) or not isinstance(dim, int) else dim for dim in dims]
    return [np.arange(1, 1 + np.prod(shape)).astype(np.float32).reshape(shape)[(0,) * draw(st.integers(0, 1))]], {}


def matrix(draw: Draw, dims: tuple[Dim, ...]) -> Sample:
    assume(len(dims) > 1)
    if isinstance(dims[-1], int):
        return [np.arange(dims[-1] * 2).astype(np.float32).reshape(dims[-1], 2)], {}
    return [draw(st.sampled_from([np.ones((count, 2), np.float32) for count in COUNTS]))], {}


def squeezed(draw: Draw, dims: tuple[Dim, ...]) -> Sample:
    axes = axes_of(draw, dims)
    assume(all(dims[axis] in {1, TOKENS} for axis in axes))
    return draw(st.sampled_from([[], [axes]])), {}


SAMPLES: Mapping[str, Callable[[Draw, tuple[Dim, ...]], Sample]] = {
    "Add": constant,
    "Mul": lambda draw, dims: draw(st.sampled_from([(["x"], {}), constant(draw, dims)])),
    "Concat": lambda draw, dims: (draw(st.sampled_from([[], ["x"]])), {"axis": axis_of(draw, dims)}),
    "CumSum": lambda draw, dims: ([np.array(axis_of(draw, dims))], {"reverse": draw(st.integers(0, 1))}),
    "Expand": lambda _draw, dims: ([np.array([2, *([1] * len(dims))], np.int64)], {}),
    "Flatten": lambda draw, dims: ([], {"axis": axis_of(draw, dims)}),
    "Gather": lambda draw, dims: ([np.array(draw(st.sampled_from([0, [0], [[0, 0]]])))], {"axis": axis_of(draw, dims)}),
    "GatherND": lambda draw, dims: ([np.zeros((2, draw(st.integers(1, len(dims)))), np.int64)], {}),
    "LogSoftmax": lambda draw, dims: ([], {"axis": axis_of(draw, dims)}),
    "MatMul": matrix,
    "ReduceL2": reduction,
    "ReduceMax": reduction,
    "ReduceMean": reduction,
    "ReduceSum": reduction,
    "Reshape": target,
    "Slice": window,
    "Softmax": lambda draw, dims: ([], {"axis": axis_of(draw, dims)}),
    "Split": lambda draw, dims: ([], {"axis": axis_of(draw, dims), "num_outputs": 1}),
    "Squeeze": squeezed,
    "Tile": lambda draw, dims: ([np.array([draw(st.integers(1, 2)) for _ in dims], np.int64)], {}),
    "TopK": lambda draw, dims: ([np.array([1], np.int64)], {"axis": axis_of(draw, dims)}),
    "Transpose": lambda draw, dims: ([], {"perm": draw(st.permutations(range(len(dims))))}),
    "Unsqueeze": lambda draw, dims: ([np.array([draw(st.integers(-len(dims) - 1, len(dims)))], np.int64)], {}),
}


def one_node(name: str, sample: Sample) -> tuple[ir.Graph, ir.Value, dict[ir.Value, Any]]:
    more, attributes = sample
    source = ir.Value(name="x")
    arrays = {ir.Value(name=f"i{index}"): item for index, item in enumerate(more) if not isinstance(item, str)}
    by_place = iter(arrays)
    inputs = [source, *(source if isinstance(item, str) else next(by_place) for item in more)]
    node = ir.node(name, inputs, attributes, name="node")
    node.outputs[0].name = "y"
    graph = ir.Graph([source, *arrays], [node.outputs[0]], nodes=[node], opset_imports={"": OPSET})
    return graph, source, arrays


def evaluated(graph: ir.Graph, feeds: dict[str, Any]) -> Any:
    proto = ir.serde.serialize_node(graph[0])
    return np.asarray(ReferenceEvaluator(proto, opsets={"": OPSET}).run(None, feeds)[0])


@pytest.mark.parametrize("name", SAMPLES)
def test_a_rule_keeps_its_word(name: str) -> None:
    """No problem named: tokens in another order, or in another number, change nothing but their order and number."""

    @settings(max_examples=150, deadline=None)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        sizes = data.draw(st.lists(st.sampled_from(SIZES), min_size=1, max_size=3))
        dims: tuple[Dim, ...] = tuple(data.draw(st.permutations([TOKENS, *sizes])))
        graph, source, arrays = one_node(name, SAMPLES[name](data.draw, dims))
        facts = {source: of_dims(dims), **{value: of_array(array) for value, array in arrays.items()}}
        result = trace(graph, facts, OPSET)
        if result.problems:
            return
        claimed = result[graph.outputs[0]].dims
        assert claimed is not None
        assert claimed.count(TOKENS) == 1
        place = claimed.index(TOKENS)
        longest = np.random.default_rng(0).standard_normal([max(COUNTS) if dim == TOKENS else dim for dim in dims])
        for count in COUNTS:
            order = data.draw(st.permutations(range(max(COUNTS))))[:count]
            feeds = {str(value.name): array for value, array in arrays.items()}
            x = np.take(longest, order, dims.index(TOKENS)).astype(np.float32)
            found = evaluated(graph, {"x": x, **feeds})
            assert found.shape == tuple(count if dim == TOKENS else dim for dim in claimed)
            for index, token in enumerate(order):
                lone = np.take(longest, [token], dims.index(TOKENS)).astype(np.float32)
                alone = evaluated(graph, {"x": lone, **feeds})
                np.testing.assert_allclose(np.take(found, [index], place), alone, rtol=1e-6)

    check()


HANDLED = (
    *operators.REWRITES,
    *operators.NORMS,
    *norms.PLAIN,
    norms.RMS_NORM,
    norms.LAYER_NORM,
    rowwise.OPERATOR,
    rowwise.PRODUCT,
    gqa.OPERATOR,
    attention.RAGGED_ATTENTION,
    experts.EXPERTS,
)


@pytest.mark.parametrize("name", sorted(set(HANDLED)))
def test_what_a_pass_handles_does_not_end_the_trace(name: str) -> None:
    """A pass works from the trace of the whole graph: an operator without a rule would blind it to what follows."""
    assert name in RULES
