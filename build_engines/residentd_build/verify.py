"""Compare a lowered engine with the export it came from, through the backend that will serve it.

The export on ONNX Runtime's CPU provider, one sequence at a time with its own past, is the reference. The engine runs
the same tokens in flight: ragged, staggered, prefill mixed with decode, prompts cut in several ways, slots reused over
what others left there, over NaN and over large numbers, and one slot filled to the last position of its context.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import onnxruntime as ort
from tokenizers import Tokenizer

from residentd.backend.compatibility import INPUT_DTYPES, STEP_INPUTS, step_feeds
from residentd.backend.messages import plain
from residentd.backend.modes import OpenBackend, open_engine
from residentd.backend.onnxruntime import RuntimeOptions, new_session
from residentd.errors import AccuracyError, Finding, MachineError, SourceError
from residentd.models.manifest import Agreement, Engine, Golden, State, Tolerance
from residentd.models.statistics import comparable, scale_of
from residentd.types import RequestId, Row, StepPlan
from residentd_build import watchdog
from residentd_build.arrived import arrived
from residentd_build.goldens import record
from residentd_build.passes.widen import narrow_types
from residentd_build.source import MODEL_FILE, Source
from residentd_build.states import StateError, ports_of_session, states_of
from residentd_build.tensors import weight_bytes_of

SEED = 20261201
SLOTS_MAX = 6  # fewer than the sequences, so that slots are reused; more would only take memory
FULL_SLOTS_MAX = 2  # of a whole context each: the full one, and one for all that pass beside it
PACKED_BYTES_MAX = 1 << 30
"""Of weights, up to which export and engine are loaded as an engine that serves: half as much again of processor time
is saved (SmolLM2-135M, 2026-12). Beyond, weights stay in the files' mappings, and a comparison takes the memory of
caches and activations only; what serving makes of the weights is checked at every load, against the goldens."""
MAPPED = RuntimeOptions(packs=False)
OUTPUT_TOKENS = 16
FULL_OUTPUT_TOKENS = 5
RANDOM_PROMPTS = (1, 9, 33, 70, 130)  # tokens
TEXT_PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):\n    if n < 2:\n        return n\n",
    "Ünïcödé text, 你好世界, and numbers such as 3.14159 and 2,048: every tokenizer splits them in its own way.",
)
RUN_S_MAX, TOKEN_S_MAX_PER_BYTE = 15.0, 1e-9
"""Of one run of the export, and of each of its tokens for each byte of the export: 40 times what was seen."""
REFERENCE_CHUNK = 128  # tokens a run of the export: bounds its logits, [128, vocab]

FLOOR_RELATIVE = 2e-5
"""Of the largest logit, for fp32: 340 roundings of 2^-24. Seen on SmolLM2-135M: 3e-6."""
NOISE_FACTOR = 16
"""The engine sums in another order than the export, as the export does when its prompt is cut otherwise; both
differences have one cause, so one is the scale of the other. Seen: up to 3."""
CEILING_RELATIVE = 1e-3
"""An export that disagrees with itself more than this has no fp32 answer to reproduce."""

QUANTISED_RELATIVE = 0.1
"""For an export that arrives quantised. A rounding of 2^-24 before an activation of 8 bits may turn a whole code, and
its kernels answer otherwise in another batch. Seen in flight: 0.022 in tiny exports, 0.038 in SmolLM2-135M in int4 as
onnxruntime-genai builds it (19 of 517 greedy choices, 2026-12). The mean is held to the bound on KL divergence."""

Logits = npt.NDArray[np.float32]
Progress = Callable[[float, str], None]
"""Told how far verification is, 0 to 1, and what it is doing."""


@dataclass(frozen=True, slots=True)
class VerifyResult:
    agreement: Agreement
    goldens: tuple[Golden, ...]
    tolerance: Tolerance


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
    options = comparing(source)
    export = Export(source.model_path, source.model_states, options)
    tracks, noise = _reference(export, source, engine, _part(progress, 0.05, 0.3))
    full = _full_track(export, engine, tracks, _part(progress, 0.3, 0.55))
    del export  # its memory is the engine's now
    is_quantised = arrived(source.model) is not None or (engine.mode == "compatibility" and engine.precision != "fp32")
    comparison = Comparison(_bound([*tracks, full], noise, is_quantised=is_quantised))
    longest = max(len(track.fed) for track in tracks)
    progress(0.55, "loading the engine")
    slots = engine.limits.slots
    with opened(version_dir, engine, options, slots=min(slots, SLOTS_MAX), context=longest) as backend:
        _run_rounds(backend, tracks, comparison, _part(progress, 0.6, 0.85))
        progress(0.85, "engine: recording the goldens")
        plain = [Golden(prompt=track.prompt, output=track.output) for track in tracks]
        goldens, tolerance = record(backend, plain, bound=None if is_quantised else comparison.bound)
    with opened(
        version_dir, engine, options, slots=min(slots, FULL_SLOTS_MAX), context=engine.limits.context
    ) as backend:
        run_round(backend, [full, *_short(tracks)], FULL, comparison, _part(progress, 0.9, 1.0))
    return VerifyResult(comparison.agreement(), goldens, tolerance)


def comparing(source: Source) -> RuntimeOptions:
    """How `source` and an engine of its weights are loaded to be compared.

    Kernels of few bits compute otherwise without their packing, and 16 bits would be widened anew in every run.
    """
    is_large = weight_bytes_of(source.model) > PACKED_BYTES_MAX
    is_plain = arrived(source.model) is None and not narrow_types(source.model)
    return MAPPED if is_large and is_plain else RuntimeOptions()


@contextmanager
def opened(
    directory: Path, engine: Engine, options: RuntimeOptions, *, slots: int, context: int
) -> Iterator[OpenBackend]:
    """`engine` in `directory` with `slots` slots, whatever it will serve with, of `context` tokens at most."""
    limits = msgspec.structs.replace(
        engine.limits,
        slots=slots,
        context=min(engine.limits.context, context),
        step_tokens_max=max(engine.limits.step_tokens_max, slots + 1),
    )
    with watchdog.loading(directory / engine.path, MODEL_FILE):
        backend = open_engine(directory, msgspec.structs.replace(engine, limits=limits), options)
    try:
        yield backend
    finally:
        backend.close()


class Export:
    """The export under ONNX Runtime, one sequence at a time with its own past."""

    def __init__(self, path: Path, states: tuple[State, ...] = (), options: RuntimeOptions | None = None) -> None:
        """`states`: what the graph carries on, where the file leaves open what they are."""
        try:
            options = options or RuntimeOptions()
            with watchdog.loading(path, MODEL_FILE):
                self._session = new_session(path, options, keeps_memory=options.packs)
        except Exception as error:
            raise _cannot_run(error) from error
        ports = ports_of_session(self._session)
        self._outputs = [value.name for value in self._session.get_outputs()]
        try:
            self._states = states or states_of(ports, self._outputs)
        except StateError as error:
            raise _cannot_run(error) from error
        self._dtypes = {port.name: INPUT_DTYPES[port.type] for port in ports if port.name in STEP_INPUTS}
        self._token_s_max = TOKEN_S_MAX_PER_BYTE * sum(file.stat().st_size for file in path.parent.iterdir())
        self.forget()

    def forget(self) -> None:
        """Start a new sequence."""
        self._length = 0
        self._past = {state.input: ort.OrtValue.ortvalue_from_numpy(_empty(state)) for state in self._states}

    def read(self, tokens: Sequence[int]) -> Logits:
        """Append `tokens`; return the logits [tokens, vocab] after each of them. Raises SourceError."""
        count, end = len(tokens), self._length + len(tokens)
        feeds = step_feeds(self._dtypes, tokens, self._length, logits=count)
        known = {name: ort.OrtValue.ortvalue_from_numpy(array) for name, array in feeds.items()}
        try:
            values = self._run(known | self._past, RUN_S_MAX + count * self._token_s_max)
        except SourceError:
            raise
        except Exception as error:
            raise _cannot_run(error) from error
        results = dict(zip(self._outputs, values, strict=True))
        self._past = {state.input: results[state.output] for state in self._states}
        self._length = end
        logits: Logits = results["logits"].numpy().reshape(count, -1).astype(np.float32, copy=False)
        if not np.isfinite(logits).all():
            raise AccuracyError(
                f"the export itself gives NaN or infinity after {end} tokens; nothing was published. "
                "Export it again as fp32"
            )
        return logits

    def _run(self, feeds: dict[str, Any], limit_s: float) -> list[Any]:
        """All outputs. Raises SourceError if they take longer: a graph may hold a loop of any number of turns."""
        with watchdog.running(limit_s, MODEL_FILE) as options:
            values: list[Any] = self._session.run_with_ort_values(self._outputs, feeds, options)
        return values


def _empty(state: State) -> npt.NDArray[Any]:
    return np.zeros(state.shape, state.dtype)


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
        difference = apart(found, expected)
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
        noise = max(noise, apart(again, track.logits))
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


def apart(found: Logits, expected: Logits) -> float:
    """The largest |Δlogit| of tokens that may be drawn; both [..., vocab]."""
    return float(np.abs(comparable(found) - comparable(expected)).max())


def _bound(tracks: Sequence[Track], noise: float, *, is_quantised: bool = False) -> float:
    """The largest |Δlogit| that rounding explains. Raises AccuracyError when the export's own noise is above it."""
    scale = max(1.0, *(scale_of(track.logits) for track in tracks))
    floor = scale * (QUANTISED_RELATIVE if is_quantised else FLOOR_RELATIVE)
    ceiling = scale * (QUANTISED_RELATIVE if is_quantised else CEILING_RELATIVE)
    if noise > ceiling:
        raise AccuracyError(
            f"the export differs from itself by {noise:.2g} when a prompt is read in parts, the bound is "
            f"{ceiling:.2g}; nothing was published. Its caches do not work, or a token's answer depends on which "
            "others are read with it: export it again"
        )
    return min(max(floor, NOISE_FACTOR * noise), ceiling)


def _short(tracks: Sequence[Track]) -> list[Track]:
    return [track for track in tracks if len(track.fed) <= 2 * OUTPUT_TOKENS]


def _run_rounds(backend: OpenBackend, tracks: Sequence[Track], comparison: Comparison, progress: Progress) -> None:
    passes = [(plan, list(tracks)) for plan in ROUNDS] + [(TOKEN_BY_TOKEN, _short(tracks))]
    for index, (plan, chosen) in enumerate(passes):
        report = _part(progress, index / len(passes), (index + 1) / len(passes))
        run_round(backend, chosen, plan, comparison, report)


def run_round(
    backend: OpenBackend, tracks: Sequence[Track], plan: Round, comparison: Comparison, progress: Progress
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


def _in_flight(tracks: Sequence[Track], plan: Round, backend: OpenBackend) -> Iterator[list[_Part]]:
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


def _poison(backend: OpenBackend, value: float) -> None:
    """Whatever was computed before, or never, must not reach an answer."""
    rng = np.random.default_rng(SEED + 3)
    for cache in backend.caches:
        noise = rng.standard_normal(cache.shape[2:], np.float32) * value  # NaN stays NaN
        cache[...] = noise


def _part(progress: Progress, begin: float, end: float) -> Progress:
    def report(fraction: float, message: str) -> None:
        progress(begin + fraction * (end - begin), message)

    return report


def _cannot_run(error: Exception) -> MachineError | SourceError:
    text = plain(error)
    if isinstance(error, MemoryError) or "bad_alloc" in text or "Failed to allocate" in text:
        return MachineError(f"the machine has too little memory to run the export itself ({text}). Free some")
    what = f"ONNX Runtime {ort.__version__} cannot run the export ({text})"
    return SourceError([Finding(what, MODEL_FILE, "Export it again with a current optimum, as fp32 and with its past")])
