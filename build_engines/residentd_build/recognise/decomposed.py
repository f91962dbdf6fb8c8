"""Attention as plain operators, as torch.onnx.export writes it: Concat, MatMul, scale, mask, Softmax, MatMul."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from residentd_build.draft import descendants
from residentd_build.recognise.core import MASKED_BELOW, AttentionCore, Probe, UnrecognisedError, scalar

if TYPE_CHECKING:
    from collections.abc import Sequence

    import onnx_ir as ir

    from residentd_build.draft import Cache
    from residentd_build.facts import Array

FENCES = frozenset({"MatMul", "Softmax", "Shape"})
PLAIN = frozenset({"Cast", "Identity", "Dropout"})
MASKS_MAX = 2
STEPS_MAX = 64
"""Nodes between two matrix products: exporters write up to 12; more is not an attention core."""


@dataclass(frozen=True, slots=True)
class _Scores:
    """What happens to the scores between the two matrix products, read from the end to the start."""

    scale: float = 1.0
    cap_inner: float = 1.0  # divisors before Tanh
    cap_outer: float = 0.0  # factors after Tanh; 0: no Tanh
    masks: tuple[ir.Value, ...] = ()
    sinks: Array | None = None  # [heads], one more score of each query
    has_softmax: bool = False
    has_tanh: bool = False
    drops_last: bool = False  # the weight of the sink is cut off again


def recognise(cache: Cache, probes: Sequence[Probe]) -> AttentionCore | None:
    """The core between this cache's two Concat nodes and the product with the values, or None if there are none."""
    key_join, value_join = join_of(cache.past_key), join_of(cache.past_value)
    if key_join is None or value_join is None:
        return None
    product, keys_side = _score_product(key_join.outputs[0])
    result = _value_product(value_join.outputs[0])
    query_input = product.inputs[1 - keys_side]
    weights = result.inputs[0]
    assert query_input is not None
    assert weights is not None
    scores = _read_scores(weights, product, probes)
    query, query_factor = _strip_factors(query_input, probes)
    key_factor = _key_factor(product.inputs[keys_side], key_join.outputs[0], probes)
    dims = probes[0].trace[query].dims
    if dims is None or len(dims) != 4 or not isinstance(dims[1], int):
        raise UnrecognisedError(f"the query {query.name} is not [batch, heads, tokens, dim]")
    return AttentionCore(
        cache=cache,
        query=query,
        key=joined_with(key_join, cache.past_key),
        value=joined_with(value_join, cache.past_value),
        output=result.outputs[0],
        present_key=key_join.outputs[0],
        present_value=value_join.outputs[0],
        heads=dims[1],
        scale=scores.scale
        * query_factor
        * key_factor
        * (scores.cap_outer / scores.cap_inner if scores.has_tanh else 1.0),
        softcap=scores.cap_outer,
        masks=scores.masks,
        is_causal=False,
        is_heads_first=True,
        sinks=scores.sinks,
    )


def join_of(past: ir.Value) -> ir.Node | None:
    """The Concat that appends the new keys (or values) to the cached ones."""
    joins = [node for node in past.consumers() if node.op_type == "Concat" and len(node.inputs) == 2]
    return joins[0] if len(joins) == 1 and joins[0].inputs[0] is past else None


def joined_with(join: ir.Node, past: ir.Value) -> ir.Value:
    (other,) = (value for value in join.inputs if value is not past)
    assert other is not None
    return other


def _score_product(keys: ir.Value) -> tuple[ir.Node, int]:
    """The MatMul of queries and keys, and which of its inputs the keys are."""
    reach = descendants(keys, FENCES)
    products = {node for value in reach for node in value.consumers() if node.op_type == "MatMul"}
    found = [(node, side) for node in products for side in (0, 1) if node.inputs[side] in reach]
    if len(found) != 1 or found[0][1] != 1:
        raise UnrecognisedError(f"{len(found)} products use the keys {keys.name}; one product q kᵀ is expected")
    return found[0]


def _value_product(values: ir.Value) -> ir.Node:
    reach = descendants(values, FENCES)
    products = {node for value in reach for node in value.consumers() if node.op_type == "MatMul"}
    found = [node for node in products if node.inputs[1] in reach]
    if len(found) != 1:
        raise UnrecognisedError(f"{len(found)} products use the values {values.name}; one is expected")
    return found[0]


def _read_scores(weights: ir.Value, product: ir.Node, probes: Sequence[Probe]) -> _Scores:
    """Walk from the softmax weights back to the score product, collecting what each node does."""
    from_product = descendants(product.outputs[0], frozenset({"Shape"}))
    found = _Scores()
    value = weights
    for _ in range(STEPS_MAX):
        node = value.producer()
        if node is product:
            break
        if node is None or value not in from_product:
            raise UnrecognisedError(f"the weights {weights.name} do not come from the scores {product.outputs[0].name}")
        found, value = _step_back(found, node, from_product, probes)
    else:
        raise UnrecognisedError(f"more than {STEPS_MAX} nodes lie between {product.name} and {weights.name}")
    if not found.has_softmax:
        raise UnrecognisedError(f"no Softmax lies between {product.name} and {weights.name}")
    if found.drops_last != (found.sinks is not None):
        raise UnrecognisedError(f"a score is added or dropped between {product.name} and {weights.name}, not both")
    return found


def _step_back(
    found: _Scores, node: ir.Node, from_product: set[ir.Value], probes: Sequence[Probe]
) -> tuple[_Scores, ir.Value]:
    scores = [value for value in node.inputs if value is not None and value in from_product]
    others = [value for value in node.inputs if value is not None and value not in from_product]
    if node.op_type == "Where" and len(scores) == 2 and _is_nan_guard(node):
        scores = scores[-1:]
    if found.has_softmax and _subtracts_its_maximum(node):
        return found, scores[0]  # which softmax does by itself
    if len(scores) != 1:
        raise UnrecognisedError(f"node {node.name} ({node.op_type}) is unexpected between scores and values")
    if node.op_type == "Softmax" and not found.has_softmax:
        return replace(found, has_softmax=True), scores[0]
    if node.op_type in PLAIN or (node.op_type == "Where" and not others) or _is_nan_guard(node):
        return found, scores[0]
    if found.has_softmax:
        return _before_softmax(found, node, others, probes), scores[0]
    if node.op_type == "Slice" and _drops_last(node, probes):
        return replace(found, drops_last=True), scores[0]
    raise UnrecognisedError(f"node {node.name} ({node.op_type}) is unexpected after the softmax")


def _before_softmax(found: _Scores, node: ir.Node, others: Sequence[ir.Value], probes: Sequence[Probe]) -> _Scores:
    factor = scalar(others[0], probes) if len(others) == 1 else None
    if node.op_type in {"Mul", "Div"} and factor is not None:
        factor = factor if node.op_type == "Mul" else 1 / factor
        if found.has_tanh:
            return replace(found, cap_inner=found.cap_inner / factor)
        return replace(found, scale=found.scale * factor)
    if node.op_type == "Tanh" and not found.has_tanh:
        # What was read so far as a scale multiplies the Tanh: it is the cap.
        return replace(found, has_tanh=True, cap_outer=found.scale, scale=1.0)
    has_room = len(found.masks) < MASKS_MAX and not found.has_tanh
    if node.op_type == "Add" and has_room:
        return replace(found, masks=(*found.masks, others[0]))
    if node.op_type == "Where" and has_room and _hides(node, others, probes):
        return replace(found, masks=(*found.masks, others[0]))
    is_first = not found.masks and found.sinks is None and not found.has_tanh and found.scale == 1.0
    if node.op_type == "Concat" and len(others) == 1 and node.inputs[-1] is others[0] and is_first:
        return replace(found, sinks=_sinks(others[0], probes))
    raise UnrecognisedError(f"node {node.name} ({node.op_type}) is unexpected between scores and softmax")


def _hides(node: ir.Node, others: Sequence[ir.Value], probes: Sequence[Probe]) -> bool:
    """Where(visible, scores, a number below all scores), as GPT-2 masked when it kept a triangle among its weights."""
    low = scalar(others[-1], probes)
    return list(others) == [node.inputs[0], node.inputs[2]] and low is not None and low <= MASKED_BELOW


def _sinks(value: ir.Value, probes: Sequence[Probe]) -> Array:
    """Float32 [heads] of a score that is the same for every query, [1, heads, tokens, 1]."""
    contents = [probe.trace.content(value) for probe in probes]
    found = contents[0]
    if found is None or found.ndim != 4 or found.shape[3] != 1:
        raise UnrecognisedError(f"{value.name} lengthens the scores by more than one constant for each head")
    sinks = found[0, :, 0, 0]
    for content in contents:
        if content is None or content.shape[3:] != (1,) or not (content == sinks[None, :, None, None]).all():
            raise UnrecognisedError(f"{value.name} lengthens the scores by what is not the same for every query")
    return sinks.astype(np.float32)


def _drops_last(node: ir.Node, probes: Sequence[Probe]) -> bool:
    """x[:, :, :, :-1]."""
    values = [scalar(value, probes) for value in node.inputs[1:]]
    return len(values) >= 3 and values[:2] == [0.0, -1.0] and values[2] in {-1.0, 3.0} and values[3:] in ([], [1.0])


def _subtracts_its_maximum(node: ir.Node) -> bool:
    """Whether it is x - max(x), as the eager form of attention sinks has it."""
    highest = node.inputs[1].producer() if node.op_type == "Sub" and node.inputs[1] is not None else None
    return highest is not None and highest.op_type == "ReduceMax" and highest.inputs[0] is node.inputs[0]


def _is_nan_guard(node: ir.Node) -> bool:
    """Where(IsNaN(x), 0, x), which turns the softmax of a fully masked row into zeros."""
    condition = node.inputs[0].producer() if node.op_type == "Where" and node.inputs[0] is not None else None
    return condition is not None and condition.op_type == "IsNaN" and condition.inputs[0] is node.inputs[2]


def _strip_factors(value: ir.Value, probes: Sequence[Probe]) -> tuple[ir.Value, float]:
    """What is left of `value` when the numbers that multiply it are taken off, and their product."""
    factor = 1.0
    for _ in range(STEPS_MAX):
        step = _factor_of(value.producer(), probes)
        if step is None:
            return value, factor
        value, factor = step[0], factor * step[1]
    raise UnrecognisedError(f"more than {STEPS_MAX} factors multiply {value.name}")


def _factor_of(node: ir.Node | None, probes: Sequence[Probe]) -> tuple[ir.Value, float] | None:
    if node is None or node.op_type not in {"Mul", "Div"}:
        return None
    left, right = node.inputs
    assert left is not None
    assert right is not None
    number = scalar(right, probes)
    if number is not None:
        return left, number if node.op_type == "Mul" else 1 / number
    number = scalar(left, probes)
    return (right, number) if number is not None and node.op_type == "Mul" else None


def _key_factor(value: ir.Value | None, keys: ir.Value, probes: Sequence[Probe]) -> float:
    """The numbers that multiply the keys on their way to the product."""
    factor = 1.0
    for _ in range(STEPS_MAX):
        if value is keys:
            return factor
        assert value is not None
        node = value.producer()
        step = _factor_of(node, probes)
        if step is not None:
            value, factor = step[0], factor * step[1]
        else:
            assert node is not None
            value = node.inputs[0]
    raise UnrecognisedError(f"more than {STEPS_MAX} nodes lie between the keys {keys.name} and their product")
