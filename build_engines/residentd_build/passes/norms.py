"""Recognise root-mean-square normalisation, however it is written.

Ensures: where it fires, `x / sqrt(mean(x²) + epsilon) · weight` over the last axis is one node
`residentd::RmsNorm(x, weight; epsilon)`. A norm that is not recognised stays as it is.
"""

from __future__ import annotations

from dataclasses import dataclass
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
TOLERANCE = 1e-5
PLAIN = frozenset({"RMSNormalization", "SimplifiedLayerNormalization"})
TOKENS_PROBED = 3


@dataclass(frozen=True, slots=True)
class _Found:
    node: ir.Node
    source: ir.Value
    weight: ir.Value
    epsilon: float


def run(draft: Draft) -> str:
    around = surroundings(draft, range(TOKENS_PROBED))
    plain = [found for node in draft.graph if node.op_type in PLAIN and (found := _plain(node, around)) is not None]
    written_out = [
        found for node in draft.graph if node.op_type == "Mul" and (found := _written_out(node, around)) is not None
    ]
    replaced: dict[ir.Value, ir.Value] = {}
    for found in (*plain, *written_out):
        norm = _norm(found, replaced.get(found.source, found.source))
        draft.graph.insert_before(found.node, [norm])
        ir.convenience.replace_all_uses_with(found.node.outputs[0], norm.outputs[0])
        replaced[found.node.outputs[0]] = norm.outputs[0]
    prune(draft)
    return f"norms: {len(plain) + len(written_out)} RmsNorm, {len(written_out)} of them written out as single operators"


def _plain(node: ir.Node, around: Surroundings) -> _Found | None:
    source, weight = node.inputs[:2]
    dims = None if source is None else around.dims(source)
    is_last = dims is not None and attribute(node, "axis", -1) in {-1, len(dims) - 1}
    if source is None or weight is None or weight.const_value is None or not is_last or len(node.outputs) != 1:
        return None
    return _Found(node, source, weight, float(attribute(node, "epsilon", 1e-5)))


def _written_out(node: ir.Node, around: Surroundings) -> _Found | None:
    """`node` may be the last product, with the weight."""
    for weight in node.inputs:
        if weight is not None and weight.const_value is not None and weight.const_value.shape.rank() == 1:
            source = _source(node, weight.const_value.numpy(), around)
            if source is not None:
                return _Found(node, source[0], weight, source[1])
    return None


def _source(node: ir.Node, weight: Array, around: Surroundings) -> tuple[ir.Value, float] | None:
    """The furthest value that `node` normalises, and epsilon.

    Numbers of magnitude sqrt(epsilon) tell the input from the already normalised value, on which the formula is nearly
    the identity, and tell one epsilon from another.
    """
    found = None
    result = node.outputs[0]
    for candidate in bottlenecks(result, around):
        epsilon = _epsilon(result, candidate, weight, around)
        if epsilon is not None:
            found = candidate, epsilon
        elif found is not None:
            break
    return found


def _epsilon(result: ir.Value, candidate: ir.Value, weight: Array, around: Surroundings) -> float | None:
    dims = around.dims(candidate)
    if dims is None or len(dims) < 2 or dims[-1] != weight.size:
        return None
    shape = tuple(TOKENS_PROBED if dim in TOKEN_AXES else dim for dim in dims)
    if not all(isinstance(dim, int) for dim in shape):
        return None
    # One element decides epsilon: x / sqrt(mean(x²) + e) · w = y  →  e = (x · w / y)² - mean(x²).
    small = (
        np.random.default_rng(weight.size).standard_normal([int(str(dim)) for dim in shape]).astype(np.float32) * 1e-3
    )
    found = around.evaluate(result, candidate, small)
    if found is None or found.shape != small.shape or not np.isfinite(found).all() or not found.any():
        return None
    place = np.unravel_index(np.abs(found).argmax(), found.shape)
    ratio = float(small[place]) * float(weight[place[-1]]) / float(found[place])
    epsilon = _nice(ratio**2 - float(np.mean(small[place[:-1]].astype(np.float64) ** 2)))
    large = small * 1e3
    results = ((small, found), (large, around.evaluate(result, candidate, large)))
    return epsilon if epsilon > 0 and all(_agrees(y, x, weight, epsilon) for x, y in results) else None


def _nice(epsilon: float) -> float:
    """The short decimal that the exporter had in mind; float32 carries seven digits of it."""
    return float(f"{epsilon:.3g}")


def _agrees(result: Array | None, numbers: Array, weight: Array, epsilon: float) -> bool:
    if result is None:
        return False
    exact = numbers.astype(np.float64)
    expected = exact / np.sqrt((exact**2).mean(-1, keepdims=True) + epsilon) * weight
    return bool(np.allclose(result, expected, rtol=TOLERANCE, atol=TOLERANCE))


def _norm(found: _Found, source: ir.Value) -> ir.Node:
    name = f"{found.node.name}.norm"
    norm = ir.node(RMS_NORM, [source, found.weight], {"epsilon": found.epsilon}, domain=CANONICAL_DOMAIN, name=name)
    norm.outputs[0].name = f"{found.node.outputs[0].name}.norm"
    return norm
