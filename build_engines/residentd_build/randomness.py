"""Which nodes of a graph answer differently every time, as none may that serves."""

from __future__ import annotations

from typing import TYPE_CHECKING

from residentd_build.foreign import cut
from residentd_build.rules import attribute

if TYPE_CHECKING:
    from collections.abc import Iterator

    import onnx_ir as ir

RANDOM_OPERATORS = frozenset(
    {"RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Bernoulli", "Multinomial"}
)
NAMED_MAX = 3


def random_nodes(model: ir.Model) -> str:
    """The first few, for a message; empty where there is none."""
    found = [f"{cut(node.name or '')} ({node.op_type})" for node in _random(model)]
    return ", ".join(found[:NAMED_MAX]) + (f" and {len(found) - NAMED_MAX:,} more" if len(found) > NAMED_MAX else "")


def _random(model: ir.Model) -> Iterator[ir.Node]:
    for node in model.graph.all_nodes():
        if node.op_type in RANDOM_OPERATORS or (node.op_type == "Dropout" and _is_training(node)):
            yield node


def _is_training(dropout: ir.Node) -> bool:
    """Whether its third input says so, or leaves it open."""
    mode = dropout.inputs[2] if len(dropout.inputs) > 2 else None
    if mode is None:
        return False
    if mode.const_value is not None:
        return bool(mode.const_value.numpy().any())
    made_by = mode.producer()
    tensor = attribute(made_by, "value") if made_by is not None and made_by.op_type == "Constant" else None
    return tensor is None or bool(tensor.numpy().any())
