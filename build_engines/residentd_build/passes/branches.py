"""Put the branch that every step takes in the place of an If.

Ensures: no If is left whose condition is the same at every step that a slot can hold. Merged decoders ask their input
use_cache_branch: a cache of no tokens is a cache too, so the branch with a past serves the first step as well.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import onnx_ir as ir

from residentd.errors import Finding, SourceError
from residentd_build.draft import ancestors
from residentd_build.passes.prune import prune
from residentd_build.rules import attribute
from residentd_build.trace import trace

if TYPE_CHECKING:
    from residentd_build.draft import Draft

BRANCHES_MAX = 10_000  # inlining may bring further ones up
REMEDY = (
    "Install it with a --context in which the choice is always the same (what the model calls its original or short "
    "context), or export it without control flow"
)


def run(draft: Draft) -> str:
    """Raises SourceError for control flow that depends on the step."""
    taken = 0
    while (node := next((node for node in draft.graph if node.op_type == "If"), None)) is not None:
        if taken == BRANCHES_MAX:
            raise SourceError([Finding(f"more than {BRANCHES_MAX:,} If nodes", "model.onnx", REMEDY)])
        taken_one, other = _branches(draft, node)
        _inline(draft, node, taken_one)
        _let_go(other)
        taken += 1
    left = [node for node in draft.graph if node.op_type in {"Loop", "Scan"}]
    if left:
        raise SourceError(
            [Finding(f"node {node.name} ({node.op_type}) repeats", "model.onnx", REMEDY) for node in left[:8]]
        )
    if not taken:
        return "branches: none"
    prune(draft)
    return f"branches: {taken} If nodes, each replaced by the branch that every step takes"


def _branches(draft: Draft, node: ir.Node) -> tuple[ir.Graph, ir.Graph]:
    """The branch that is taken at the first step, in the middle and at the end of a slot, and the other."""
    half = max(draft.context // 2, 1)
    needed = ancestors(value for value in node.inputs if value is not None)
    nodes = [before for before in draft.graph if before in needed]
    found = set()
    for tokens, past in ((1, 0), (half, 0), (half, draft.context - half), (1, draft.context - 1)):
        content = trace(nodes, draft.step_facts(tokens, past), draft.opset).content(node.inputs[0])
        found.add(None if content is None or content.size != 1 else bool(content.reshape(-1)[0]))
    if len(found) > 1 or None in found:
        why = "depends on the tokens" if None in found else f"changes within {draft.context:,} tokens"
        raise SourceError([Finding(f"the condition of node {node.name} (If) {why}", "model.onnx", REMEDY)])
    both = attribute(node, "then_branch"), attribute(node, "else_branch")
    return both if found == {True} else (both[1], both[0])


def _let_go(branch: ir.Graph) -> None:
    """What the branch that is not taken reads from around it is not used by it any more."""
    for node in ir.traversal.RecursiveGraphIterator(branch):
        for index in range(len(node.inputs)):
            node.replace_input_with(index, None)


def _inline(draft: Draft, node: ir.Node, branch: ir.Graph) -> None:
    results = list(branch.outputs)
    for value in branch.initializers.values():
        _own(draft, value)
    branch.initializers.clear()
    nodes = list(branch)
    branch.outputs.clear()
    branch.remove(nodes)
    _rename(draft, nodes)
    draft.replace(node, nodes, results)


def _rename(draft: Draft, nodes: list[ir.Node]) -> None:
    """Names that the graph has already: two branches, or a branch and what surrounds it, may share them."""
    known = {node.name for node in draft.graph}
    values = {value.name for node in draft.graph for value in node.outputs} | set(draft.graph.initializers)
    for node in nodes:
        node.name = _fresh(node.name, known)
        for value in node.outputs:
            if value.name:
                value.name = _fresh(value.name, values)


def _fresh(name: str | None, known: set[str | None]) -> str:
    """`name`, or one that is not in `known`, which then has it."""
    found, count = str(name), 1
    while found in known:
        found, count = f"{name}.{count}", count + 1
    known.add(found)
    return found


def _own(draft: Draft, value: ir.Value) -> None:
    """A branch's constant becomes the graph's, under a name that nothing else has."""
    assert value.const_value is not None
    name = _fresh(value.name, set(draft.graph.initializers))
    moved = ir.Value(name=name, shape=value.shape, type=value.type, const_value=value.const_value)
    ir.convenience.replace_all_uses_with(value, moved)
    draft.graph.register_initializer(moved)
