"""Write an export of random weights, as large as asked. usage: make_synthetic_export.py DIR --gib N [--text-from DIR]

The graph is the one of export_smollm2.py; the tokenizer and its files are those of another export. Nothing of it is
held in memory but one tensor at a time. For what only a large model shows: memory, disk and time of an install.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from export_smollm2 import DecoderGraph, LlamaShape

TEXT_FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
TEXT_FROM = Path(__file__).parent.parent / "tests/fixtures/exports/llama"
LAYERS_MAX = 1000


@dataclass(frozen=True, slots=True)
class SyntheticFile:
    """Weights by name, as GgufFile gives them: drawn from a generator that the name seeds."""

    layout: LlamaShape

    def shape(self, name: str) -> tuple[int, ...]:
        hidden, inner = self.layout.hidden, self.layout.intermediate
        queries, keys = self.layout.heads * self.layout.head_dim, self.layout.kv_heads * self.layout.head_dim
        shapes = {
            "token_embd": (self.layout.vocab, hidden),
            "output": (self.layout.vocab, hidden),
            "attn_q": (queries, hidden),
            "attn_k": (keys, hidden),
            "attn_v": (keys, hidden),
            "attn_output": (hidden, queries),
            "ffn_gate": (inner, hidden),
            "ffn_up": (inner, hidden),
            "ffn_down": (hidden, inner),
        }
        return shapes.get(name.split(".")[-2], (hidden,))

    def weights(self, name: str) -> npt.NDArray[np.float32]:
        dims = self.shape(name)
        if len(dims) == 1:
            return np.ones(dims, np.float32)
        generator = np.random.Generator(np.random.SFC64(zlib.crc32(name.encode())))
        drawn = generator.random(dims, np.float32)
        drawn -= np.float32(0.5)
        drawn *= np.float32(3.4 * dims[1] ** -0.5)  # keeps the size of what passes through
        return drawn


def layout_of(weight_bytes: int, *, context: int = 2048) -> LlamaShape:
    """A Llama of about `weight_bytes` of float32: as wide as its size suggests, and as many layers as it takes."""
    hidden = 2048 if weight_bytes >= 1 << 30 else 512
    kv_heads, head_dim, intermediate = hidden // 256, 64, hidden * 11 // 4
    vocab = 24 * hidden
    layer = 4 * (2 * hidden * hidden + 2 * hidden * kv_heads * head_dim + 3 * hidden * intermediate)
    layers = round((weight_bytes - 4 * vocab * hidden) / layer)
    if not 1 <= layers <= LAYERS_MAX:
        smallest = 4 * vocab * hidden + layer
        raise SystemExit(f"{weight_bytes:,} bytes make {layers} layers; at least {smallest:,} bytes are needed")
    return LlamaShape(
        layers=layers,
        hidden=hidden,
        intermediate=intermediate,
        heads=hidden // head_dim,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocab=vocab,
        context=context,
        norm_epsilon=1e-5,
        rope_base=10000.0,
        tied=True,
    )


def write_text(directory: Path, layout: LlamaShape, text_from: Path) -> None:
    for name in TEXT_FILES:
        shutil.copy(text_from / name, directory)
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    sizes = {"vocab_size": layout.vocab, "max_position_embeddings": layout.context, "hidden_size": layout.hidden}
    (directory / "config.json").write_text(json.dumps(config | sizes, indent=2), encoding="utf-8")


def make(directory: Path, weight_bytes: int, text_from: Path = TEXT_FROM) -> LlamaShape:
    """Write the export into `directory`, which must not exist."""
    layout = layout_of(weight_bytes)
    directory.mkdir(parents=True)
    write_text(directory, layout, text_from)
    model = DecoderGraph(SyntheticFile(layout), layout).build()
    ir.save(model, directory / "model.onnx", external_data="model.onnx_data")
    return layout


def main() -> None:
    parser = argparse.ArgumentParser(prog="make_synthetic_export.py", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--gib", type=float, required=True, help="of float32 weights")
    parser.add_argument("--text-from", type=Path, default=TEXT_FROM, help="an export whose tokenizer is copied")
    arguments = parser.parse_args()
    layout = make(arguments.directory, round(arguments.gib * (1 << 30)), arguments.text_from)
    print(f"{layout.layers} layers of {layout.hidden}, vocabulary {layout.vocab:,}", file=sys.stderr)


if __name__ == "__main__":
    main()
