"""Attention as the standard operator of opset 23 and later, with the cache as its own inputs and outputs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from residentd_build.draft import descendants
from residentd_build.recognise.core import AttentionCore, Probe, UnrecognisedError
from residentd_build.recognise.decomposed import join_of, joined_with
from residentd_build.rules import attribute

if TYPE_CHECKING:
    from collections.abc import Sequence

    import onnx_ir as ir

    from residentd_build.draft import Cache

FENCES = frozenset({"Attention", "MatMul", "Softmax", "Shape"})
NONPAD_INPUT_INDEX = 6
PLAIN_OUTPUTS = 3
ATTRIBUTES = frozenset(
    {"q_num_heads", "kv_num_heads", "scale", "softcap", "is_causal", "softmax_precision", "qk_matmul_output_mode"}
)


def recognise(cache: Cache, probes: Sequence[Probe]) -> AttentionCore | None:
    """The core around the Attention node that takes this cache, or its Concat with the new keys; None without one."""
    users = [node for node in cache.past_key.consumers() if node.op_type == "Attention" and node.domain == ""]
    if len(users) != 1 or len(users[0].inputs) <= 5 or users[0].inputs[4] is not cache.past_key:
        return _joined(cache, probes)
    node = users[0]
    if node.inputs[5] is not cache.past_value or len(node.outputs) < PLAIN_OUTPUTS:
        raise UnrecognisedError(f"node {node.name} does not carry both halves of the cache")
    key, value = _required(node, 1), _required(node, 2)
    return _core(cache, node, probes, (key, value, node.outputs[1], node.outputs[2]))


def _joined(cache: Cache, probes: Sequence[Probe]) -> AttentionCore | None:
    """Cached and new keys are joined before the node, which then has no cache, and repeated for groups of heads."""
    key_join, value_join = join_of(cache.past_key), join_of(cache.past_value)
    if key_join is None or value_join is None:
        return None
    nodes = _attentions(key_join.outputs[0], 1)
    if len(nodes) != 1 or nodes != _attentions(value_join.outputs[0], 2):
        return None
    (node,) = nodes
    if any(index < len(node.inputs) and node.inputs[index] is not None for index in (4, 5)):
        raise UnrecognisedError(f"node {node.name} has a cache of its own beside the joined one")
    key, value = joined_with(key_join, cache.past_key), joined_with(value_join, cache.past_value)
    return _core(cache, node, probes, (key, value, key_join.outputs[0], value_join.outputs[0]))


def _attentions(joined: ir.Value, place: int) -> set[ir.Node]:
    """The Attention nodes whose keys (or values) these are, possibly repeated."""
    reach = descendants(joined, FENCES)
    users = {node for value in reach for node in value.consumers() if node.op_type == "Attention" and node.domain == ""}
    return {node for node in users if node.inputs[place] in reach}


def _core(
    cache: Cache, node: ir.Node, probes: Sequence[Probe], parts: tuple[ir.Value, ir.Value, ir.Value, ir.Value]
) -> AttentionCore:
    """`parts`: new keys and values, and what holds them behind the cached ones."""
    if len(node.inputs) > NONPAD_INPUT_INDEX and node.inputs[NONPAD_INPUT_INDEX] is not None:
        raise UnrecognisedError(f"node {node.name} counts its keys itself (nonpad_kv_seqlen)")
    if unknown := sorted(node.attributes.keys() - ATTRIBUTES):
        raise UnrecognisedError(f"node {node.name} has attributes that are not known: {', '.join(unknown)}")
    if any(output.uses() or output.is_graph_output() for output in node.outputs[PLAIN_OUTPUTS:]):
        raise UnrecognisedError(f"the scores of node {node.name} are used elsewhere")
    key, value, present_key, present_value = parts
    query = _required(node, 0)
    dims = probes[0].trace[query].dims
    if dims is None:
        raise UnrecognisedError(f"the query {query.name} of node {node.name} has no known shape")
    is_heads_first = len(dims) == 4
    heads = dims[1] if is_heads_first else attribute(node, "q_num_heads", 0)
    if not isinstance(heads, int) or heads < 1:
        raise UnrecognisedError(f"node {node.name} does not say how many heads it has")
    mask = node.inputs[3] if len(node.inputs) > 3 else None
    return AttentionCore(
        cache=cache,
        query=query,
        key=key,
        value=value,
        output=node.outputs[0],
        present_key=present_key,
        present_value=present_value,
        heads=heads,
        scale=float(attribute(node, "scale", cache.dim**-0.5)),
        softcap=float(attribute(node, "softcap", 0.0)),
        masks=() if mask is None else (mask,),
        is_causal=bool(attribute(node, "is_causal", 0)),
        is_heads_first=is_heads_first,
    )


def _required(node: ir.Node, index: int) -> ir.Value:
    value = node.inputs[index]
    if value is None:
        raise UnrecognisedError(f"node {node.name} lacks input {index}")
    return value
