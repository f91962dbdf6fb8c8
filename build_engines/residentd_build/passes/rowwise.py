"""Quantise activations for each token by itself where the exporter had one scale for all of them.

Ensures: no DynamicQuantizeLinear is left. It measures its scale over the whole tensor, so that in a batch everybody's
numbers would depend on everybody else's. A scale for each row is what the operator computes for one token alone, and
finer for several.

    low, high = min(x, 0), max(x, 0) of a row    scale = (high - low) / 255    zero = round(-low / scale)
    MatMulInteger(codes, w, zero, z) = MatMulInteger(codes, w, 0, z) - zero · columns(w - z)

as the kernel of MatMulInteger takes one zero point for all rows only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir
from onnx_ir.tape import Tape

from residentd.errors import Finding, SourceError
from residentd_build.passes.prune import prune

if TYPE_CHECKING:
    from residentd_build.draft import Draft

OPERATOR = "DynamicQuantizeLinear"
PRODUCT = "MatMulInteger"
FUSED = frozenset({"DynamicQuantizeMatMul", "DynamicQuantizeLSTM", "QAttention"})
"""What ONNX Runtime makes of these operators when it saves an optimised graph."""
CODE_MAX = 255.0
REMEDY = "Export it without ONNX Runtime's optimisations, or take a fp32, fp16 or q4 variant of the model"


def run(draft: Draft) -> str:
    """Raises SourceError where the codes go into anything but products with constant matrices."""
    nodes = [node for node in draft.graph if node.op_type == OPERATOR]
    findings = [_finding(node, "measures one scale over all tokens") for node in draft.graph if node.op_type in FUSED]
    findings += [_finding(node, why) for node in nodes if (why := _problem(node))]
    if findings:
        raise SourceError(findings)
    for node in nodes:
        _rewrite(draft, node)
    if not nodes:
        return "rowwise: no activations are quantised"
    prune(draft)
    return f"rowwise: {len(nodes)} quantised activations, each with a scale a token"


def _finding(node: ir.Node, why: str) -> Finding:
    return Finding(f"node {node.name} ({node.op_type}) {why}", "model.onnx", REMEDY)


def _problem(node: ir.Node) -> str:
    codes, _, zero = node.outputs
    users = {*codes.consumers(), *zero.consumers()}
    if others := [user for user in users if user.op_type != PRODUCT]:
        return f"has its codes used by {others[0].name} ({others[0].op_type})"
    if any(user.inputs[0] is not codes or _constant(user, 1) is None for user in users):
        return "has its codes multiplied by a matrix that is not constant"
    if any(len(user.inputs) > 3 and user.inputs[3] is not None and _constant(user, 3) is None for user in users):
        return "is multiplied by a matrix whose zero point is not constant"
    return ""


def _constant(node: ir.Node, place: int) -> ir.TensorProtocol | None:
    value = node.inputs[place]
    return None if value is None else value.const_value


def _rewrite(draft: Draft, node: ir.Node) -> None:
    source, name = node.inputs[0], str(node.name)
    tape = Tape()
    none = draft.constant("number.0", np.array(0, np.float32))
    low = tape.op("Min", [_reduce(draft, tape, "ReduceMin", source, f"{name}.lowest"), none], name=f"{name}.low")
    high = tape.op("Max", [_reduce(draft, tape, "ReduceMax", source, f"{name}.highest"), none], name=f"{name}.high")
    most = draft.constant(f"number.{CODE_MAX}", np.array(CODE_MAX, np.float32))
    width = tape.op("Div", [tape.op("Sub", [high, low], name=f"{name}.range"), most], name=f"{name}.width")
    one = draft.constant("number.1", np.array(1, np.float32))
    is_flat = tape.op("Equal", [width, none], name=f"{name}.is_flat")
    scale = tape.op("Where", [is_flat, one, width], name=f"{name}.scale")  # a row of zeros
    zero = tape.op("Round", [tape.op("Div", [tape.op("Neg", [low]), scale])], name=f"{name}.zero")
    rounded = tape.op("Round", [tape.op("Div", [source, scale], name=f"{name}.ratio")], name=f"{name}.rounded")
    shifted = tape.op("Add", [rounded, zero], name=f"{name}.shifted")
    clipped = tape.op("Clip", [shifted, none, most], name=f"{name}.clipped")
    codes = tape.op("Cast", [clipped], {"to": ir.DataType.UINT8}, name=f"{name}.codes")
    whole = tape.op("Cast", [zero], {"to": ir.DataType.INT32}, name=f"{name}.whole")
    draft.graph.insert_before(node, tape.nodes)
    for user in dict.fromkeys(node.outputs[0].consumers()):
        _shift(draft, user, codes, whole)
    ir.convenience.replace_all_uses_with(node.outputs[1], scale)


def _reduce(draft: Draft, tape: Tape, operator: str, value: ir.Value | None, name: str) -> ir.Value:
    if draft.opset < 18:
        return tape.op(operator, [value], {"axes": [-1]}, name=name)
    return tape.op(operator, [value, draft.integers([-1])], name=name)


def _shift(draft: Draft, product: ir.Node, codes: ir.Value, zero: ir.Value) -> None:
    """The product with the zero point of each row."""
    tape = Tape()
    place = product.inputs[3] if len(product.inputs) > 3 else None
    exact = tape.op(PRODUCT, [codes, product.inputs[1], None, place], name=f"{product.name}.exact")
    offset = tape.op("Mul", [zero, _columns(draft, product)], name=f"{product.name}.offset")
    result = tape.op("Sub", [exact, offset], name=f"{product.name}.shifted")
    draft.graph.insert_before(product, tape.nodes)
    ir.convenience.replace_all_uses_with(product.outputs[0], result)


def _columns(draft: Draft, product: ir.Node) -> ir.Value:
    """int32 [outputs]: the sums of the matrix's columns, less its zero point."""
    weight = product.inputs[1]
    assert weight is not None
    assert weight.const_value is not None
    matrix = weight.const_value
    point = _constant(product, 3) if len(product.inputs) > 3 else None

    def make() -> ir.Tensor[Any]:
        centre = np.int32(0) if point is None else point.numpy().astype(np.int32)
        return ir.Tensor((matrix.numpy().astype(np.int32) - centre).sum(0, dtype=np.int32))

    name = f"residentd/{weight.name}.columns"
    if name in draft.graph.initializers:
        return draft.graph.initializers[name]
    shape = ir.Shape([int(matrix.shape.numpy()[-1])])
    lazy = ir.LazyTensor(make, ir.DataType.INT32, shape, name=name)
    value = ir.Value(name=name, shape=shape, type=ir.TensorType(ir.DataType.INT32), const_value=lazy)
    draft.graph.register_initializer(value)
    return value
