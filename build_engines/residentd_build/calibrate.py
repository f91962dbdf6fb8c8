"""How much each input of a matrix matters: the mean square of what it is multiplied with, over text of the model's own.

The fp32 engine, with one more output for each source of a product, writes SEQUENCES texts from random first tokens. No
data set is needed, the text is what the model is about, and of each source one sum per input is kept. Choosing the
scales of int4 by it halves the loss: KL 0.33 to 0.17 (SmolLM2-135M, symmetric blocks of 32, 2026-12). GPTQ, which needs
second moments between inputs, gave 0.21 with scales from a coarser search that alone gave 0.21.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import onnxruntime as ort
from onnx_ir.tape import Tape

from residentd.backend.onnxruntime import CAPACITY_INPUT, STEP_INPUTS, session_options
from residentd.backend.steps import StepArranger
from residentd.types import Limits, RequestId, Row
from residentd_build.draft import LOGITS_OUTPUT, Draft
from residentd_build.passes.layout import reshape
from residentd_build.passes.products import products
from residentd_build.passes.quantise import reduced

if TYPE_CHECKING:
    from residentd.models.manifest import Engine
    from residentd_build.matrices import Floats

SEQUENCES, TOKENS = 8, 64
"""Of the text. Eight times as much gained nothing (KL 0.167 and 0.166 on SmolLM2-135M)."""
TOKENS_MIN = 8  # written even when time is up
SECONDS_MAX = 120.0
TEMPERATURE = 0.8
SEED = 20261203
GRAPH_FILE = "calibration.onnx"
FLOOR = 1e-4
"""Of the mean: an input that was never met matters a little."""

Clock = Callable[[], float]
Integers = npt.NDArray[np.int64]


def importance(
    stage: Path, engine: Engine, report: Callable[[float, str], None], clock: Clock = time.monotonic
) -> Mapping[str, Floats]:
    """By the name of a matrix of the lowered graph: float32 [inputs] of mean 1. `engine`, in `stage`, is its fp32."""
    graph = (stage / engine.path).parent / GRAPH_FILE
    sources = _write_graph(stage / engine.path, graph)
    try:
        writer = _Writer(graph, engine, sorted(set(sources.values())))
        rng = np.random.default_rng(SEED)
        tokens = rng.integers(0, engine.limits.vocab, SEQUENCES)
        began = clock()
        for place in range(min(TOKENS, engine.limits.context)):
            if place >= TOKENS_MIN and clock() - began > SECONDS_MAX:
                break
            tokens = _drawn(writer.step(tokens, place), rng)
            report(place / TOKENS, "reading text of the model's own")
        return {matrix: _weights(writer.squares[source]) for matrix, source in sources.items()}
    finally:
        graph.unlink(missing_ok=True)


def _write_graph(path: Path, target: Path) -> dict[str, str]:
    """The graph with sums of squares as outputs, over the same weights; the output for each matrix."""
    model = ir.load(path)
    draft = Draft(model, (), 0, 0)
    outputs: dict[ir.Value, ir.Value] = {}
    found: dict[str, str] = {}
    for product in products(draft):
        source = product.source
        if source not in outputs:
            outputs[source] = _sum_of_squares(draft, source, product.matrix.inputs, f"squares.{len(outputs)}")
        found[product.matrix.name] = str(outputs[source].name)
    model.graph.outputs.extend(outputs.values())
    model.graph.sort()
    ir.save(model, target)
    return found


def _sum_of_squares(draft: Draft, source: ir.Value, width: int, name: str) -> ir.Value:
    """Over all rows, [width]."""
    tape = Tape()
    rows = reshape(tape, draft, source, [-1, width], f"{name}.rows")
    total = reduced(draft, tape, "ReduceSumSquare", rows, 0, keeps=False, name=name)
    total.name, total.type, total.shape = name, ir.TensorType(ir.DataType.FLOAT), ir.Shape([width])
    draft.graph.extend(tape.nodes)
    return total


class _Writer:
    """SEQUENCES texts in flight, one a slot. `squares` [inputs] of each source add up over the steps."""

    def __init__(self, graph: Path, engine: Engine, sources: Sequence[str]) -> None:
        self._session = ort.InferenceSession(str(graph), session_options(), providers=["CPUExecutionProvider"])
        self._names = {value.name for value in self._session.get_inputs()}
        self._binding = self._session.io_binding()
        capacity = min(TOKENS, engine.limits.context) + 1
        limits = Limits(SEQUENCES, capacity, SEQUENCES, engine.limits.vocab)
        self._arranger = StepArranger(limits)
        self._capacity = np.array(capacity, np.int32)
        widths = {value.name: value.shape for value in self._session.get_outputs()}
        self.squares = {name: np.zeros(widths[name], np.float32) for name in sources}
        self._found = {name: np.zeros(widths[name], np.float32) for name in sources}
        self._logits = np.zeros((SEQUENCES, engine.limits.vocab), np.float32)
        for cache in engine.caches:
            memory = np.zeros((SEQUENCES, cache.heads, capacity, cache.dim), np.float32)
            value = ort.OrtValue.ortvalue_from_numpy(memory)
            self._binding.bind_ortvalue_input(cache.input, value)
            self._binding.bind_ortvalue_output(cache.output, value)
        for name, array in {**self._found, LOGITS_OUTPUT: self._logits}.items():
            self._binding.bind_output(name, "cpu", 0, np.float32, array.shape, array.ctypes.data)
        self._binding.bind_cpu_input(CAPACITY_INPUT, self._capacity)

    def step(self, tokens: Integers, place: int) -> Floats:
        """Logits [SEQUENCES, vocab] after `tokens` [SEQUENCES] at `place` of every text."""
        rows = [Row(RequestId(slot), slot, place, (token,), samples=True) for slot, token in enumerate(tokens.tolist())]
        arrays = self._arranger.arrange(rows)
        for name in STEP_INPUTS:
            if name in self._names:
                self._binding.bind_cpu_input(name, getattr(arrays, name))
        self._session.run_with_iobinding(self._binding)
        for name, found in self._found.items():
            self.squares[name] += found
        return self._logits


def _drawn(logits: Floats, rng: np.random.Generator) -> Integers:
    """A token a row: the largest of logits plus Gumbel noise is a draw of the softmax."""
    drawn: Integers = (logits / TEMPERATURE + rng.gumbel(size=logits.shape)).argmax(axis=1)
    return drawn


def _weights(squares: Floats) -> Floats:
    mean = float(squares.mean()) or 1.0
    return squares / np.float32(mean) + np.float32(FLOOR)
