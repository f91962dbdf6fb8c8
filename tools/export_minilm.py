#!/usr/bin/env python3
"""Write the ONNX export of a BERT encoder (all-MiniLM-L6-v2) in the layout that `optimum-cli export onnx` would make.

usage: tools/export_minilm.py MODEL_DIR OUT_DIR       MODEL_DIR as save_pretrained and sentence-transformers write it

No torch. The graph is standard opset 17 and takes

    input_ids, attention_mask, token_type_ids   int64 [batch, sequence]   mask 0 = padding

and gives last_hidden_state float32 [batch, sequence, hidden]. The tokenizer, the configurations and the
sentence-transformers modules are copied beside it: they say how token vectors become one embedding.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir
from onnx_ir.tape import Tape
from safetensors import SafetensorError, safe_open

if TYPE_CHECKING:
    from collections.abc import Sequence

OPSET = 17  # the first with LayerNormalization
IR_VERSION = 8
INPUTS = ("input_ids", "attention_mask", "token_type_ids")
OUTPUT = "last_hidden_state"
COPIED = (
    "config.json",
    "config_sentence_transformers.json",
    "modules.json",
    "sentence_bert_config.json",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.txt",
    "1_Pooling/config.json",
)
MASKED = float(np.finfo(np.float32).min)  # what transformers adds to the score of a padding key
UNUSED = frozenset({"embeddings.position_ids", "pooler.dense.weight", "pooler.dense.bias"})


class ExportError(Exception):
    """The checkpoint is not one that this exporter turns into a faithful export."""


@dataclass(frozen=True, slots=True)
class BertShape:
    """The numbers that decide the graph; sizes are in elements."""

    layers: int
    hidden: int
    heads: int
    epsilon: float


def read_shape(config: dict[str, Any]) -> BertShape:
    """Everything is refused that the graph below would compute wrongly."""
    found = (config.get("model_type"), config.get("hidden_act"), config.get("position_embedding_type", "absolute"))
    if found != ("bert", "gelu", "absolute"):
        raise ExportError(f"model type, activation and positions are {found}; this exporter writes plain BERT only")
    hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
    return BertShape(int(config["num_hidden_layers"]), hidden, heads, float(config["layer_norm_eps"]))


class EncoderGraph:
    """The encoder being put together. Owns the tape of nodes and which weights of the file it has used."""

    def __init__(self, weights: Any, shape: BertShape) -> None:
        self._weights = weights  # an open safetensors file
        self._shape = shape
        self._tape = Tape()
        self._constants: dict[str, ir.Value] = {}
        self.used: set[str] = set()

    def build(self) -> ir.Model:
        """The whole model: embeddings, layers, the last hidden state."""
        inputs = [
            ir.Value(
                name=name, type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape(["batch_size", "sequence_length"])
            )
            for name in INPUTS
        ]
        ids, mask, types = inputs
        hidden = self._embeddings(ids, types)
        blocked = self._blocked(mask)
        for layer in range(self._shape.layers):
            hidden = self._layer(f"encoder.layer.{layer}", hidden, blocked)
        output = ir.Value(
            name=OUTPUT,
            type=ir.TensorType(ir.DataType.FLOAT),
            shape=ir.Shape(["batch_size", "sequence_length", self._shape.hidden]),
        )
        self._tape.op("Identity", [hidden], name="/output", output=output)
        graph = ir.Graph(
            inputs,
            [output],
            nodes=self._tape.nodes,
            initializers=self._tape.initializers,
            opset_imports={"": OPSET},
            name="main_graph",
        )
        return ir.Model(graph, ir_version=IR_VERSION, producer_name="residentd export_minilm")

    def _op(self, op: str, inputs: Sequence[ir.Value], name: str, attributes: dict[str, Any] | None = None) -> ir.Value:
        return self._tape.op(op, inputs, attributes, name=f"/{name}", output=ir.Value(name=f"/{name}_output_0"))

    def _weight(self, name: str, *, transposed: bool = False) -> ir.Value:
        self.used.add(name)
        array = self._weights.get_tensor(name).astype(np.float32, copy=False)
        return self._tape.initializer(
            ir.tensor(np.ascontiguousarray(array.T if transposed else array), name=name), name
        )

    def _constant(self, name: str, value: Any, dtype: type[Any]) -> ir.Value:
        if name not in self._constants:
            self._constants[name] = self._tape.initializer(ir.tensor(np.array(value, dtype), name=name), name)
        return self._constants[name]

    def _embeddings(self, ids: ir.Value, types: ir.Value) -> ir.Value:
        """Words, positions 0, 1, 2, … and token types, added and normalised."""
        sequence = self._op("Shape", [ids], "embeddings/length", {"start": 1, "end": 2})
        table = self._weight("embeddings.position_embeddings.weight")
        start = self._constant("zero", [0], np.int64)
        places = self._op("Slice", [table, start, sequence, start], "embeddings/places")
        words = self._op("Gather", [self._weight("embeddings.word_embeddings.weight"), ids], "embeddings/words")
        kinds = self._op("Gather", [self._weight("embeddings.token_type_embeddings.weight"), types], "embeddings/kinds")
        total = self._op("Add", [self._op("Add", [words, kinds], "embeddings/Add"), places], "embeddings/Add_1")
        return self._norm("embeddings.LayerNorm", total)

    def _blocked(self, mask: ir.Value) -> ir.Value:
        """What is added to the scores, float32 [batch, 1, 1, sequence]: nothing, or the lowest number for padding."""
        wide = self._op("Unsqueeze", [mask, self._constant("axes_1_2", [1, 2], np.int64)], "mask/Unsqueeze")
        number = self._op("Cast", [wide], "mask/Cast", {"to": ir.DataType.FLOAT})
        missing = self._op("Sub", [self._constant("one", 1.0, np.float32), number], "mask/Sub")
        return self._op("Mul", [missing, self._constant("lowest", MASKED, np.float32)], "mask/Mul")

    def _layer(self, name: str, hidden: ir.Value, blocked: ir.Value) -> ir.Value:
        attended = self._linear(f"{name}.attention.output.dense", self._attention(name, hidden, blocked))
        hidden = self._norm(f"{name}.attention.output.LayerNorm", self._op("Add", [attended, hidden], f"{name}/Add"))
        inner = self._gelu(name, self._linear(f"{name}.intermediate.dense", hidden))
        outer = self._linear(f"{name}.output.dense", inner)
        return self._norm(f"{name}.output.LayerNorm", self._op("Add", [outer, hidden], f"{name}/Add_1"))

    def _attention(self, name: str, hidden: ir.Value, blocked: ir.Value) -> ir.Value:
        """Attended values [batch, sequence, hidden] before their projection."""
        path = f"{name}.attention.self"
        query = self._heads(f"{path}.query", hidden, (0, 2, 1, 3))
        key = self._heads(f"{path}.key", hidden, (0, 2, 3, 1))
        value = self._heads(f"{path}.value", hidden, (0, 2, 1, 3))
        scale = self._constant("scale", (self._shape.hidden // self._shape.heads) ** 0.5, np.float32)
        scores = self._op("Div", [self._op("MatMul", [query, key], f"{path}/scores"), scale], f"{path}/Div")
        scores = self._op("Add", [scores, blocked], f"{path}/Add")
        weights = self._op("Softmax", [scores], f"{path}/Softmax", {"axis": -1})
        mixed = self._op("MatMul", [weights, value], f"{path}/mixed")
        turned = self._op("Transpose", [mixed], f"{path}/Transpose", {"perm": (0, 2, 1, 3)})
        width = self._constant("width", [0, 0, self._shape.hidden], np.int64)
        return self._op("Reshape", [turned, width], f"{path}/Reshape")

    def _heads(self, name: str, hidden: ir.Value, order: tuple[int, ...]) -> ir.Value:
        heads = self._shape.heads
        split = self._constant("heads", [0, 0, heads, self._shape.hidden // heads], np.int64)
        cut = self._op("Reshape", [self._linear(name, hidden), split], f"{name}/Reshape")
        return self._op("Transpose", [cut], f"{name}/Transpose", {"perm": order})

    def _linear(self, name: str, hidden: ir.Value) -> ir.Value:
        product = self._op("MatMul", [hidden, self._weight(f"{name}.weight", transposed=True)], f"{name}/MatMul")
        return self._op("Add", [self._weight(f"{name}.bias"), product], f"{name}/Add")

    def _norm(self, name: str, hidden: ir.Value) -> ir.Value:
        weights = [self._weight(f"{name}.weight"), self._weight(f"{name}.bias")]
        attributes = {"axis": -1, "epsilon": self._shape.epsilon}
        return self._op("LayerNormalization", [hidden, *weights], f"{name}/LayerNormalization", attributes)

    def _gelu(self, name: str, hidden: ir.Value) -> ir.Value:
        """x/2 (1 + erf(x/√2)), in the order of operations that exporters write and runtimes fuse."""
        root, one, half = (
            self._constant(constant, number, np.float32)
            for constant, number in (("root", 2**0.5), ("one", 1.0), ("half", 0.5))
        )
        error = self._op("Erf", [self._op("Div", [hidden, root], f"{name}/gelu/Div")], f"{name}/gelu/Erf")
        grown = self._op("Mul", [hidden, self._op("Add", [error, one], f"{name}/gelu/Add")], f"{name}/gelu/Mul")
        return self._op("Mul", [grown, half], f"{name}/gelu/Mul_1")


def export(source: Path, target: Path) -> None:
    """Write the export of `source` as the new directory `target`, whole or not at all. Raises ExportError."""
    if target.exists():
        raise ExportError(f"{target} exists; remove it first, or name another directory")
    try:
        shape = read_shape(json.loads((source / "config.json").read_text(encoding="utf-8")))
        weights = safe_open(source / "model.safetensors", framework="numpy")
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise ExportError(f"{source} is not a readable BERT checkpoint: {type(error).__name__}: {error}") from error
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{target.name}.partial-", dir=target.parent))
    try:
        with weights as file:
            write(file, shape, source, partial)
        partial.chmod(0o755)  # mkdtemp's 0700 is for secrets
        partial.rename(target)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def write(file: Any, shape: BertShape, source: Path, directory: Path) -> None:
    """Graph, weights and the files beside them. Raises ExportError for a weight that has no place in the graph."""
    graph = EncoderGraph(file, shape)
    model = graph.build()
    unknown = sorted(set(file.keys()) - graph.used - UNUSED)
    if unknown:
        raise ExportError(f"{len(unknown)} tensors have no place in a plain BERT graph, the first is {unknown[0]}")
    for name in COPIED:
        if (source / name).is_file():
            (directory / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(source / name, directory / name)
    ir.save(model, directory / "model.onnx")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="export_minilm.py", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model_dir", type=Path, help="a directory with config.json and model.safetensors")
    parser.add_argument("out_dir", type=Path, help="the directory to make; it must not exist")
    options = parser.parse_args(arguments)
    try:
        export(options.model_dir, options.out_dir)
    except ExportError as error:
        print(f"export_minilm: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
