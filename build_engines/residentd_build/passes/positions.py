"""Take every token's position from `position_ids`.

Ensures: no live node derives positions from the length of the cache or from the mask. An export that has no
`position_ids` input gets one.

Such exports count: a range from the cached length on, or a running sum of the mask. What counts is told by its numbers,
not by its nodes: a live value, [tokens] or [1, tokens], that is past, past + 1, … at every probe.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir
from onnx_ir.tape import Tape

from residentd_build.draft import MASK_INPUT, PAST_PATTERN, POSITION_INPUT, TOKEN_INPUT
from residentd_build.passes.prune import prune
from residentd_build.rules import CANONICAL_DOMAIN

if TYPE_CHECKING:
    from residentd_build.draft import Draft
    from residentd_build.trace import Trace

PROBES = ((7, 0), (5, 11), (3, 2))
"""(tokens, past): no two agree in either, so that nothing counts by coincidence."""


def run(draft: Draft) -> str:
    counted = _counted(draft)
    if not counted:
        return "positions: taken from position_ids" if draft.input(POSITION_INPUT) else "positions: none are used"
    positions = draft.input(POSITION_INPUT) or _add_input(draft)
    for value, rank, dtype in counted:
        _replace(draft, value, positions, rank, dtype)
    prune(draft)
    return f"positions: {len(counted)} values that counted from the cache's length now come from position_ids"


def _counted(draft: Draft) -> list[tuple[ir.Value, int, ir.DataType]]:
    """The live values that count, with their rank and element type."""
    probes = [(tokens, past, draft.follow(tokens, past)) for tokens, past in PROBES]
    suspects = _depend_on_lengths(draft)
    found = []
    for node in draft.graph:
        for output in node.outputs:
            if output in suspects and _counts(output, probes):
                content = probes[0][2].content(output)
                assert content is not None
                found.append((output, content.ndim, ir.DataType.from_numpy(content.dtype)))
    return found


def _depend_on_lengths(draft: Draft) -> set[ir.Value]:
    """Values computed from the mask, or from a cache outside attention."""
    sources = {value for value in draft.graph.inputs if value.name == MASK_INPUT or _is_past(value)}
    reached: set[ir.Value] = set()
    for node in draft.graph:
        if node.domain == CANONICAL_DOMAIN:
            continue
        if any(value in sources or value in reached for value in node.inputs if value is not None):
            reached.update(node.outputs)
    return reached


def _is_past(value: ir.Value) -> bool:
    return value.name is not None and PAST_PATTERN.fullmatch(value.name) is not None


def _counts(value: ir.Value, probes: list[tuple[int, int, Trace]]) -> bool:
    for tokens, past, trace in probes:
        content = trace.content(value)
        if content is None or content.shape not in {(tokens,), (1, tokens)} or content.dtype.kind not in "iuf":
            return False
        if not np.array_equal(content.reshape(-1), np.arange(past, past + tokens)):
            return False
    return True


def _add_input(draft: Draft) -> ir.Value:
    value = ir.Value(name=POSITION_INPUT, shape=ir.Shape([1, "tokens"]), type=ir.TensorType(ir.DataType.INT64))
    place = next(i for i, known in enumerate(draft.graph.inputs) if known.name == TOKEN_INPUT)
    draft.graph.inputs.insert(place + 1, value)
    return value


def _replace(draft: Draft, value: ir.Value, positions: ir.Value, rank: int, dtype: ir.DataType) -> None:
    tape = Tape()
    result = positions
    if rank == 1:
        result = tape.op("Reshape", [result, draft.integers([-1])])
    if dtype != ir.DataType.INT64:
        result = tape.op("Cast", [result], {"to": dtype})
    node = value.producer()
    assert node is not None
    draft.graph.insert_before(node, tape.nodes)
    ir.convenience.replace_all_uses_with(value, result)
