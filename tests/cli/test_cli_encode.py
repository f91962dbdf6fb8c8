"""embed, classify, rerank and infer: what is asked, and what a person and a program get to see."""

from __future__ import annotations

import io
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from resident.v1.inference_pb2 import Tensor, TensorSpec
from residentd.cli import arrays
from residentd.cli.encode import cosine
from residentd.cli.exits import ExitCode, Failure

DTYPES = sorted(arrays.CODES)
SPECS = {name: TensorSpec(name=name, dtype=dtype) for name, dtype in (("x", "float32"), ("n", "int64"), ("b", "bool"))}


def saved(array: Any) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


def with_header(header: str) -> bytes:
    """A .npy file that says so of itself, and holds nothing."""
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header.encode()


SHAPES = ["(-1, 'a')", "(-1,)", "(0, 1.0)", "(True, 0)", f"(0, {1 << 63})"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (1, 0, 4)])
def test_npy_files_are_numpys_own(dtype: str, shape: tuple[int, ...]) -> None:
    """What numpy.save wrote is read with its shape and bytes, and what is written is what numpy.load reads."""
    array = np.arange(int(np.prod(shape, dtype=int))).reshape(shape).astype(dtype)
    tensor = arrays.tensor_from_npy("x", saved(array), "a file")
    assert (tensor.dtype, tuple(tensor.shape), tensor.data) == (dtype, shape, array.tobytes())
    again = np.load(io.BytesIO(arrays.npy_of(tensor)))
    assert again.dtype == array.dtype
    assert again.tolist() == array.tolist()
    assert arrays.numbers_of(tensor) == array.reshape(-1).tolist()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"PK\x03\x04",
        saved(np.zeros(3))[:20],
        saved(np.asfortranarray(np.zeros((2, 3)))),
        saved(np.zeros(2, ">f4")),
        saved(np.array(["text"])),
        saved(np.zeros(3))[:-1],
        *(with_header(f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}}}") for shape in SHAPES),
        with_header("{[]: 1}"),
    ],
)
def test_other_files_are_a_usage_error(data: bytes) -> None:
    """A cut file, another format, another byte order, text: said with the way out."""
    with pytest.raises(Failure) as caught:
        arrays.tensor_from_npy("x", data, "a file")
    assert caught.value.code is ExitCode.USAGE
    assert "numpy" in caught.value.message


def test_numbers_may_be_written_as_json() -> None:
    """In the type that the model takes."""
    tensor = arrays.tensor_from_text("x=[[1, 2.5], [3, 4]]", SPECS)
    assert np.frombuffer(tensor.data, "<f4").reshape(tuple(tensor.shape)).tolist() == [[1, 2.5], [3, 4]]
    assert arrays.tensor_from_text("n=7", SPECS) == Tensor(name="n", dtype="int64", data=b"\x07" + b"\0" * 7)
    assert arrays.tensor_from_text("n=7.0", SPECS) == arrays.tensor_from_text("n=7", SPECS)
    assert arrays.tensor_from_text("b=[true, 0]", SPECS).data == b"\x01\x00"


@pytest.mark.parametrize(("spare", "is_accepted"), [(0, True), (-1, False)])
def test_a_file_above_the_limit_is_refused_and_not_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spare: int, *, is_accepted: bool
) -> None:
    """At the limit it is read whole; one byte above it is a usage error that names the limit."""
    path, data = tmp_path / "a.npy", saved(np.arange(3))
    path.write_bytes(data)
    monkeypatch.setattr(arrays, "NPY_BYTES_MAX", len(data) + spare)
    if is_accepted:
        assert list(arrays.tensor_from_text(f"n={path}", SPECS).shape) == [3]
        return
    with pytest.raises(Failure, match=f"has more than {len(data) + spare:,} bytes") as caught:
        arrays.tensor_from_text(f"n={path}", SPECS)
    assert caught.value.code is ExitCode.USAGE


@pytest.mark.parametrize(
    ("argument", "says"),
    [
        ("x", "NAME=FILE.npy"),
        ("z=[1]", "the model has no input 'z'; it has x, n, b"),
        ("x=[[1], [2, 3]]", "different lengths"),
        ('x=["a"]', "no array of float32"),
        ("x=[1", "no array of float32"),
        ("x=[[1], [2, 3], []]", "different lengths"),
        ("x=[1, [2]]", "'[2]' is no number"),
        ("x=[1e40]", "no array of float32"),
        ("x=[1" + "0" * 400 + "]", "no array of float32"),
        ("x=[null]", "'None' is no number"),
        ("n=[99999999999999999999]", "no array of int64"),
        ("n=[1.7, 2.9]", "no array of int64 (1.7 is not whole)"),
        ("n=[Infinity]", "no array of int64"),
        ('n=["7"]', "'7' is no number"),
        ("b=[true, 2]", "2 is neither true nor false"),
        ("x=/no/such.npy", "cannot be read"),
    ],
)
def test_a_wrong_input_is_a_usage_error(argument: str, says: str) -> None:
    """Before anything is sent."""
    with pytest.raises(Failure) as caught:
        arrays.tensor_from_text(argument, SPECS)
    assert caught.value.code is ExitCode.USAGE
    assert says in caught.value.message


def test_an_output_may_be_called_anything() -> None:
    """Its file stays in the directory that was named."""
    names = ["save_infer_model/scale_0.tmp_1", "../../etc/passwd", ".", "", "a b"]
    found = [arrays.file_name(Tensor(name=name)) for name in names]
    assert all(name and "/" not in name and not name.startswith(".") for name in found)


@given(st.lists(st.integers(1, 3), max_size=4))
def test_nested_lists_have_the_shape(shape: list[int]) -> None:
    """As numpy nests them."""
    array = np.arange(int(np.prod(shape, dtype=int))).reshape(shape)
    assert arrays.nested(array.reshape(-1).tolist(), tuple(shape)) == array.tolist()


def test_cosine_of_nothing_is_nothing() -> None:
    """Alike is 1, across is 0, and a vector of zeros is like none."""
    assert cosine([1, 2], [2, 4]) == pytest.approx(1)
    assert cosine([1, 0], [0, 1]) == cosine([0, 0], [1, 1]) == 0
