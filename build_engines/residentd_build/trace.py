"""Follow a graph from its inputs without running it: one Fact per value, and every place where tokens may meet."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir
from onnx.reference import ReferenceEvaluator

from residentd_build.facts import UNKNOWN, UNKNOWN_DIM, Fact, elements, of_array
from residentd_build.rules import MixesError, attribute, check_counts, rule_for

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
"""Results, and operands, above this size are not computed with: at most 128 MiB of float32 at a time."""
WORK_MAX = 1 << 28
"""What evaluating the nodes of one trace may cost, in numbers that numpy reads or writes: 3 s, whatever a graph holds.
The most of any export tried is 1.3 million, SmolLM2-135M's; ten tables of 131,072 places by 64 make 250 (2026-12)."""
PRODUCT_WORK = 4
"""Of a multiplication and an addition: numpy has fast products of float32 and float64 only."""
SLOW_WORK = 32
"""Of a number where the reference goes from one to the next in Python, or may."""
PRODUCT_OPERATORS = frozenset({"MatMul", "MatMulInteger", "Gemm", "Attention"})
_FAST = (
    "Abs Neg Sqrt Reciprocal Exp Log Sigmoid Tanh Relu Cos Sin Not IsNaN IsInf Floor Ceil Round Sign Clip Cast "
    "CastLike Add Sub Mul Div Pow Equal Greater GreaterOrEqual Less LessOrEqual And Or Xor Where Min Max Sum Mod "
    "ReduceMean ReduceSum ReduceMax ReduceMin ReduceProd Softmax CumSum Concat Transpose Slice Split Expand Tile "
    "Gather Identity Reshape Squeeze Unsqueeze Trilu NonZero EyeLike RotaryEmbedding"
)
FAST_OPERATORS = frozenset(_FAST.split())
"""Those that the reference computes by a few calls of numpy."""


@dataclass(frozen=True, slots=True)
class Problem:
    """Why a node is not shown to treat every token by itself; certain: it is shown not to."""

    why: str
    is_certain: bool


@dataclass(slots=True)
class Trace:
    """Facts by value. `problems` holds the nodes at which the token axis may be mixed.

    What is not computed for want of `work_left` is simply not known.
    """

    facts: dict[ir.Value, Fact] = field(default_factory=dict)
    problems: dict[ir.Node, Problem] = field(default_factory=dict)
    work_left: int = WORK_MAX

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
    work = _work(node, inputs, facts) if _is_computable(node, inputs, facts) else None
    if work is not None and work <= result.work_left:
        result.work_left -= work
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
    """The rule left the content open, all of the inputs' is known, and it is numbers by a node without a body."""
    if facts is not None and facts[0].content is not None:
        return False
    if not all(fact is None or fact.is_numeric for fact in inputs):
        return False
    if node.op_type == "Cast" and attribute(node, "to") == ir.DataType.STRING:
        return False
    return node.domain in EVALUATED_DOMAINS


def _work(node: ir.Node, inputs: Sequence[Fact | None], facts: Sequence[Fact] | None) -> int | None:
    """What evaluating the node costs; None where nobody knows, or an operand or the result is too large."""
    contents = [None if fact is None else fact.content for fact in inputs]
    sizes = [0 if content is None else content.size for content in contents]
    if facts is not None and facts[0].dims is not None:
        size = elements(facts[0].dims)
    elif node.op_type not in EVALUATED_WITHOUT_RULE:
        size = None
    elif node.op_type == "OneHot":
        size = sizes[0] * _depth(contents[1:2])
    else:
        size = max(sizes, default=0)
    if size is None or max(size, *sizes, 0) > EVALUATED_ELEMENTS_MAX:
        return None
    if node.op_type in PRODUCT_OPERATORS:
        return sum(sizes) + PRODUCT_WORK * size * _summed(node, contents)
    return (sum(sizes) + size) * (1 if node.op_type in FAST_OPERATORS else SLOW_WORK)


def _summed(node: ir.Node, contents: Sequence[Array | None]) -> int:
    """Products that each number of a product of matrices is a sum of, at most."""
    if node.op_type == "Attention":  # the keys, new and past, once for the scores and once for the values
        known = (content for content in (*contents[1:2], *contents[4:5]) if content is not None)
        return 2 * sum(math.prod(content.shape[-2:-1]) for content in known)
    left = contents[0]
    return 1 if left is None else max(left.shape[-2:], default=1)


def _depth(contents: Sequence[Array | None]) -> int:
    """Of a OneHot: numbers for each index."""
    numbers = [number for content in contents if content is not None for number in content.reshape(-1)[:1]]
    return max((int(np.nan_to_num(number)) for number in numbers), default=1)


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
