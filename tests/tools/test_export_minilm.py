"""The BERT exporter against a BERT in numpy that knows nothing of graphs."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from safetensors.numpy import save_file

from tools import export_minilm

LAYERS, HIDDEN, HEADS, INNER, VOCAB, PLACES = 2, 16, 4, 24, 31, 20
EPSILON = 1e-12
# Float32 rounding along the deepest path: about 12 sums of at most 24 products, 12 * 24 * 2^-24 of the largest number.
RELATIVE = 2e-5
CONFIG = {
    "model_type": "bert",
    "hidden_act": "gelu",
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "layer_norm_eps": EPSILON,
}


def weights_of_a_tiny_bert() -> dict[str, Any]:
    rng = np.random.default_rng(7)

    def random(*shape: int) -> Any:
        return rng.standard_normal(shape).astype(np.float32) / 2

    found = {
        "embeddings.word_embeddings.weight": random(VOCAB, HIDDEN),
        "embeddings.position_embeddings.weight": random(PLACES, HIDDEN),
        "embeddings.token_type_embeddings.weight": random(2, HIDDEN),
        "embeddings.LayerNorm.weight": random(HIDDEN),
        "embeddings.LayerNorm.bias": random(HIDDEN),
        "embeddings.position_ids": np.arange(PLACES)[None],
        "pooler.dense.weight": random(HIDDEN, HIDDEN),
        "pooler.dense.bias": random(HIDDEN),
    }
    for layer in range(LAYERS):
        path = f"encoder.layer.{layer}"
        sizes = dict.fromkeys(
            ("attention.self.query", "attention.self.key", "attention.self.value", "attention.output.dense"),
            (HIDDEN, HIDDEN),
        )
        sizes |= {"intermediate.dense": (INNER, HIDDEN), "output.dense": (HIDDEN, INNER)}
        for name, (out, into) in sizes.items():
            found |= {f"{path}.{name}.weight": random(out, into), f"{path}.{name}.bias": random(out)}
        for name in ("attention.output.LayerNorm", "output.LayerNorm"):
            found |= {f"{path}.{name}.weight": random(HIDDEN), f"{path}.{name}.bias": random(HIDDEN)}
    return found


def bert(weights: dict[str, Any], ids: list[int], types: list[int]) -> Any:
    """float64 [tokens, hidden] of one text without padding."""
    given = {name: array.astype(np.float64) for name, array in weights.items()}

    def linear(name: str, x: Any) -> Any:
        return x @ given[f"{name}.weight"].T + given[f"{name}.bias"]

    def norm(name: str, x: Any) -> Any:
        centred = x - x.mean(-1, keepdims=True)
        scaled = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + EPSILON)
        return scaled * given[f"{name}.weight"] + given[f"{name}.bias"]

    def heads(x: Any) -> Any:
        return x.reshape(len(ids), HEADS, HIDDEN // HEADS).transpose(1, 0, 2)

    hidden = given["embeddings.word_embeddings.weight"][ids] + given["embeddings.token_type_embeddings.weight"][types]
    hidden = norm("embeddings.LayerNorm", hidden + given["embeddings.position_embeddings.weight"][: len(ids)])
    for layer in range(LAYERS):
        path = f"encoder.layer.{layer}"
        query, key, value = (heads(linear(f"{path}.attention.self.{n}", hidden)) for n in ("query", "key", "value"))
        scores = query @ key.transpose(0, 2, 1) / math.sqrt(HIDDEN // HEADS)
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        mixed = (shares / shares.sum(-1, keepdims=True) @ value).transpose(1, 0, 2).reshape(len(ids), HIDDEN)
        hidden = norm(f"{path}.attention.output.LayerNorm", hidden + linear(f"{path}.attention.output.dense", mixed))
        inner = linear(f"{path}.intermediate.dense", hidden)
        inner = inner / 2 * (1 + np.vectorize(math.erf)(inner / math.sqrt(2)))
        hidden = norm(f"{path}.output.LayerNorm", hidden + linear(f"{path}.output.dense", inner))
    return hidden


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    source = tmp_path / "source"
    source.mkdir()
    save_file(weights_of_a_tiny_bert(), source / "model.safetensors")
    (source / "config.json").write_text(json.dumps(CONFIG))
    (source / "tokenizer.json").write_text("{}")
    (source / "1_Pooling").mkdir()
    (source / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true}')
    return source


def test_the_export_computes_bert(checkpoint: Path, tmp_path: Path) -> None:
    """Two texts of different lengths in one padded batch, token types included, each as numpy has it alone."""
    assert export_minilm.main([str(checkpoint), str(tmp_path / "out")]) == 0
    session = onnxruntime.InferenceSession(tmp_path / "out" / "model.onnx", providers=["CPUExecutionProvider"])
    texts = [([3, 5, 7, 30, 2], [0, 0, 1, 1, 1]), ([9, 1], [0, 0])]
    ids, types = np.zeros((2, 5), np.int64), np.zeros((2, 5), np.int64)
    mask = np.zeros((2, 5), np.int64)
    for row, (tokens, kinds) in enumerate(texts):
        ids[row, : len(tokens)], types[row, : len(tokens)], mask[row, : len(tokens)] = tokens, kinds, 1
    (hidden,) = session.run(None, {"input_ids": ids, "attention_mask": mask, "token_type_ids": types})
    for row, (tokens, kinds) in enumerate(texts):
        wanted = bert(weights_of_a_tiny_bert(), tokens, kinds)
        assert np.abs(hidden[row, : len(tokens)] - wanted).max() <= RELATIVE * np.abs(wanted).max()
    assert (tmp_path / "out" / "1_Pooling" / "config.json").is_file()
    assert (tmp_path / "out" / "tokenizer.json").is_file()


@pytest.mark.parametrize("change", [{"model_type": "roberta"}, {"hidden_act": "relu"}])
def test_what_it_would_compute_wrongly_is_refused(checkpoint: Path, tmp_path: Path, change: dict[str, str]) -> None:
    """Another architecture leaves nothing behind."""
    (checkpoint / "config.json").write_text(json.dumps(CONFIG | change))
    assert export_minilm.main([str(checkpoint), str(tmp_path / "out")]) == 1
    assert not (tmp_path / "out").exists()


def test_a_weight_without_a_place_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    """A checkpoint with more in it is another model."""
    save_file(weights_of_a_tiny_bert() | {"encoder.extra": np.zeros(3, np.float32)}, checkpoint / "model.safetensors")
    assert export_minilm.main([str(checkpoint), str(tmp_path / "out")]) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]
