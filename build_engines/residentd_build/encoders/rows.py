"""Whether rows of calls that share a run keep apart: traced from the graph's inputs to its outputs, node by node.

This is a proof and not a trial. Every node on the way must be known to compute each row from that row alone, whatever
the numbers and however many rows there are; a node that nothing is known of ends it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import onnx_ir as ir

from residentd_build.encoders.row_facts import (
    ONE,
    ROWS,
    UNKNOWN,
    Fact,
    MixedRowsError,
    Size,
    Symbol,
    UnprovenRowsError,
    of_array,
)
from residentd_build.encoders.row_rules import COUNTED_INPUTS, MEASURING, RULES, Step
from residentd_build.foreign import cut

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

Axes = tuple[int | str, ...]
STANDARD = "ai.onnx"
COUNTING = frozenset({"Shape", "Size"})


@dataclass(frozen=True, slots=True)
class Doubt:
    """Why rows are not shown to keep apart; certain: they are shown not to."""

    why: str
    is_certain: bool = False


def doubt_of(model: ir.Model, inputs: Mapping[str, Axes], outputs: Collection[str]) -> Doubt | None:
    """What stands against a run of several calls that gives each what it gets alone; None where that is proven.

    `inputs`: their axes, sizes or names of free ones, "?" where there is none; the first is the rows'.
    """
    reason = _second_axis(inputs)
    if reason:
        return Doubt(reason)
    facts = {value: _given(value, inputs) for value in model.graph.inputs if value.name in inputs}
    wanted = [value for value in model.graph.outputs if value.name in outputs]
    opset = model.graph.opset_imports.get("", 1)
    nodes = _needed(model.graph, wanted)
    for place, node in enumerate(nodes):
        taken = [None if value is None else _fact(value, facts) for value in node.inputs]
        try:
            found = _follow(Step(node, taken, opset, str(place)))
        except UnprovenRowsError as error:
            measuring = any(later.op_type in MEASURING for later in nodes[place:])
            return Doubt(f"{_named(node)} {error}", measuring or isinstance(error, MixedRowsError))
        facts |= dict(zip(node.outputs, found, strict=False))
    for value in wanted:
        fact = _fact(value, facts)
        if fact.axis != 0 or fact.dims is None or fact.dims[0] != ROWS or fact.outer != ONE:
            return Doubt(f"the first axis of output {cut(str(value.name), 60)} is not shown to be that of the inputs")
    return None


def _second_axis(inputs: Mapping[str, Axes]) -> str:
    """Two calls are put together along the first axis alone, so no other may have to be as long."""
    firsts = {axes[0] for axes in inputs.values() if axes}
    for name, axes in inputs.items():
        if not axes:
            return f"{cut(name, 60)} is a single number"
        if isinstance(axes[0], int):
            return f"the first axis of {cut(name, 60)} is fixed"
        if any(axis in firsts and axis != "?" for axis in axes[1:]):
            return f"input {cut(name, 60)} is as long along another axis as along its first"
    return ""


def _given(value: ir.Value, inputs: Mapping[str, Axes]) -> Fact:
    axes = inputs[str(value.name)]
    rest = [
        Size(axis)
        if isinstance(axis, int)
        else Size(1, (Symbol(f"{value.name}.{place}" if axis == "?" else f"axis {axis}"),))
        for place, axis in enumerate(axes[1:], start=1)
    ]
    return Fact((ROWS, *rest), 0)


def _needed(graph: ir.Graph, wanted: Iterable[ir.Value]) -> list[ir.Node]:
    """The nodes that the outputs are computed from, each after those that it needs."""
    needed: set[ir.Node] = set()
    waiting = [value.producer() for value in wanted]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in needed:
            needed.add(node)
            waiting += [value.producer() for value in node.inputs if value is not None]
    return [node for node in graph if node in needed]


def _fact(value: ir.Value, facts: dict[ir.Value, Fact]) -> Fact:
    if value not in facts and value.const_value is not None:
        facts[value] = _of_tensor(value.const_value)
    return facts.get(value, UNKNOWN)


def _of_tensor(tensor: ir.TensorProtocol) -> Fact:
    if tensor.dtype in {ir.DataType.STRING, ir.DataType.UNDEFINED} or tensor.dtype.bitwidth < 8:
        return Fact(tuple(Size(int(size)) for size in tensor.shape.numpy()))
    return of_array(tensor.numpy())


def _follow(step: Step) -> Sequence[Fact]:
    """Facts of the outputs. Raises UnprovenRowsError."""
    node, inputs = step.node, step.inputs
    kinds = {attribute.type for attribute in node.attributes.values()}
    if kinds & {ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS}:
        raise UnprovenRowsError("chooses while it runs what is computed")
    domain = "" if node.domain == STANDARD else node.domain
    rule = RULES.get((domain, node.op_type))
    matters = any(fact is not None and (fact.has_rows or fact.counts_rows) for fact in inputs)
    try:
        found = rule(step) if rule else None
    except UnprovenRowsError:
        if matters:
            raise
        found = None
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        if matters:
            raise UnprovenRowsError("is written in a way that is not followed") from error
        found = None
    if found is None:
        if matters:
            raise UnprovenRowsError("is not known to treat every row by itself")
        return [UNKNOWN] * len(node.outputs)
    _check_counted(step, found)
    _check_seen(step, found)
    return found


def _check_counted(step: Step, found: Sequence[Fact]) -> None:
    """The number of rows may decide shapes; whatever else is computed from it would differ with the company."""
    allowed = COUNTED_INPUTS.get(step.node.op_type, frozenset())
    counts = any(
        fact is not None and fact.counts_rows and place not in allowed for place, fact in enumerate(step.inputs)
    )
    if counts and any(fact.content is None for fact in found):
        raise UnprovenRowsError("computes with the number of rows")


def _check_seen(step: Step, found: Sequence[Fact]) -> None:
    """What has rows gives rows, in every output that is used."""
    if step.node.op_type in COUNTING or not any(fact is not None and fact.has_rows for fact in step.inputs):
        return
    for place in range(len(step.node.outputs)):
        if step.is_used(place) and (place >= len(found) or not found[place].has_rows):
            raise UnprovenRowsError("gives something of which it is not known how it has the rows")


def _named(node: ir.Node) -> str:
    name = str(node.name or (node.outputs[0].name if node.outputs else ""))
    return f"its {cut(node.op_type, 40)} {cut(name, 80)}"
