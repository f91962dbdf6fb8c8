"""Tensors for the command line: numpy's .npy files, and numbers written as JSON. Without numpy."""

from __future__ import annotations

import ast
import json
import math
import re
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from resident.v1.inference_pb2 import Tensor, TensorSpec
from residentd.cli.exits import usage

NPY_MAGIC: Final = b"\x93NUMPY"
NPY_BYTES_MAX: Final = 1 << 30
HEADER_BYTES_MAX: Final = 1 << 16
ALIGNMENT: Final = 64
AXIS_MAX: Final = 1 << 63  # int64, as the message carries it
DESCRIPTIONS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "bool": "|b1",
        "int8": "|i1",
        "uint8": "|u1",
        "int16": "<i2",
        "uint16": "<u2",
        "float16": "<f2",
        "int32": "<i4",
        "uint32": "<u4",
        "float32": "<f4",
        "int64": "<i8",
        "uint64": "<u8",
        "float64": "<f8",
    }
)
CODES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "bool": "?",
        "int8": "b",
        "uint8": "B",
        "int16": "h",
        "uint16": "H",
        "float16": "e",
        "int32": "i",
        "uint32": "I",
        "float32": "f",
        "int64": "q",
        "uint64": "Q",
        "float64": "d",
    }
)


def tensor_from_text(argument: str, specs: Mapping[str, TensorSpec]) -> Tensor:
    """NAME=FILE.npy, or NAME=JSON as in x=[[1, 2], [3, 4]]. Raises Failure (usage)."""
    name, equals, value = argument.partition("=")
    if not equals or not name:
        raise usage(f"--input {argument!r} is not NAME=FILE.npy or NAME=JSON. Write it so")
    if value.endswith(".npy"):
        return tensor_from_npy(name, _read(Path(value)), value)
    spec = specs.get(name)
    if spec is None:
        raise usage(f"the model has no input {name!r}; it has {', '.join(specs) or 'none'}. Name one of these")
    return _tensor_from_json(name, value, spec.dtype)


def tensor_from_npy(name: str, data: bytes, where: str) -> Tensor:
    """The array of a .npy file (numpy.lib.format, versions 1 to 3)."""
    if not data.startswith(NPY_MAGIC) or len(data) < 12:
        raise usage(f"{where} is not a .npy file. Write it with numpy.save")
    size, start = struct.unpack_from("<H", data, 8)[0], 10
    if data[6] > 1:
        size, start = struct.unpack_from("<I", data, 8)[0], 12
    header = _header(data[start : start + size], where) if size <= HEADER_BYTES_MAX else {}
    dtype = next((name for name, text in DESCRIPTIONS.items() if text == header.get("descr")), None)
    shape = header.get("shape")
    if dtype is None or header.get("fortran_order") is not False or not isinstance(shape, tuple):
        raise usage(
            f"{where} holds {header.get('descr', 'no array')!r}; little-endian numbers in C order are needed. Save "
            "numpy.ascontiguousarray(array)"
        )
    if not all(type(axis) is int and 0 <= axis < AXIS_MAX for axis in shape):
        raise usage(f"{where} says that its shape is {str(shape)[:60]}. Write it with numpy.save")
    numbers, needed = data[start + size :], math.prod(shape) * struct.calcsize(CODES[dtype])
    if len(numbers) != needed:
        raise usage(
            f"{where} has {len(numbers):,} bytes of numbers; its shape {shape} of {dtype} needs {needed:,}. Write it "
            "with numpy.save"
        )
    return Tensor(name=name, dtype=dtype, shape=shape, data=numbers)


def npy_of(tensor: Tensor) -> bytes:
    """The .npy file of a tensor, version 1."""
    header = str({"descr": DESCRIPTIONS[tensor.dtype], "fortran_order": False, "shape": tuple(tensor.shape)})
    padding = -(len(NPY_MAGIC) + 4 + len(header) + 1) % ALIGNMENT
    line = f"{header}{' ' * padding}\n".encode("latin-1")
    return NPY_MAGIC + b"\x01\x00" + struct.pack("<H", len(line)) + line + tensor.data


def numbers_of(tensor: Tensor) -> list[float]:
    """Its elements, row by row."""
    count = math.prod(tensor.shape)
    return list(struct.unpack(f"<{count}{CODES[tensor.dtype]}", tensor.data))


def nested(numbers: list[Any], shape: tuple[int, ...]) -> Any:
    """The numbers as lists within lists."""
    if not shape:
        return numbers[0]
    if len(shape) == 1:
        return numbers
    step = math.prod(shape[1:])
    return [nested(numbers[place : place + step], shape[1:]) for place in range(0, len(numbers), step)]


def file_name(tensor: Tensor) -> str:
    """A name for its file: an output may be called anything."""
    return re.sub(r"[^\w.-]", "_", tensor.name).lstrip(".")[:100] or "output"


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            data = file.read(NPY_BYTES_MAX + 1)
    except OSError as error:
        raise usage(f"{path} cannot be read: {error.strerror}. Name another file") from error
    if len(data) > NPY_BYTES_MAX:
        raise usage(f"{path} has more than {NPY_BYTES_MAX:,} bytes, the most that are read. Send fewer rows at once")
    return data


def _header(data: bytes, where: str) -> dict[str, Any]:
    try:
        header = ast.literal_eval(data.decode("latin-1").strip())
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError) as error:
        raise usage(f"{where} is not a whole .npy file. Write it with numpy.save") from error
    return header if isinstance(header, dict) else {}


def _tensor_from_json(name: str, text: str, dtype: str) -> Tensor:
    try:
        value = json.loads(text)
        shape = tuple(_shape(value))
        numbers = [_number(entry, dtype) for entry in _flat(value, shape)]
        data = struct.pack(f"<{len(numbers)}{CODES[dtype]}", *numbers)
    except (ValueError, TypeError, OverflowError, struct.error, RecursionError, KeyError) as error:
        raise usage(f"--input {name}: {text[:60]!r} is no array of {dtype} ({error}). Write it as JSON") from error
    return Tensor(name=name, dtype=dtype, shape=shape, data=data)


def _shape(value: Any) -> Iterator[int]:
    while isinstance(value, list):
        yield len(value)
        value = value[0] if value else 0


def _flat(value: Any, shape: tuple[int, ...]) -> Iterator[Any]:
    """The entries row by row. Raises ValueError where a row is not as long as the first."""
    if not shape:
        yield value
        return
    if not isinstance(value, list) or len(value) != shape[0]:
        raise ValueError("its rows are of different lengths")
    for entry in value:
        yield from _flat(entry, shape[1:])


def _number(value: Any, dtype: str) -> float:
    """`value` as `dtype` takes it. Raises ValueError for what that would change."""
    if not isinstance(value, int | float):
        raise ValueError(f"{str(value)[:20]!r} is no number")  # noqa: TRY004 - what the text says, not a bug of ours
    if dtype.startswith("float"):
        return float(value)
    if value != int(value):
        raise ValueError(f"{value} is not whole")
    if dtype == "bool" and value not in {0, 1}:
        raise ValueError(f"{value} is neither true nor false")
    return int(value)
