from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from residentd.backend import onnxruntime as backend_module
from residentd.backend.onnxruntime import OnnxRuntimeBackend, RuntimeOptions
from residentd.backend.steps import StepArranger, StepArrays, runs_that_fit
from residentd.engine.probe import probe
from residentd.errors import AccuracyError, SourceError
from residentd.models.manifest import Engine
from residentd.types import RequestId, Row, StepPlan
from residentd_build import verify as module
from residentd_build.options import Options
from residentd_build.pipeline import build
from residentd_build.source import Source
from residentd_build.validate import validate
from residentd_build.verify import (
    CEILING_RELATIVE,
    FULL,
    ROUNDS,
    TOKEN_BY_TOKEN,
    Comparison,
    Export,
    Round,
    Track,
    VerifyResult,
    verify,
)

EXPORTS = Path(__file__).resolve().parent.parent / "fixtures" / "exports"
NAMES = (
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "smollm2",
    "tinyllama",
    "llama-rope-llama3",
    "llama-rope-linear",
    "llama-rope-yarn",
    "llama-rope-dynamic",
    "falcon3",
    "smollm3",
    "olmo2",
    "granite",
    "gemma2",
    "gemma3",
    "falcon",
)
SLOTS, STEP_TOKENS = 4, 48


@dataclass(frozen=True, slots=True)
class Built:
    source: Source
    directory: Path
    engine: Engine


def quiet(_fraction: float, _message: str) -> None:
    """Progress that nobody follows."""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Built]:
    """The engine of an export in tests/fixtures/exports, built once."""
    made: dict[str, Built] = {}

    def get(name: str) -> Built:
        if name not in made:
            stage = tmp_path_factory.mktemp(name)
            options = Options(name, slots=SLOTS, step_tokens=STEP_TOKENS)
            manifest = build(EXPORTS / name, stage, options, lambda *_: None, lambda _: None)
            made[name] = Built(validate(EXPORTS / name), stage, manifest.content.engine)
        return made[name]

    return get


def run(built: Built) -> VerifyResult:
    return verify(built.source, built.directory, built.engine, quiet)


# ---- what is right passes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_a_right_engine_passes(built: Callable[[str], Built], name: str) -> None:
    """Every architecture: all rows within a tenth of the bound, every greedy choice the export's, eight goldens."""
    result = run(built(name))
    agreement = result.agreement
    assert agreement.greedy_equal == agreement.greedy_total == agreement.positions > 400
    assert agreement.logit_diff_max < agreement.logit_diff_bound / 10
    assert len(result.goldens) == 8
    assert all(len(golden.output) == len(golden.statistics) == module.OUTPUT_TOKENS for golden in result.goldens)
    assert result.tolerance.spread < result.tolerance.bound / 10 == agreement.logit_diff_bound / 10


def test_large_weights_stay_in_their_files(built: Callable[[str], Built], monkeypatch: pytest.MonkeyPatch) -> None:
    """Past PACKED_BYTES_MAX nothing is packed or folded, neither of the export nor of the engine, and both agree."""
    made, opened = built("qwen3"), list[RuntimeOptions]()
    real = backend_module.new_session

    def spying(path: Path, options: RuntimeOptions, **more: bool) -> Any:
        opened.append(options)
        return real(path, options, **more)

    for user in (backend_module, module):
        monkeypatch.setattr(user, "new_session", spying)
    monkeypatch.setattr(module, "PACKED_BYTES_MAX", 0)
    agreement = run(made).agreement
    assert agreement.greedy_equal == agreement.greedy_total == agreement.positions > 400
    assert agreement.logit_diff_max < agreement.logit_diff_bound / 10
    assert opened == [module.MAPPED] * 3  # the export, the engine, and the engine with a whole context


def test_tokens_that_the_export_rules_out_do_not_widen_the_bound(tmp_path: Path) -> None:
    """With -1e9 for a padding id, bound and goldens are those of the model without it: noise in the others is seen."""
    masked = tmp_path / "masked"
    shutil.copytree(EXPORTS / "llama", masked)
    model = onnx.load(masked / "model.onnx")
    (producer,) = (node for node in model.graph.node if "logits" in node.output)
    producer.output[list(producer.output).index("logits")] = "all_logits"
    vocab = json.loads((masked / "config.json").read_text())["vocab_size"]
    model.graph.initializer.append(
        numpy_helper.from_array(np.where(np.arange(vocab) < vocab - 1, 0, -1e9).astype(np.float32), "rules_out")
    )
    model.graph.node.append(onnx.helper.make_node("Add", ["all_logits", "rules_out"], ["logits"], name="rule_out"))
    onnx.save(model, masked / "model.onnx")
    bounds = []
    for directory in (EXPORTS / "llama", masked):
        stage = tmp_path / f"stage-{directory.name}"
        stage.mkdir()
        manifest = build(directory, stage, Options("m", slots=SLOTS), lambda *_: None, lambda _: None)
        assert manifest.content.tolerance is not None
        bounds.append((manifest.agreement.logit_diff_bound, manifest.content.tolerance.bound))
    assert bounds[1] == pytest.approx(bounds[0], rel=0.2)
    assert probe(_Noisy(OnnxRuntimeBackend(stage, manifest.content.engine)), manifest.content)[0].missed > 0


class _Noisy:
    """A backend whose logits, but for the last token's, are noise."""

    def __init__(self, backend: OnnxRuntimeBackend) -> None:
        self._backend = backend
        self.limits = backend.limits

    def step(self, plan: StepPlan) -> np.ndarray:
        logits = self._backend.step(plan).copy()
        logits[:, :-1] = np.random.default_rng(1).standard_normal(logits[:, :-1].shape) * 30
        return logits

    def close(self) -> None:
        self._backend.close()


@pytest.mark.parametrize("name", ["fp16-llama", "bf16-llama", "genai-int4-llama"])
def test_weights_of_few_bits_are_always_packed(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Their kernels compute otherwise without it, or would widen them in every run."""
    monkeypatch.setattr(module, "PACKED_BYTES_MAX", 0)
    assert module.comparing(validate(EXPORTS / name)).packs


def test_the_result_is_the_same_every_time(built: Callable[[str], Built]) -> None:
    """Prompts, schedule and poison come from seeds: two verifications agree in every number."""
    assert run(built("llama")) == run(built("llama"))


@pytest.mark.parametrize("name", NAMES)
def test_the_reference_is_transformers(name: str) -> None:
    """The export read with its own past, token by token, gives the greedy ids that transformers recorded."""
    recorded = json.loads((EXPORTS / name / "goldens.json").read_text())
    export = Export(EXPORTS / name / "model.onnx")
    for prompt in recorded["prompts"]:
        track = module._follow(export, "golden", tuple(prompt["prompt_ids"]), len(prompt["greedy_ids"]))
        assert list(track.output) == prompt["greedy_ids"]


@pytest.mark.parametrize("name", NAMES)
def test_built_engines_are_exact(built: Callable[[str], Built], name: str) -> None:
    """A whole answer read at once, cut anywhere, and amid others: the same bits. Fusions must not cost that."""
    made = built(name)
    backend = OnnxRuntimeBackend(made.directory, made.engine)
    rng = np.random.default_rng(5)

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(rng.integers(0, made.engine.limits.vocab, count).tolist())

    def row(slot: int, start: int, chunk: tuple[int, ...]) -> Row:
        return Row(RequestId(slot), slot, start, chunk, samples=True)

    prompt = tokens(100)
    for start in range(0, 100, 40):
        whole = backend.step(StepPlan(0, (row(0, start, prompt[start : start + 40]),)))[0].copy()
    for cuts in ((1,) * 100, (7, 1, 1, 30, 1, 2, 1, 1, 1, 40, 15), (17, 33, 25, 25), (9, 25, 33, 33)):
        start = 0
        for count in cuts:
            others = [row(slot, int(rng.integers(0, 200)), tokens(int(rng.choice([1, 2])))) for slot in (0, 1, 3)]
            logits = backend.step(StepPlan(0, (*others, row(2, start, prompt[start : start + count]))))
            start += count
        np.testing.assert_array_equal(logits[-1], whole)


def test_progress_goes_from_0_to_1(built: Callable[[str], Built]) -> None:
    """Fractions never go back, stay within 0 and 1, and messages say which side is at work."""
    made, seen = built("llama"), []
    verify(made.source, made.directory, made.engine, lambda fraction, message: seen.append((fraction, message)))
    fractions = [fraction for fraction, _ in seen]
    assert fractions == sorted(fractions)
    assert 0 <= fractions[0] < 0.1
    assert 0.9 < fractions[-1] <= 1
    assert {message.split()[0] for _, message in seen} == {"loading", "export:", "engine:"}


@pytest.mark.parametrize(("context", "slots"), [(8, 1), (8, 2), (33, 1), (64, 6)])
def test_small_engines_are_verified_too(tmp_path: Path, context: int, slots: int) -> None:
    """The smallest context, a single slot: prompts are cut to fit, and the comparison still happens."""
    options = Options("small", context=context, slots=slots, step_tokens=STEP_TOKENS)
    manifest = build(EXPORTS / "llama", tmp_path, options, lambda *_: None, lambda _: None)
    assert manifest.agreement.greedy_equal == manifest.agreement.greedy_total > 50
    assert all(len(golden.prompt) + len(golden.output) <= context for golden in manifest.content.goldens)


# ---- what the rounds contain ---------------------------------------------------------------------------------------


def track(name: str, prompt: int, output: int) -> Track:
    return Track(name, (1,) * prompt, (2,) * output, np.zeros((output, 8), np.float32))


def steps(tracks: list[Track], plan: Round, built: Built) -> list[list[Any]]:
    backend = OnnxRuntimeBackend(built.directory, built.engine)
    return list(module._in_flight(tracks, plan, backend))


TRACKS = [
    track("a", 2, 16),
    track("b", 70, 16),
    track("c", 9, 16),
    track("d", 131, 16),
    track("e", 20, 16),
    track("f", 7, 16),
]


@pytest.mark.parametrize("plan", [*ROUNDS, TOKEN_BY_TOKEN, FULL], ids=lambda plan: plan.name)
def test_every_track_is_read_once_in_order(built: Callable[[str], Built], plan: Round) -> None:
    """Each position once and in order, one track a slot at a time, within the engine's slots and step_tokens_max."""
    done = [0] * len(TRACKS)
    owner: dict[int, int] = {}
    for parts in steps(TRACKS, plan, built("llama")):
        assert sum(part.end - part.start for part in parts) <= STEP_TOKENS
        assert len({part.slot for part in parts}) == len(parts) <= SLOTS
        for part in parts:
            assert part.start == done[part.track]
            assert owner.setdefault(part.slot, part.track) == part.track
            done[part.track] = part.end
            if part.end == len(TRACKS[part.track].fed):
                del owner[part.slot]
    assert done == [len(entry.fed) for entry in TRACKS]


def test_the_rounds_hold_every_situation(built: Callable[[str], Built]) -> None:
    """Ragged decodes, prefill beside decode, chunks of every kind, slots used again, padding that must be split."""
    made = built("llama")
    seen = set()
    context = made.engine.limits.context
    full = track("full", context - 4, 5)
    for plan, tracks in [*((plan, TRACKS) for plan in (*ROUNDS, TOKEN_BY_TOKEN)), (FULL, [full, *TRACKS])]:
        used: dict[int, int] = {}
        for parts in steps(tracks, plan, made):
            decodes = [part for part in parts if part.start >= len(tracks[part.track].prompt)]
            prefills = [part for part in parts if part not in decodes]
            rows = [part.row(tracks) for part in parts]
            seen |= {"mixed"} if decodes and prefills else set()
            seen |= {"ragged decode"} if len({part.start for part in decodes}) > 1 else set()
            seen |= {"later chunk"} if any(part.start for part in prefills) else set()
            seen |= {"chunk of one"} if any(part.end - part.start == 1 for part in prefills) else set()
            seen |= {"no samples"} if not any(part.samples(tracks) for part in parts) else set()
            seen |= {"split"} if len(runs_that_fit(rows, context + 1, exact=True)) > 1 else set()
            seen |= {"last position"} if any(part.end == context for part in parts) else set()
            seen |= {"idle slot"} if len(parts) <= max(part.slot for part in parts) else set()
            for part in parts:
                seen |= {"slot used again"} if used.setdefault(part.slot, part.track) != part.track else set()
    assert seen == {
        "mixed",
        "ragged decode",
        "later chunk",
        "chunk of one",
        "no samples",
        "split",
        "last position",
        "idle slot",
        "slot used again",
    }


# ---- planted bugs --------------------------------------------------------------------------------------------------


def edited(built: Built, directory: Path, edit: Callable[[onnx.ModelProto], None]) -> Built:
    """A copy of the engine with its graph or weights changed."""
    shutil.copytree(built.directory, directory, dirs_exist_ok=True)
    path = directory / built.engine.path
    model = onnx.load(path)
    edit(model)
    for leftover in path.parent.iterdir():
        leftover.unlink()
    onnx.save(model, path)
    return Built(built.source, directory, built.engine)


def attention(model: onnx.ModelProto) -> list[onnx.NodeProto]:
    return [node for node in model.graph.node if node.op_type == "GroupQueryAttention"]


def set_attribute(
    name: str, change: Callable[[Any], Any], *, layers: slice = slice(None)
) -> Callable[[onnx.ModelProto], None]:
    def edit(model: onnx.ModelProto) -> None:
        for node in attention(model)[layers]:
            (found,) = (attribute for attribute in node.attribute if attribute.name == name)
            value = change(onnx.helper.get_attribute_value(found))
            node.attribute.remove(found)
            node.attribute.append(onnx.helper.make_attribute(name, value))

    return edit


def weights(model: onnx.ModelProto) -> list[onnx.TensorProto]:
    return [
        tensor
        for tensor in model.graph.initializer
        if len(tensor.dims) == 2 and tensor.data_type == onnx.TensorProto.FLOAT
    ]


def replace(tensor: onnx.TensorProto, array: np.ndarray) -> None:
    tensor.CopyFrom(numpy_helper.from_array(array.astype(np.float32), tensor.name))


def swap_two_weights(model: onnx.ModelProto) -> None:
    used = [name for node in model.graph.node if node.op_type == "MatMul" for name in node.input]
    matrices = [tensor for tensor in weights(model) if tensor.name in used]
    first, second = next(
        (one, other)
        for index, one in enumerate(matrices)
        for other in matrices[index + 1 :]
        if list(one.dims) == list(other.dims)
    )
    one, other = numpy_helper.to_array(first), numpy_helper.to_array(second)
    replace(first, other)
    replace(second, one)


def scale_one_matrix(model: onnx.ModelProto) -> None:
    tensor = max(weights(model), key=lambda tensor: np.prod(tensor.dims))
    replace(tensor, numpy_helper.to_array(tensor) * 1.001)


def spoil_one_weight(model: onnx.ModelProto) -> None:
    tensor = max(weights(model), key=lambda tensor: np.prod(tensor.dims))
    array = numpy_helper.to_array(tensor).copy()
    array[array.shape[0] // 2] = np.nan
    replace(tensor, array)


def spoil_all_weights(model: onnx.ModelProto) -> None:
    for tensor in weights(model):
        replace(tensor, np.full(tensor.dims, np.nan))


def rotate_too_far(model: onnx.ModelProto) -> None:
    """Angles of later positions one position off, as a table built with a wrong length would have them."""
    names = set(attention(model)[0].input[7:9])
    tables = [tensor for tensor in model.graph.initializer if tensor.name in names]
    assert len(tables) == 2
    for tensor in tables:
        array = numpy_helper.to_array(tensor).copy()
        array[40:-1] = array[41:]
        replace(tensor, array)


def change_tables(
    change: Callable[[np.ndarray, np.ndarray], Sequence[np.ndarray]],
) -> Callable[[onnx.ModelProto], None]:
    """Other cos and sin [positions, dim / 2] in every layer."""

    def edit(model: onnx.ModelProto) -> None:
        tensors = {tensor.name: tensor for tensor in model.graph.initializer}
        for names in {tuple(node.input[7:9]) for node in attention(model)}:
            tables = [tensors[name] for name in names]
            for tensor, array in zip(tables, change(*map(numpy_helper.to_array, tables)), strict=True):
                replace(tensor, array)

    return edit


def unscaled(cos: np.ndarray, _sin: np.ndarray) -> Sequence[np.ndarray]:
    pairs = cos.shape[1]
    angles = np.arange(len(cos))[:, None] * 10_000.0 ** (-np.arange(pairs) / pairs)
    return np.cos(angles), np.sin(angles)


def without_factor(cos: np.ndarray, sin: np.ndarray) -> Sequence[np.ndarray]:
    return cos / np.hypot(cos, sin), sin / np.hypot(cos, sin)


def slower(cos: np.ndarray, sin: np.ndarray) -> Sequence[np.ndarray]:
    angles = np.unwrap(np.arctan2(sin, cos), axis=0) / 1.01
    return np.cos(angles), np.sin(angles)


def exchange_tables(model: onnx.ModelProto) -> None:
    first, second = attention(model)
    assert list(first.input[7:9]) != list(second.input[7:9])
    for place in (7, 8):
        first.input[place], second.input[place] = second.input[place], first.input[place]


def rotate_every_layer(model: onnx.ModelProto) -> None:
    tables = attention(model)[0].input[7:9]
    for node in attention(model):
        node.input[7:9] = tables
    set_attribute("do_rotary", lambda _: 1)(model)


def rotate_no_layer(model: onnx.ModelProto) -> None:
    for node in attention(model):
        node.input[7:9] = ["", ""]
    set_attribute("do_rotary", lambda _: 0)(model)


def leave_out(name: str) -> Callable[[onnx.ModelProto], None]:
    """The node's first input goes through it unchanged."""

    def edit(model: onnx.ModelProto) -> None:
        (node,) = (node for node in model.graph.node if node.name == name)
        node.CopyFrom(onnx.helper.make_node("Identity", node.input[:1], node.output[:1], name))

    return edit


def exchange_norms(model: onnx.ModelProto) -> None:
    query, key = (
        next(node for node in model.graph.node if f".0/self_attn/{part}_norm/" in node.name and len(node.input) == 2)
        for part in "qk"
    )
    query.input[1], key.input[1] = key.input[1], query.input[1]


def multiply_constants(number: float, factor: float) -> Callable[[onnx.ModelProto], None]:
    """Every constant of one element that is `number`."""

    def edit(model: onnx.ModelProto) -> None:
        arrays = [(tensor, numpy_helper.to_array(tensor)) for tensor in model.graph.initializer]
        found = [(tensor, array) for tensor, array in arrays if array.size == 1 and np.isclose(array.item(), number)]
        assert found
        for tensor, array in found:
            replace(tensor, array * factor)

    return edit


GRAPH_BUGS = {
    "two weights swapped": ("llama", swap_two_weights),
    "a matrix 0.1 % too large": ("llama", scale_one_matrix),
    "a row of NaN": ("llama", spoil_one_weight),
    "scale 0.5 % off": ("llama", set_attribute("scale", lambda scale: scale * 1.005)),
    "scale 0.5 % off in one layer": ("qwen3", set_attribute("scale", lambda scale: scale * 1.005, layers=slice(1, 2))),
    "window one short": ("mistral", set_attribute("local_window_size", lambda window: window - 1)),
    "window one long": ("mistral", set_attribute("local_window_size", lambda window: window + 1)),
    "window one long in one layer": (
        "mistral",
        set_attribute("local_window_size", lambda window: window + 1, layers=slice(1)),
    ),
    "no window": ("mistral", set_attribute("local_window_size", lambda _: -1)),
    "a window where there is none": ("llama", set_attribute("local_window_size", lambda _: 240)),
    "angles one position off from the 40th on": ("llama", rotate_too_far),
    "pairs rotated the other way": ("llama", set_attribute("rotary_interleaved", lambda flag: 1 - flag)),
    "frequencies not scaled": ("llama-rope-llama3", change_tables(unscaled)),
    "the tables' factor left out": ("llama-rope-yarn", change_tables(without_factor)),
    "positions scaled by 1 % more": ("llama-rope-linear", change_tables(slower)),
    "tables of local and global layers exchanged": ("gemma3", exchange_tables),
    "a layer rotated that is not": ("smollm3", rotate_every_layer),
    "a layer not rotated that is": ("smollm3", rotate_no_layer),
    "softcap left out": ("gemma2", set_attribute("softcap", lambda _: 0.0)),
    "softcap 1 % off in one layer": ("gemma2", set_attribute("softcap", lambda cap: cap * 1.01, layers=slice(1))),
    "softcap of the logits left out": ("gemma2", leave_out("/Tanh")),
    "local window one long beside a global layer": (
        "gemma2",
        set_attribute("local_window_size", lambda window: window + 1, layers=slice(1)),
    ),
    "local window one short beside a global layer": (
        "gemma3",
        set_attribute("local_window_size", lambda window: window - 1, layers=slice(1)),
    ),
    "the local window in the global layer": ("gemma3", set_attribute("local_window_size", lambda _: 24)),
    "no window in the local layer": ("gemma3", set_attribute("local_window_size", lambda _: -1)),
    "norms of queries and keys exchanged": ("gemma3", exchange_norms),
    "the norm after attention left out": ("olmo2", leave_out("/model/layers.1/post_attention_layernorm/Mul_1.norm")),
    "the residual multiplier 0.5 % off": ("granite", multiply_constants(0.6, 1.005)),
    "the embedding multiplier 0.5 % off": ("granite", multiply_constants(3.0, 1.005)),
    "the embedding scale 0.5 % off": ("gemma3", multiply_constants(32**0.5, 1.005)),
}


@pytest.mark.parametrize("bug", GRAPH_BUGS)
def test_a_wrong_engine_is_refused(built: Callable[[str], Built], tmp_path: Path, bug: str) -> None:
    """Every planted bug of graph or weights ends in AccuracyError, so nothing would be published."""
    name, edit = GRAPH_BUGS[bug]
    wrong = edited(built(name), tmp_path, edit)
    with pytest.raises(AccuracyError, match="Nothing was published"):
        run(wrong)


def rows_exchanged(arrays: StepArrays) -> None:
    arrays.logits_index[:] = np.roll(arrays.logits_index, 1)


def one_stale_entry(arrays: StepArrays) -> None:
    """A sequence that begins sees one position that its slot's last owner left."""
    begins = arrays.seqlens_k + 1 == arrays.query_lengths
    arrays.seqlens_k[begins & (arrays.query_lengths > 0)] += 1


def one_entry_lost(arrays: StepArrays) -> None:
    """A later chunk overwrites the last position before it."""
    later = arrays.seqlens_k + 1 > arrays.query_lengths
    arrays.seqlens_k[later] -= 1


def neighbours_exchanged(arrays: StepArrays) -> None:
    """The rows of two slots answer for each other."""
    if arrays.slots_used > 1 and arrays.query_lengths[0] == arrays.query_lengths[1] > 0:
        arrays.pack_index[[0, 1]] = arrays.pack_index[[1, 0]]


def padding_counted(arrays: StepArrays) -> None:
    """Every busy slot's padding is taken for history: only the longest of a ragged batch is right."""
    padding = np.minimum(arrays.pack_index.shape[1] - arrays.query_lengths, 255 - arrays.seqlens_k)
    busy = arrays.query_lengths > 0
    arrays.seqlens_k[busy] += padding[busy]


STEP_BUGS = [rows_exchanged, one_stale_entry, one_entry_lost, neighbours_exchanged, padding_counted]


@pytest.mark.parametrize("bug", STEP_BUGS, ids=lambda bug: bug.__name__)
def test_wrong_step_inputs_are_noticed(
    built: Callable[[str], Built], monkeypatch: pytest.MonkeyPatch, bug: Callable[[StepArrays], None]
) -> None:
    """Verification runs through the serving backend, so a bug in its step preparation is an install error too."""
    real = StepArranger.arrange

    def arrange(self: StepArranger, rows: Any) -> StepArrays:
        arrays = real(self, rows)
        bug(arrays)
        return arrays

    monkeypatch.setattr(StepArranger, "arrange", arrange)
    with pytest.raises(AccuracyError):
        run(built("llama"))


def test_caches_that_share_memory_are_noticed(built: Callable[[str], Built], monkeypatch: pytest.MonkeyPatch) -> None:
    """Two layers bound to one cache contaminate each other."""
    shared: dict[tuple[int, ...], np.ndarray] = {}
    real = backend_module._cache_memory

    def memory(cache: Any, slots: int, positions: int) -> np.ndarray:
        return shared.setdefault((slots, positions), real(cache, slots, positions))

    monkeypatch.setattr(backend_module, "_cache_memory", memory)
    with pytest.raises(AccuracyError):
        run(built("llama"))


# ---- the export's own faults ---------------------------------------------------------------------------------------


def spoiled_export(tmp_path: Path, edit: Callable[[onnx.ModelProto], None]) -> Export:
    model = onnx.load(EXPORTS / "llama" / "model.onnx")
    edit(model)
    onnx.save(model, tmp_path / "model.onnx")
    return Export(tmp_path / "model.onnx")


def test_an_export_with_nan_is_said_to_be_at_fault(tmp_path: Path) -> None:
    """An overflow of the export is not blamed on the engine."""
    export = spoiled_export(tmp_path, spoil_all_weights)
    with pytest.raises(AccuracyError, match="the export itself gives NaN or infinity after 3 tokens"):
        export.read((1, 2, 3))


def test_an_export_that_cannot_be_run_is_a_finding(tmp_path: Path) -> None:
    """Bytes that are no model, and a graph that fails when it runs, are SourceErrors with a way out."""
    (tmp_path / "model.onnx").write_bytes(b"not a model")
    with pytest.raises(SourceError, match=r"cannot run the export .*Export it again"):
        Export(tmp_path / "model.onnx")
    export = Export(EXPORTS / "llama" / "model.onnx")
    with pytest.raises(SourceError, match="cannot run the export"):
        export.read((1 << 30,))


def test_an_export_that_disagrees_with_itself_has_no_answer() -> None:
    """Noise at the ceiling still has a bound; above it the export is refused."""
    logits = np.full((1, 4), 10.0, np.float32)
    tracks = [Track("t", (1,), (2,), logits)]
    ceiling = CEILING_RELATIVE * 10
    assert module._bound(tracks, ceiling) == ceiling
    with pytest.raises(AccuracyError, match=r"differs from itself by 0\.011"):
        module._bound(tracks, ceiling * 1.1)


@pytest.mark.parametrize(
    ("scale", "noise", "expected"),
    [
        pytest.param(0.5, 0.0, 2e-5, id="small logits count as 1"),
        pytest.param(10.0, 0.0, 2e-4, id="the floor follows the largest logit"),
        pytest.param(10.0, 1e-5, 2e-4, id="noise below the floor"),
        pytest.param(10.0, 1e-4, 16e-4, id="noise above the floor"),
        pytest.param(10.0, 9e-3, 1e-2, id="never above the ceiling"),
    ],
)
def test_the_bound(scale: float, noise: float, expected: float) -> None:
    """max(2e-5 of the largest logit, 16 times the export's own noise), at most 1e-3 of the largest logit."""
    tracks = [Track("t", (1,), (2,), np.array([[0.0, -scale]], np.float32))]
    assert module._bound(tracks, noise) == pytest.approx(expected)


# ---- comparison and goldens ----------------------------------------------------------------------------------------


def test_the_comparison_counts_and_stops_at_the_bound() -> None:
    """A difference of the bound passes, the next float above does not; a turned choice within it is counted."""
    comparison = Comparison(0.25)
    comparison.check(np.array([1, 2, 3], np.float32), np.array([1, 2, 3.25], np.float32), "here")
    comparison.check(np.array([1, 3.2, 3], np.float32), np.array([1, 3, 3.1], np.float32), "here")
    agreement = comparison.agreement()
    assert (agreement.greedy_equal, agreement.greedy_total, agreement.positions) == (1, 2, 2)
    assert agreement.logit_diff_max == 0.25
    with pytest.raises(AccuracyError, match=r"differ from its export's by 0\.25, the bound is 0\.25: there"):
        comparison.check(np.array([np.nextafter(np.float32(0.25), 1)]), np.zeros(1, np.float32), "there")


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_nan_and_infinity_never_pass(value: float) -> None:
    """NaN compares false with every bound, so it is looked for first."""
    with pytest.raises(AccuracyError, match="NaN or infinity"):
        Comparison(1.0).check(np.array([value, 0], np.float32), np.zeros(2, np.float32), "there")
