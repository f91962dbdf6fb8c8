"""Graph and weights of an engine on disk."""

from __future__ import annotations

from typing import TYPE_CHECKING

import onnx_ir as ir

if TYPE_CHECKING:
    from pathlib import Path

    from residentd_build.progress import StageProgress

ENGINE_FILE = "model.onnx"
WEIGHTS_FILE = "weights.bin"
WEIGHTS_INLINE_BYTES_MAX = 1024
WEIGHTS_ALIGNMENT = 1 << 16  # the largest page size in use, so that each matrix can be mapped by itself


def write_files(model: ir.Model, directory: Path, report: StageProgress) -> None:
    """The weights pass through one tensor at a time, out of the source's mapping."""
    directory.mkdir(exist_ok=True)

    def written(_tensor: ir.TensorProtocol, info: ir.external_data.CallbackInfo) -> None:
        report(info.index / max(info.total, 1), f"writing weights, {info.index + 1:,} of {info.total:,}")

    ir.save(
        model,
        directory / ENGINE_FILE,
        external_data=WEIGHTS_FILE,
        size_threshold_bytes=WEIGHTS_INLINE_BYTES_MAX,
        alignment=WEIGHTS_ALIGNMENT,
        callback=written,
    )
