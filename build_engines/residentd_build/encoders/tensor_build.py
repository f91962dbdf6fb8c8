"""One build of a tensor model: verified against its export, and proven to give several calls what each gets alone.

The reference is the export on ONNX Runtime without any of its graph optimisations.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import numpy as np

from residentd.backend.graph import GraphError
from residentd.backend.onnxruntime_graph import OnnxRuntimeGraph
from residentd.backend.samples import distance, sample_of, scale_of
from residentd.backend.tensor_model import golden_feeds
from residentd.errors import AccuracyError, Finding, MachineError, SourceError, StepRetryableError
from residentd.models.encoder import TensorGolden, Tensors
from residentd.models.manifest import Agreement, Build, Content, Engine, EngineLimits, Manifest, SamplingDefaults
from residentd.models.store import measure_files
from residentd_build.compatibility import precision_of
from residentd_build.encoders.build import check_memory, weight_bytes_of, write_engine
from residentd_build.encoders.tensor_source import check_asked, shapes_that_run
from residentd_build.engine_files import ENGINE_FILE
from residentd_build.fingerprint import machine, tool_versions
from residentd_build.foreign import refusing
from residentd_build.pipeline import ENGINE_DIRECTORY, PROTO_OVERHEAD_BYTES, seal
from residentd_build.progress import stage_of

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from residentd.backend.graph import Array, Graph
    from residentd_build.encoders.tensor_source import Shapes, TensorSource
    from residentd_build.options import Options
    from residentd_build.pipeline import Room
    from residentd_build.progress import Progress

SEEDS = (1, 2, 3)
FLOOR_RELATIVE = 2e-5
"""Of the largest number of an output, for fp32: 340 roundings of 2^-24. Seen on the real models: at most 3e-6."""
NOISE_FACTOR = 16
"""Other kernels round at other places; one rounding of the input shows what a rounding does to each output. Seen: an
output that a sigmoid has made small (1e-4) keeps the absolute error of the large numbers before it, up to 1.2 times."""
ROUNDING = 2.0**-23
TINY = float(np.finfo(np.float32).tiny)
QUANTISED_RELATIVE = 0.05
"""For weights that arrived quantised: a fused kernel may round an activation to the next of 255 steps in each layer."""


@dataclass(frozen=True, slots=True)
class Expected:
    """What the export itself gives for the made-up inputs of one seed."""

    seed: int
    whole_max: int
    feeds: Mapping[str, Array]
    outputs: tuple[Array, ...]


def build(source: TensorSource, stage: Path, options: Options, progress: Progress, check_room: Room) -> Manifest:
    """Compile `source` into `stage` and verify it. Raises SourceError, AccuracyError, MachineError."""
    started = time.monotonic()
    asked = options.asked_shapes
    check_asked(source, asked)
    weight_bytes = weight_bytes_of(source.model)
    engine = _describe_engine(source, options)
    check_memory(engine, weight_bytes)
    check_room(weight_bytes + PROTO_OVERHEAD_BYTES)
    report = stage_of(progress, "verify", 0.1, 0.5)
    report(0.0, "running the export")
    shapes, expected, bounds = _reference(source, asked, is_fp32=engine.precision == "fp32")
    with refusing("compiled"):
        line = write_engine(source.model, None, stage, stage_of(progress, "lower", 0.5, 0.6))
    progress("verify", 0.6, "comparing the engine with its export")
    shape_reason = _shape_reason(source, shapes)
    worst, bound, alone = _compare(source, stage / engine.path, expected, bounds, shape_reason)
    progress("publish", 0.95, "measuring the files")
    tensors = Tensors(
        inputs=source.inputs,
        outputs=source.outputs,
        alone=alone,
        tolerances=bounds,
        goldens=tuple(_golden(entry, shapes, source) for entry in expected),
    )
    content = Content(
        architecture=source.architecture,
        engine=engine,
        text=None,
        sampling=SamplingDefaults(),
        goldens=(),
        text_goldens=(),
        files=measure_files(stage),
        kind="tensor",
        tensors=tensors,
    )
    positions = len(expected) * len(source.outputs)
    agreement = Agreement(
        logit_diff_max=worst, logit_diff_bound=bound, greedy_equal=0, greedy_total=0, positions=positions
    )
    history = Build(
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        tool_versions=tool_versions() | dict(machine()),
        source_sha256=source.sha256,
        seconds=round(time.monotonic() - started, 3),
        passes=(line, _line(shapes, alone)),
    )
    return seal(content, agreement, history, options.name)


def _describe_engine(source: TensorSource, options: Options) -> Engine:
    return Engine(
        target="onnxruntime-cpu",
        mode="canonical",
        precision=precision_of(source.model),
        path=f"{ENGINE_DIRECTORY}/{ENGINE_FILE}",
        limits=EngineLimits(slots=options.slots, context=0, step_tokens_max=0, vocab=0),
        caches=(),
    )


def _reference(
    source: TensorSource, asked: Mapping[str, tuple[int, ...]], *, is_fp32: bool
) -> tuple[Shapes, list[Expected], dict[str, float]]:
    """Shapes that run, what the export gives for them, and how far from that an engine may be, by output."""
    try:
        graph = OnnxRuntimeGraph(source.model_path, optimised=False)
    except MachineError as error:
        raise SourceError([Finding(f"the export cannot be loaded: {error}", source.file.path, _FIX)]) from error
    names = [spec.name for spec in source.outputs]
    shapes, whole_max = shapes_that_run(graph, source, asked)
    expected = []
    bounds = dict.fromkeys(names, 0.0)
    for seed in SEEDS:
        most = 1 if seed == SEEDS[-1] else whole_max  # the last of them monotonous: where cancellation shows
        feeds = golden_feeds(source.inputs, shapes, seed, most)
        try:
            outputs = graph.run(feeds, names)
            rounded = graph.run(_rounded(feeds), names)
        except (GraphError, StepRetryableError) as error:
            raise SourceError([Finding(f"the export cannot be run: {error}", source.file.path, _FIX)]) from error
        expected.append(Expected(seed, most, feeds, tuple(outputs)))
        for name, output, other in zip(names, outputs, rounded, strict=True):
            floor = (FLOOR_RELATIVE if is_fp32 else QUANTISED_RELATIVE) * scale_of(output)
            bounds[name] = max(bounds[name], floor, NOISE_FACTOR * _finite(distance(other, output)), TINY)
    graph.close()
    return shapes, expected, bounds


def _rounded(feeds: Mapping[str, Array]) -> dict[str, Array]:
    """The inputs, each of their fractions one rounding larger."""
    return {
        name: np.asarray(array * (1 + ROUNDING), array.dtype) if array.dtype.kind == "f" else array
        for name, array in feeds.items()
    }


def _finite(gap: float) -> float:
    return gap if np.isfinite(gap) else 0.0


def _compare(
    source: TensorSource, engine: Path, expected: list[Expected], bounds: dict[str, float], shape_reason: str
) -> tuple[float, float, str]:
    """The worst difference of the engine, its bound, and why calls may not share a run. Raises AccuracyError."""
    graph = OnnxRuntimeGraph(engine)
    names = [spec.name for spec in source.outputs]
    worst, worst_bound = 0.0, next(iter(bounds.values()))
    try:
        for entry in expected:
            for name, found, wanted in zip(names, graph.run(entry.feeds, names), entry.outputs, strict=True):
                gap, bound = distance(found, wanted), bounds[name]
                if gap / bound > worst / worst_bound:
                    worst, worst_bound = gap, bound
                if not gap <= bound:
                    raise AccuracyError(
                        f"the engine's output {name} differs from its export's by {gap:.2g}, the bound is {bound:.2g}. "
                        "Nothing was published: report the model, its exporter and the exporter's version"
                    )
        return worst, worst_bound, shape_reason or _company_reason(graph, names, expected, bounds)
    except GraphError as error:
        raise AccuracyError(f"the engine cannot run what its export ran: {error}. Nothing was published") from error
    finally:
        graph.close()


def _shape_reason(source: TensorSource, shapes: Shapes) -> str:
    """Calls can only be put together where every input and output has a free first axis."""
    for spec in (*source.inputs, *source.outputs):
        if not spec.shape:
            return f"{spec.name} is a single number"
        if isinstance(spec.shape[0], int):
            return f"the first axis of {spec.name} is fixed"
    if any(shape[0] != 1 for shape in shapes.values()):
        return "its shapes were given with more than one row"
    return ""


def _company_reason(graph: Graph, names: list[str], expected: list[Expected], bounds: dict[str, float]) -> str:
    """Two calls, and three, in one run of the engine against the export's answer to each alone."""
    for part in (expected[:2], expected[1:], expected):
        count = len(part)
        feeds = {name: np.concatenate([entry.feeds[name] for entry in part]) for name in part[0].feeds}
        try:
            together = graph.run(feeds, names)
        except (GraphError, StepRetryableError) as error:
            return f"{count} calls in one run fail: {error}"
        for index, (name, found) in enumerate(zip(names, together, strict=True)):
            wanted = np.concatenate([entry.outputs[index] for entry in part])
            if not distance(found, wanted) <= bounds[name]:
                return f"output {name} of {count} calls in one run is not what each gives alone"
    return ""


def _golden(entry: Expected, shapes: Shapes, source: TensorSource) -> TensorGolden:
    outputs = {spec.name: sample_of(array) for spec, array in zip(source.outputs, entry.outputs, strict=True)}
    return TensorGolden(seed=entry.seed, whole_max=entry.whole_max, shapes=shapes, outputs=outputs)


def _line(shapes: Shapes, alone: str) -> str:
    tried = ", ".join(f"{name} {'x'.join(map(str, shape)) or 'a number'}" for name, shape in shapes.items())
    return f"runs: {'one call each: ' + alone if alone else 'several calls together'}; verified with {tried}"


_FIX = "Export the model again, and try it with onnxruntime itself"
