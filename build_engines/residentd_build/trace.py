"""Follow a graph from its inputs without running it: one Fact per value, and every place where tokens may meet."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import zip_longest
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir
from onnx.reference import ReferenceEvaluator

from residentd_build.facts import UNKNOWN, UNKNOWN_DIM, Fact, elements, of_array
from residentd_build.rules import MixesError, check_counts, rule_for

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from residentd_build.facts import Array

WEIGHT_ELEMENTS_MIN = 1 << 16
"""Initializers from this size on are weights: their content is never computed with, only rows are looked up."""
TABLE_OPERATORS = frozenset({"RotaryEmbedding"})
"""Operators whose large initializers are tables to look rows up in, as those of Gather are."""
MEETING_OPERATORS = frozenset({"RaggedAttention"})
"""Tokens meet in these, and their caches, which have no token axis, are followed by the independence pass itself."""
EVALUATED_DOMAINS = frozenset({"", "ai.onnx"})
EVALUATED_WITHOUT_RULE = frozenset(
    {"Trilu", "ScatterND", "ScatterElements", "GatherElements", "GatherND", "NonZero", "EyeLike", "OneHot"}
)
"""What mask subgraphs use besides; their results are no larger than their inputs."""
EVALUATED_ELEMENTS_MAX = 1 << 25
"""Results above this size are not computed: at most 128 MiB of float32 at a time."""


@dataclass(frozen=True, slots=True)
class Problem:
    """Why a node is not shown to treat every token by itself; certain: it is shown not to."""

    why: str
    is_certain: bool


@dataclass(slots=True)
class Trace:
    """Facts by value. `problems` holds the nodes at which the token axis may be mixed."""

    facts: dict[ir.Value, Fact] = field(default_factory=dict)
    problems: dict[ir.Node, Problem] = field(default_factory=dict)

    def __getitem__(self, value: ir.Value | None) -> Fact:
        if value is None:
            return UNKNOWN
        if value not in self.facts and value.const_value is not None:
            self.facts[value] = _of_initializer(value.const_value)
        return self.facts.get(value, UNKNOWN)

    def content(self, value: ir.Value | None) -> Array | None:
        """The numbers of `value`, if they are known."""
        fact = self[value]
        return fact.content if fact.is_numeric else None


def trace(nodes: Iterable[ir.Node], given: Mapping[ir.Value, Fact], opset: int) -> Trace:
    """Facts of all that `nodes`, in topological order, compute from `given`; given values are not computed again."""
    result = Trace(facts=dict(given))
    for node in nodes:
        if all(output in given for output in node.outputs):
            continue
        inputs = [None if value is None else _fact_for(node, value, result) for value in node.inputs]
        for output, fact in zip(node.outputs, _follow(node, inputs, result, opset), strict=False):
            if output not in given:
                result.facts[output] = fact
    return result


def _fact_for(node: ir.Node, value: ir.Value, result: Trace) -> Fact:
    if node.op_type in TABLE_OPERATORS and value.const_value is not None:
        return of_array(value.const_value.numpy())
    return result[value]


def _follow(node: ir.Node, inputs: Sequence[Fact | None], result: Trace, opset: int) -> Sequence[Fact]:
    rule = rule_for(node)
    try:
        facts = rule(node, inputs) if rule else None
        check_counts(node, inputs, facts or [UNKNOWN])
    except MixesError as error:
        result.problems[node] = Problem(str(error), is_certain=True)
        return [UNKNOWN] * len(node.outputs)
    if _is_computable(node, inputs, facts):
        evaluated = _evaluate(node, inputs, opset)
        if evaluated is not None:
            return evaluated
    if facts is None:
        known = [fact for fact in inputs if fact is not None and fact is not UNKNOWN]
        if any(fact.may_hold_tokens for fact in known):
            result.problems[node] = Problem("is not known to treat every token by itself", is_certain=False)
        return [UNKNOWN] * len(node.outputs)
    if _loses_tokens(node, inputs, facts):
        result.problems[node] = Problem("is not followed with the dimensions known here", is_certain=False)
    return facts


def _loses_tokens(node: ir.Node, inputs: Sequence[Fact | None], facts: Sequence[Fact]) -> bool:
    """Whether the token axis goes in and a used output no longer tells where it is: what comes after is unguarded."""
    if node.op_type in MEETING_OPERATORS or not any(fact is not None and fact.token_axes for fact in inputs):
        return False
    for output, fact in zip_longest(node.outputs, facts[: len(node.outputs)], fillvalue=UNKNOWN):
        is_used = isinstance(output, ir.Value) and bool(output.consumers() or output.is_graph_output())
        is_lost = isinstance(fact, Fact) and (fact.dims is None or (UNKNOWN_DIM in fact.dims and not fact.token_axes))
        if is_used and is_lost:
            return True
    return False


def _is_computable(node: ir.Node, inputs: Sequence[Fact | None], facts: Sequence[Fact] | None) -> bool:
    """The rule left the content open, all of the inputs' is known, and the result is small enough."""
    if facts is not None and facts[0].content is not None:
        return False
    if not all(fact is None or fact.is_numeric for fact in inputs):
        return False
    if node.domain not in EVALUATED_DOMAINS:
        return False
    if facts is None or facts[0].dims is None:
        return node.op_type in EVALUATED_WITHOUT_RULE
    size = elements(facts[0].dims)
    return size is not None and size <= EVALUATED_ELEMENTS_MAX


def _evaluate(node: ir.Node, inputs: Sequence[Fact | None], opset: int) -> Sequence[Fact] | None:
    """The node's outputs by ONNX's reference implementation, or None where it has none or refuses."""
    proto = ir.serde.serialize_node(node)
    feeds = {
        name: fact.content for name, fact in zip(proto.input, inputs, strict=True) if fact is not None and name != ""
    }
    try:
        with np.errstate(all="ignore"):
            results = ReferenceEvaluator(proto, opsets={"": opset, "com.microsoft": 1}).run(None, feeds)
    except Exception:  # noqa: BLE001 - whatever the reference cannot do is simply not known
        return None
    return [of_array(np.asarray(result)) for result in results]


def _of_initializer(tensor: ir.TensorProtocol) -> Fact:
    if tensor.size >= WEIGHT_ELEMENTS_MIN or tensor.dtype in {ir.DataType.STRING, ir.DataType.UNDEFINED}:
        return Fact(tuple(int(dim) for dim in tensor.shape.numpy()))
    return of_array(tensor.numpy())
