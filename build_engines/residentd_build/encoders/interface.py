"""The inputs and outputs of a model file, read without its nodes and weights: a look that costs no memory.

Only the outermost fields are walked (protobuf's encoding: a tag, then a value whose length it tells).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import onnx
from google.protobuf.message import DecodeError

if TYPE_CHECKING:
    from collections.abc import Iterator

FIELDS_MAX = 4_000_000
PORT_BYTES_MAX = 1 << 16
PORTS_MAX = 10_000
MODEL_GRAPH, GRAPH_INPUT, GRAPH_OUTPUT = 7, 11, 12  # field numbers of onnx.proto
VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5  # wire types


class InterfaceError(ValueError):
    """The file is not one whose inputs and outputs can be read. The text is a finding about it."""


@dataclass(frozen=True, slots=True)
class Port:
    """An input or output: its onnx element type, 0 for what is no tensor; sizes of its axes, a text for a free one.

    `shape` None: the file does not say.
    """

    name: str
    dtype: int
    shape: tuple[int | str, ...] | None


@dataclass(frozen=True, slots=True)
class Interface:
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]

    @property
    def input_names(self) -> frozenset[str]:
        return frozenset(port.name for port in self.inputs)

    def output(self, name: str) -> Port | None:
        return next((port for port in self.outputs if port.name == name), None)


def read_interface(view: memoryview) -> Interface:
    """Of the file in `view`. Raises InterfaceError."""
    inputs: list[Port] = []
    outputs: list[Port] = []
    for number, part in _fields(view):
        if number == MODEL_GRAPH:
            for inner, port in _fields(part):
                if inner in {GRAPH_INPUT, GRAPH_OUTPUT}:
                    (inputs if inner == GRAPH_INPUT else outputs).append(_port(port))
                if len(inputs) + len(outputs) > PORTS_MAX:
                    raise InterfaceError(f"it has more than {PORTS_MAX:,} inputs and outputs")
    return Interface(tuple(inputs), tuple(outputs))


def port_of(value: onnx.ValueInfoProto) -> Port:
    tensor = value.type.tensor_type
    if not value.type.HasField("tensor_type"):
        return Port(value.name, 0, None)
    shape = tuple(_axis(axis) for axis in tensor.shape.dim) if tensor.HasField("shape") else None
    return Port(value.name, tensor.elem_type, shape)


def _axis(axis: onnx.TensorShapeProto.Dimension) -> int | str:
    """A size, or the name of a free one; exporters also write 0, -1 and ? for a free one without a name."""
    if axis.HasField("dim_value") and axis.dim_value > 0:
        return axis.dim_value
    name = axis.dim_param
    return name if name.strip("?-1 ") else "?"


def _port(data: memoryview) -> Port:
    if len(data) > PORT_BYTES_MAX:
        raise InterfaceError(
            f"an input or output is described in {len(data):,} bytes; at most {PORT_BYTES_MAX:,} are read"
        )
    try:
        return port_of(onnx.ValueInfoProto.FromString(bytes(data)))
    except (DecodeError, ValueError) as error:
        raise InterfaceError("it is not an ONNX file: an input or output is malformed") from error


def _fields(view: memoryview) -> Iterator[tuple[int, memoryview]]:
    """Every length-delimited field of a message, with its number."""
    place = 0
    for _ in range(FIELDS_MAX):
        if place == len(view):
            return
        tag, place = _varint(view, place)
        number, wire = tag >> 3, tag & 7
        size = 0
        if wire == VARINT:
            _, place = _varint(view, place)
        elif wire == BYTES:
            size, place = _varint(view, place)
        else:
            size = {FIXED64: 8, FIXED32: 4}.get(wire, -1)
        if size < 0 or place + size > len(view):
            raise InterfaceError("it is not an ONNX file, or not a whole one")
        if wire == BYTES:
            yield number, view[place : place + size]
        place += size
    raise InterfaceError(f"it has more than {FIELDS_MAX:,} parts")


def _varint(view: memoryview, place: int) -> tuple[int, int]:
    value = shift = 0
    for index in range(place, min(place + 10, len(view))):
        value |= (view[index] & 0x7F) << shift
        if view[index] < 0x80:
            return value, index + 1
        shift += 7
    raise InterfaceError("it is not an ONNX file, or not a whole one")
