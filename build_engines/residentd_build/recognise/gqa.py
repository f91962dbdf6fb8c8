"""Attention as com.microsoft::GroupQueryAttention, with the cache, the rotation and the window inside.

There is nothing to evaluate: the operator's specification says what it computes. What is checked is that its lengths
say "every token up to here", and that no input or attribute asks for something else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from residentd_build.recognise.core import AttentionCore, Probe, Rotary, UnrecognisedError
from residentd_build.rules import attribute

if TYPE_CHECKING:
    from collections.abc import Sequence

    import onnx_ir as ir

    from residentd_build.draft import Cache
    from residentd_build.facts import Array

OPERATOR = "GroupQueryAttention"
INPUTS = {
    "attention_bias": 10,
    "k_scale": 12,
    "v_scale": 13,
    "q_norm_weight": 14,
    "k_norm_weight": 15,
    "query_seqlens": 16,
}
"""Inputs of onnxruntime 1.32's schema that change what is computed, by place."""
POSITION_IDS_INPUT, SINKS_INPUT = 9, 11
NEUTRAL = {"smooth_softmax": (0, -1), "qk_output": (0,), "causal": (1,), "sliding_window_cache": (0,)}
"""Attributes that change it, with the values at which they do not."""
KNOWN = frozenset(
    {
        "num_heads",
        "kv_num_heads",
        "scale",
        "softcap",
        "do_rotary",
        "rotary_interleaved",
        "local_window_size",
        "k_quant_type",
        "v_quant_type",
        "kv_cache_bit_width",
        "q_norm_epsilon",
        "k_norm_epsilon",
        "qk_norm_epsilon",
    }
)


def recognise(cache: Cache, probes: Sequence[Probe]) -> AttentionCore | None:
    """The core in the node that takes this cache, or None if there is none."""
    users = [node for node in cache.past_key.consumers() if node.op_type == OPERATOR]
    if len(users) != 1 or users[0].inputs[3] is not cache.past_key:
        return None
    node = users[0]
    if node.inputs[4] is not cache.past_value:
        raise UnrecognisedError(f"node {node.name} does not carry both halves of the cache")
    _refuse_unknown(node)
    _check_lengths(node, probes)
    query, key, value = node.inputs[:3]
    if query is None or key is None or value is None:
        raise UnrecognisedError(f"node {node.name} lacks queries, keys or values")
    window = attribute(node, "local_window_size", -1)
    return AttentionCore(
        cache=cache,
        query=query,
        key=key,
        value=value,
        output=node.outputs[0],
        present_key=node.outputs[1],
        present_value=node.outputs[2],
        heads=attribute(node, "num_heads"),
        scale=float(attribute(node, "scale", 0.0)) or cache.dim**-0.5,
        softcap=float(attribute(node, "softcap", 0.0)),
        masks=(),
        is_causal=True,
        is_heads_first=False,
        is_stated=True,
        window=window if window > 0 else None,
        rotary=_rotary(node, probes),
        sinks=_sinks(node),
    )


def _refuse_unknown(node: ir.Node) -> None:
    if used := [name for name, index in INPUTS.items() if _input(node, index) is not None]:
        raise UnrecognisedError(f"node {node.name} has the inputs {', '.join(used)}, which are not supported")
    for name, found in node.attributes.items():
        if name not in KNOWN and found.value not in NEUTRAL.get(name, ()):
            raise UnrecognisedError(f"node {node.name} has the attribute {name} = {found.value}")
    if any(output.uses() or output.is_graph_output() for output in node.outputs[3:]):
        raise UnrecognisedError(f"the scores of node {node.name} are used elsewhere")


def _check_lengths(node: ir.Node, probes: Sequence[Probe]) -> None:
    """seqlens_k is the last position and total_sequence_length the count of tokens, at every probe."""
    for probe in probes:
        total = probe.past + probe.tokens
        for index, expected in ((5, total - 1), (6, total)):
            content = probe.trace.content(_input(node, index))
            if content is None or content.size != 1 or int(content.reshape(-1)[0]) != expected:
                raise UnrecognisedError(f"node {node.name} counts its keys in a way that is not known (input {index})")


def _rotary(node: ir.Node, probes: Sequence[Probe]) -> Rotary | None:
    if not attribute(node, "do_rotary", 0):
        return None
    cos, sin = _input(node, 7), _input(node, 8)
    if cos is None or sin is None or cos.const_value is None or sin.const_value is None:
        raise UnrecognisedError(f"node {node.name} rotates by tables that are not constant")
    positions = _input(node, POSITION_IDS_INPUT)
    for probe in probes if positions is not None else ():
        content = probe.trace.content(positions)
        if content is None or content.reshape(-1).tolist() != list(range(probe.past, probe.past + probe.tokens)):
            raise UnrecognisedError(f"node {node.name} rotates by positions other than the tokens' own")
    longest = max(probe.past + probe.tokens for probe in probes)
    rows = int(cos.const_value.shape.numpy()[0])
    if rows < longest:
        raise UnrecognisedError(
            f"node {node.name} has rotary tables for {rows:,} positions and the context is {longest:,}: "
            f"use --context {rows} or less"
        )
    tables = [table.const_value.numpy()[:longest] for table in (cos, sin) if table.const_value is not None]
    return Rotary(tables[0], tables[1], is_interleaved=bool(attribute(node, "rotary_interleaved", 0)))


def _sinks(node: ir.Node) -> Array | None:
    value = _input(node, SINKS_INPUT)
    if value is None:
        return None
    if value.const_value is None:
        raise UnrecognisedError(f"node {node.name} has sinks that are not constant")
    return value.const_value.numpy().astype(np.float32).reshape(-1)


def _input(node: ir.Node, index: int) -> ir.Value | None:
    return node.inputs[index] if index < len(node.inputs) else None
