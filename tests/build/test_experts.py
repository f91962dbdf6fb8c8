"""Mixtures of experts in the ways exporters write them: found by their numbers, equal on ONNX Runtime, or refused."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
from lowering import EXPORTS, draft_of, quiet
from onnx_ir.tape import Tape

from residentd.errors import SourceError
from residentd_build.draft import Draft
from residentd_build.lower import onnxruntime as lower
from residentd_build.passes import experts, independence
from residentd_build.pipeline import rewrite, write_engine

VOCAB, HIDDEN, INNER, EXPERTS, CHOSEN = 23, 16, 12, 5, 2
TOLERANCE_RELATIVE = 2e-5
"""Of the largest result: some hundred roundings of 2^-24. A wrong expert, weight or half is above 1e-1."""


@dataclass(frozen=True, slots=True)
class Style:
    """`weights`: apart (three matrices an expert), stacked (one product for all) or looked up (those of each token)."""

    weights: str = "stacked"
    layout: str = "halves"  # or neighbours, halves up first, neighbours up first
    is_turned: bool = False  # [experts, out, in] with a Transpose
    is_softmax_first: bool = True
    is_normalised: bool = True  # the weights of the chosen; with the softmax after the choice they always are
    activation: str = "silu"  # or gpt-oss, gelu, which no kernel takes
    has_biases: bool = False
    mixes: str = "nothing"  # or capacity: an expert takes its first tokens only; or order: two experts change places


class Block:
    """Embedding, experts, head: `logits` of `input_ids` [1, tokens]."""

    def __init__(self, style: Style) -> None:
        self.style = style
        self._rng = np.random.default_rng(5)
        self._tape = Tape()
        self._count = 0

    def model(self) -> ir.Model:
        ids = ir.Value(name="input_ids", type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape(["batch", "sequence"]))
        hidden = self.op("Gather", self.weight(VOCAB, HIDDEN), ids)
        rows = self.op("Reshape", hidden, self.integers([-1, HIDDEN]))
        mixed = self._experts(rows)
        logits = self.op(
            "MatMul", self.op("Reshape", mixed, self.integers([1, -1, HIDDEN])), self.weight(HIDDEN, VOCAB)
        )
        logits.name, logits.type = "logits", ir.TensorType(ir.DataType.FLOAT)
        logits.shape = ir.Shape(["batch", "sequence", VOCAB])
        graph = ir.Graph(
            [ids],
            [logits],
            nodes=self._tape.nodes,
            initializers=self._tape.initializers,
            opset_imports={"": 18},
            name="block",
        )
        return ir.Model(graph, ir_version=10)

    def op(self, name: str, *inputs: ir.Value | None, **attributes: object) -> ir.Value:
        return self._tape.op(name, inputs, attributes)

    def integers(self, value: object) -> ir.Value:
        return self._constant(np.array(value, np.int64))

    def number(self, value: object) -> ir.Value:
        return self._constant(np.array(value, np.float32))

    def weight(self, *shape: int) -> ir.Value:
        return self._constant(self._random(*shape))

    def _random(self, *shape: int) -> np.ndarray:
        numbers: np.ndarray = (self._rng.standard_normal(shape) / np.sqrt(shape[-2]) * 2).astype(np.float32)
        return numbers

    def _constant(self, array: np.ndarray) -> ir.Value:
        self._count += 1
        return self._tape.initializer(ir.tensor(array, name=f"constant_{self._count}"))

    def _experts(self, rows: ir.Value) -> ir.Value:
        weights, chosen = self._routed(rows)
        if self.style.weights == "looked up":
            return self._looked_up(rows, weights, chosen)
        shares = self._shares(weights, chosen)
        return self._apart(rows, shares) if self.style.weights == "apart" else self._stacked(rows, shares)

    def _routed(self, rows: ir.Value) -> tuple[ir.Value, ir.Value]:
        """The chosen experts of each token and their weights, [tokens, CHOSEN] both."""
        style = self.style
        scores = self.op("MatMul", rows, self.weight(HIDDEN, EXPERTS))
        if style.is_softmax_first:
            scores = self.op("Softmax", scores, axis=-1)
        weights, chosen = self._tape.op_multi_out(
            "TopK", [scores, self.integers([CHOSEN])], {"axis": -1}, num_outputs=2
        )
        if not style.is_softmax_first:
            weights = self.op("Softmax", weights, axis=-1)
        elif style.is_normalised:
            weights = self.op("Div", weights, self.op("ReduceSum", weights, self.integers([-1])))
        return weights, chosen

    def _shares(self, weights: ir.Value, chosen: ir.Value) -> ir.Value:
        """What each expert contributes to each token, [tokens, EXPERTS]."""
        last = self.integers([-1])
        is_chosen = self.op("Equal", self.op("Unsqueeze", chosen, last), self.integers(np.arange(EXPERTS)[None, None]))
        spread = self.op("Where", is_chosen, self.op("Unsqueeze", weights, last), self.number(0))
        shares = self.op("ReduceSum", spread, self.integers([1]), keepdims=0)
        if self.style.mixes == "capacity":
            taken = self.op(
                "CumSum", self.op("Cast", self.op("Greater", shares, self.number(0)), to=1), self.integers(0)
            )
            shares = self.op("Where", self.op("LessOrEqual", taken, self.number(3)), shares, self.number(0))
        return shares

    def _apart(self, rows: ir.Value, shares: ir.Value) -> ir.Value:
        total: ir.Value | None = None
        order = [1, 0, *range(2, EXPERTS)] if self.style.mixes == "order" else range(EXPERTS)
        for index in order:
            gate = self.op("MatMul", rows, self.weight(HIDDEN, INNER))
            up = self.op("MatMul", rows, self.weight(HIDDEN, INNER))
            result = self.op("MatMul", self._activated(gate, up), self.weight(INNER, HIDDEN))
            share = self.op("Gather", shares, self.integers([index]), axis=1)
            part = self.op("Mul", result, share)
            total = part if total is None else self.op("Add", total, part)
        assert total is not None
        return total

    def _stacked(self, rows: ir.Value, shares: ir.Value) -> ir.Value:
        both = self.op("MatMul", self.op("Unsqueeze", rows, self.integers([0])), self._matrix(HIDDEN, 2 * INNER))
        result = self.op("MatMul", self._inner(self._biased(both, 2 * INNER)), self._matrix(INNER, HIDDEN))
        share = self.op("Unsqueeze", self.op("Transpose", shares, perm=(1, 0)), self.integers([2]))
        weighted = self.op("Mul", self._biased(result, HIDDEN), share)
        return self.op("ReduceSum", weighted, self.integers([0]), keepdims=0)

    def _looked_up(self, rows: ir.Value, weights: ir.Value, chosen: ir.Value) -> ir.Value:
        """As transformers 5 does for few tokens: the matrices of the chosen experts, [tokens, CHOSEN, in, out]."""
        wide = self.op("Unsqueeze", rows, self.integers([1, 2]))
        both = self.op("MatMul", wide, self.op("Gather", self._matrix(HIDDEN, 2 * INNER), chosen))
        result = self.op("MatMul", self._inner(both), self.op("Gather", self._matrix(INNER, HIDDEN), chosen))
        weighted = self.op(
            "Mul", self.op("Squeeze", result, self.integers([2])), self.op("Unsqueeze", weights, self.integers([2]))
        )
        return self.op("ReduceSum", weighted, self.integers([1]), keepdims=0)

    def _matrix(self, rows: int, columns: int) -> ir.Value:
        """[EXPERTS, rows, columns]."""
        array = self._random(EXPERTS, rows, columns)
        if not self.style.is_turned:
            return self._constant(array)
        return self.op("Transpose", self._constant(np.ascontiguousarray(array.swapaxes(1, 2))), perm=(0, 2, 1))

    def _biased(self, value: ir.Value, width: int) -> ir.Value:
        return self.op("Add", value, self.weight(EXPERTS, 1, width)) if self.style.has_biases else value

    def _inner(self, both: ir.Value) -> ir.Value:
        """Gate and up out of one product."""
        big, last, style = self.integers([1 << 40]), self.integers([-1]), self.style
        if style.layout.startswith("halves"):
            half = self.integers([INNER])
            parts = [self.op("Slice", both, self.integers([0]), half, last), self.op("Slice", both, half, big, last)]
        else:
            step = self.integers([2])
            parts = [self.op("Slice", both, self.integers([start]), big, last, step) for start in (0, 1)]
        gate, up = reversed(parts) if style.layout.endswith("up first") else parts
        return self._activated(gate, up)

    def _activated(self, gate: ir.Value, up: ir.Value) -> ir.Value:
        if self.style.activation == "gelu":
            return self.op("Mul", self.op("Mul", gate, self.op("Erf", gate)), up)
        if self.style.activation == "silu":
            return self.op("Mul", self.op("Mul", gate, self.op("Sigmoid", gate)), up)
        gate = self.op("Clip", gate, None, self.number(7))
        up = self.op("Clip", up, self.number(-7), self.number(7))
        swish = self.op("Mul", gate, self.op("Sigmoid", self.op("Mul", gate, self.number(1.702))))
        return self.op("Mul", self.op("Add", up, self.number(1)), swish)


def results(path: Path, ids: np.ndarray) -> np.ndarray:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    result: np.ndarray = session.run(["logits"], {"input_ids": ids})[0]
    return result.reshape(-1, VOCAB)


def rewritten(style: Style) -> tuple[Draft, str]:
    draft = draft_of(Block(style).model(), 64)
    return draft, experts.run(draft)


FORMS = {
    "one product, halves": Style(),
    "one product, neighbours": Style(layout="neighbours"),
    "one product, halves, up first": Style(layout="halves up first"),
    "one product, neighbours, up first": Style(layout="neighbours up first"),
    "one product, turned": Style(is_turned=True),
    "gpt-oss": Style(activation="gpt-oss", layout="neighbours", has_biases=True, is_softmax_first=False),
    "biases": Style(has_biases=True),
    "matrices apart": Style(weights="apart"),
    "matrices apart, softmax of the chosen": Style(weights="apart", is_softmax_first=False),
    "matrices apart, weights of all": Style(weights="apart", is_normalised=False),
    "looked up": Style(weights="looked up"),
    "looked up, turned": Style(weights="looked up", is_turned=True, layout="neighbours"),
}


@pytest.mark.parametrize("name", FORMS)
def test_every_form_becomes_one_node_with_the_same_results(name: str, tmp_path: Path) -> None:
    """Experts written in each way are found, are one MoE kernel on ONNX Runtime, and give the export's numbers."""
    style = FORMS[name]
    ir.save(Block(style).model(), tmp_path / "export.onnx")
    draft, line = rewritten(style)
    weights = "their softmax" if style.is_normalised else "the softmax of all"
    assert line == f"experts: 1 layers of {CHOSEN} of {EXPERTS} experts by {weights}"
    assert independence.run(draft).startswith("independence: proven for all")
    lower.run(draft)
    write_engine(draft, tmp_path, quiet)
    assert [node.op_type for node in draft.graph].count("MoE") == 1
    ids = np.random.default_rng(1).integers(0, VOCAB, (1, 40))
    expected = results(tmp_path / "export.onnx", ids)
    found = results(tmp_path / "engine" / "model.onnx", ids)
    assert np.abs(found - expected).max() < TOLERANCE_RELATIVE * np.abs(expected).max()


@pytest.mark.parametrize("first", [1, 8, 9, 97, 98, 99, 100])
def test_the_numbers_in_names_do_not_matter(first: int) -> None:
    """Gate, up and down are told apart by their order in the graph, also where names go from 9 to 10 and from 99."""
    model = Block(Style(weights="apart")).model()
    products = [node for node in model.graph if node.op_type == "MatMul"]
    for number, node in enumerate(products, start=first):
        node.name = f"node_linear_{number}"
    assert experts.run(draft_of(model, 64)).startswith(f"experts: 1 layers of {CHOSEN} of {EXPERTS} experts")


def test_an_activation_that_no_kernel_has_stays_as_exported_and_is_named() -> None:
    """All experts on all tokens need no kernel: tokens stay apart, and the line for the manifest says what was left."""
    draft, line = rewritten(Style(activation="gelu"))
    assert "is not a sum of experts that is known" in line
    assert independence.run(draft).startswith("independence: proven for all")


def test_experts_in_another_order_are_not_taken_for_these() -> None:
    """The matrices must be those of the experts that the scores name, in their order."""
    _, line = rewritten(Style(weights="apart", mixes="order"))
    assert "is not a sum of experts that is known" in line


def test_a_softmax_over_tokens_is_not_taken_for_one_over_experts() -> None:
    """What the kernel would do otherwise than the export is refused by name, not replaced."""
    model = Block(Style()).model()
    softmax = next(node for node in model.graph if node.op_type == "Softmax")
    softmax.attributes["axis"] = ir.AttrInt64("axis", 0)
    draft = draft_of(model, 64)
    assert "does not choose from a linear function of the tokens" in experts.run(draft)
    with pytest.raises(SourceError, match="normalises over the token axis"):
        independence.run(draft)


def test_experts_with_a_capacity_are_refused() -> None:
    """Where an expert takes so many tokens and no more, a token's answer depends on who came before: no batch."""
    draft, line = rewritten(Style(mixes="capacity"))
    assert "is not a sum of experts that is known" in line
    with pytest.raises(SourceError, match="sums along the token axis"):
        independence.run(draft)


def test_experts_that_share_a_mask_by_mistake_are_refused() -> None:
    """A loop that gathers and scatters tokens is believed only when all of it computes what it should."""
    model = ir.load(EXPORTS / "qwen3-moe" / "model.onnx")
    scatters = [node for node in model.graph if node.op_type == "ScatterElements"]
    scatters[1].replace_input_with(1, scatters[0].inputs[1])
    draft = draft_of(model, 64)
    with pytest.raises(SourceError, match=r"layers\.0.* cuts the token axis"):
        rewrite(draft, quiet)
