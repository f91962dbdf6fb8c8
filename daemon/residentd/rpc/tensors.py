"""Tensors of an Infer request, judged by the model's manifest before anything is queued."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Final

from resident.v1 import inference_pb2
from residentd.calls import ITEM_BYTES, Tensor
from residentd.errors import CallerError
from residentd.models.encoder import Tensors, TensorSpec
from residentd.supervisor.engines import Loaded, wrong_kind

AXIS_MAX: Final = 1 << 31
AXES_MAX: Final = 16
NAMES_MAX: Final = 16  # of a message


def checked(request: inference_pb2.InferRequest, loaded: Loaded) -> tuple[tuple[Tensor, ...], tuple[str, ...]]:
    """The inputs in the model's order, and the outputs that are wanted. Raises CallerError."""
    tensors = loaded.manifest.content.tensors
    if tensors is None:
        raise wrong_kind(loaded, "takes tensors")
    by_name = {tensor.name: tensor for tensor in request.inputs}
    known = [spec.name for spec in tensors.inputs]
    if len(by_name) != len(request.inputs) or sorted(by_name) != sorted(known):
        raise CallerError(
            f"the request has inputs {_list(tensor.name for tensor in request.inputs)}; the model takes "
            f"{_list(known)}, each once. Send these",
            field="inputs",
        )
    sizes: dict[str, tuple[int, str]] = {}
    given = tuple(_tensor(by_name[spec.name], spec, sizes) for spec in tensors.inputs)
    return given, _wanted(request.outputs, tensors)


def message_of(tensor: Tensor) -> inference_pb2.Tensor:
    return inference_pb2.Tensor(name=tensor.name, dtype=tensor.dtype, shape=tensor.shape, data=tensor.data)


def _wanted(names: Sequence[str], tensors: Tensors) -> tuple[str, ...]:
    known = [spec.name for spec in tensors.outputs]
    if len(set(names)) != len(names) or not set(names) <= set(known):
        raise CallerError(
            f"the request wants outputs {_list(names)}; the model has {_list(known)}. Name some of these, each once",
            field="outputs",
        )
    return tuple(names)


def _tensor(tensor: inference_pb2.Tensor, spec: TensorSpec, sizes: dict[str, tuple[int, str]]) -> Tensor:
    """One input. `sizes` holds the free axes met so far: the same name is the same size."""
    field = f"inputs.{spec.name}"
    if tensor.dtype != spec.dtype:
        raise CallerError(
            f"input {spec.name} is {_short(tensor.dtype)}; the model takes {spec.dtype}. Convert it", field=field
        )
    shape = tuple(tensor.shape)
    if len(shape) != len(spec.shape) or len(shape) > AXES_MAX:
        raise CallerError(
            f"input {spec.name} has {len(shape)} axes; the model takes {shown(spec.shape)}. Reshape it", field=field
        )
    for size, expected in zip(shape, spec.shape, strict=True):
        _check_axis(size, expected, spec, shape, sizes)
    found = Tensor(spec.name, spec.dtype, shape, tensor.data)
    if len(tensor.data) != found.bytes_expected:
        raise CallerError(
            f"input {spec.name} has {len(tensor.data):,} bytes; shape {list(shape)} of {spec.dtype} needs "
            f"{found.bytes_expected:,} ({ITEM_BYTES[spec.dtype]} each). Send exactly so many",
            field=field,
        )
    return found


def _check_axis(
    size: int, expected: int | str, spec: TensorSpec, shape: tuple[int, ...], sizes: dict[str, tuple[int, str]]
) -> None:
    field = f"inputs.{spec.name}"
    if not 0 < size < AXIS_MAX or (isinstance(expected, int) and size != expected):
        raise CallerError(
            f"input {spec.name} has shape {list(shape)}; the model takes {shown(spec.shape)}. Change its size",
            field=field,
        )
    if isinstance(expected, int) or expected == "?":
        return
    other, name = sizes.setdefault(expected, (size, spec.name))
    if other != size:
        raise CallerError(
            f"axis {expected} is {size:,} in input {spec.name} and {other:,} in {name}; they must be equal", field=field
        )


def spec_message(spec: TensorSpec) -> inference_pb2.TensorSpec:
    return inference_pb2.TensorSpec(
        name=spec.name,
        dtype=spec.dtype,
        shape=[axis if isinstance(axis, int) else -1 for axis in spec.shape],
        axes=["" if isinstance(axis, int) else axis for axis in spec.shape],
    )


def shown(shape: Sequence[int | str]) -> str:
    return f"[{', '.join(str(axis) for axis in shape)}]"


def _list(names: Iterable[str]) -> str:
    return ", ".join(_short(name) for name in itertools.islice(names, NAMES_MAX)) or "none"


def _short(name: str) -> str:
    return name if len(name) <= 64 else f"{name[:63]}…"
