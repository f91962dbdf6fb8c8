"""Replace what is the same at every step by constants.

Ensures: no live node but the Transpose of a weight computes what follows from constants and the batch size 1 alone, and
no Reshape computes its target shape where one -1 can stand for the number of tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import onnx_ir as ir

from residentd_build.facts import TOKENS, UNKNOWN_DIM
from residentd_build.passes.prune import prune

if TYPE_CHECKING:
    from residentd_build.draft import Draft
    from residentd_build.trace import Trace

CONSTANT_ELEMENTS_MAX = 1 << 16


def run(draft: Draft) -> str:
    before = draft.graph.num_nodes()
    facts = draft.follow(TOKENS, UNKNOWN_DIM)
    for node in draft.graph:
        if node.op_type == "Reshape":
            _fold_target(draft, node, facts)
        if node.op_type == "Transpose" and node.inputs[0] is not None and node.inputs[0].const_value is not None:
            continue  # a weight, as tied heads have it: the lowering multiplies by it as it is
        for output in node.outputs:
            content = facts.content(output)
            if content is not None and content.size <= CONSTANT_ELEMENTS_MAX and not output.is_graph_output():
                ir.convenience.replace_all_uses_with(output, draft.constant(f"{output.name}.folded", content))
    prune(draft)
    return f"fold: {before:,} → {draft.graph.num_nodes():,} nodes"


def _fold_target(draft: Draft, node: ir.Node, facts: Trace) -> None:
    """A Reshape to one symbol and numbers: the symbol is whatever is left, so -1 says the same."""
    dims = facts[node.outputs[0]].dims
    if dims is None or 0 in dims or [dim for dim in dims if not isinstance(dim, int)] != [TOKENS]:
        return
    target = [dim if isinstance(dim, int) else -1 for dim in dims]
    node.replace_input_with(1, draft.integers(target))
