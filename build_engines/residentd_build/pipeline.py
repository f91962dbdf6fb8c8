"""One build: source directory → stage directory and manifest. Publishing is the caller's."""

from __future__ import annotations

import shutil
import time
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Protocol

import msgspec
import psutil

from residentd.backend.modes import memory_need
from residentd.backend.onnxruntime import LOAD_PEAK_FACTOR, MemoryNeed
from residentd.errors import CallerError, Finding, MachineError, OperatorError, SourceError, StoreError
from residentd.models.manifest import (
    SCHEMA,
    Agreement,
    Build,
    CacheTensor,
    ChatGolden,
    Content,
    Engine,
    EngineLimits,
    Manifest,
    Text,
    TextGolden,
    content_digest,
)
from residentd.models.store import measure_files
from residentd.text.goldens import record_chats, record_texts
from residentd.text.model import TextModel
from residentd_build import compatibility, reference
from residentd_build.arrived import arrived, refuse_other
from residentd_build.candidates import FLOATS, Chosen, Workshop, choose
from residentd_build.draft import Draft, draft_from_model
from residentd_build.engine_files import ENGINE_FILE, write_files
from residentd_build.fingerprint import machine, tool_versions
from residentd_build.foreign import refusing
from residentd_build.lower import onnxruntime as lower
from residentd_build.options import CONTEXT_MIN, Options, Weights
from residentd_build.passes import CANONICALISE, FUSE
from residentd_build.passes.widen import NARROW, stored_precision
from residentd_build.progress import Progress, StageProgress, part_of, stage_of
from residentd_build.quality import passages_of, record_bytes, record_export
from residentd_build.softcaps import note
from residentd_build.source import CHAT_TEMPLATE_FILE, TOKENIZER_FILE, Source
from residentd_build.validate import validate
from residentd_build.verify import Export, VerifyResult, comparing, verify

ENGINE_DIRECTORY = "engine"
RECORD_SHARE = 0.2  # of measuring
RECORD_FILE = "export.f32"  # what the export answered, until the build is measured; never published
AUTO_ROOM = 0.4  # of the weights as exported: int8 with a scale for every 32 weights, and room to spare
PROTO_OVERHEAD_BYTES = 32 << 20  # graph file, manifest and directories, beside weights and tokenizer
# Where the whole stands when a stage begins; shares of a SmolLM2-135M build.
STAGES = {"validate": 0.0, "canonicalise": 0.02, "lower": 0.03, "verify": 0.06, "measure": 0.6, "publish": 0.97}


class Room(Protocol):
    """Raises StoreError when the stage's file system has no room for so many bytes."""

    def __call__(self, needed_bytes: int) -> None: ...


def build(directory: Path, stage: Path, options: Options, progress: Progress, check_room: Room) -> Manifest:
    """Compile `directory` into `stage` and verify it. Raises SourceError, AccuracyError, MachineError."""
    started = time.monotonic()
    progress("validate", STAGES["validate"], f"reading {directory}")
    source = validate(directory, context=options.context, variant=options.variant)
    softcaps = note(source)
    if softcaps:
        progress("note", STAGES["validate"], softcaps)
    compiled = compile_source(source, stage, options, progress)
    draft, engine = compiled.draft, compiled.engine
    check_room(_bytes_needed(source, options))
    compared = ""
    if engine.mode == "canonical":
        with refusing("compiled"):
            report = stage_of(progress, "lower", STAGES["lower"], STAGES["lower"])
            source, compared = reference.prepare(source, stage, engine.limits.context, report)
    with refusing("compiled"):
        write_text(source, stage)
        check_text(source, stage)
        write_engine(draft, stage, progress)
    if engine.mode == "compatibility":
        source, compared = reference.prepare_as_exported(source, stage / engine.path)
    progress("verify", STAGES["verify"], "comparing the engine with its export")
    verified = verify(source, stage, engine, _within("verify", progress))
    chosen = measure(draft, source, stage, options, engine=engine, verified=verified, progress=progress)
    shutil.rmtree(stage / reference.DIRECTORY, ignore_errors=True)
    progress("publish", STAGES["publish"], "measuring the files")
    content = describe_content(source, chosen, stage)
    passes = tuple(line for line in (source.chosen, softcaps, *compiled.lines, compared, *chosen.lines) if line)
    history = history_of(source.sha256, started, passes, chosen.candidates)
    sealed = seal(content, verified.agreement, history, options.name)
    return msgspec.structs.replace(sealed, quality=chosen.quality, cost=chosen.cost)


@dataclass(frozen=True, slots=True)
class Compiled:
    """What goes to the stage. `lines` say what was done, one for each pass."""

    draft: Draft
    engine: Engine
    lines: tuple[str, ...]


def compile_source(source: Source, stage: Path, options: Options, progress: Progress) -> Compiled:
    """In the canonical form if that can be and is not ruled out, else as it was exported. Raises SourceError."""
    refuse_other(arrived(source.model), options)
    reasons = compatibility.reasons_before(source, options)
    model = source.model
    if not reasons:
        # The passes rewrite in place. A copy of the graph shares the weights.
        own = replace(source, model=model.clone())
        try:
            return _compile_canonical(own, stage, options, progress)
        except SourceError as error:
            reasons = error.findings
    compatibility.check_possible(source, reasons, options)
    draft = compatibility.draft_as_it_is(source, model.clone(), options)
    engine = msgspec.structs.replace(
        describe_engine(draft, source, options),
        mode="compatibility",
        mode_reason=compatibility.reason_of(reasons),
        precision=compatibility.precision_of(model),
        states=source.states,
    )
    check_memory(engine, _weight_bytes(source), stage)
    return Compiled(draft, engine, (compatibility.describe(engine), *compatibility.separate(draft, reasons)))


def _compile_canonical(source: Source, stage: Path, options: Options, progress: Progress) -> Compiled:
    with refusing("compiled"):
        draft = draft_from_model(
            source.model, context=options.context_for(source.context_max), step_tokens=options.step_tokens
        )
    check_memory(describe_engine(draft, source, options), _weight_bytes(source), stage)
    found = arrived(source.model)
    lines = rewrite(draft, progress)
    engine = describe_engine(draft, source, options)
    if found is not None:
        engine = msgspec.structs.replace(engine, precision=found.precision, weights=f"as exported: {found.description}")
    return Compiled(draft, engine, tuple(lines))


def measure(
    draft: Draft,
    source: Source,
    stage: Path,
    options: Options,
    *,
    engine: Engine,
    verified: VerifyResult,
    progress: Progress,
) -> Chosen:
    """Let the export read the text, then make and measure the build that the options ask for."""
    record = stage / RECORD_FILE
    passages = passages_of(source, engine.limits.context)
    whole = part_of(progress, STAGES["measure"], STAGES["publish"])
    reading = stage_of(whole, "measure", 0.0, RECORD_SHARE)
    loading = comparing(source)
    recorded = record_export(Export(source.model_path, source.model_states, loading), passages, record, reading)
    if engine.mode == "compatibility" or engine.precision not in FLOATS:
        options = replace(options, weights=Weights(kl_max=options.weights.kl_max))  # as it is, whatever auto could make
    elif options.weights.precision is None:  # nothing was asked for: 16 bits stay 16 bits
        options = replace(options, weights=replace(options.weights, precision=stored_precision(source.model)))
    workshop = Workshop(draft, stage, options, verified, recorded, loading)
    chosen = choose(workshop, engine, part_of(whole, RECORD_SHARE, 1.0))
    record.unlink()
    return chosen


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
    (stage / ENGINE_DIRECTORY).mkdir(exist_ok=True)
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
    """Load the staged files as the daemon will, goldens included. Raises SourceError."""
    try:
        _text_goldens(source, stage)
    except (CallerError, OperatorError, StoreError) as error:
        remedy = "Save the tokenizer again with transformers' save_pretrained, from the model's own tokenizer"
        raise SourceError([Finding(str(error), TOKENIZER_FILE, remedy)]) from error


def write_engine(draft: Draft, stage: Path, progress: Progress) -> None:
    """Graph and weights of the engine that is verified."""
    write_files(draft.model, stage / ENGINE_DIRECTORY, _within("lower", progress))


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


def describe_content(source: Source, chosen: Chosen, stage: Path) -> Content:
    """Everything that decides an answer, over the files that are in `stage` now."""
    texts, chats = _text_goldens(source, stage)
    return Content(
        architecture=source.architecture,
        engine=chosen.engine,
        text=_describe_text(source),
        sampling=source.sampling,
        goldens=chosen.goldens,
        text_goldens=texts,
        files=measure_files(stage),
        chat_goldens=chats,
        tolerance=chosen.tolerance,
    )


def history_of(
    source_sha256: str, started_s: float, passes: tuple[str, ...], candidates: tuple[str, ...] = ()
) -> Build:
    """Where, when and from what a build was made that began at `started_s` of the monotonic clock."""
    return Build(
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        tool_versions=tool_versions() | dict(machine()),
        source_sha256=source_sha256,
        seconds=round(time.monotonic() - started_s, 3),
        passes=passes,
        candidates=candidates,
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


def _text_goldens(source: Source, stage: Path) -> tuple[tuple[TextGolden, ...], tuple[ChatGolden, ...]]:
    model = TextModel.load(_describe_text(source), stage)
    return record_texts(model), record_chats(model)


def _bytes_needed(source: Source, options: Options) -> int:
    """At the fullest moment: the verified engine, the export's record, and with auto the next candidate beside them."""
    engines = _weight_bytes(source) * (
        1 + reference.is_needed(source.model) + AUTO_ROOM * (len(options.weights.schemes()) > 1)
    )
    record = record_bytes(source, options.context_for(source.context_max))
    return int(engines) + record + len(source.text.tokenizer_json) + PROTO_OVERHEAD_BYTES


def _weight_bytes(source: Source) -> int:
    """As the engine holds them: 16 bits are widened when it is loaded."""
    tensors = [value.const_value for value in source.model.graph.initializers.values()]
    return sum(tensor.nbytes * (1 + (tensor.dtype in NARROW)) for tensor in tensors if tensor is not None)


def _mib(count: int) -> str:
    return f"{count >> 20:,}"


def _within(stage: str, progress: Progress) -> StageProgress:
    """A share of the whole for one stage."""
    names = list(STAGES)
    return stage_of(progress, stage, STAGES[stage], STAGES[names[names.index(stage) + 1]])
