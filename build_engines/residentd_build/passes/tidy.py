"""Take out changes of layout that undo each other.

Ensures: no Transpose follows one that it reverses, no Reshape, Squeeze or Unsqueeze follows another, and none leaves
the shape as it was. Only where all dimensions but the token axis are known.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import onnx_ir as ir

from residentd_build.facts import TOKEN_AXES, TOKENS, UNKNOWN_DIM
from residentd_build.passes.prune import prune
from residentd_build.rules import attribute

if TYPE_CHECKING:
    from residentd_build.draft import Draft
    from residentd_build.facts import Dim
    from residentd_build.trace import Trace

VIEWS = frozenset({"Reshape", "Squeeze", "Unsqueeze", "Flatten"})
NO_OPS = frozenset({"Identity", "Dropout"})


def run(draft: Draft) -> str:
    before = draft.graph.num_nodes()
    facts = draft.follow(TOKENS, UNKNOWN_DIM)
    for node in list(draft.graph):
        _shorten(draft, node, facts)
    prune(draft)
    return f"tidy: {before:,} → {draft.graph.num_nodes():,} nodes"


def _shorten(draft: Draft, node: ir.Node, facts: Trace) -> None:
    """Nodes come in order, so what lies before `node` is short already."""
    if not node.inputs or node.inputs[0] is None or node.outputs[0].is_graph_output():
        return
    source, result = node.inputs[0], node.outputs[0]
    before = source.producer()
    if node.op_type in NO_OPS or (node.op_type == "Cast" and _is_same_type(source, node)):
        ir.convenience.replace_all_uses_with(result, source)
    elif node.op_type == "Transpose" and before is not None and before.op_type == "Transpose":
        if _reverses(before, node) and before.inputs[0] is not None:
            ir.convenience.replace_all_uses_with(result, before.inputs[0])
    elif node.op_type in VIEWS:
        if before is not None and before.op_type in VIEWS and before.inputs[0] is not None:
            source = before.inputs[0]
        _shorten_view(draft, node, source, facts)


def _shorten_view(draft: Draft, node: ir.Node, source: ir.Value, facts: Trace) -> None:
    result = node.outputs[0]
    dims = facts[result].dims
    if dims is None or not _is_plain(dims):
        return
    if facts[source].dims == dims:
        ir.convenience.replace_all_uses_with(result, source)
    elif source is not node.inputs[0]:
        target = [dim if isinstance(dim, int) else -1 for dim in dims]
        reshape = ir.node("Reshape", [source, draft.integers(target)], name=f"{node.name}.short")
        reshape.outputs[0].name = f"{result.name}.short"
        facts.facts[reshape.outputs[0]] = facts[result]
        draft.graph.insert_before(node, [reshape])
        ir.convenience.replace_all_uses_with(result, reshape.outputs[0])


def _is_plain(dims: tuple[Dim, ...]) -> bool:
    symbols = [dim for dim in dims if not isinstance(dim, int)]
    return 0 not in dims and len(symbols) <= 1 and all(dim in TOKEN_AXES for dim in symbols)


def _is_same_type(source: ir.Value, node: ir.Node) -> bool:
    return source.dtype is not None and source.dtype == attribute(node, "to")


def _reverses(first: ir.Node, second: ir.Node) -> bool:
    orders = [attribute(node, "perm") for node in (first, second)]
    return all(orders) and [orders[0][axis] for axis in orders[1]] == list(range(len(orders[0])))
