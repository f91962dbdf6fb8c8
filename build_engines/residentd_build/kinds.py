"""One build, of whatever kind the source turns out to be."""

from __future__ import annotations

from typing import TYPE_CHECKING

from residentd_build import pipeline
from residentd_build.encoders import build as encoder_build
from residentd_build.encoders import tensor_build, tensor_source
from residentd_build.encoders.choices import refuse_unheeded
from residentd_build.encoders.directory import DIALECT, look
from residentd_build.encoders.tensor_source import TensorSource
from residentd_build.foreign import refusing
from residentd_build.model_file import split_source
from residentd_build.reading import opening

if TYPE_CHECKING:
    from pathlib import Path

    from residentd.models.manifest import Manifest
    from residentd_build.encoders.directory import Opened
    from residentd_build.encoders.source import EncoderSource
    from residentd_build.options import Options
    from residentd_build.pipeline import Room
    from residentd_build.progress import Progress


def build(directory: Path, stage: Path, options: Options, progress: Progress, check_room: Room) -> Manifest:
    """Compile `directory` into `stage` and verify it. Raises SourceError, AccuracyError, MachineError."""
    if options.kind != "generate":
        progress("validate", 0.0, f"reading {directory}")
        folder, variant = split_source(directory, options.variant)
        with opening(folder, DIALECT) as reader:
            with refusing("read"):
                opened = look(reader, options, variant)
                found = None if opened is None else read(opened, options, progress)
            if isinstance(found, TensorSource):
                return tensor_build.build(found, stage, options, progress, check_room)
            if found is not None:
                return encoder_build.build(found, stage, options, progress, check_room)
    refuse_unheeded(options, "generate")
    return pipeline.build(directory, stage, options, progress, check_room)


def read(opened: Opened, options: Options, progress: Progress) -> EncoderSource | TensorSource:
    """The whole source, or every finding. Raises SourceError, OptionsError before anything large is read."""
    progress("validate", 0.05, f"of kind {opened.kind}: {opened.why}")
    refuse_unheeded(options, opened.kind)
    return tensor_source.read(opened) if opened.kind == "tensor" else encoder_build.read(opened)
