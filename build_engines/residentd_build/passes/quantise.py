"""Keep weights in the format that a scheme asks for.

Ensures: in a lowered graph, after lower.onnxruntime, every product with a constant matrix and every embedding is in its
format; what has none (norms, biases, routers, experts, position tables) stays float32. Weights are converted one at a
time, when the engine is written.

row8 (int8 without blocks) multiplies uint8 activations by int8 weights. Each token has a scale and a zero of its own,
so that neither depends on its neighbours, and 0 is met exactly:

    x = (code - zero) · scale    ->    x · W = ((code · W8) · weight_scale + zero · sum(W)) · scale

A constant row, of zeros above all, has scale SCALE_MIN and is met too. Products of one source share its codes.

16-bit weights are widened when the engine is loaded: half the file, the memory and speed of fp32.

Milliseconds of one thread of an AVX-512 VNNI processor for a step of SmolLM2-135M (onnxruntime 1.32.0, 2026-12), and
the mean KL divergence over 2,048 positions of prose, code and chat:

                              1 row   8 rows   16 rows   prefill 128   256   file MB      KL
    fp32                         43       72        93           243   480       543       0
    int8 row8                    15       33        51           127   284       169   0.030
    int4 in blocks of 32         14       45        77           350   748        99    0.17
    int4 in blocks of 128        11       35        62           241   519        92    0.30

row8 with symmetric activations takes 3 to 8 % less and has KL 0.055. int8 in blocks of 128, but for the head, has 0.020
and takes 15, 38, 63, 222 and 501; in blocks of 32 it has 0.006. uint8 weights instead of int8 take as long as fp32
where there is VNNI. int4 without importance has 0.33 and 0.47.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np
import onnx_ir as ir
from onnx_ir.tape import Tape

from residentd.errors import Finding, SourceError
from residentd_build.matrices import Blocks, Floats, Grids, channel_codes, channel_scales, channel_sums
from residentd_build.passes.products import LookUp, Product, embeddings, head_of, products
from residentd_build.passes.prune import prune

if TYPE_CHECKING:
    from residentd_build.draft import Draft
    from residentd_build.matrices import Matrix
    from residentd_build.precision import Precision, Scheme

MICROSOFT = "com.microsoft"
ROW8: Literal["row8"] = "row8"
ROW8_INPUTS_MAX = 65_536
"""255 · 127 · inputs stays below 2^31."""
ACTIVATION_TOP = 255
SCALE_MIN = 1e-20
BLOCK_BESIDE_ROW8 = 32
TABLE_BLOCKS = (128, 64, 32, 16)
INT8_ACTIVATIONS = 4
"""accuracy_level of MatMulNBits: its kernel rounds activations to int8 by block. Level 0 takes 19 to 127 times as long
(onnxruntime 1.32.0, AVX2, 2026-11)."""

NOTHING_KNOWN: Mapping[str, Floats] = MappingProxyType({})
Found = TypeVar("Found", Product, LookUp)
Form = Blocks | ir.DataType | Literal["row8"] | None


@dataclass(frozen=True, slots=True)
class _Codes:
    """A source in 8 bits. `codes` [..., inputs]; `scale` and `shift`, zero times scale, [..., 1]."""

    codes: ir.Value
    scale: ir.Value
    shift: ir.Value


def run(draft: Draft, scheme: Scheme, importance: Mapping[str, Floats] = NOTHING_KNOWN) -> str:
    """To be run on the lowered draft. One line for the manifest.

    `importance`, from calibrate.importance, by the matrix's name: 4-bit scales are then chosen so that the products
    lose least, not the weights. Without it every block keeps its whole range.
    """
    found = [_weighed(product, importance) for product in products(draft)]
    head = head_of(draft, found)
    looked_up = [_weighed(look_up, importance) for look_up in embeddings(draft)]  # as the head that it is tied to
    tables = {look_up: _table_form(scheme, look_up.matrix) for look_up in looked_up}
    shared = {look_up.matrix.value: form for look_up, form in tables.items()}
    counts: Counter[str] = Counter()
    codes: dict[ir.Value, _Codes] = {}
    grids = Grids()
    for product in found:
        form = _form(scheme, scheme.head_precision if product is head else scheme.precision, product.matrix)
        if product is head:
            form = _tied(form, shared.get(product.matrix.value))
        _store_product(draft, product, form, codes, grids)
        counts[f"{'the head' if product is head else 'products'} {_name(form)}"] += 1
    for look_up, form in tables.items():
        _store_look_up(draft, look_up, form, grids)
        counts[f"embedding {_name(form)}"] += 1
    prune(draft)
    how = "; scales by the activations of the model's own text" if importance else ""
    return f"quantise: {', '.join(f'{count} {what}' for what, count in counts.items())}{how}"


def _weighed(found: Found, importance: Mapping[str, Floats]) -> Found:
    return replace(found, matrix=replace(found.matrix, importance=importance.get(found.matrix.name)))


def _form(scheme: Scheme, precision: Precision, matrix: Matrix) -> Form:
    if precision == "fp16":
        return ir.DataType.FLOAT16
    if precision == "bf16":
        return ir.DataType.BFLOAT16
    if precision == "fp32":
        return None
    if precision == "int8" and scheme.block == 0 and matrix.inputs <= ROW8_INPUTS_MAX:
        return ROW8
    symmetric = scheme.symmetric or precision != scheme.precision
    return Blocks(4 if precision == "int4" else 8, scheme.block or BLOCK_BESIDE_ROW8, symmetric)


def _table_form(scheme: Scheme, matrix: Matrix) -> Form:
    """Rows are looked up by whole blocks; a table whose rows have none stays float32."""
    form = _form(scheme, scheme.embedding_precision, matrix)
    if form == ROW8:
        form = Blocks(8, BLOCK_BESIDE_ROW8, symmetric=True)
    if not isinstance(form, Blocks):
        return form
    sizes = (size for size in TABLE_BLOCKS if size <= form.size and matrix.inputs % size == 0)
    return next((replace(form, size=size) for size in sizes), None)


def _tied(head: Form, table: Form) -> Form:
    """The head in the blocks of the table that it is tied to, if both have as many bits: they are then one tensor."""
    is_same = isinstance(head, Blocks) and isinstance(table, Blocks) and head.bits == table.bits
    return table if is_same else head


def _name(form: Form) -> str:
    if form is None:
        return "float32"
    return form.name.lower() if isinstance(form, ir.DataType) else str(form)


def _store_product(draft: Draft, product: Product, form: Form, known: dict[ir.Value, _Codes], grids: Grids) -> None:
    tape = Tape()
    if form is None:
        return
    if isinstance(form, ir.DataType):
        _narrow(draft, product, form)
        return
    if isinstance(form, Blocks):
        result = _multiply_blocks(draft, tape, product, form, grids)
    else:
        codes = known.get(product.source)
        if codes is None:
            codes = known[product.source] = _code(draft, tape, product.source)
        result = _multiply_codes(draft, tape, product, codes)
    if product.bias is not None:
        result = tape.op("Add", [result, product.bias], name=f"{product.node.name}.biased")
    _replace(draft, product.node, tape, result)


def _store_look_up(draft: Draft, look_up: LookUp, form: Form, grids: Grids) -> None:
    if form is None:
        return
    tape = Tape()
    if isinstance(form, Blocks):
        result = _look_up_blocks(draft, tape, look_up, form, grids)
    else:
        assert isinstance(form, ir.DataType)
        result = _look_up_narrow(draft, tape, look_up, form)
    _replace(draft, look_up.node, tape, result)


def _replace(draft: Draft, node: ir.Node, tape: Tape, result: ir.Value) -> None:
    old = node.outputs[0]
    assert not old.is_graph_output(), "a lowered graph's logits come out of a Squeeze"
    draft.graph.insert_before(node, tape.nodes)
    ir.convenience.replace_all_uses_with(old, result)
    draft.graph.remove(node, safe=True)


def _initializer(draft: Draft, name: str, tensor: ir.LazyTensor) -> ir.Value:
    """The one that is there if there is one of this name, as where head and embedding share a matrix."""
    name = f"residentd/{name}"
    if name not in draft.graph.initializers:
        value = ir.Value(name=name, shape=tensor.shape, type=ir.TensorType(tensor.dtype), const_value=tensor)
        draft.graph.register_initializer(value)
    return draft.graph.initializers[name]


# ---- blocks --------------------------------------------------------------------------------------------------------


def _multiply_blocks(draft: Draft, tape: Tape, product: Product, form: Blocks, grids: Grids) -> ir.Value:
    matrix, name = product.matrix, _block_name(product.matrix, form)
    operands = [product.source, _block_codes(draft, matrix, form, grids), _block_scales(draft, matrix, form, grids)]
    if not form.symmetric:
        operands.append(_initializer(draft, f"{name}.zeros", form.zeros(matrix, grids)))
    attributes = {
        "K": matrix.inputs,
        "N": matrix.outputs,
        "bits": form.bits,
        "block_size": form.size,
        "accuracy_level": INT8_ACTIVATIONS,
    }
    return tape.op("MatMulNBits", operands, attributes, domain=MICROSOFT, name=f"{product.node.name}.blocks")


def _look_up_blocks(draft: Draft, tape: Tape, look_up: LookUp, form: Blocks, grids: Grids) -> ir.Value:
    """The codes are the tensor that a tied head multiplies by, so rows are gathered as blocks and then flattened."""
    matrix, name = look_up.matrix, look_up.node.name
    column = [matrix.outputs, form.count(matrix), 1]
    scales = tape.op(
        "Reshape", [_block_scales(draft, matrix, form, grids), _shape(draft, column)], name=f"{name}.scale_column"
    )
    operands = [_block_codes(draft, matrix, form, grids), look_up.index, scales]
    if not form.symmetric:
        zeros = form.zero_column(matrix, grids)
        operands.append(_initializer(draft, f"{_block_name(matrix, form)}.zero_column", zeros))
    attributes = {"bits": form.bits, "block_size": form.size, "gather_axis": 0, "quantize_axis": 2}
    blocks = tape.op("GatherBlockQuantized", operands, attributes, domain=MICROSOFT, name=f"{name}.blocks")
    return tape.op("Reshape", [blocks, _shape(draft, [1, -1, matrix.inputs])], name=f"{name}.rows")


def _block_codes(draft: Draft, matrix: Matrix, form: Blocks, grids: Grids) -> ir.Value:
    return _initializer(draft, f"{_block_name(matrix, form)}.codes", form.codes(matrix, grids))


def _block_scales(draft: Draft, matrix: Matrix, form: Blocks, grids: Grids) -> ir.Value:
    return _initializer(draft, f"{_block_name(matrix, form)}.scales", form.scales(matrix, grids))


def _block_name(matrix: Matrix, form: Blocks) -> str:
    return f"{matrix.name}.int{form.bits}x{form.size}"


def _shape(draft: Draft, dims: list[int]) -> ir.Value:
    return draft.constant(f"shape.{dims}", np.array(dims, np.int64))


# ---- row8 ----------------------------------------------------------------------------------------------------------


def _code(draft: Draft, tape: Tape, source: ir.Value) -> _Codes:
    name = f"{source.name}.row8"
    high = reduced(draft, tape, "ReduceMax", source, -1, keeps=True, name=f"{name}.high")
    low = reduced(draft, tape, "ReduceMin", source, -1, keeps=True, name=f"{name}.low")
    width = tape.op("Sub", [high, low], name=f"{name}.width")
    step = draft.constant("row8.step", np.array(1 / ACTIVATION_TOP, np.float32))
    least = draft.constant("row8.scale_min", np.array(SCALE_MIN, np.float32))
    scale = tape.op("Max", [tape.op("Mul", [width, step], name=f"{name}.step"), least], name=f"{name}.scale")
    zero = tape.op("Round", [tape.op("Div", [low, scale], name=f"{name}.low_ratio")], name=f"{name}.zero")
    ratio = tape.op("Div", [source, scale], name=f"{name}.ratio")
    shifted = tape.op("Sub", [ratio, zero], name=f"{name}.shifted")
    one, none = _one_and_none(draft)
    codes = tape.op("QuantizeLinear", [shifted, one, none], name=f"{name}.codes")
    return _Codes(codes, scale, tape.op("Mul", [zero, scale], name=f"{name}.shift"))


def _multiply_codes(draft: Draft, tape: Tape, product: Product, codes: _Codes) -> ir.Value:
    matrix, name = product.matrix, product.node.name
    weight = _initializer(draft, f"{matrix.name}.row8.codes", channel_codes(matrix))
    scales = _initializer(draft, f"{matrix.name}.row8.scales", channel_scales(matrix))
    sums = _initializer(draft, f"{matrix.name}.row8.sums", channel_sums(matrix))
    one, none = _one_and_none(draft)
    operands = [codes.codes, weight, one, scales, none]
    counted = tape.op("MatMulIntegerToFloat", operands, domain=MICROSOFT, name=f"{name}.row8")
    scaled = tape.op("Mul", [counted, codes.scale], name=f"{name}.scaled")
    return tape.op("Add", [scaled, tape.op("Mul", [codes.shift, sums], name=f"{name}.shift")], name=f"{name}.sum")


def reduced(
    draft: Draft, tape: Tape, operator: str, source: ir.Value, axis: int, *, keeps: bool, name: str
) -> ir.Value:
    """`operator` over one axis: an attribute before opset 18, an input since."""
    if draft.opset < 18:
        return tape.op(operator, [source], {"axes": [axis], "keepdims": int(keeps)}, name=name)
    axes = draft.constant(f"axes.[{axis}]", np.array([axis], np.int64))
    return tape.op(operator, [source, axes], {"keepdims": int(keeps)}, name=name)


def _one_and_none(draft: Draft) -> tuple[ir.Value, ir.Value]:
    """A scale and a zero that change nothing."""
    return draft.constant("row8.one", np.array(1, np.float32)), draft.constant("row8.none", np.array(0, np.uint8))


# ---- 16 bits -------------------------------------------------------------------------------------------------------


def _narrow(draft: Draft, product: Product, dtype: ir.DataType) -> None:
    """Store the matrix in 16 bits behind a Cast, which ONNX Runtime does once, at load."""
    matrix, weight = product.matrix, product.node.inputs[1]
    user = product.node if weight is matrix.value else _turn(product)
    name = f"{product.node.name}.wide"
    wide = ir.node("Cast", [_narrowed(draft, matrix, dtype)], {"to": ir.DataType.FLOAT}, name=name)
    wide.outputs[0].name = name
    draft.graph.insert_before(user, [wide])
    user.replace_input_with(user.inputs.index(matrix.value), wide.outputs[0])


def _turn(product: Product) -> ir.Node:
    """The Transpose between the matrix and its product."""
    weight = product.node.inputs[1]
    turn = None if weight is None else weight.producer()
    assert turn is not None
    return turn


def _look_up_narrow(draft: Draft, tape: Tape, look_up: LookUp, dtype: ir.DataType) -> ir.Value:
    """Rows are widened as they are looked up, so this table is in 16 bits in memory too."""
    name = look_up.node.name
    rows = tape.op("Gather", [_narrowed(draft, look_up.matrix, dtype), look_up.index], name=f"{name}.narrow")
    return tape.op("Cast", [rows], {"to": ir.DataType.FLOAT}, name=f"{name}.wide")


def _narrowed(draft: Draft, matrix: Matrix, dtype: ir.DataType) -> ir.Value:
    tensor = matrix.tensor

    def make() -> ir.Tensor[Any]:
        with np.errstate(over="ignore"):
            result = tensor.numpy().astype(dtype.numpy())
        if not np.isfinite(result).all():
            raise SourceError([_overflow(matrix, dtype)])
        return ir.Tensor(result, dtype=dtype)

    lazy = ir.LazyTensor(make, dtype, ir.Shape(tensor.shape.numpy()), name=matrix.name)
    return _initializer(draft, f"{matrix.name}.{_name(dtype)}", lazy)


def _overflow(matrix: Matrix, dtype: ir.DataType) -> Finding:
    largest = float(np.finfo(dtype.numpy()).max)
    return Finding(
        f"{matrix.name} has numbers that {_name(dtype)} cannot hold; its largest is {largest:,.0f}",
        "model.onnx",
        "Install it with --precision bf16 or fp32",
    )
