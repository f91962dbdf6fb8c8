"""Faults planted into a finished engine, its files hashed again: nothing but the accuracy gate can see them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from residentd.backend.base import Logits
from residentd.backend.modes import OpenBackend, open_engine
from residentd.backend.replay import AT_ONCE, Cut
from residentd.engine.probe import probe
from residentd.models.checks import STATISTICS, STATISTICS_RMS, TOKENS, Part
from residentd.models.manifest import Manifest, content_digest
from residentd.models.store import Store, measure_files
from residentd.types import StepPlan
from residentd_build.goldens import JITTER
from residentd_build.options import Options, Weights
from residentd_build.pipeline import build
from support.installed import EXPORTS

KL_OF_RANDOM_WEIGHTS = 5.0  # nats: they have no answer that quantising could keep
Model = onnx.ModelProto
Edit = Callable[[Model], None]


@dataclass(frozen=True, slots=True)
class Built:
    manifest: Manifest
    directory: Path


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Built]:
    """The engine of an export in tests/fixtures/exports, "llama" or "llama int4", built once."""
    made: dict[str, Built] = {}

    def get(name: str) -> Built:
        if name not in made:
            stage = tmp_path_factory.mktemp("stage")
            export, _, precision = name.partition(" ")
            weights = Weights(precision=precision, kl_max=KL_OF_RANDOM_WEIGHTS) if precision else Weights()
            options = Options(export, slots=4, step_tokens=48, weights=weights)
            made[name] = Built(build(EXPORTS / export, stage, options, lambda *_: None, lambda _: None), stage)
        return made[name]

    return get


def resealed(built: Built, directory: Path, edit: Edit) -> Built:
    """A copy with `edit` applied to the engine's graph; hashes and digest are those of the copy."""
    shutil.copytree(built.directory, directory)
    path = directory / built.manifest.content.engine.path
    model = onnx.load(path)
    edit(model)
    for old in path.parent.iterdir():
        old.unlink()
    onnx.save(model, path)
    content = msgspec.structs.replace(built.manifest.content, files=measure_files(directory))
    manifest = msgspec.structs.replace(built.manifest, content=content, digest=content_digest(content))
    return Built(manifest, directory)


def checked(built: Built, cut: Cut = AT_ONCE) -> dict[str, Part]:
    backend = open_engine(built.directory, built.manifest.content.engine)
    try:
        return {part.name: part for part in probe(backend, built.manifest.content, cut)}
    finally:
        backend.close()


# ---- the faults ----------------------------------------------------------------------------------------------------


def tensors(model: Model) -> dict[str, onnx.TensorProto]:
    return {tensor.name: tensor for tensor in model.graph.initializer}


def change(model: Model, name: str, array: np.ndarray) -> None:
    tensors(model)[name].CopyFrom(numpy_helper.from_array(array.astype(np.float32), name))


def matrix_names(model: Model) -> list[str]:
    """Weights of products, in the order of the graph."""
    known = tensors(model)
    products = [node for node in model.graph.node if node.op_type in {"MatMul", "FusedMatMul"}]
    return [name for node in products for name in node.input if name in known]


def value(model: Model, name: str) -> np.ndarray:
    return numpy_helper.to_array(tensors(model)[name])


def weights_off(share: float) -> Edit:
    def edit(model: Model) -> None:
        rng = np.random.default_rng(1)
        for name in matrix_names(model):
            array = value(model, name)
            change(model, name, array * (1 + share * rng.standard_normal(array.shape)))

    return edit


def one_matrix_times(factor: float) -> Edit:
    """The last layer's last: the least that one matrix can do."""

    def edit(model: Model) -> None:
        name = matrix_names(model)[-2]
        change(model, name, value(model, name) * factor)

    return edit


def some_weights_off(model: Model) -> None:
    name = matrix_names(model)[2]
    array = value(model, name).copy()
    array.reshape(-1)[::1000] *= 1.02
    change(model, name, array)


def one_weight_lost(model: Model) -> None:
    """The largest weight of one matrix of thousands."""
    name = matrix_names(model)[2]
    array = value(model, name).copy()
    array[np.unravel_index(np.abs(array).argmax(), array.shape)] = 0
    change(model, name, array)


def last_layer_dropped(model: Model) -> None:
    """What its attention and its MLP add to the stream is nothing."""
    known = tensors(model)
    makers = {output: node for node in model.graph.node for output in node.output}
    norms = [node for node in model.graph.node if node.op_type == "SkipSimplifiedLayerNormalization"]
    for node in norms[-2:]:
        (name,) = (name for name in makers[node.input[1]].input if name in known)
        change(model, name, np.zeros_like(value(model, name)))


def rotary_names(model: Model) -> tuple[str, str]:
    node = next(node for node in model.graph.node if node.op_type == "GroupQueryAttention")
    return node.input[7], node.input[8]


def rotary_offset(model: Model) -> None:
    """Every position but the first one too far."""
    for name in rotary_names(model):
        array = value(model, name).copy()
        array[1:-1] = array[2:]
        change(model, name, array)


def rotary_base_off(model: Model) -> None:
    """Angles 0.1 % too large."""
    cos, sin = rotary_names(model)
    steps = np.arctan2(value(model, sin)[1], value(model, cos)[1])
    angles = np.arange(value(model, cos).shape[0])[:, None] * steps * 1.001
    change(model, cos, np.cos(angles))
    change(model, sin, np.sin(angles))


def last_bias(model: Model) -> str:
    known = tensors(model)
    adds = [node for node in model.graph.node if node.op_type == "Add"]
    return [name for node in adds for name in node.input if name in known and len(known[name].dims) == 1][-1]


def bias_lost(model: Model) -> None:
    name = last_bias(model)
    change(model, name, np.zeros_like(value(model, name)))


def value_bias_lost(model: Model) -> None:
    """Of queries, keys and values only the values' part, the last sixth."""
    name = last_bias(model)
    array = value(model, name).copy()
    array[-array.size // 6 :] = 0
    change(model, name, array)


def norm_weight_lost(model: Model) -> None:
    node = next(node for node in model.graph.node if node.op_type == "SkipSimplifiedLayerNormalization")
    change(model, node.input[2], np.ones_like(value(model, node.input[2])))


def scale_times(factor: float) -> Edit:
    """Of the last layer's attention."""

    def edit(model: Model) -> None:
        node = [node for node in model.graph.node if node.op_type == "GroupQueryAttention"][-1]
        (found,) = (attribute for attribute in node.attribute if attribute.name == "scale")
        found.f *= factor

    return edit


def window_one_long(model: Model) -> None:
    node = next(node for node in model.graph.node if node.op_type == "GroupQueryAttention")
    (found,) = (attribute for attribute in node.attribute if attribute.name == "local_window_size")
    assert found.i > 0
    found.i += 1


def scale_names(model: Model) -> list[str]:
    """Of quantised matrices, in the order of the graph."""
    products = [node for node in model.graph.node if node.op_type in {"MatMulNBits", "MatMulIntegerToFloat"}]
    return [name for node in products for name in node.input if name.endswith(".scales")]


def scales_off(share: float) -> Edit:
    def edit(model: Model) -> None:
        rng = np.random.default_rng(2)
        for name in scale_names(model):
            array = value(model, name)
            change(model, name, array * (1 + share * rng.standard_normal(array.shape)))

    return edit


def scales_times(factor: float) -> Edit:
    """Of the last layer's last matrix; 0 drops it."""

    def edit(model: Model) -> None:
        name = scale_names(model)[-2]
        change(model, name, value(model, name) * factor)

    return edit


def spoilt(model: Model) -> None:
    name = matrix_names(model)[1]
    change(model, name, np.full_like(value(model, name), np.nan))


MUTANTS: dict[str, tuple[str, Edit]] = {
    "every weight 1 % off": ("llama", weights_off(0.01)),
    "one matrix 1 % off": ("llama", one_matrix_times(1.01)),
    "one weight lost": ("llama", one_weight_lost),
    "last layer dropped": ("qwen3", last_layer_dropped),
    "positions rotated one too far": ("llama", rotary_offset),
    "rotary base 0.1 % off": ("qwen3", rotary_base_off),
    "one bias lost": ("qwen2", bias_lost),
    "the values' bias lost": ("qwen2", value_bias_lost),
    "a norm's weight lost": ("smollm2", norm_weight_lost),
    "scale 1 % off in the last layer": ("tinyllama", scale_times(1.01)),
    "window one long in one layer": ("mistral", window_one_long),
    "NaN": ("llama", spoilt),
}
GENTLE_MUTANTS: dict[str, tuple[str, Edit]] = {
    "every weight 0.01 % off": ("llama", weights_off(1e-4)),
    "one matrix 0.1 % off": ("qwen2", one_matrix_times(1.001)),
    "scale 0.1 % off in the last layer": ("tinyllama", scale_times(1.001)),
    "one weight in a thousand slightly off": ("smollm2", some_weights_off),
}

QUANTISED_MUTANTS: dict[str, Edit] = {
    "scales 1 % off": scales_off(0.01),
    "one matrix lost": scales_times(0.0),
    "one matrix 5 % off": scales_times(1.05),
    "rotary base 0.1 % off": rotary_base_off,
    "positions rotated one too far": rotary_offset,
    "a norm's weight lost": norm_weight_lost,
}


def published(built: Built, state: Path) -> None:
    """Its store takes the resealed version for whole."""
    store = Store(state)
    with store.staging() as stage:
        shutil.copytree(built.directory, stage.path, dirs_exist_ok=True)
        store.publish(stage, built.manifest)
    assert store.verify_files(built.manifest.digest) == built.manifest


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_mutant_is_caught_by_the_statistics(built: Callable[[str], Built], tmp_path: Path, mutant: str) -> None:
    """Every file has the hash that its manifest says; the statistics are far past the bound."""
    name, edit = MUTANTS[mutant]
    wrong = resealed(built(name), tmp_path / "wrong", edit)
    published(wrong, tmp_path / "state")
    part = checked(wrong)[STATISTICS]
    assert not part.passed
    assert part.worst > 100 * part.bound
    assert part.missed > part.checked / 20


@pytest.mark.parametrize("mutant", GENTLE_MUTANTS)
def test_a_mutant_that_chooses_the_same_tokens_is_caught(
    built: Callable[[str], Built], tmp_path: Path, mutant: str
) -> None:
    """Every golden token is as recorded, and the statistics see the fault all the same."""
    name, edit = GENTLE_MUTANTS[mutant]
    parts = checked(resealed(built(name), tmp_path / "wrong", edit))
    assert parts[TOKENS].passed
    assert parts[TOKENS].checked > 120
    assert not parts[STATISTICS].passed


@pytest.mark.parametrize("name", sorted({name for name, _ in MUTANTS.values()}))
def test_the_engine_itself_passes_however_it_is_batched(built: Callable[[str], Built], name: str) -> None:
    """Alone, in small chunks, in a worker of fewer slots: within a hundredth of the bound, every token as recorded."""
    made = built(name)
    content = made.manifest.content
    assert content.tolerance is not None
    for cut in (AT_ONCE, Cut(rows_max=1), Cut(rows_max=3, chunk_tokens=5)):
        parts = checked(made, cut)
        assert all(part.passed for part in parts.values())
        assert parts[STATISTICS].worst < content.tolerance.bound / 100
        assert parts[STATISTICS].checked == sum(len(golden.output) for golden in content.goldens) == 128


@pytest.mark.parametrize("mutant", QUANTISED_MUTANTS)
@pytest.mark.parametrize("name", ["llama int8", "llama int4", "qwen3 int8"])
def test_a_mutant_of_a_quantised_engine_is_caught(
    built: Callable[[str], Built], tmp_path: Path, name: str, mutant: str
) -> None:
    """Where rounding itself moves logits, the root mean square tells a fault from it."""
    parts = checked(resealed(built(name), tmp_path / "wrong", QUANTISED_MUTANTS[mutant]))
    assert not (parts[STATISTICS].passed and parts[STATISTICS_RMS].passed)


class Rounding:
    """The engine on a processor that rounds keys and values otherwise."""

    def __init__(self, backend: OpenBackend, jitter: float, seed: int) -> None:
        self._backend, self._jitter, self._rng = backend, jitter, np.random.default_rng(seed)
        self.limits = backend.limits

    def step(self, plan: StepPlan) -> Logits:
        logits = self._backend.step(plan)
        for cache in self._backend.caches:
            cache[:] *= 1 + self._jitter * self._rng.uniform(-1, 1, cache.shape).astype(np.float32)
        return logits

    def close(self) -> None:
        self._backend.close()


@pytest.mark.parametrize("jitter", [2.0**-20, 2.0**-18, 2.0**-17])
@pytest.mark.parametrize("name", ["llama int8", "llama int4", "qwen3 int8"])
def test_rounding_alone_does_not_fail_a_quantised_engine(
    built: Callable[[str], Built], name: str, jitter: float
) -> None:
    """Other draws of another processor's rounding, up to twice what was measured, stay within both bounds."""
    made, seen = built(name), []
    for seed in range(3):
        backend = Rounding(open_engine(made.directory, made.manifest.content.engine), jitter, seed)
        parts = probe(backend, made.manifest.content, Cut(rows_max=2, chunk_tokens=20))
        assert [part.name for part in parts if not part.passed] == []
        seen.append(parts[-1].worst / parts[-1].bound)
        backend.close()
    assert jitter < JITTER or max(seen) > 0.1  # it was rounding that they stood, not nothing
