"""What an exporter wrote, once it has been read and found right: everything a build takes from the directory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    import onnx_ir as ir

    from residentd.errors import Finding
    from residentd.models.manifest import SamplingDefaults, State

MODEL_FILE = "model.onnx"
TOKENIZER_FILE = "tokenizer.json"
CHAT_TEMPLATE_FILE = "chat_template.jinja"
CONFIG_FILE = "config.json"
GENAI_FILE = "genai_config.json"
GENERATION_FILE = "generation_config.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
SPECIAL_TOKENS_FILE = "special_tokens_map.json"


@dataclass(frozen=True, slots=True)
class TextSource:
    """How text becomes ids, from the tokenizer's files. `adds_bos`: a plain prompt starts with BOS."""

    tokenizer_json: bytes
    chat_template: str | None
    bos_id: int | None
    bos_token: str
    eos_token: str
    adds_bos: bool
    eos_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Source:
    """A validated export. `model` has its weights mapped, not loaded, and is the caller's to change.

    `model_file` is relative to the directory, and `chosen` says among which others it was found. `reference` is the
    export in a form that the runtime can run, where as it is it cannot.

    `states` is what it carries from run to run; `uncanonical` what keeps its interface out of the canonical form.
    """

    directory: Path
    architecture: str
    vocab: int
    context_max: int
    text: TextSource
    sampling: SamplingDefaults
    model: ir.Model
    sha256: str
    states: tuple[State, ...] = ()
    uncanonical: tuple[Finding, ...] = ()
    model_file: str = MODEL_FILE
    chosen: str = ""
    reference: Path | None = None

    @property
    def model_path(self) -> Path:
        """The export as it is, for the runtime that is the reference."""
        return self.reference or self.directory / self.model_file

    @property
    def model_states(self) -> tuple[State, ...]:
        """What the graph at `model_path` carries from run to run; empty: its inputs say it all."""
        return () if self.reference is not None else self.states
