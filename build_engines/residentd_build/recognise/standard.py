"""Attention as the standard operator of opset 23 and later, with the cache as its own inputs and outputs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from residentd_build.recognise.core import AttentionCore, Probe, UnrecognisedError
from residentd_build.rules import attribute

if TYPE_CHECKING:
    from collections.abc import Sequence

    import onnx_ir as ir

    from residentd_build.draft import Cache

NONPAD_INPUT_INDEX = 6
PLAIN_OUTPUTS = 3
ATTRIBUTES = frozenset(
    {"q_num_heads", "kv_num_heads", "scale", "softcap", "is_causal", "softmax_precision", "qk_matmul_output_mode"}
)


def recognise(cache: Cache, probes: Sequence[Probe]) -> AttentionCore | None:
    """The core around the Attention node that takes this cache, or None if there is none."""
    users = [node for node in cache.past_key.consumers() if node.op_type == "Attention" and node.domain == ""]
    if len(users) != 1 or len(users[0].inputs) <= 5 or users[0].inputs[4] is not cache.past_key:
        return None
    node = users[0]
    if node.inputs[5] is not cache.past_value or len(node.outputs) < PLAIN_OUTPUTS:
        raise UnrecognisedError(f"node {node.name} does not carry both halves of the cache")
    if len(node.inputs) > NONPAD_INPUT_INDEX and node.inputs[NONPAD_INPUT_INDEX] is not None:
        raise UnrecognisedError(f"node {node.name} counts its keys itself (nonpad_kv_seqlen)")
    if unknown := sorted(node.attributes.keys() - ATTRIBUTES):
        raise UnrecognisedError(f"node {node.name} has attributes that are not known: {', '.join(unknown)}")
    if any(output.uses() or output.is_graph_output() for output in node.outputs[PLAIN_OUTPUTS:]):
        raise UnrecognisedError(f"the scores of node {node.name} are used elsewhere")
    query, key, value = (_required(node, index) for index in range(3))
    dims = probes[0].trace[query].dims
    if dims is None:
        raise UnrecognisedError(f"the query {query.name} of node {node.name} has no known shape")
    is_heads_first = len(dims) == 4
    heads = dims[1] if is_heads_first else attribute(node, "q_num_heads", 0)
    if not isinstance(heads, int) or heads < 1:
        raise UnrecognisedError(f"node {node.name} does not say how many heads it has")
    return AttentionCore(
        cache=cache,
        query=query,
        key=key,
        value=value,
        output=node.outputs[0],
        present_key=node.outputs[1],
        present_value=node.outputs[2],
        heads=heads,
        scale=float(attribute(node, "scale", cache.dim**-0.5)),
        softcap=float(attribute(node, "softcap", 0.0)),
        mask=node.inputs[3],
        is_causal=bool(attribute(node, "is_causal", 0)),
        is_heads_first=is_heads_first,
    )


def _required(node: ir.Node, index: int) -> ir.Value:
    value = node.inputs[index]
    if value is None:
        raise UnrecognisedError(f"node {node.name} lacks input {index}")
    return value
