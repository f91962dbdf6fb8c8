"""One build of a text encoder: source directory → stage directory and manifest. Publishing is the caller's."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import msgspec
import psutil
from onnx_ir.passes.common import RemoveUnusedNodesPass

from residentd.backend.onnxruntime import LOAD_PEAK_FACTOR, WORKSPACE_BYTES
from residentd.calls import TextRow
from residentd.errors import CallerError, Finding, MachineError, OperatorError, SourceError
from residentd.models.manifest import Content, Engine, EngineLimits, Manifest, SamplingDefaults, Text
from residentd.models.store import measure_files
from residentd.text.encoder_text import EncoderText
from residentd.text.tokenizer import Tokenizer
from residentd_build.compatibility import precision_of
from residentd_build.encoders import verify
from residentd_build.encoders.choices import refuse_other_precision
from residentd_build.encoders.kind import architecture_of
from residentd_build.encoders.source import EncoderSource, check_graph, read_encoder
from residentd_build.engine_files import ENGINE_FILE, write_files
from residentd_build.foreign import cut, refusing
from residentd_build.pipeline import ENGINE_DIRECTORY, PROTO_OVERHEAD_BYTES, history_of, seal
from residentd_build.progress import stage_of
from residentd_build.source import TOKENIZER_FILE
from residentd_build.tensors import weight_bytes_of
from residentd_build.text_source import FIX_TOKENIZER, ids_of

if TYPE_CHECKING:
    from pathlib import Path

    import onnx_ir as ir

    from residentd.models.encoder import EncodedGolden
    from residentd_build.encoders.directory import Opened
    from residentd_build.options import Options
    from residentd_build.pipeline import Room
    from residentd_build.progress import Progress, StageProgress

ROW_WORK_BYTES = 96 << 10
"""Activations of one token of a run at their peak; MiniLM-L6 took 20 kB, a base-size model takes 50 (2026-12)."""
PAIR_WORK_BYTES = 104
"""Of a token with each of its text: scores before and after the softmax, of 12 heads, the fewest that models for long
texts have (98 to 104 bytes in onnxruntime 1.32.0, with and without its optimisations, 2026-12)."""
TEXTS: tuple[tuple[str, str | None], ...] = (
    ("The capital of France is Paris.", None),
    ("How high is the lighthouse?", None),
    ("Ünïcödé e\u0301, 你好, こんにちは, שלום, 👩‍💻 [SEP] and </s> Rindfleischetikettierungsüberwachung", None),
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
    model = reader.model(file.path)
    if model is not None:
        reader.findings += check_graph(model, kind, file.path)
    vocab = 0 if tokenizer is None else ids_of(tokenizer.inner)
    configured = opened.config.get("vocab_size")
    if isinstance(configured, int) and vocab > configured:
        what = f"the tokenizer knows ids up to {vocab - 1:,} and config.json says {configured:,} ids"
        reader.add(what, TOKENIZER_FILE, "Use the tokenizer that belongs to this model")
    architecture = reader.architecture(opened.config, architecture_of(opened.config))
    sha256 = reader.settle(model, file.path)
    assert model is not None
    return EncoderSource(
        directory=reader.directory.path,
        file=file,
        kind=kind,
        architecture=architecture,
        encoder=encoder,
        tokens_max=longest,
        vocab=vocab,
        tokenizer_json=data,
        model=model,
        sha256=sha256,
    )


def build(source: EncoderSource, stage: Path, options: Options, progress: Progress, check_room: Room) -> Manifest:
    """Compile `source` into `stage` and verify it. Raises SourceError, AccuracyError, MachineError."""
    started = time.monotonic()
    engine = describe_engine(source, options)
    refuse_other_precision(options, source.kind, engine.precision)
    weight_bytes = weight_bytes_of(source.model)
    check_memory(engine, weight_bytes)
    check_room(weight_bytes + len(source.tokenizer_json) + PROTO_OVERHEAD_BYTES)
    (stage / TOKENIZER_FILE).write_bytes(source.tokenizer_json)
    texts = encode_texts(source)
    rows = verify.sample_rows([TextRow(text.ids, text.types) for text in texts], source)
    reference = verify.reference_of(source, rows, engine.limits, stage_of(progress, "verify", 0.1, 0.5))
    with refusing("compiled"):
        line = write_engine(source.model, source.encoder.output, stage, stage_of(progress, "lower", 0.5, 0.6))
    verified = verify.verify(
        source, stage / engine.path, reference, engine.limits, stage_of(progress, "verify", 0.6, 0.95)
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
    history = history_of(source.sha256, started, (line, *verified.lines))
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


def encode_texts(source: EncoderSource) -> tuple[EncodedGolden, ...]:
    """The golden texts with their ids, as the daemon will make them. Raises SourceError."""
    try:
        text = EncoderText(Tokenizer(source.tokenizer_json), source.encoder, source.tokens_max)
        cases = TEXTS if source.kind == "embed" else TEXTS[:3] + PAIRS
        return text.record(cases)
    except (CallerError, OperatorError) as error:
        raise SourceError([Finding(cut(str(error), 400), TOKENIZER_FILE, FIX_TOKENIZER)]) from error


def write_engine(model: ir.Model, output: str | None, stage: Path, report: StageProgress) -> str:
    """The export with the one output that is asked for, or all; its weights beside it. What it says of itself."""
    before = len(list(model.graph.all_nodes()))
    if output is not None:
        outputs = [value for value in model.graph.outputs if value.name == output]
        model.graph.outputs.clear()
        model.graph.outputs.extend(outputs)
        RemoveUnusedNodesPass()(model)
    after = len(list(model.graph.all_nodes()))
    write_files(model, stage / ENGINE_DIRECTORY, report)
    return f"graph: as exported{'' if output is None else f', for output {output}'}: {after:,} of {before:,} nodes"


def check_memory(engine: Engine, weight_bytes: int) -> None:
    """Raise MachineError if this machine, all of it, could not load and run `engine`."""
    limits = engine.limits
    work = limits.step_tokens_max * (ROW_WORK_BYTES + limits.context * PAIR_WORK_BYTES)
    need = int(weight_bytes * LOAD_PEAK_FACTOR) + WORKSPACE_BYTES + work
    total = psutil.virtual_memory().total
    if need > total:
        raise MachineError(
            f"loading this version would take {need >> 20:,} MiB: weights {weight_bytes >> 20:,}, working space "
            f"{(WORKSPACE_BYTES + work) >> 20:,} for runs of {limits.step_tokens_max:,} tokens in texts of up to "
            f"{limits.context:,}. This machine has {total >> 20:,} MiB. Use fewer --step-tokens, a shorter --context, "
            "or a machine with more memory"
        )
