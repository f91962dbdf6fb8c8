"""Any ONNX graph on ONNX Runtime's CPU provider, as it was exported; ONNX Runtime fuses what it can when it loads."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import onnxruntime as ort

from residentd.backend.graph import Array, GraphError
from residentd.backend.messages import is_lack_of_memory, plain
from residentd.backend.onnxruntime import RuntimeOptions, session_options
from residentd.errors import MachineError, StepRetryableError

__all__ = ["OnnxRuntimeGraph", "plain"]


class OnnxRuntimeGraph:
    """One loaded graph; implements backend.graph.Graph. Used by one thread.

    optimised False: node by node as the exporter wrote it, the reference of verification. has_arena: memory is kept
    from run to run, 10 to 30 % off a run of MiniLM-L6 (CPU time, onnxruntime 1.32.0, 2026-12); for calls of bounded
    size, since it is that of the largest for ever. remedy: what to do where it cannot be loaded.
    """

    def __init__(
        self,
        path: Path,
        options: RuntimeOptions | None = None,
        *,
        optimised: bool = True,
        has_arena: bool = False,
        remedy: str = "Install the version again",
    ) -> None:
        settings = session_options(options)
        settings.enable_cpu_mem_arena = has_arena
        if not optimised:
            settings.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        try:
            self._session = ort.InferenceSession(os.fspath(path), settings, providers=["CPUExecutionProvider"])
        except Exception as error:
            raise MachineError(
                f"ONNX Runtime {ort.__version__} cannot load the graph: {plain(error)}. {remedy}"
            ) from error

    def run(self, feeds: Mapping[str, Array], outputs: Sequence[str]) -> list[Array]:
        return self.run_with(feeds, outputs, None)

    def run_with(self, feeds: Mapping[str, Array], outputs: Sequence[str], options: Any) -> list[Array]:
        """`run` with ONNX Runtime's RunOptions, by which another thread can end it."""
        try:
            arrays: list[Array] = self._session.run(list(outputs), dict(feeds), options)
        except Exception as error:
            text = plain(error)
            if is_lack_of_memory(error):
                raise StepRetryableError(f"a run of the graph ran out of memory ({text})") from error
            raise GraphError(text) from error
        return arrays

    def close(self) -> None:
        """Release the memory. The graph cannot be run afterwards."""
        del self._session
