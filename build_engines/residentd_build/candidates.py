"""From the verified engine to the build that is published: quantise, measure, keep one.

The engine that was verified against its export is the first candidate. Another precision is made from the same lowered
graph, whose weights still lie in the source, so the first engine's files may go before the second's are written. With
`--precision auto` every candidate is measured and two are on disk at a time: the best so far and the next. The rule:

    of the candidates whose mean KL divergence is within the bound, the one with the highest geometric mean of tokens/s
    for one sequence and tokens/s for eight.

A candidate that loses more than another, with no measuring needed to say so (`Scheme.loses_more_than`), is not tried
once that one is past the bound: int4 in blocks of 128, the fastest there is for one sequence, is tried only where int4
in blocks of 32 stays within it, and neither is where int8 in blocks of 32 does not. So auto takes no longer than
before where int4 loses too much (SmolLM2-135M), and one more candidate where it may win.

What is chosen must then answer in flight as it does alone, if any part of it is not as it was exported; what is has
shown more than that.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import psutil

from residentd.backend.modes import memory_need
from residentd.backend.onnxruntime import RuntimeOptions
from residentd.backend.speed import measure_speeds
from residentd.models.checks import Speeds
from residentd.models.manifest import Cost, Engine, Golden, Quality, Tolerance
from residentd_build import calibrate, goldens, inflight, quality
from residentd_build.draft import Draft
from residentd_build.engine_files import write_files
from residentd_build.foreign import refusing
from residentd_build.passes import quantise
from residentd_build.passes.quantise import NOTHING_KNOWN
from residentd_build.precision import Precision, Scheme, scheme_for
from residentd_build.progress import Progress, part_of, stage_of
from residentd_build.verify import opened

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
    speeds: Speeds | None = None  # None: there is nothing to choose from

    @property
    def speed(self) -> float:
        """What `--precision auto` compares."""
        assert self.speeds is not None, "auto measures the speed of every candidate"
        return math.sqrt(self.speeds.decode_one * self.speeds.decode_many)


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
    loading: RuntimeOptions  # of the verified engine, to be compared
    importance: Mapping[str, Floats] = field(default_factory=lambda: NOTHING_KNOWN)


def choose(workshop: Workshop, verified: Engine, progress: Progress) -> Chosen:
    """The build that the options ask for, its files at `verified.path`. Raises AccuracyError when it loses too much."""
    schemes = workshop.options.weights.schemes()
    workshop = replace(workshop, importance=_importance(workshop, schemes, verified, progress))
    if len(schemes) > 1:
        return _fastest(workshop, verified, schemes, progress)
    (scheme,) = schemes
    if scheme.is_exact:
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
    """What was quantised, by its coarsest part.

    What arrived quantised is compared with itself: whatever its bits, it may lose what int8 may, and no more.
    """
    if not scheme.is_exact:
        return scheme.coarsest
    return engine.precision if engine.precision in FLOATS else "int8"


def _fastest(workshop: Workshop, verified: Engine, schemes: Sequence[Scheme], progress: Progress) -> Chosen:
    """Of `schemes`, the first of which is what was verified."""
    bound = workshop.options.weights.kl_bound(verified.precision)
    share = 1 / len(schemes)
    best = _measure(workshop, schemes[0], verified, "", part_of(progress, 0.0, share))
    made, untried = [best], []
    for index, scheme in enumerate(schemes[1:], start=1):
        reason = _hopeless(scheme, made, bound)
        if reason:
            untried.append(reason)
            progress("measure", (index + 1) * share, reason)
            continue
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
    busy = _busy(psutil.getloadavg()[1], psutil.cpu_count() or 1)
    return _finish(workshop, best, bound, (*table, *untried, RULE, *busy))


def _hopeless(scheme: Scheme, made: Sequence[Candidate], bound: float) -> str:
    """The line of the table for what need not be made: something that loses less is past the bound. Else empty."""
    past = (candidate.scheme for candidate in made if candidate.measured.kl_mean > bound)
    finer = next((other for other in past if scheme.loses_more_than(other)), None)
    if finer is None:
        return ""
    return f"{scheme_name(scheme)}: not tried, it loses more than {scheme_name(finer)}, which is out"


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
        write_files(workshop.draft.model, workshop.stage / folder, writing)
    engine = msgspec.structs.replace(
        verified,
        path=f"{folder}/{Path(verified.path).name}",
        precision=scheme.precision,
        weights=weights_line(scheme),
    )
    return _measure(workshop, scheme, engine, line, part_of(progress, QUANTISE_SHARE, 1.0))


def _measure(workshop: Workshop, scheme: Scheme, engine: Engine, line: str, progress: Progress) -> Candidate:
    """How much it lost; and where there is a choice, loaded as it will serve, how fast it is."""
    stage, is_choice = workshop.stage, len(workshop.options.weights.schemes()) > 1
    options = workshop.loading if scheme.is_exact and not is_choice else RuntimeOptions()
    places = {"slots": quality.PASSAGES_MAX, "context": quality.PASSAGE_TOKENS_MAX}
    with opened(stage, engine, options, **places) as backend:
        measured = quality.measure(backend, workshop.reference, stage_of(progress, "measure"))
        speeds = measure_speeds(backend, max(workshop.reference.passages, key=len)) if is_choice else None
    folder = (stage / engine.path).parent
    cost = Cost(
        file_bytes=sum(path.stat().st_size for path in folder.iterdir()),
        memory_bytes=memory_need(stage, engine).total,
    )
    return Candidate(scheme, engine, measured, cost, line, speeds)


def _finish(workshop: Workshop, candidate: Candidate, bound: float, table: tuple[str, ...]) -> Chosen:
    """Judge what was chosen. Raises AccuracyError."""
    engine = candidate.engine
    found = quality.judge(candidate.measured, bound, scheme_name(candidate.scheme))
    recorded, tolerance = workshop.verified.goldens, workshop.verified.tolerance
    if not candidate.scheme.is_exact:
        plain = [msgspec.structs.replace(golden, statistics=()) for golden in recorded]
        places = {"slots": inflight.SLOTS, "context": inflight.CONTEXT_MAX}
        with opened(workshop.stage, engine, RuntimeOptions(), **places) as backend:
            worst = inflight.check_in_flight(backend, workshop.reference.passages)
            recorded, tolerance = goldens.record(backend, plain, bound=None)
        found = msgspec.structs.replace(found, kl_in_flight=worst)
    lines = (candidate.line,) if candidate.line else ()
    return Chosen(engine, recorded, tolerance, found, candidate.cost, lines, table)


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
    measured, speeds = candidate.measured, candidate.speeds
    assert speeds is not None, "auto measures the speed of every candidate"
    verdict = "" if measured.kl_mean <= bound else f" (bound {bound:g}: out)"
    return (
        f"{scheme_name(candidate.scheme)}: KL {measured.kl_mean:.2g}{verdict}, perplexity {measured.perplexity:.4g}, "
        f"{candidate.cost.file_bytes / 1e6:,.0f} MB, tokens/s {speeds.decode_one:.1f} for 1, {speeds.decode_many:.1f} "
        f"for {speeds.rows}, prefill {speeds.prefill:.0f}"
    )


def scheme_name(scheme: Scheme) -> str:
    """What a person calls it: "int8 row8", "int4 block 32", "fp32 with head int8"."""
    usual = scheme_for(scheme.precision)
    parts = {
        f"embedding {scheme.embedding_precision}": scheme.embedding_precision != usual.embedding_precision,
        f"head {scheme.head_precision}": scheme.head_precision != usual.head_precision,
    }
    unusual = " and ".join(part for part, is_unusual in parts.items() if is_unusual)
    body = " ".join(text for text in (scheme.precision, _body(scheme)) if text)
    return f"{body} with {unusual}" if unusual else body


def weights_line(scheme: Scheme) -> str:
    """Engine.weights: empty where the precision says it all."""
    if scheme.precision in FLOATS and scheme.embedding_precision == scheme.head_precision == scheme.precision:
        return ""
    parts = (_body(scheme), f"head {scheme.head_precision}", f"embedding {scheme.embedding_precision}")
    return "; ".join(part for part in parts if part)


def _body(scheme: Scheme) -> str:
    """Blocks and zeros of the matrices other than embedding and head; empty for floating point."""
    if scheme.precision in FLOATS:
        return ""
    blocks = f"block {scheme.block}" if scheme.block else "row8"
    return f"{blocks}{'' if scheme.symmetric else ' asymmetric'}"
