"""The pass that stores weights in fewer bits: what ONNX Runtime makes of each format, against plain arithmetic."""

from __future__ import annotations

import tracemalloc
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import onnxruntime
import pytest
from lowering import EXPORTS, draft_of, quiet
from onnx_ir.tape import Tape
from test_quantise_numbers import decoded, matrix_of

from residentd.backend.onnxruntime import RuntimeOptions, session_options
from residentd.errors import SourceError
from residentd_build.draft import Draft
from residentd_build.engine_files import write_files
from residentd_build.matrices import Blocks, channel_codes, channel_scales
from residentd_build.passes import quantise
from residentd_build.passes.products import embeddings, products
from residentd_build.pipeline import rewrite
from residentd_build.precision import Scheme, scheme_for
from residentd_build.validate import validate

Floats = npt.NDArray[np.float32]
INPUTS, OUTPUTS, VOCAB = 96, 40, 50
FORMS = ("MatMul", "FusedMatMul", "Gemm", "Gemm turned", "Transpose")
ROUNDING = 2.0**-18
"""Relative to the sum of the magnitudes that are added up: at most 64 roundings of 2^-24."""


class Model:
    """Puts a graph together; `logits` goes out through a Squeeze, as a lowered one's does."""

    def __init__(self, opset: int = 21, seed: int = 3) -> None:
        self._tape = Tape()
        self._opset = opset
        self.rng = np.random.default_rng(seed)
        self.weights: dict[str, Floats] = {}
        self.inputs: list[ir.Value] = []

    def input(self, name: str, dims: list[Any], dtype: ir.DataType = ir.DataType.FLOAT) -> ir.Value:
        self.inputs.append(ir.Value(name=name, shape=ir.Shape(dims), type=ir.TensorType(dtype)))
        return self.inputs[-1]

    def weight(self, name: str, *dims: int) -> ir.Value:
        self.weights[name] = self.rng.standard_normal(dims).astype(np.float32)
        return self.constant(name, self.weights[name])

    def constant(self, name: str, array: npt.NDArray[Any]) -> ir.Value:
        return self._tape.initializer(ir.tensor(array, name=name))

    def op(self, operator: str, *inputs: ir.Value | None, domain: str = "", **attributes: Any) -> ir.Value:
        return self._tape.op(operator, inputs, attributes, domain=domain)

    def product(self, form: str, source: ir.Value, name: str, inputs: int, outputs: int) -> ir.Value:
        """`source` times the weight `name`, however that is written."""
        if form == "MatMul":
            return self.op("MatMul", source, self.weight(name, inputs, outputs))
        if form == "FusedMatMul":
            return self.op(form, source, self.weight(name, outputs, inputs), domain="com.microsoft", transB=1)
        if form == "Transpose":
            return self.op("MatMul", source, self.op("Transpose", self.weight(name, outputs, inputs), perm=(1, 0)))
        bias = self.weight(f"{name}.bias", outputs)
        if form == "Gemm":
            return self.op("Gemm", source, self.weight(name, inputs, outputs), bias)
        return self.op("Gemm", source, self.weight(name, outputs, inputs), bias, transB=1)

    def rows(self, name: str, outputs: int) -> Floats:
        """The weight [outputs, inputs]."""
        found = self.weights[name]
        return found if found.shape[0] == outputs else np.ascontiguousarray(found.T)

    def draft(self, logits: ir.Value) -> Draft:
        axes = None if self._opset < 13 else self.constant("squeezed", np.array([0], np.int64))
        flat = self.op("Squeeze", self.op("Unsqueeze", logits, axes), axes)
        flat.name, flat.type = "logits", ir.TensorType(ir.DataType.FLOAT)
        opsets = {"": self._opset, "com.microsoft": 1}
        graph = ir.Graph(
            self.inputs, [flat], nodes=self._tape.nodes, initializers=self._tape.initializers, opset_imports=opsets
        )
        return Draft(ir.Model(graph, ir_version=10), (), 64, 32)


def run(draft: Draft, directory: Path, feeds: dict[str, npt.NDArray[Any]]) -> Floats:
    write_files(draft.model, directory, lambda *_: None)
    options = session_options(RuntimeOptions(threads=1))
    session = onnxruntime.InferenceSession(str(directory / "model.onnx"), options, providers=["CPUExecutionProvider"])
    result: Floats = session.run(["logits"], feeds)[0]
    return result


def kinds(draft: Draft) -> Counter[str]:
    return Counter(node.op_type for node in draft.graph)


def activations(rows: int, inputs: int = INPUTS) -> Floats:
    """Rows of quite different size and offset, one of zeros, one constant, one with a single large number."""
    found = np.random.default_rng(5).standard_normal((rows, inputs)) * 10.0 ** np.linspace(-3, 3, rows)[:, None]
    found[1] = 0
    found[2] = 0.7
    found[3, 4] = 500
    found[4] += 9
    return found.astype(np.float32)


def channel_decoded(rows: Floats) -> npt.NDArray[np.float64]:
    matrix = matrix_of(rows)
    return channel_codes(matrix).numpy().T.astype(np.float64) * channel_scales(matrix).numpy()[:, None]


# ---- what a product computes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("opset", [14, 21])
def test_row8_rounds_activations_by_half_a_step_of_their_own_row(form: str, opset: int, tmp_path: Path) -> None:
    """From that of the decoded weights the product is a step of its row away for each weight, half of one as a rule."""
    model = Model(opset)
    draft = model.draft(model.product(form, model.input("x", ["rows", INPUTS]), "w", INPUTS, OUTPUTS))
    assert "row8" in quantise.run(draft, scheme_for("int8"))
    x = activations(12)
    found = run(draft, tmp_path, {"x": x})
    weights = channel_decoded(model.rows("w", OUTPUTS))
    exact = x @ weights.T + model.weights.get("w.bias", np.float32(0))
    steps = (x.max(axis=1) - x.min(axis=1))[:, None] / 255
    sums = np.abs(weights).sum(axis=1)
    # A zero is rounded to a whole step, so the range may end half a step early.
    assert (np.abs(found - exact) <= steps * sums + ROUNDING * (np.abs(x) @ np.abs(weights.T) + 1)).all()
    typical = np.sqrt((steps / np.sqrt(12)) ** 2 * (weights**2).sum(axis=1))
    assert np.abs(found - exact).std() < 1.5 * np.sqrt((typical**2).mean()) + 1e-6


def test_row8_of_zeros_is_zero_and_of_a_constant_row_exact(tmp_path: Path) -> None:
    """Neither divides by its width of 0."""
    model = Model()
    draft = model.draft(model.product("MatMul", model.input("x", ["rows", INPUTS]), "w", INPUTS, OUTPUTS))
    quantise.run(draft, scheme_for("int8"))
    x = np.stack([np.zeros(INPUTS), np.full(INPUTS, 0.7), np.full(INPUTS, -3.0)]).astype(np.float32)
    found = run(draft, tmp_path, {"x": x})
    weights = channel_decoded(model.rows("w", OUTPUTS))
    assert (found[0] == 0).all()
    assert np.allclose(found[1:], x[1:] @ weights.T, rtol=0, atol=ROUNDING * 3 * np.abs(weights).sum(axis=1).max())


def test_a_row8_row_does_not_depend_on_its_neighbours(tmp_path: Path) -> None:
    """Bit by bit: integers are exact in any order, and each row has a scale of its own."""
    model = Model()
    draft = model.draft(model.product("MatMul", model.input("x", ["rows", INPUTS]), "w", INPUTS, OUTPUTS))
    quantise.run(draft, scheme_for("int8"))
    x = activations(20)
    together = run(draft, tmp_path, {"x": x})
    for row in range(len(x)):
        assert np.array_equal(run(draft, tmp_path, {"x": x[row : row + 1]})[0], together[row])


def test_weights_and_activations_at_their_limits_do_not_overflow(tmp_path: Path) -> None:
    """255 times 127 in every place: pairs of them are more than the 16 bits that processors without VNNI add up in."""
    model = Model()
    source = model.input("x", ["rows", 512])
    weight = np.ones((512, 8), np.float32)
    weight[:, ::2] = -1
    draft = model.draft(model.op("MatMul", source, model.constant("w", weight)))
    quantise.run(draft, scheme_for("int8"))
    x = np.ones((2, 512), np.float32)
    x[:, 0] = 0  # so that 1 is code 255
    assert np.allclose(run(draft, tmp_path, {"x": x}), x @ weight, rtol=1e-5)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("block", [32, 128])
@pytest.mark.parametrize("zero", ["symmetric", "asymmetric"])
def test_blocks_are_what_the_kernel_decodes(form: str, bits: int, block: int, zero: str, tmp_path: Path) -> None:
    """The product is that of the decoded weights, but for the kernel's own 8-bit rounding of activations by block."""
    model = Model()
    draft = model.draft(model.product(form, model.input("x", ["rows", INPUTS]), "w", INPUTS, OUTPUTS))
    scheme = scheme_for(f"int{bits}", block=block, symmetric=zero == "symmetric", head="same")
    quantise.run(draft, scheme)
    assert kinds(draft)["MatMulNBits"] == 1
    x = activations(12)
    found = run(draft, tmp_path, {"x": x})
    weights = decoded(Blocks(bits, block, zero == "symmetric"), matrix_of(model.rows("w", OUTPUTS))).astype(np.float64)
    exact = x @ weights.T + model.weights.get("w.bias", np.float32(0))
    places = np.pad(np.abs(x), ((0, 0), (0, -INPUTS % block))).reshape(12, -1, block).max(-1).repeat(block, 1)
    steps = places[:, :INPUTS] / 127
    allowed = 0.51 * steps @ np.abs(weights.T) + ROUNDING * (np.abs(x) @ np.abs(weights.T) + 1)
    assert (np.abs(found - exact) <= allowed).all()


@pytest.mark.parametrize(("precision", "dtype"), [("fp16", ir.DataType.FLOAT16), ("bf16", ir.DataType.BFLOAT16)])
@pytest.mark.parametrize("form", FORMS)
def test_16_bits_store_rounded_weights_and_compute_in_float32(
    precision: str, dtype: ir.DataType, form: str, tmp_path: Path
) -> None:
    """The product of the rounded weights, to float32's own rounding; the file holds two bytes a weight."""
    model = Model()
    draft = model.draft(model.product(form, model.input("x", ["rows", INPUTS]), "w", INPUTS, OUTPUTS))
    quantise.run(draft, scheme_for(precision))
    x = activations(12)
    found = run(draft, tmp_path, {"x": x})
    weights = model.rows("w", OUTPUTS).astype(dtype.numpy()).astype(np.float64)
    exact = x @ weights.T + model.weights.get("w.bias", np.float32(0))
    assert (np.abs(found - exact) <= ROUNDING * (np.abs(x) @ np.abs(weights.T) + 1)).all()
    large = [value for value in draft.graph.initializers.values() if value.const_value.size >= INPUTS * OUTPUTS]
    assert [value.dtype for value in large] == [dtype]


def test_a_weight_that_fp16_cannot_hold_is_refused_with_the_way_out(tmp_path: Path) -> None:
    """Not infinity in the file."""
    model = Model()
    weight = np.full((INPUTS, OUTPUTS), 70_000, np.float32)
    draft = model.draft(model.op("MatMul", model.input("x", ["rows", INPUTS]), model.constant("w", weight)))
    quantise.run(draft, scheme_for("fp16"))
    with pytest.raises(SourceError, match=r"w has numbers that float16 cannot hold.*65,504.*--precision bf16"):
        write_files(draft.model, tmp_path, lambda *_: None)


# ---- embedding and head --------------------------------------------------------------------------------------------


def tied(hidden: int = INPUTS) -> tuple[Model, Draft]:
    """Tokens looked up, one product, and a head that multiplies by the table."""
    model = Model()
    table = model.weight("table", VOCAB, hidden)
    found = model.op("Gather", table, model.input("input_ids", [1, "tokens"], ir.DataType.INT64))
    inner = model.product("MatMul", found, "w", hidden, hidden)
    return model, model.draft(model.op("FusedMatMul", inner, table, domain="com.microsoft", transB=1))


@pytest.mark.parametrize("precision", ["int8", "int4"])
@pytest.mark.parametrize("zero", ["symmetric", "asymmetric"])
def test_a_looked_up_row_is_the_decoded_one(precision: str, zero: str, tmp_path: Path) -> None:
    """Embeddings in blocks: every row, bit by bit."""
    model = Model()
    ids = model.input("input_ids", [1, "tokens"], ir.DataType.INT64)
    draft = model.draft(model.op("Gather", model.weight("table", VOCAB, INPUTS), ids))
    scheme = scheme_for(precision, block=32, symmetric=zero == "symmetric", embedding="same")
    assert f"embedding {precision} in" in quantise.run(draft, scheme)
    every = np.arange(VOCAB)[None]
    rows = decoded(Blocks(int(precision[3:]), 32, zero == "symmetric"), matrix_of(model.weights["table"]))
    assert np.array_equal(run(draft, tmp_path, {"input_ids": every})[0], rows)


@pytest.mark.parametrize(
    ("scheme", "count"),
    [
        (scheme_for("int4"), 1),
        (scheme_for("int8", block=32), 1),
        (scheme_for("int4", block=32, embedding="int4", head="int4"), 1),
        (scheme_for("bf16"), 1),
        (scheme_for("int8"), 2),  # the integer kernel wants the head's matrix turned
        (scheme_for("int4", embedding="int8", head="int4"), 2),
    ],
    ids=str,
)
def test_a_tied_matrix_is_stored_once_where_both_want_it_in_one_form(
    scheme: Scheme, count: int, tmp_path: Path
) -> None:
    """Head and embedding read one tensor; the float32 one is gone; the graph runs."""
    _, draft = tied()
    quantise.run(draft, scheme)
    sizes = [value.const_value.nbytes for value in draft.graph.initializers.values()]
    assert sum(size >= VOCAB * INPUTS // 2 for size in sizes) == count + (INPUTS * INPUTS >= VOCAB * INPUTS)
    assert "table" not in draft.graph.initializers
    assert run(draft, tmp_path, {"input_ids": np.array([[3, 1]])}).shape == (1, 2, VOCAB)


@pytest.mark.parametrize("head", ["fp32", "int8", "int4"])
@pytest.mark.parametrize("embedding", ["fp32", "int8", "int4"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "int8", "int4"])
def test_head_and_embedding_follow_their_own_choice(precision: str, embedding: str, head: str, tmp_path: Path) -> None:
    """All combinations run, also tied, and say what they did."""
    _, draft = tied()
    line = quantise.run(draft, scheme_for(precision, embedding=embedding, head=head))
    names = {"fp32": "float32", "bf16": "bfloat16", "int8": "row8" if precision != "int4" else "int8", "int4": "int4"}
    assert f"1 products {names[precision]}" in line
    assert f"the head {names[head]}" in line
    assert f"embedding {'float32' if embedding == 'fp32' else embedding}" in line
    assert np.isfinite(run(draft, tmp_path, {"input_ids": np.array([[3, 1, 49]])})).all()


@pytest.mark.parametrize(
    ("hidden", "block", "stored"),
    [
        (192, 128, "int8 in blocks of 64"),
        (96, 128, "int8 in blocks of 32"),
        (48, 32, "int8 in blocks of 16"),
        (40, 32, "float32"),
    ],
)
def test_a_table_is_in_the_largest_blocks_that_fill_its_rows(
    hidden: int, block: int, stored: str, tmp_path: Path
) -> None:
    """Rows are looked up by whole blocks; where not even 16 divides them the table stays. A tied head follows."""
    _, draft = tied(hidden)
    line = quantise.run(draft, scheme_for("int4", block=block))
    assert f"1 embedding {stored}" in line
    assert f"1 the head {stored if 'int8' in stored else 'int8 in blocks of 32'}" in line
    assert np.isfinite(run(draft, tmp_path, {"input_ids": np.array([[3, 1, 49]])})).all()


# ---- what is found -------------------------------------------------------------------------------------------------


def test_products_of_one_source_share_its_codes(tmp_path: Path) -> None:
    """Gate and up round the same activations once."""
    model = Model()
    x = model.input("x", ["rows", INPUTS])
    gate, up = (model.product("MatMul", x, name, INPUTS, OUTPUTS) for name in ("gate", "up"))
    draft = model.draft(model.op("Mul", gate, up))
    quantise.run(draft, scheme_for("int8"))
    assert kinds(draft)["MatMulIntegerToFloat"] == 2
    assert kinds(draft)["QuantizeLinear"] == 1


def test_a_router_and_a_table_of_positions_stay_as_they_are() -> None:
    """What chooses experts keeps its exact scores; only token ids look an embedding up."""
    model = Model()
    x = model.input("x", ["rows", INPUTS])
    scores = model.op("Softmax", model.product("MatMul", x, "router", INPUTS, 8))
    chosen = model.op("TopK", scores, model.constant("k", np.array([2], np.int64)))
    positions = model.input("position_ids", [1, "tokens"], ir.DataType.INT64)
    placed = model.op("Gather", model.weight("positions", 64, INPUTS), positions)
    draft = model.draft(model.op("Add", model.op("Mul", chosen, chosen), placed))
    assert products(draft) == []
    assert embeddings(draft) == []


def test_products_that_scale_or_turn_their_source_stay_as_they_are() -> None:
    """Only a plain product has a form in fewer bits."""
    model = Model()
    x = model.input("x", [INPUTS, INPUTS])
    scaled = model.op("FusedMatMul", x, model.weight("a", INPUTS, INPUTS), domain="com.microsoft", alpha=0.5)
    turned = model.op("Gemm", scaled, model.weight("b", INPUTS, INPUTS), transA=1)
    assert products(model.draft(turned)) == []


@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma3", "phi3", "gpt2", "optimum14-llama", "qwen3-moe"])
def test_every_linear_layer_of_a_real_export_is_found(name: str) -> None:
    """No product with a constant matrix is left in float32, but for routers."""
    draft = draft_of(validate(EXPORTS / name).model, 64)
    rewrite(draft, quiet)
    quantise.run(draft, scheme_for("int8"))
    left = [node for node in draft.graph if node.op_type in {"MatMul", "FusedMatMul", "Gemm"}]
    assert all("gate" in str(node.name) for node in left) if name == "qwen3-moe" else left == []
    assert kinds(draft)["MatMulIntegerToFloat"] > 4
    assert kinds(draft)["GatherBlockQuantized"] == 1


def test_no_more_than_one_matrix_is_held_at_a_time(tmp_path: Path) -> None:
    """Writing 12 matrices of 4 MiB peaks at one of them with its codes and parts, whatever their number."""
    size = 1024
    model = Model()
    value = model.input("x", ["rows", size])
    for index in range(12):
        lazy = ir.LazyTensor(
            lambda index=index: ir.tensor(np.full((size, size), index + 1, np.float32)),
            ir.DataType.FLOAT,
            ir.Shape([size, size]),
            name=f"w{index}",
        )
        value = model.op("MatMul", value, model._tape.initializer(lazy))
    draft = model.draft(value)
    quantise.run(draft, scheme_for("int4", head="int4"))
    tracemalloc.start()
    write_files(draft.model, tmp_path, lambda *_: None)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    matrix = size * size * 4
    assert peak < 6 * matrix  # itself, and of its parts: a copy, quotients, rounded, codes; 12 would be above
