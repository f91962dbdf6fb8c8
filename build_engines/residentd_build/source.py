"""What an exporter wrote, once it has been read and found right: everything a build takes from the directory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    import onnx_ir as ir

    from residentd.models.manifest import SamplingDefaults

MODEL_FILE = "model.onnx"
TOKENIZER_FILE = "tokenizer.json"
CHAT_TEMPLATE_FILE = "chat_template.jinja"
CONFIG_FILE = "config.json"
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
    """A validated export. `model` has its weights mapped, not loaded, and is the caller's to change."""

    directory: Path
    architecture: str
    vocab: int
    context_max: int
    text: TextSource
    sampling: SamplingDefaults
    model: ir.Model
    sha256: str

    @property
    def model_path(self) -> Path:
        """The export as it is, for the runtime that is the reference."""
        return self.directory / MODEL_FILE
