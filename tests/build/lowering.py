"""Run the passes over a directory or a model file, as the pipeline does, and write the engine."""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir

from residentd_build.draft import Draft, draft_from_model
from residentd_build.pipeline import rewrite, write_engine
from residentd_build.validate import validate

EXPORTS = Path(__file__).resolve().parent.parent / "fixtures" / "exports"
STEP_TOKENS = 512


def quiet(_stage: str, _fraction: float, _message: str) -> None:
    """Progress that nobody watches."""


def draft_of(model: ir.Model, context: int) -> Draft:
    return draft_from_model(model, context=context, step_tokens=STEP_TOKENS)


def lower_model(model: ir.Model, stage: Path, context: int) -> tuple[Path, list[str]]:
    """The engine's graph file in `stage`, and what the passes said."""
    stage.mkdir(parents=True, exist_ok=True)
    draft = draft_of(model, context)
    lines = rewrite(draft, quiet)
    write_engine(draft, stage, quiet)
    return stage / "engine" / "model.onnx", lines


def lower_directory(directory: Path, stage: Path, context: int) -> tuple[Path, list[str]]:
    return lower_model(validate(directory).model, stage, context)
