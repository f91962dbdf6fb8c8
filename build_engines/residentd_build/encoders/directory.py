"""A source directory of unknown kind: looked at, and its kind decided before its graph is parsed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from residentd.errors import Finding, SourceError
from residentd_build.encoders.interface import InterfaceError, read_interface
from residentd_build.encoders.kind import MODEL_KINDS, Evidence, Guess, may_generate, misfit, recognise
from residentd_build.encoders.sentence import modules_of
from residentd_build.reading import COPY_AGAIN, Dialect
from residentd_build.source import CONFIG_FILE, GENAI_FILE, TOKENIZER_FILE

if TYPE_CHECKING:
    from residentd.models.encoder import Kind
    from residentd_build.encoders.interface import Interface
    from residentd_build.encoders.sentence import Module
    from residentd_build.model_file import ModelFile
    from residentd_build.options import Options
    from residentd_build.reading import Reader

DIALECT = Dialect(
    opset_min=7,  # to 25: ONNX Runtime's own range
    opset_max=25,
    domains=frozenset({"", "ai.onnx", "ai.onnx.ml", "com.microsoft"}),
    again="Export the model again",
    opset_again="Export it again",
)


@dataclass(frozen=True, slots=True)
class Opened:
    """What is known before the graph is parsed. Its reader has the findings so far."""

    reader: Reader
    kind: Kind
    why: str
    file: ModelFile
    interface: Interface
    config: dict[str, Any]
    modules: tuple[Module, ...] | None
    context: int | None


def look(reader: Reader, options: Options, variant: str | None) -> Opened | None:
    """The directory's kind and what shows it. None: a model that generates, as far as anybody can tell.

    Raises SourceError for a kind that nothing here serves, or that this directory cannot be.
    """
    file = reader.find(variant)
    interface = None if file is None else _interface(reader, file.path)
    config: dict[str, Any] = reader.json(CONFIG_FILE)
    modules = modules_of(reader)
    names = None if modules is None else tuple(module.name for module in modules)
    if file is None or interface is None:
        if options.kind in MODEL_KINDS or not _may_generate(reader, file, config, names):
            reader.raise_if_any()
        return None  # its findings are those of a model that generates
    evidence = Evidence(interface, config, names)
    guess = recognise(evidence) if options.kind not in MODEL_KINDS else Guess(options.kind, "the operator says so")
    found = guess if isinstance(guess, Finding) else misfit(guess.kind, evidence)
    if found is not None:
        raise SourceError([*reader.findings, found])
    assert isinstance(guess, Guess)
    if guess.kind == "generate":
        return None
    return Opened(reader, guess.kind, guess.why, file, interface, config, modules, options.context)


def _interface(reader: Reader, path: str) -> Interface | None:
    """Inputs and outputs alone."""
    mapped = reader.map(path)
    if mapped is None:
        return None
    with mapped, memoryview(mapped) as view:
        try:
            return read_interface(view)
        except InterfaceError as error:
            reader.add(str(error), path, COPY_AGAIN)
            return None


def _may_generate(
    reader: Reader, file: ModelFile | None, config: dict[str, Any], modules: tuple[str, ...] | None
) -> bool:
    """Whether the files beside a graph that cannot be read may be those of a model that generates."""
    names = reader.directory.names("")
    if GENAI_FILE in names:
        return True
    if not config and (file is None or TOKENIZER_FILE not in names):
        return False
    return may_generate(config, modules)
