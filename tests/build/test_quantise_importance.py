"""4-bit scales chosen by what the inputs of a matrix are multiplied with, and where that is learnt."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lowering import EXPORTS, draft_of, quiet
from test_quantise_numbers import FORMS, decoded, grid, matrix_of, rows

from residentd.models.manifest import CacheTensor, Engine, EngineLimits
from residentd_build import calibrate
from residentd_build.draft import Draft
from residentd_build.matrices import Blocks, Grids
from residentd_build.options import Options, Weights
from residentd_build.passes import quantise
from residentd_build.passes.products import products
from residentd_build.pipeline import build, rewrite, write_engine
from residentd_build.precision import scheme_for
from residentd_build.validate import validate

Floats = npt.NDArray[np.float32]
FOUR_BITS = [form for form in FORMS if form.bits == 4]
CONTEXT = 128


def lost(form: Blocks, numbers: Floats, importance: Floats, *, is_known: bool) -> Floats:
    """By output and block: the squares of what is missed, weighed."""
    matrix = replace(matrix_of(numbers), importance=importance if is_known else None)
    missed = (decoded(form, matrix).astype(np.float64) - numbers) ** 2 * importance
    filled = np.pad(missed, ((0, 0), (0, -missed.shape[1] % form.size)))
    return filled.reshape(len(numbers), -1, form.size).sum(axis=-1)


@pytest.mark.parametrize("form", FOUR_BITS, ids=str)
@given(numbers=rows(), seed=st.integers(0, 1000))
@settings(max_examples=20, deadline=None)
def test_no_block_loses_more_where_it_matters(form: Blocks, numbers: Floats, seed: int) -> None:
    """The whole range is one of the grids that are tried, so the one that is taken is never worse."""
    importance = np.random.default_rng(seed).exponential(size=numbers.shape[1]).astype(np.float32) ** 3 + 1e-4
    with_it, without = (lost(form, numbers, importance, is_known=known) for known in (True, False))
    size = np.abs(numbers).max(initial=0) ** 2 * importance.max() * form.size * 1e-5  # float32 chose, float64 judges
    assert (with_it <= without * (1 + 1e-4) + size * 1e-5).all()


@pytest.mark.parametrize("form", FOUR_BITS, ids=str)
def test_normal_weights_with_a_few_loud_inputs_lose_a_third_less(form: Blocks) -> None:
    """Activations of a transformer: most inputs near the mean, some a hundred times above it."""
    rng = np.random.default_rng(2)
    numbers = rng.standard_normal((64, 512)).astype(np.float32)
    importance = np.where(rng.random(512) < 0.05, 100, 1).astype(np.float32)
    with_it, without = (lost(form, numbers, importance, is_known=known).sum() for known in (True, False))
    assert with_it < without * (0.67 if form.size == 32 else 0.85)


@pytest.mark.parametrize("form", FOUR_BITS, ids=str)
@given(numbers=rows())
@settings(max_examples=20, deadline=None)
def test_codes_scales_and_zeros_are_of_one_grid(form: Blocks, numbers: Floats) -> None:
    """Each is computed by itself; together they are still the nearest of the grid that scales and zeros span."""
    matrix = replace(matrix_of(numbers), importance=np.ones(numbers.shape[1], np.float32))
    found = np.abs(decoded(form, matrix) - numbers)
    assert (found <= np.abs(grid(form, matrix) - numbers).min(axis=0) + np.abs(numbers) * 2**-21).all()


def test_eight_bits_keep_their_whole_range() -> None:
    """There is next to nothing to gain, and the search takes ten times as long."""
    numbers = np.random.default_rng(1).standard_normal((4, 64)).astype(np.float32)
    form = Blocks(8, 32, symmetric=True)
    known = replace(matrix_of(numbers), importance=np.geomspace(1, 1e6, 64).astype(np.float32))
    assert np.array_equal(form.scales(known, Grids()).numpy(), form.scales(matrix_of(numbers), Grids()).numpy())


# ---- calibration ---------------------------------------------------------------------------------------------------


def lowered(name: str, stage: Path) -> tuple[Draft, Engine]:
    """The draft, and its engine in `stage`."""
    stage.mkdir(parents=True, exist_ok=True)
    draft = draft_of(validate(EXPORTS / name).model, CONTEXT)
    rewrite(draft, quiet)
    write_engine(draft, stage, quiet)
    (logits,) = [value for value in draft.graph.outputs if value.name == "logits"]
    caches = tuple(
        CacheTensor(input=str(past.name), output=present, heads=cache.heads, dim=cache.dim, dtype="float32")
        for cache in draft.caches
        for past, present in (
            (cache.past_key, cache.present_key_name),
            (cache.past_value, cache.present_value_name),
        )
    )
    limits = EngineLimits(slots=2, context=CONTEXT, step_tokens_max=64, vocab=int(str(logits.shape[-1])))
    engine = Engine(
        target="onnxruntime-cpu",
        mode="canonical",
        precision="fp32",
        path="engine/model.onnx",
        limits=limits,
        caches=caches,
    )
    return draft, engine


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3", "optimum14-llama", "qwen3-moe"])
def test_every_product_gets_a_weight_for_each_input(name: str, tmp_path: Path) -> None:
    """Positive, of mean 1, not all alike; the same every time; and nothing is left in the engine's folder."""
    draft, engine = lowered(name, tmp_path)
    before = sorted(tmp_path.rglob("*"))
    reports: list[float] = []
    found = calibrate.importance(tmp_path, engine, lambda fraction, _message: reports.append(fraction))
    assert sorted(tmp_path.rglob("*")) == before
    assert reports == sorted(reports)
    assert len(reports) == calibrate.TOKENS
    for product in products(draft):
        weights = found[product.matrix.name]
        assert weights.shape == (product.matrix.inputs,)
        assert weights.min() > 0
        assert math.isclose(weights.mean(), 1, rel_tol=2e-3)
        assert weights.std() > 0.01
    again = calibrate.importance(tmp_path, engine, lambda *_: None)
    assert all(np.array_equal(weights, again[matrix]) for matrix, weights in found.items())


def test_the_weights_are_the_mean_squares_of_the_sources(tmp_path: Path) -> None:
    """The first layer's products read the normalised embeddings: their squares follow from the tokens alone."""
    draft, engine = lowered("llama", tmp_path)
    found = calibrate.importance(tmp_path, engine, lambda *_: None)
    first = products(draft)[0]
    norm = first.source.producer()
    assert norm is not None
    assert norm.op_type == "SimplifiedLayerNormalization"
    table = next(node for node in draft.graph if node.op_type == "Gather").inputs[0].const_value.numpy()
    normed = table / np.sqrt((table**2).mean(axis=1, keepdims=True)) * norm.inputs[1].const_value.numpy()
    every = (normed**2).mean(axis=0)
    # 512 draws of a vocabulary that is read nearly evenly: a mean square is known to about a tenth of itself.
    correlation = np.corrcoef(every, found[first.matrix.name])[0, 1]
    assert correlation > 0.5


def test_time_is_bounded(tmp_path: Path) -> None:
    """A clock that jumps ends the text after its shortest length."""
    _, engine = lowered("llama", tmp_path)
    ticks = iter(range(0, 1 << 40, int(calibrate.SECONDS_MAX) + 1))
    reports: list[float] = []
    calibrate.importance(tmp_path, engine, lambda f, _m: reports.append(f), clock=lambda: float(next(ticks)))
    assert len(reports) == calibrate.TOKENS_MIN


def test_a_pass_that_knows_what_matters_says_so(tmp_path: Path) -> None:
    """The names are those of the lowered draft's matrices, so every product finds its own."""
    draft, engine = lowered("llama", tmp_path)
    found = calibrate.importance(tmp_path, engine, lambda *_: None)
    assert set(found) == {product.matrix.name for product in products(draft)}
    assert "scales by the activations" in quantise.run(draft, scheme_for("int4"), found)


@pytest.mark.parametrize(("precision", "is_read"), [("int4", True), ("int8", False)])
def test_a_build_reads_it_off_the_verified_engine_where_it_is_of_use(
    precision: str,
    is_read: bool,  # noqa: FBT001
    tmp_path: Path,
) -> None:
    """int4 is built by it, and says so in the manifest; nothing else is."""
    options = Options("tiny", CONTEXT, 4, 64, weights=Weights(precision, kl_max=20.0))
    manifest = build(EXPORTS / "llama", tmp_path, options, quiet, lambda _bytes: None)
    lines = [line for line in manifest.build.passes if line.startswith("quantise: ")]
    assert [("scales by the activations" in line) for line in lines] == [is_read]
    assert sorted(path.name for path in (tmp_path / "engine").iterdir()) == ["model.onnx", "weights.bin"]
