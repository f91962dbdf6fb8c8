"""What is done to other exporters' graphs before recognition: branches, 16 bits, shared scales, fused operators.

Each rewritten graph is compared with the graph as it was, both on ONNX Runtime.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
from lowered_engine import session
from onnx_ir.tape import Tape

from residentd.errors import SourceError
from residentd_build.draft import Draft
from residentd_build.passes import branches, operators, rowwise, widen

HIDDEN, TOKENS = 32, 6
CONTEXT = 16


class Sketch:
    """A graph with a mask and a stream of hidden numbers, to which a test adds what it is about."""

    def __init__(self) -> None:
        self.tape = Tape()
        self._count = 0
        self.mask = _input("attention_mask", ["batch", "total"], ir.DataType.INT64)
        self.hidden = _input("hidden", [1, "tokens", HIDDEN], ir.DataType.FLOAT)
        self.inputs = [self.mask, self.hidden]

    def op(self, name: str, *inputs: ir.Value | None, domain: str = "", **attributes: object) -> ir.Value:
        return self.tape.op(name, inputs, attributes, domain=domain)

    def constant(self, array: np.ndarray) -> ir.Value:
        self._count += 1
        return self.tape.initializer(ir.tensor(array, name=f"constant_{self._count}"))

    def integers(self, value: object) -> ir.Value:
        return self.constant(np.array(value, np.int64))

    def draft(self, *outputs: ir.Value, opset: int = 18) -> Draft:
        for place, value in enumerate(outputs):
            value.name = f"out{place}"
            value.type = value.type or ir.TensorType(ir.DataType.FLOAT)
        graph = ir.Graph(
            self.inputs,
            outputs,
            nodes=self.tape.nodes,
            initializers=self.tape.initializers,
            opset_imports={"": opset, "com.microsoft": 1},
            name="sketch",
        )
        return Draft(ir.Model(graph, ir_version=10), (), CONTEXT, TOKENS)


def _input(name: str, dims: list, dtype: ir.DataType) -> ir.Value:
    return ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(dims))


def run(draft: Draft, path: Path, feeds: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    ir.save(draft.model, path)
    opened: onnxruntime.InferenceSession = session(path)
    names = {value.name for value in opened.get_inputs()}
    results: list[np.ndarray] = opened.run(None, {name: feed for name, feed in feeds.items() if name in names})
    return results


def numbers(*shape: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def feeds(tokens: int = TOKENS, past: int = 0) -> dict[str, np.ndarray]:
    return {"attention_mask": np.ones((1, past + tokens), np.int64), "hidden": numbers(1, tokens, HIDDEN)}


def operators_of(draft: Draft) -> set[str]:
    return {node.op_type for node in draft.graph.all_nodes()}


# ---- branches ------------------------------------------------------------------------------------------------------


def either(sketch: Sketch, condition: ir.Value, *, nested: bool = False) -> ir.Value:
    """hidden · 2 + 1 if the condition holds, else hidden · 3; both with constants of their own of one name."""

    def branch(factor: float, *, is_biased: bool) -> ir.Graph:
        tape = Tape()
        number = tape.initializer(ir.tensor(np.array(factor, np.float32), name=f"number{factor if nested else ''}"))
        result = tape.op("Mul", [sketch.hidden, number], name="product")
        result.name = f"product{factor}"
        if is_biased:
            result = tape.op("Add", [result, sketch.constant(np.array(1, np.float32))], name="sum")
            result.name = f"sum{factor}"
        if nested and is_biased:
            graphs = {"then_branch": branch(5.0, is_biased=False), "else_branch": branch(7.0, is_biased=False)}
            inner = tape.op("If", [condition], graphs)
            inner.type, inner.name = ir.TensorType(ir.DataType.FLOAT), "inner"
            result = tape.op("Add", [result, inner])
            result.name = "both"
        result.type = ir.TensorType(ir.DataType.FLOAT)
        return ir.Graph([], [result], nodes=tape.nodes, initializers=tape.initializers, name="branch")

    graphs = {"then_branch": branch(2.0, is_biased=True), "else_branch": branch(3.0, is_biased=False)}
    return sketch.op("If", condition, **graphs)


def longer_than(sketch: Sketch, tokens: int) -> ir.Value:
    total = sketch.op("Gather", sketch.op("Shape", sketch.mask), sketch.integers(1))
    return sketch.op("Greater", total, sketch.integers(tokens))


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize(("limit", "tokens"), [(0, 6), (CONTEXT, 6), (CONTEXT, 16)])
def test_the_branch_of_every_step_is_taken(limit: int, tokens: int, tmp_path: Path, *, nested: bool) -> None:
    """Always true or always false within the context, and the same numbers; constants of one name stay apart."""

    def draft() -> Draft:
        sketch = Sketch()
        half = sketch.tape.initializer(ir.tensor(np.array(0.5, np.float32), name="half"))
        taken = sketch.tape.op("Mul", [either(sketch, longer_than(sketch, limit), nested=nested), half], name="product")
        return sketch.draft(taken)

    inlined = draft()
    assert branches.run(inlined).startswith("branches: 2" if nested and limit == 0 else "branches: 1")
    assert "If" not in operators_of(inlined)
    found, expected = (
        run(one, tmp_path / f"{place}.onnx", feeds(tokens)) for place, one in enumerate((inlined, draft()))
    )
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("limit", [1, 8, CONTEXT - 1])
def test_a_branch_that_changes_within_the_context_is_refused(limit: int) -> None:
    """As rotary tables for long contexts do: the message says what would make it one branch."""
    sketch = Sketch()
    draft = sketch.draft(either(sketch, longer_than(sketch, limit)))
    with pytest.raises(SourceError, match=rf"changes within {CONTEXT} tokens") as caught:
        branches.run(draft)
    assert "--context" in caught.value.findings[0].remedy


def test_a_branch_that_tokens_decide_is_refused() -> None:
    """What a token is must not decide what its neighbours get."""
    sketch = Sketch()
    largest = sketch.op("ReduceMax", sketch.hidden, keepdims=0)
    draft = sketch.draft(either(sketch, sketch.op("Greater", largest, sketch.constant(np.array(1, np.float32)))))
    with pytest.raises(SourceError, match="depends on the tokens"):
        branches.run(draft)


# ---- 16 bits -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [ir.DataType.FLOAT16, ir.DataType.BFLOAT16])
@pytest.mark.parametrize("is_stored", [False, True])
def test_sixteen_bits_become_float32(dtype: ir.DataType, tmp_path: Path, *, is_stored: bool) -> None:
    """Weights, constants, casts and inputs; stored or not, the numbers are those of numpy on the same weights."""
    sketch = Sketch()
    weight, scale = numbers(HIDDEN, 8).astype(dtype.numpy()), np.array(1.5).astype(dtype.numpy())
    narrow = _input("narrow", [1, "tokens", HIDDEN], dtype)
    sketch.inputs.append(narrow)
    hidden = sketch.op("Add", sketch.op("Cast", sketch.hidden, to=int(dtype)), narrow)
    product = sketch.op("MatMul", hidden, sketch.constant(weight))
    factor = sketch.op("Constant", value=ir.tensor(scale, dtype=dtype))
    zeros = sketch.op(
        "ConstantOfShape", sketch.integers([8]), value=ir.tensor(np.ones(1).astype(dtype.numpy()), dtype=dtype)
    )
    result = sketch.op("Cast", sketch.op("Add", sketch.op("Mul", product, factor), zeros), to=int(ir.DataType.FLOAT))
    draft = sketch.draft(result)
    kept = widen.narrow_weights(draft)
    line = widen.run(draft)
    if is_stored:
        widen.store(draft, kept)
    assert line == f"widen: 1 weights and all that is computed from {dtype.name.lower()} to float32"
    given = feeds() | {"narrow": numbers(1, TOKENS, HIDDEN, seed=2)}
    (found,) = run(draft, tmp_path / "model.onnx", given)
    expected = (given["hidden"] + given["narrow"]) @ weight.astype(np.float32) * np.float32(1.5) + 1
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    stored = {value.const_value.dtype for value in draft.graph.initializers.values() if value.const_value.size > 8}
    assert stored == ({dtype} if is_stored else {ir.DataType.FLOAT})


# ---- shared scales -------------------------------------------------------------------------------------------------


def quantised(*, per_channel: bool, signed: bool, opset: int) -> Draft:
    """hidden · matrix as onnxruntime's dynamic quantisation writes it, twice, from the same activations."""
    sketch = Sketch()
    codes, scale, zero = sketch.tape.op_multi_out("DynamicQuantizeLinear", [sketch.hidden], num_outputs=3)
    outputs = []
    for seed in (3, 4):
        kind = np.int8 if signed else np.uint8
        limits = (-64, 64) if signed else (0, 128)
        matrix = np.random.default_rng(seed).integers(*limits, (HIDDEN, 8)).astype(kind)
        size = (8,) if per_channel else ()
        point = np.random.default_rng(seed).integers(-3, 3, size).astype(kind) if signed else np.full(size, 64, kind)
        scales = np.random.default_rng(seed).uniform(0.01, 0.02, size).astype(np.float32)
        exact = sketch.op("MatMulInteger", codes, sketch.constant(matrix), zero, sketch.constant(point))
        factor = sketch.op("Mul", scale, sketch.constant(scales))
        outputs.append(sketch.op("Mul", sketch.op("Cast", exact, to=1), factor))
    return sketch.draft(*outputs, opset=opset)


@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("opset", [14, 18])
def test_each_token_is_quantised_as_if_it_were_alone(
    opset: int, tmp_path: Path, *, signed: bool, per_channel: bool
) -> None:
    """Bit for bit what the export gives for that token by itself, whoever stands beside it."""
    original = quantised(per_channel=per_channel, signed=signed, opset=opset)
    rewritten = quantised(per_channel=per_channel, signed=signed, opset=opset)
    assert rowwise.run(rewritten) == "rowwise: 1 quantised activations, each with a scale a token"
    hidden = numbers(1, 9, HIDDEN) * np.array([1, 10, 0.1, 0, 1, -3, 7, 1, 1], np.float32)[None, :, None]
    hidden[0, 4], hidden[0, 7] = np.abs(hidden[0, 4]), -np.abs(hidden[0, 7])  # rows without either sign
    together = run(rewritten, tmp_path / "rewritten.onnx", feeds() | {"hidden": hidden})
    for token in range(9):
        alone = run(original, tmp_path / "original.onnx", feeds() | {"hidden": hidden[:, token : token + 1]})
        for found, expected in zip(together, alone, strict=True):
            np.testing.assert_array_equal(found[:, token : token + 1], expected)


def test_codes_that_go_elsewhere_are_refused() -> None:
    """A quantised value that is not multiplied by a constant matrix keeps one scale for all: nothing to batch."""
    sketch = Sketch()
    codes, scale, zero = sketch.tape.op_multi_out("DynamicQuantizeLinear", [sketch.hidden], num_outputs=3)
    draft = sketch.draft(sketch.op("DequantizeLinear", codes, scale, zero))
    with pytest.raises(SourceError, match=r"has its codes used by .* \(DequantizeLinear\)"):
        rowwise.run(draft)


def test_products_that_onnxruntime_fused_are_refused() -> None:
    """DynamicQuantizeMatMul measures one scale inside; the message says which file to take instead."""
    sketch = Sketch()
    matrix, scale = sketch.constant(np.ones((HIDDEN, 8), np.int8)), sketch.constant(np.ones(8, np.float32))
    draft = sketch.draft(sketch.op("DynamicQuantizeMatMul", sketch.hidden, matrix, scale, domain="com.microsoft"))
    with pytest.raises(SourceError, match="measures one scale over all tokens") as caught:
        rowwise.run(draft)
    assert "variant" in caught.value.findings[0].remedy


# ---- operators -----------------------------------------------------------------------------------------------------

SKIP_NORMS: Mapping[str, tuple[str, int]] = {
    "root mean square": ("SkipSimplifiedLayerNormalization", 1),
    "root mean square, with a bias": ("SkipSimplifiedLayerNormalization", 2),
    "mean and deviation": ("SkipLayerNormalization", 1),
    "mean and deviation, with a shift": ("SkipLayerNormalization", 2),
    "mean and deviation, with a shift and a bias": ("SkipLayerNormalization", 3),
}


@pytest.mark.parametrize("name", SKIP_NORMS)
@pytest.mark.parametrize("outputs", [1, 4])
def test_a_norm_of_a_sum_is_a_sum_and_a_norm(name: str, outputs: int, tmp_path: Path) -> None:
    """The norm, and the sum where it is asked for, are the operator's own."""
    operator, vectors = SKIP_NORMS[name]

    def draft() -> Draft:
        sketch = Sketch()
        right = sketch.op("Mul", sketch.hidden, sketch.constant(np.array(0.5, np.float32)))
        extra = [sketch.constant(numbers(HIDDEN, seed=place)) for place in range(vectors)]
        given = [sketch.hidden, right, *extra]
        results = sketch.tape.op_multi_out(
            operator, given, {"epsilon": 1e-3}, domain="com.microsoft", num_outputs=outputs
        )
        return sketch.draft(*{results[0]: None, results[-1]: None})

    rewritten = draft()
    assert operators.run(rewritten) == f"operators: wrote out 1 {operator}"
    assert operator not in operators_of(rewritten)
    found, expected = (run(one, tmp_path / f"{place}.onnx", feeds()) for place, one in enumerate((rewritten, draft())))
    assert len(found) == (2 if outputs == 4 else 1)
    for left, right in zip(found, expected, strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("operator", ["SkipSimplifiedLayerNormalization", "SkipLayerNormalization"])
def test_a_rotation_behind_a_norm_of_a_sum_is_written_out_too(operator: str) -> None:
    """As onnxruntime-genai writes models of either norm: what the norm gives is known where the rotation is."""
    sketch = Sketch()
    places = _input("position_ids", ["batch", "tokens"], ir.DataType.INT64)
    sketch.inputs.append(places)
    normed = sketch.op(operator, sketch.hidden, sketch.hidden, sketch.constant(numbers(HIDDEN)), domain="com.microsoft")
    query = sketch.op("MatMul", normed, sketch.constant(numbers(HIDDEN, HIDDEN)))
    tables = [sketch.constant(numbers(CONTEXT, 8, seed=seed)) for seed in (2, 3)]
    turned = sketch.op("RotaryEmbedding", query, places, *tables, domain="com.microsoft", num_heads=2)
    assert operators.run(sketch.draft(turned)) == f"operators: wrote out 1 RotaryEmbedding, 1 {operator}"


FUSED_PRODUCTS: Mapping[str, dict[str, float]] = {
    "plain": {},
    "a factor": {"alpha": 0.25},
    "the left turned": {"transA": 1},
    "the right turned": {"transB": 1},
    "both turned, and a factor": {"transA": 1, "transB": 1, "alpha": -3.0},
}


@pytest.mark.parametrize("name", FUSED_PRODUCTS)
@pytest.mark.parametrize("heads", [0, 4])
def test_a_fused_product_is_a_product(name: str, heads: int, tmp_path: Path) -> None:
    """ONNX Runtime fuses a Transpose and a factor into a product; written out, the numbers are the same."""
    attributes = FUSED_PRODUCTS[name]

    def draft() -> Draft:
        sketch = Sketch()
        left = sketch.hidden
        if heads:
            left = sketch.op("Reshape", left, sketch.integers([1, heads, -1, HIDDEN]))
        inner, width = (TOKENS if attributes.get("transA") else HIDDEN), 5
        if heads and attributes.get("transA"):
            inner = 2 * TOKENS // heads
        shape = (width, inner) if attributes.get("transB") else (inner, width)
        right = sketch.constant(numbers(*([heads] if heads else []), *shape))
        return sketch.draft(sketch.op("FusedMatMul", left, right, domain="com.microsoft", **attributes))

    rewritten = draft()
    assert operators.run(rewritten) == "operators: wrote out 1 FusedMatMul"
    assert operators_of(rewritten) <= {"Reshape", "Transpose", "MatMul", "Mul"}
    given = feeds(TOKENS if not heads else 2 * TOKENS)
    found, expected = (run(one, tmp_path / f"{place}.onnx", given) for place, one in enumerate((rewritten, draft())))
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-5, atol=1e-5)


def test_a_rotation_of_a_fused_product_is_written_out_too() -> None:
    """What a rewrite puts in the place of a value is known where the next rewrite asks about it."""
    sketch = Sketch()
    places = _input("position_ids", ["batch", "tokens"], ir.DataType.INT64)
    sketch.inputs.append(places)
    weight = sketch.constant(numbers(HIDDEN, HIDDEN))
    query = sketch.op("FusedMatMul", sketch.hidden, weight, domain="com.microsoft", transB=1)
    tables = [sketch.constant(numbers(CONTEXT, 8, seed=seed)) for seed in (2, 3)]
    turned = sketch.op("RotaryEmbedding", query, places, *tables, domain="com.microsoft", num_heads=2)
    assert operators.run(sketch.draft(turned)) == "operators: wrote out 1 FusedMatMul, 1 RotaryEmbedding"


def test_a_product_over_turned_batch_axes_is_refused() -> None:
    """Which no exporter writes, and ONNX Runtime only for layouts of its own."""
    sketch = Sketch()
    product = sketch.op("FusedMatMul", sketch.hidden, sketch.hidden, domain="com.microsoft", transBatchA=1)
    with pytest.raises(SourceError, match="turns batch axes"):
        operators.run(sketch.draft(product))


def test_a_deviation_that_is_used_is_refused() -> None:
    """Nothing else gives a norm's mean and deviation to other nodes."""
    sketch = Sketch()
    results = sketch.tape.op_multi_out(
        "SkipLayerNormalization",
        [sketch.hidden, sketch.hidden, sketch.constant(numbers(HIDDEN))],
        domain="com.microsoft",
        num_outputs=4,
    )
    with pytest.raises(SourceError, match="gives its mean or deviation to other nodes"):
        operators.run(sketch.draft(results[0], results[1]))


@pytest.mark.parametrize("target", [[0, -1, 8], [1, -1, 8]])
def test_a_norm_of_each_head_keeps_heads_and_tokens_apart(target: list[int], tmp_path: Path) -> None:
    """[1, tokens · heads, dim], as onnxruntime-genai writes it, becomes [1, tokens, heads, dim]."""

    def draft() -> Draft:
        sketch = Sketch()
        heads = sketch.op("Reshape", sketch.hidden, sketch.integers(target))
        weight = sketch.constant(numbers(8))
        normed = sketch.op("SimplifiedLayerNormalization", heads, weight, axis=-1, epsilon=1e-5, stash_type=1)
        return sketch.draft(sketch.op("Reshape", normed, sketch.integers([0, -1, HIDDEN])))

    rewritten = draft()
    assert operators.run(rewritten) == "operators: wrote out 1 norm of heads"
    found, expected = (run(one, tmp_path / f"{place}.onnx", feeds()) for place, one in enumerate((rewritten, draft())))
    np.testing.assert_array_equal(found, expected)
