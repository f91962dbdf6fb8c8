"""The exporter against two references: a Llama in numpy that reads GGUF order, and transformers' recorded goldens."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gguf
import jinja2.sandbox
import numpy as np
import onnx
import onnxruntime
import pytest
from tokenizers import Tokenizer

from tools import export_smollm2

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

ROOT = Path(__file__).resolve().parents[2]
GOLDENS = json.loads((ROOT / "tests" / "fixtures" / "smollm2_goldens.json").read_text(encoding="utf-8"))
PROMPTS = GOLDENS["prompts"]

# Float32 rounding: along the deepest path of the tiny model lie about 15 sums of at most 96 products, each within
# 96 * 2^-24 of its value in the worst case: 15 * 96 * 6e-8 = 9e-5 of the largest logit.
TINY_TOLERANCE = 1e-4
# The real model: 4e-5 from transformers' recorded logits on the machine that recorded them (2026-12, logits up to 30).
# Another processor adds in another order: 25 times that. A wrong mask, position or weight moves logits by 0.1 to 10.
REAL_TOLERANCE = 1e-3


# ---- a tiny GGUF file and its reference ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Tiny:
    """A random two-layer Llama with grouped heads; weights as llama.cpp stores them, by GGUF name."""

    layers: int = 2
    hidden: int = 32
    intermediate: int = 96
    heads: int = 4
    kv_heads: int = 2
    context: int = 64
    epsilon: float = 1e-5
    rope_base: float = 100.0
    tied: bool = True
    weights: dict[str, NDArray[np.float32]] = field(default_factory=dict)

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads


SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MERGES = ("h e", "l l", "he ll", "hell o", "1 2", "Ġ w")
TEMPLATE = "{% for message in messages %}<|im_start|>{{ message['content'] }}<|im_end|>{% endfor %}"


def byte_characters() -> list[str]:
    """GPT-2's 256 stand-ins for bytes, in byte order: printable Latin-1 as itself, the others from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) if byte in printable else chr(0x100 + others.index(byte)) for byte in range(256)]


def tokens() -> list[str]:
    return [*SPECIALS, *byte_characters(), *(merge.replace(" ", "") for merge in MERGES)]


def tiny_model(*, tied: bool) -> Tiny:
    """Weights loud enough that attention, mask and positions decide the logits."""
    generator = np.random.default_rng(7)
    tiny = Tiny(tied=tied)

    def matrix(rows: int, columns: int, scale: float) -> NDArray[np.float32]:
        return np.asarray(generator.normal(size=(rows, columns)) * scale / np.sqrt(columns), dtype=np.float32)

    # A multiple of 2^-7 up to 127 * 2^-7, the largest in every block of 32: Q8_0 keeps such a matrix exactly.
    embedding = generator.integers(-127, 128, size=(len(tokens()), tiny.hidden))
    embedding[:, 0] = 127
    weights = tiny.weights
    weights["token_embd.weight"] = (embedding / 128).astype(np.float32)
    weights["output_norm.weight"] = generator.uniform(0.5, 1.5, tiny.hidden).astype(np.float32)
    if not tied:
        weights["output.weight"] = matrix(len(tokens()), tiny.hidden, 1)
    kv = tiny.kv_heads * tiny.head_dim
    for layer in range(tiny.layers):
        block = f"blk.{layer}."
        for name, rows, columns, scale in (
            ("attn_q", tiny.hidden, tiny.hidden, 3),
            ("attn_k", kv, tiny.hidden, 3),
            ("attn_v", kv, tiny.hidden, 2),
            ("attn_output", tiny.hidden, tiny.hidden, 2),
            ("ffn_gate", tiny.intermediate, tiny.hidden, 2),
            ("ffn_up", tiny.intermediate, tiny.hidden, 2),
            ("ffn_down", tiny.hidden, tiny.intermediate, 2),
        ):
            weights[f"{block}{name}.weight"] = matrix(rows, columns, scale)
        for name in ("attn_norm", "ffn_norm"):
            weights[f"{block}{name}.weight"] = generator.uniform(0.5, 1.5, tiny.hidden).astype(np.float32)
    return tiny


def write_gguf(
    path: Path, tiny: Tiny, change: Callable[[gguf.GGUFWriter], None] = lambda _: None, **fields: str
) -> None:
    """Write `tiny`; `fields` replace metadata strings, `change` may add to the file."""
    writer = gguf.GGUFWriter(path, fields.get("architecture", "llama"))
    for key, number in (
        ("block_count", tiny.layers),
        ("context_length", tiny.context),
        ("embedding_length", tiny.hidden),
        ("feed_forward_length", tiny.intermediate),
        ("attention.head_count", tiny.heads),
        ("attention.head_count_kv", tiny.kv_heads),
        ("rope.dimension_count", tiny.head_dim),
    ):
        writer.add_uint32(f"llama.{key}", number)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", tiny.epsilon)
    writer.add_float32("llama.rope.freq_base", tiny.rope_base)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(fields.get("pre", "smollm"))
    writer.add_token_list(tokens())
    writer.add_token_types([3] * len(SPECIALS) + [1] * (len(tokens()) - len(SPECIALS)))
    writer.add_token_merges(list(MERGES))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template(TEMPLATE)
    change(writer)
    for name, values in tiny.weights.items():
        if name == "token_embd.weight":
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def reference_logits(tiny: Tiny, ids: list[int]) -> NDArray[np.float64]:
    """Llama in float64, [len(ids), vocab], in llama.cpp's form: it rotates neighbouring pairs, so no reordering."""
    weights = {name: values.astype(np.float64) for name, values in tiny.weights.items()}
    length, dim = len(ids), tiny.head_dim
    angles = np.arange(length)[:, None] * tiny.rope_base ** (-np.arange(0, dim, 2) / dim)
    turns = np.exp(1j * angles)[:, None, :]

    def norm(values: NDArray[np.float64], name: str) -> NDArray[np.float64]:
        root = np.sqrt(np.mean(values**2, -1, keepdims=True) + tiny.epsilon)
        return np.asarray(values / root * weights[name])

    def rotated(values: NDArray[np.float64]) -> NDArray[np.float64]:
        pairs = (values[..., 0::2] + 1j * values[..., 1::2]) * turns
        return np.stack([pairs.real, pairs.imag], -1).reshape(values.shape)

    hidden = weights["token_embd.weight"][ids]
    for layer in range(tiny.layers):
        block = {name: weights[f"blk.{layer}.{name}.weight"] for name in export_smollm2.BLOCK_MATRICES}
        normed = norm(hidden, f"blk.{layer}.attn_norm.weight")
        query = rotated((normed @ block["attn_q"].T).reshape(length, tiny.heads, dim))
        key = rotated((normed @ block["attn_k"].T).reshape(length, tiny.kv_heads, dim))
        value = (normed @ block["attn_v"].T).reshape(length, tiny.kv_heads, dim)
        attended = np.zeros_like(query)
        for head in range(tiny.heads):
            group = head // (tiny.heads // tiny.kv_heads)
            for position in range(length):
                scores = key[: position + 1, group] @ query[position, head] / np.sqrt(dim)
                shares = np.exp(scores - scores.max())
                attended[position, head] = shares / shares.sum() @ value[: position + 1, group]
        hidden = hidden + attended.reshape(length, -1) @ block["attn_output"].T
        normed = norm(hidden, f"blk.{layer}.ffn_norm.weight")
        gate = normed @ block["ffn_gate"].T
        hidden = hidden + (gate / (1 + np.exp(-gate)) * (normed @ block["ffn_up"].T)) @ block["ffn_down"].T
    head_weights = weights["token_embd.weight" if tiny.tied else "output.weight"]
    return np.asarray(norm(hidden, "output_norm.weight") @ head_weights.T)


# ---- running an export ---------------------------------------------------------------------------------------------


class Runner:
    """An export under plain ONNX Runtime, fed as optimum feeds it."""

    def __init__(self, directory: Path) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 2
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        self._session = onnxruntime.InferenceSession(
            str(directory / "model.onnx"), options, providers=["CPUExecutionProvider"]
        )
        self._past = [value for value in self._session.get_inputs() if value.name.startswith("past_key_values.")]

    def empty(self, batch: int = 1) -> list[NDArray[np.float32]]:
        return [np.zeros((batch, value.shape[1], 0, value.shape[3]), np.float32) for value in self._past]

    def run(
        self, ids: list[list[int]], past: list[NDArray[np.float32]], padding: tuple[int, ...] = (0,)
    ) -> tuple[NDArray[np.float32], list[NDArray[np.float32]]]:
        """Logits [batch, new, vocab] and the new past; row r of the whole history starts with padding[r] pads."""
        before, total = past[0].shape[2], past[0].shape[2] + len(ids[0])
        mask = np.array([[0] * pads + [1] * (total - pads) for pads in padding], np.int64)
        feeds = {
            "input_ids": np.array(ids, np.int64),
            "attention_mask": mask,
            "position_ids": np.maximum(mask.cumsum(1) - 1, 0)[:, before:],
            **{value.name: array for value, array in zip(self._past, past, strict=True)},
        }
        logits, *present = self._session.run(None, feeds)
        return logits, present

    def logits(self, ids: list[int], chunk: int | None = None) -> NDArray[np.float32]:
        """Logits [len(ids), vocab] of one sequence, `chunk` tokens at a time with the past carried over."""
        past, parts = self.empty(), []
        for start in range(0, len(ids), chunk or len(ids)):
            logits, past = self.run([ids[start : start + (chunk or len(ids))]], past)
            parts.append(logits[0])
        return np.concatenate(parts)

    def padded(self, rows: list[list[int]], pad: int) -> list[NDArray[np.float32]]:
        """Logits of each row, run together as one batch padded on the left."""
        longest = max(len(row) for row in rows)
        padding = tuple(longest - len(row) for row in rows)
        ids = [[pad] * pads + row for pads, row in zip(padding, rows, strict=True)]
        logits, _ = self.run(ids, self.empty(len(rows)), padding)
        return [logits[index, pads:] for index, pads in enumerate(padding)]


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def tiny_export(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Tiny, Path]:
    tiny = tiny_model(tied=request.param)
    folder = tmp_path_factory.mktemp("tiny")
    write_gguf(folder / "tiny.gguf", tiny)
    assert export_smollm2.main([str(folder / "tiny.gguf"), str(folder / "export")]) == 0
    return tiny, folder / "export"


TINY_IDS = [int(token) for token in np.random.default_rng(3).integers(3, len(tokens()), 40)]


# ---- the exporter on a tiny model ----------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [None, 1, 7, 39])
def test_export_computes_llama(tiny_export: tuple[Tiny, Path], chunk: int | None) -> None:
    """The export equals the numpy Llama at every position, in one piece and in chunks with a past of any length."""
    tiny, directory = tiny_export
    expected = reference_logits(tiny, TINY_IDS)
    actual = Runner(directory).logits(TINY_IDS, chunk)
    assert np.abs(actual - expected).max() <= TINY_TOLERANCE * np.abs(expected).max()


def test_reference_feels_order(tiny_export: tuple[Tiny, Path]) -> None:
    """The comparison can fail: exchanging two early tokens moves the last logits far beyond the tolerance."""
    tiny, _ = tiny_export
    exchanged = [TINY_IDS[1], TINY_IDS[0], *TINY_IDS[2:]]
    moved = np.abs(reference_logits(tiny, exchanged)[-1] - reference_logits(tiny, TINY_IDS)[-1]).max()
    assert moved > 100 * TINY_TOLERANCE * np.abs(reference_logits(tiny, TINY_IDS)).max()


def test_left_padded_batch_equals_alone(tiny_export: tuple[Tiny, Path]) -> None:
    """Rows of 1, 5 and 40 tokens in one left-padded batch each equal the row alone, and nothing is NaN."""
    tiny, directory = tiny_export
    rows = [TINY_IDS[:1], TINY_IDS[4:9], TINY_IDS]
    for row, actual in zip(rows, Runner(directory).padded(rows, pad=2), strict=True):
        expected = reference_logits(tiny, row)
        assert np.abs(actual - expected).max() <= TINY_TOLERANCE * np.abs(expected).max()


def test_padding_in_past_stays_hidden(tiny_export: tuple[Tiny, Path]) -> None:
    """A left-padded batch goes on token by token as the row alone: the pads in its past are never seen."""
    tiny, directory = tiny_export
    runner, pads, split = Runner(directory), 6, 20
    logits, past = runner.run([[2] * pads + TINY_IDS[:split]], runner.empty(), (pads,))
    for position in range(split, len(TINY_IDS)):
        logits, past = runner.run([[TINY_IDS[position]]], past, (pads,))
    expected = reference_logits(tiny, TINY_IDS)
    assert np.abs(logits[0, 0] - expected[-1]).max() <= TINY_TOLERANCE * np.abs(expected).max()


def test_no_query_is_without_keys(tiny_export: tuple[Tiny, Path], tmp_path: Path) -> None:
    """Even a padding query sees a key: runtimes disagree on an empty row (zeros or NaN), so the export has none."""
    _, directory = tiny_export
    model = onnx.load(directory / "model.onnx")
    (mask,) = {node.input[3] for node in model.graph.node if node.op_type == "Attention"}
    model.graph.output.append(onnx.helper.make_tensor_value_info(mask, onnx.TensorProto.BOOL, None))
    onnx.save(model, tmp_path / "model.onnx")
    runner = Runner(tmp_path)
    allowed = runner.run([TINY_IDS[:5], TINY_IDS[:5]], runner.empty(2), (0, 3))[1][-1]
    assert allowed[0, 0].tolist() == np.tri(5, dtype=bool).tolist()
    assert allowed[1, 0].sum(-1).tolist() == [1, 1, 1, 1, 2]


def test_file_layout(tiny_export: tuple[Tiny, Path]) -> None:
    """The directory holds exactly the files that optimum writes for a model with external data."""
    _, directory = tiny_export
    assert {path.name for path in directory.iterdir()} == {
        "model.onnx",
        "model.onnx_data",
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "chat_template.jinja",
    }
    assert (directory / "chat_template.jinja").read_text(encoding="utf-8") == TEMPLATE
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    assert (config["rms_norm_eps"], config["rope_theta"], config["head_dim"]) == (1e-5, 100.0, 8)


def test_graph_is_standard(tiny_export: tuple[Tiny, Path]) -> None:
    """The model passes onnx's full check with opset 23 alone and the usual inputs and outputs in the usual order."""
    _, directory = tiny_export
    onnx.checker.check_model(str(directory / "model.onnx"), full_check=True)
    model = onnx.load(directory / "model.onnx", load_external_data=False)
    assert [(opset.domain, opset.version) for opset in model.opset_import] == [("", 23)]
    pairs = [f"{layer}.{kind}" for layer in range(2) for kind in ("key", "value")]
    assert [value.name for value in model.graph.input] == [
        "input_ids",
        "attention_mask",
        "position_ids",
        *(f"past_key_values.{pair}" for pair in pairs),
    ]
    assert [value.name for value in model.graph.output] == ["logits", *(f"present.{pair}" for pair in pairs)]


def test_weights_are_stored_once(tiny_export: tuple[Tiny, Path]) -> None:
    """The data file holds each weight once, in float32, and two rotary tables: a tied head adds nothing."""
    tiny, directory = tiny_export
    tables = 2 * tiny.context * tiny.head_dim // 2
    elements = sum(values.size for values in tiny.weights.values()) + tables
    in_graph = 256  # onnx_ir leaves initializers of at most 256 bytes in the model file
    inline = sum(values.size for values in tiny.weights.values() if values.nbytes <= in_graph)
    assert (directory / "model.onnx_data").stat().st_size == 4 * (elements - inline)


def test_tokenizer_splits_digits_and_knows_specials(tiny_export: tuple[Tiny, Path]) -> None:
    """Digits stay alone although a merge joins them, control tokens are one id, and bytes survive the round trip."""
    _, directory = tiny_export
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    assert tokenizer.encode("<|im_start|>hello 12 w").tokens == ["<|im_start|>", "hello", "Ġ", "1", "2", "Ġw"]
    text = "hello 12\n\té 你好 😀"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_same_input_same_bytes(tiny_export: tuple[Tiny, Path], tmp_path: Path) -> None:
    """A second export of the same weights has the same bytes in every file."""
    tiny, directory = tiny_export
    write_gguf(tmp_path / "again.gguf", tiny)
    export_smollm2.export(tmp_path / "again.gguf", tmp_path / "again")
    for path in sorted(directory.iterdir()):
        assert path.read_bytes() == (tmp_path / "again" / path.name).read_bytes(), path.name


# ---- refusals ------------------------------------------------------------------------------------------------------


def add_bias(writer: gguf.GGUFWriter) -> None:
    writer.add_tensor("blk.0.attn_q.bias", np.zeros(32, np.float32))


def add_scaling(writer: gguf.GGUFWriter) -> None:
    writer.add_string("llama.rope.scaling.type", "yarn")


def add_partial_rotation(writer: gguf.GGUFWriter) -> None:
    writer.add_uint32("llama.attention.key_length", 16)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"architecture": "qwen2"}, "architecture 'qwen2'"),
    ({"pre": "llama-bpe"}, "tokenizer .*llama-bpe"),
    ({"change": add_bias}, "blk.0.attn_q.bias"),
    ({"change": add_scaling}, "rope scaling 'yarn'"),
    ({"change": add_partial_rotation}, "8 of 16 head dimensions"),
]


@pytest.mark.parametrize(("fault", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_unfaithful_files_are_refused(tmp_path: Path, fault: dict[str, Any], message: str) -> None:
    """A file that this graph would compute wrongly is refused by name of the trouble, and no directory appears."""
    write_gguf(tmp_path / "tiny.gguf", tiny_model(tied=True), **fault)
    with pytest.raises(export_smollm2.ExportError, match=message):
        export_smollm2.export(tmp_path / "tiny.gguf", tmp_path / "export")
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.gguf"]


def test_existing_directory_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An existing target is refused with exit code 1 and keeps its content."""
    write_gguf(tmp_path / "tiny.gguf", tiny_model(tied=True))
    (tmp_path / "export").mkdir()
    (tmp_path / "export" / "mine").touch()
    assert export_smollm2.main([str(tmp_path / "tiny.gguf"), str(tmp_path / "export")]) == 1
    assert "exists" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "export").iterdir()] == ["mine"]


@pytest.mark.parametrize("content", [None, b"", b"not a GGUF file, but long enough to read a header from"])
def test_unreadable_file_is_refused(tmp_path: Path, content: bytes | None) -> None:
    """A missing, empty or foreign file is an ExportError that names it."""
    source = tmp_path / "weights.gguf"
    if content is not None:
        source.write_bytes(content)
    with pytest.raises(export_smollm2.ExportError, match=r"weights\.gguf"):
        export_smollm2.export(source, tmp_path / "export")


def test_failure_while_writing_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk in the middle of the weights leaves neither the directory nor a partial one."""

    def full_disk(*_: object) -> None:
        raise OSError(28, "No space left on device")

    write_gguf(tmp_path / "tiny.gguf", tiny_model(tied=True))
    monkeypatch.setattr(export_smollm2, "report_progress", full_disk)
    with pytest.raises(OSError, match="No space left"):
        export_smollm2.export(tmp_path / "tiny.gguf", tmp_path / "export")
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.gguf"]


# ---- the real model ------------------------------------------------------------------------------------------------


def demo_model() -> Path:
    directory = Path(os.environ.get("RESIDENTD_DEMO_MODEL", ROOT / ".cache" / "demo" / "smollm2-135m-instruct"))
    if not (directory / "model.onnx").is_file():
        pytest.fail(f"no demo model in {directory}: run ./tools/fetch_demo_model, or set RESIDENTD_DEMO_MODEL")
    return directory


@pytest.fixture(scope="module")
def real() -> Runner:
    return Runner(demo_model())


@pytest.fixture(scope="module")
def real_tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(demo_model() / "tokenizer.json"))


def golden_id(golden: dict[str, Any]) -> str:
    return f"{len(golden['prompt_ids'])}-tokens"


@pytest.mark.real_model
@pytest.mark.parametrize("golden", PROMPTS, ids=golden_id)
def test_real_answers_equal_transformers(real: Runner, golden: dict[str, Any]) -> None:
    """After every prefix of transformers' greedy answer the export's choice is the next token of it."""
    prompt, answer = golden["prompt_ids"], golden["greedy_ids"]
    logits = real.logits([*prompt, *answer[:-1]])[len(prompt) - 1 :]
    assert logits.argmax(-1).tolist() == answer
    top = golden["top_logits"]
    assert np.abs(logits[0, top["ids"]] - top["values"]).max() <= REAL_TOLERANCE


@pytest.mark.real_model
@pytest.mark.parametrize("golden", [PROMPTS[index] for index in (0, 3, 10)], ids=golden_id)
def test_real_generation_equals_transformers(real: Runner, golden: dict[str, Any]) -> None:
    """Generating with the past, one token a step, gives transformers' greedy answer."""
    logits, past = real.run([golden["prompt_ids"]], real.empty())
    answer = []
    for _ in golden["greedy_ids"]:
        answer.append(int(logits[0, -1].argmax()))
        logits, past = real.run([[answer[-1]]], past)
    assert answer == golden["greedy_ids"]


@pytest.mark.real_model
def test_real_chunks_equal_whole(real: Runner) -> None:
    """The 307-token prompt in chunks of 64 has the logits of the prompt in one piece, at every position."""
    ids = max((golden["prompt_ids"] for golden in PROMPTS), key=len)
    assert np.abs(real.logits(ids, chunk=64) - real.logits(ids)).max() <= REAL_TOLERANCE


@pytest.mark.real_model
def test_real_padded_batch_equals_alone(real: Runner) -> None:
    """Prompts of 1, 5 and 37 tokens in one left-padded batch have the logits they have alone."""
    rows = [PROMPTS[index]["prompt_ids"] for index in (0, 2, 9)]
    for row, together in zip(rows, real.padded(rows, pad=2), strict=True):
        assert np.abs(together - real.logits(row)).max() <= REAL_TOLERANCE


@pytest.mark.real_model
def test_real_tokenizer_equals_transformers(real_tokenizer: Tokenizer) -> None:
    """tokenizer.json alone encodes and decodes as transformers (and, for encodings, llama.cpp) did."""
    for golden in GOLDENS["encode"]:
        assert real_tokenizer.encode(golden["text"]).ids == golden["ids"]
        assert real_tokenizer.encode(golden["text"], add_special_tokens=False).ids == golden["ids_without_special"]
    for golden in GOLDENS["decode"]:
        assert real_tokenizer.decode(golden["ids"]) == golden["text"]
        assert real_tokenizer.decode(golden["ids"], skip_special_tokens=False) == golden["text_with_special"]


@pytest.mark.real_model
def test_real_chat_template_equals_transformers(real_tokenizer: Tokenizer) -> None:
    """The written template renders each recorded chat to transformers' text, which encodes to its ids."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string((demo_model() / "chat_template.jinja").read_text(encoding="utf-8"))
    for golden in GOLDENS["chat"]:
        text = template.render(messages=golden["messages"], add_generation_prompt=golden["add_generation_prompt"])
        assert text == golden["text"]
        assert real_tokenizer.encode(text, add_special_tokens=False).ids == golden["ids"]


def test_missing_demo_model_names_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the model these tests fail, not skip, and say which command makes it."""
    monkeypatch.setenv("RESIDENTD_DEMO_MODEL", str(tmp_path))
    with pytest.raises(pytest.fail.Exception, match=r"run \./tools/fetch_demo_model"):
        demo_model()
