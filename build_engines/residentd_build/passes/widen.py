"""Compute in float32 what an exporter had computed in 16 bits.

Ensures: no value of the graph is float16 or bfloat16. The weights are the same numbers; they are widened one at a time,
when they are asked for. The CPU has no 16-bit arithmetic worth having: its kernels widen, compute and round again at
every node.
"""

from __future__ import annotations

from collections import Counter
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir

from residentd_build.rules import attribute

if TYPE_CHECKING:
    from collections.abc import Mapping

    from residentd_build.draft import Draft
    from residentd_build.precision import Precision

NARROW = frozenset({ir.DataType.FLOAT16, ir.DataType.BFLOAT16})
WIDE = ir.TensorType(ir.DataType.FLOAT)
PRECISIONS: Mapping[ir.DataType, Precision] = MappingProxyType(
    {ir.DataType.FLOAT16: "fp16", ir.DataType.BFLOAT16: "bf16"}
)
TYPE_ATTRIBUTES = frozenset({"to", "dtype", "output_dtype"})


def run(draft: Draft) -> str:
    found = narrow_types(draft.model)
    if not found:
        return "widen: nothing is in 16 bits"
    weights = sum(_widen_value(value) for value in draft.graph.initializers.values())
    for node in draft.graph:
        _widen_attributes(node)
        for value in node.outputs:
            _widen_value(value)
    for value in draft.graph.inputs:
        _widen_value(value)
    kinds = " and ".join(sorted(dtype.name.lower() for dtype in found))
    return f"widen: {weights:,} weights and all that is computed from {kinds} to float32"


def narrow_types(model: ir.Model) -> set[ir.DataType]:
    """The 16-bit types that weights or caches of `model` have."""
    values = (*model.graph.inputs, *model.graph.initializers.values())
    return {value.dtype for value in values if value.dtype in NARROW}


def stored_precision(model: ir.Model) -> Precision | None:
    """The 16-bit format that most of the floating-point weights' bytes are in; None: they are in float32."""
    sizes: Counter[ir.DataType] = Counter()
    for value in model.graph.initializers.values():
        if value.const_value is not None and value.const_value.dtype in {*NARROW, ir.DataType.FLOAT}:
            sizes[value.const_value.dtype] += value.const_value.nbytes
    return PRECISIONS.get(sizes.most_common(1)[0][0]) if sizes else None


def _widen_value(value: ir.Value) -> bool:
    if value.dtype not in NARROW:
        return False
    if value.const_value is not None:
        value.const_value = widened(value.const_value)
    value.type = WIDE
    return True


def _widen_attributes(node: ir.Node) -> None:
    for name, found in list(node.attributes.items()):
        if found.type == ir.AttributeType.TENSOR and found.value.dtype in NARROW:
            node.attributes[name] = ir.AttrTensor(name, ir.tensor(found.value.numpy().astype(np.float32)))
        elif name in TYPE_ATTRIBUTES and attribute(node, name) in NARROW:
            node.attributes[name] = ir.AttrInt64(name, int(ir.DataType.FLOAT))


def widened(tensor: ir.TensorProtocol) -> ir.LazyTensor:
    """The same numbers as float32, made whenever they are asked for."""

    def make() -> ir.Tensor[Any]:
        return ir.Tensor(tensor.numpy().astype(np.float32), name=tensor.name)

    return ir.LazyTensor(make, ir.DataType.FLOAT, ir.Shape(tensor.shape.numpy()), name=tensor.name)


def narrow_weights(draft: Draft) -> dict[str, ir.TensorProtocol]:
    """The 16-bit weights by name, to be given to `store` after `run`."""
    values = draft.graph.initializers.values()
    return {
        str(value.name): value.const_value
        for value in values
        if value.const_value is not None and value.const_value.dtype in NARROW
    }


def store(draft: Draft, narrow: Mapping[str, ir.TensorProtocol]) -> None:
    """Keep these weights in 16 bits in the file, behind a Cast each."""
    for name, tensor in narrow.items():
        wide = draft.graph.initializers.pop(name, None)
        if wide is None:
            continue  # nothing used it
        stored = ir.Value(name=f"{name}.stored", shape=wide.shape, type=ir.TensorType(tensor.dtype), const_value=tensor)
        draft.graph.register_initializer(stored)
        cast = ir.node("Cast", [stored], {"to": ir.DataType.FLOAT}, name=f"{name}.widened")
        draft.graph.insert_before(draft.graph[0], [cast])
        ir.convenience.replace_all_uses_with(wide, cast.outputs[0])
