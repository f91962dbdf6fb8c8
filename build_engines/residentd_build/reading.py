"""Files of a source directory, whatever kind of model it holds: read once, digested, and judged while they are read.

Nothing that the model's file refers to is opened before it was judged, and no weight is read before all else is right.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import onnx
import onnx_ir as ir
import psutil
from google.protobuf.message import DecodeError

from residentd.errors import Finding, MachineError, SourceError
from residentd_build.chance import chance_findings
from residentd_build.files import MissingError, RefusedError, SourceDirectory
from residentd_build.fingerprint import SourceDigest
from residentd_build.foreign import cut
from residentd_build.model_file import ModelFile, find_model
from residentd_build.report import Report
from residentd_build.source import CONFIG_FILE, MODEL_FILE
from residentd_build.tensors import (
    NODES_MAX,
    REMEDY,
    DataFiles,
    check_tensors,
    count_nodes,
    forget_imports,
    model_from_proto,
    nodes_of,
    not_numbers,
    skeleton_of,
)

if TYPE_CHECKING:
    import mmap
    from collections.abc import Iterator, Mapping
    from pathlib import Path

MODEL_BYTES_MAX = (1 << 31) - 1  # protobuf's own limit; larger models keep their weights in data files
JSON_BYTES_MAX = 16 << 20
ARCHITECTURE_CHARS_MAX = 100
LIBRARY_CHARS_MAX = 300  # of what a library says about a malformed file
RESTORE = "Restore the file from the model's own directory"
COPY_AGAIN = "Export the model again, or copy it completely"
NAN_REMEDY = "Export the model again, as fp32; if it is so there too, its training failed or the file is damaged"


@dataclass(frozen=True, slots=True)
class Dialect:
    """What a graph may be written in. `again` exports the model as it should be, `opset_again` in another opset."""

    opset_min: int
    opset_max: int
    domains: frozenset[str]
    again: str
    opset_again: str


@dataclass(slots=True)
class Reader(Report):
    """Reads what it is asked for, and collects what is wrong with it."""

    directory: SourceDirectory
    dialect: Dialect
    digest: SourceDigest = field(default_factory=SourceDigest)
    _data: DataFiles | None = field(default=None, init=False)  # of the model that was read

    def bytes(self, name: str, bytes_max: int, *, needed: str = "") -> bytes | None:
        """The whole file; None if there is none. `needed` is what to do if it must be there and is not."""
        try:
            data = self.directory.read(name, bytes_max=bytes_max)
        except MissingError as error:
            if needed:
                self.add(f"the file {error.what}", name, needed)
            return None
        except RefusedError as error:
            self.add(f"the file {error.what}", name, error.remedy)
            return None
        self.digest.add(name, data)
        if needed and not data:
            self.add("the file is empty", name, COPY_AGAIN)
            return None
        return data

    def json(self, name: str, kind: type[Any] = dict, *, needed: str = "") -> Any:
        """The parsed file, a `kind`; an empty one if there is no file, or one that is wrong."""
        data = self.bytes(name, JSON_BYTES_MAX, needed=needed)
        if data is None:
            return kind()
        try:
            parsed = json.loads(data)
        except (ValueError, RecursionError) as error:
            self.add(f"it is not valid JSON ({error})", name, RESTORE)
            return kind()
        if not _is_text(parsed):
            self.add("it holds half a surrogate pair (\\ud800 to \\udfff alone), which is no text", name, RESTORE)
            return kind()
        if not isinstance(parsed, kind):
            self.add(f"it is not a JSON {'object' if kind is dict else 'array'}", name, RESTORE)
            return kind()
        return parsed

    def architecture(self, config: Mapping[str, Any], otherwise: str = "") -> str:
        """What config.json calls the model's kind, else `otherwise`; only shown."""
        name = config.get("model_type") or otherwise or "unknown"
        if isinstance(name, str) and len(name) <= ARCHITECTURE_CHARS_MAX and name.isprintable():
            return name
        what = f"model_type is {cut(json.dumps(name))}; a name of at most {ARCHITECTURE_CHARS_MAX} characters is needed"
        self.add(what, CONFIG_FILE, RESTORE)
        return ""

    def find(self, wanted: str | None, genai: Mapping[str, Any] | None = None) -> ModelFile | None:
        """Which of the directory's ONNX files is the model; a finding where there is none, or any could be."""
        try:
            return find_model(self.directory, genai or {}, wanted)
        except MissingError as error:
            self.add(f"the file {error.what}", MODEL_FILE, f"{self.dialect.again}, which writes it")
        except RefusedError as error:
            self.add(f"the file {error.what}", MODEL_FILE, error.remedy)
        return None

    def map(self, path: str) -> mmap.mmap | None:
        """The model's file as it is."""
        try:
            return self.directory.map(path, bytes_max=MODEL_BYTES_MAX)
        except RefusedError as error:
            self.add(f"the file {error.what}", path, error.remedy)
            return None

    def model(self, path: str) -> ir.Model | None:
        """The checked graph, its weights mapped and not read."""
        proto = self._parsed(path)
        if proto is None:
            return None
        if count_nodes(proto.graph) > NODES_MAX:
            self.add(f"it has more than {NODES_MAX:,} nodes", path, REMEDY)
            return None
        self._data = DataFiles(self.directory, path)
        harmful = check_tensors(proto, self._data)
        self.findings += harmful
        if not self._check_dialect(proto, path) or harmful:
            return None
        try:
            onnx.checker.check_model(skeleton_of(proto))
            model = model_from_proto(proto, self._data)
            self.findings += chance_findings(model, path)
        except Exception as error:  # noqa: BLE001 - whatever these libraries say about a malformed file is the finding
            first = str(error).splitlines()[0][:LIBRARY_CHARS_MAX] if str(error) else type(error).__name__
            self.add(f"it is not a well-formed ONNX model ({first})", path, self.dialect.again)
            return None
        return model

    def settle(self, model: ir.Model | None, path: str) -> str:
        """The source's digest, once nothing is found wrong with it and every weight has been read.

        Raises SourceError with every finding, MachineError if the weights are more than this machine could hold.
        """
        self.raise_if_any()
        assert model is not None  # else a finding says why
        assert self._data is not None
        _check_machine(self._data)
        for name in not_numbers(model):
            self.add("the weight holds NaN", f"{path}, tensor {name!r}", NAN_REMEDY)
        self.raise_if_any()
        self._data.add_to(self.digest)
        return self.digest.hexdigest()

    def _parsed(self, path: str) -> onnx.ModelProto | None:
        """The parsed file; nothing that it refers to is opened."""
        mapped = self.map(path)
        if mapped is None:
            return None
        with mapped, memoryview(mapped) as view:
            self.digest.add(path, mapped)
            try:
                # protobuf copies what it parses, so weights inside the file are held once; its stubs know bytes only.
                return onnx.ModelProto.FromString(view)  # type: ignore[arg-type]
            except (DecodeError, ValueError) as error:
                self.add(f"it is not an ONNX file ({error})", path, COPY_AGAIN)
                return None

    def _check_dialect(self, proto: onnx.ModelProto, path: str) -> bool:
        """Whether the graph is written in it. Imports that nothing uses are dropped from `proto`."""
        before, dialect = len(self.findings), self.dialect
        opsets = {entry.domain: entry.version for entry in proto.opset_import}
        used = {node.domain for node in nodes_of(proto.graph)}
        opset = opsets.get("", opsets.get("ai.onnx", 0))
        if not dialect.opset_min <= opset <= dialect.opset_max:
            what = f"it uses opset {opset}; {dialect.opset_min} to {dialect.opset_max} are supported"
            self.add(what, path, dialect.opset_again)
        unknown = sorted(used - dialect.domains)
        if unknown:
            what = f"it uses operators of {', '.join(unknown)}, which are not supported"
            self.add(what, path, "Export it without custom operators")
        forget_imports(proto, used | dialect.domains)
        if proto.functions or proto.training_info or proto.graph.sparse_initializer:
            what = "it has model-local functions, a training section or sparse weights, which are not supported"
            self.add(what, path, "Export it for inference, with functions inlined")
        return len(self.findings) == before


@contextlib.contextmanager
def opening(path: Path, dialect: Dialect) -> Iterator[Reader]:
    """A reader of the directory. Raises SourceError where there is none to read."""
    try:
        directory = SourceDirectory(path)
    except RefusedError as error:
        raise SourceError([Finding(f"it {error.what}", str(path), error.remedy)]) from error
    with directory:
        yield Reader(directory, dialect)


def _is_text(parsed: object) -> bool:
    """Whether every string can be written as UTF-8: JSON's escapes can name what no text holds."""
    try:
        json.dumps(parsed, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def _check_machine(data: DataFiles) -> None:
    """Raise MachineError before the weights are read if no build of them could be loaded here."""
    memory = psutil.virtual_memory().total
    if data.bytes_used > memory:
        raise MachineError(
            f"the weights have {data.bytes_used >> 20:,} MiB and this machine has {memory >> 20:,} MiB of memory, into "
            "which they must fit to be verified. Build on a larger machine, or take an export of fewer bits"
        )
