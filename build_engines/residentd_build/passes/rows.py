"""Compute only the rows whose logits are wanted, from the last attention on.

Ensures: `logits` is [rows, vocab] for the packed tokens that `logits_index` names; the token axis ends at the gathers,
which stand as early as possible: after the last layer's attention, not before the head.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from residentd.errors import Finding, SourceError
from residentd_build.draft import LOGITS_OUTPUT, descendants
from residentd_build.facts import TOKENS, UNKNOWN_DIM
from residentd_build.passes.attention import RAGGED_ATTENTION
from residentd_build.rules import ROW_INDEX_INPUT

if TYPE_CHECKING:
    from residentd_build.draft import Draft


def run(draft: Draft) -> str:
    """Raises SourceError if a value that crosses into the tail has no single token axis."""
    facts = draft.follow(TOKENS, UNKNOWN_DIM)
    attention = [node for node in draft.graph if node.op_type == RAGGED_ATTENTION]
    start = attention[-1].outputs[0]
    tail = descendants(start)
    crossing = {start: None} | {
        value: None
        for node in draft.graph
        if any(output in tail for output in node.outputs) and node is not attention[-1]
        for value in node.inputs
        if value is not None and value not in tail and value.const_value is None
    }
    index = ir.Value(name=ROW_INDEX_INPUT, shape=ir.Shape(["rows"]), type=ir.TensorType(ir.DataType.INT64))
    draft.graph.inputs.append(index)
    for value in crossing:
        axes = facts[value].token_axes
        if len(axes) > 1 or facts[value].dims is None:
            raise SourceError([_no_axis(value)])
        if axes:
            _gather(draft, value, index, axes[0], tail)
    _flatten_logits(draft)
    return f"rows: {len(crossing)} values gathered before layer {len(attention) - 1}'s output projection"


def _gather(draft: Draft, value: ir.Value, index: ir.Value, axis: int, tail: set[ir.Value]) -> None:
    users = [(node, place) for node, place in value.uses() if any(output in tail for output in node.outputs)]
    users = [(node, place) for node, place in users if node.op_type != RAGGED_ATTENTION]
    gather = ir.node("Gather", [value, index], {"axis": axis}, name=f"{value.name}.rows")
    gather.outputs[0].name = f"{value.name}.rows"
    draft.graph.insert_before(users[0][0], [gather])
    for node, place in users:
        node.replace_input_with(place, gather.outputs[0])
    draft.graph.sort()


def _flatten_logits(draft: Draft) -> None:
    """[1, rows, vocab] → [rows, vocab]."""
    place = next(i for i, value in enumerate(draft.graph.outputs) if value.name == LOGITS_OUTPUT)
    exported = draft.graph.outputs[place]
    axis = draft.constant("axis.0", np.array([0], np.int64))
    squeeze = ir.node("Squeeze", [exported, axis], name=LOGITS_OUTPUT)
    assert exported.shape is not None
    exported.name = f"{LOGITS_OUTPUT}.batched"
    result = squeeze.outputs[0]
    result.name, result.type, result.shape = LOGITS_OUTPUT, exported.type, ir.Shape(["rows", exported.shape[2]])
    exported.shape = None
    draft.graph.append(squeeze)
    draft.graph.outputs[place] = result


def _no_axis(value: ir.Value) -> Finding:
    return Finding(
        f"{value.name} reaches the last layer and it cannot be told which of its axes counts tokens",
        "model.onnx",
        "Report the exporter and its version",
    )
