"""Show that tokens meet in attention and nowhere else.

Ensures: past and mask inputs reach nothing but RaggedAttention, and no other operator combines the token axis with
itself. Operators that are not known are named in the manifest: for those the numerical verification stands alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from residentd.errors import Finding, SourceError
from residentd_build.draft import MASK_INPUT
from residentd_build.facts import TOKENS, UNKNOWN_DIM
from residentd_build.passes.attention import RAGGED_ATTENTION

if TYPE_CHECKING:
    from residentd_build.draft import Draft

REMEDY = "It cannot be served in a batch. Report the model's architecture and the exporter"
NAMED_MAX = 3


def run(draft: Draft) -> str:
    """Raises SourceError with every node that breaks the guarantee."""
    facts = draft.follow(TOKENS, UNKNOWN_DIM)
    findings = _leaks(draft)
    findings += [
        Finding(f"node {node.name} ({node.op_type}) {problem.why}", "model.onnx", REMEDY)
        for node, problem in facts.problems.items()
        if problem.is_certain
    ]
    if findings:
        raise SourceError(findings)
    unproven = [node.name or node.op_type for node in facts.problems]
    if unproven:
        named = ", ".join(unproven[:NAMED_MAX])
        return f"independence: not proven at {len(unproven)} nodes ({named}); there it rests on the verified numbers"
    return f"independence: proven for all {draft.graph.num_nodes():,} nodes"


def _leaks(draft: Draft) -> list[Finding]:
    findings = []
    mask = draft.input(MASK_INPUT)
    if mask is not None:
        users = ", ".join(str(node.name) for node in mask.consumers())
        findings.append(Finding(f"{MASK_INPUT} is still used outside attention, by {users}", "model.onnx", REMEDY))
    for cache in draft.caches:
        for value in (cache.past_key, cache.past_value):
            others = [str(node.name) for node in value.consumers() if node.op_type != RAGGED_ATTENTION]
            if others:
                what = f"{value.name} is used outside attention, by {', '.join(others[:NAMED_MAX])}"
                findings.append(Finding(what, "model.onnx", REMEDY))
    return findings
