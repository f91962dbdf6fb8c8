"""Compute queries, keys and values of a layer in one matrix product.

Ensures: where it fires, RaggedAttention takes rows of queries, keys and values side by side as its first input, without
a second and third, straight from one product (and one bias). The merged matrix is put together when it is written,
never held. Where norms stand in between (QK-norm), the layer keeps its three products.

Gate and up of the MLP are left apart: merging them cost 4 % of a prefill in copies and gained nothing in a decode
(SmolLM2-135M fp32, onnxruntime 1.32, 2026-12).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir
from onnx_ir.tape import Tape

from residentd_build.passes.attention import RAGGED_ATTENTION
from residentd_build.passes.layout import reshape
from residentd_build.passes.prune import prune

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from residentd_build.draft import Draft

NAMED_MAX = 3
VIEWS = frozenset({"Reshape", "Squeeze", "Unsqueeze", "Identity"})


@dataclass(frozen=True, slots=True)
class Linear:
    """`source` · `matrix` [in, out] (+ `bias` [out]) = `result`."""

    source: ir.Value
    matrix: ir.Value
    bias: ir.Value | None
    result: ir.Value

    @property
    def width(self) -> int:
        assert self.matrix.shape is not None
        return int(str(self.matrix.shape[1]))


def run(draft: Draft) -> str:
    attention = [node for node in draft.graph if node.op_type == RAGGED_ATTENTION]
    apart = [str(node.name) for node in attention if not _pack_attention(draft, node)]
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
    if node is None or node.op_type != "MatMul":
        return None
    source, matrix = node.inputs
    if source is None or matrix is None or not _is_constant(matrix, rank=2) or source.const_value is not None:
        return None
    return Linear(source, matrix, bias, value)


def _is_constant(value: ir.Value, *, rank: int) -> bool:
    return value.const_value is not None and value.const_value.shape.rank() == rank


def _through_views(value: ir.Value) -> ir.Value:
    node = value.producer()
    while node is not None and node.op_type in VIEWS and node.inputs[0] is not None:
        value = node.inputs[0]
        node = value.producer()
    return value


def _pack_attention(draft: Draft, node: ir.Node) -> bool:
    operands = [value for value in node.inputs[:3] if value is not None]
    linears = [linear_of(_through_views(value)) for value in operands]
    found = [linear for linear in linears if linear is not None]
    if len(found) < 3 or not _are_siblings(found):
        return False
    tape = Tape()
    merged = _merged(draft, tape, found, f"{node.name}.qkv")
    rows = reshape(tape, draft, merged, [-1, sum(linear.width for linear in found)], f"{node.name}.qkv.rows")
    draft.graph.insert_before(node, tape.nodes)
    node.replace_input_with(0, rows)
    node.replace_input_with(1, None)
    node.replace_input_with(2, None)
    return True


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


def _merged(draft: Draft, tape: Tape, linears: Sequence[Linear], name: str) -> ir.Value:
    matrix = _side_by_side(draft, [linear.matrix for linear in linears], f"{name}.matrix")
    result = tape.op("MatMul", [linears[0].source, matrix], name=name)
    biases = [linear.bias for linear in linears if linear.bias is not None]
    return (
        tape.op("Add", [result, _side_by_side(draft, biases, f"{name}.bias")], name=f"{name}.biased")
        if biases
        else result
    )


def _side_by_side(draft: Draft, values: Iterable[ir.Value], name: str) -> ir.Value:
    tensors = [value.const_value for value in values if value.const_value is not None]
    dims = [int(dim) for dim in tensors[0].shape.numpy()]
    dims[-1] = sum(int(tensor.shape.numpy()[-1]) for tensor in tensors)

    def join() -> ir.Tensor[Any]:
        return ir.Tensor(np.concatenate([tensor.numpy() for tensor in tensors], axis=-1), name=name)

    lazy = ir.LazyTensor(join, tensors[0].dtype, ir.Shape(dims), name=name)
    value = ir.Value(
        name=f"residentd/{name}", shape=ir.Shape(dims), type=ir.TensorType(tensors[0].dtype), const_value=lazy
    )
    draft.graph.register_initializer(value)
    return value
