"""A graph that is called with named tensors: what it takes and gives, and shapes that it runs with."""

from __future__ import annotations

import itertools
import math
import time
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, get_args

import onnx_ir as ir

from residentd.backend.graph import GraphError
from residentd.backend.tensor_model import golden_feeds
from residentd.errors import Finding, MachineError, SourceError, StepRetryableError
from residentd.models.encoder import TensorSpec, TensorType
from residentd_build.encoders.interface import port_of
from residentd_build.encoders.kind import architecture_of
from residentd_build.foreign import cut

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from residentd.backend.graph import Graph
    from residentd_build.encoders.directory import Opened
    from residentd_build.model_file import ModelFile
    from residentd_build.reading import Reader

    Shapes = dict[str, tuple[int, ...]]
    Found = tuple[Shapes, int]

DTYPES: Final[Mapping[str, str]] = MappingProxyType(
    {"FLOAT": "float32", "DOUBLE": "float64"} | {name.upper(): name for name in get_args(TensorType)}
)
SIZES: Final = (64, 32, 128, 224, 256, 512, 576, 640, 320, 48, 16, 8, 4, 2, 1)
"""Of free axes other than the first, in the order in which they are tried: strides, image sides, audio frames."""
WHOLE_MAX: Final = (255, 1)
"""Of whole numbers that an input is filled with: bytes and pixels; else what every table has a row for."""
TRIES_MAX: Final = 400
LOOKED_AT_MAX: Final = 10_000  # with those that are too large to be tried
TRIES_S_MAX: Final = 60.0
ELEMENTS_MAX: Final = 1 << 24  # of one made-up input
INPUTS_MAX: Final = 256


@dataclass(frozen=True, slots=True)
class TensorSource:
    directory: Path
    file: ModelFile
    architecture: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    model: ir.Model
    sha256: str

    @property
    def model_path(self) -> Path:
        """The export as it is, for the runtime that is the reference."""
        return self.directory / self.file.path


def read(opened: Opened) -> TensorSource:
    """The whole source, or every finding. Raises SourceError."""
    reader, file = opened.reader, opened.file
    model = reader.model(file.path)
    inputs: tuple[TensorSpec, ...] = ()
    outputs: tuple[TensorSpec, ...] = ()
    if model is not None:
        given = model.graph.initializers
        inputs = _specs([value for value in model.graph.inputs if value.name not in given], "input", file.path, reader)
        outputs = _specs(model.graph.outputs, "output", file.path, reader)
    sha256 = reader.settle(model, file.path)
    assert model is not None
    name = opened.config.get("model_type") or architecture_of(opened.config) or model.graph.name or "graph"
    return TensorSource(
        directory=reader.directory.path,
        file=file,
        architecture=cut(str(name), 100) if str(name).isprintable() else "graph",
        inputs=inputs,
        outputs=outputs,
        model=model,
        sha256=sha256,
    )


def shapes_that_run(graph: Graph, source: TensorSource, asked: Mapping[str, tuple[int, ...]]) -> Found:
    """Input shapes, the first axis 1 where it is free, and whole numbers that the export runs with.

    Raises SourceError, and MachineError where sizes were left out for lack of memory and none other runs.

    What the operator named is taken; the rest is tried, since nothing in a file says which sizes fit together.
    """
    deadline = time.monotonic() + TRIES_S_MAX
    last = "no size fits its fixed axes"
    lacking = ""
    tries = ((shapes, whole_max) for shapes in _candidates(source.inputs, asked) for whole_max in WHOLE_MAX)
    tried = 0
    for shapes, whole_max in itertools.islice(tries, LOOKED_AT_MAX):
        if tried == TRIES_MAX or time.monotonic() > deadline:
            break
        if any(math.prod(shape) > ELEMENTS_MAX for shape in shapes.values()):
            continue
        tried += 1
        try:
            graph.run(golden_feeds(source.inputs, shapes, 0, whole_max), [spec.name for spec in source.outputs])
        except StepRetryableError as error:
            lacking = str(error)
        except GraphError as error:
            last = str(error)
        else:
            return shapes, whole_max
    if lacking:
        raise MachineError(
            f"no sizes of the model's free axes were found that it runs with in the memory that this machine has free: "
            f"{cut(lacking, 150)}. Free some, or name small sizes, for example --shape INPUT=1x3x48x320"
        )
    free = ", ".join(f"{spec.name}{list(spec.shape)}" for spec in source.inputs)
    what = f"no sizes of its free axes were found that it runs with: {cut(free, 200)}; the last said: {cut(last, 150)}"
    raise SourceError([Finding(what, source.file.path, "Name them, for example --shape INPUT=1x3x48x320")])


def check_asked(source: TensorSource, asked: Mapping[str, tuple[int, ...]]) -> None:
    """Raise SourceError where --shape names what the graph does not have."""
    specs = {spec.name: spec for spec in source.inputs}
    for name, shape in asked.items():
        spec = specs.get(name)
        axes = () if spec is None else spec.shape
        same_rank = spec is not None and len(shape) == len(axes)
        fixed = zip(axes, shape, strict=False)
        if not same_rank or any(isinstance(axis, int) and axis != size for axis, size in fixed):
            known = ", ".join(f"{spec.name}{list(spec.shape)}" for spec in source.inputs)
            what = f"--shape {cut(name)}={'x'.join(map(str, shape))} does not fit; its inputs are {cut(known, 200)}"
            raise SourceError([Finding(what, source.file.path, "Name an input, with as many axes as it has")])


def _candidates(specs: Sequence[TensorSpec], asked: Mapping[str, tuple[int, ...]]) -> Iterator[Shapes]:
    """Every free axis the same size first, then every combination; a named axis is one size wherever it stands."""
    axes = list(dict.fromkeys(key for spec in specs if spec.name not in asked for key in _keys(spec) if key))
    firsts = {key for spec in specs for key in _keys(spec)[:1]}
    fixed = dict.fromkeys(firsts, 1)
    for spec in specs:
        fixed |= {key: size for key, size in zip(_keys(spec), asked.get(spec.name, ()), strict=False) if key}
    open_axes = [axis for axis in axes if axis not in fixed]
    if not open_axes:
        yield _filled(specs, fixed, asked)
        return
    same = (tuple([size] * len(open_axes)) for size in SIZES)
    mixed = itertools.product(SIZES, repeat=len(open_axes)) if len(open_axes) > 1 else ()
    for sizes in itertools.chain(same, mixed):
        yield _filled(specs, fixed | dict(zip(open_axes, sizes, strict=True)), asked)


def _keys(spec: TensorSpec) -> list[str]:
    """What names each free axis: its own name, or its place where it has none; empty for a fixed one."""
    return [
        "" if isinstance(axis, int) else f"{spec.name}.{place}" if axis == "?" else axis
        for place, axis in enumerate(spec.shape)
    ]


def _filled(specs: Sequence[TensorSpec], sizes: Mapping[str, int], asked: Mapping[str, tuple[int, ...]]) -> Shapes:
    return {
        spec.name: asked.get(spec.name)
        or tuple(
            axis if isinstance(axis, int) else sizes[key] for axis, key in zip(spec.shape, _keys(spec), strict=True)
        )
        for spec in specs
    }


def _specs(values: Iterable[ir.Value], what: str, where: str, reader: Reader) -> tuple[TensorSpec, ...]:
    found = []
    before = len(reader.findings)
    for value in itertools.islice(values, INPUTS_MAX + 1):
        port = port_of(ir.to_proto(value))
        dtype = DTYPES.get(ir.DataType(port.dtype).name) if port.dtype in set(ir.DataType) else None
        if dtype is None or port.shape is None:
            kind = ir.DataType(port.dtype).name if port.dtype in set(ir.DataType) else "no tensor type"
            said = f"{what} {cut(port.name)} is {kind} of {'known' if port.shape is not None else 'unknown'} rank"
            reader.add(f"{said}; numbers of known rank are needed", where, "Export it with tensors of numbers")
            continue
        found.append(TensorSpec(name=port.name, dtype=dtype, shape=port.shape))  # type: ignore[arg-type]
    if len(reader.findings) == before and not 1 <= len(found) <= INPUTS_MAX:
        reader.add(f"it has {len(found) or 'no'} {what}s; 1 to {INPUTS_MAX} are served", where, "Export it again")
    return tuple(found[:INPUTS_MAX])
