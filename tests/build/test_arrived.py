"""Which format the weights of an export are in, read off its graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from lowering import EXPORTS

from residentd_build.arrived import Arrived, arrived
from residentd_build.compatibility import precision_of
from residentd_build.validate import validate

MICROSOFT = "com.microsoft"


def model(*nodes: ir.Node, constants: Sequence[ir.TensorProtocol] = ()) -> ir.Model:
    values = [ir.Value(name=f"c{index}", const_value=tensor) for index, tensor in enumerate(constants)]
    graph = ir.Graph([], [], nodes=nodes, initializers=values, opset_imports={"": 21, MICROSOFT: 1})
    return ir.Model(graph, ir_version=10)


def node(operator: str, *, count: int = 1, weight: ir.DataType | None = None, **attributes: Any) -> list[ir.Node]:
    """`count` of that operator, whose first input is a constant of type `weight` or comes from elsewhere."""
    constant = None if weight is None else ir.tensor(np.zeros(2, weight.numpy()), dtype=weight)
    domain = "" if operator == "DequantizeLinear" else MICROSOFT
    return [
        ir.node(operator, [ir.Value(const_value=constant), ir.Value()], attributes, domain=domain) for _ in range(count)
    ]


FORMS: dict[str, tuple[list[ir.Node], Arrived | None]] = {
    "nothing": (node("MatMul"), None),
    "4 bits": (node("MatMulNBits", count=3, bits=4), Arrived("int4", "3 MatMulNBits of 4 bits")),
    "4 bits by default": (node("MatMulNBits"), Arrived("int4", "1 MatMulNBits of 4 bits")),
    "8 bits": (node("MatMulNBits", bits=8), Arrived("int8", "1 MatMulNBits of 8 bits")),
    "2 bits": (node("MatMulNBits", bits=2), Arrived("int4", "1 MatMulNBits of 2 bits")),
    "4 bits with a head of 8": (
        [*node("MatMulNBits", count=2, bits=4), *node("MatMulNBits", bits=8)],
        Arrived("int4", "2 MatMulNBits of 4 bits, 1 MatMulNBits of 8 bits"),
    ),
    "dynamic": (node("MatMulInteger", count=2), Arrived("int8", "2 MatMulInteger of 8 bits")),
    "weights in 8 bits": (
        node("DequantizeLinear", weight=ir.DataType.INT8),
        Arrived("int8", "1 DequantizeLinear of 8 bits"),
    ),
    "weights in 4 bits": (
        node("DequantizeLinear", weight=ir.DataType.UINT4),
        Arrived("int4", "1 DequantizeLinear of 4 bits"),
    ),
    "activations only": (node("DequantizeLinear"), None),
    "an embedding in 4 bits": (
        node("GatherBlockQuantized", bits=4),
        Arrived("int4", "1 GatherBlockQuantized of 4 bits"),
    ),
}


@pytest.mark.parametrize("name", FORMS)
def test_the_format_is_that_of_most_nodes(name: str) -> None:
    """Bits from attributes, types of constants and names of operators; what is computed is no weight."""
    nodes, expected = FORMS[name]
    assert arrived(model(*nodes)) == expected


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_a_float_export_has_not_arrived_quantised(name: str) -> None:
    """The fixtures of optimum have no quantised node."""
    assert arrived(validate(EXPORTS / name).model) is None


PRECISIONS: dict[str, tuple[list[np.ndarray], str]] = {
    "no weights": ([], "fp32"),
    "no fractions": ([np.zeros(9, np.int64)], "fp32"),
    "fp32": ([np.zeros(9, np.float32)], "fp32"),
    "fp64": ([np.zeros(9, np.float64)], "fp32"),
    "fp16": ([np.zeros(9, np.float16)], "fp16"),
    "fp32 with a constant of bytes": ([np.zeros(9, np.float32), np.zeros(3, np.uint8)], "fp32"),
    "fp16 with larger tables of whole numbers": ([np.zeros(9, np.float16), np.zeros(900, np.int64)], "fp16"),
    "more bytes in fp16": ([np.zeros(9, np.float32), np.zeros(19, np.float16)], "fp16"),
    "more bytes in fp32": ([np.zeros(9, np.float32), np.zeros(17, np.float16)], "fp32"),
}


@pytest.mark.parametrize("name", PRECISIONS)
def test_the_precision_is_that_of_most_fractions(name: str) -> None:
    """By bytes; whole numbers are no weights, and what no operator reads quantised is not quantised."""
    arrays, expected = PRECISIONS[name]
    assert precision_of(model(constants=[ir.tensor(array) for array in arrays])) == expected
