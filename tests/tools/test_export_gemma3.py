"""The Gemma 3 exporter against a Gemma in numpy that reads the GGUF file's own weights, and recorded encodings."""

from __future__ import annotations

import json
import string
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import gguf
import numpy as np
import onnxruntime
import pytest
from tokenizers import Tokenizer

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[np.float64]

ROOT = Path(__file__).resolve().parents[2]
GOLDENS = json.loads((ROOT / "tests" / "fixtures" / "gemma3_goldens.json").read_text(encoding="utf-8"))
TOLERANCE = 1e-4
"""Of logits up to 8: float32 rounding along some 60 sums of at most 48 products. A wrong window moves them by 0.1."""
TOKENS = 40

SPECIALS = ("<pad>", "<eos>", "<bos>", "<unk>")
DEFINED = ("\n\n", "  ", "<td>")
MERGED = ("▁t", "he", "▁the", "re", "▁there")
PIECES = [*SPECIALS, *DEFINED, *(f"<0x{byte:02X}>" for byte in range(256)), *MERGED, "▁", *string.ascii_lowercase]


@dataclass(frozen=True, slots=True)
class Tiny:
    """A random Gemma 3 of seven layers, the sixth of which sees all; weights by GGUF name, norms with the 1 added."""

    layers: int = 7
    hidden: int = 24
    intermediate: int = 48
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    context: int = 64
    window: int = 9
    rope_base: float = 500.0
    epsilon: float = 1e-6
    weights: dict[str, NDArray[np.float32]] = field(default_factory=dict)

    def draw(self) -> Tiny:
        rng = np.random.default_rng(3)

        def matrix(rows: int, columns: int, gain: float = 1.4) -> NDArray[np.float32]:
            return (gain * rng.standard_normal((rows, columns)) / columns**0.5).astype(np.float32)

        def norm(width: int) -> NDArray[np.float32]:
            return rng.uniform(0.5, 1.5, width).astype(np.float32)

        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        self.weights["token_embd"] = matrix(len(PIECES), self.hidden)
        self.weights["output_norm"] = norm(self.hidden)
        for layer in range(self.layers):
            block = {
                "attn_q": matrix(queries, self.hidden),
                "attn_k": matrix(keys, self.hidden),
                "attn_v": matrix(keys, self.hidden),
                "attn_output": matrix(self.hidden, queries),
                "ffn_gate": matrix(self.intermediate, self.hidden),
                "ffn_up": matrix(self.intermediate, self.hidden),
                "ffn_down": matrix(self.hidden, self.intermediate),
                "attn_q_norm": norm(self.head_dim),
                "attn_k_norm": norm(self.head_dim),
            }
            names = ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm")
            block |= {name: norm(self.hidden) for name in names}
            self.weights.update({f"blk.{layer}.{name}": array for name, array in block.items()})
        return self


def write(tiny: Tiny, path: Path, **changed: object) -> Path:
    """`changed` replaces metadata: a key with dots written as double underscores."""
    writer = gguf.GGUFWriter(path, str(changed.get("architecture", "gemma3")))
    writer.add_block_count(tiny.layers)
    writer.add_embedding_length(tiny.hidden)
    writer.add_feed_forward_length(tiny.intermediate)
    writer.add_head_count(tiny.heads)
    writer.add_head_count_kv(tiny.kv_heads)
    writer.add_key_length(tiny.head_dim)
    writer.add_context_length(tiny.context)
    writer.add_layer_norm_rms_eps(tiny.epsilon)
    writer.add_rope_freq_base(tiny.rope_base)
    writer.add_sliding_window(tiny.window)
    if "softcap" in changed:
        writer.add_final_logit_softcapping(30.0)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(PIECES)
    plain = len(SPECIALS) + len(DEFINED) + 256
    kinds = [3] * len(SPECIALS) + [4] * len(DEFINED) + [6] * 256 + [1] * (len(PIECES) - plain)
    writer.add_token_types(kinds)
    writer.add_token_scores([-1000.0] * plain + [-float(place) for place in range(len(PIECES) - plain)])
    for name, index in (("bos", 2), ("eos", 1), ("pad", 0), ("unk", 3)):
        getattr(writer, f"add_{name}_token_id")(index)
    writer.add_add_space_prefix(bool(changed.get("prefix", False)))
    for name, array in tiny.weights.items():
        writer.add_tensor(f"{name}.weight", array)
    if "tensor" in changed:
        writer.add_tensor(str(changed["tensor"]), np.zeros(4, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


# ---- the reference -------------------------------------------------------------------------------------------------


def reference(tiny: Tiny, ids: list[int]) -> Array:
    """Logits [tokens, vocab] in float64, by the paper's formulas: no cache, one head after the other."""
    weights = {name: array.astype(np.float64) for name, array in tiny.weights.items()}

    def norm(rows: Array, name: str) -> Array:
        return rows / np.sqrt((rows**2).mean(-1, keepdims=True) + tiny.epsilon) * weights[name]

    hidden = weights["token_embd"][ids] * tiny.hidden**0.5
    for layer in range(tiny.layers):
        block = f"blk.{layer}"
        sees_all = layer == 5
        normed = norm(hidden, f"{block}.attn_norm")
        attended = np.empty((len(ids), tiny.heads * tiny.head_dim))
        for head in range(tiny.heads):
            own, shared = slices(head, tiny), slices(head * tiny.kv_heads // tiny.heads, tiny)
            query = norm(normed @ weights[f"{block}.attn_q"][own].T, f"{block}.attn_q_norm")
            key = norm(normed @ weights[f"{block}.attn_k"][shared].T, f"{block}.attn_k_norm")
            base = tiny.rope_base if sees_all else 10_000.0
            scores = rotated(query, base) @ rotated(key, base).T / tiny.head_dim**0.5
            distance = np.arange(len(ids))[:, None] - np.arange(len(ids))
            visible = (distance >= 0) & (sees_all | (distance < tiny.window))
            exponents = np.where(visible, np.exp(scores), 0)
            attended[:, own] = (
                exponents / exponents.sum(-1, keepdims=True) @ (normed @ weights[f"{block}.attn_v"][shared].T)
            )
        hidden = hidden + norm(attended @ weights[f"{block}.attn_output"].T, f"{block}.post_attention_norm")
        normed = norm(hidden, f"{block}.ffn_norm")
        gate, up = (normed @ weights[f"{block}.ffn_{part}"].T for part in ("gate", "up"))
        gelu = 0.5 * gate * (1 + np.tanh((2 / np.pi) ** 0.5 * (gate + 0.044715 * gate**3)))
        hidden = hidden + norm((gelu * up) @ weights[f"{block}.ffn_down"].T, f"{block}.post_ffw_norm")
    logits: Array = norm(hidden, "output_norm") @ weights["token_embd"].T
    return logits


def slices(head: int, tiny: Tiny) -> slice:
    return slice(head * tiny.head_dim, (head + 1) * tiny.head_dim)


def rotated(rows: Array, base: float) -> Array:
    half = rows.shape[1] // 2
    angles = np.arange(len(rows))[:, None] * base ** (-np.arange(half) / half)
    first, second = rows[:, :half], rows[:, half:]
    cos, sin = np.cos(angles), np.sin(angles)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=1)


# ---- the tests -----------------------------------------------------------------------------------------------------


def run_exporter(*arguments: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "tools" / "export_gemma3.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tiny, Path]:
    """A tiny model, given to the exporter in two parts."""
    directory = tmp_path_factory.mktemp("gemma3")
    tiny = Tiny().draw()
    content = write(tiny, directory / "tiny.gguf").read_bytes()
    parts = [directory / "tiny.part00", directory / "tiny.part01"]
    parts[0].write_bytes(content[:5000])
    parts[1].write_bytes(content[5000:])
    done = run_exporter(*parts, directory / "out")
    assert done.returncode == 0, done.stderr
    return tiny, directory / "out"


def read(session: onnxruntime.InferenceSession, ids: list[int], past: dict[str, NDArray]) -> tuple[NDArray, dict]:
    start = next(iter(past.values())).shape[2]
    total = start + len(ids)
    feeds = {
        "input_ids": np.array([ids]),
        "attention_mask": np.ones((1, total), np.int64),
        "position_ids": np.arange(start, total)[None],
    }
    names = [value.name for value in session.get_outputs()]
    results = dict(zip(names, session.run(names, feeds | past), strict=True))
    logits = results.pop("logits")[0]
    return logits, {name.replace("present", "past_key_values"): array for name, array in results.items()}


@pytest.mark.parametrize("cut", [TOKENS, 1, 9, 23])
def test_the_export_computes_gemma_3(exported: tuple[Tiny, Path], cut: int) -> None:
    """Logits of every position, four windows long, whole or continued from a cache, equal the reference's."""
    tiny, directory = exported
    session = onnxruntime.InferenceSession(str(directory / "model.onnx"), providers=["CPUExecutionProvider"])
    past = {
        value.name: np.zeros((1, tiny.kv_heads, 0, tiny.head_dim), np.float32)
        for value in session.get_inputs()
        if value.name.startswith("past")
    }
    ids = np.random.default_rng(1).integers(0, len(PIECES), TOKENS).tolist()
    expected = reference(tiny, ids)
    first, past = read(session, ids[:cut], past)
    rest = [read(session, ids[cut:], past)[0]] if cut < TOKENS else []
    assert np.abs(np.concatenate([first, *rest]) - expected).max() < TOLERANCE
    assert 1 < np.abs(expected).max() < 8


def test_the_tokenizer_joins_pieces_as_sentencepiece_does(exported: tuple[Tiny, Path]) -> None:
    """The best score first, user-defined pieces before all, blanks as ▁, bytes for the rest; the text comes back."""
    tokenizer = Tokenizer.from_file(str(exported[1] / "tokenizer.json"))

    def pieces(text: str) -> list[str]:
        return tokenizer.encode(text, add_special_tokens=False).tokens

    assert pieces("hello there") == ["he", "l", "l", "o", "▁there"]
    assert pieces("ather") == ["a", "t", "he", "r"]
    assert pieces("a  the\n\nb") == ["a", "▁▁", "t", "he", "\n\n", "b"]
    assert pieces("<td>é") == ["<td>", "<0xC3>", "<0xA9>"]
    assert tokenizer.encode("the").ids[0] == PIECES.index("<bos>")
    for text in ("hello there", "a  the\n\nb", "<td>é", " x ", "   y"):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text


REFUSED = {
    "another architecture": ({"architecture": "llama"}, "architecture 'llama'"),
    "a softcap": ({"softcap": True}, "softcap 30.0"),
    "a tensor without a place": ({"tensor": "blk.0.attn_q.bias"}, "the first is blk.0.attn_q.bias"),
    "a vocabulary with a leading blank": ({"prefix": True}, "without a leading blank only"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_it_would_write_wrongly_is_refused(tmp_path: Path, case: str) -> None:
    """Nothing is left behind, and the message says what was found."""
    changed, reason = REFUSED[case]
    source = write(Tiny().draw(), tmp_path / "tiny.gguf", **changed)
    done = run_exporter(source, tmp_path / "out")
    assert done.returncode == 1
    assert reason in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tiny.gguf"]


def test_an_existing_directory_is_kept(tmp_path: Path) -> None:
    """The exporter never writes over anything."""
    done = run_exporter(tmp_path / "tiny.gguf", tmp_path)
    assert done.returncode == 1
    assert "exists; remove it first" in done.stderr


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_real_tokenizer_is_sentencepieces() -> None:
    """262,144 pieces: the recorded encodings of SentencePiece itself."""
    done = subprocess.run([ROOT / "tools" / "fetch_gemma3"], capture_output=True, text=True, check=True)
    tokenizer = Tokenizer.from_file(str(Path(done.stdout.splitlines()[-1]) / "tokenizer.json"))
    for golden in GOLDENS["encode"]:
        assert tokenizer.encode(golden["text"], add_special_tokens=False).ids == golden["ids_without_special"]
