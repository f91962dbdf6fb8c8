"""Which backend runs an engine of ONNX Runtime: by the mode that it was built in."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import numpy.typing as npt

from residentd.backend import compatibility, onnxruntime
from residentd.backend.base import Backend
from residentd.backend.onnxruntime import MemoryNeed, RuntimeOptions
from residentd.models.manifest import Engine


class OpenBackend(Backend, Protocol):
    """A backend whose memory of sequences can be looked into: for verification, which poisons it."""

    @property
    def caches(self) -> tuple[npt.NDArray[Any], ...]: ...


def open_engine(directory: Path, engine: Engine, options: RuntimeOptions | None = None) -> OpenBackend:
    """Load `engine` from the version's `directory`. Raises MachineError or StoreError before anything is held."""
    if engine.mode == "compatibility":
        return compatibility.CompatibilityBackend(directory, engine, options=options)
    return onnxruntime.OnnxRuntimeBackend(directory, engine, options=options)


def memory_need(directory: Path, engine: Engine) -> MemoryNeed:
    """What loading `engine` takes, from the sizes of its files and its limits."""
    if engine.mode == "compatibility":
        return compatibility.memory_need(directory, engine)
    return onnxruntime.memory_need(directory, engine)
