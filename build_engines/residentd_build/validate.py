"""Source directory → Source. Every finding at once, and nothing mapped that was not judged first."""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import onnx
import onnx_ir as ir
import psutil
from google.protobuf.message import DecodeError

from residentd.errors import Finding, MachineError, SourceError
from residentd.models.manifest import SamplingDefaults, State
from residentd.text.limits import TEMPLATE_BYTES_MAX, TOKENIZER_BYTES_MAX
from residentd_build.draft import (
    BRANCH_INPUT,
    KEPT_INPUT,
    LOGITS_OUTPUT,
    MASK_INPUT,
    PAST_PATTERN,
    POSITION_INPUT,
    TOKEN_INPUT,
)
from residentd_build.files import MissingError, RefusedError, SourceDirectory
from residentd_build.fingerprint import SourceDigest
from residentd_build.foreign import cut, refusing
from residentd_build.genai import config_of, generation_of, head_size_of
from residentd_build.model_file import ModelFile, find_model, split_source
from residentd_build.report import JSON_BYTES_MAX, MODEL_BYTES_MAX, Report
from residentd_build.source import (
    CHAT_TEMPLATE_FILE,
    CONFIG_FILE,
    GENAI_FILE,
    GENERATION_FILE,
    MODEL_FILE,
    SPECIAL_TOKENS_FILE,
    TOKENIZER_CONFIG_FILE,
    TOKENIZER_FILE,
    Source,
    TextSource,
)
from residentd_build.states import StateError, ports_of_graph, states_of
from residentd_build.tensors import (
    NODES_MAX,
    REMEDY,
    DataFiles,
    check_tensors,
    count_nodes,
    forget_imports,
    model_from_proto,
    nodes_of,
    not_numbers,
    skeleton_of,
)
from residentd_build.text_source import TextFiles, check_stops, read_sampling, read_text

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

OPSET_MIN, OPSET_MAX = 13, 25
DOMAINS = frozenset({"", "ai.onnx", "com.microsoft"})
VOCAB_MAX = 1 << 22
ARCHITECTURE_CHARS_MAX = 100
CONTEXT_MIN = 8
CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")  # of config.json, as they age
STEP_INPUTS = frozenset({TOKEN_INPUT, POSITION_INPUT, MASK_INPUT, BRANCH_INPUT, KEPT_INPUT})
CACHE_DTYPES = frozenset({ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16})
NAN_REMEDY = "Export the model again, as fp32; if it is so there too, its training failed or the file is damaged"
EXPORT_AGAIN = "Export it with `optimum-cli export onnx --task text-generation-with-past`"


@dataclass(slots=True)
class _Report(Report):
    """What a language model's parts give beside findings; `uncanonical` ones are in no other mode's way."""

    uncanonical: list[Finding] = field(default_factory=list)
    states: tuple[State, ...] = ()
    model: str = MODEL_FILE  # the model's file, once it is found


def validate(directory: Path, *, context: int | None = None, variant: str | None = None) -> Source:
    """Read and check an exporter's directory, or its ONNX file, for the `context` asked for.

    `variant` names one of several ONNX files. Raises SourceError with every finding.
    """
    with refusing("read"):
        return _validate(*split_source(directory, variant), context)


def _validate(directory: Path, variant: str | None, context: int | None) -> Source:
    report = _Report()
    try:
        opened = SourceDirectory(directory)
    except RefusedError as error:
        raise SourceError([Finding(f"it {error.what}", str(directory), error.remedy)]) from error
    with opened:
        digest = SourceDigest()
        genai = _json(opened, report, digest, GENAI_FILE, is_needed=False)
        text_files = _text_files(opened, report, digest, genai)
        file = _find(opened, report, genai, variant)
        data = DataFiles(opened, file.path)
        proto = _read_model(opened, report, digest, file)
        model = None if proto is None else _check_model(proto, data, head_size_of(genai), report)
        text, sampling, tokens = _text(text_files, report)
        vocab = _check_vocab(text_files, text, tokens, model, report)
        context_max = _check_context(text_files, context, report)
        architecture = _architecture(text_files, report)
        report.raise_if_any()
        assert model is not None
        assert text is not None  # each None above came with a finding
        _check_machine(data)
        for name in not_numbers(model):
            report.add("the weight holds NaN", f"{report.model}, tensor {name!r}", NAN_REMEDY)
        report.raise_if_any()
        data.add_to(digest)
    return Source(
        directory=directory,
        architecture=architecture,
        vocab=vocab,
        context_max=context_max,
        text=text,
        sampling=sampling,
        model=model,
        sha256=digest.hexdigest(),
        states=report.states,
        uncanonical=tuple(report.uncanonical),
        model_file=file.path,
        chosen=file.line,
    )


def _check_machine(data: DataFiles) -> None:
    """Raise MachineError before the weights are read if no build of them could be loaded here."""
    memory = psutil.virtual_memory().total
    if data.bytes_used > memory:
        raise MachineError(
            f"the weights have {data.bytes_used >> 20:,} MiB and this machine has {memory >> 20:,} MiB of memory, into "
            "which they must fit to be verified. Build on a larger machine, or take an export of fewer bits"
        )


# ---- files ---------------------------------------------------------------------------------------------------------


def _read(
    directory: SourceDirectory, report: _Report, digest: SourceDigest, name: str, bytes_max: int, *, is_needed: bool
) -> bytes | None:
    try:
        data = directory.read(name, bytes_max=bytes_max)
    except MissingError as error:
        if is_needed:
            report.add(f"the file {error.what}", name, f"{EXPORT_AGAIN}, which writes it")
        return None
    except RefusedError as error:
        report.add(f"the file {error.what}", name, error.remedy)
        return None
    digest.add(name, data)
    if is_needed and not data:
        report.add("the file is empty", name, "Export the model again, or copy it completely")
        return None
    return data


def _json(
    directory: SourceDirectory, report: _Report, digest: SourceDigest, name: str, *, is_needed: bool
) -> dict[str, Any]:
    data = _read(directory, report, digest, name, JSON_BYTES_MAX, is_needed=is_needed)
    if data is None:
        return {}
    try:
        parsed = json.loads(data)
    except (ValueError, RecursionError) as error:
        report.add(f"it is not valid JSON ({error})", name, "Restore the file from the model's own directory")
        return {}
    if not _is_text(parsed):
        what = "it holds half a surrogate pair (\\ud800 to \\udfff alone), which is no text"
        report.add(what, name, "Restore the file from the model's own directory")
        return {}
    if not isinstance(parsed, dict):
        report.add("it is not a JSON object", name, "Restore the file from the model's own directory")
        return {}
    return parsed


def _is_text(parsed: object) -> bool:
    """Whether every string can be written as UTF-8: JSON's escapes can name what no text holds."""
    try:
        json.dumps(parsed, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def _find(directory: SourceDirectory, report: _Report, genai: dict[str, Any], variant: str | None) -> ModelFile:
    """The model's file; model.onnx, which is then found missing, where there is none."""
    try:
        file = find_model(directory, genai, variant)
    except MissingError:
        file = ModelFile(MODEL_FILE)
    except RefusedError as error:
        report.add(f"the file {error.what}", MODEL_FILE, error.remedy)
        file = ModelFile("")
    report.model = file.path or MODEL_FILE
    return file


def _text_files(directory: SourceDirectory, report: _Report, digest: SourceDigest, genai: dict[str, Any]) -> TextFiles:
    template = _read(directory, report, digest, CHAT_TEMPLATE_FILE, TEMPLATE_BYTES_MAX, is_needed=False)
    decoded = None
    if template is not None:
        try:
            decoded = template.decode()
        except UnicodeDecodeError as error:
            report.add(
                f"it is not UTF-8 ({error.reason} at byte {error.start})", CHAT_TEMPLATE_FILE, "Save it as UTF-8"
            )
    return TextFiles(
        config=config_of(genai) | _json(directory, report, digest, CONFIG_FILE, is_needed=not genai),
        generation=generation_of(genai) | _json(directory, report, digest, GENERATION_FILE, is_needed=False),
        tokenizer_config=_json(directory, report, digest, TOKENIZER_CONFIG_FILE, is_needed=False),
        special_tokens=_json(directory, report, digest, SPECIAL_TOKENS_FILE, is_needed=False),
        tokenizer_json=_read(directory, report, digest, TOKENIZER_FILE, TOKENIZER_BYTES_MAX, is_needed=True) or b"",
        chat_template_file=decoded,
    )


def _read_model(
    directory: SourceDirectory, report: _Report, digest: SourceDigest, file: ModelFile
) -> onnx.ModelProto | None:
    """The parsed file; nothing that it refers to is opened."""
    if not file.path:
        return None
    try:
        mapped = directory.map(file.path, bytes_max=MODEL_BYTES_MAX)
    except RefusedError as error:
        report.add(f"the file {error.what}", file.path, error.remedy)
        return None
    with mapped, memoryview(mapped) as view:
        digest.add(file.path, mapped)
        try:
            # protobuf copies what it parses, so weights inside the file are held once; its stubs know bytes only.
            return onnx.ModelProto.FromString(view)  # type: ignore[arg-type]
        except (DecodeError, ValueError) as error:
            report.add(f"it is not an ONNX file ({error})", file.path, "Export the model again, or copy it completely")
            return None


# ---- text ----------------------------------------------------------------------------------------------------------


def _text(files: TextFiles, report: _Report) -> tuple[TextSource | None, SamplingDefaults, int]:
    sampling, findings = read_sampling(files.generation)
    report.findings += findings
    if not files.tokenizer_json:
        return None, sampling, 0
    text, findings, tokens = read_text(files)
    report.findings += findings
    return text, sampling, tokens


def _check_vocab(
    files: TextFiles, text: TextSource | None, tokens: int, model: ir.Model | None, report: _Report
) -> int:
    """The number of logits: by the graph where it says so, else by config.json."""
    configured = files.config.get("vocab_size")
    logits = (
        None if model is None else next((value for value in model.graph.outputs if value.name == LOGITS_OUTPUT), None)
    )
    width = logits.shape[-1] if logits is not None and logits.shape is not None else None
    vocab = width if isinstance(width, int) else configured
    if not files.config or (model is None and not isinstance(configured, int)):
        return 0
    if not isinstance(vocab, int) or isinstance(vocab, bool) or not 0 < vocab <= VOCAB_MAX:
        report.add(
            f"vocab_size is {cut(repr(configured))}; a number up to {VOCAB_MAX:,} is needed",
            CONFIG_FILE,
            "Restore config.json from the model",
        )
        return 0
    if isinstance(configured, int) and configured != vocab:
        report.add(
            f"vocab_size is {cut(f'{configured:,}')} and the model gives {vocab:,} logits",
            CONFIG_FILE,
            "Put the files of one model together",
        )
    if tokens > vocab:
        what = f"the tokenizer knows ids up to {tokens - 1:,} and the model gives {vocab:,} logits"
        report.add(what, TOKENIZER_FILE, "Use the tokenizer that belongs to this model")
    beyond = [index for index in text.eos_ids if index >= vocab] if text is not None else []
    if text is not None and not beyond:
        report.findings += check_stops(text.eos_ids, vocab)
    for index in beyond:
        report.add(
            f"end-of-sequence id {index:,} is beyond the {vocab:,} logits", GENERATION_FILE, "Correct eos_token_id"
        )
    return vocab


def _architecture(files: TextFiles, report: _Report) -> str:
    """What config.json calls the model's kind; only shown."""
    name = files.config.get("model_type") or "unknown"
    if isinstance(name, str) and len(name) <= ARCHITECTURE_CHARS_MAX and name.isprintable():
        return name
    what = f"model_type is {cut(json.dumps(name))}; a name of at most {ARCHITECTURE_CHARS_MAX} characters is needed"
    report.add(what, CONFIG_FILE, "Restore config.json from the model")
    return ""


def _longest(config: Mapping[str, Any]) -> object:
    """What config.json says. Frequencies that change beyond a length (longrope) are exported up to that length only."""
    longest = next((config[key] for key in CONTEXT_KEYS if key in config), None)
    scaling = config.get("rope_scaling")
    if isinstance(scaling, dict) and "longrope" in {scaling.get("type"), scaling.get("rope_type")}:
        original = config.get("original_max_position_embeddings")
        if isinstance(original, int) and isinstance(longest, int):
            return min(longest, original)
    return longest


def _check_context(files: TextFiles, asked: int | None, report: _Report) -> int:
    """The longest context the model was made for."""
    longest = _longest(files.config)
    if not files.config:
        return 0
    if not isinstance(longest, int) or isinstance(longest, bool) or longest < CONTEXT_MIN:
        what = f"max_position_embeddings is {cut(repr(longest))}; the model's context in tokens is needed"
        report.add(what, CONFIG_FILE, "Restore config.json from the model")
        return 0
    if asked is not None and asked > longest:
        what = f"a context of {asked:,} tokens was asked for and the model was made for {longest:,}"
        report.add(what, CONFIG_FILE, f"Use --context {longest} or less")
    return longest


# ---- graph ---------------------------------------------------------------------------------------------------------


def _check_model(proto: onnx.ModelProto, data: DataFiles, head_size: int | None, report: _Report) -> ir.Model | None:
    if count_nodes(proto.graph) > NODES_MAX:
        report.add(f"it has more than {NODES_MAX:,} nodes", report.model, REMEDY)
        return None
    harmful = check_tensors(proto, data)
    report.findings += harmful
    if not _check_versions(proto, report) or harmful:
        return None
    try:
        onnx.checker.check_model(skeleton_of(proto))
        model = model_from_proto(proto, data)
    except Exception as error:  # noqa: BLE001 - whatever these libraries say about a malformed file is the finding
        first = str(error).splitlines()[0][:300] if str(error) else type(error).__name__
        report.add(f"it is not a well-formed ONNX model ({first})", report.model, EXPORT_AGAIN)
        return None
    _settle_heads(model, head_size)
    _check_interface(model, report)
    return model


def _settle_heads(model: ir.Model, head_size: int | None) -> None:
    """Caches whose head size the graph leaves open have the configured one."""
    for value in model.graph.inputs:
        shape = value.shape
        is_open = shape is not None and len(shape) == 4 and isinstance(shape[1], int) and not isinstance(shape[3], int)
        if head_size is not None and is_open and PAST_PATTERN.fullmatch(value.name or ""):
            assert shape is not None
            value.shape = ir.Shape([*list(shape)[:3], head_size])


def _check_versions(proto: onnx.ModelProto, report: _Report) -> bool:
    before = len(report.findings)
    opsets = {entry.domain: entry.version for entry in proto.opset_import}
    used = {node.domain for node in nodes_of(proto.graph)}
    opset = opsets.get("", opsets.get("ai.onnx", 0))
    if not OPSET_MIN <= opset <= OPSET_MAX:
        what = f"it uses opset {opset}; {OPSET_MIN} to {OPSET_MAX} are supported"
        report.add(what, report.model, "Export it again with `--opset 18`")
    unknown = sorted(used - DOMAINS)
    if unknown:
        what = f"it uses operators of {', '.join(unknown)}, which are not supported"
        report.add(what, report.model, "Export it without custom operators")
    forget_imports(proto, used | DOMAINS)
    if proto.functions or proto.training_info or proto.graph.sparse_initializer:
        what = "it has model-local functions, a training section or sparse weights, which are not supported"
        report.add(what, report.model, "Export it for inference, with functions inlined")
    return len(report.findings) == before


def _check_interface(model: ir.Model, report: _Report) -> None:
    inputs = {value.name or "": value for value in model.graph.inputs}
    outputs = {value.name or "" for value in model.graph.outputs}
    if TOKEN_INPUT not in inputs:
        report.add(f"it has no input {TOKEN_INPUT}", report.model, EXPORT_AGAIN)
    if LOGITS_OUTPUT not in outputs:
        report.add(f"it has no output {LOGITS_OUTPUT}", report.model, EXPORT_AGAIN)
    with contextlib.suppress(StateError):
        report.states = states_of(ports_of_graph(model.graph), outputs)
    canonical = _Report()
    _check_canonical(inputs, outputs, canonical)
    # What has states, and only inputs of known meaning, runs as it is at least; without, it runs in no mode.
    (report.uncanonical if report.states else report.findings).extend(canonical.findings)


def _check_canonical(inputs: dict[str, ir.Value], outputs: set[str], report: _Report) -> None:
    """What the passes and the kernels of the canonical form need of the graph's inputs and outputs."""
    past = {name: value for name, value in inputs.items() if PAST_PATTERN.fullmatch(name)}
    if not past:
        report.add("it has no past_key_values inputs, so it cannot continue a sequence", report.model, EXPORT_AGAIN)
    unknown = sorted(inputs.keys() - STEP_INPUTS - past.keys())
    if unknown:
        what = f"it has inputs that a text model does not have: {', '.join(unknown)}"
        report.add(what, report.model, "Export the text model alone, with `--task text-generation-with-past`")
    _check_caches(past, outputs, report)


def _check_caches(past: dict[str, ir.Value], outputs: set[str], report: _Report) -> None:
    layers = sorted({int(name.split(".")[1]) for name in past})
    expected = {f"past_key_values.{layer}.{part}" for layer in layers for part in ("key", "value")}
    presents = {f"present.{layer}.{part}" for layer in layers for part in ("key", "value")}
    missing = sorted((expected - past.keys()) | (presents - outputs))
    if missing:
        report.add(f"the caches are incomplete: {', '.join(missing[:6])} missing", report.model, EXPORT_AGAIN)
    if layers != list(range(len(layers))):
        report.add(f"the cache layers are numbered {layers[0]} to {layers[-1]} with gaps", report.model, EXPORT_AGAIN)
    wrong = [name for name, value in sorted(past.items()) if not _is_cache(value)]
    if wrong:
        what = (
            f"{wrong[0]} ({len(wrong)} such) is not a floating-point [batch, heads, past, dim] with fixed heads and dim"
        )
        report.add(what, report.model, EXPORT_AGAIN)


def _is_cache(value: ir.Value) -> bool:
    shape = value.shape
    if shape is None or len(shape) != 4 or value.dtype not in CACHE_DTYPES:
        return False
    return all(isinstance(shape[axis], int) and 0 < int(str(shape[axis])) <= 1 << 16 for axis in (1, 3))
