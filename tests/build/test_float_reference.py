"""The copy that an engine is compared with is itself compared with the export, and no failure is taken for another."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, numpy_helper

from residentd.errors import AccuracyError, SourceError
from residentd_build import reference
from residentd_build.draft import Draft
from residentd_build.passes import rowwise
from residentd_build.validate import validate
from support.installed import EXPORTS

SHARED = "transformersjs-merged-llama"
CONTEXT = 64


def ignore(*_arguments: object) -> None:
    """Progress that nobody looks at."""


def copied(name: str, tmp_path: Path) -> Path:
    return Path(shutil.copytree(EXPORTS / name, tmp_path / "source"))


def not_a_number(path: Path) -> None:
    """Every fraction among the weights becomes NaN, under a new file: the old one may be mapped."""
    model = onnx.load(path)
    for tensor in model.graph.initializer:
        if tensor.data_type in {TensorProto.FLOAT, TensorProto.FLOAT16}:
            array = numpy_helper.to_array(tensor)
            tensor.CopyFrom(numpy_helper.from_array(np.full_like(array, np.nan), tensor.name))
    path.unlink()
    onnx.save(model, path)


def garbage(path: Path) -> None:
    path.unlink()
    path.write_bytes(b"no graph")


# ---- the original --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spoil", "line"),
    [(garbage, "which the runtime cannot run as it is ("), (not_a_number, "which as it is gives NaN or infinity")],
)
def test_sixteen_bits_that_do_not_run_are_said(spoil: Callable[[Path], None], line: str, tmp_path: Path) -> None:
    """The CPU may lack their kernels, or they overflow: the copy in float32 is the measure, as the manifest says."""
    source = validate(copied("fp16-llama", tmp_path))
    spoil(source.model_path)
    prepared, found = reference.prepare(source, tmp_path, CONTEXT, ignore)
    assert found.startswith(f"reference: the export with float32, {line}")
    assert prepared.model_path == tmp_path / "reference" / "model.onnx"


@pytest.mark.parametrize(("spoil", "error"), [(garbage, SourceError), (not_a_number, AccuracyError)])
def test_shared_scales_that_do_not_run_are_refused(
    spoil: Callable[[Path], None], error: type[Exception], tmp_path: Path
) -> None:
    """The CPU has their kernels, so that there is something to compare with or something is wrong."""
    source = validate(copied(SHARED, tmp_path))
    spoil(source.model_path)
    with pytest.raises(error):
        reference.prepare(source, tmp_path, CONTEXT, ignore)


# ---- the copy ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["fp16-llama", SHARED])
@pytest.mark.parametrize(("spoil", "error"), [(garbage, SourceError), (not_a_number, AccuracyError)])
def test_a_copy_that_does_not_run_is_refused(
    name: str,
    spoil: Callable[[Path], None],
    error: type[Exception],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is ours: that it fails says nothing about the export."""
    real = reference.write_files

    def write(model: ir.Model, directory: Path, report: object) -> None:
        real(model, directory, report)  # type: ignore[arg-type]
        spoil(directory / "model.onnx")

    monkeypatch.setattr(reference, "write_files", write)
    with pytest.raises(error):
        reference.prepare(validate(EXPORTS / name), tmp_path, CONTEXT, ignore)


@pytest.mark.parametrize(("spoil", "error"), [(garbage, SourceError), (not_a_number, AccuracyError)])
def test_an_engine_that_does_not_run_is_no_reference_for_itself(
    spoil: Callable[[Path], None], error: type[Exception], tmp_path: Path
) -> None:
    """In compatibility mode nothing else would ever be compared with the export."""
    source = validate(EXPORTS / SHARED)
    engine = copied(SHARED, tmp_path) / source.model_path.relative_to(EXPORTS / SHARED)
    spoil(engine)
    with pytest.raises(error):
        reference.prepare_as_exported(source, engine)


def test_a_token_alone_has_the_same_numbers_with_its_own_scale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the bit: all weights a thousandth larger, which turns codes, is past the bound."""
    source = validate(EXPORTS / SHARED)
    _, line = reference.prepare(source, tmp_path, CONTEXT, ignore)
    assert line == "reference: the export with a scale for each token, 0 from the export as it is"
    right = rowwise.run

    def wrong(draft: Draft) -> str:
        for value in draft.graph.initializers.values():
            tensor = value.const_value
            if tensor is not None and tensor.dtype == ir.DataType.FLOAT and tensor.size > 1:
                value.const_value = ir.tensor(tensor.numpy() * np.float32(1.001), name=value.name)
        return right(draft)

    monkeypatch.setattr(rowwise, "run", wrong)
    with pytest.raises(AccuracyError, match="although there is one token"):
        reference.prepare(source, tmp_path, CONTEXT, ignore)
