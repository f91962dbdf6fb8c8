"""Any ONNX graph on ONNX Runtime's CPU provider, as it was exported; ONNX Runtime fuses what it can when it loads."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import onnxruntime as ort

from residentd.backend.graph import Array, GraphError
from residentd.backend.onnxruntime import OUT_OF_MEMORY_MARKS, RuntimeOptions, session_options
from residentd.errors import MachineError, StepRetryableError

MESSAGE_CHARS_MAX = 300
SOURCE_PLACE = re.compile(r"\S*/\S*\.(?:cc|h|cpp)\b\S*( \S+\(.*?\))?")


class OnnxRuntimeGraph:
    """One loaded graph; implements backend.graph.Graph. Used by one thread.

    optimised False: node by node as the exporter wrote it, the reference of verification. has_arena: memory is kept
    from run to run, 10 to 30 % off a run of MiniLM-L6 (CPU time, onnxruntime 1.32.0, 2026-12); for calls of bounded
    size, since it is that of the largest for ever.
    """

    def __init__(
        self, path: Path, options: RuntimeOptions | None = None, *, optimised: bool = True, has_arena: bool = False
    ) -> None:
        settings = session_options(options)
        settings.enable_cpu_mem_arena = has_arena
        if not optimised:
            settings.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        try:
            self._session = ort.InferenceSession(os.fspath(path), settings, providers=["CPUExecutionProvider"])
        except Exception as error:
            raise MachineError(
                f"ONNX Runtime {ort.__version__} cannot load the graph: {plain(error)}. Install the version again"
            ) from error

    @property
    def session(self) -> Any:
        return self._session

    def run(self, feeds: Mapping[str, Array], outputs: Sequence[str]) -> list[Array]:
        try:
            arrays: list[Array] = self._session.run(list(outputs), dict(feeds))
        except Exception as error:
            text = plain(error)
            if isinstance(error, MemoryError) or any(mark in text for mark in OUT_OF_MEMORY_MARKS):
                raise StepRetryableError(f"a run of the graph ran out of memory ({text})") from error
            raise GraphError(text) from error
        return arrays

    def close(self) -> None:
        """Release the memory. The graph cannot be run afterwards."""
        del self._session


def plain(error: Exception) -> str:
    """What ONNX Runtime says, in one short line without places in its own sources or in the file system."""
    text = " ".join(str(error).split()) or type(error).__name__
    text = SOURCE_PLACE.sub("", re.sub(r"^\[ONNXRuntimeError\] : \d+ : ", "", text))
    text = re.sub(r"(?<!\w)/(?:[\w.+-]+/)+[\w.+-]*", "…", text)
    return text if len(text) <= MESSAGE_CHARS_MAX else f"{text[: MESSAGE_CHARS_MAX - 1]}…"
