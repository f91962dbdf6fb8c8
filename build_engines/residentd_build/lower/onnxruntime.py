"""Canonical graph → ONNX Runtime: GroupQueryAttention with per-row query lengths over in-place slot caches.

What the engine takes, for B slots (a prefix of all), S the longest chunk, T packed tokens, R rows of logits:

    input_ids int64 [1, T]            position_ids int64 [1, T], absent if nothing uses it
    pack_index int64 [B, S]           packed token of place i of slot b; anything in range beyond the chunk
    unpack_index int64 [T]            b · S + i of each packed token
    query_lengths int32 [B]           new tokens of each slot; 0: idle
    seqlens_k int32 [B]               length after the step - 1 (idle and empty: 0)
    total_sequence_length int32 []    the capacity C
    logits_index int64 [R]            packed tokens whose logits are wanted
    past_key_values.N.{key,value}     [B, kv_heads, C, dim], bound to the same memory as present.N.{key,value}

and gives logits float32 [R, vocab].

The kernel refuses a step in which some slot's length before it plus S is above C, padding included. The caller gives C
room for that or runs such a step in parts; up to context + step_tokens the tables of rotary angles have a row for it.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir
from onnx_ir.tape import Tape

from residentd_build.facts import TOKENS, UNKNOWN_DIM
from residentd_build.passes.attention import RAGGED_ATTENTION
from residentd_build.passes.experts import EXPERTS
from residentd_build.passes.norms import LAYER_NORM, RMS_NORM
from residentd_build.passes.prune import prune
from residentd_build.rules import CANONICAL_DOMAIN, attribute

if TYPE_CHECKING:
    from collections.abc import Sequence

    from residentd_build.draft import Draft
    from residentd_build.trace import Trace

MICROSOFT = "com.microsoft"
GROUP_QUERY_ATTENTION = "GroupQueryAttention"
NORMS = {RMS_NORM: "SimplifiedLayerNormalization", LAYER_NORM: "LayerNormalization"}
SKIP_NORMS = {RMS_NORM: "SkipSimplifiedLayerNormalization", LAYER_NORM: "SkipLayerNormalization"}
TRANSPOSED_PRODUCT = "FusedMatMul"
MIXTURE_OF_EXPERTS = "MoE"
FUSED = (GROUP_QUERY_ATTENTION, MIXTURE_OF_EXPERTS, *NORMS.values(), *SKIP_NORMS.values(), TRANSPOSED_PRODUCT)
HEAD_SINK_INPUT = 11  # positions among GroupQueryAttention's inputs
QUERY_LENGTHS_INPUT = 16  # since onnxruntime 1.32
STEP_INPUTS = {
    "pack_index": (ir.DataType.INT64, ("slots", "chunk")),
    "unpack_index": (ir.DataType.INT64, ("tokens",)),
    "query_lengths": (ir.DataType.INT32, ("slots",)),
    "seqlens_k": (ir.DataType.INT32, ("slots",)),
    "total_sequence_length": (ir.DataType.INT32, ()),
}


def run(draft: Draft) -> str:
    """Ensures: no canonical node is left, and inputs and outputs are those of the module's docstring."""
    inputs = {
        name: ir.Value(name=name, shape=ir.Shape(dims), type=ir.TensorType(dtype))
        for name, (dtype, dims) in STEP_INPUTS.items()
    }
    facts = draft.follow(TOKENS, UNKNOWN_DIM)
    nodes = [node for node in draft.graph if node.domain == CANONICAL_DOMAIN]
    for node in nodes:
        if node.op_type == RAGGED_ATTENTION:
            _lower_attention(draft, node, inputs)
        elif node.op_type == EXPERTS:
            _lower_experts(draft, node)
        else:
            assert node.op_type in NORMS
            _lower_norm(draft, node, facts)
    for node in [node for node in draft.graph if node.op_type == "MatMul"]:
        _lower_transposed(draft, node)
    draft.graph.inputs.extend(inputs.values())
    _declare_shapes(draft)
    prune(draft)
    draft.model.opset_imports[MICROSOFT] = 1
    draft.model.opset_imports.pop(CANONICAL_DOMAIN, None)
    counts = Counter(node.op_type for node in draft.graph)
    fused = ", ".join(f"{counts[name]} {name}" for name in FUSED if counts[name])
    return f"lower: {draft.graph.num_nodes():,} nodes for ONNX Runtime, with {fused}"


def _lower_attention(draft: Draft, node: ir.Node, step: dict[str, ir.Value]) -> None:
    tape = Tape()
    query, key, value, past_key, past_value = node.inputs[:5]
    rotary = [table for table in node.inputs[5:7] if table is not None]
    sinks = node.inputs[7] if len(node.inputs) > 7 else None
    name = node.name
    joined = query if key is None else tape.op("Concat", [query, key, value], {"axis": 1}, name=f"{name}.qkv")
    padded = tape.op("Gather", [joined, step["pack_index"]], {"axis": 0}, name=f"{name}.pack")
    operands: list[ir.Value | None] = [
        padded,
        None,
        None,
        past_key,
        past_value,
        step["seqlens_k"],
        step["total_sequence_length"],
    ]
    operands += [_lengthened(draft, table) for table in rotary] or [None, None]
    operands += [None] * (QUERY_LENGTHS_INPUT - len(operands))
    operands[HEAD_SINK_INPUT] = sinks
    attended, present_key, present_value = tape.op_multi_out(
        GROUP_QUERY_ATTENTION,
        [*operands, step["query_lengths"]],
        _attributes(node, has_rotary=bool(rotary)),
        domain=MICROSOFT,
        name=name,
        outputs=[ir.Value(name=f"{name}.padded"), ir.Value(), ir.Value()],
    )
    width = attribute(node, "heads") * attribute(node, "dim")
    rows = tape.op("Reshape", [attended, draft.integers([-1, width])], name=f"{name}.rows")
    result = tape.op("Gather", [rows, step["unpack_index"]], {"axis": 0}, name=f"{name}.unpack")
    draft.replace(node, tape.nodes, (result, present_key, present_value))


def _lengthened(draft: Draft, table: ir.Value | None) -> ir.Value:
    """The table with a row for every place that padding may reach: its values are not used, its memory may be read."""
    assert table is not None
    assert table.const_value is not None
    rows = table.const_value.numpy()
    return draft.constant(f"{table.name}.padded", np.pad(rows, ((0, draft.step_tokens), (0, 0)), mode="edge"))


def _attributes(node: ir.Node, *, has_rotary: bool) -> dict[str, int | float]:
    window = attribute(node, "window")
    return {
        "num_heads": attribute(node, "heads"),
        "kv_num_heads": attribute(node, "kv_heads"),
        "scale": attribute(node, "scale"),
        "softcap": attribute(node, "softcap"),
        "local_window_size": window or -1,
        "do_rotary": int(has_rotary),
        "rotary_interleaved": attribute(node, "interleaved"),
    }


def _lower_experts(draft: Draft, node: ir.Node) -> None:
    """The kernel takes the softmax of the scores itself; gate and up by turns are its only form on the CPU."""
    source, scores, gate_up, down, *biases = node.inputs
    gate_up_bias, down_bias = biases or (None, None)
    attributes = {
        "k": attribute(node, "chosen"),
        "normalize_routing_weights": attribute(node, "normalised"),
        "activation_type": "swiglu",
        "swiglu_fusion": 1,
        "activation_alpha": attribute(node, "alpha"),
        "activation_beta": attribute(node, "beta"),
    }
    if attribute(node, "limit"):
        attributes["swiglu_limit"] = attribute(node, "limit")
    operands = [source, scores, gate_up, gate_up_bias, down, down_bias]
    lowered = ir.node(MIXTURE_OF_EXPERTS, operands, attributes, domain=MICROSOFT, name=node.name)
    lowered.outputs[0].name = f"{node.outputs[0].name}.lowered"
    draft.replace(node, [lowered], lowered.outputs)


def _lower_norm(draft: Draft, node: ir.Node, facts: Trace) -> None:
    """With the addition before it where there is one: the residual stream is then read once."""
    source, *weights = node.inputs
    assert source is not None
    before = source.producer()
    epsilon = {"epsilon": attribute(node, "epsilon")}
    if before is None or before.op_type != "Add" or not _is_residual(before, facts):
        lowered = ir.node(NORMS[node.op_type], node.inputs, epsilon | {"axis": -1, "stash_type": 1}, name=node.name)
        facts.facts[lowered.outputs[0]] = facts[node.outputs[0]]
        draft.replace(node, [lowered], lowered.outputs)
        return
    tape = Tape()
    outputs = [ir.Value(name=name) for name in (f"{node.outputs[0].name}", "", "", f"{source.name}.sum")]
    streams, bias = _without_bias(before.inputs, facts)
    if bias is not None:
        weights += [None] * (node.op_type == LAYER_NORM and len(weights) < 2)  # whose own bias comes before it
        weights.append(bias)
    normed, _, _, total = tape.op_multi_out(
        SKIP_NORMS[node.op_type], [*streams, *weights], epsilon, domain=MICROSOFT, name=node.name, outputs=outputs
    )
    facts.facts |= {total: facts[source], normed: facts[source]}
    draft.graph.insert_before(before, tape.nodes)
    ir.convenience.replace_all_uses_with(source, total)
    ir.convenience.replace_all_uses_with(node.outputs[0], normed)
    draft.graph.remove([node, before], safe=True)


def _lower_transposed(draft: Draft, node: ir.Node) -> None:
    """A product with a transposed weight, as tied heads have: the kernel packs it straight from where it lies.

    Left to itself ONNX Runtime transposes at load, a second copy, and a decode step of SmolLM2-135M takes 3 % longer.
    """
    turn = None if node.inputs[1] is None else node.inputs[1].producer()
    if turn is None or turn.op_type != "Transpose" or attribute(turn, "perm", (1, 0)) != (1, 0):
        return
    weight = turn.inputs[0]
    if weight is None or weight.const_value is None or weight.const_value.shape.rank() != 2:
        return
    product = ir.node(
        TRANSPOSED_PRODUCT, [node.inputs[0], weight], {"transB": 1}, domain=MICROSOFT, name=f"{node.name}.transposed"
    )
    product.outputs[0].name = f"{node.outputs[0].name}.transposed"
    draft.replace(node, [product], product.outputs)


def _without_bias(streams: Sequence[ir.Value | None], facts: Trace) -> tuple[list[ir.Value | None], ir.Value | None]:
    """The two streams of a residual addition, one of them before its bias is added, and the bias."""
    for place, stream in enumerate(streams):
        before = None if stream is None else stream.producer()
        if stream is None or before is None or before.op_type != "Add" or len(stream.uses()) != 1:
            continue
        biases = [value for value in before.inputs if value is not None and value.const_value is not None]
        inner = [value for value in before.inputs if value is not None and value not in biases]
        if len(biases) == len(inner) == 1 and len(facts[biases[0]].dims or ()) == 1 and _same(inner[0], stream, facts):
            return [inner[0] if index == place else other for index, other in enumerate(streams)], biases[0]
    return list(streams), None


def _same(left: ir.Value, right: ir.Value, facts: Trace) -> bool:
    return facts[left].dims is not None and facts[left].dims == facts[right].dims


def _is_residual(node: ir.Node, facts: Trace) -> bool:
    """An addition of two streams [1, tokens, hidden]: the kernel takes three dimensions and broadcasts nothing."""
    left, right = (facts[value].dims for value in node.inputs)
    return (
        left is not None
        and left == right
        and len(left) == 3
        and all(value is not None and value.const_value is None for value in node.inputs)
    )


def _declare_shapes(draft: Draft) -> None:
    """Names instead of the export's on every axis that a step decides."""
    for value in draft.graph.inputs:
        if value.name in {"input_ids", "position_ids"}:
            value.shape = ir.Shape([1, "tokens"])
    caches = {value.name: value for value in (*draft.graph.inputs, *draft.graph.outputs)}
    for cache in draft.caches:
        for name in (cache.past_key.name, cache.past_value.name, cache.present_key_name, cache.present_value_name):
            caches[name].shape = ir.Shape(["slots", cache.heads, "capacity", cache.dim])
