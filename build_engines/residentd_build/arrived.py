"""Exports that arrive quantised: which format their weights are in, read off the graph."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

import onnx_ir as ir

from residentd.errors import OperatorError
from residentd_build.options import AUTO
from residentd_build.rules import attribute

if TYPE_CHECKING:
    from collections.abc import Mapping

    from residentd_build.options import Options
    from residentd_build.precision import Precision

BITS_BY_OPERATOR: Mapping[str, int] = MappingProxyType(
    {
        "DynamicQuantizeMatMul": 8,
        "MatMulBnb4": 4,
        "MatMulFpQ4": 4,
        "MatMulInteger": 8,
        "MatMulIntegerToFloat": 8,
        "QAttention": 8,
        "QGemm": 8,
        "QLinearMatMul": 8,
    }
)
BITS_ATTRIBUTES: Mapping[str, tuple[str, int]] = MappingProxyType(
    {"MatMulNBits": ("bits", 4), "GatherBlockQuantized": ("bits", 4), "QMoE": ("expert_weight_bits", 4)}
)
"""Operators whose attribute names the bits, with the attribute's default."""
BITS_BY_TYPE: Mapping[ir.DataType, int] = MappingProxyType(
    {
        ir.DataType.INT4: 4,
        ir.DataType.UINT4: 4,
        ir.DataType.INT8: 8,
        ir.DataType.UINT8: 8,
        ir.DataType.FLOAT8E4M3FN: 8,
    }
)
"""Of what a DequantizeLinear reads."""


@dataclass(frozen=True, slots=True)
class Arrived:
    """`precision` is that of most quantised nodes; `description` counts them: "210 MatMulNBits of 4 bits"."""

    precision: Precision
    description: str


def arrived(model: ir.Model) -> Arrived | None:
    """How `model`'s weights are quantised already; None: they are not."""
    found = Counter((node.op_type, bits) for node in model.graph.all_nodes() if (bits := _bits(node)))
    if not found:
        return None
    by_bits: Counter[int] = Counter()
    for (_, bits), count in found.items():
        by_bits[bits] += count
    listed = ", ".join(f"{count:,} {name} of {bits} bits" for (name, bits), count in found.most_common())
    return Arrived("int4" if by_bits.most_common(1)[0][0] <= 4 else "int8", listed)


def _bits(node: ir.Node) -> int:
    """Bits of the constant weights that `node` reads quantised; 0: none."""
    if node.op_type in BITS_ATTRIBUTES:
        return int(attribute(node, *BITS_ATTRIBUTES[node.op_type]))
    if node.op_type == "DequantizeLinear":
        source = node.inputs[0]
        constant = None if source is None else source.const_value
        return 0 if constant is None else BITS_BY_TYPE.get(constant.dtype, 0)
    return BITS_BY_OPERATOR.get(node.op_type, 0)


def refuse_other(found: Arrived | None, options: Options) -> None:
    """An export that arrives quantised stays as it is. Raises OperatorError where something else was asked for."""
    weights = options.weights
    if found is None or not (weights.details or weights.precision not in {None, AUTO, found.precision}):
        return
    wanted = f"--precision {weights.precision}" if weights.precision else weights.details[0]
    raise OperatorError(
        f"the export arrives quantised ({found.description}) and is installed as it is, {found.precision}; {wanted} "
        "would quantise what has lost its precision already. Leave the option out, or export the model as fp32 again"
    )
