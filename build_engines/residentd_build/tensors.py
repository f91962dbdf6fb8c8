"""The tensors of a model file: what each claims to be, judged before anything is mapped, then mapped."""

from __future__ import annotations

import itertools
import mmap
import re
from collections import Counter
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import onnx_ir as ir

from residentd.errors import Finding
from residentd_build.files import RefusedError, SourceDirectory

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping

    from residentd_build.fingerprint import SourceDigest

NUMBER = re.compile(r"[0-9]{1,19}")
KNOWN_KEYS = frozenset({"location", "offset", "length", "checksum"})
DATA_FILES_MAX = 4096
DATA_FILE_BYTES_MAX = 1 << 43
UNUSED_FACTOR, UNUSED_BYTES = 2, 1 << 30
"""A data file may have so many times the bytes that its tensors use, and so many more: variants share one sometimes."""
LOOKED_AT = 1 << 20
NODES_MAX = 250_000  # 64 layers of 128 experts, decomposed, are 100,000
ELEMENTS_MAX = 1 << 44
REMEDY = "Export the model again; if it came from somebody else, do not trust it"
FILE_DTYPES = frozenset(
    {
        ir.DataType.FLOAT,
        ir.DataType.DOUBLE,
        ir.DataType.FLOAT16,
        ir.DataType.BFLOAT16,
        ir.DataType.INT8,
        ir.DataType.UINT8,
        ir.DataType.INT16,
        ir.DataType.UINT16,
        ir.DataType.INT32,
        ir.DataType.UINT32,
        ir.DataType.INT64,
        ir.DataType.UINT64,
        ir.DataType.BOOL,
    }
)
TYPED_FIELDS: Mapping[ir.DataType, str] = MappingProxyType(
    {
        ir.DataType.FLOAT: "float_data",
        ir.DataType.DOUBLE: "double_data",
        ir.DataType.INT64: "int64_data",
        ir.DataType.UINT32: "uint64_data",
        ir.DataType.UINT64: "uint64_data",
    }
)
"""Where onnx.proto puts elements that are not raw; the other types of FILE_DTYPES share int32_data."""


UNOFFICIAL = frozenset({"SimplifiedLayerNormalization"})


@dataclass(frozen=True, slots=True)
class Claim:
    """Where a tensor says that its numbers lie, in bytes."""

    location: str
    offset: int
    length: int


class DataFiles:
    """The mapped data files of one model, by location. Mappings live as long as an array that views them.

    Locations begin at the folder of `model`, the model's file as a path below the directory.
    """

    def __init__(self, directory: SourceDirectory, model: str = "model.onnx") -> None:
        self.model = model
        self._folder = model.rpartition("/")[0]
        self._directory = directory
        self._mapped: dict[str, mmap.mmap | RefusedError] = {}
        self._used: Counter[str] = Counter()

    @property
    def bytes_used(self) -> int:
        """What the tensors that were checked take, each counted."""
        return self._used.total()

    def use(self, claim: Claim) -> None:
        """Count what a checked tensor takes of its file."""
        self._used[claim.location] += claim.length

    def unused(self) -> list[Finding]:
        """Files that are far longer than what is used of them: reading one, sparse, could take for ever."""
        return [
            Finding(
                f"the data file has {size:,} bytes, of which the model uses {used:,}",
                f"{self.model}, data file {location!r}",
                "Export the model again, into an empty directory; if it came from somebody else, do not trust it",
            )
            for location, used in self._used.items()
            if (size := self.size(location)) > UNUSED_FACTOR * used + UNUSED_BYTES
        ]

    def size(self, location: str) -> int:
        """Raises RefusedError, the same one each time."""
        return len(self._map(location))

    def array(self, claim: Claim, dtype: ir.DataType, dims: Iterable[int]) -> ir.Tensor[Any]:
        data = np.frombuffer(self._map(claim.location), dtype=np.uint8, count=claim.length, offset=claim.offset)
        return ir.Tensor(data.view(dtype.numpy()).reshape(tuple(dims)), dtype=dtype)

    def add_to(self, digest: SourceDigest) -> None:
        """Every file that was mapped, by its location."""
        for location, mapped in self._mapped.items():
            if isinstance(mapped, mmap.mmap):
                digest.add(self._below(location), mapped)

    def _below(self, location: str) -> str:
        # An absolute location stays one, to be refused.
        return f"{self._folder}/{location}" if self._folder and location and location[0] != "/" else location

    def _map(self, location: str) -> mmap.mmap:
        if location not in self._mapped:
            if len(self._mapped) >= DATA_FILES_MAX:
                raise RefusedError(f"is one of more than {DATA_FILES_MAX:,} data files", REMEDY)
            try:
                self._mapped[location] = self._directory.map(self._below(location), bytes_max=DATA_FILE_BYTES_MAX)
            except RefusedError as error:
                self._mapped[location] = error
        mapped = self._mapped[location]
        if isinstance(mapped, RefusedError):
            raise mapped
        return mapped


def check_tensors(model: onnx.ModelProto, files: DataFiles) -> list[Finding]:
    """All that is wrong with the tensors of `model`, wherever they stand. One finding per bad data file or tensor."""
    findings: dict[str, Finding] = {}
    for tensor in tensors_of(model):
        finding = _check_external(tensor, files) if is_external(tensor) else _check_inline(tensor, files.model)
        if finding is not None:
            findings.setdefault(f"{finding.where} {finding.what}", finding)
    return [*findings.values(), *files.unused()]


def claim_of(tensor: onnx.TensorProto) -> Claim:
    """Raises RefusedError unless the tensor says one thing, plainly, and that is as long as its shape needs."""
    keys = [entry.key for entry in tensor.external_data]
    if len(set(keys)) < len(keys) or not set(keys) <= KNOWN_KEYS or "location" not in keys:
        raise RefusedError(f"has external data entries {', '.join(keys) or 'none'}; one location is needed", REMEDY)
    entries = {entry.key: entry.value for entry in tensor.external_data}
    expected = expected_bytes(tensor)
    numbers = {"offset": 0, "length": expected}
    for key in numbers:
        if key in entries:
            if not NUMBER.fullmatch(entries[key]):
                raise RefusedError(f"has {key} {entries[key]!r}, which is not a byte count", REMEDY)
            numbers[key] = int(entries[key])
    if numbers["length"] != expected:
        raise RefusedError(f"claims {numbers['length']:,} bytes; its shape and type need {expected:,}", REMEDY)
    return Claim(entries["location"], numbers["offset"], numbers["length"])


def expected_bytes(tensor: onnx.TensorProto) -> int:
    """Bytes of the tensor by shape and type. Raises RefusedError."""
    try:
        dtype = ir.DataType(tensor.data_type)
    except ValueError as error:
        raise RefusedError(f"has the unknown element type {tensor.data_type}", REMEDY) from error
    count = 1
    for dim in tensor.dims:
        count *= dim
        if dim < 0 or count > ELEMENTS_MAX:
            raise RefusedError(f"has the impossible shape {list(tensor.dims)}", REMEDY)
    if dtype not in FILE_DTYPES:
        raise RefusedError(f"has element type {dtype.name}, which is not supported", "Export the model in float32")
    return count * dtype.bitwidth // 8


def is_external(tensor: onnx.TensorProto) -> bool:
    return tensor.data_location == onnx.TensorProto.EXTERNAL or bool(tensor.external_data)


def _check_external(tensor: onnx.TensorProto, files: DataFiles) -> Finding | None:
    where = f"{files.model}, tensor {tensor.name!r}"
    try:
        claim = claim_of(tensor)
    except RefusedError as error:
        return Finding(f"the tensor {error.what}", where, error.remedy)
    try:
        size = files.size(claim.location)
    except RefusedError as error:
        return Finding(f"the data file {error.what}", f"{files.model}, data file {claim.location!r}", error.remedy)
    if claim.offset + claim.length > size:
        return Finding(
            f"the tensor ends at byte {claim.offset + claim.length:,} of {claim.location!r}, which has {size:,}",
            where,
            "Export the model again, or copy it completely",
        )
    files.use(claim)
    return None


def _check_inline(tensor: onnx.TensorProto, model: str) -> Finding | None:
    where = f"{model}, tensor {tensor.name!r}"
    try:
        expected = expected_bytes(tensor)
    except RefusedError as error:
        return Finding(f"the tensor {error.what}", where, error.remedy)
    dtype = ir.DataType(tensor.data_type)
    if tensor.HasField("raw_data"):
        held = len(tensor.raw_data)
    else:
        held = len(getattr(tensor, TYPED_FIELDS.get(dtype, "int32_data"))) * dtype.bitwidth // 8
    if held == expected:
        return None
    return Finding(f"the tensor holds {held:,} bytes; its shape and type need {expected:,}", where, REMEDY)


def tensors_of(model: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    """Every tensor of the file: of graphs, subgraphs, functions, attributes and training sections."""
    yield from _of_graph(model.graph)
    for function in model.functions:
        yield from _of_nodes(function.node)
    for training in model.training_info:
        yield from _of_graph(training.initialization)
        yield from _of_graph(training.algorithm)


def _of_graph(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    yield from graph.initializer
    for sparse in graph.sparse_initializer:
        yield sparse.values
        yield sparse.indices
    yield from _of_nodes(graph.node)


def _of_nodes(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.TensorProto]:
    for node in nodes:
        for attribute in node.attribute:
            if attribute.HasField("t"):
                yield attribute.t
            yield from attribute.tensors
            for sparse in (
                *attribute.sparse_tensors,
                *([attribute.sparse_tensor] if attribute.HasField("sparse_tensor") else []),
            ):
                yield sparse.values
                yield sparse.indices
            if attribute.HasField("g"):
                yield from _of_graph(attribute.g)
            for graph in attribute.graphs:
                yield from _of_graph(graph)


def nodes_of(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    """Every node, of subgraphs too."""
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            for below in (*attribute.graphs, *([attribute.g] if attribute.HasField("g") else [])):
                yield from nodes_of(below)


def count_nodes(graph: onnx.GraphProto) -> int:
    """Nodes of the graph and its subgraphs, counted as far as one above NODES_MAX."""
    return sum(1 for _ in itertools.islice(nodes_of(graph), NODES_MAX + 1))


def forget_imports(model: onnx.ModelProto, used: Collection[str]) -> None:
    """Drop the operator sets that nothing uses: tools that optimise a graph list all that they know."""
    kept = [entry for entry in model.opset_import if entry.domain in used]
    del model.opset_import[:]
    model.opset_import.extend(kept)


def skeleton_of(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model without its weights: they become inputs. It refers to no file, so a checker has none to open.

    Operators that ONNX Runtime keeps in the standard domain without being standard are moved to where it checks none.
    """
    skeleton = onnx.ModelProto(ir_version=model.ir_version, opset_import=model.opset_import)
    skeleton.graph.name = model.graph.name
    skeleton.graph.node.extend(model.graph.node)
    skeleton.graph.input.extend(model.graph.input)
    skeleton.graph.output.extend(model.graph.output)
    inputs = {value.name for value in model.graph.input}
    skeleton.graph.input.extend(
        onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)
        for tensor in model.graph.initializer
        if tensor.name not in inputs
    )
    for node in nodes_of(skeleton.graph):
        if node.op_type in UNOFFICIAL:
            node.domain = "com.microsoft"
    for tensor in tensors_of(skeleton):
        if is_external(tensor):
            tensor.ClearField("external_data")
            tensor.ClearField("data_location")
            tensor.dims[:] = [0]
            tensor.raw_data = b""
    return skeleton


def model_from_proto(proto: onnx.ModelProto, files: DataFiles) -> ir.Model:
    """The model, every external tensor a view of the checked mapping. `proto` has passed check_tensors."""
    model = ir.from_proto(proto)
    for value in (value for graph in model.graphs() for value in graph.initializers.values()):
        if isinstance(value.const_value, ir.ExternalTensor):
            value.const_value = _mapped(value.const_value, files)
    for node in ir.traversal.RecursiveGraphIterator(model.graph):
        _map_attributes(node, files)
    return model


def not_numbers(model: ir.Model) -> Iterator[str]:
    """Names of the weights in which a NaN stands, one array of LOOKED_AT numbers at a time."""
    for value in (value for graph in model.graphs() for value in graph.initializers.values()):
        tensor = value.const_value
        if tensor is None or not tensor.dtype.is_floating_point() or tensor.dtype.bitwidth < 16:
            continue
        flat = tensor.numpy().reshape(-1)
        if any(np.isnan(flat[start : start + LOOKED_AT]).any() for start in range(0, flat.size, LOOKED_AT)):
            yield str(value.name)


def _map_attributes(node: ir.Node, files: DataFiles) -> None:
    for name, attribute in list(node.attributes.items()):
        if attribute.type == ir.AttributeType.TENSOR and isinstance(attribute.value, ir.ExternalTensor):
            node.attributes[name] = ir.AttrTensor(name, _mapped(attribute.value, files))


def _mapped(tensor: ir.ExternalTensor, files: DataFiles) -> ir.Tensor[Any]:
    dims = [int(dim) for dim in tensor.shape.numpy()]
    length = tensor.length if tensor.length is not None else tensor.nbytes
    mapped = files.array(Claim(str(tensor.location), tensor.offset or 0, length), tensor.dtype, dims)
    mapped.name = tensor.name
    return mapped


def weight_bytes_of(model: ir.Model) -> int:
    """Of all weights, as the files hold them."""
    values = model.graph.initializers.values()
    return sum(value.const_value.nbytes for value in values if value.const_value is not None)
