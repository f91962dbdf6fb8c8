"""Recognise root-mean-square and layer normalisation, however they are written.

Ensures: where it fires, `x / sqrt(mean(x²) + epsilon) · weight` over the last axis is one node
`residentd::RmsNorm(x, weight; epsilon)`, and the same of x - mean(x), plus `bias` if there is one, is one node
`residentd::LayerNorm(x, weight, bias?; epsilon)`. A norm that is not recognised stays as it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from residentd_build.facts import TOKEN_AXES
from residentd_build.passes.prune import prune
from residentd_build.recognise.function import Surroundings, bottlenecks, surroundings
from residentd_build.rules import CANONICAL_DOMAIN, attribute

if TYPE_CHECKING:
    from residentd_build.draft import Draft
    from residentd_build.facts import Array

RMS_NORM = "RmsNorm"
LAYER_NORM = "LayerNorm"
TOLERANCE = 1e-5
PLAIN = {
    "RMSNormalization": RMS_NORM,
    "SimplifiedLayerNormalization": RMS_NORM,
    "LayerNormalization": LAYER_NORM,
}
TOKENS_PROBED = 3
NICE_DIGITS = (3, 7)
"""Of epsilon: the short decimal that the exporter had in mind, or all that float32 carries."""


@dataclass(frozen=True, slots=True)
class _Found:
    """`node` is the last of the norm."""

    node: ir.Node
    kind: str
    source: ir.Value
    weight: ir.Value
    bias: ir.Value | None
    epsilon: float


def run(draft: Draft) -> str:
    around = surroundings(draft, range(TOKENS_PROBED))
    plain = [found for node in draft.graph if node.op_type in PLAIN and (found := _plain(node, around)) is not None]
    written_out: list[_Found] = []
    taken: set[ir.Node] = set()
    for node in sorted(draft.graph, key=lambda item: item.op_type != "Add"):  # with its bias, if it has one
        last = None if node in taken else _written_out(node, around)
        if last is not None:
            written_out.append(last)
            taken.update(before for value in node.inputs if value is not None and (before := value.producer()))
    replaced: dict[ir.Value, ir.Value] = {}
    for found in (*plain, *written_out):
        norm = _norm(found, replaced.get(found.source, found.source))
        draft.graph.insert_before(found.node, [norm])
        ir.convenience.replace_all_uses_with(found.node.outputs[0], norm.outputs[0])
        replaced[found.node.outputs[0]] = norm.outputs[0]
    prune(draft)
    kinds = [found.kind for found in (*plain, *written_out)]
    counts = [f"{kinds.count(kind)} {kind}" for kind in (RMS_NORM, LAYER_NORM) if kind in kinds or kind == RMS_NORM]
    return f"norms: {' and '.join(counts)}, {len(written_out)} of them written out as single operators"


def _plain(node: ir.Node, around: Surroundings) -> _Found | None:
    source, weight = node.inputs[:2]
    bias = node.inputs[2] if len(node.inputs) > 2 else None
    dims = None if source is None else around.dims(source)
    is_last = dims is not None and attribute(node, "axis", -1) in {-1, len(dims) - 1}
    if source is None or weight is None or weight.const_value is None or not is_last:
        return None
    if any(output.uses() or output.is_graph_output() for output in node.outputs[1:]):
        return None
    if bias is not None and bias.const_value is None:
        return None
    return _Found(node, PLAIN[node.op_type], source, weight, bias, float(attribute(node, "epsilon", 1e-5)))


def _written_out(node: ir.Node, around: Surroundings) -> _Found | None:
    """`node` may be the last product, with the weight, or the sum with the bias after it."""
    bias, last = None, node
    if node.op_type == "Add":
        bias = _vector(node)
        other = next((value for value in node.inputs if value is not None and value is not bias), None)
        before = None if other is None else other.producer()
        if bias is None or before is None:
            return None
        last = before
    weight = _vector(last) if last.op_type == "Mul" else None
    if weight is None or weight.const_value is None:
        return None
    formula = _Formula(weight.const_value.numpy(), _numbers(bias))
    source = _source(node, formula, around)
    return None if source is None else _Found(node, source[1], source[0], weight, bias, source[2])


def _vector(node: ir.Node) -> ir.Value | None:
    """The weight or bias among the operands."""
    for value in node.inputs:
        if value is not None and value.const_value is not None and value.const_value.shape.rank() == 1:
            return value
    return None


def _numbers(value: ir.Value | None) -> Array | None:
    return None if value is None or value.const_value is None else value.const_value.numpy()


@dataclass(frozen=True, slots=True)
class _Formula:
    """What a norm with this weight and bias makes of numbers [..., width]."""

    weight: Array
    bias: Array | None

    @property
    def shift(self) -> Array | float:
        return 0.0 if self.bias is None else self.bias.astype(np.float64)

    def apply(self, numbers: Array, kind: str, epsilon: float) -> Array:
        exact = self.centred(numbers, kind)
        result: Array = exact / np.sqrt((exact**2).mean(-1, keepdims=True) + epsilon) * self.weight + self.shift
        return result

    def centred(self, numbers: Array, kind: str) -> Array:
        exact = numbers.astype(np.float64)
        return exact - exact.mean(-1, keepdims=True) if kind == LAYER_NORM else exact

    def epsilon(self, numbers: Array, found: Array, kind: str) -> float:
        """What one element decides: x / sqrt(mean(x²) + e) · w + b = y  →  e = (x · w / (y - b))² - mean(x²)."""
        scaled, exact = found.astype(np.float64) - self.shift, self.centred(numbers, kind)
        place = np.unravel_index(np.abs(scaled).argmax(), found.shape)
        ratio = float(exact[place]) * float(self.weight[place[-1]]) / float(scaled[place])
        return ratio**2 - float(np.mean(exact[place[:-1]] ** 2))


def _source(node: ir.Node, formula: _Formula, around: Surroundings) -> tuple[ir.Value, str, float] | None:
    """The furthest value that `node` normalises, how, and epsilon.

    Numbers of magnitude sqrt(epsilon) tell the input from the already normalised value, on which the formula is nearly
    the identity, and tell one epsilon from another.
    """
    found = None
    result = node.outputs[0]
    for candidate in bottlenecks(result, around):
        norm = _norm_of(result, candidate, formula, around)
        if norm is not None:
            found = candidate, *norm
        elif found is not None:
            break
    return found


def _norm_of(
    result: ir.Value, candidate: ir.Value, formula: _Formula, around: Surroundings
) -> tuple[str, float] | None:
    dims = around.dims(candidate)
    if dims is None or len(dims) < 2 or dims[-1] != formula.weight.size:
        return None
    shape = tuple(TOKENS_PROBED if dim in TOKEN_AXES else dim for dim in dims)
    if not all(isinstance(dim, int) for dim in shape):
        return None
    rng = np.random.default_rng(formula.weight.size)
    small = rng.standard_normal([int(str(dim)) for dim in shape]).astype(np.float32) * 1e-3
    found = around.evaluate(result, candidate, small)
    if found is None or found.shape != small.shape or not np.isfinite(found).all() or not found.any():
        return None
    for kind, digits in product((RMS_NORM, LAYER_NORM), NICE_DIGITS):
        epsilon = float(f"{formula.epsilon(small, found, kind):.{digits}g}")
        if epsilon > 0 and _agrees(found, formula.apply(small, kind, epsilon)):
            large = small * 1e3
            again = around.evaluate(result, candidate, large)
            return (kind, epsilon) if _agrees(again, formula.apply(large, kind, epsilon)) else None
    return None


def _agrees(found: Array | None, expected: Array) -> bool:
    return found is not None and bool(np.allclose(found, expected, rtol=TOLERANCE, atol=TOLERANCE))


def _norm(found: _Found, source: ir.Value) -> ir.Node:
    name = f"{found.node.name}.norm"
    operands = [source, found.weight, *([] if found.bias is None else [found.bias])]
    norm = ir.node(found.kind, operands, {"epsilon": found.epsilon}, domain=CANONICAL_DOMAIN, name=name)
    norm.outputs[0].name = f"{found.node.outputs[0].name}.norm"
    return norm
