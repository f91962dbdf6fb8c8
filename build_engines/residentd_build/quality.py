"""How much a build lost against its export.

Both read the text that the package carries (passages.txt: prose, code and several languages), teacher-forced. The
export reads it passage by passage; its logits wait in a file. The build then reads all passages in flight, one token of
each in a step, through the backend that will serve it: the figures are those of decoding 8 sequences at once. Text,
time and disk are capped; how many positions were compared is part of the result.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from residentd.errors import AccuracyError, CallerError, Finding, SourceError
from residentd.models.manifest import Quality
from residentd.text.tokenizer import encoded
from residentd.types import RequestId, Row, StepPlan
from residentd_build.source import TOKENIZER_FILE

if TYPE_CHECKING:
    from residentd.backend.base import Backend, Logits
    from residentd_build.source import Source

TEXT_FILE = "passages.txt"
TEXT_SEPARATOR = "\n----\n"
PASSAGES_MAX = 8  # read in flight: the rows of a decode step
PASSAGE_TOKENS_MAX = 256
RECORD_BYTES_MAX = 1 << 30  # of the export's logits, float32: 2,048 positions of 131,072 ids
EXPORT_S_MAX = 120.0  # reading of one more passage begins before this
BUILD_S_MAX = 120.0
STEPS_MIN = 8  # measured even past BUILD_S_MAX
EXPORT_CHUNK = 128  # tokens a run of the export
WORST_PERCENTILE = 99.0
NLL_MAX = 700.0  # e to this is still a float

Clock = Callable[[], float]
Progress = Callable[[float, str], None]
Float64 = npt.NDArray[np.float64]


class Reader(Protocol):
    """One sequence at a time: `read` appends tokens and gives float32 [tokens, vocab]; `forget` begins another."""

    def read(self, tokens: Sequence[int]) -> Logits: ...

    def forget(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Reference:
    """The passages that the export read, and its logits, float32 [positions, vocab], one passage after the other."""

    passages: tuple[tuple[int, ...], ...]
    path: Path
    vocab: int

    def logits(self) -> list[Logits]:
        """[tokens - 1, vocab] of each passage, mapped from the file."""
        counts = [len(passage) - 1 for passage in self.passages]
        if not sum(counts):
            return [np.zeros((0, self.vocab), np.float32) for _ in counts]
        whole = np.memmap(self.path, np.float32, "r", shape=(sum(counts), self.vocab))
        ends = np.cumsum(counts)
        return [whole[end - count : end] for end, count in zip(ends, counts, strict=True)]


@dataclass(frozen=True, slots=True)
class Measured:
    """Before any bound is applied."""

    kl_mean: float
    kl_p99: float
    perplexity: float
    perplexity_export: float
    top1: float
    positions: int


def passages_of(source: Source, context: int) -> tuple[tuple[int, ...], ...]:
    """Token ids of the text, as a prompt has them: what fits a slot of `context` tokens and the limits above.

    Raises SourceError.
    """
    tokenizer = Tokenizer.from_buffer(source.text.tokenizer_json)
    begin = (source.text.bos_id,) if source.text.adds_bos and source.text.bos_id is not None else ()
    tokens_max = min(PASSAGE_TOKENS_MAX, context, 1 + RECORD_BYTES_MAX // (4 * source.vocab) // PASSAGES_MAX)
    text = (files(__package__) / TEXT_FILE).read_text(encoding="utf-8")
    try:
        parts = [encoded(tokenizer, part).ids for part in text.split(TEXT_SEPARATOR)]
    except CallerError as error:
        raise SourceError([Finding(str(error), TOKENIZER_FILE, "Install the model's original tokenizer")]) from error
    cut = ((*begin, *ids)[:tokens_max] for ids in parts)
    return tuple(tuple(passage) for passage in cut if len(passage) > 1)[:PASSAGES_MAX]


def record_bytes(source: Source, context: int) -> int:
    """What `record_export` may write."""
    tokens = min(PASSAGE_TOKENS_MAX, context, 1 + RECORD_BYTES_MAX // (4 * source.vocab) // PASSAGES_MAX)
    return PASSAGES_MAX * tokens * source.vocab * 4


def record_export(
    export: Reader,
    passages: Sequence[tuple[int, ...]],
    path: Path,
    progress: Progress,
    *,
    clock: Clock = time.monotonic,
) -> Reference:
    """Let the export read the passages; whole passages until EXPORT_S_MAX has passed, at least one."""
    started, done, vocab = clock(), 0, 0
    with path.open("wb") as file:
        for passage in passages:
            if done and clock() - started > EXPORT_S_MAX:
                break
            progress(done / len(passages), f"export: reading text, {done + 1} of {len(passages)} passages")
            export.forget()
            for start in range(0, len(passage) - 1, EXPORT_CHUNK):
                logits = export.read(passage[start : min(start + EXPORT_CHUNK, len(passage) - 1)])
                vocab = logits.shape[1]
                file.write(np.ascontiguousarray(logits, np.float32).data)
            done += 1
    return Reference(tuple(passages[:done]), path, vocab)


def measure(backend: Backend, reference: Reference, progress: Progress, *, clock: Clock = time.monotonic) -> Measured:
    """Read the reference's passages in flight and compare.

    `backend` needs PASSAGES_MAX slots. Steps stop after BUILD_S_MAX. Raises AccuracyError on NaN.
    """
    comparison = _Comparison()
    _read_in_flight(backend, reference, comparison, progress, clock)
    return comparison.measured()


def judge(measured: Measured, bound: float, name: str) -> Quality:
    """Raises AccuracyError past `bound`, with the figures and the ways out."""
    quality = Quality(
        kl_mean=measured.kl_mean,
        kl_p99=measured.kl_p99,
        kl_bound=bound,
        perplexity=measured.perplexity,
        perplexity_export=measured.perplexity_export,
        top1=measured.top1,
        positions=measured.positions,
    )
    if measured.kl_mean > bound:
        raise AccuracyError(
            f"the {name} build loses too much: its mean KL divergence from the export is {measured.kl_mean:.3g} over "
            f"{measured.positions:,} positions of text, the bound is {bound:.3g}; perplexity {measured.perplexity:.4g} "
            f"against {measured.perplexity_export:.4g}, the same first choice at {measured.top1:.1%}. Nothing was "
            f"published: {_way_out(name, measured.kl_mean)}"
        )
    return quality


def _way_out(name: str, kl_mean: float) -> str:
    finer = "--precision fp32"
    if " with " in name:
        finer = "the other matrices' precision for --head and --embedding"
    elif name.startswith("int4"):
        finer = "--precision int8"
    elif name.startswith("int8 row8"):
        finer = "--precision int8 --block 32"
    return f"use {finer}, or accept the loss with --kl-max {_rounded_up(kl_mean):g}"


def _rounded_up(value: float) -> float:
    """To two digits."""
    unit = 10.0 ** (math.floor(math.log10(value)) - 1)
    return math.ceil(value / unit) * unit


class _Comparison:
    """Sums over positions; keeps one number each for the percentile."""

    def __init__(self) -> None:
        self._divergences: list[float] = []
        self._losses: list[float] = []
        self._losses_export: list[float] = []
        self._equal = 0

    def add(self, found: Logits, expected: Logits, targets: Sequence[int]) -> None:
        """Logits [rows, vocab] of build and export at the same positions, and the token that really follows each."""
        if not np.isfinite(found).all():
            raise AccuracyError(
                "the build gives NaN or infinity where its export does not; nothing was published. Use another "
                "--precision, and report the model and its exporter"
            )
        rows = np.arange(len(targets))
        self._divergences += divergences(expected, found).tolist()
        self._losses += (_log_sum_exp(found) - found[rows, targets]).tolist()
        self._losses_export += (_log_sum_exp(expected) - expected[rows, targets]).tolist()
        self._equal += int((found.argmax(axis=1) == expected.argmax(axis=1)).sum())

    def measured(self) -> Measured:
        count = len(self._divergences)
        assert count, "there is a passage of two tokens"
        return Measured(
            kl_mean=statistics.fmean(self._divergences),
            kl_p99=float(np.percentile(self._divergences, WORST_PERCENTILE)),
            perplexity=_perplexity(self._losses),
            perplexity_export=_perplexity(self._losses_export),
            top1=self._equal / count,
            positions=count,
        )


def divergences(expected: Logits, found: Logits) -> Float64:
    """KL divergence [rows] from softmax(expected) to softmax(found), in nats; both [rows, vocab]."""
    log_p = expected - _log_sum_exp(expected)[:, None]
    difference = expected.astype(np.float64) - found
    # log Σ p·exp(mean - difference): a common shift cancels first, so that small divergences do not drown in it.
    mean = (np.exp(log_p) * difference).sum(axis=1)
    ratio = _log_sum_exp(log_p + (mean[:, None] - difference))
    return np.maximum(ratio, 0.0)


def _log_sum_exp(logits: Logits | Float64) -> Float64:
    top = logits.max(axis=1).astype(np.float64)
    total: Float64 = np.exp(logits - top[:, None]).sum(axis=1)
    result: Float64 = top + np.log(total)
    return result


def _perplexity(losses: Sequence[float]) -> float:
    return math.exp(min(statistics.fmean(losses), NLL_MAX))


def _read_in_flight(
    backend: Backend, reference: Reference, comparison: _Comparison, progress: Progress, clock: Clock
) -> None:
    """One token of every passage in each step."""
    expected = reference.logits()
    passages = reference.passages
    longest = max(len(passage) for passage in passages)
    started = clock()
    for place in range(longest - 1):
        if place >= STEPS_MIN and clock() - started > BUILD_S_MAX:
            break
        progress(place / longest, f"build: reading text, {place:,} of {longest - 1:,} tokens a row")
        slots = [slot for slot, passage in enumerate(passages) if place < len(passage) - 1]
        plan = StepPlan(place, tuple(_row(slot, place, passages[slot][place : place + 1]) for slot in slots))
        logits = backend.step(plan)
        targets = [passages[slot][place + 1] for slot in slots]
        comparison.add(logits, np.stack([expected[slot][place] for slot in slots]), targets)


def _row(slot: int, start: int, tokens: tuple[int, ...] | Sequence[int]) -> Row:
    return Row(RequestId(slot), slot, start, tuple(tokens), samples=True)
