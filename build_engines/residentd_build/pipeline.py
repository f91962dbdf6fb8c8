"""One build: source directory → stage directory and manifest. Publishing is the caller's."""

from __future__ import annotations

import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Protocol

import msgspec
import onnx_ir as ir
import psutil

from residentd.backend.onnxruntime import LOAD_PEAK_FACTOR, MemoryNeed, memory_need
from residentd.errors import Finding, MachineError, OperatorError, SourceError, StoreError
from residentd.models.manifest import (
    SCHEMA,
    Agreement,
    Build,
    CacheTensor,
    Content,
    Engine,
    EngineLimits,
    Manifest,
    Text,
    TextGolden,
    content_digest,
)
from residentd.models.store import measure_files
from residentd.text.model import TextModel
from residentd.text.tokenizer import Tokenizer
from residentd_build.draft import Draft, draft_from_model
from residentd_build.fingerprint import machine, tool_versions
from residentd_build.foreign import refusing
from residentd_build.lower import onnxruntime as lower
from residentd_build.options import CONTEXT_MIN, Options
from residentd_build.passes import CANONICALISE, FUSE
from residentd_build.source import CHAT_TEMPLATE_FILE, TOKENIZER_FILE, Source
from residentd_build.validate import validate
from residentd_build.verify import VerifyResult, verify

ENGINE_DIRECTORY = "engine"
ENGINE_FILE = "model.onnx"
WEIGHTS_FILE = "weights.bin"
WEIGHTS_INLINE_BYTES_MAX = 1024
WEIGHTS_ALIGNMENT = 1 << 16  # the largest page size in use, so that each matrix can be mapped by itself
PROTO_OVERHEAD_BYTES = 32 << 20  # graph file, manifest and directories, beside weights and tokenizer
# Where the whole stands when a stage begins; shares of a SmolLM2-135M build.
STAGES = {"validate": 0.0, "canonicalise": 0.1, "lower": 0.2, "verify": 0.35, "publish": 0.95}
GOLDEN_TEXTS = (
    "Hello, world!",
    "  two  spaces\tand a tab\n\nand lines",
    "Ünïcödé, 你好, こんにちは, 안녕, мир, שלום",
    "emoji 😀👩‍💻 and digits 0123456789",
    "def f(x):\n    return x ** 2  # comment",
)


class Progress(Protocol):
    """Told how far the whole build is, 0 to 1, and in which stage."""

    def __call__(self, stage: str, fraction: float, message: str) -> None: ...


class Room(Protocol):
    """Raises StoreError when the stage's file system has no room for so many bytes."""

    def __call__(self, needed_bytes: int) -> None: ...


def build(directory: Path, stage: Path, options: Options, progress: Progress, check_room: Room) -> Manifest:
    """Compile `directory` into `stage` and verify it. Raises SourceError, AccuracyError, MachineError."""
    started = time.monotonic()
    progress("validate", STAGES["validate"], f"reading {directory}")
    source = validate(directory, context=options.context)
    with refusing("compiled"):
        draft = draft_from_model(
            source.model, context=options.context_for(source.context_max), step_tokens=options.step_tokens
        )
    check_memory(describe_engine(draft, source, options), _weight_bytes(source), stage)
    lines = rewrite(draft, progress)
    check_room(_bytes_needed(source))
    with refusing("compiled"):
        write_text(source, stage)
        check_text(source, stage)
        write_engine(draft, stage, progress)
    engine = describe_engine(draft, source, options)
    progress("verify", STAGES["verify"], "comparing the engine with its export")
    verified = verify(source, stage, engine, _within("verify", progress))
    progress("publish", STAGES["publish"], "measuring the files")
    content = describe_content(source, engine, verified, stage)
    history = Build(
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        tool_versions=tool_versions() | dict(machine()),
        source_sha256=source.sha256,
        seconds=round(time.monotonic() - started, 3),
        passes=tuple(lines),
    )
    return seal(content, verified.agreement, history, options.name)


def rewrite(draft: Draft, progress: Progress) -> list[str]:
    """Exporter's graph → canonical → lowered; what each pass did, a line each."""
    lines = []
    passes = {**CANONICALISE, **FUSE}
    for index, (name, run) in enumerate(passes.items()):
        share = index / len(passes)
        progress("canonicalise", STAGES["canonicalise"] + share * (STAGES["lower"] - STAGES["canonicalise"]), name)
        with refusing("compiled"):
            lines.append(run(draft))
    progress("lower", STAGES["lower"], "lowering for ONNX Runtime on the CPU")
    with refusing("compiled"):
        lines.append(lower.run(draft))
    return lines


def check_memory(engine: Engine, weight_bytes: int, stage: Path) -> None:
    """Raise MachineError if this machine, all of it, could not load `engine`. Makes the engine's empty directory."""
    (stage / ENGINE_DIRECTORY).mkdir()
    total = psutil.virtual_memory().total

    def need(limits: EngineLimits) -> MemoryNeed:
        found = memory_need(stage, msgspec.structs.replace(engine, limits=limits))
        return replace(found, weights=int(weight_bytes * LOAD_PEAK_FACTOR))

    limits = engine.limits
    asked = need(limits)
    if asked.total <= total:
        return
    fewer = (msgspec.structs.replace(limits, slots=slots) for slots in range(limits.slots - 1, 0, -1))
    halves = (limits.context >> shift for shift in range(1, limits.context.bit_length()))
    shorter = (msgspec.structs.replace(limits, context=context) for context in halves if context >= CONTEXT_MIN)
    ways = [f"--slots {fits.slots}" for fits in fewer if need(fits).total <= total][:1]
    ways += [f"--context {fits.context}" for fits in shorter if need(fits).total <= total][:1]
    raise MachineError(
        f"loading this version would take {_mib(asked.total)} MiB: weights {_mib(asked.weights)}, KV caches "
        f"{_mib(asked.caches)} for {limits.slots:,} slots of {limits.context:,} tokens, logits {_mib(asked.logits)}, "
        f"working space {_mib(asked.workspace)} for steps of {limits.step_tokens_max:,} tokens. This machine has "
        f"{_mib(total)} MiB. Use {' or '.join(ways) or 'fewer --slots and --step-tokens, a shorter --context'}, or a "
        "machine with more memory"
    )


def write_text(source: Source, stage: Path) -> None:
    (stage / TOKENIZER_FILE).write_bytes(source.text.tokenizer_json)
    if source.text.chat_template is not None:
        (stage / CHAT_TEMPLATE_FILE).write_text(source.text.chat_template, encoding="utf-8")


def check_text(source: Source, stage: Path) -> None:
    """Load the staged files as the daemon will, golden texts included. Raises SourceError."""
    try:
        TextModel.load(_describe_text(source), stage).verify(_text_goldens(source.text.tokenizer_json))
    except (OperatorError, StoreError) as error:
        remedy = "Save the tokenizer again with transformers' save_pretrained, from the model's own tokenizer"
        raise SourceError([Finding(str(error), TOKENIZER_FILE, remedy)]) from error


def write_engine(draft: Draft, stage: Path, progress: Progress) -> None:
    """Graph and weights; the weights pass through one tensor at a time, out of the source's mapping."""
    directory = stage / ENGINE_DIRECTORY
    directory.mkdir(exist_ok=True)
    report = _within("lower", progress)

    def written(_tensor: ir.TensorProtocol, info: ir.external_data.CallbackInfo) -> None:
        report(info.index / max(info.total, 1), f"writing weights, {info.index + 1:,} of {info.total:,}")

    ir.save(
        draft.model,
        directory / ENGINE_FILE,
        external_data=WEIGHTS_FILE,
        size_threshold_bytes=WEIGHTS_INLINE_BYTES_MAX,
        alignment=WEIGHTS_ALIGNMENT,
        callback=written,
    )


def describe_engine(draft: Draft, source: Source, options: Options) -> Engine:
    caches = [
        CacheTensor(input=past, output=present, heads=cache.heads, dim=cache.dim, dtype="float32")
        for cache in draft.caches
        for past, present in (
            (str(cache.past_key.name), cache.present_key_name),
            (str(cache.past_value.name), cache.present_value_name),
        )
    ]
    return Engine(
        target="onnxruntime-cpu",
        mode="canonical",
        precision="fp32",
        path=f"{ENGINE_DIRECTORY}/{ENGINE_FILE}",
        limits=EngineLimits(
            slots=options.slots, context=draft.context, step_tokens_max=options.step_tokens, vocab=source.vocab
        ),
        caches=tuple(caches),
    )


def describe_content(source: Source, engine: Engine, verified: VerifyResult, stage: Path) -> Content:
    """Everything that decides an answer, over the files that are in `stage` now."""
    return Content(
        architecture=source.architecture,
        engine=engine,
        text=_describe_text(source),
        sampling=source.sampling,
        goldens=verified.goldens,
        text_goldens=_text_goldens(source.text.tokenizer_json),
        files=measure_files(stage),
    )


def seal(content: Content, agreement: Agreement, history: Build, name: str) -> Manifest:
    digest = content_digest(content)
    return Manifest(schema=SCHEMA, name=name, content=content, digest=digest, agreement=agreement, build=history)


def _describe_text(source: Source) -> Text:
    text = source.text
    return Text(
        tokenizer=TOKENIZER_FILE,
        chat_template=None if text.chat_template is None else CHAT_TEMPLATE_FILE,
        bos_id=text.bos_id,
        bos_token=text.bos_token,
        eos_token=text.eos_token,
        adds_bos=text.adds_bos,
        eos_ids=text.eos_ids,
    )


def _text_goldens(tokenizer_json: bytes) -> tuple[TextGolden, ...]:
    """Plain encodings, without what the tokenizer adds or cuts by itself."""
    tokenizer = Tokenizer(tokenizer_json)
    return tuple(TextGolden(text=text, ids=tuple(tokenizer.encode(text, specials=False))) for text in GOLDEN_TEXTS)


def _bytes_needed(source: Source) -> int:
    return _weight_bytes(source) + len(source.text.tokenizer_json) + PROTO_OVERHEAD_BYTES


def _weight_bytes(source: Source) -> int:
    values = source.model.graph.initializers.values()
    return sum(value.const_value.nbytes for value in values if value.const_value is not None)


def _mib(count: int) -> str:
    return f"{count >> 20:,}"


class StageProgress(Protocol):
    """Told how far one stage is, 0 to 1."""

    def __call__(self, fraction: float, message: str) -> None: ...


def _within(stage: str, progress: Progress) -> StageProgress:
    """A share of the whole for one stage."""
    names = list(STAGES)
    begin = STAGES[stage]
    end = STAGES[names[names.index(stage) + 1]]

    def report(fraction: float, message: str) -> None:
        progress(stage, begin + min(max(fraction, 0.0), 1.0) * (end - begin), message)

    return report
