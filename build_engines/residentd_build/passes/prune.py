"""Remove what no output needs.

Ensures: every node and initializer contributes to an output; inputs that nothing uses are gone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from residentd_build.draft import ancestors

if TYPE_CHECKING:
    from residentd_build.draft import Draft


def run(draft: Draft) -> str:
    before = draft.graph.num_nodes()
    gone = prune(draft)
    inputs = f"; dropped inputs {', '.join(gone)}" if gone else ""
    return f"prune: {before:,} → {draft.graph.num_nodes():,} nodes{inputs}"


def prune(draft: Draft) -> list[str]:
    """Remove dead nodes, initializers and inputs, and sort the rest. Returns the names of the inputs."""
    graph = draft.graph
    live = ancestors(graph.outputs)
    graph.remove([node for node in graph if node not in live], safe=True)
    for name, value in list(graph.initializers.items()):
        if not value.uses() and not value.is_graph_output():
            del graph.initializers[name]
    unused = [value for value in graph.inputs if not value.uses() and not value.is_graph_output()]
    for value in unused:
        graph.inputs.remove(value)
    graph.sort()
    return [value.name or "" for value in unused]
