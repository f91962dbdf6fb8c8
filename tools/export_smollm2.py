#!/usr/bin/env python3
"""Write the ONNX export of a Llama GGUF file (SmolLM2) in the layout that `optimum-cli export onnx` would make.

usage: tools/export_smollm2.py GGUF OUT_DIR

No torch: the weights are dequantised to float32 one at a time while they are written, so the peak is a few copies of
the largest matrix. The graph is standard opset 23 (RMSNormalization, RotaryEmbedding, Attention) and takes

    input_ids, position_ids   int64 [batch, sequence]
    attention_mask            int64 [batch, past + sequence]   0 = padding, on either side
    past_key_values.N.{key,value}  float32 [batch, kv_heads, past, head_dim]

and gives logits [batch, sequence, vocab] and present.N.{key,value} [batch, kv_heads, past + sequence, head_dim].
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

import gguf
import numpy as np
import onnx_ir as ir
from gguf.quants import dequantize
from onnx_ir.tape import Tape
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

    Weights = NDArray[np.float32]

OPSET = 23
IR_VERSION = 11  # the one that came with opset 23
ARCHITECTURE = "llama"
PRE_TOKENIZER = "smollm"
TOKEN_CONTROL, TOKEN_USER_DEFINED = 3, 4  # gguf TokenType
PROGRESS_EVERY_TENSORS = 50

# GGUF tensor name in a block -> name in the Hugging Face checkpoint; every matrix is stored [out, in] in both.
BLOCK_MATRICES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
BLOCK_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}


# Input -> name of its second dimension; the first is the batch.
TOKEN_INPUTS = {
    "input_ids": "sequence_length",
    "attention_mask": "total_sequence_length",
    "position_ids": "sequence_length",
}


class ExportError(Exception):
    """The GGUF file is not one that this exporter turns into a faithful export."""


@dataclass(frozen=True, slots=True)
class LlamaShape:
    """The numbers that decide the graph; sizes are in elements."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    context: int
    norm_epsilon: float
    rope_base: float
    tied: bool


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The tokenizer a GGUF file carries: byte-level BPE in GPT-2's spelling."""

    tokens: tuple[str, ...]
    types: tuple[int, ...]
    merges: tuple[tuple[str, str], ...]
    bos: int
    eos: int
    pad: int
    unk: int
    chat_template: str


class GgufFile:
    """A mapped GGUF file; tensors are dequantised when they are asked for."""

    def __init__(self, path: Path) -> None:
        try:
            self._reader = gguf.GGUFReader(path)
        except (OSError, ValueError) as error:
            raise ExportError(f"{path} is not a readable GGUF file: {error}") from error
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}

    @property
    def tensor_names(self) -> frozenset[str]:
        return frozenset(self._tensors)

    def field(self, key: str) -> Any:
        """The value of a metadata field. Raises ExportError if the file has none."""
        if key not in self._reader.fields:
            raise ExportError(f"the GGUF file has no field {key}, which this exporter needs")
        return self._reader.fields[key].contents()

    def optional(self, key: str, default: Any) -> Any:
        return self.field(key) if key in self._reader.fields else default

    def shape(self, name: str) -> tuple[int, ...]:
        """Row-major shape of a tensor; GGUF lists the fastest axis first."""
        if name not in self._tensors:
            raise ExportError(f"the GGUF file has no tensor {name}, which this exporter needs")
        return tuple(int(size) for size in reversed(self._tensors[name].shape))

    def weights(self, name: str) -> Weights:
        shape = self.shape(name)
        tensor = self._tensors[name]
        return np.asarray(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32).reshape(shape)


def rotate_half_order(matrix: Weights, heads: int) -> Weights:
    """The Hugging Face row order of a q or k projection [heads * head_dim, in].

    llama.cpp interleaves the two halves of each head, because it rotates neighbouring pairs.
    """
    half = matrix.shape[0] // heads // 2
    return matrix.reshape(heads, half, 2, -1).swapaxes(1, 2).reshape(matrix.shape)


def read_shape(file: GgufFile) -> LlamaShape:
    """The model's numbers, with everything refused that the graph below would compute wrongly."""
    architecture = file.field("general.architecture")
    if architecture != ARCHITECTURE:
        raise ExportError(f"architecture {architecture!r}; this exporter writes {ARCHITECTURE!r} only")
    scaling = file.optional("llama.rope.scaling.type", "none")
    if scaling != "none":
        raise ExportError(f"rope scaling {scaling!r}; this exporter writes unscaled rotary positions only")
    hidden, heads = int(file.field("llama.embedding_length")), int(file.field("llama.attention.head_count"))
    head_dim = int(file.optional("llama.attention.key_length", hidden // heads))
    rotated = int(file.optional("llama.rope.dimension_count", head_dim))
    if rotated != head_dim:
        raise ExportError(f"{rotated} of {head_dim} head dimensions are rotated; this exporter rotates all or nothing")
    shape = LlamaShape(
        layers=int(file.field("llama.block_count")),
        hidden=hidden,
        intermediate=int(file.field("llama.feed_forward_length")),
        heads=heads,
        kv_heads=int(file.optional("llama.attention.head_count_kv", heads)),
        head_dim=head_dim,
        vocab=file.shape("token_embd.weight")[0],
        context=int(file.field("llama.context_length")),
        # GGUF keeps float32; nine digits give back the decimal that the checkpoint's config had.
        norm_epsilon=round(float(file.field("llama.attention.layer_norm_rms_epsilon")), 9),
        rope_base=float(file.optional("llama.rope.freq_base", 10000.0)),
        tied="output.weight" not in file.tensor_names,
    )
    refuse_unknown_tensors(file, shape)
    return shape


def refuse_unknown_tensors(file: GgufFile, shape: LlamaShape) -> None:
    """Every tensor must have a place in the graph: without one (a bias, rope factors) it would be silently wrong."""
    known = {"token_embd.weight", "output_norm.weight", "output.weight"}
    for layer in range(shape.layers):
        known |= {f"blk.{layer}.{name}.weight" for name in (*BLOCK_MATRICES, *BLOCK_NORMS)}
    unknown = sorted(file.tensor_names - known)
    if unknown:
        raise ExportError(f"{len(unknown)} tensors have no place in a plain Llama graph, the first is {unknown[0]}")


def read_vocabulary(file: GgufFile) -> Vocabulary:
    kind = (file.field("tokenizer.ggml.model"), file.field("tokenizer.ggml.pre"))
    if kind != ("gpt2", PRE_TOKENIZER):
        raise ExportError(
            f"tokenizer {kind}; this exporter knows the pre-tokenizer of ('gpt2', {PRE_TOKENIZER!r}) only"
        )
    eos = int(file.field("tokenizer.ggml.eos_token_id"))
    merges = (merge.partition(" ") for merge in file.field("tokenizer.ggml.merges"))
    return Vocabulary(
        tokens=tuple(file.field("tokenizer.ggml.tokens")),
        types=tuple(file.field("tokenizer.ggml.token_type")),
        merges=tuple((left, right) for left, _, right in merges),
        bos=int(file.field("tokenizer.ggml.bos_token_id")),
        eos=eos,
        pad=int(file.optional("tokenizer.ggml.padding_token_id", eos)),
        unk=int(file.field("tokenizer.ggml.unknown_token_id")),
        chat_template=file.field("tokenizer.chat_template"),
    )


# ---- graph ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Shared:
    """What every layer reads: which keys a query may see, the position of each token, and the rotary tables."""

    allowed: ir.Value
    positions: ir.Value
    cos: ir.Value
    sin: ir.Value


class DecoderGraph:
    """The decoder being put together. Owns the tape of nodes; weights stay in the file until the graph is saved."""

    def __init__(self, file: GgufFile, shape: LlamaShape) -> None:
        self._file = file
        self._shape = shape
        self._tape = Tape()
        self._constants: dict[str, ir.Value] = {}

    def build(self) -> ir.Model:
        """The whole model: embedding, layers, head."""
        ids, mask, positions = (integer_input(name, length) for name, length in TOKEN_INPUTS.items())
        past = [
            self._cache_pair("past_key_values", layer, "past_sequence_length") for layer in range(self._shape.layers)
        ]
        embedding = self._weight("model.embed_tokens.weight", "token_embd.weight")
        hidden = self._embed(embedding, ids)
        present: list[ir.Value] = []
        for layer, shared in enumerate(self._shared(ids, mask, positions)):
            hidden, *new_pair = self._layer(layer, hidden, past[layer], shared)
            present += new_pair
        hidden = self._norm(hidden, "model.norm", "output_norm.weight")
        graph = ir.Graph(
            [ids, mask, positions, *(value for pair in past for value in pair)],
            [self._head(hidden, embedding), *present],
            nodes=self._tape.nodes,
            initializers=self._tape.initializers,
            opset_imports={"": OPSET},
            name="main_graph",
        )
        return ir.Model(graph, ir_version=IR_VERSION, producer_name="residentd export_smollm2")

    def _embed(self, embedding: ir.Value, ids: ir.Value) -> ir.Value:
        return self._op("Gather", [embedding, ids], "/model/embed_tokens/Gather")

    def _shared(self, ids: ir.Value, mask: ir.Value, positions: ir.Value) -> list[Shared]:
        """What each layer reads besides the hidden state."""
        allowed = self._attention_mask(mask, *self._places(ids, mask))
        shared = Shared(allowed, positions, *self._rotary_tables(self._shape.rope_base))
        return [shared] * self._shape.layers

    def _op(
        self, op: str, inputs: Sequence[ir.Value | None], name: str, attributes: Mapping[str, Any] | None = None
    ) -> ir.Value:
        output = ir.Value(name=f"{name}_output_0")
        return self._tape.op(op, inputs, attributes, name=name, output=output)

    def _cache_pair(self, prefix: str, layer: int, length: str) -> tuple[ir.Value, ir.Value]:
        """A layer's key and value, [batch, kv_heads, length, head_dim], under the names that every exporter gives."""
        dims = ("batch_size", self._shape.kv_heads, length, self._shape.head_dim)
        key, value = (
            ir.Value(name=f"{prefix}.{layer}.{kind}", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(dims))
            for kind in ("key", "value")
        )
        return key, value

    def _weight(self, name: str, source: str, change: Callable[[Weights], Weights] | None = None) -> ir.Value:
        """An initializer read from the file when the graph is saved; `change` may reorder rows and transpose."""
        dims = self._file.shape(source)

        def load() -> ir.TensorProtocol:
            weights = self._file.weights(source)
            return ir.Tensor(np.ascontiguousarray(change(weights) if change else weights), name=name)

        stored = dims[::-1] if change else dims
        return self._tape.initializer(ir.LazyTensor(load, ir.DataType.FLOAT, ir.Shape(stored), name=name), name)

    def _integers(self, name: str, values: int | list[int]) -> ir.Value:
        if name not in self._constants:
            self._constants[name] = self._tape.initializer(ir.tensor(np.array(values, np.int64), name=name), name)
        return self._constants[name]

    def _places(self, ids: ir.Value, mask: ir.Value) -> tuple[ir.Value, ir.Value]:
        """Where the keys [past + sequence] and the queries [sequence, 1] stand, padding counted."""
        zero, one = self._integers("zero", 0), self._integers("one", 1)
        sequence = self._op("Gather", [self._op("Shape", [ids], "/mask/ids/Shape"), one], "/mask/sequence")
        total = self._op("Gather", [self._op("Shape", [mask], "/mask/mask/Shape"), one], "/mask/total")
        past = self._op("Sub", [total, sequence], "/mask/past")
        key = self._op("Range", [zero, total, one], "/mask/key")
        query = self._op("Range", [past, total, one], "/mask/query/Range")
        return key, self._op("Unsqueeze", [query, self._integers("axis_1", [1])], "/mask/query/Unsqueeze")

    def _attention_mask(self, mask: ir.Value, key: ir.Value, query: ir.Value) -> ir.Value:
        """Which key each query may see: bool [batch, 1, sequence, past + sequence].

        A query sees the keys up to itself that are not padding, and always itself: so the row of a padding query is
        never empty. The softmax of an empty row has no agreed value, and a NaN would reach later tokens as 0 * NaN.
        """
        causal = self._op("LessOrEqual", [key, query], "/mask/causal")
        itself = self._op("Equal", [key, query], "/mask/itself")
        token = self._op("Cast", [mask], "/mask/token/Cast", {"to": ir.DataType.BOOL})
        token = self._op("Unsqueeze", [token, self._integers("axes_1_2", [1, 2])], "/mask/token/Unsqueeze")
        return self._op("And", [self._op("Or", [token, itself], "/mask/token_or_itself"), causal], "/mask/And")

    def _rotary_tables(self, base: float, prefix: str = "") -> tuple[ir.Value, ir.Value]:
        """cos and sin of every angle, [context, head_dim / 2].

        Each step is rounded to float32, as in transformers: at position 8,000 exact angles would be 5e-4 from its own.
        """
        exponents = np.arange(0, self._shape.head_dim, 2) / self._shape.head_dim
        frequencies = np.float32(1) / np.power(base, exponents).astype(np.float32)
        angles = np.arange(self._shape.context, dtype=np.float32)[:, None] * frequencies
        tables = {f"{prefix}cos_cache": np.cos(angles), f"{prefix}sin_cache": np.sin(angles)}
        cos, sin = (self._tape.initializer(ir.tensor(table, name=name), name) for name, table in tables.items())
        return cos, sin

    def _layer(
        self, layer: int, hidden: ir.Value, past: tuple[ir.Value, ir.Value], shared: Shared
    ) -> tuple[ir.Value, ir.Value, ir.Value]:
        """One decoder block: the hidden state after it, and its present key and value."""
        path = f"/model/layers.{layer}"
        normed = self._norm(hidden, f"model.layers.{layer}.input_layernorm", f"blk.{layer}.attn_norm.weight")
        attended, *present = self._attention(layer, normed, past, shared)
        hidden = self._op("Add", [hidden, self._linear(attended, layer, "attn_output")], f"{path}/Add")
        normed = self._norm(hidden, f"model.layers.{layer}.post_attention_layernorm", f"blk.{layer}.ffn_norm.weight")
        return self._op("Add", [hidden, self._mlp(layer, normed)], f"{path}/Add_1"), present[0], present[1]

    def _attention(
        self, layer: int, normed: ir.Value, past: tuple[ir.Value, ir.Value], shared: Shared
    ) -> tuple[ir.Value, ir.Value, ir.Value]:
        """The attended values [batch, sequence, heads * head_dim] before their projection; present key and value."""
        shape, path = self._shape, f"/model/layers.{layer}/self_attn"
        tables = (shared.cos, shared.sin, shared.positions)
        query, key, value = (self._linear(normed, layer, name) for name in ("attn_q", "attn_k", "attn_v"))
        query = self._op("RotaryEmbedding", [query, *tables], f"{path}/q_rotary", {"num_heads": shape.heads})
        key = self._op("RotaryEmbedding", [key, *tables], f"{path}/k_rotary", {"num_heads": shape.kv_heads})
        attended = ir.Value(name=f"{path}/Attention_output_0")
        present = self._cache_pair("present", layer, "total_sequence_length")
        self._tape.op_multi_out(
            "Attention",
            [query, key, value, shared.allowed, *past],
            {"q_num_heads": shape.heads, "kv_num_heads": shape.kv_heads, "scale": shape.head_dim**-0.5},
            name=f"{path}/Attention",
            outputs=[attended, *present],
        )
        return attended, *present

    def _mlp(self, layer: int, hidden: ir.Value) -> ir.Value:
        path = f"/model/layers.{layer}/mlp"
        gate = self._linear(hidden, layer, "ffn_gate")
        silu = self._op("Mul", [gate, self._op("Sigmoid", [gate], f"{path}/act_fn/Sigmoid")], f"{path}/act_fn/Mul")
        product = self._op("Mul", [silu, self._linear(hidden, layer, "ffn_up")], f"{path}/Mul")
        return self._linear(product, layer, "ffn_down")

    def _linear(self, hidden: ir.Value, layer: int, source: str) -> ir.Value:
        """hidden [.., in] times a block's matrix, which is stored transposed [in, out]: what MatMul wants."""
        module = f"model.layers.{layer}.{BLOCK_MATRICES[source]}"

        def change(matrix: Weights) -> Weights:
            return self._hugging_face_rows(matrix, source).T

        weight = self._weight(f"{module}.weight", f"blk.{layer}.{source}.weight", change)
        return self._op("MatMul", [hidden, weight], node_path(module) + "/MatMul")

    def _hugging_face_rows(self, matrix: Weights, source: str) -> Weights:
        heads = {"attn_q": self._shape.heads, "attn_k": self._shape.kv_heads}.get(source)
        return rotate_half_order(matrix, heads) if heads else matrix

    def _norm(self, hidden: ir.Value, module: str, source: str) -> ir.Value:
        attributes = {"axis": -1, "epsilon": self._shape.norm_epsilon}
        return self._op(
            "RMSNormalization", [hidden, self._weight(f"{module}.weight", source)], node_path(module), attributes
        )

    def _head(self, hidden: ir.Value, embedding: ir.Value) -> ir.Value:
        """Logits. A tied head reads the embedding's own initializer, so that the file holds it once."""
        if self._shape.tied:
            weight = self._op("Transpose", [embedding], "/lm_head/Transpose", {"perm": [1, 0]})
        else:
            weight = self._weight("lm_head.weight", "output.weight", np.transpose)
        logits = ir.Value(
            name="logits",
            type=ir.TensorType(ir.DataType.FLOAT),
            shape=ir.Shape(["batch_size", "sequence_length", self._shape.vocab]),
        )
        return self._tape.op("MatMul", [hidden, weight], name="/lm_head/MatMul", output=logits)


def node_path(module: str) -> str:
    """The node name torch's exporter would give: model.layers.0.mlp.up_proj -> /model/layers.0/mlp/up_proj."""
    return "/" + module.replace(".", "/").replace("/layers/", "/layers.")


def integer_input(name: str, length: str) -> ir.Value:
    return ir.Value(name=name, type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape(["batch_size", length]))


# ---- files ---------------------------------------------------------------------------------------------------------


def tokenizer_from_vocabulary(vocabulary: Vocabulary) -> Tokenizer:
    """SmolLM2's tokenizer: every digit alone, then GPT-2's byte-level BPE; no BOS is added."""
    vocab = {token: index for index, token in enumerate(vocabulary.tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=list(vocabulary.merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    for token, kind in zip(vocabulary.tokens, vocabulary.types, strict=True):
        if kind == TOKEN_CONTROL:
            tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False)])
        elif kind == TOKEN_USER_DEFINED:
            tokenizer.add_tokens([AddedToken(token, normalized=False)])
    return tokenizer


def config_json(shape: LlamaShape, vocabulary: Vocabulary) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "bos_token_id": vocabulary.bos,
        "dtype": "float32",
        "eos_token_id": vocabulary.eos,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "max_position_embeddings": shape.context,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": shape.heads,
        "num_hidden_layers": shape.layers,
        "num_key_value_heads": shape.kv_heads,
        "pad_token_id": vocabulary.pad,
        "rms_norm_eps": shape.norm_epsilon,
        "rope_scaling": None,
        "rope_theta": shape.rope_base,
        "tie_word_embeddings": shape.tied,
        "use_cache": True,
        "vocab_size": shape.vocab,
    }


def token_roles(vocabulary: Vocabulary) -> dict[str, str]:
    roles = {
        "bos_token": vocabulary.bos,
        "eos_token": vocabulary.eos,
        "pad_token": vocabulary.pad,
        "unk_token": vocabulary.unk,
    }
    return {role: vocabulary.tokens[index] for role, index in roles.items()}


def tokenizer_config_json(shape: LlamaShape, vocabulary: Vocabulary) -> dict[str, Any]:
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    added = {
        str(index): {"content": token, **flags, "special": kind == TOKEN_CONTROL}
        for index, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True))
        if kind in {TOKEN_CONTROL, TOKEN_USER_DEFINED}
    }
    return {
        "add_prefix_space": False,
        "added_tokens_decoder": added,
        "clean_up_tokenization_spaces": False,
        "model_max_length": shape.context,
        "tokenizer_class": "GPT2TokenizerFast",
        **token_roles(vocabulary),
    }


def write_text_files(directory: Path, shape: LlamaShape, vocabulary: Vocabulary) -> None:
    tokenizer_from_vocabulary(vocabulary).save(str(directory / "tokenizer.json"))
    (directory / "chat_template.jinja").write_text(vocabulary.chat_template, encoding="utf-8")
    ids = {"bos_token_id": vocabulary.bos, "eos_token_id": vocabulary.eos, "pad_token_id": vocabulary.pad}
    documents = {
        "config.json": config_json(shape, vocabulary),
        "generation_config.json": {"_from_model_config": True, **ids},
        "tokenizer_config.json": tokenizer_config_json(shape, vocabulary),
        "special_tokens_map.json": token_roles(vocabulary),
    }
    for name, document in documents.items():
        (directory / name).write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def report_progress(tensor: ir.TensorProtocol, info: ir.external_data.CallbackInfo) -> None:
    if info.index % PROGRESS_EVERY_TENSORS == 0 or info.index + 1 == info.total:
        print(f"    tensor {info.index + 1} of {info.total}: {tensor.name}", file=sys.stderr)


def export(source: Path, target: Path) -> None:
    """Write the export of `source` as the new directory `target`, whole or not at all. Raises ExportError."""
    if target.exists():
        raise ExportError(f"{target} exists; remove it first, or name another directory")
    file = GgufFile(source)
    shape, vocabulary = read_shape(file), read_vocabulary(file)
    if len(vocabulary.tokens) != shape.vocab:
        raise ExportError(f"{len(vocabulary.tokens)} tokens but an embedding of {shape.vocab} rows")
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{target.name}.partial-", dir=target.parent))
    try:
        write_text_files(partial, shape, vocabulary)
        model = DecoderGraph(file, shape).build()
        ir.save(model, partial / "model.onnx", external_data="model.onnx_data", callback=report_progress)
        partial.chmod(0o755)  # mkdtemp's 0700 is for secrets
        partial.rename(target)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="export_smollm2.py", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("gguf", type=Path, help="a Llama-architecture GGUF file with SmolLM2's tokenizer")
    parser.add_argument("out_dir", type=Path, help="the directory to make; it must not exist")
    options = parser.parse_args(arguments)
    try:
        export(options.gguf, options.out_dir)
    except ExportError as error:
        print(f"export_smollm2: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
