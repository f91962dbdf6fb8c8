"""From the verified engine to what is published: every precision, the choice of auto, and what is refused."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from lowering import EXPORTS

from residentd.backend.modes import open_engine
from residentd.backend.onnxruntime import RuntimeOptions
from residentd.backend.steps import StepArranger, StepArrays
from residentd.engine.probe import probe
from residentd.errors import AccuracyError, OperatorError, StoreError
from residentd.models.checks import Speeds
from residentd.models.manifest import Engine, Manifest
from residentd_build import candidates as module
from residentd_build import inflight
from residentd_build.draft import Draft
from residentd_build.options import AUTO_KL_BOUND, KL_BOUNDS, Options, OptionsError, Weights
from residentd_build.pipeline import build
from residentd_build.precision import Scheme, scheme_for
from residentd_build.quality import Measured
from residentd_build.verify import opened

FILES = ["chat_template.jinja", "engine/model.onnx", "engine/weights.bin", "tokenizer.json"]
LOOSE = 20.0  # nats: tiny random models lose more than trained ones


def quiet(*_arguments: object) -> None:
    """Progress that nobody follows, and room without end."""


def built(stage: Path, name: str = "llama", **weights: Any) -> Manifest:
    options = Options("tiny", context=256, slots=3, step_tokens=48, weights=Weights(**weights))
    return build(EXPORTS / name, stage, options, quiet, quiet)


# ---- each precision ------------------------------------------------------------------------------------------------

PRECISIONS = {
    "fp32": (Weights(), "", "fp32"),
    "int8 by rows": (Weights("int8", kl_max=LOOSE), "row8; head int8; embedding int8", "int8"),
    "int8 by blocks": (Weights("int8", block=32, kl_max=LOOSE), "block 32; head int8; embedding int8", "int8"),
    "int4": (Weights("int4", kl_max=LOOSE), "block 32; head int8; embedding int8", "int4"),
    "int4, asymmetric, head as exported": (
        Weights("int4", symmetric=False, head="fp32", kl_max=LOOSE),
        "block 32 asymmetric; head fp32; embedding int8",
        "int4",
    ),
}


Made = Callable[[str], tuple[Path, Manifest]]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """The build of PRECISIONS by that name, and its stage; built once."""
    builds: dict[str, tuple[Path, Manifest]] = {}

    def get(name: str) -> tuple[Path, Manifest]:
        if name not in builds:
            stage = tmp_path_factory.mktemp("build")
            builds[name] = stage, built(stage, **asdict(PRECISIONS[name][0]))
        return builds[name]

    return get


@pytest.mark.parametrize("name", PRECISIONS)
def test_a_build_of_each_precision(made: Made, name: str) -> None:
    """Its files and no others, what its weights are, quality and cost measured, goldens that it passes itself."""
    _, described, precision = PRECISIONS[name]
    stage, manifest = made(name)
    engine, quality, cost = manifest.content.engine, manifest.quality, manifest.cost
    assert quality is not None
    assert cost is not None
    assert sorted(manifest.content.files) == FILES
    assert (engine.precision, engine.weights, engine.path) == (precision, described, "engine/model.onnx")
    assert quality.positions == 8 * 255
    assert quality.kl_mean <= quality.kl_bound == (KL_BOUNDS["fp32"] if precision == "fp32" else LOOSE)
    assert (quality.kl_mean > 1e-6) == (precision != "fp32")
    assert cost.file_bytes == sum(file.bytes for path, file in manifest.content.files.items() if "engine" in path)
    assert cost.memory_bytes > cost.file_bytes
    backend = open_engine(stage, engine)
    assert all(part.passed for part in probe(backend, manifest.content))
    backend.close()


PARTS = {
    "a head": (Weights("fp32", head="int8"), "head int8; embedding fp32", "int8", "fp32 with head int8"),
    "an embedding": (
        Weights("fp32", embedding="int8"),
        "head fp32; embedding int8",
        "int8",
        "fp32 with embedding int8",
    ),
    "a head in 4 bits, an embedding in 8": (
        Weights("fp32", embedding="int8", head="int4"),
        "head int4; embedding int8",
        "int4",
        "fp32 with embedding int8 and head int4",
    ),
    "a head beside 16 bits": (
        Weights("bf16", head="int8"),
        "head int8; embedding bf16",
        "int8",
        "bf16 with head int8",
    ),
}


@pytest.mark.parametrize("name", PARTS)
def test_a_build_of_which_only_a_part_is_quantised_is_a_quantised_one(tmp_path: Path, name: str) -> None:
    """It is made, called what it is, held to the bound of its coarsest part, and compared in flight with itself alone.

    Its goldens are its own, within a tolerance that its kernels ask for.
    """
    weights, described, coarsest, _ = PARTS[name]
    manifest = built(tmp_path, **asdict(weights))
    engine, quality, tolerance = manifest.content.engine, manifest.quality, manifest.content.tolerance
    assert (engine.precision, engine.weights) == (weights.precision, described)
    assert any(line.startswith("quantise: ") for line in manifest.build.passes)
    assert quality is not None
    assert tolerance is not None
    assert 1e-9 < quality.kl_mean <= quality.kl_bound == KL_BOUNDS[coarsest]
    assert quality.kl_in_flight is not None
    assert tolerance.bound_rms > 0
    backend = open_engine(tmp_path, engine)
    assert all(part.passed for part in probe(backend, manifest.content))
    backend.close()


@pytest.mark.parametrize("name", PARTS)
def test_a_part_past_its_bound_is_refused_by_its_name(tmp_path: Path, name: str) -> None:
    """What is wrong is not called plain fp32, which loses nothing."""
    weights, _, _, called = PARTS[name]
    with pytest.raises(AccuracyError, match=f"the {called} build loses too much"):
        built(tmp_path, **asdict(weights) | {"kl_max": 1e-6})


def test_a_scheme_is_called_by_what_is_unusual_in_it() -> None:
    """The blocks of the matrices, and a part that is not as the precision has it by itself."""
    names = {
        "fp32": scheme_for("fp32", head="fp32"),
        "fp16": scheme_for("fp16"),
        "fp16 with embedding fp32": scheme_for("fp16", embedding="fp32"),
        "int8 row8": scheme_for("int8", head="int8"),
        "int8 block 32 asymmetric with head int4": scheme_for("int8", block=32, symmetric=False, head="int4"),
        "int4 block 128": scheme_for("int4", block=128),
        "int4 block 32 with embedding int4 and head fp32": scheme_for("int4", embedding="same", head="fp32"),
    }
    assert [module.scheme_name(scheme) for scheme in names.values()] == list(names)


def test_quantised_weights_are_smaller(made: Made) -> None:
    """int4 < int8 < fp32, on disk."""
    costs = [made(name)[1].cost for name in ("int4", "int8 by rows", "fp32")]
    sizes = [cost.file_bytes for cost in costs if cost is not None]
    assert len(sizes) == 3
    assert sizes == sorted(set(sizes))


def test_the_first_engine_is_gone_before_the_second_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two engines are never on disk where one was asked for, and the room asked for is that of one."""
    real, seen, rooms = module.write_files, [], []

    def write(model: ir.Model, directory: Path, report: Any) -> None:
        seen.append([path.name for path in directory.parent.iterdir() if (path / "weights.bin").exists()])
        real(model, directory, report)

    monkeypatch.setattr(module, "write_files", write)
    for index, precision in enumerate(("int8", "auto")):
        stage = tmp_path / str(index)
        stage.mkdir()
        options = Options("tiny", context=256, weights=Weights(precision, kl_max=LOOSE))
        build(EXPORTS / "llama", stage, options, quiet, rooms.append)
    alone, *auto = seen
    assert alone == []
    assert auto == [["engine"]] * 4
    assert rooms[0] < rooms[1]


def test_no_room_is_said_before_anything_is_written(tmp_path: Path) -> None:
    """The room is asked for once, first."""

    def no_room(_needed: int) -> None:
        raise StoreError("no room")

    with pytest.raises(StoreError):
        build(EXPORTS / "llama", tmp_path, Options("tiny", weights=Weights("auto")), quiet, no_room)
    assert not list(tmp_path.rglob("*.bin"))
    assert not list(tmp_path.rglob("*.f32"))


# ---- what is refused -----------------------------------------------------------------------------------------------


def test_a_build_past_its_bound_is_refused(tmp_path: Path) -> None:
    """int4 of a tiny random model loses more than half a nat: the numbers, the bound, the way out."""
    with pytest.raises(AccuracyError, match=r"the int4 block 32 build loses too much: .* --kl-max \d") as refusal:
        built(tmp_path, precision="int4")
    assert "the bound is 0.5" in str(refusal.value)


def scales_too_large(tensor: ir.TensorProtocol) -> np.ndarray:
    return tensor.numpy() * np.float32(1.05)


def scales_exchanged(tensor: ir.TensorProtocol) -> np.ndarray:
    """Each output's scales are its neighbour's."""
    return np.roll(tensor.numpy(), 1, axis=0)


@pytest.mark.parametrize("change", [scales_too_large, scales_exchanged], ids=lambda change: change.__name__)
def test_a_wrong_quantisation_is_refused(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[ir.TensorProtocol], np.ndarray]
) -> None:
    """A fault in the pass is no matter of taste: the default bound of int8 catches it; the right pass is within."""
    real = module.quantise.run

    def run(draft: Draft, scheme: Scheme, importance: Any) -> str:
        line = real(draft, scheme, importance)
        scales = [
            value
            for node in draft.graph
            if node.op_type == "MatMulNBits"
            for value in node.inputs[2:3]
            if value is not None
        ]
        assert scales
        for value in scales:
            assert value.const_value is not None
            value.const_value = ir.tensor(change(value.const_value).astype(np.float32), name=value.name)
        return line

    right = made("int8 by blocks")[1].quality
    assert right is not None
    assert right.kl_mean < KL_BOUNDS["int8"]
    monkeypatch.setattr(module.quantise, "run", run)
    with pytest.raises(AccuracyError, match="loses too much"):
        built(tmp_path, precision="int8", block=32)


def rows_exchanged(arrays: StepArrays) -> None:
    arrays.logits_index[:] = np.roll(arrays.logits_index, 1)


def one_stale_entry(arrays: StepArrays) -> None:
    """A sequence that begins sees one position that its slot's last owner left."""
    begins = arrays.seqlens_k + 1 == arrays.query_lengths
    arrays.seqlens_k[begins & (arrays.query_lengths > 0)] += 1


def neighbours_exchanged(arrays: StepArrays) -> None:
    """The rows of two slots answer for each other."""
    if arrays.slots_used > 1 and arrays.query_lengths[0] == arrays.query_lengths[1] > 0:
        arrays.pack_index[[0, 1]] = arrays.pack_index[[1, 0]]


@pytest.fixture
def int8(made: Made) -> tuple[Path, Engine]:
    """An int8 build's directory and engine."""
    stage, manifest = made("int8 by rows")
    return stage, manifest.content.engine


PASSAGES = tuple(tuple(np.random.default_rng(seed).integers(0, 480, 200).tolist()) for seed in range(8))


def test_a_right_engine_answers_in_flight_as_alone(int8: tuple[Path, Engine]) -> None:
    """With whole rows of queries the kernels are exact: far below the bound, which is a hundredth of a wrong answer."""
    with opened(*int8, RuntimeOptions(), slots=inflight.SLOTS, context=inflight.CONTEXT_MAX) as backend:
        assert inflight.check_in_flight(backend, PASSAGES) < inflight.KL_IN_FLIGHT_MAX / 100


@pytest.mark.parametrize("bug", [rows_exchanged, one_stale_entry, neighbours_exchanged], ids=lambda bug: bug.__name__)
def test_a_fault_of_batching_is_noticed(
    int8: tuple[Path, Engine], monkeypatch: pytest.MonkeyPatch, bug: Callable[[StepArrays], None]
) -> None:
    """It is there only where sequences share steps: alone, each answers as before."""
    real = StepArranger.arrange

    def arrange(self: StepArranger, rows: Any) -> StepArrays:
        arrays = real(self, rows)
        if len(rows) > 1:
            bug(arrays)
        return arrays

    monkeypatch.setattr(StepArranger, "arrange", arrange)
    with (
        opened(*int8, RuntimeOptions(), slots=inflight.SLOTS, context=inflight.CONTEXT_MAX) as backend,
        pytest.raises(AccuracyError, match="answers otherwise in flight than alone: KL divergence"),
    ):
        inflight.check_in_flight(backend, PASSAGES)


def test_nan_in_flight_is_noticed() -> None:
    """NaN compares false with every bound."""
    with pytest.raises(AccuracyError, match="inf"):
        inflight.Divergence().check(np.array([np.nan, 0], np.float32), np.zeros(2, np.float32), "there")


# ---- auto ----------------------------------------------------------------------------------------------------------

# KL divergence, tokens/s of one sequence and of eight, in the order of the candidates that are tried.
RACES: dict[str, tuple[list[tuple[float, float, float]], float | None, int]] = {
    "the fastest is within the bound": (
        [(0, 20, 80), (0.03, 40, 110), (0.01, 39, 90), (0.04, 60, 70), (0.06, 90, 90)],
        None,
        1,
    ),
    "the fastest loses too much": ([(0, 20, 80), (0.06, 40, 110), (0.01, 39, 90), (0.4, 60, 95)], None, 2),
    "the operator's bound allows it": (
        [(0, 20, 80), (0.06, 40, 110), (0.01, 39, 90), (0.4, 60, 95), (0.41, 90, 99)],
        0.4,
        3,
    ),
    "the largest blocks are the fastest": (
        [(0, 20, 80), (0.06, 40, 110), (0.01, 39, 90), (0.03, 60, 95), (0.05, 90, 99)],
        None,
        4,
    ),
    "nothing is faster than fp32": (
        [(0, 20, 80), (0.03, 19, 80), (0.01, 10, 90), (0.04, 30, 53), (0.04, 39, 41)],
        None,
        0,
    ),
    "nothing else is within the bound": ([(0, 20, 80), (0.03, 40, 110), (0.01, 39, 90)], 0.001, 0),
}
CANDIDATES = (
    ("fp32", ""),
    ("int8", "row8"),
    ("int8", "block 32"),
    ("int4", "block 32"),
    ("int4", "block 128"),
)


@pytest.mark.parametrize("name", RACES)
def test_auto_keeps_the_fastest_within_the_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """By the geometric mean of both speeds; its files, its description, and the table with the rule remain.

    What is bound to lose more than something that is out is not made; the table says so.
    """
    race, bound, winner = RACES[name]
    figures, speeds = iter(race), list[list[float]]()

    def measure(*_arguments: object) -> Measured:
        kl_mean, *rates = next(figures)
        speeds.append(rates)
        return Measured(kl_mean, kl_mean, 20.0, 19.0, 0.9, 2040)

    def measure_speeds(*_arguments: object) -> Speeds:
        decode_one, decode_many = speeds.pop()
        return Speeds(decode_one=decode_one, decode_many=decode_many, rows=8, prefill=300.0)

    monkeypatch.setattr(module.quality, "measure", measure)
    monkeypatch.setattr(module, "measure_speeds", measure_speeds)
    manifest = built(tmp_path, precision="auto", kl_max=bound)
    assert next(figures, None) is None
    engine = manifest.content.engine
    precision, weights = CANDIDATES[winner]
    assert (engine.precision, engine.weights.partition(";")[0], engine.path) == (
        precision,
        weights,
        "engine/model.onnx",
    )
    assert sorted(manifest.content.files) == FILES
    table, (rule, *_busy) = manifest.build.candidates[: len(CANDIDATES)], manifest.build.candidates[len(CANDIDATES) :]
    assert [line.partition(":")[0] for line in table] == [" ".join(filter(None, entry)) for entry in CANDIDATES]
    assert [line.endswith(", chosen") for line in table] == [index == winner for index in range(len(CANDIDATES))]
    assert ["out)" in line for line in table[: len(race)]] == [entry[0] > (bound or AUTO_KL_BOUND) for entry in race]
    assert all(": not tried, it loses more than int" in line for line in table[len(race) :])
    assert "geometric mean" in rule
    assert manifest.quality is not None
    assert manifest.quality.kl_mean == race[winner][0]
    backend = open_engine(tmp_path, engine)
    assert all(part.passed for part in probe(backend, manifest.content))
    backend.close()


@pytest.mark.parametrize(("load", "lines"), [(3.0, 0), (3.1, 1)])
def test_auto_says_when_the_machine_was_busy(load: float, lines: int) -> None:
    """Above one and a half processes for each processor the speeds are called uncertain, with what to do."""
    found = list(module._busy(load, 2))
    assert len(found) == lines
    assert all("load 3.1 on 2 processors" in line and "name a precision" in line for line in found)


def test_auto_shows_each_candidate_as_it_goes(tmp_path: Path) -> None:
    """Progress never goes back; each candidate is quantised, then measured, and its row is shown."""
    seen: list[tuple[str, float, str]] = []
    options = Options("tiny", context=64, weights=Weights("auto", kl_max=LOOSE))
    build(EXPORTS / "llama", tmp_path, options, lambda *event: seen.append(event), quiet)
    fractions = [fraction for _, fraction, _ in seen]
    assert fractions == sorted(fractions)
    stages = [stage for index, (stage, _, _) in enumerate(seen) if not index or seen[index - 1][0] != stage]
    assert stages[-10:] == ["measure", *["quantise", "measure"] * 4, "publish"]
    rows = [message for _, _, message in seen if "tokens/s" in message]
    assert [row.partition(":")[0] for row in rows] == ["int8 row8", "int8 block 32", "int4 block 32", "int4 block 128"]


# ---- options -------------------------------------------------------------------------------------------------------

REFUSED = {
    "precision": ({"precision": "int9"}, "'int9'; fp32, fp16, bf16, int8, int4 and auto are possible"),
    "auto with details": ({"precision": "auto", "head": "fp32"}, "auto chooses --head itself"),
    "block of a float": ({"block": 32}, "fp32 has no blocks"),
    "block": ({"precision": "int4", "block": 64}, "blocks of 32, 128"),
    "head": ({"precision": "int4", "head": "bf16"}, "--head is 'bf16'"),
    "bound of nothing": ({"precision": "int4", "kl_max": 0.0}, "--kl-max is 0; 1e-06 to 20"),
    "bound of NaN": ({"precision": "int4", "kl_max": float("nan")}, "--kl-max is nan"),
    "bound too wide": ({"precision": "int4", "kl_max": 20.1}, "--kl-max is 20.1"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_wrong_weights_are_a_usage_error(name: str) -> None:
    """With the value and what is possible."""
    values, message = REFUSED[name]
    with pytest.raises(OptionsError, match=message):
        Weights(**values)


@pytest.mark.parametrize("kl_max", [1e-6, 20.0])
def test_bounds_have_limits(kl_max: float) -> None:
    """At its limits the operator's bound stands for every precision."""
    assert Weights("auto", kl_max=kl_max).kl_bound("int4") == kl_max


def test_without_a_bound_the_precision_decides() -> None:
    """int8 promises 0.05, and so does auto whatever it chooses."""
    assert Weights("int8").kl_bound("int8") == 0.05
    assert Weights("int4").kl_bound("int4") == 0.5
    assert Weights("auto").kl_bound("int4") == 0.05


# ---- exports that arrive quantised ---------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", [None, "auto", "int4"])
def test_what_arrives_quantised_stays_as_it_is(tmp_path: Path, precision: str | None) -> None:
    """Detected and named; its own export is what it is compared with, and auto has nothing to choose."""
    manifest = built(tmp_path, "genai-int4-llama", precision=precision)
    assert manifest.content.engine.precision == "int4"
    assert manifest.content.engine.weights.startswith("as exported: 11 MatMulNBits of 4 bits")
    assert manifest.build.candidates == ()
    assert manifest.quality is not None
    assert manifest.quality.kl_mean < manifest.quality.kl_bound == 0.05


@pytest.mark.parametrize("weights", [{"precision": "int8"}, {"precision": "fp32"}, {"precision": "int4", "block": 128}])
def test_another_precision_of_what_arrives_quantised_is_refused(tmp_path: Path, weights: dict[str, Any]) -> None:
    """With what it is, before anything is compiled."""
    with pytest.raises(
        OperatorError, match=r"arrives quantised \(11 MatMulNBits of 4 bits\) and is installed as it is"
    ):
        built(tmp_path, "genai-int4-llama", **weights)
    assert not list(tmp_path.rglob("*.bin"))


# ---- the real model ------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.real_model
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("precision", "top1_min"), [("int8", 0.85), ("int4", 0.6)])
def test_the_real_model_keeps_its_promise(tmp_path: Path, precision: str, top1_min: float) -> None:
    """SmolLM2-135M within the default bound of its precision, and perplexity by no more than the bound explains.

    log(perplexity ratio) is the mean loss of the tokens that really follow; it is of the size of the KL divergence.
    """
    model = Path(os.environ.get("RESIDENTD_DEMO_MODEL", "/nonexistent"))
    if not model.is_dir():
        pytest.skip("the demo model is not prepared; run ./tools/demo")
    options = Options("real", context=256, slots=4, weights=Weights(precision))
    quality = build(model, tmp_path, options, quiet, quiet).quality
    assert quality is not None
    assert quality.kl_mean <= quality.kl_bound
    assert quality.top1 >= top1_min
    assert abs(math.log(quality.perplexity / quality.perplexity_export)) < 2 * quality.kl_bound
