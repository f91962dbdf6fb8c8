"""Compare a lowered engine with the export it came from, through the backend that will serve it.

The export on ONNX Runtime's CPU provider, one sequence at a time with its own past, is the reference. The engine runs
the same tokens in flight: ragged, staggered, prefill mixed with decode, prompts cut in several ways, slots reused over
what others left there, over NaN and over large numbers, and one slot filled to the last position of its context.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import onnxruntime as ort
from tokenizers import Tokenizer

from residentd.backend.onnxruntime import OnnxRuntimeBackend, RuntimeOptions, session_options
from residentd.errors import AccuracyError, Finding, MachineError, SourceError
from residentd.models.manifest import Agreement, Engine, Golden
from residentd.types import RequestId, Row, StepPlan
from residentd_build.source import MODEL_FILE, Source

SEED = 20261201
SLOTS_MAX = 6  # fewer than the sequences, so that slots are reused; more would only take memory
OUTPUT_TOKENS = 16
FULL_OUTPUT_TOKENS = 5
RANDOM_PROMPTS = (1, 9, 33, 70, 130)  # tokens
TEXT_PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):\n    if n < 2:\n        return n\n",
    "Ünïcödé text, 你好世界, and numbers such as 3.14159 and 2,048: every tokenizer splits them in its own way.",
)
REFERENCE_CHUNK = 128  # tokens a run of the export: bounds its logits, [128, vocab]

FLOOR_RELATIVE = 2e-5
"""Of the largest logit, for fp32: 340 roundings of 2^-24. Seen on SmolLM2-135M: 3e-6."""
NOISE_FACTOR = 16
"""The engine sums in another order than the export, as the export does when its prompt is cut otherwise; both
differences have one cause, so one is the scale of the other. Seen: up to 3."""
CEILING_RELATIVE = 1e-3
"""An export that disagrees with itself more than this has no fp32 answer to reproduce."""
GOLDEN_GAP_BOUNDS = 4  # a golden token must win by this many bounds, so that no rounding turns it

Logits = npt.NDArray[np.float32]
Progress = Callable[[float, str], None]
"""Told how far verification is, 0 to 1, and what it is doing."""


@dataclass(frozen=True, slots=True)
class VerifyResult:
    agreement: Agreement
    goldens: tuple[Golden, ...]


@dataclass(frozen=True, slots=True)
class Track:
    """A sequence with the export's greedy output, and the export's logits [outputs, vocab] before each output token."""

    name: str
    prompt: tuple[int, ...]
    output: tuple[int, ...]
    logits: Logits

    @property
    def fed(self) -> tuple[int, ...]:
        """What the engine reads: the last output token is only predicted."""
        return self.prompt + self.output[:-1]


@dataclass(frozen=True, slots=True)
class Round:
    """How one pass over the tracks is cut and what the caches hold before it."""

    name: str
    chunk_tokens: int
    stagger_steps: int | None  # between the arrivals of two tracks; None: all when the first decodes its last tokens
    poison: float


ROUNDS = (
    Round("whole prompts over NaN", chunk_tokens=1 << 30, stagger_steps=3, poison=float("nan")),
    Round("chunks of 16 over large numbers", chunk_tokens=16, stagger_steps=2, poison=9.0),
    Round("chunks of 7, all at once", chunk_tokens=7, stagger_steps=0, poison=float("nan")),
)
TOKEN_BY_TOKEN = Round("token by token", chunk_tokens=1, stagger_steps=0, poison=9.0)
FULL = Round("context full to the last token", chunk_tokens=1 << 30, stagger_steps=None, poison=float("nan"))


def verify(source: Source, version_dir: Path, engine: Engine, progress: Progress) -> VerifyResult:
    """Run the export and `engine`, in `version_dir`, over the same tokens and compare.

    Raises AccuracyError past the bound, SourceError when the export itself cannot be run, MachineError.
    """
    progress(0.0, "loading the export")
    export = Export(source.model_path)
    tracks, noise = _reference(export, source, engine, _part(progress, 0.05, 0.3))
    full = _full_track(export, engine, tracks, _part(progress, 0.3, 0.55))
    del export  # its memory is the engine's now
    comparison = Comparison(_bound([*tracks, full], noise))
    progress(0.55, "loading the engine")
    smaller = msgspec.structs.replace(engine.limits, slots=min(engine.limits.slots, SLOTS_MAX))
    backend = OnnxRuntimeBackend(version_dir, msgspec.structs.replace(engine, limits=smaller), options=RuntimeOptions())
    try:
        _run_rounds(backend, tracks, full, comparison, _part(progress, 0.6, 1.0))
    finally:
        backend.close()
    return VerifyResult(comparison.agreement(), _goldens(tracks, comparison.bound))


class Export:
    """The export under ONNX Runtime, one sequence at a time with its own past."""

    def __init__(self, path: Path) -> None:
        try:
            self._session = ort.InferenceSession(str(path), session_options(), providers=["CPUExecutionProvider"])
        except Exception as error:
            raise _cannot_run(error) from error
        self._inputs = {value.name: value for value in self._session.get_inputs()}
        self._outputs = [value.name for value in self._session.get_outputs()]
        self._pasts = [name for name in self._inputs if name.startswith("past_key_values.")]
        self.forget()

    def forget(self) -> None:
        """Start a new sequence."""
        self._length = 0
        self._past = {name: ort.OrtValue.ortvalue_from_numpy(self._empty(name)) for name in self._pasts}

    def read(self, tokens: Sequence[int]) -> Logits:
        """Append `tokens`; return the logits [tokens, vocab] after each of them. Raises SourceError."""
        count, end = len(tokens), self._length + len(tokens)
        feeds = {
            "input_ids": np.array([tokens], np.int64),
            "attention_mask": np.ones((1, end), np.int64),
            "position_ids": np.arange(self._length, end, dtype=np.int64)[None],
        }
        known = {name: ort.OrtValue.ortvalue_from_numpy(array) for name, array in feeds.items() if name in self._inputs}
        try:
            values = self._session.run_with_ort_values(self._outputs, known | self._past)
        except Exception as error:
            raise _cannot_run(error) from error
        results = dict(zip(self._outputs, values, strict=True))
        self._past = {name: results[name.replace("past_key_values", "present")] for name in self._pasts}
        self._length = end
        logits: Logits = results["logits"].numpy().reshape(count, -1).astype(np.float32, copy=False)
        if not np.isfinite(logits).all():
            raise AccuracyError(
                f"the export itself gives NaN or infinity after {end} tokens; nothing was published. "
                "Export it again as fp32"
            )
        return logits

    def _empty(self, name: str) -> npt.NDArray[Any]:
        value = self._inputs[name]
        dtype = np.float16 if value.type == "tensor(float16)" else np.float32
        return np.zeros((1, value.shape[1], 0, value.shape[3]), dtype)


class Comparison:
    """Counts rows and keeps the worst difference; raises at the first row past the bound."""

    def __init__(self, bound: float) -> None:
        self.bound = bound
        self._worst = 0.0
        self._equal = 0
        self._rows = 0

    def check(self, found: Logits, expected: Logits, where: str) -> None:
        """Compare the logits of one position. Raises AccuracyError naming `where`."""
        if not np.isfinite(found).all():
            raise AccuracyError(
                f"the engine gives NaN or infinity where its export does not: {where}. {_NOT_PUBLISHED}"
            )
        difference = float(np.abs(found - expected).max())
        if difference > self.bound:
            raise AccuracyError(
                f"the engine's logits differ from its export's by {difference:.2g}, the bound is {self.bound:.2g}: "
                f"{where}. {_NOT_PUBLISHED}"
            )
        # Within the bound, the two can only choose differently where the export's best two are closer than twice it.
        self._equal += int(found.argmax()) == int(expected.argmax())
        self._worst = max(self._worst, difference)
        self._rows += 1

    def agreement(self) -> Agreement:
        return Agreement(
            logit_diff_max=self._worst,
            logit_diff_bound=self.bound,
            greedy_equal=self._equal,
            greedy_total=self._rows,
            positions=self._rows,
        )


_NOT_PUBLISHED = "Nothing was published: report the model, its exporter and the exporter's version"


def _reference(export: Export, source: Source, engine: Engine, progress: Progress) -> tuple[list[Track], float]:
    """The tracks, and the export's largest difference from itself when it reads a track at once instead of in parts."""
    prompts = _prompts(source, engine)
    tracks, noise = [], 0.0
    for index, (name, prompt) in enumerate(prompts.items()):
        progress(index / len(prompts), f"export: prompt {index + 1} of {len(prompts)}, {len(prompt)} tokens")
        track = _follow(export, name, prompt, _output_tokens(engine))
        tracks.append(track)
        export.forget()
        again = export.read(track.fed)[len(prompt) - 1 :]
        noise = max(noise, float(np.abs(again - track.logits).max()))
    return tracks, noise


def _prompts(source: Source, engine: Engine) -> dict[str, tuple[int, ...]]:
    """Random ids and real text, cut to the context; the same for every build."""
    rng = np.random.default_rng(SEED)
    tokenizer = Tokenizer.from_buffer(source.text.tokenizer_json)
    longest = engine.limits.context - _output_tokens(engine)
    begin = () if source.text.bos_id is None else (source.text.bos_id,)
    prompts = {
        f"{count} random tokens": (*begin, *rng.integers(0, engine.limits.vocab, count).tolist())
        for count in RANDOM_PROMPTS
    }
    for index, text in enumerate(TEXT_PROMPTS):
        prompts[f"text {index + 1}"] = tuple(tokenizer.encode(text).ids) or (0,)
    return {name: prompt[:longest] for name, prompt in prompts.items()}


def _output_tokens(engine: Engine) -> int:
    return min(OUTPUT_TOKENS, engine.limits.context // 2)


def _follow(export: Export, name: str, prompt: tuple[int, ...], count: int) -> Track:
    """`prompt` and the export's own greedy `count` tokens after it."""
    export.forget()
    logits = [_read_all(export, prompt)]
    output = [int(logits[0].argmax())]
    while len(output) < count:
        logits.append(export.read(output[-1:])[-1])
        output.append(int(logits[-1].argmax()))
    return Track(name, prompt, tuple(output), np.stack(logits))


def _read_all(export: Export, tokens: Sequence[int], progress: Progress | None = None) -> Logits:
    """Logits [vocab] after the last of `tokens`, read in bounded parts."""
    for start in range(0, len(tokens), REFERENCE_CHUNK):
        if progress is not None:
            progress(start / len(tokens), f"export: filling the context, {start:,} of {len(tokens):,} tokens")
        last: Logits = export.read(tokens[start : start + REFERENCE_CHUNK])[-1].copy()
    return last


def _full_track(export: Export, engine: Engine, tracks: Sequence[Track], progress: Progress) -> Track:
    """A sequence whose last token stands at the last position of a slot."""
    count = min(FULL_OUTPUT_TOKENS, engine.limits.context // 2)
    length = engine.limits.context - count + 1
    rng = np.random.default_rng(SEED + 1)
    text = [token for track in tracks for token in (*track.prompt, *track.output)]
    prompt = [*text[: length // 2], *rng.integers(0, engine.limits.vocab, length).tolist()][:length]
    export.forget()
    logits = [_read_all(export, prompt, progress)]
    output = [int(logits[0].argmax())]
    while len(output) < count:
        logits.append(export.read(output[-1:])[-1])
        output.append(int(logits[-1].argmax()))
    return Track("the full context", tuple(prompt), tuple(output), np.stack(logits))


def _bound(tracks: Sequence[Track], noise: float) -> float:
    """The largest |Δlogit| that rounding explains. Raises AccuracyError when the export's own noise is above it."""
    scale = max(1.0, *(float(np.abs(track.logits).max()) for track in tracks))
    if noise > CEILING_RELATIVE * scale:
        raise AccuracyError(
            f"the export differs from itself by {noise:.2g} when a prompt is read in parts, the bound is "
            f"{CEILING_RELATIVE * scale:.2g}; nothing was published. Its caches do not work: export it again"
        )
    return min(max(FLOOR_RELATIVE * scale, NOISE_FACTOR * noise), CEILING_RELATIVE * scale)


def _run_rounds(
    backend: OnnxRuntimeBackend, tracks: Sequence[Track], full: Track, comparison: Comparison, progress: Progress
) -> None:
    short = [track for track in tracks if len(track.fed) <= 2 * OUTPUT_TOKENS]
    passes = [(plan, list(tracks)) for plan in ROUNDS] + [(TOKEN_BY_TOKEN, short), (FULL, [full, *short])]
    for index, (plan, chosen) in enumerate(passes):
        report = _part(progress, index / len(passes), (index + 1) / len(passes))
        _run_round(backend, chosen, plan, comparison, report)


def _run_round(
    backend: OnnxRuntimeBackend, tracks: Sequence[Track], plan: Round, comparison: Comparison, progress: Progress
) -> None:
    _poison(backend, plan.poison)
    tokens = sum(len(track.fed) for track in tracks)
    done = 0
    for step, parts in enumerate(_in_flight(tracks, plan, backend)):
        progress(done / tokens, f"engine: {plan.name}, {done:,} of {tokens:,} tokens")
        logits = backend.step(StepPlan(step, tuple(part.row(tracks) for part in parts)))
        compared = [part for part in parts if part.samples(tracks)]
        for part, found in zip(compared, logits, strict=True):
            track = tracks[part.track]
            output = part.end - len(track.prompt)
            comparison.check(found, track.logits[output], f"{plan.name}, {track.name}, position {part.end - 1}")
        done += sum(part.end - part.start for part in parts)


@dataclass(frozen=True, slots=True)
class _Part:
    """Positions [start, end) of one track, in `slot`."""

    track: int
    slot: int
    start: int
    end: int

    def samples(self, tracks: Sequence[Track]) -> bool:
        return self.end >= len(tracks[self.track].prompt)

    def row(self, tracks: Sequence[Track]) -> Row:
        tokens = tracks[self.track].fed[self.start : self.end]
        return Row(RequestId(self.track), self.slot, self.start, tokens, self.samples(tracks))


def _in_flight(tracks: Sequence[Track], plan: Round, backend: OnnxRuntimeBackend) -> Iterator[list[_Part]]:
    """The steps that bring all tracks through the engine: every running track goes on in every step that has room."""
    rng = np.random.default_rng(SEED + 2)
    limits = backend.limits
    arrivals = _arrivals(tracks, plan, limits.step_tokens_max)
    waiting = list(range(len(tracks)))
    free = rng.permutation(limits.slots).tolist()
    running: dict[int, tuple[int, int]] = {}  # track -> slot, tokens read
    step = 0
    while waiting or running:
        while waiting and free and arrivals[waiting[0]] <= step:
            running[waiting.pop(0)] = (free.pop(), 0)
        room = limits.step_tokens_max
        parts: list[_Part] = []
        for track, (slot, start) in running.items():
            is_prompt = start < len(tracks[track].prompt)
            left = len(tracks[track].prompt) - start if is_prompt else 1
            end = start + min(left, plan.chunk_tokens, room - (len(running) - len(parts) - 1))
            room -= end - start
            parts.append(_Part(track, slot, start, end))
        if parts:
            yield parts
        for part in parts:
            running[part.track] = (part.slot, part.end)
            if part.end == len(tracks[part.track].fed):
                del running[part.track]
                free.insert(int(rng.integers(0, len(free) + 1)), part.slot)
        step += 1


def _arrivals(tracks: Sequence[Track], plan: Round, step_tokens_max: int) -> list[int]:
    """The step in which each track may begin."""
    if plan.stagger_steps is not None:
        return [index * plan.stagger_steps for index in range(len(tracks))]
    return [0] + [math.ceil(len(tracks[0].prompt) / step_tokens_max)] * (len(tracks) - 1)


def _poison(backend: OnnxRuntimeBackend, value: float) -> None:
    """Whatever was computed before, or never, must not reach an answer."""
    rng = np.random.default_rng(SEED + 3)
    for cache in backend.caches:
        noise = rng.standard_normal(cache.shape[2:], np.float32) * value  # NaN stays NaN
        cache[...] = noise


def _goldens(tracks: Sequence[Track], bound: float) -> tuple[Golden, ...]:
    """Each track up to the first token that rounding could turn."""
    goldens = []
    for track in tracks:
        best = np.partition(track.logits, -2, axis=1)[:, -2:]
        is_clear = best[:, 1] - best[:, 0] > GOLDEN_GAP_BOUNDS * bound
        count = len(is_clear) if is_clear.all() else int(is_clear.argmin())
        if count:
            goldens.append(Golden(prompt=track.prompt, output=track.output[:count]))
    return tuple(goldens)


def _part(progress: Progress, begin: float, end: float) -> Progress:
    def report(fraction: float, message: str) -> None:
        progress(begin + fraction * (end - begin), message)

    return report


def _cannot_run(error: Exception) -> MachineError | SourceError:
    text = str(error).splitlines()[0] if str(error) else type(error).__name__
    if isinstance(error, MemoryError) or "bad_alloc" in text or "Failed to allocate" in text:
        return MachineError(f"the machine has too little memory to run the export itself ({text}). Free some")
    what = f"ONNX Runtime {ort.__version__} cannot run the export ({text})"
    return SourceError([Finding(what, MODEL_FILE, "Export it again with a current optimum, as fp32 and with its past")])
