"""The grid of a matrix in blocks, whose search is the most of a 4-bit build, is computed once and then let go."""

from __future__ import annotations

import weakref
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from test_quantise import Model
from test_quantise_numbers import matrix_of

from residentd_build.draft import Draft
from residentd_build.engine_files import WEIGHTS_INLINE_BYTES_MAX, write_files
from residentd_build.matrices import Blocks, Grid, Grids, Matrix
from residentd_build.passes import quantise
from residentd_build.precision import Scheme, scheme_for

WIDTH, VOCAB = 288, 320
NAMES = ("first", "second", "table")
SCHEMES = {
    "int4": scheme_for("int4", embedding="same", head="same"),
    "int4, with zeros": scheme_for("int4", symmetric=False, embedding="same", head="same"),
    "int4, the table in int8": scheme_for("int4"),
    "int8 by blocks, with zeros": scheme_for("int8", block=32, symmetric=False),
}


def written(directory: Path, scheme: Scheme) -> dict[str, bytes]:
    """The files of a small decoder in `scheme`, whose head multiplies by the table that tokens are looked up in.

    Every tensor of a grid is long enough to be written by itself, to the data file.
    """
    model = Model()
    table = model.weight("table", VOCAB, WIDTH)
    value = model.op("Gather", table, model.input("input_ids", [1, "tokens"], ir.DataType.INT64))
    for name, form in (("first", "MatMul"), ("second", "FusedMatMul")):
        value = model.product(form, value, name, WIDTH, WIDTH)
    draft: Draft = model.draft(model.op("FusedMatMul", value, table, domain="com.microsoft", transB=1))
    rng = np.random.default_rng(8)
    quantise.run(draft, scheme, {name: rng.exponential(size=WIDTH).astype(np.float32) for name in NAMES})
    parts = [value for value in draft.graph.initializers.values() if "int" in str(value.name)]
    assert all(part.const_value is not None and part.const_value.nbytes > WEIGHTS_INLINE_BYTES_MAX for part in parts)
    write_files(draft.model, directory, lambda *_: None)
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often the grid of each matrix was computed, by name."""
    found: Counter[str] = Counter()
    honest = Blocks.grid

    def grid(form: Blocks, matrix: Matrix) -> Grid:
        found[matrix.name] += 1
        return honest(form, matrix)

    monkeypatch.setattr(Blocks, "grid", grid)
    return found


@pytest.mark.parametrize("name", SCHEMES)
def test_the_grid_of_each_matrix_is_computed_once(name: str, tmp_path: Path, counts: Counter[str]) -> None:
    """Codes, scales and both forms of zeros are written in such an order that one computation serves all of them."""
    written(tmp_path, SCHEMES[name])
    assert counts == dict.fromkeys(NAMES, 1)


@pytest.mark.parametrize("name", SCHEMES)
def test_what_is_remembered_is_what_would_be_computed_anew(
    name: str, tmp_path: Path, counts: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files are the same bytes where every tensor computes the grid for itself."""
    found = written(tmp_path / "once", SCHEMES[name])
    once = counts.total()
    monkeypatch.setattr(Grids, "of", lambda _self, form, matrix: form.grid(matrix))
    assert written(tmp_path / "anew", SCHEMES[name]) == found
    assert counts.total() >= 3 * once


def test_no_more_than_one_grid_is_held() -> None:
    """The last matrix's is gone when the next one's is there."""
    grids, form = Grids(), Blocks(4, 32, symmetric=True)
    first, second = (matrix_of(np.full((3, 64), value, np.float32)) for value in (1, 2))
    held = weakref.ref(grids.of(form, first)[0])
    assert held() is not None
    grids.of(form, second)
    assert held() is None


def test_a_grid_is_that_of_its_form_and_of_what_matters() -> None:
    """The same matrix in another form, turned, or weighed otherwise, is another question."""
    rng = np.random.default_rng(4)
    plain = matrix_of(rng.standard_normal((96, 96)).astype(np.float32))
    weighed = replace(plain, importance=rng.exponential(size=96).astype(np.float32) ** 4)
    forms = [Blocks(4, 32, symmetric=True), Blocks(4, 32, symmetric=False), Blocks(4, 16, symmetric=True)]
    grids = Grids()
    for matrix in (plain, weighed, replace(plain, is_turned=True)):
        for form in forms:
            found, expected = grids.of(form, matrix), form.grid(matrix)
            assert all(np.array_equal(one, other) for one, other in zip(found, expected, strict=True))
