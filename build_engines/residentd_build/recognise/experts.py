"""A mixture of experts, however it is written: a loop over experts that gathers and scatters tokens, or all at once.

Around every TopK: the router's scores go in, and some later value is Σ weight · expert(x) over the chosen experts. That
value is found by its numbers. The experts' matrices are read off the graph, and the whole is proven on random tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from residentd_build.draft import ancestors
from residentd_build.facts import TOKENS, UNKNOWN, UNKNOWN_DIM, Fact, of_array
from residentd_build.rules import attribute
from residentd_build.trace import trace

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from residentd_build.draft import Draft
    from residentd_build.facts import Array

NODES_PER_EXPERT_MAX = 64
"""Exporters write 26 nodes an expert in a loop, and some 60 for all of them at once."""
CANDIDATES_MAX = 16
EXPERTS_MAX = 1024
"""The proof sends a token to each expert. Models have up to 384; a TopK over more is of another kind."""
PROOF_TOKENS = 11
PROOF_TOLERANCE = 1e-4
"""Relative: the reference rounds sums of some thousand products in float32; a wrong expert or factor is above 1e-2."""
FAR = -1e4
"""A score that softmax turns into exactly zero."""
VIEWS = frozenset({"Reshape", "Squeeze", "Unsqueeze", "Identity", "Cast", "Flatten"})


@dataclass(frozen=True, slots=True)
class Activation:
    """g · sigmoid(alpha · g) · (u + beta), g at most `limit` and u within it where there is one (0: none)."""

    alpha: float
    beta: float
    limit: float

    def apply(self, gate: Array, up: Array) -> Array:
        if self.limit:
            gate, up = np.minimum(gate, self.limit), np.clip(up, -self.limit, self.limit)
        result: Array = gate / (1 + np.exp(-self.alpha * gate)) * (up + self.beta)
        return result


ACTIVATIONS = (Activation(1.0, 0.0, 0.0), Activation(1.702, 1.0, 7.0))
"""SwiGLU, and gpt-oss's own."""


@dataclass(frozen=True, slots=True)
class Expert:
    """gate and up [inner, hidden], down [hidden, inner]; biases are None together. Views of the export's weights."""

    gate: Array
    up: Array
    down: Array
    biases: tuple[Array, Array, Array] | None = None

    def apply(self, rows: Array, activation: Activation) -> Array:
        """float64 [rows, hidden]."""
        gate_bias, up_bias, down_bias = self.biases or (0, 0, 0)
        exact = rows.astype(np.float64)
        inner = activation.apply(exact @ self.gate.T + gate_bias, exact @ self.up.T + up_bias)
        result: Array = inner @ self.down.T + down_bias
        return result


Layout = Callable[[int], Expert]
"""Where the weights of each expert are."""


@dataclass(frozen=True, slots=True)
class Experts:
    """`result` is the sum over the `chosen` best of softmax(`scores`), [tokens, experts]; over their sum if so."""

    source: ir.Value
    scores: ir.Value
    result: ir.Value
    result_rank: int
    hidden: int
    count: int
    chosen: int
    is_normalised: bool
    activation: Activation
    layout: Layout


@dataclass(frozen=True, slots=True)
class _Router:
    """`scores` are a linear function of `source`; `views` are values that hold nothing else, in another shape."""

    top: ir.Node
    chosen: int
    count: int
    hidden: int
    source: ir.Value
    rank: int
    scores: ir.Value
    is_softmax_first: bool
    source_views: tuple[ir.Value, ...]
    score_views: tuple[ir.Value, ...]


def find(draft: Draft) -> Iterator[Experts | str]:
    """What is around each TopK of the graph, or why that is not known. The caller may replace it before going on."""
    facts = draft.step_facts(TOKENS, UNKNOWN_DIM)
    passed: list[ir.Node] = []
    for node in draft.graph:  # in which the caller may insert
        passed.append(node)
        if node.op_type != "TopK":
            continue
        facts = trace(passed, facts, draft.opset).facts
        passed = []
        router = _router(node, facts)
        if router is None:
            yield f"node {node.name} (TopK) does not choose from a linear function of the tokens"
            continue
        found = next(filter(None, (_experts(draft, router, value) for value in _candidates(draft, router))), None)
        yield f"what node {node.name} (TopK) chooses is not a sum of experts that is known" if found is None else found


# ---- the router ----------------------------------------------------------------------------------------------------


def _router(top: ir.Node, facts: Mapping[ir.Value, Fact]) -> _Router | None:
    chosen = _chosen(top)
    value, score_views, is_softmax_first = top.inputs[0], [], False
    while value is not None and value.producer() is not None:
        score_views.append(value)
        node = value.producer()
        assert node is not None
        if node.op_type == "Softmax" and not is_softmax_first and _is_over_experts(node, facts):
            is_softmax_first = True
        elif node.op_type not in VIEWS:
            break
        value = node.inputs[0]
    linear = None if value is None else _linear(value)
    if linear is None or value is None:
        return None
    source, matrix = linear
    dims = facts.get(source, UNKNOWN).dims
    if dims is None or not 0 < chosen <= len(matrix) <= EXPERTS_MAX:
        return None
    return _Router(
        top=top,
        chosen=chosen,
        count=matrix.shape[0],
        hidden=matrix.shape[1],
        source=source,
        rank=len(dims),
        scores=value,
        is_softmax_first=is_softmax_first,
        source_views=tuple(_views(source)),
        score_views=tuple(score_views),
    )


def _linear(value: ir.Value) -> tuple[ir.Value, Array] | None:
    """The source and the matrix [out, in] of a linear function, with a bias or without."""
    node = value.producer()
    if node is not None and node.op_type == "Add":
        inner = [item for item in node.inputs if item is not None and item.const_value is None]
        node = inner[0].producer() if len(inner) == 1 else None
    if node is None or node.op_type not in {"MatMul", "Gemm"} or node.inputs[0] is None:
        return None
    matrix = _weight(node.inputs[1], rank=2)
    if matrix is None:
        return None
    is_turned = node.op_type == "Gemm" and attribute(node, "transB", 0)
    return node.inputs[0], matrix if is_turned else matrix.T


def _weight(value: ir.Value | None, *, rank: int) -> Array | None:
    if value is None or value.const_value is None or value.const_value.shape.rank() != rank:
        return None
    return value.const_value.numpy()


def _chosen(top: ir.Node) -> int:
    """How many TopK takes; 0 if that is no constant."""
    value = top.inputs[1] if len(top.inputs) > 1 else None
    tensor = None if value is None else ir.convenience.get_const_tensor(value)
    return 0 if tensor is None or tensor.size != 1 else int(tensor.numpy().reshape(-1)[0])


def _is_over_experts(softmax: ir.Node, facts: Mapping[ir.Value, Fact]) -> bool:
    dims = facts.get(softmax.outputs[0], UNKNOWN).dims
    return dims is not None and attribute(softmax, "axis", -1) in {-1, len(dims) - 1}


def _views(value: ir.Value) -> Iterator[ir.Value]:
    """`value` and what it is a view of."""
    yield value
    node = value.producer()
    while node is not None and node.op_type in VIEWS and node.inputs[0] is not None:
        yield node.inputs[0]
        node = node.inputs[0].producer()


# ---- where the sum ends --------------------------------------------------------------------------------------------


def _candidates(draft: Draft, router: _Router) -> Iterator[ir.Value]:
    """Values through which everything that depends on the choice passes, nearest first."""
    open_uses = {value: len(value.uses()) for value in router.top.outputs if value.uses()}
    reached = set(router.top.outputs)
    nodes = iter(draft.graph)
    next(node for node in nodes if node is router.top)
    given = 0
    for _, node in zip(range(NODES_PER_EXPERT_MAX * (router.count + 4)), nodes, strict=False):
        used = [value for value in node.inputs if value is not None and value in reached]
        if not used:
            continue
        for value in used:
            open_uses[value] -= 1
            if not open_uses[value]:
                del open_uses[value]
        for value in node.outputs:
            reached.add(value)
            if value.uses():
                open_uses[value] = len(value.uses())
        if len(open_uses) == 1:
            given += 1
            yield next(iter(open_uses))
        if not open_uses or given >= CANDIDATES_MAX:
            return


# ---- the proof -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Block:
    """The nodes from tokens and scores to `result`, ready to be evaluated."""

    draft: Draft
    router: _Router
    result: ir.Value
    nodes: tuple[ir.Node, ...]
    weights: Mapping[ir.Value, Array]

    def evaluate(self, rows: Array, scores: Array) -> Array | None:
        """`result` for tokens [tokens, hidden] with these scores [tokens, experts] in the place of the router's."""
        router = self.router
        # Lengths may decide shapes; positions and the mask must not reach the experts, so their numbers stay unknown.
        given = {value: Fact(fact.dims) for value, fact in self.draft.step_facts(len(rows), 0).items()}
        given |= {value: of_array(array) for value, array in self.weights.items()}
        given |= {value: of_array(rows[None]) for value in router.source_views}
        given |= {router.source: of_array(rows if router.rank == 2 else rows[None])}
        given |= {value: of_array(scores if router.rank == 2 else scores[None]) for value in router.score_views}
        result = trace(self.nodes, given, self.draft.opset).content(self.result)
        return None if result is None or result.size != rows.size else result


def _block(draft: Draft, router: _Router, result: ir.Value) -> _Block:
    given = {*router.source_views, *router.score_views}
    needed = ancestors([result], given.__contains__)
    nodes = tuple(node for node in draft.graph if node in needed)
    values = [value for node in nodes for value in node.inputs if value is not None and value.const_value is not None]
    weights = {value: value.const_value.numpy() for value in values if value.const_value is not None}
    return _Block(draft, router, result, nodes, weights)


def _experts(draft: Draft, router: _Router, result: ir.Value) -> Experts | None:
    block = _block(draft, router, result)
    rng = np.random.default_rng(router.count)
    rows = rng.standard_normal((router.count, router.hidden), np.float32)
    # Each token goes to one expert with weight 1 and to others with weight 0, so that one expert's answer is seen.
    alone = np.eye(router.count, dtype=np.float32)
    outputs = block.evaluate(rows, alone if router.is_softmax_first else np.where(alone > 0, 0, FAR).astype(np.float32))
    if outputs is None:
        return None
    answers = outputs.reshape(rows.shape)
    for layout, activation in product(_layouts(block), ACTIVATIONS):
        if not _agrees(layout(0).apply(rows[:1], activation), answers[:1]):
            continue
        found = [layout(index).apply(rows[index : index + 1], activation) for index in range(router.count)]
        is_normalised = _normalises(block, layout, activation, rng)
        if _agrees(np.concatenate(found), answers) and is_normalised is not None:
            return Experts(
                source=router.source,
                scores=router.scores,
                result=result,
                result_rank=outputs.ndim,
                hidden=router.hidden,
                count=router.count,
                chosen=router.chosen,
                is_normalised=is_normalised,
                activation=activation,
                layout=layout,
            )
    return None


def _normalises(block: _Block, layout: Layout, activation: Activation, rng: np.random.Generator) -> bool | None:
    """Whether the weights of the chosen experts are divided by their sum; None if the result is neither."""
    router = block.router
    rows = rng.standard_normal((PROOF_TOKENS, router.hidden), np.float32)
    scores = rng.standard_normal((PROOF_TOKENS, router.count), np.float32)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    outputs = block.evaluate(rows, weights if router.is_softmax_first else scores)
    if outputs is None:
        return None
    limit = np.sort(weights, axis=-1)[:, -router.chosen, None]
    kept = np.where(weights >= limit, weights, 0).astype(np.float64)
    total = np.zeros(rows.shape)
    for index in np.flatnonzero(kept.any(axis=0)).tolist():
        total += kept[:, index, None] * layout(index).apply(rows, activation)
    if _agrees(total / kept.sum(-1, keepdims=True), outputs.reshape(rows.shape)):
        return True
    return False if _agrees(total, outputs.reshape(rows.shape)) else None


def _agrees(found: Array, expected: Array) -> bool:
    return bool(np.abs(found - expected).max() <= PROOF_TOLERANCE * max(float(np.abs(expected).max()), 1e-6))


# ---- the matrices --------------------------------------------------------------------------------------------------


def _layouts(block: _Block) -> Iterator[Layout]:
    """Every way in which the weights of the block may be the experts' matrices."""
    yield from _apart(block)
    yield from _stacked(block)


def _apart(block: _Block) -> Iterator[Layout]:
    """Three matrices an expert, in the order of the experts."""
    products = [
        node for node in block.nodes if node.op_type == "MatMul" and _weight(node.inputs[1], rank=2) is not None
    ]
    places = {node: place for place, node in enumerate(products)}
    inner = {node: _products_before(node, places) for node in products}
    groups = [(node, before) for node, before in inner.items() if before]
    if len(groups) != block.router.count or any(len(before) != 2 for _, before in groups):
        return
    # The tensors, not the nodes: those are gone when the matrices are written.
    tensors = [[_tensor(node) for node in (*before, down)] for down, before in groups]
    for gate, up in ((0, 1), (1, 0)):
        yield partial(_expert_apart, tensors, gate, up)


def _expert_apart(tensors: Sequence[Sequence[ir.TensorProtocol]], gate: int, up: int, index: int) -> Expert:
    arrays = [tensor.numpy().T for tensor in tensors[index]]
    return Expert(arrays[gate], arrays[up], arrays[2])


def _tensor(product: ir.Node) -> ir.TensorProtocol:
    assert product.inputs[1] is not None
    assert product.inputs[1].const_value is not None
    return product.inputs[1].const_value


def _products_before(node: ir.Node, places: Mapping[ir.Node, int]) -> list[ir.Node]:
    """The products with weights that the left side of `node` is computed from, by their `places` in the graph."""
    found: list[ir.Node] = []
    seen: set[ir.Node] = set()
    open_values = [node.inputs[0]]
    while open_values:
        value = open_values.pop()
        before = None if value is None else value.producer()
        if before is None or before in seen:
            continue
        seen.add(before)
        if before in places:
            found.append(before)
        else:
            open_values += before.inputs
    return sorted(found, key=places.__getitem__)


def _stacked(block: _Block) -> Iterator[Layout]:
    """Gate and up of all experts in one tensor, down in another, each with a bias or without."""
    count, hidden = block.router.count, block.router.hidden
    large = [array for array in block.weights.values() if array.ndim == 3 and array.shape[0] == count and array.size]
    tensors = [array for array in large if 1 not in array.shape[1:]]
    biases = [array.reshape(count, -1) for array in large if 1 in array.shape[1:]]
    for first, second in product(tensors, tensors):
        inner = second.size // (count * hidden)
        if first is second or first.size != 2 * second.size or second.size != count * hidden * inner:
            continue
        joined = [array for array in (first, first.swapaxes(1, 2)) if array.shape[1:] == (2 * inner, hidden)]
        out = [array for array in (second, second.swapaxes(1, 2)) if array.shape[1:] == (hidden, inner)]
        for both, down, (gates, ups) in product(joined, out, _halves(inner)):
            yield _stacked_layout(both, down, (gates, ups), _biases(biases, inner, hidden))


def _halves(inner: int) -> Sequence[tuple[slice, slice]]:
    """Where gate and up are among twice `inner` rows."""
    neighbours = (slice(0, None, 2), slice(1, None, 2))
    halves = (slice(0, inner), slice(inner, None))
    return (neighbours, halves, neighbours[::-1], halves[::-1])


def _biases(biases: Sequence[Array], inner: int, hidden: int) -> tuple[Array, Array] | None:
    both = next((array for array in biases if array.shape[1] == 2 * inner), None)
    down = next((array for array in biases if array.shape[1] == hidden and array is not both), None)
    return None if both is None or down is None else (both, down)


def _stacked_layout(
    both: Array, down: Array, halves: tuple[slice, slice], biases: tuple[Array, Array] | None
) -> Layout:
    def layout(index: int) -> Expert:
        gates, ups = halves
        added = None if biases is None else (biases[0][index, gates], biases[0][index, ups], biases[1][index])
        return Expert(both[index, gates], both[index, ups], down[index], added)

    return layout
