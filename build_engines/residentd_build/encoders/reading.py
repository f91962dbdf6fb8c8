"""Files of a source directory, read once, digested, and judged while they are read."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import onnx
import onnx_ir as ir
from google.protobuf.message import DecodeError

from residentd_build.encoders.interface import Interface, InterfaceError, read_interface
from residentd_build.files import MissingError, RefusedError, SourceDirectory
from residentd_build.fingerprint import SourceDigest
from residentd_build.model_file import ModelFile, find_model
from residentd_build.report import JSON_BYTES_MAX, MODEL_BYTES_MAX, Report
from residentd_build.tensors import DataFiles, check_tensors, model_from_proto, skeleton_of

OPSET_MIN, OPSET_MAX = 7, 25  # ONNX Runtime's own range
DOMAINS = frozenset({"", "ai.onnx", "ai.onnx.ml", "com.microsoft"})
RESTORE = "Restore the file from the model's own directory"
EXPORT_AGAIN = "Export the model again, or copy it completely"


@dataclass(slots=True)
class Reader(Report):
    """Reads what it is asked for, and collects what is wrong with it."""

    directory: SourceDirectory
    digest: SourceDigest = field(default_factory=SourceDigest)

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
            self.add("the file is empty", name, EXPORT_AGAIN)
            return None
        return data

    def json(self, name: str, kind: type[Any] = dict, *, needed: str = "") -> Any:
        """The parsed file, a `kind`; an empty one if there is no file, or one that is wrong."""
        data = self.bytes(name, JSON_BYTES_MAX, needed=needed)
        if data is None:
            return kind()
        try:
            parsed = json.loads(data)
            json.dumps(parsed, ensure_ascii=False).encode()  # JSON's escapes can name what no text holds
        except (ValueError, RecursionError) as error:
            self.add(f"it is not valid JSON ({error})", name, RESTORE)
            return kind()
        if not isinstance(parsed, kind):
            self.add(f"it is not a JSON {'object' if kind is dict else 'array'}", name, RESTORE)
            return kind()
        return parsed

    def find(self, wanted: str | None) -> ModelFile | None:
        try:
            return find_model(self.directory, {}, wanted)
        except RefusedError as error:
            self.add(f"the file {error.what}", "model.onnx", error.remedy)
            return None

    def interface(self, path: str) -> Interface | None:
        """Inputs and outputs alone; None where the file cannot be read, which `model` says why."""
        try:
            mapped = self.directory.map(path, bytes_max=MODEL_BYTES_MAX)
        except RefusedError:
            return None
        with mapped, memoryview(mapped) as view:
            try:
                return read_interface(view)
            except InterfaceError:
                return None

    def model(self, file: ModelFile) -> ir.Model | None:
        """The checked graph, its weights mapped. Nothing that it refers to is opened before it was judged."""
        try:
            mapped = self.directory.map(file.path, bytes_max=MODEL_BYTES_MAX)
        except RefusedError as error:
            self.add(f"the file {error.what}", file.path, error.remedy)
            return None
        with mapped, memoryview(mapped) as view:
            self.digest.add(file.path, mapped)
            try:
                proto = onnx.ModelProto.FromString(view)  # type: ignore[arg-type]
            except (DecodeError, ValueError) as error:
                self.add(f"it is not an ONNX file ({error})", file.path, EXPORT_AGAIN)
                return None
        data = DataFiles(self.directory, file.path)
        harmful = check_tensors(proto, data)
        self.findings += harmful
        if not _check_versions(proto, file.path, self) or harmful:
            return None
        try:
            onnx.checker.check_model(skeleton_of(proto))
            model = model_from_proto(proto, data)
        except Exception as error:  # noqa: BLE001 - whatever these libraries say about a malformed file is the finding
            first = str(error).splitlines()[0][:300] if str(error) else type(error).__name__
            self.add(f"it is not a well-formed ONNX model ({first})", file.path, EXPORT_AGAIN)
            return None
        data.add_to(self.digest)
        return model


def _check_versions(proto: onnx.ModelProto, where: str, reader: Reader) -> bool:
    before = len(reader.findings)
    opsets = {entry.domain: entry.version for entry in proto.opset_import}
    opset = opsets.get("", opsets.get("ai.onnx", 0))
    if not OPSET_MIN <= opset <= OPSET_MAX:
        reader.add(f"it uses opset {opset}; {OPSET_MIN} to {OPSET_MAX} are supported", where, "Export it again")
    unknown = sorted(({node.domain for node in proto.graph.node} | opsets.keys()) - DOMAINS)
    if unknown:
        what = f"it uses operators of {', '.join(unknown)}, which are not supported"
        reader.add(what, where, "Export it without custom operators")
    if proto.functions or proto.training_info or proto.graph.sparse_initializer:
        what = "it has model-local functions, a training section or sparse weights, which are not supported"
        reader.add(what, where, "Export it for inference, with functions inlined")
    return len(reader.findings) == before
