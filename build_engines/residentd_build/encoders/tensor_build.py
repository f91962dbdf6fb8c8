"""One build of a tensor model: verified against its export, its calls put together where they are proven to keep apart.

The reference is the export on ONNX Runtime without any of its graph optimisations.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from residentd.backend.graph import GraphError
from residentd.backend.onnxruntime_graph import OnnxRuntimeGraph
from residentd.backend.samples import distance, sample_of, scale_of
from residentd.backend.tensor_model import golden_feeds
from residentd.errors import AccuracyError, Finding, SourceError
from residentd.models.encoder import TensorGolden, Tensors
from residentd.models.manifest import Agreement, Content, Engine, EngineLimits, Manifest, SamplingDefaults
from residentd.models.store import measure_files
from residentd_build import watchdog
from residentd_build.compatibility import precision_of
from residentd_build.encoders.build import check_memory, write_engine
from residentd_build.encoders.choices import refuse_other_precision
from residentd_build.encoders.company import Company, rounded
from residentd_build.encoders.export import ExportGraph
from residentd_build.encoders.margins import FP32, MARGINS
from residentd_build.encoders.rows import doubt_of
from residentd_build.encoders.tensor_source import check_asked, shapes_that_run
from residentd_build.engine_files import ENGINE_FILE
from residentd_build.foreign import cut, refusing
from residentd_build.pipeline import ENGINE_DIRECTORY, PROTO_OVERHEAD_BYTES, history_of, seal
from residentd_build.progress import stage_of
from residentd_build.tensors import weight_bytes_of

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from residentd.backend.graph import Array, Graph
    from residentd_build.encoders.margins import Margins
    from residentd_build.encoders.tensor_source import Shapes, TensorSource
    from residentd_build.options import Options
    from residentd_build.pipeline import Room
    from residentd_build.progress import Progress, StageProgress

SEEDS = (1, 2, 3)
TINY = float(np.finfo(np.float32).tiny)


@dataclass(frozen=True, slots=True)
class Expected:
    """What the export itself gives for the made-up inputs of one seed."""

    seed: int
    whole_max: int
    feeds: Mapping[str, Array]
    outputs: tuple[Array, ...]


@dataclass(frozen=True, slots=True)
class Reference:
    """Shapes that the export runs with, what it gives, and how far from that an engine may be, by output in order."""

    shapes: Shapes
    expected: list[Expected]
    bounds: dict[str, float]


def build(source: TensorSource, stage: Path, options: Options, progress: Progress, check_room: Room) -> Manifest:
    """Compile `source` into `stage` and verify it. Raises SourceError, AccuracyError, MachineError."""
    started = time.monotonic()
    asked = options.asked_shapes
    check_asked(source, asked)
    weight_bytes = weight_bytes_of(source.model)
    engine = _describe_engine(source, options)
    refuse_other_precision(options, "tensor", engine.precision)
    check_memory(engine, weight_bytes)
    check_room(weight_bytes + PROTO_OVERHEAD_BYTES)
    report = stage_of(progress, "verify", 0.1, 0.5)
    report(0.0, "running the export")
    reference = _reference(source, asked, MARGINS[engine.precision])
    with refusing("compiled"):
        line = write_engine(source.model, None, stage, stage_of(progress, "lower", 0.5, 0.6))
    progress("verify", 0.6, "comparing the engine with its export")
    trial = stage_of(progress, "verify", 0.65, 0.95)
    worst, bound, alone = _verify(source, stage / engine.path, reference, engine, trial)
    progress("publish", 0.95, "measuring the files")
    tensors = Tensors(
        inputs=source.inputs,
        outputs=source.outputs,
        alone=alone,
        tolerances=reference.bounds,
        goldens=tuple(_golden(entry, reference.shapes, source) for entry in reference.expected),
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
    positions = len(reference.expected) * len(source.outputs)
    agreement = Agreement(
        logit_diff_max=worst, logit_diff_bound=bound, greedy_equal=0, greedy_total=0, positions=positions
    )
    history = history_of(source.sha256, started, (line, _line(reference.shapes, alone)))
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


def _reference(source: TensorSource, asked: Mapping[str, tuple[int, ...]], margins: Margins) -> Reference:
    """Shapes that run, what the export gives for them, and how far from that an engine may be, by output."""
    graph = ExportGraph(source.model_path, source.file.path, weight_bytes_of(source.model))
    names = [spec.name for spec in source.outputs]
    shapes, whole_max = shapes_that_run(graph, source, asked)
    expected: list[Expected] = []
    bounds = dict.fromkeys(names, 0.0)
    for seed in SEEDS:
        most = 1 if seed == SEEDS[-1] else whole_max  # the last of them monotonous: where cancellation shows
        feeds = golden_feeds(source.inputs, shapes, seed, most)
        try:
            outputs = graph.run(feeds, names)
            again = graph.run(feeds, names)
            noisy = graph.run(rounded(feeds, margins.rounding), names)
        except GraphError as error:
            raise SourceError([Finding(f"the export cannot be run: {error}", source.file.path, _FIX)]) from error
        _check_steady(names, outputs, again, source)
        expected.append(Expected(seed, most, feeds, tuple(outputs)))
        for name, output, other in zip(names, outputs, noisy, strict=True):
            noise = margins.roundings * _finite(distance(other, output))
            bounds[name] = max(bounds[name], margins.floor * scale_of(output), noise, TINY)
    graph.close()
    return Reference(shapes, expected, bounds)


def _check_steady(names: list[str], first: list[Array], again: list[Array], source: TensorSource) -> None:
    """Raise SourceError where the same inputs give something else a second time: no bound would mean anything."""
    for name, one, other in zip(names, first, again, strict=True):
        if not distance(other, one) <= FP32.floor * scale_of(one):
            what = f"output {cut(name)} is not the same when the same inputs are given twice"
            raise SourceError([Finding(what, source.file.path, "Export it for inference, without random numbers")])


def _finite(gap: float) -> float:
    return gap if np.isfinite(gap) else 0.0


def _verify(
    source: TensorSource, path: Path, reference: Reference, engine: Engine, report: StageProgress
) -> tuple[float, float, str]:
    """The worst difference of the engine, its bound, and why calls may not share a run. Raises AccuracyError."""
    with watchdog.loading(path, source.file.path):
        graph = OnnxRuntimeGraph(path, remedy="Export the model again")
    whole_max = max(entry.whole_max for entry in reference.expected)
    names = list(reference.bounds)
    company = Company(graph, names, engine.limits.slots, MARGINS[engine.precision], whole_max)
    try:
        worst, bound = _compare(graph, reference)
        reason = _alone_reason(source, reference.shapes)
        return worst, bound, reason or company.reason([entry.feeds for entry in reference.expected], report)
    except GraphError as error:
        raise AccuracyError(f"the engine cannot run what its export ran: {error}. Nothing was published") from error
    finally:
        graph.close()


def _compare(graph: Graph, reference: Reference) -> tuple[float, float]:
    """The worst difference of the engine from its export, and its bound. Raises AccuracyError past that."""
    bounds = reference.bounds
    worst, worst_bound = 0.0, next(iter(bounds.values()))
    for entry in reference.expected:
        for name, found, wanted in zip(bounds, graph.run(entry.feeds, list(bounds)), entry.outputs, strict=True):
            gap, bound = distance(found, wanted), bounds[name]
            if gap / bound > worst / worst_bound:
                worst, worst_bound = gap, bound
            if not gap <= bound:
                raise AccuracyError(
                    f"the engine's output {name} differs from its export's by {gap:.2g}, the bound is {bound:.2g}. "
                    "Nothing was published: report the model, its exporter and the exporter's version"
                )
    return worst, worst_bound


def _alone_reason(source: TensorSource, shapes: Shapes) -> str:
    """Calls are only put together where every output is shown to have the rows of the inputs, each from its own."""
    doubt = doubt_of(
        source.model, {spec.name: spec.shape for spec in source.inputs}, [spec.name for spec in source.outputs]
    )
    if doubt is not None:
        return doubt.why
    if any(shape[0] != 1 for shape in shapes.values()):
        return "its shapes were given with more than one row"
    return ""


def _golden(entry: Expected, shapes: Shapes, source: TensorSource) -> TensorGolden:
    outputs = {spec.name: sample_of(array) for spec, array in zip(source.outputs, entry.outputs, strict=True)}
    return TensorGolden(seed=entry.seed, whole_max=entry.whole_max, shapes=shapes, outputs=outputs)


def _line(shapes: Shapes, alone: str) -> str:
    tried = ", ".join(f"{name} {'x'.join(map(str, shape)) or 'a number'}" for name, shape in shapes.items())
    return f"runs: {'one call each: ' + alone if alone else 'several calls together'}; verified with {tried}"


_FIX = "Export the model again, and try it with onnxruntime itself"
