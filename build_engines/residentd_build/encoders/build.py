"""One build of a text encoder: source directory → stage directory and manifest. Publishing is the caller's."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import msgspec
import onnx_ir as ir
import psutil
from onnx_ir.passes.common import RemoveUnusedNodesPass

from residentd.backend.onnxruntime import LOAD_PEAK_FACTOR, WORKSPACE_BYTES
from residentd.errors import Finding, MachineError, OperatorError, SourceError
from residentd.models.manifest import Build, Content, Engine, EngineLimits, Manifest, SamplingDefaults, Text
from residentd.models.store import measure_files
from residentd.text.encoder_text import EncoderText
from residentd.text.tokenizer import Tokenizer
from residentd_build.compatibility import precision_of
from residentd_build.encoders import verify
from residentd_build.encoders.kind import architecture_of
from residentd_build.encoders.source import EncoderSource, check_graph, read_encoder
from residentd_build.engine_files import ENGINE_FILE, WEIGHTS_ALIGNMENT, WEIGHTS_FILE, WEIGHTS_INLINE_BYTES_MAX
from residentd_build.fingerprint import machine, tool_versions
from residentd_build.foreign import cut, refusing
from residentd_build.pipeline import ENGINE_DIRECTORY, PROTO_OVERHEAD_BYTES, seal
from residentd_build.progress import stage_of
from residentd_build.source import CONFIG_FILE, TOKENIZER_FILE

if TYPE_CHECKING:
    from pathlib import Path

    from residentd.calls import TextRow
    from residentd.models.encoder import EncodedGolden
    from residentd_build.encoders.directory import Opened
    from residentd_build.options import Options
    from residentd_build.pipeline import Room
    from residentd_build.progress import Progress, StageProgress

ROW_WORK_BYTES = 96 << 10
"""Activations of one token of a run at their peak; MiniLM-L6 took 20 kB, a base-size model takes 50 (2026-12)."""
TEXTS: tuple[tuple[str, str | None], ...] = (
    ("The capital of France is Paris.", None),
    ("How high is the lighthouse?", None),
    ("Ünïcödé e\u0301, 你好, こんにちは, שלום, 👩‍💻 [SEP] and </s>", None),
    ("a", None),
    ("def f(x):\n\treturn x ** 2  # comment", None),
    ("The harbour town woke slowly, and a narrow street led from the old lighthouse to the market. " * 60, None),
)
PAIRS: tuple[tuple[str, str | None], ...] = (
    ("What is the capital of France?", "Paris is the capital of France."),
    ("What is the capital of France?", "The river froze in winter, and the whole town walked over the ice. " * 90),
    ("你好", "שלום"),
)


def read(opened: Opened) -> EncoderSource:
    """The whole source, or every finding. Raises SourceError."""
    reader, kind, file = opened.reader, opened.kind, opened.file
    assert kind in {"embed", "classify", "rerank"}
    encoder, longest, tokenizer, data = read_encoder(
        reader, kind, opened.interface, opened.config, modules=opened.modules, context=opened.context
    )
    model = reader.model(file)
    if model is not None:
        reader.findings += check_graph(model, kind, file.path)
    vocab = 0 if tokenizer is None else _vocab(tokenizer)
    configured = opened.config.get("vocab_size")
    if isinstance(configured, int) and vocab > configured:
        what = f"the tokenizer knows ids up to {vocab - 1:,} and config.json says {configured:,} ids"
        reader.add(what, TOKENIZER_FILE, "Use the tokenizer that belongs to this model")
    reader.raise_if_any()
    assert model is not None
    return EncoderSource(
        directory=reader.directory.path,
        file=file,
        kind=kind,
        architecture=_architecture(opened),
        encoder=encoder,
        tokens_max=longest,
        vocab=vocab,
        tokenizer_json=data,
        model=model,
        sha256=reader.digest.hexdigest(),
    )


def build(source: EncoderSource, stage: Path, options: Options, progress: Progress, check_room: Room) -> Manifest:
    """Compile `source` into `stage` and verify it. Raises SourceError, AccuracyError, MachineError."""
    started = time.monotonic()
    engine = describe_engine(source, options)
    weight_bytes = weight_bytes_of(source.model)
    check_memory(engine, weight_bytes)
    check_room(weight_bytes + len(source.tokenizer_json) + PROTO_OVERHEAD_BYTES)
    (stage / TOKENIZER_FILE).write_bytes(source.tokenizer_json)
    texts, encoded = encode_texts(source)
    rows = verify.sample_rows(encoded, source)
    reference = verify.reference_of(source, rows, stage_of(progress, "verify", 0.1, 0.5))
    with refusing("compiled"):
        line = write_engine(source.model, source.encoder.output, stage, stage_of(progress, "lower", 0.5, 0.6))
    verified = verify.verify(
        source, stage / engine.path, reference, engine.limits.slots, stage_of(progress, "verify", 0.6, 0.95)
    )
    progress("publish", 0.95, "measuring the files")
    content = Content(
        architecture=source.architecture,
        engine=engine,
        text=describe_text(),
        sampling=SamplingDefaults(),
        goldens=(),
        text_goldens=(),
        files=measure_files(stage),
        kind=source.kind,
        encoder=msgspec.structs.replace(verified.encoder, texts=texts),
    )
    history = Build(
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        tool_versions=tool_versions() | dict(machine()),
        source_sha256=source.sha256,
        seconds=round(time.monotonic() - started, 3),
        passes=(line, *verified.lines),
    )
    return seal(content, verified.agreement, history, options.name)


def describe_engine(source: EncoderSource, options: Options) -> Engine:
    return Engine(
        target="onnxruntime-cpu",
        mode="canonical",
        precision=precision_of(source.model),
        path=f"{ENGINE_DIRECTORY}/{ENGINE_FILE}",
        limits=EngineLimits(
            slots=options.slots,
            context=source.tokens_max,
            step_tokens_max=max(options.step_tokens, source.tokens_max),
            vocab=source.vocab,
        ),
        caches=(),
    )


def describe_text() -> Text:
    """A tokenizer, and nothing of what only generation needs."""
    return Text(
        tokenizer=TOKENIZER_FILE,
        chat_template=None,
        bos_id=None,
        bos_token="",
        eos_token="",
        adds_bos=False,
        eos_ids=(),
    )


def encode_texts(source: EncoderSource) -> tuple[tuple[EncodedGolden, ...], list[TextRow]]:
    """The golden texts' ids, and their rows, as the daemon will make them. Raises SourceError."""
    try:
        text = EncoderText(Tokenizer(source.tokenizer_json), source.encoder, source.tokens_max)
        cases = TEXTS if source.kind == "embed" else TEXTS[:3] + PAIRS
        goldens = text.record(cases)
        encoded = [text.encode([one], None if other is None else [other], truncate=True)[0].row for one, other in cases]
    except OperatorError as error:
        raise SourceError([Finding(cut(str(error), 400), TOKENIZER_FILE, "Save the tokenizer again")]) from error
    return goldens, encoded


def write_engine(model: ir.Model, output: str | None, stage: Path, report: StageProgress) -> str:
    """The export with the one output that is asked for, or all; its weights beside it. What it says of itself."""
    before = len(list(model.graph.all_nodes()))
    if output is not None:
        outputs = [value for value in model.graph.outputs if value.name == output]
        model.graph.outputs.clear()
        model.graph.outputs.extend(outputs)
        RemoveUnusedNodesPass()(model)
    after = len(list(model.graph.all_nodes()))
    directory = stage / ENGINE_DIRECTORY
    directory.mkdir(exist_ok=True)

    def written(_tensor: ir.TensorProtocol, info: ir.external_data.CallbackInfo) -> None:
        report(info.index / max(info.total, 1), f"writing weights, {info.index + 1:,} of {info.total:,}")

    ir.save(
        model,
        directory / ENGINE_FILE,
        external_data=WEIGHTS_FILE,
        size_threshold_bytes=WEIGHTS_INLINE_BYTES_MAX,
        alignment=WEIGHTS_ALIGNMENT,
        callback=written,
    )
    return f"graph: as exported{'' if output is None else f', for output {output}'}: {after:,} of {before:,} nodes"


def check_memory(engine: Engine, weight_bytes: int) -> None:
    """Raise MachineError if this machine, all of it, could not load and run `engine`."""
    work = engine.limits.step_tokens_max * ROW_WORK_BYTES
    need = int(weight_bytes * LOAD_PEAK_FACTOR) + WORKSPACE_BYTES + work
    total = psutil.virtual_memory().total
    if need > total:
        raise MachineError(
            f"loading this version would take {need >> 20:,} MiB: weights {weight_bytes >> 20:,}, working space "
            f"{(WORKSPACE_BYTES + work) >> 20:,} for runs of {engine.limits.step_tokens_max:,} tokens. This machine "
            f"has {total >> 20:,} MiB. Use fewer --step-tokens, a shorter --context, or a machine with more memory"
        )


def weight_bytes_of(model: ir.Model) -> int:
    values = model.graph.initializers.values()
    return sum(value.const_value.nbytes for value in values if value.const_value is not None)


def _vocab(tokenizer: Tokenizer) -> int:
    return max(tokenizer.inner.get_vocab(with_added_tokens=True).values(), default=-1) + 1


def _architecture(opened: Opened) -> str:
    """What config.json calls the model; only shown."""
    name = opened.config.get("model_type") or architecture_of(opened.config) or "unknown"
    if isinstance(name, str) and len(name) <= 100 and name.isprintable():
        return name
    raise SourceError([Finding(f"model_type is {cut(repr(name))}", CONFIG_FILE, "Restore config.json from the model")])
