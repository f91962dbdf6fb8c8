"""A source directory of unknown kind: opened, looked at, and its kind decided."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from residentd.errors import Finding, SourceError
from residentd_build.encoders.kind import KINDS, Evidence, Guess, misfit, recognise
from residentd_build.encoders.reading import Reader
from residentd_build.encoders.sentence import modules_of
from residentd_build.files import RefusedError, SourceDirectory
from residentd_build.source import CONFIG_FILE, GENAI_FILE

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from residentd.models.encoder import Kind
    from residentd_build.encoders.interface import Interface
    from residentd_build.model_file import ModelFile
    from residentd_build.options import Options


@dataclass(frozen=True, slots=True)
class Opened:
    """What is known before the graph is parsed. Its reader has the findings so far."""

    reader: Reader
    kind: Kind
    why: str
    file: ModelFile
    interface: Interface
    config: dict[str, Any]
    modules: tuple[tuple[str, str], ...] | None
    context: int | None


@contextlib.contextmanager
def opening(path: Path) -> Iterator[Reader]:
    """Raises SourceError where there is no directory to read."""
    try:
        directory = SourceDirectory(path)
    except RefusedError as error:
        raise SourceError([Finding(f"it {error.what}", str(path), error.remedy)]) from error
    with directory:
        yield Reader(directory)


def look(reader: Reader, options: Options, variant: str | None) -> Opened | None:
    """The directory's kind and what shows it. None: a model that generates, as far as anybody can tell.

    Raises SourceError for a kind that nothing here serves, or that this directory cannot be.
    """
    file = reader.find(variant)
    interface = None if file is None else reader.interface(file.path)
    config: dict[str, Any] = reader.json(CONFIG_FILE)
    if file is None and not config and GENAI_FILE not in reader.directory.names(""):
        reader.raise_if_any()
    if file is None or interface is None:
        return None  # its findings are those of a model that generates
    modules = modules_of(reader)
    evidence = Evidence(interface, config, None if modules is None else tuple(name for name, _ in modules))
    guess = recognise(evidence) if options.kind not in KINDS else Guess(options.kind, "the operator says so")
    found = guess if isinstance(guess, Finding) else misfit(guess.kind, evidence)
    if found is not None:
        raise SourceError([*reader.findings, found])
    assert isinstance(guess, Guess)
    if guess.kind == "generate":
        return None
    return Opened(reader, guess.kind, guess.why, file, interface, config, modules, options.context)
