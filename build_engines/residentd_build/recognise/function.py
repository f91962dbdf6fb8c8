"""Recognise a part of a graph by what it computes instead of by how it is written.

A part runs from one value, through which everything that depends on the tokens must pass, to another. It is evaluated
on chosen numbers by ONNX's reference implementation: constants, casts, shapes and the order of operators do not matter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from residentd_build.draft import POSITION_INPUT, Draft, ancestors
from residentd_build.facts import TOKENS, UNKNOWN_DIM, Fact, of_array
from residentd_build.trace import Trace, trace

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import onnx_ir as ir

    from residentd_build.facts import Array, Dim

LOOK_BACK_NODES_MAX = 32
"""Nodes between the two ends of a part: exporters need up to 12 for a rotation and 9 for a norm."""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """The graph at one token for each of `positions`: whatever follows from positions and constants is known."""

    draft: Draft
    positions: Sequence[int]
    order: dict[ir.Node, int]
    symbolic: Trace
    numeric: Trace

    def depends_on_tokens(self, value: ir.Value) -> bool:
        return self.numeric.content(value) is None and value.const_value is None

    def dims(self, value: ir.Value) -> tuple[Dim, ...] | None:
        """Dimensions with the token axis marked."""
        return self.symbolic[value].dims

    def evaluate(self, result: ir.Value, source: ir.Value, numbers: Array) -> Array | None:
        """`result` when `source` holds `numbers`; None if something else is needed or the reference cannot tell."""

        def is_given(value: ir.Value) -> bool:
            return value is source or self.numeric.content(value) is not None

        needed = sorted(ancestors([result], is_given), key=self.order.__getitem__)
        inputs = {value for node in needed for value in node.inputs if value is not None and is_given(value)}
        given = {value: self.numeric[value] for value in inputs} | {source: of_array(numbers)}
        return trace(needed, given, self.draft.opset).content(result)

    def at(self, positions: Sequence[int], nodes: set[ir.Node]) -> Surroundings:
        """The same graph at other positions, followed through `nodes` only."""
        numeric = _numeric(self.draft, positions, sorted(nodes, key=self.order.__getitem__))
        return Surroundings(self.draft, positions, self.order, self.symbolic, numeric)


def surroundings(draft: Draft, positions: Sequence[int]) -> Surroundings:
    order = {node: place for place, node in enumerate(draft.graph)}
    symbolic = draft.follow(TOKENS, UNKNOWN_DIM)
    return Surroundings(draft, positions, order, symbolic, _numeric(draft, positions, list(draft.graph)))


def _numeric(draft: Draft, positions: Sequence[int], nodes: Sequence[ir.Node]) -> Trace:
    given = draft.step_facts(len(positions), 0)
    index = draft.input(POSITION_INPUT)
    if index is not None:
        given[index] = Fact((1, len(positions)), np.array([positions], np.int64))
    return trace(nodes, given, draft.opset)


def bottlenecks(value: ir.Value, around: Surroundings) -> Iterator[ir.Value]:
    """Values through which all that `value` takes from the tokens passes, nearest first."""
    frontier = {value}
    for _ in range(LOOK_BACK_NODES_MAX):
        if not frontier or any(item.producer() is None for item in frontier):
            return  # nothing comes from the tokens, or straight from a graph input: nothing lies before it
        latest = max((node for item in frontier if (node := item.producer()) is not None), key=around.order.__getitem__)
        frontier -= set(latest.outputs)
        frontier |= {item for item in latest.inputs if item is not None and around.depends_on_tokens(item)}
        if len(frontier) == 1:
            yield next(iter(frontier))
