"""Compute queries, keys and values of a layer in one matrix product.

Ensures: where it fires, RaggedAttention takes rows of queries, keys and values side by side as its first input, without
a second and third, straight from one product (and one bias). Which columns of a product the queries, keys and values
are is told by numbers, so that it does not matter how an export cuts and orders them: one product for all (Phi-3,
GPT-2), one with the heads' parts by turns (GPT-NeoX), or three. A merged matrix is put together when it is written,
never held. Where norms stand in between (QK-norm), the layer keeps its products.

Gate and up of the MLP are left apart: merging them cost 4 % of a prefill in copies and gained nothing in a decode
(SmolLM2-135M fp32, onnxruntime 1.32, 2026-12).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir
from onnx_ir.tape import Tape

from residentd_build.facts import TOKENS
from residentd_build.passes.attention import RAGGED_ATTENTION
from residentd_build.passes.layout import reshape
from residentd_build.passes.prune import prune
from residentd_build.recognise.function import Surroundings, bottlenecks, surroundings
from residentd_build.rules import attribute

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from residentd_build.draft import Draft
    from residentd_build.facts import Array

NAMED_MAX = 3
TOKENS_PROBED = 2


@dataclass(frozen=True, slots=True)
class Linear:
    """`source` · `matrix` [in, out], [out, in] if turned (+ `bias` [out]) = `result`."""

    source: ir.Value
    matrix: ir.Value
    bias: ir.Value | None
    result: ir.Value
    is_turned: bool = False


@dataclass(frozen=True, slots=True)
class Part:
    """Queries, keys or values: `columns` of `value`, [1?, tokens, width]."""

    value: ir.Value
    width: int
    columns: Array


def run(draft: Draft) -> str:
    attention = [node for node in draft.graph if node.op_type == RAGGED_ATTENTION]
    around = surroundings(draft, range(TOKENS_PROBED))
    apart = [str(node.name) for node in attention if not _pack_attention(around, node)]
    prune(draft)
    named = f"; apart before {', '.join(apart[:NAMED_MAX])}" if apart else ""
    packed = len(attention) - len(apart)
    return f"linears: queries, keys and values in one product in {packed} of {len(attention)} layers{named}"


def linear_of(value: ir.Value) -> Linear | None:
    """The linear layer that `value` is the result of."""
    node = value.producer()
    bias = None
    if node is not None and node.op_type == "Add":
        bias = next((item for item in node.inputs if item is not None and _is_constant(item, rank=1)), None)
        inner = next((item for item in node.inputs if item is not None and item is not bias), None)
        node = None if bias is None or inner is None or len(tuple(inner.uses())) != 1 else inner.producer()
    if node is None or node.op_type not in {"MatMul", "Gemm"}:
        return None
    source, matrix = node.inputs[:2]
    if source is None or matrix is None or not _is_constant(matrix, rank=2) or source.const_value is not None:
        return None
    if node.op_type == "MatMul":
        return Linear(source, matrix, bias, value)
    added = node.inputs[2] if len(node.inputs) > 2 else None
    is_plain = attribute(node, "alpha", 1.0) == attribute(node, "beta", 1.0) == 1.0 and not attribute(node, "transA", 0)
    if not is_plain or (added is not None and (bias is not None or not _is_constant(added, rank=1))):
        return None
    return Linear(source, matrix, added or bias, value, is_turned=bool(attribute(node, "transB", 0)))


def _is_constant(value: ir.Value, *, rank: int) -> bool:
    return value.const_value is not None and value.const_value.shape.rank() == rank


def _pack_attention(around: Surroundings, node: ir.Node) -> bool:
    operands = [value for value in node.inputs[:3] if value is not None]
    if len(operands) < 3:
        return False  # packed already
    shared = _shared(operands, around)
    tape = Tape()
    if shared is not None:
        joined, width = shared.value, shared.width
    else:
        parts = [_linear_part(value, around) for value in operands]
        found = [part for part in parts if part is not None]
        if len(found) < 3 or not _are_siblings([linear for linear, _ in found]):
            return False
        joined = _merged(around.draft, tape, found, f"{node.name}.qkv")
        width = sum(len(columns) for _, columns in found)
    rows = reshape(tape, around.draft, joined, [-1, width], f"{node.name}.qkv.rows")
    around.draft.graph.insert_before(node, tape.nodes)
    node.replace_input_with(0, rows)
    node.replace_input_with(1, None)
    node.replace_input_with(2, None)
    return True


def _shared(operands: Sequence[ir.Value], around: Surroundings) -> Part | None:
    """The value that holds all operands side by side, in their order, and nothing else."""
    parts = [{part.value: part for part in _parts(value, around)} for value in operands]
    for value in parts[0]:
        if all(value in others for others in parts):
            found = [others[value] for others in parts]
            columns = np.concatenate([part.columns for part in found])
            if np.array_equal(columns, np.arange(found[0].width)):
                return found[0]
    return None


def _linear_part(operand: ir.Value, around: Surroundings) -> tuple[Linear, Array] | None:
    """The linear layer whose columns the operand is."""
    for part in _parts(operand, around):
        linear = linear_of(part.value)
        if linear is not None:
            return linear, part.columns
    return None


def _parts(operand: ir.Value, around: Surroundings) -> Iterator[Part]:
    """Values of which the operand is columns, nearest first, told by filling each with its own places."""
    for value in (operand, *bottlenecks(operand, around)):
        dims = around.dims(value)
        if dims is None or dims[:-1] not in {(TOKENS,), (1, TOKENS)} or not isinstance(dims[-1], int):
            continue
        width = dims[-1]
        places = np.arange(TOKENS_PROBED * width, dtype=np.float32).reshape(TOKENS_PROBED, width)
        found = (
            places if value is operand else around.evaluate(operand, value, places[None] if len(dims) == 3 else places)
        )
        columns = None if found is None else _columns(found.reshape(TOKENS_PROBED, -1), width)
        if columns is None:
            return  # whatever lies before is not taken as it is
        yield Part(value, width, columns)


def _columns(found: Array, width: int) -> Array | None:
    """Int [columns]: the places in a row of `width` that every row holds, or None if it holds anything else."""
    columns = found[0].astype(np.int64)
    expected = columns + width * np.arange(len(found))[:, None]
    return columns if np.array_equal(found, expected) and ((columns >= 0) & (columns < width)).all() else None


def _are_siblings(linears: Sequence[Linear]) -> bool:
    first = linears[0]
    return all(
        linear.source is first.source
        and (linear.bias is None) == (first.bias is None)
        and _dtype(linear) == _dtype(first)
        for linear in linears
    )


def _dtype(linear: Linear) -> ir.DataType | None:
    return None if linear.matrix.const_value is None else linear.matrix.const_value.dtype


def _merged(draft: Draft, tape: Tape, parts: Sequence[tuple[Linear, Array]], name: str) -> ir.Value:
    matrices = [(linear.matrix, columns, linear.is_turned) for linear, columns in parts]
    result = tape.op("MatMul", [parts[0][0].source, _side_by_side(draft, matrices, f"{name}.matrix")], name=name)
    biases = [(linear.bias, columns, False) for linear, columns in parts if linear.bias is not None]
    if not biases:
        return result
    return tape.op("Add", [result, _side_by_side(draft, biases, f"{name}.bias")], name=f"{name}.biased")


def _side_by_side(draft: Draft, parts: Iterable[tuple[ir.Value, Array, bool]], name: str) -> ir.Value:
    """[…, sum of columns]: these columns of each value, which is turned first if so."""
    sources = [
        (value.const_value, columns, is_turned) for value, columns, is_turned in parts if value.const_value is not None
    ]
    dims = [int(dim) for dim in sources[0][0].shape.numpy()]
    dims = [*(dims[::-1] if sources[0][2] else dims)[:-1], sum(len(columns) for _, columns, _ in sources)]

    def join() -> ir.Tensor[Any]:
        arrays = [
            (tensor.numpy().T if is_turned else tensor.numpy(), columns) for tensor, columns, is_turned in sources
        ]
        whole = [
            array if np.array_equal(columns, np.arange(array.shape[-1])) else array[..., columns]
            for array, columns in arrays
        ]
        return ir.Tensor(np.ascontiguousarray(np.concatenate(whole, axis=-1)), name=name)

    dtype = sources[0][0].dtype
    lazy = ir.LazyTensor(join, dtype, ir.Shape(dims), name=name)
    value = ir.Value(name=f"residentd/{name}", shape=ir.Shape(dims), type=ir.TensorType(dtype), const_value=lazy)
    draft.graph.register_initializer(value)
    return value
