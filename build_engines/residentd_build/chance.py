"""Nodes that draw random numbers: what they reach is another answer every time, which no bound could hold."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import onnx_ir as ir

from residentd.errors import Finding
from residentd_build.foreign import cut

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import numpy.typing as npt

DRAWING: Final = frozenset(
    {
        "Bernoulli",
        "Multinomial",
        "RandomNormal",
        "RandomNormalLike",
        "RandomUniform",
        "RandomUniformLike",
        "Sampling",
    }
)
DROPPING: Final[Mapping[str, tuple[int, int]]] = MappingProxyType(
    {"Dropout": (1, 2), "BitmaskDropout": (1, 2), "BiasDropout": (3, 4), "BitmaskBiasDropout": (3, 4)}
)
"""Where they take the share that is dropped, and whether anything is: since opset 12, and in training alone."""
NAMED_MAX: Final = 3


def chance_findings(model: ir.Model, where: str) -> list[Finding]:
    """One finding that names the nodes which draw what an output depends on, or none."""
    found = [f"{node.op_type} {cut(_name(node), 60)}" for node in _reached(model.graph) if _draws(node)]
    if not found:
        return []
    more = f" and {len(found) - NAMED_MAX:,} more" if len(found) > NAMED_MAX else ""
    what = f"it draws random numbers in every run: {', '.join(sorted(found)[:NAMED_MAX])}{more}"
    return [Finding(what, where, "Export it for inference: model.eval(), training=TrainingMode.EVAL")]


def _reached(graph: ir.Graph) -> Iterator[ir.Node]:
    """Every node that an output needs, of branches and loops too."""
    seen: set[ir.Node] = set()
    waiting = [*graph.outputs]
    while waiting:
        node = waiting.pop().producer()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        waiting += [value for value in node.inputs if value is not None]
        waiting += [value for below in _graphs(node) for value in below.outputs]


def _graphs(node: ir.Node) -> Iterator[ir.Graph]:
    for attribute in node.attributes.values():
        if attribute.type == ir.AttributeType.GRAPH:
            yield attribute.value
        elif attribute.type == ir.AttributeType.GRAPHS:
            yield from attribute.value


def _draws(node: ir.Node) -> bool:
    """A dropout in training, or of which that is not known, unless it drops nothing; or what always draws."""
    if node.op_type not in DROPPING:
        return node.op_type in DRAWING
    share_place, mode_place = DROPPING[node.op_type]
    mode, share = _input(node, mode_place), _input(node, share_place)
    is_training = mode is not None and _may_be_other_than_0(mode)
    return is_training and (share is None or _may_be_other_than_0(share))


def _input(node: ir.Node, place: int) -> ir.Value | None:
    return node.inputs[place] if place < len(node.inputs) else None


def _may_be_other_than_0(value: ir.Value) -> bool:
    constant = _constant(value)
    return constant is None or bool(constant.any())


def _constant(value: ir.Value) -> npt.NDArray[Any] | None:
    """Its numbers; exporters hand one constant on through Identity."""
    producer = value.producer()
    while producer is not None and producer.op_type == "Identity" and producer.inputs[0] is not None:
        value = producer.inputs[0]
        producer = value.producer()
    tensor = ir.convenience.get_const_tensor(value)
    return None if tensor is None else tensor.numpy()


def _name(node: ir.Node) -> str:
    return str(node.name or (node.outputs[0].name if node.outputs else ""))
