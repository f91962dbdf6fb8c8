#!/usr/bin/env python3
"""Write the ONNX export of a Gemma 3 text GGUF file in the layout that `optimum-cli export onnx` would make.

usage: tools/export_gemma3.py GGUF [PART ...] OUT_DIR      a file that comes in parts is put together

As tools/export_smollm2.py, from which the plain parts come: no torch, weights dequantised one at a time, standard
opset 23. What Gemma 3 adds: an embedding scaled by the root of its width, norms before and after each branch, norms of
queries and keys, layers that see a window of the last keys beside layers that see all (with a rotary base each), and a
SentencePiece vocabulary.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from export_smollm2 import (
    BLOCK_MATRICES,
    TOKEN_CONTROL,
    TOKEN_USER_DEFINED,
    DecoderGraph,
    ExportError,
    GgufFile,
    LlamaShape,
    Shared,
    report_progress,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from export_smollm2 import Weights

ARCHITECTURE = "gemma3"
TOKEN_NORMAL = 1  # gguf TokenType
BLANK = "▁"  # how SentencePiece writes a space
SWAP_HEADS_AND_TOKENS = {"perm": [0, 2, 1, 3]}
LOCAL_ROPE_BASE = 10_000.0  # not in the file: the same in every Gemma 3
LAYERS_TO_GLOBAL = 6  # every sixth layer sees all; not in the file of the smaller models
NORMS = ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm", "attn_q_norm", "attn_k_norm")


@dataclass(frozen=True, slots=True)
class GemmaShape(LlamaShape):
    """`window`: how many last keys a local layer's query sees, itself included."""

    window: int

    def is_global(self, layer: int) -> bool:
        return (layer + 1) % LAYERS_TO_GLOBAL == 0


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """SentencePiece's pieces with their kinds; the best of two pieces to merge into is the one of higher score."""

    tokens: tuple[str, ...]
    types: tuple[int, ...]
    scores: tuple[float, ...]
    bos: int
    eos: int
    pad: int
    unk: int

    def of_type(self, kind: int) -> list[str]:
        return [token for token, own in zip(self.tokens, self.types, strict=True) if own == kind]


def read_shape(file: GgufFile) -> GemmaShape:
    """The model's numbers, with everything refused that the graph below would compute wrongly."""
    architecture = file.field("general.architecture")
    if architecture != ARCHITECTURE:
        raise ExportError(f"architecture {architecture!r}; this exporter writes {ARCHITECTURE!r} only")
    scaling = file.optional("gemma3.rope.scaling.type", "none")
    pattern = file.optional("gemma3.attention.sliding_window_pattern", LAYERS_TO_GLOBAL)
    softcap = file.optional("gemma3.attn_logit_softcapping", 0) or file.optional("gemma3.final_logit_softcapping", 0)
    if scaling != "none" or pattern != LAYERS_TO_GLOBAL or softcap:
        raise ExportError(f"rope scaling {scaling!r}, pattern {pattern}, softcap {softcap}: none is written here")
    shape = GemmaShape(
        layers=int(file.field("gemma3.block_count")),
        hidden=int(file.field("gemma3.embedding_length")),
        intermediate=int(file.field("gemma3.feed_forward_length")),
        heads=int(file.field("gemma3.attention.head_count")),
        kv_heads=int(file.field("gemma3.attention.head_count_kv")),
        head_dim=int(file.field("gemma3.attention.key_length")),
        vocab=file.shape("token_embd.weight")[0],
        context=int(file.field("gemma3.context_length")),
        norm_epsilon=round(float(file.field("gemma3.attention.layer_norm_rms_epsilon")), 9),
        rope_base=float(file.field("gemma3.rope.freq_base")),
        tied=True,
        window=int(file.field("gemma3.attention.sliding_window")),
    )
    known = {"token_embd.weight", "output_norm.weight"}
    known |= {f"blk.{layer}.{name}.weight" for layer in range(shape.layers) for name in (*BLOCK_MATRICES, *NORMS)}
    unknown = sorted(file.tensor_names - known)
    if unknown:
        raise ExportError(f"{len(unknown)} tensors have no place in a Gemma 3 graph, the first is {unknown[0]}")
    return shape


def read_vocabulary(file: GgufFile) -> Vocabulary:
    kind = file.field("tokenizer.ggml.model")
    if kind != "llama" or file.optional("tokenizer.ggml.add_space_prefix", default=True):
        raise ExportError(f"tokenizer {kind!r}; this exporter knows SentencePiece's without a leading blank only")
    tokens, rows = tuple(file.field("tokenizer.ggml.tokens")), file.shape("token_embd.weight")[0]
    if len(tokens) != rows:
        raise ExportError(f"{len(tokens)} tokens but an embedding of {rows} rows")
    return Vocabulary(
        tokens=tokens,
        types=tuple(file.field("tokenizer.ggml.token_type")),
        scores=tuple(file.field("tokenizer.ggml.scores")),
        bos=int(file.field("tokenizer.ggml.bos_token_id")),
        eos=int(file.field("tokenizer.ggml.eos_token_id")),
        pad=int(file.field("tokenizer.ggml.padding_token_id")),
        unk=int(file.field("tokenizer.ggml.unknown_token_id")),
    )


# ---- graph ---------------------------------------------------------------------------------------------------------


class GemmaGraph(DecoderGraph):
    """Gemma's rows are in Hugging Face's order already, and its norms' weights have the 1 in them that it adds."""

    _shape: GemmaShape

    def _embed(self, embedding: ir.Value, ids: ir.Value) -> ir.Value:
        rows = self._op("Gather", [embedding, ids], "/model/embed_tokens/Gather")
        return self._op("Mul", [rows, self._number("embed_scale", self._shape.hidden**0.5)], "/model/embed_tokens/Mul")

    def _shared(self, ids: ir.Value, mask: ir.Value, positions: ir.Value) -> list[Shared]:
        key, query = self._places(ids, mask)
        everything = self._attention_mask(mask, key, query)
        first = self._op("Sub", [query, self._integers("window", self._shape.window)], "/mask/window/Sub")
        near = self._op("Greater", [key, first], "/mask/window/Greater")
        window = self._op("And", [everything, near], "/mask/window/And")
        whole = Shared(everything, positions, *self._rotary_tables(self._shape.rope_base))
        local = Shared(window, positions, *self._rotary_tables(LOCAL_ROPE_BASE, "local_"))
        return [whole if self._shape.is_global(layer) else local for layer in range(self._shape.layers)]

    def _layer(
        self, layer: int, hidden: ir.Value, past: tuple[ir.Value, ir.Value], shared: Shared
    ) -> tuple[ir.Value, ir.Value, ir.Value]:
        path, module, block = f"/model/layers.{layer}", f"model.layers.{layer}", f"blk.{layer}"
        normed = self._norm(hidden, f"{module}.input_layernorm", f"{block}.attn_norm.weight")
        attended, *present = self._attention(layer, normed, past, shared)
        branch = self._linear(attended, layer, "attn_output")
        branch = self._norm(branch, f"{module}.post_attention_layernorm", f"{block}.post_attention_norm.weight")
        hidden = self._op("Add", [hidden, branch], f"{path}/Add")
        normed = self._norm(hidden, f"{module}.pre_feedforward_layernorm", f"{block}.ffn_norm.weight")
        branch = self._mlp(layer, normed)
        branch = self._norm(branch, f"{module}.post_feedforward_layernorm", f"{block}.post_ffw_norm.weight")
        return self._op("Add", [hidden, branch], f"{path}/Add_1"), present[0], present[1]

    def _attention(
        self, layer: int, normed: ir.Value, past: tuple[ir.Value, ir.Value], shared: Shared
    ) -> tuple[ir.Value, ir.Value, ir.Value]:
        """The attended values [batch, sequence, heads * head_dim] before their projection; present key and value."""
        path, shape = f"/model/layers.{layer}/self_attn", self._shape
        tables = (shared.cos, shared.sin, shared.positions)
        operands = []
        for part, heads in (("q", shape.heads), ("k", shape.kv_heads)):
            value = self._heads(self._linear(normed, layer, f"attn_{part}"), heads, f"{path}/{part}")
            source = f"blk.{layer}.attn_{part}_norm.weight"
            value = self._norm(value, f"model.layers.{layer}.self_attn.{part}_norm", source)
            operands.append(self._op("RotaryEmbedding", [value, *tables], f"{path}/{part}_rotary"))
        operands.append(self._heads(self._linear(normed, layer, "attn_v"), shape.kv_heads, f"{path}/v"))
        attended = ir.Value(name=f"{path}/Attention_output_0")
        present = self._cache_pair("present", layer, "total_sequence_length")
        self._tape.op_multi_out(
            "Attention",
            [*operands, shared.allowed, *past],
            {"scale": shape.head_dim**-0.5},
            name=f"{path}/Attention",
            outputs=[attended, *present],
        )
        rows = self._op("Transpose", [attended], f"{path}/Transpose", SWAP_HEADS_AND_TOKENS)
        return self._op("Reshape", [rows, self._integers("rows", [0, 0, -1])], f"{path}/Reshape"), *present

    def _heads(self, rows: ir.Value, heads: int, path: str) -> ir.Value:
        """[batch, heads, sequence, head_dim] of [batch, sequence, heads * head_dim]."""
        target = self._integers(f"heads_{heads}", [0, 0, heads, self._shape.head_dim])
        split = self._op("Reshape", [rows, target], f"{path}/Reshape")
        return self._op("Transpose", [split], f"{path}/Transpose", SWAP_HEADS_AND_TOKENS)

    def _mlp(self, layer: int, hidden: ir.Value) -> ir.Value:
        path = f"/model/layers.{layer}/mlp"
        gate = self._linear(hidden, layer, "ffn_gate")
        gate = self._op("Gelu", [gate], f"{path}/act_fn/Gelu", {"approximate": "tanh"})
        product = self._op("Mul", [gate, self._linear(hidden, layer, "ffn_up")], f"{path}/Mul")
        return self._linear(product, layer, "ffn_down")

    def _hugging_face_rows(self, matrix: Weights, source: str) -> Weights:
        del source
        return matrix

    def _number(self, name: str, value: float) -> ir.Value:
        return self._tape.initializer(ir.tensor(np.array(value, np.float32), name=name), name)


# ---- files ---------------------------------------------------------------------------------------------------------


def merges_of(vocabulary: Vocabulary) -> list[tuple[str, str]]:
    """Every way to put a normal piece together from two, the piece of the highest score first.

    SentencePiece joins the neighbours whose piece has the highest score; tokenizers' BPE those of the first merge.
    """
    scores = zip(vocabulary.tokens, vocabulary.types, vocabulary.scores, strict=True)
    normal = {token: score for token, kind, score in scores if kind == TOKEN_NORMAL}
    ranked = sorted(normal, key=normal.__getitem__, reverse=True)
    return [
        (token[:cut], token[cut:])
        for token in ranked
        for cut in range(len(token) - 1, 0, -1)
        if token[:cut] in normal and token[cut:] in normal
    ]


def tokenizer_from_vocabulary(vocabulary: Vocabulary) -> Tokenizer:
    """Gemma's tokenizer: blanks are ▁, what SentencePiece calls user-defined is matched first, BOS is added."""
    vocab = {piece_of(token): index for index, token in enumerate(vocabulary.tokens)}
    unknown = vocabulary.tokens[vocabulary.unk]
    model = models.BPE(vocab=vocab, merges=merges_of(vocabulary), unk_token=unknown, fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Replace(" ", BLANK)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.decoder = decoders.Sequence([decoders.Replace(BLANK, " "), decoders.ByteFallback(), decoders.Fuse()])
    bos = vocabulary.tokens[vocabulary.bos]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos}:1 $B:1", special_tokens=[(bos, vocabulary.bos)]
    )
    # Matched where the blanks are ▁ already, as SentencePiece does.
    defined = [AddedToken(piece_of(token), normalized=True) for token in vocabulary.of_type(TOKEN_USER_DEFINED)]
    tokenizer.add_tokens(defined)
    control = [AddedToken(token, special=True, normalized=False) for token in vocabulary.of_type(TOKEN_CONTROL)]
    tokenizer.add_special_tokens(control)
    return tokenizer


def piece_of(token: str) -> str:
    """As the model has it: GGUF writes the blanks of user-defined pieces as spaces."""
    return token.replace(" ", BLANK)


def config_json(shape: GemmaShape, vocabulary: Vocabulary) -> dict[str, Any]:
    kinds = ["full_attention" if shape.is_global(layer) else "sliding_attention" for layer in range(shape.layers)]
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "attention_bias": False,
        "attn_logit_softcapping": None,
        "bos_token_id": vocabulary.bos,
        "dtype": "float32",
        "eos_token_id": vocabulary.eos,
        "final_logit_softcapping": None,
        "head_dim": shape.head_dim,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "layer_types": kinds,
        "max_position_embeddings": shape.context,
        "model_type": "gemma3_text",
        "num_attention_heads": shape.heads,
        "num_hidden_layers": shape.layers,
        "num_key_value_heads": shape.kv_heads,
        "pad_token_id": vocabulary.pad,
        "query_pre_attn_scalar": shape.head_dim,
        "rms_norm_eps": shape.norm_epsilon,
        "rope_local_base_freq": LOCAL_ROPE_BASE,
        "rope_scaling": None,
        "rope_theta": shape.rope_base,
        "sliding_window": shape.window,
        "tie_word_embeddings": True,
        "use_cache": True,
        "vocab_size": shape.vocab,
    }


def write_text_files(directory: Path, shape: GemmaShape, vocabulary: Vocabulary) -> None:
    tokenizer_from_vocabulary(vocabulary).save(str(directory / "tokenizer.json"), pretty=False)
    roles = {name: getattr(vocabulary, name) for name in ("bos", "eos", "pad", "unk")}
    names = {f"{name}_token": vocabulary.tokens[index] for name, index in roles.items()}
    ids = {f"{name}_token_id": roles[name] for name in ("bos", "eos", "pad")}
    tokenizer_config = {
        "add_bos_token": True,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": shape.context,
        "tokenizer_class": "GemmaTokenizerFast",
        **names,
    }
    documents = {
        "config.json": config_json(shape, vocabulary),
        "generation_config.json": {"_from_model_config": True, **ids},
        "tokenizer_config.json": tokenizer_config,
        "special_tokens_map.json": names,
    }
    for name, document in documents.items():
        (directory / name).write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


@contextmanager
def joined(parts: Sequence[Path], beside: Path) -> Iterator[Path]:
    """One file with the content of all parts, beside the target for as long as it is needed; a single part is it."""
    if len(parts) == 1:
        yield parts[0]
        return
    with tempfile.NamedTemporaryFile(dir=beside, prefix=".parts-") as whole:
        for part in parts:
            with part.open("rb") as opened:
                shutil.copyfileobj(opened, whole)
        whole.flush()
        yield Path(whole.name)


def export(parts: Sequence[Path], target: Path) -> None:
    """Write the export of the file in `parts` as the new directory `target`, or nothing. Raises ExportError."""
    if target.exists():
        raise ExportError(f"{target} exists; remove it first, or name another directory")
    missing = [part for part in parts if not part.is_file()]
    if missing:
        raise ExportError(f"{missing[0]} is not a file")
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{target.name}.partial-", dir=target.parent))
    try:
        with joined(parts, partial) as source:
            file = GgufFile(source)
            shape, vocabulary = read_shape(file), read_vocabulary(file)
            write_text_files(partial, shape, vocabulary)
            model = GemmaGraph(file, shape).build()
            ir.save(model, partial / "model.onnx", external_data="model.onnx_data", callback=report_progress)
        partial.chmod(0o755)  # mkdtemp's 0700 is for secrets
        partial.rename(target)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="export_gemma3.py", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("gguf", type=Path, nargs="+", help="a Gemma 3 text GGUF file, or its parts in order")
    parser.add_argument("out_dir", type=Path, help="the directory to make; it must not exist")
    options = parser.parse_args(arguments)
    try:
        export(options.gguf, options.out_dir)
    except ExportError as error:
        print(f"export_gemma3: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
