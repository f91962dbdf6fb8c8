"""Find what multiplies by a constant matrix, in a lowered graph.

A product is a linear layer in whatever form: MatMul, FusedMatMul or Gemm with a constant matrix of float32. The head is
the product that the logits come from, an embedding is a look-up by token id.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import onnx_ir as ir

from residentd_build.draft import LOGITS_OUTPUT, TOKEN_INPUT
from residentd_build.matrices import Matrix
from residentd_build.rules import attribute

if TYPE_CHECKING:
    from collections.abc import Sequence

    from residentd_build.draft import Draft

VIEWS = frozenset({"Reshape", "Squeeze", "Unsqueeze", "Identity"})
CHOOSING = frozenset({"MoE", "QMoE", "TopK"})


@dataclass(frozen=True, slots=True)
class Product:
    """`source` [..., inputs] times `matrix` plus `bias`, the one output of `node`."""

    node: ir.Node
    matrix: Matrix
    bias: ir.Value | None = None

    @property
    def source(self) -> ir.Value:
        """As it is now: products before this one may have been replaced."""
        source = self.node.inputs[0]
        assert source is not None
        return source


@dataclass(frozen=True, slots=True)
class LookUp:
    """Rows of `matrix` by `index`, the one output of `node`."""

    node: ir.Node
    index: ir.Value
    matrix: Matrix


def products(draft: Draft) -> list[Product]:
    """In the order of the graph. A router of experts is none: it chooses, and a rounding may choose otherwise."""
    found = (_product(node) for node in draft.graph)
    return [product for product in found if product is not None and not _chooses(product.node.outputs[0])]


def embeddings(draft: Draft) -> list[LookUp]:
    found = []
    for node in draft.graph:
        if node.op_type == "Gather" and attribute(node, "axis", 0) == 0:
            table, index = node.inputs
            matrix = None if table is None else _matrix(table, is_turned=False)
            if matrix is not None and index is not None and index.name == TOKEN_INPUT:
                found.append(LookUp(node, index, matrix))
    return found


def head_of(draft: Draft, candidates: Sequence[Product]) -> Product | None:
    """What the logits come from through operators that follow one input: a scale, a softcap, a view."""
    by_node = {product.node: product for product in candidates}
    node = next(value for value in draft.graph.outputs if value.name == LOGITS_OUTPUT).producer()
    while node is not None and node not in by_node:
        before = [value for value in node.inputs if value is not None and value.const_value is None]
        node = before[0].producer() if len(before) == 1 else None
    return None if node is None else by_node[node]


def _product(node: ir.Node) -> Product | None:
    if node.op_type not in {"MatMul", "FusedMatMul", "Gemm"} or not _is_plain(node):
        return None
    source, weight = node.inputs[:2]
    if source is None or weight is None or source.const_value is not None:
        return None
    matrix = _matrix(weight, is_turned=not attribute(node, "transB", 0))
    bias = node.inputs[2] if len(node.inputs) > 2 else None
    return None if matrix is None else Product(node, matrix, bias)


def _is_plain(node: ir.Node) -> bool:
    factors = (attribute(node, name, 1.0) for name in ("alpha", "beta"))
    turns = (attribute(node, name, 0) for name in ("transA", "transBatchA", "transBatchB"))
    return all(factor == 1.0 for factor in factors) and not any(turns)


def _matrix(weight: ir.Value, *, is_turned: bool) -> Matrix | None:
    before = weight.producer()
    if before is not None and before.op_type == "Transpose" and attribute(before, "perm", (1, 0)) == (1, 0):
        turned = before.inputs[0]
        return None if turned is None else _matrix(turned, is_turned=not is_turned)
    tensor = weight.const_value
    if tensor is None or tensor.dtype != ir.DataType.FLOAT or tensor.shape.rank() != 2:
        return None
    return Matrix(weight, is_turned)


def _chooses(result: ir.Value) -> bool:
    for user in result.consumers():
        if user.op_type in CHOOSING or (user.op_type in {*VIEWS, "Softmax", "Add"} and _chooses(user.outputs[0])):
            return True
    return False
