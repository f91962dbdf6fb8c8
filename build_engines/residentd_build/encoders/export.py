"""The export as it is on ONNX Runtime, without any of its graph optimisations: what an engine is compared with.

A graph may hold a loop of any number of turns, so each run has a time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import onnxruntime as ort

from residentd.backend.messages import is_lack_of_memory, plain
from residentd.backend.onnxruntime_graph import OnnxRuntimeGraph
from residentd.errors import Finding, MachineError, SourceError
from residentd_build import watchdog

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from residentd.backend.graph import Array

RUN_S_MAX = 15.0
NUMBER_S_MAX, NUMBER_S_MAX_PER_BYTE = 1e-5, 1e-10
"""Of one run of the export, of each number that it is fed, and of each of those for each byte of weights.

Twice what a processor of 10 GFLOP/s needs to multiply and add every weight of 4 bytes once for each number.
"""


class ExportGraph(OnnxRuntimeGraph):
    """Implements backend.graph.Graph. Raises SourceError for what cannot be loaded, or does not end."""

    def __init__(self, path: Path, where: str, weight_bytes: int) -> None:
        """`where`: the file's name in findings."""
        try:
            with watchdog.loading(path, where):
                super().__init__(path, optimised=False)
        except MachineError as error:
            if is_lack_of_memory(error.__cause__):
                raise
            text = plain(error.__cause__) if isinstance(error.__cause__, Exception) else str(error)
            what = f"ONNX Runtime {ort.__version__} cannot run the export ({text})"
            raise SourceError([Finding(what, where, "Export the model again, and try it with onnxruntime")]) from error
        self._where = where
        self._number_s_max = NUMBER_S_MAX + weight_bytes * NUMBER_S_MAX_PER_BYTE

    def run(self, feeds: Mapping[str, Array], outputs: Sequence[str]) -> list[Array]:
        limit_s = RUN_S_MAX + sum(array.size for array in feeds.values()) * self._number_s_max
        with watchdog.running(limit_s, self._where) as options:
            return self.run_with(feeds, outputs, options)
