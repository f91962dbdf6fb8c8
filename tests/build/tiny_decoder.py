"""A one-layer decoder written in whatever way a test asks for: the forms that the committed exports do not have."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx_ir as ir
from onnx_ir.tape import Tape

VOCAB, HIDDEN, HEADS, KV_HEADS, DIM = 61, 48, 4, 2, 16
CONTEXT_MAX = 128


@dataclass(frozen=True, slots=True)
class Style:
    """`mask`: causal, window, alibi (a bias), future (not causal). `positions`: input, range, cumsum."""

    attention: str = "decomposed"  # or standard3, standard4, joined, grouped, "grouped, side by side", multi-head
    mask: str = "causal"
    window: int = 0
    is_causal: bool = False  # the attribute, for the standard forms; then no mask input
    softcap: float = 0.0
    scale: float = DIM**-0.5
    scale_form: str = "after"  # or split: its root on q and on k, or divide
    repeat: str = "interleave"  # or tile: the other, wrong, order of repeated heads
    rotary: str = "half"  # or interleaved, scaled, dynamic, none, operator3, operator4, "…, interleaved"
    table_rows: int = CONTEXT_MAX  # of the tables that operators rotate by
    rotates_within: str = ""  # half or interleaved: by GroupQueryAttention itself, beside `rotary`
    rotary_dim: int = DIM  # the first places of a head, which are rotated
    products: str = "three"  # or side by side, turns (each head's query, key and value together; needs KV_HEADS heads)
    lengths: str = "mask"  # of grouped attention; or cut: one key less than there are
    grouped_extra: str = ""  # an input or attribute of grouped attention that is not supported
    sinks: str = "none"  # or heads (one score each), tokens (which no kernel takes)
    positions: str = "input"
    mask_form: str = "added"  # or where: Where(visible, scores, a low number)
    norm: str = "rsqrt"
    epsilon: float = 1e-6
    head_mixes: bool = False  # subtract the mean over tokens before the head
    layers: int = 1


class Decoder:
    """Puts the graph together; `save` writes it where a test wants it."""

    def __init__(self, style: Style, seed: int = 0) -> None:
        self.style = style
        self._rng = np.random.default_rng(seed)
        self._tape = Tape()
        self._count = 0
        self._is_query = True  # queries and keys are rotated by turns

    def model(self) -> ir.Model:
        style = self.style
        ids = self._input("input_ids", ["batch", "sequence"])
        mask = self._input("attention_mask", ["batch", "total"])
        inputs = [ids, mask]
        caches = [
            self._input(f"past_key_values.{layer}.{part}", ["batch", KV_HEADS, "past", DIM], ir.DataType.FLOAT)
            for layer in range(style.layers)
            for part in ("key", "value")
        ]
        self._attention_mask = mask
        lengths = self._lengths(ids, caches[0])
        positions = self._input("position_ids", ["batch", "sequence"])
        if style.positions == "input":
            inputs.append(positions)
        else:
            positions = self._counted(mask, lengths)
        hidden = self.op("Gather", self.weight(VOCAB, HIDDEN), ids)
        outputs = []
        for layer in range(style.layers):
            hidden, present = self._layer(hidden, positions, lengths, caches[2 * layer : 2 * layer + 2], layer)
            outputs += present
        logits = self._head(hidden)
        graph = ir.Graph(
            [*inputs, *caches],
            [logits, *outputs],
            nodes=self._tape.nodes,
            initializers=self._tape.initializers,
            opset_imports={"": 23, "com.microsoft": 1},
            name="decoder",
        )
        return ir.Model(graph, ir_version=11)

    def save(self, directory: Path) -> Path:
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / "model.onnx"
        ir.save(self.model(), path)
        return path

    def op(self, name: str, *inputs: ir.Value | None, **attributes: object) -> ir.Value:
        return self._tape.op(name, inputs, attributes)

    def integers(self, value: object) -> ir.Value:
        return self._constant(np.array(value, np.int64))

    def number(self, value: object) -> ir.Value:
        return self._constant(np.array(value, np.float32))

    def weight(self, *shape: int) -> ir.Value:
        return self._constant((self._rng.standard_normal(shape) / np.sqrt(shape[0]) * 2).astype(np.float32))

    def _constant(self, array: np.ndarray) -> ir.Value:
        self._count += 1
        return self._tape.initializer(ir.tensor(array, name=f"constant_{self._count}"))

    def _input(self, name: str, dims: list, dtype: ir.DataType = ir.DataType.INT64) -> ir.Value:
        return ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(dims))

    def _lengths(self, ids: ir.Value, past: ir.Value) -> tuple[ir.Value, ir.Value, ir.Value]:
        """Scalars: new tokens, cached tokens, both."""
        new = self.op("Gather", self.op("Shape", ids), self.integers(1))
        cached = self.op("Gather", self.op("Shape", past), self.integers(2))
        return new, cached, self.op("Add", cached, new)

    def _counted(self, mask: ir.Value, lengths: tuple[ir.Value, ...]) -> ir.Value:
        new, cached, total = lengths
        if self.style.positions == "range":
            return self.op("Unsqueeze", self.op("Range", cached, total, self.integers(1)), self.integers([0]))
        summed = self.op("Sub", self.op("CumSum", mask, self.integers(1)), self.integers(1))
        start = self.op("Unsqueeze", self.op("Neg", new), self.integers([0]))
        return self.op("Slice", summed, start, self.integers([1 << 40]), self.integers([1]))

    def _layer(
        self,
        hidden: ir.Value,
        positions: ir.Value,
        lengths: tuple[ir.Value, ...],
        caches: list[ir.Value],
        layer: int,
    ) -> tuple[ir.Value, list[ir.Value]]:
        normed = self._norm(hidden)
        query, key, value = self._projected(normed)
        angles = self._angles(positions)
        if self.style.rotary.startswith("operator"):
            query, key = (self._rotate_by_operator(heads, positions) for heads in (query, key))
        else:
            query, key = self._rotate(query, angles), self._rotate(key, angles)
        forms = {"decomposed": self._decomposed, "joined": self._joined, "multi-head": self._multi_head}
        attend = forms.get(self.style.attention, self._standard)
        attend = self._grouped if self.style.attention.startswith("grouped") else attend
        attended, *present = attend(query, key, value, caches, None if self.style.is_causal else self._mask(lengths))
        for output, part in zip(present, ("key", "value"), strict=True):
            output.name = f"present.{layer}.{part}"
            output.type, output.shape = ir.TensorType(ir.DataType.FLOAT), ir.Shape(["batch", KV_HEADS, "total", DIM])
        return self.op("Add", hidden, self.op("MatMul", attended, self.weight(HEADS * DIM, HIDDEN))), present

    def _projected(self, normed: ir.Value) -> tuple[ir.Value, ir.Value, ir.Value]:
        widths = (HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM)
        if self.style.products == "three":
            query, key, value = (self.op("MatMul", normed, self.weight(HIDDEN, width)) for width in widths)
            return self._heads(query, HEADS), self._heads(key, KV_HEADS), self._heads(value, KV_HEADS)
        joined = self.op("MatMul", normed, self.weight(HIDDEN, sum(widths)))
        joined = self.op("Add", self.number(self._rng.standard_normal(sum(widths))), joined)
        if self.style.products == "side by side":
            sizes = self.integers(list(widths))
            query, key, value = self._tape.op_multi_out("Split", [joined, sizes], {"axis": -1}, num_outputs=3)
            return self._heads(query, HEADS), self._heads(key, KV_HEADS), self._heads(value, KV_HEADS)
        group = HEADS // KV_HEADS
        turns = self.op("Reshape", joined, self.integers([0, 0, KV_HEADS, group + 2, DIM]))
        parts = self.integers([group, 1, 1])
        query, key, value = self._tape.op_multi_out("Split", [turns, parts], {"axis": 3}, num_outputs=3)
        return self._heads(query, HEADS), self._heads(key, KV_HEADS), self._heads(value, KV_HEADS)

    def _heads(self, rows: ir.Value, heads: int) -> ir.Value:
        return self.op("Transpose", self.op("Reshape", rows, self.integers([0, 0, heads, DIM])), perm=(0, 2, 1, 3))

    def _rows(self, heads: ir.Value) -> ir.Value:
        return self.op("Reshape", self.op("Transpose", heads, perm=(0, 2, 1, 3)), self.integers([0, 0, -1]))

    def _angles(self, positions: ir.Value) -> ir.Value:
        """[batch, 1, sequence, dim / 2]."""
        half = self.style.rotary_dim // 2
        frequencies = 100.0 ** (-np.arange(half) / half)
        places = self.op("Cast", self.op("Unsqueeze", positions, self.integers([1, 3])), to=1)
        if self.style.rotary == "dynamic":  # every angle depends on the longest position of the step
            longest = self.op("Cast", self.op("ReduceMax", positions, keepdims=0), to=1)
            places = self.op("Div", places, self.op("Max", self.op("Div", longest, self.number(32)), self.number(1)))
        return self.op("Mul", places, self.number(frequencies))

    def _rotate(self, heads: ir.Value, angles: ir.Value) -> ir.Value:
        style = self.style.rotary
        if style == "none":
            return heads
        cos, sin = self.op("Cos", angles), self.op("Sin", angles)
        if self.style.rotary_dim < DIM:
            cut, last = self.integers([self.style.rotary_dim]), self.integers([-1])
            rest = self.op("Slice", heads, cut, self.integers([1 << 40]), last)
            turned = self._turn(self.op("Slice", heads, self.integers([0]), cut, last), cos, sin)
            return self.op("Concat", turned, rest, axis=-1)
        return self._turn(heads, cos, sin)

    def _turn(self, heads: ir.Value, cos: ir.Value, sin: ir.Value) -> ir.Value:
        style = self.style.rotary
        if style == "scaled":  # as YaRN does: the attention factor is in the tables
            cos, sin = self.op("Mul", cos, self.number(1.2)), self.op("Mul", sin, self.number(1.2))
        first, second = self._pairs(heads, is_interleaved=style == "interleaved")
        left = self.op("Sub", self.op("Mul", first, cos), self.op("Mul", second, sin))
        right = self.op("Add", self.op("Mul", second, cos), self.op("Mul", first, sin))
        if style != "interleaved":
            return self.op("Concat", left, right, axis=-1)
        last = self.integers([-1])
        pairs = self.op("Concat", self.op("Unsqueeze", left, last), self.op("Unsqueeze", right, last), axis=-1)
        return self.op("Reshape", pairs, self.integers([0, 0, 0, -1]))

    def _pairs(self, heads: ir.Value, *, is_interleaved: bool) -> tuple[ir.Value, ir.Value]:
        last, big = self.integers([-1]), self.integers([1 << 40])
        if is_interleaved:
            step = self.integers([2])
            first = self.op("Slice", heads, self.integers([0]), big, last, step)
            return first, self.op("Slice", heads, self.integers([1]), big, last, step)
        half = self.integers([self.style.rotary_dim // 2])
        return self.op("Slice", heads, self.integers([0]), half, last), self.op("Slice", heads, half, big, last)

    def _mask(self, lengths: tuple[ir.Value, ...]) -> ir.Value:
        """Additive, [1, 1, new, total] (alibi: a row per head)."""
        _, cached, total = lengths
        one = self.integers(1)
        key = self.op("Range", self.integers(0), total, one)
        query = self.op("Unsqueeze", self.op("Range", cached, total, one), self.integers([1]))
        limit = self.op("Add", query, one) if self.style.mask == "future" else query
        visible = self.op("LessOrEqual", key, limit)
        if self.style.mask == "window":
            near = self.op("Greater", key, self.op("Sub", query, self.integers(self.style.window)))
            visible = self.op("And", visible, near)
        if self.style.mask_form == "where":
            return self.op("Unsqueeze", visible, self.integers([0, 1]))
        added = self.op("Where", visible, self.number(0), self.number(np.finfo(np.float32).min))
        if self.style.mask == "alibi":
            distance = self.op("Cast", self.op("Sub", key, query), to=1)
            slopes = self.number(np.array([[[0.5]], [[0.25]], [[0.125]], [[0.0625]]]))
            added = self.op("Add", added, self.op("Mul", distance, slopes))
        axes = [0] if self.style.mask == "alibi" else [0, 1]
        return self.op("Unsqueeze", added, self.integers(axes))

    def _standard(
        self, query: ir.Value, key: ir.Value, value: ir.Value, caches: list[ir.Value], mask: ir.Value | None
    ) -> list[ir.Value]:
        style = self.style
        attributes = {"scale": style.scale, "softcap": style.softcap, "is_causal": int(style.is_causal)}
        operands = [query, key, value]
        if style.attention == "standard3":
            operands = [self._rows(item) for item in operands]
            attributes |= {"q_num_heads": HEADS, "kv_num_heads": KV_HEADS}
        outputs = self._tape.op_multi_out("Attention", [*operands, mask, *caches], attributes, num_outputs=3)
        attended = outputs[0] if style.attention == "standard3" else self._rows(outputs[0])
        return [attended, *outputs[1:]]

    def _joined(
        self, query: ir.Value, key: ir.Value, value: ir.Value, caches: list[ir.Value], mask: ir.Value | None
    ) -> list[ir.Value]:
        """As torch's dynamo exporter: the operator knows no cache and no groups of heads."""
        style = self.style
        keys = self.op("Concat", caches[0], key, axis=2)
        values = self.op("Concat", caches[1], value, axis=2)
        operands = [query, self._repeat(keys), self._repeat(values), mask]
        attended = self._tape.op("Attention", operands, {"scale": style.scale, "softcap": style.softcap})
        return [self._rows(attended), keys, values]

    def _multi_head(
        self, query: ir.Value, key: ir.Value, value: ir.Value, caches: list[ir.Value], mask: ir.Value | None
    ) -> list[ir.Value]:
        """com.microsoft::MultiHeadAttention, which has no groups of heads: the keys' heads are the queries'."""
        assert HEADS == KV_HEADS, "set KV_HEADS to HEADS"
        operands = [*(self._rows(item) for item in (query, key, value)), None, None, mask, *caches]
        attributes = {"num_heads": HEADS, "scale": self.style.scale}
        return list(
            self._tape.op_multi_out("MultiHeadAttention", operands, attributes, domain="com.microsoft", num_outputs=3)
        )

    def _grouped(
        self, query: ir.Value, key: ir.Value, value: ir.Value, caches: list[ir.Value], _mask: ir.Value | None
    ) -> list[ir.Value]:
        """As onnxruntime-genai's builder: lengths by the mask, and everything else inside."""
        style, mask = self.style, self._attention_mask
        last = self.op("Sub", self.op("ReduceSum", mask, self.integers([1]), keepdims=0), self.integers([1]))
        total = self.op("Gather", self.op("Shape", mask), self.integers(1))
        operands: list[ir.Value | None] = [self._rows(item) for item in (query, key, value)]
        if style.attention.endswith("side by side"):
            operands = [self.op("Concat", *operands, axis=-1), None, None]
        operands += [*caches, self.op("Cast", last, to=6), self.op("Cast", total, to=6)]
        operands += self._tables() if style.rotates_within else [None, None]
        if style.sinks == "heads":
            operands += [None, None, self.number(self._rng.standard_normal(HEADS) + 1)]
        if style.lengths == "cut":
            operands[5] = self.op("Sub", operands[5], self._constant(np.array([1], np.int32)))
        attributes = {"num_heads": HEADS, "kv_num_heads": KV_HEADS, "scale": style.scale, "softcap": style.softcap}
        if style.grouped_extra == "attention_bias":
            operands += [None] * (10 - len(operands)) + [self.number(np.zeros((1, 1, 1, 1)))]
        elif style.grouped_extra:
            attributes[style.grouped_extra] = 1
        attributes |= {"local_window_size": style.window or -1, "do_rotary": int(bool(style.rotates_within))}
        attributes |= {"rotary_interleaved": int(style.rotates_within == "interleaved")}
        return list(
            self._tape.op_multi_out("GroupQueryAttention", operands, attributes, domain="com.microsoft", num_outputs=3)
        )

    def _tables(self) -> list[ir.Value]:
        half = self.style.rotary_dim // 2
        angles = np.arange(self.style.table_rows)[:, None] * 100.0 ** (-np.arange(half) / half)
        return [self.number(np.cos(angles)), self.number(np.sin(angles))]

    def _rotate_by_operator(self, heads: ir.Value, positions: ir.Value) -> ir.Value:
        """com.microsoft::RotaryEmbedding of [batch, heads, sequence, dim], or of rows."""
        style = self.style
        attributes = {"interleaved": int(style.rotary.endswith("interleaved"))}
        count = HEADS if self._is_query else KV_HEADS
        self._is_query = not self._is_query
        if style.rotary_dim < DIM or "3" in style.rotary:
            attributes |= {"num_heads": count, "rotary_embedding_dim": style.rotary_dim % DIM}
        operand = self._rows(heads) if "3" in style.rotary else heads
        inputs = [operand, positions, *self._tables()]
        turned = self._tape.op("RotaryEmbedding", inputs, attributes, domain="com.microsoft")
        return self._heads(turned, count) if "3" in style.rotary else turned

    def _decomposed(
        self, query: ir.Value, key: ir.Value, value: ir.Value, caches: list[ir.Value], mask: ir.Value | None
    ) -> list[ir.Value]:
        style = self.style
        assert mask is not None
        keys = self.op("Concat", caches[0], key, axis=2)
        values = self.op("Concat", caches[1], value, axis=2)
        turned = self.op("Transpose", self._repeat(keys), perm=(0, 1, 3, 2))
        if style.scale_form == "split":
            root = self.number(style.scale**0.5)
            query, turned = self.op("Mul", query, root), self.op("Mul", root, turned)
        scores = self.op("MatMul", query, turned)
        if style.scale_form == "after":
            scores = self.op("Mul", scores, self.number(style.scale))
        elif style.scale_form == "divide":
            scores = self.op("Div", scores, self.number(1 / style.scale))
        if style.softcap:
            cap = self.number(style.softcap)
            scores = self.op("Mul", self.op("Tanh", self.op("Div", scores, cap)), cap)
        if style.mask_form == "where":
            scores = self.op("Where", mask, scores, self.number(np.finfo(np.float32).min))
        else:
            scores = self.op("Add", scores, mask)
        if style.sinks == "none":
            weights = self.op("Softmax", scores, axis=-1)
        else:
            joined = self.op("Concat", scores, self._sinks(scores), axis=-1)
            shifted = self.op("Sub", joined, self.op("ReduceMax", joined, self.integers([-1])))
            whole = self.op("Softmax", shifted, axis=-1)
            last = self.integers([-1])
            weights = self.op("Slice", whole, self.integers([0]), last, last)
        return [self._rows(self.op("MatMul", weights, self._repeat(values))), keys, values]

    def _sinks(self, scores: ir.Value) -> ir.Value:
        """[1, heads, new, 1]."""
        sinks = self.number(self._rng.standard_normal((1, HEADS, 1, 1)) + 1)
        dims = self.op("Concat", self.op("Shape", scores, end=3), self.integers([1]), axis=0)
        wide = self.op("Expand", sinks, dims)
        if self.style.sinks == "heads":
            return wide
        new = self.op("Gather", dims, self.integers(2))
        places = self.op("Cast", self.op("Range", self.integers(0), new, self.integers(1)), to=1)
        return self.op("Add", wide, self.op("Unsqueeze", places, self.integers([0, 1, 3])))

    def _repeat(self, heads: ir.Value) -> ir.Value:
        if self.style.repeat == "tile":
            return self.op("Tile", heads, self.integers([1, HEADS // KV_HEADS, 1, 1]))
        wide = self.op("Unsqueeze", heads, self.integers([2]))
        dims = self.op(
            "Concat",
            self.op("Shape", heads, end=2),
            self.integers([HEADS // KV_HEADS]),
            self.op("Shape", heads, start=2),
            axis=0,
        )
        wide = self.op("Expand", wide, dims)
        merged = self.op("Concat", self.integers([0, HEADS]), self.op("Shape", heads, start=2), axis=0)
        return self.op("Reshape", wide, merged)

    def _norm(self, hidden: ir.Value) -> ir.Value:
        """Root-mean-square norms as exporters spell them."""
        weight, epsilon = self.number(self._rng.uniform(0.5, 1.5, HIDDEN)), self.number(self.style.epsilon)
        if self.style.norm == "standard":
            return self.op("RMSNormalization", hidden, weight, axis=-1, epsilon=1e-6)
        if self.style.norm == "layer":
            return self.op("LayerNormalization", hidden, weight, axis=-1)
        if self.style.norm.startswith("layer, written out"):
            centred = self.op("Sub", hidden, self.op("ReduceMean", hidden, self.integers([-1])))
            variance = self.op("ReduceMean", self.op("Mul", centred, centred), self.integers([-1]))
            normed = self.op("Div", centred, self.op("Sqrt", self.op("Add", variance, epsilon)))
            scaled = self.op("Mul", normed, weight)
            bias = self.number(self._rng.standard_normal(HIDDEN))
            return scaled if self.style.norm.endswith("no bias") else self.op("Add", scaled, bias)
        square = (
            self.op("Mul", hidden, hidden) if self.style.norm == "square" else self.op("Pow", hidden, self.number(2))
        )
        mean = self.op("Add", self.op("ReduceMean", square, self.integers([-1])), epsilon)
        root = self.op("Sqrt", mean)
        if self.style.norm == "square":
            return self.op("Mul", self.op("Div", hidden, root), weight)
        return self.op("Mul", weight, self.op("Mul", hidden, self.op("Reciprocal", root)))

    def _head(self, hidden: ir.Value) -> ir.Value:
        normed = self._norm(hidden)
        if self.style.head_mixes:
            normed = self.op("Sub", normed, self.op("ReduceMean", normed, self.integers([1])))
        logits = self.op("MatMul", normed, self.weight(HIDDEN, VOCAB))
        logits.name, logits.type = "logits", ir.TensorType(ir.DataType.FLOAT)
        logits.shape = ir.Shape(["batch", "sequence", VOCAB])
        return logits
