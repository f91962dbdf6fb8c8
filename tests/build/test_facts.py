"""The arithmetic of dimensions, and what each operator may do with the token axis."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import onnx_ir as ir
import pytest
from onnx_ir.tape import Tape

from residentd_build.facts import ROWS, TOKENS, UNKNOWN_DIM, Dim, of_array, of_dims, product, shape_content
from residentd_build.rules import broadcast
from residentd_build.trace import WORK_MAX, Trace, trace

OPSET = 18


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        (TOKENS * 1, TOKENS),
        (1 * TOKENS, TOKENS),
        (TOKENS + 0, TOKENS),
        (0 + TOKENS, TOKENS),
        (TOKENS // 1, TOKENS),
        (TOKENS - 0, TOKENS),
        (TOKENS * 2, UNKNOWN_DIM),
        (TOKENS + 1, UNKNOWN_DIM),
        (TOKENS // 2, UNKNOWN_DIM),
        (7 - TOKENS, UNKNOWN_DIM),
        (7 // TOKENS, UNKNOWN_DIM),
        (TOKENS * TOKENS, UNKNOWN_DIM),
    ],
)
def test_a_symbol_survives_identities_only(result: Dim, expected: Dim) -> None:
    """Arithmetic that changes the number of tokens forgets it."""
    assert result == expected


@pytest.mark.parametrize(
    ("shapes", "expected"),
    [
        ([(1, TOKENS, 8), (8,)], (1, TOKENS, 8)),
        ([(TOKENS, 1), (1, 4)], (TOKENS, 4)),
        ([(), (3,)], (3,)),
        ([(UNKNOWN_DIM,), (TOKENS,)], (TOKENS,)),
    ],
)
def test_broadcasting(shapes: list[tuple[Dim, ...]], expected: tuple[Dim, ...]) -> None:
    """Dimensions combine as numpy's do; a known length wins over an unknown one."""
    assert broadcast(shapes) == expected


def test_products_separate_numbers_from_symbols() -> None:
    """Two products are equal when both parts are."""
    assert product((2, TOKENS, 3)) == (6, (TOKENS,))
    assert product((6, TOKENS)) == product((TOKENS, 2, 3))
    assert product((6, TOKENS)) != product((6, ROWS))


def test_a_shape_is_integers_until_a_symbol_is_in_it() -> None:
    """Shape contents keep int64 where a kernel would see int64."""
    assert shape_content((1, 2)).dtype == np.int64
    assert shape_content((1, TOKENS)).tolist() == [1, TOKENS]


Build = Callable[[Tape, ir.Value], ir.Value]


def followed(build: Build, dims: tuple[Dim, ...] = (1, TOKENS, 8)) -> tuple[Trace, ir.Value]:
    source = ir.Value(name="x")
    tape = Tape()
    result = build(tape, source)
    return trace(graph_of(tape, source), {source: of_dims(dims)}, OPSET), result


def graph_of(tape: Tape, source: ir.Value) -> ir.Graph:
    """The tape's nodes with names, which the reference implementation needs."""
    return ir.Graph([source], [], nodes=tape.nodes, initializers=tape.initializers, opset_imports={"": OPSET})


def numbers(tape: Tape, *values: int) -> ir.Value:
    return tape.initializer(ir.tensor(np.array(values, np.int64), name=f"constant{len(tape.initializers)}"))


def scalar(tape: Tape, value: int) -> ir.Value:
    return tape.initializer(ir.tensor(np.array(value, np.int64), name=f"constant{len(tape.initializers)}"))


def weights(tape: Tape, *dims: int) -> ir.Value:
    return tape.initializer(ir.tensor(np.ones(dims, np.float32), name=f"constant{len(tape.initializers)}"))


def token_count(tape: Tape, x: ir.Value) -> ir.Value:
    return tape.op("Gather", [tape.op("Shape", [x]), scalar(tape, 1)])


def flat(tape: Tape, x: ir.Value) -> ir.Value:
    return tape.op("Reshape", [x, numbers(tape, -1)])


def transposed_by_reshape(tape: Tape, x: ir.Value) -> ir.Value:
    """[1, tokens, 8] read as [1, 8, tokens]."""
    count = tape.op("Unsqueeze", [token_count(tape, x), numbers(tape, 0)])
    count = tape.op("Concat", [numbers(tape, 1, 8), count], {"axis": 0})
    return tape.op("Reshape", [x, count])


def self_product(tape: Tape, x: ir.Value) -> ir.Value:
    return tape.op("MatMul", [x, tape.op("Transpose", [x], {"perm": (0, 2, 1)})])


def divided_by_count(tape: Tape, x: ir.Value) -> ir.Value:
    return tape.op("Div", [x, tape.op("Cast", [token_count(tape, x)], {"to": ir.DataType.FLOAT})])


def outer_difference(tape: Tape, x: ir.Value) -> ir.Value:
    column = tape.op("Unsqueeze", [x, numbers(tape, 1)])
    row = tape.op("Unsqueeze", [x, numbers(tape, 2)])
    return tape.op("Sub", [column, row])


def root_of_count(tape: Tape, x: ir.Value) -> ir.Value:
    return tape.op("Mul", [x, tape.op("Sqrt", [tape.op("Cast", [tape.op("Size", [x])], {"to": ir.DataType.FLOAT})])])


def packed_positions(tape: Tape, x: ir.Value) -> ir.Value:
    return tape.op("Range", [scalar(tape, 0), token_count(tape, x), scalar(tape, 1)])


def table_cut_by_count(tape: Tape, x: ir.Value) -> ir.Value:
    end = tape.op("Unsqueeze", [token_count(tape, x), numbers(tape, 0)])
    return tape.op("Slice", [weights(tape, 99, 2), numbers(tape, 0), end])


def row_of_count(tape: Tape, x: ir.Value) -> ir.Value:
    return tape.op("Gather", [weights(tape, 99, 2), token_count(tape, x)])


def rows(tape: Tape, x: ir.Value) -> ir.Value:
    return tape.op("Reshape", [x, numbers(tape, -1, 8)])


def turned(tape: Tape, x: ir.Value) -> ir.Value:
    """[1, 8, tokens]."""
    return tape.op("Transpose", [x], {"perm": (0, 2, 1)})


def unknown(tape: Tape) -> ir.Value:
    """A value of which nothing is known, and which no token reaches."""
    return tape.op("Mystery", [weights(tape, 2)], domain="com.example")


MIXES: Mapping[str, Build] = {
    "root of a count": root_of_count,
    "places in the step": packed_positions,
    "a table cut to the step": table_cut_by_count,
    "a table's row by count": row_of_count,
    "longer than a limit": lambda t, x: t.op("Greater", [token_count(t, x), scalar(t, 4096)]),
    "mean over tokens": lambda t, x: t.op("ReduceMean", [x, numbers(t, 1)]),
    "mean over everything": lambda t, x: t.op("ReduceMean", [x]),
    "softmax over tokens": lambda t, x: t.op("Softmax", [x], {"axis": 1}),
    "norm over tokens": lambda t, x: t.op("LayerNormalization", [x, weights(t, 8)], {"axis": 1}),
    "running sum": lambda t, x: t.op("CumSum", [x, scalar(t, 1)]),
    "running sum from behind": lambda t, x: t.op("CumSum", [x, scalar(t, -2)], {"reverse": 1}),
    "running sum along an unknown axis": lambda t, x: t.op("CumSum", [x, unknown(t)]),
    "sum over no axes, which is all": lambda t, x: t.op("ReduceSum", [x, numbers(t)]),
    "token axis dropped where it is one": lambda t, x: t.op("Squeeze", [x]),
    "token axis dropped": lambda t, x: t.op("Squeeze", [x, numbers(t, 1)]),
    "a row added to every token": lambda t, x: t.op("Gemm", [weights(t, 5, 4), weights(t, 4, 8), rows(t, x)]),
    "sum over tokens on the right": lambda t, x: t.op("Gemm", [weights(t, 8, 4), rows(t, x)]),
    "norm of a sum over tokens": lambda t, x: t.op(
        "SkipSimplifiedLayerNormalization", [turned(t, x), turned(t, x), weights(t, 8)], domain="com.microsoft"
    ),
    "tokens turned": lambda t, x: t.op("RotaryEmbedding", [turned(t, x), x], domain="com.microsoft"),
    "product of tokens with tokens": self_product,
    "sum over tokens in a product": lambda t, x: t.op("MatMul", [t.op("Transpose", [x], {"perm": (0, 2, 1)}), x]),
    "first token": lambda t, x: t.op("Gather", [x, numbers(t, 0)], {"axis": 1}),
    "first element": lambda t, x: t.op("GatherND", [x, t.op("Reshape", [numbers(t, 0, 0), numbers(t, 1, 2)])]),
    "elements of the first token": lambda t, x: t.op(
        "GatherElements", [x, t.op("Reshape", [numbers(t, *[0] * 8), numbers(t, 1, 1, 8)])], {"axis": 1}
    ),
    "the best token": lambda t, x: t.op_multi_out("TopK", [x, numbers(t, 1)], {"axis": 1}, num_outputs=2)[0],
    "sum over tokens in experts": lambda t, x: t.op("Experts", [turned(t, x), x], domain="residentd"),
    "all but the last token": lambda t, x: t.op("Slice", [x, numbers(t, 0), numbers(t, -1), numbers(t, 1)]),
    "halves": lambda t, x: t.op_multi_out("Split", [x], {"axis": 1}, num_outputs=2)[0],
    "one sequence after itself": lambda t, x: t.op("Concat", [x, x], {"axis": 1}),
    "twice": lambda t, x: t.op("Tile", [x, numbers(t, 1, 2, 1)]),
    "tokens and features in one axis": flat,
    "features read as tokens": transposed_by_reshape,
    "a number of tokens in the numbers": divided_by_count,
    "difference of every two": outer_difference,
    "weights of one length": lambda t, x: t.op("Mul", [x, weights(t, 5, 1)]),
}


@pytest.mark.parametrize("name", MIXES)
def test_what_mixes_tokens_is_certain(name: str) -> None:
    """An operator along the token axis is a certain problem, named by what it does."""
    result, _ = followed(MIXES[name])
    assert [problem.is_certain for problem in result.problems.values()] == [True]


def rows_then_back(tape: Tape, x: ir.Value) -> ir.Value:
    rows = tape.op("Reshape", [x, numbers(tape, -1, 8)])
    return tape.op("Reshape", [rows, tape.op("Shape", [x])])


def heads(tape: Tape, x: ir.Value) -> ir.Value:
    split = tape.op("Reshape", [x, numbers(tape, 0, 0, 2, 4)])
    turned = tape.op("Transpose", [split], {"perm": (0, 2, 1, 3)})
    halves = tape.op_multi_out("Split", [turned], {"axis": -1}, num_outputs=2)
    joined = tape.op("Concat", list(halves), {"axis": -1})
    back = tape.op("Transpose", [joined], {"perm": (0, 2, 1, 3)})
    return tape.op("Reshape", [back, numbers(tape, 0, 0, -1)])


KEEPS: Mapping[str, tuple[Build, tuple[Dim, ...]]] = {
    "linear": (lambda t, x: t.op("MatMul", [x, weights(t, 8, 3)]), (1, TOKENS, 3)),
    "bias": (lambda t, x: t.op("Add", [x, weights(t, 8)]), (1, TOKENS, 8)),
    "norm": (lambda t, x: t.op("LayerNormalization", [x, weights(t, 8)], {"axis": -1}), (1, TOKENS, 8)),
    "mean of a token": (lambda t, x: t.op("ReduceMean", [x, numbers(t, -1)]), (1, TOKENS, 1)),
    "softmax of a token": (lambda t, x: t.op("Softmax", [x], {"axis": -1}), (1, TOKENS, 8)),
    "half of a token": (lambda t, x: t.op("Slice", [x, numbers(t, 0), numbers(t, 4), numbers(t, 2)]), (1, TOKENS, 4)),
    "rows and back": (rows_then_back, (1, TOKENS, 8)),
    "heads and back": (heads, (1, TOKENS, 8)),
    "running sum of a token": (lambda t, x: t.op("CumSum", [x, scalar(t, -1)]), (1, TOKENS, 8)),
    "sum over no axes, which is none": (
        lambda t, x: t.op("ReduceSum", [x, numbers(t)], {"noop_with_empty_axes": 1}),
        (1, TOKENS, 8),
    ),
    "batch axis dropped": (lambda t, x: t.op("Squeeze", [x, numbers(t, 0)]), (TOKENS, 8)),
    "lookup by token": (
        lambda t, x: t.op("Gather", [weights(t, 9, 2), t.op("Cast", [x], {"to": 7})]),
        (1, TOKENS, 8, 2),
    ),
    "every token, sliced": (
        lambda t, x: t.op("Slice", [x, numbers(t, 0), numbers(t, 1 << 62), numbers(t, 1)]),
        (1, TOKENS, 8),
    ),
}


@pytest.mark.parametrize("name", KEEPS)
def test_what_treats_every_token_by_itself_is_no_problem(name: str) -> None:
    """Linear layers, norms, rotations and changes of layout keep the token axis, and their shape is known."""
    build, dims = KEEPS[name]
    result, value = followed(build)
    assert result.problems == {}
    assert result[value].dims == dims


def test_an_unknown_operator_is_an_uncertain_problem() -> None:
    """What is not known is not called wrong, but is named."""
    result, _ = followed(lambda t, x: t.op("Mystery", [x], domain="com.example"))
    assert [problem.is_certain for problem in result.problems.values()] == [False]


LOSES: Mapping[str, Build] = {
    "unknown axes to add": lambda t, x: t.op("Unsqueeze", [x, unknown(t)]),
    "unknown axes to drop": lambda t, x: t.op("Squeeze", [x, unknown(t)]),
    "unknown axes to sum over": lambda t, x: t.op("ReduceSum", [x, unknown(t)]),
    "unknown axes to cut": lambda t, x: t.op("Slice", [x, numbers(t, 0), numbers(t, 4), unknown(t)]),
    "unknown repeats": lambda t, x: t.op("Tile", [x, unknown(t)]),
    "unknown shape to fill": lambda t, x: t.op("Expand", [x, unknown(t)]),
    "unknown shape to take": lambda t, x: t.op("Reshape", [x, unknown(t)]),
    "unknown other operand": lambda t, x: t.op("Add", [x, unknown(t)]),
    "unknown weights": lambda t, x: t.op("MatMul", [x, unknown(t)]),
    "unknown neighbour": lambda t, x: t.op("Concat", [x, unknown(t)], {"axis": -1}),
    "unknown data to look up": lambda t, x: t.op("Gather", [unknown(t), t.op("Cast", [x], {"to": 7})]),
    "unknown padding": lambda t, x: t.op("Pad", [x, unknown(t)]),
    "unknown size": lambda t, x: t.op("Resize", [x, None, None, unknown(t)]),
    "unknown depth": lambda t, x: t.op("OneHot", [x, unknown(t), weights(t, 2)]),
}


@pytest.mark.parametrize("name", LOSES)
def test_an_axis_that_is_lost_is_an_uncertain_problem(name: str) -> None:
    """Where an axis or shape is an input that is not known, what follows would be unguarded: the node is named."""
    result, value = followed(lambda t, x: t.op("Softmax", [LOSES[name](t, x)], {"axis": 1}))
    node = value.producer()
    assert node is not None
    lost = node.inputs[0].producer() if node.inputs[0] is not None else None
    assert [problem.is_certain for found, problem in result.problems.items() if found is lost] == [False]


def test_contents_follow_from_shapes() -> None:
    """Shape arithmetic is carried out, with the number of tokens in it."""
    tape, source = Tape(), ir.Value(name="x")
    shape = tape.op("Shape", [source])
    target = tape.op(
        "Concat", [tape.op("Slice", [shape, numbers(tape, 0), numbers(tape, 2)]), numbers(tape, 2, -1)], {"axis": 0}
    )
    result = trace(graph_of(tape, source), {source: of_dims((1, TOKENS, 8))}, OPSET)
    assert result[target].content.tolist() == [1, TOKENS, 2, -1]


def test_known_numbers_are_computed_with() -> None:
    """Where all numbers are known, so is the result, by ONNX's own reference."""
    tape, source = Tape(), ir.Value(name="x")
    visible = tape.op("LessOrEqual", [source, tape.op("Unsqueeze", [source, numbers(tape, 1)])])
    result = trace(graph_of(tape, source), {source: of_array(np.arange(3))}, OPSET)
    assert np.array_equal(result.content(visible), np.tri(3, dtype=bool))


def constants(build: Callable[[Tape], Sequence[ir.Value]]) -> list[bool]:
    """Whether the content of each of the values that `build` makes is known."""
    source, tape = ir.Value(name="x"), Tape()
    values = build(tape)
    found = trace(graph_of(tape, source), {source: of_dims((1, TOKENS, 8))}, OPSET)
    return [found.content(value) is not None for value in values]


def filled(tape: Tape, *dims: int, like: object = 1e-4) -> ir.Value:
    fill = ir.tensor(np.array([like]))
    return tape.op("ConstantOfShape", [numbers(tape, *dims)], {"value": fill})


def products(tape: Tape) -> list[ir.Value]:
    """Of 1024 by 1024: each more than all that may be spent."""
    found = [filled(tape, 1024, 1024)]
    found += [tape.op("MatMul", [found[0], found[0]]) for _ in range(50)]
    return found


def test_products_that_take_long_are_not_known() -> None:
    """What a few bytes of a graph ask for may take days; their dimensions are known all the same."""
    assert constants(products) == [True] + [False] * 50


def negations(tape: Tape) -> list[ir.Value]:
    """Each reads and writes a million truths."""
    found = [filled(tape, 1 << 20, like=True)]
    for _ in range(WORK_MAX // (2 << 20) + 2):
        found.append(tape.op("Not", [found[-1]]))
    return found


def test_a_trace_may_cost_so_much_and_no_more() -> None:
    """The last negation that fits is computed, and none after it."""
    *known, last, beyond = constants(negations)
    assert all(known)
    assert not last
    assert not beyond


HUGE = {
    "a row of 2^26": lambda tape: tape.op(
        "OneHot", [numbers(tape, 1), scalar(tape, 1 << 26), numbers(tape, 0, 1)], {"axis": -1}
    ),
    "a result of 2^26": lambda tape: tape.op("Add", [filled(tape, 1 << 13, 1), filled(tape, 1, 1 << 13)]),
    "a million texts": lambda tape: tape.op("Cast", [filled(tape, 1 << 20)], {"to": ir.DataType.STRING}),
    "a million places, one by one in Python": lambda tape: tape.op(
        "ScatterElements", [filled(tape, 3 << 20), filled(tape, 3 << 20, like=0), filled(tape, 3 << 20)]
    ),
}


@pytest.mark.parametrize("name", HUGE)
def test_what_is_too_large_is_not_computed(name: str) -> None:
    """Neither for the machine's memory nor for anybody's patience."""
    assert constants(lambda tape: [HUGE[name](tape)]) == [False]


def test_what_is_small_is_computed() -> None:
    """The same operators, as masks use them."""
    small = {
        "OneHot": lambda tape: tape.op(
            "OneHot", [numbers(tape, 1), scalar(tape, 4), numbers(tape, 0, 1)], {"axis": -1}
        ),
        "Add": lambda tape: tape.op("Add", [filled(tape, 64, 1), filled(tape, 1, 64)]),
        "ScatterElements": lambda tape: tape.op(
            "ScatterElements", [filled(tape, 64), filled(tape, 64, like=0), filled(tape, 64)]
        ),
        "MatMul": lambda tape: tape.op("MatMul", [filled(tape, 64, 64), filled(tape, 64, 64)]),
    }
    assert constants(lambda tape: [build(tape) for build in small.values()]) == [True] * len(small)
