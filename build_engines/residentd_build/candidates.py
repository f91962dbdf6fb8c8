"""From the verified engine to the build that is published: quantise, measure, keep one.

The engine that was verified against its export is the first candidate. Another precision is made from the same lowered
graph, whose weights still lie in the source, so the first engine's files may go before the second's are written. With
`--precision auto` every candidate is measured and two are on disk at a time: the best so far and the next. The rule:

    of the candidates whose mean KL divergence is within the bound, the one with the highest geometric mean of tokens/s
    for one sequence and tokens/s for eight.

What is chosen must then answer in flight as it does alone, if it is quantised; fp32 has shown more than that.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import psutil

from residentd.backend.modes import OpenBackend, memory_need, open_engine
from residentd.models.manifest import Cost, Engine, Golden, Quality, Tolerance
from residentd_build import calibrate, goldens, inflight, quality
from residentd_build.draft import Draft
from residentd_build.engine_files import write_files
from residentd_build.foreign import refusing
from residentd_build.passes import quantise
from residentd_build.passes.quantise import NOTHING_KNOWN
from residentd_build.precision import Precision, Scheme
from residentd_build.progress import Progress, part_of, stage_of

if TYPE_CHECKING:
    from residentd_build.matrices import Floats
    from residentd_build.options import Options
    from residentd_build.quality import Measured, Reference
    from residentd_build.verify import VerifyResult

NEXT_DIRECTORY = "candidate"  # beside the engine's, while it is measured
RULE = "rule: the fastest within the bound, by the geometric mean of tokens/s for 1 and for 8 sequences"
BUSY_LOAD = 1.5  # runnable processes a processor, over five minutes
QUANTISE_SHARE = 0.3  # of a candidate's time; the rest measures it
FLOATS = frozenset({"fp32", "fp16", "bf16"})


@dataclass(frozen=True, slots=True)
class Candidate:
    """A build whose files are on disk. `engine.path` says where; `line` is what the pass did."""

    scheme: Scheme
    engine: Engine
    measured: Measured
    cost: Cost
    line: str = ""

    @property
    def speed(self) -> float:
        """What `--precision auto` compares."""
        return math.sqrt(self.measured.decode_1 * self.measured.decode_8)


@dataclass(frozen=True, slots=True)
class Chosen:
    """What is published, and what was said on the way: the pass's lines and the table of candidates.

    `goldens` and `tolerance` are those of this engine.
    """

    engine: Engine
    goldens: tuple[Golden, ...]
    tolerance: Tolerance
    quality: Quality
    cost: Cost
    lines: tuple[str, ...]
    candidates: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Workshop:
    """Where candidates are made: the lowered draft, the stage, what was verified, the export's record over the text."""

    draft: Draft
    stage: Path
    options: Options
    verified: VerifyResult
    reference: Reference
    importance: Mapping[str, Floats] = field(default_factory=lambda: NOTHING_KNOWN)


def choose(workshop: Workshop, verified: Engine, progress: Progress) -> Chosen:
    """The build that the options ask for, its files at `verified.path`. Raises AccuracyError when it loses too much."""
    schemes = workshop.options.weights.schemes()
    workshop = replace(workshop, importance=_importance(workshop, schemes, verified, progress))
    if len(schemes) > 1:
        return _fastest(workshop, verified, schemes, progress)
    (scheme,) = schemes
    if scheme.precision == "fp32":
        candidate = _measure(workshop, scheme, verified, "", progress)
    else:
        shutil.rmtree((workshop.stage / verified.path).parent)
        candidate = _make(workshop, scheme, verified, Path(verified.path).parent.name, progress)
    bound = workshop.options.weights.kl_bound(_judged_as(scheme, candidate.engine))
    return _finish(workshop, candidate, bound, ())


def _importance(
    workshop: Workshop, schemes: Sequence[Scheme], verified: Engine, progress: Progress
) -> Mapping[str, Floats]:
    """What 4-bit scales are chosen by. The verified engine tells, so before its files go."""
    if not any("int4" in {scheme.precision, scheme.head_precision} for scheme in schemes):
        return NOTHING_KNOWN
    with refusing("calibrated"):
        return calibrate.importance(workshop.stage, verified, stage_of(progress, "quantise", 0.0, 0.0))


def _judged_as(scheme: Scheme, engine: Engine) -> Precision:
    """What arrived quantised is compared with itself: whatever its bits, it may lose what int8 may, and no more."""
    return "int8" if scheme.precision == "fp32" and engine.precision not in FLOATS else engine.precision


def _fastest(workshop: Workshop, verified: Engine, schemes: Sequence[Scheme], progress: Progress) -> Chosen:
    """Of `schemes`, the first of which is what was verified."""
    bound = workshop.options.weights.kl_bound(verified.precision)
    share = 1 / len(schemes)
    best = _measure(workshop, schemes[0], verified, "", part_of(progress, 0.0, share))
    made = [best]
    for index, scheme in enumerate(schemes[1:], start=1):
        own = replace(workshop, draft=_copy(workshop.draft))
        candidate = _make(own, scheme, verified, NEXT_DIRECTORY, part_of(progress, index * share, (index + 1) * share))
        made.append(candidate)
        progress("measure", (index + 1) * share, _row(candidate, bound))
        if candidate.measured.kl_mean <= bound and candidate.speed > best.speed:
            best = _move(workshop.stage, candidate, verified.path)
            made[-1] = best
        else:
            shutil.rmtree((workshop.stage / candidate.engine.path).parent)
    table = tuple(f"{_row(candidate, bound)}{', chosen' if candidate is best else ''}" for candidate in made)
    return _finish(workshop, best, bound, (*table, RULE, *_busy(psutil.getloadavg()[1], psutil.cpu_count() or 1)))


def _busy(load: float, processors: int) -> Iterator[str]:
    """A warning where others took the processors; we take each of them once."""
    if load > BUSY_LOAD * processors:
        yield (
            f"the machine was busy (load {load:.1f} on {processors} processors), so that these speeds are uncertain: "
            "install again when it is idle, or name a precision"
        )


def _make(workshop: Workshop, scheme: Scheme, verified: Engine, folder: str, progress: Progress) -> Candidate:
    """Quantise the draft, write it to `folder` and measure it. The draft is spent."""
    writing = stage_of(progress, "quantise", 0.0, QUANTISE_SHARE)
    with refusing("quantised"):
        writing(0.0, scheme_name(scheme))
        line = quantise.run(workshop.draft, scheme, workshop.importance)
        write_files(workshop.draft, workshop.stage / folder, writing)
    engine = msgspec.structs.replace(
        verified,
        path=f"{folder}/{Path(verified.path).name}",
        precision=scheme.precision,
        weights=weights_line(scheme),
    )
    return _measure(workshop, scheme, engine, line, part_of(progress, QUANTISE_SHARE, 1.0))


def _measure(workshop: Workshop, scheme: Scheme, engine: Engine, line: str, progress: Progress) -> Candidate:
    stage = workshop.stage
    with _opened(stage, engine, slots=quality.PASSAGES_MAX, context=quality.PASSAGE_TOKENS_MAX) as backend:
        measured = quality.measure(backend, workshop.reference, stage_of(progress, "measure"))
    folder = (stage / engine.path).parent
    cost = Cost(
        file_bytes=sum(path.stat().st_size for path in folder.iterdir()),
        memory_bytes=memory_need(stage, engine).total,
        decode_1_tokens_per_s=_three_digits(measured.decode_1),
        decode_8_tokens_per_s=_three_digits(measured.decode_8),
        prefill_tokens_per_s=_three_digits(measured.prefill),
    )
    return Candidate(scheme, engine, measured, cost, line)


def _finish(workshop: Workshop, candidate: Candidate, bound: float, table: tuple[str, ...]) -> Chosen:
    """Judge what was chosen. Raises AccuracyError."""
    engine = candidate.engine
    found = quality.judge(candidate.measured, bound, scheme_name(candidate.scheme))
    recorded, tolerance = workshop.verified.goldens, workshop.verified.tolerance
    if candidate.scheme.precision != "fp32":
        plain = [msgspec.structs.replace(golden, statistics=()) for golden in recorded]
        with _opened(workshop.stage, engine, slots=inflight.SLOTS, context=inflight.CONTEXT_MAX) as backend:
            worst = inflight.check_in_flight(backend, workshop.reference.passages)
            recorded, tolerance = goldens.record(backend, plain, bound=None)
        found = msgspec.structs.replace(found, kl_in_flight=worst)
    lines = (candidate.line,) if candidate.line else ()
    return Chosen(engine, recorded, tolerance, found, candidate.cost, lines, table)


@contextmanager
def _opened(stage: Path, engine: Engine, *, slots: int, context: int) -> Iterator[OpenBackend]:
    """The engine with `slots` slots, whatever it will serve with, of `context` tokens at most."""
    limits = msgspec.structs.replace(
        engine.limits,
        slots=slots,
        context=min(engine.limits.context, context),
        step_tokens_max=max(engine.limits.step_tokens_max, slots + 1),
    )
    backend = open_engine(stage, msgspec.structs.replace(engine, limits=limits))
    try:
        yield backend
    finally:
        backend.close()


def _move(stage: Path, candidate: Candidate, path: str) -> Candidate:
    """`candidate` in the place of the best before it."""
    target = (stage / path).parent
    shutil.rmtree(target)
    (stage / candidate.engine.path).parent.rename(target)
    return replace(candidate, engine=msgspec.structs.replace(candidate.engine, path=path))


def _copy(draft: Draft) -> Draft:
    """The same graph, to be changed by itself; weights are shared."""
    model = draft.model.clone()
    inputs = {value.name: value for value in model.graph.inputs}
    caches = tuple(
        replace(cache, past_key=inputs[cache.past_key.name], past_value=inputs[cache.past_value.name])
        for cache in draft.caches
    )
    return replace(draft, model=model, caches=caches)


def _row(candidate: Candidate, bound: float) -> str:
    """A line of the table of candidates."""
    measured = candidate.measured
    verdict = "" if measured.kl_mean <= bound else f" (bound {bound:g}: out)"
    return (
        f"{scheme_name(candidate.scheme)}: KL {measured.kl_mean:.2g}{verdict}, perplexity {measured.perplexity:.4g}, "
        f"{candidate.cost.file_bytes / 1e6:,.0f} MB, tokens/s {measured.decode_1:.1f} for 1, {measured.decode_8:.1f} "
        f"for 8, prefill {measured.prefill:.0f}"
    )


def scheme_name(scheme: Scheme) -> str:
    """What a person calls it: "int8 row8", "int4 block 32"."""
    if scheme.precision in FLOATS:
        return scheme.precision
    blocks = f"block {scheme.block}" if scheme.block else "row8"
    return f"{scheme.precision} {blocks}{'' if scheme.symmetric else ' asymmetric'}"


def weights_line(scheme: Scheme) -> str:
    """Engine.weights: empty where the precision says it all."""
    if scheme.precision in FLOATS and scheme.embedding == scheme.head == "same":
        return ""
    matrices = scheme_name(scheme).removeprefix(f"{scheme.precision} ")
    return f"{matrices}; head {scheme.head_precision}; embedding {scheme.embedding_precision}"


def _three_digits(value: float) -> float:
    return float(f"{value:.3g}")
