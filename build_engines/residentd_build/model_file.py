"""Which of a directory's ONNX files is the model: by its exporter's rules, or as the operator says.

    model.onnx                                    optimum, torch
    decoder_model_merged.onnx                     optimum before 1.14, both of whose branches are in one file
    genai_config.json, model.decoder.filename     onnxruntime-genai
    onnx/model.onnx, onnx/model_q4.onnx, …        transformers.js: one file a precision

Without a choice the least quantised is taken: what has lost precision cannot get it back, and a build quantises as the
operator asks.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from residentd_build.files import MissingError, RefusedError
from residentd_build.foreign import cut
from residentd_build.source import CONFIG_FILE, GENAI_FILE

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from residentd_build.files import SourceDirectory

SUFFIX = ".onnx"
FOLDERS = ("", "onnx")
STEMS = ("model", "decoder_model_merged", "decoder_with_past_model")
VARIANTS = ("", "fp32", "fp16", "bf16", "int8", "quantized", "uint8", "q8", "q4", "int4", "q4f16", "bnb4")
"""What follows the stem, in the order of preference. `quantized` is transformers.js's name for int8."""
NAMED_MAX = 12


@dataclass(frozen=True, slots=True)
class ModelFile:
    """`path` is relative to the source directory; `line` says what was chosen, empty where there was no choice."""

    path: str
    line: str = ""

    @property
    def folder(self) -> str:
        """Where the locations of its data files begin; empty for the source directory itself."""
        parent = PurePosixPath(self.path).parent.as_posix()
        return "" if parent == "." else parent


def find_model(directory: SourceDirectory, genai: Mapping[str, Any], wanted: str | None) -> ModelFile:
    """The file to build: `wanted` is a file's path or name, or a variant's name. Raises RefusedError."""
    found = _files(directory)
    if wanted is not None:
        return ModelFile(_chosen(found, wanted))
    named = _named_by_genai(genai)
    if named is not None:
        return ModelFile(named)
    if not found:
        raise MissingError("is missing", "Export the model again, or copy it completely")
    if len(found) == 1:
        return ModelFile(found[0])
    known = sorted((rank, path) for path in found if (rank := _rank(path)) is not None)
    if not known:
        raise RefusedError(f"could be any of {_list(found)}", "Name one with --variant")
    path = known[0][1]
    others = [other for _, other in known[1:]]
    line = f"source: {path}, of {len(found)} files; --variant chooses another ({_list(others)})" if others else ""
    return ModelFile(path, line)


def _files(directory: SourceDirectory) -> list[str]:
    return [
        f"{folder}/{name}" if folder else name
        for folder in FOLDERS
        for name in sorted(directory.names(folder))
        if name.endswith(SUFFIX)
    ]


def _chosen(found: Sequence[str], wanted: str) -> str:
    paths = [path for path in found if path == wanted] or [
        path for path in found if wanted in {PurePosixPath(path).name, PurePosixPath(path).stem}
    ]
    paths = paths or [path for path in found if _variant(path) == wanted]
    if not paths:
        raise RefusedError(
            f"was to be {cut(wanted)!r}, and there is {_list(found)}", "Name one of these with --variant"
        )
    ranked = sorted(paths, key=lambda path: _rank(path) or (len(VARIANTS), 0, 0))
    return ranked[0]


def _rank(path: str) -> tuple[int, int, int] | None:
    """Lower is better; None: no exporter's name."""
    pure = PurePosixPath(path)
    variant, stem = _variant(path), _stem(path)
    if stem is None or variant not in VARIANTS:
        return None
    folder = "" if pure.parent.as_posix() == "." else pure.parent.as_posix()
    return VARIANTS.index(variant), FOLDERS.index(folder), STEMS.index(stem)


def _stem(path: str) -> str | None:
    name = PurePosixPath(path).stem
    fitting = [stem for stem in STEMS if name == stem or name.startswith(f"{stem}_")]
    return max(fitting, key=len, default=None)


def _variant(path: str) -> str | None:
    stem = _stem(path)
    return None if stem is None else PurePosixPath(path).stem.removeprefix(stem).removeprefix("_")


def _named_by_genai(config: Mapping[str, Any]) -> str | None:
    model = config.get("model")
    decoder = model.get("decoder") if isinstance(model, dict) else None
    name = decoder.get("filename") if isinstance(decoder, dict) else None
    return name if isinstance(name, str) and name else None


def _list(paths: Sequence[str]) -> str:
    more = f" and {len(paths) - NAMED_MAX} more" if len(paths) > NAMED_MAX else ""
    return ", ".join(paths[:NAMED_MAX]) + more if paths else "no ONNX file"


def split_source(source: Path, variant: str | None) -> tuple[Path, str | None]:
    """The directory and the choice in it. `source` may name the ONNX file itself."""
    if source.suffix != SUFFIX or not source.is_file():
        return source, variant
    folder = source.parent
    has_configs = any((folder / name).is_file() for name in (CONFIG_FILE, GENAI_FILE))
    if folder.name in FOLDERS and not has_configs:
        return folder.parent, f"{folder.name}/{source.name}"
    return folder, source.name
