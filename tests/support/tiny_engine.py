"""A hand-made engine in the packed form, and the same model in plain numpy: two layers, learned positions, no norms."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper

from residentd.models.manifest import CacheTensor, Engine, EngineLimits

VOCAB, HEADS, KV_HEADS, DIM, LAYERS = 61, 4, 2, 16, 2
HIDDEN = HEADS * DIM
QKV = (HEADS + 2 * KV_HEADS) * DIM
CONTEXT = 48
SCALE = 0.25
FILE_NAME = "engine.onnx"

Array = npt.NDArray[Any]


def tiny_weights() -> dict[str, Array]:
    rng = np.random.default_rng(3)
    weights = {
        "embedding": rng.standard_normal((VOCAB, HIDDEN)),
        "positions": rng.standard_normal((CONTEXT, HIDDEN)),
        "head": rng.standard_normal((HIDDEN, VOCAB)),
    }
    for layer in range(LAYERS):
        weights[f"qkv.{layer}"] = rng.standard_normal((HIDDEN, QKV)) / np.sqrt(HIDDEN)
        weights[f"out.{layer}"] = rng.standard_normal((HIDDEN, HIDDEN)) / np.sqrt(HIDDEN)
    return {name: array.astype(np.float32) for name, array in weights.items()}


def tiny_engine(slots: int = 4, step_tokens_max: int = 32) -> Engine:
    names = [(layer, part) for layer in range(LAYERS) for part in ("key", "value")]
    return Engine(
        target="onnxruntime-cpu",
        mode="canonical",
        precision="fp32",
        path=FILE_NAME,
        limits=EngineLimits(slots=slots, context=CONTEXT, step_tokens_max=step_tokens_max, vocab=VOCAB),
        caches=tuple(
            CacheTensor(
                input=f"past_key_values.{layer}.{part}",
                output=f"present.{layer}.{part}",
                heads=KV_HEADS,
                dim=DIM,
                dtype="float32",
            )
            for layer, part in names
        ),
    )


def write_tiny_engine(directory: Path, *, has_positions: bool = True) -> Engine:
    """Write the graph, with or without the position_ids input, and return its description."""
    weights = tiny_weights()
    integers = {"axis0": [0], "width": [-1, HIDDEN]}
    nodes = [helper.make_node("Gather", ["embedding", "input_ids"], ["embedded"])]
    hidden = "embedded"
    if has_positions:
        nodes.append(helper.make_node("Gather", ["positions", "position_ids"], ["placed"]))
        nodes.append(helper.make_node("Add", [hidden, "placed"], ["sum"]))
        hidden = "sum"
    nodes.append(helper.make_node("Squeeze", [hidden, "axis0"], ["hidden.0"]))
    for layer in range(LAYERS):
        nodes += _layer(layer)
    nodes.append(helper.make_node("Gather", [f"hidden.{LAYERS}", "logits_index"], ["rows"], axis=0))
    nodes.append(helper.make_node("MatMul", ["rows", "head"], ["logits"]))
    used = {name for node in nodes for name in node.input}
    initializers = [numpy_helper.from_array(array, name) for name, array in weights.items() if name in used]
    initializers += [numpy_helper.from_array(np.array(value, np.int64), name) for name, value in integers.items()]
    inputs, outputs = _interface(has_positions=has_positions)
    model = helper.make_model(
        helper.make_graph(nodes, "tiny", inputs, outputs, initializer=initializers),
        opset_imports=[helper.make_opsetid("", 18), helper.make_opsetid("com.microsoft", 1)],
        ir_version=10,
    )
    onnx.save(model, directory / FILE_NAME)
    return tiny_engine()


def _layer(layer: int) -> list[onnx.NodeProto]:
    past = [f"past_key_values.{layer}.key", f"past_key_values.{layer}.value"]
    attention = helper.make_node(
        "GroupQueryAttention",
        [f"padded.{layer}", "", "", *past, "seqlens_k", "total_sequence_length", *[""] * 9, "query_lengths"],
        [f"attended.{layer}", f"present.{layer}.key", f"present.{layer}.value"],
        domain="com.microsoft",
        num_heads=HEADS,
        kv_num_heads=KV_HEADS,
        scale=SCALE,
    )
    return [
        helper.make_node("MatMul", [f"hidden.{layer}", f"qkv.{layer}"], [f"projected.{layer}"]),
        helper.make_node("Gather", [f"projected.{layer}", "pack_index"], [f"padded.{layer}"], axis=0),
        attention,
        helper.make_node("Reshape", [f"attended.{layer}", "width"], [f"flat.{layer}"]),
        helper.make_node("Gather", [f"flat.{layer}", "unpack_index"], [f"packed.{layer}"], axis=0),
        helper.make_node("MatMul", [f"packed.{layer}", f"out.{layer}"], [f"mixed.{layer}"]),
        helper.make_node("Add", [f"hidden.{layer}", f"mixed.{layer}"], [f"hidden.{layer + 1}"]),
    ]


def _interface(*, has_positions: bool) -> tuple[list[onnx.ValueInfoProto], list[onnx.ValueInfoProto]]:
    value = helper.make_tensor_value_info
    inputs = [value("input_ids", TensorProto.INT64, [1, "T"])]
    if has_positions:
        inputs.append(value("position_ids", TensorProto.INT64, [1, "T"]))
    inputs += [
        value("pack_index", TensorProto.INT64, ["B", "S"]),
        value("unpack_index", TensorProto.INT64, ["T"]),
        value("query_lengths", TensorProto.INT32, ["B"]),
        value("seqlens_k", TensorProto.INT32, ["B"]),
        value("total_sequence_length", TensorProto.INT32, []),
        value("logits_index", TensorProto.INT64, ["R"]),
    ]
    outputs = [value("logits", TensorProto.FLOAT, ["R", VOCAB])]
    for cache in tiny_engine().caches:
        inputs.append(value(cache.input, TensorProto.FLOAT, ["B", KV_HEADS, "C", DIM]))
        outputs.append(value(cache.output, TensorProto.FLOAT, ["B", KV_HEADS, "C", DIM]))
    return inputs, outputs


def tiny_logits(tokens: Sequence[int], *, has_positions: bool = True) -> Array:
    """float64 [vocab] after the last of `tokens`, over the whole sequence at once, without a cache."""
    weights = {name: array.astype(np.float64) for name, array in tiny_weights().items()}
    hidden = weights["embedding"][list(tokens)]
    if has_positions:
        hidden = hidden + weights["positions"][: len(tokens)]
    mask = np.where(np.tri(len(tokens), dtype=bool), 0.0, -np.inf)
    for layer in range(LAYERS):
        projected = (hidden @ weights[f"qkv.{layer}"]).reshape(len(tokens), -1, DIM)
        query, key, value = np.split(projected, [HEADS, HEADS + KV_HEADS], axis=1)
        key, value = (np.repeat(part, HEADS // KV_HEADS, axis=1) for part in (key, value))
        scores = np.einsum("qhd,khd->hqk", query, key) * SCALE + mask
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        attended = np.einsum("hqk,khd->qhd", scores / scores.sum(-1, keepdims=True), value)
        hidden = hidden + attended.reshape(len(tokens), HIDDEN) @ weights[f"out.{layer}"]
    result: Array = hidden[-1] @ weights["head"]
    return result
