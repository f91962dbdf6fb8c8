"""The directory of a language model → Source. Every finding at once, and nothing mapped that was not judged first."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import onnx_ir as ir

from residentd.errors import Finding
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
from residentd_build.foreign import cut, refusing
from residentd_build.genai import config_of, generation_of, head_size_of
from residentd_build.model_file import split_source
from residentd_build.reading import RESTORE, Dialect, Reader, opening
from residentd_build.report import Report
from residentd_build.source import (
    CHAT_TEMPLATE_FILE,
    CONFIG_FILE,
    GENAI_FILE,
    GENERATION_FILE,
    SPECIAL_TOKENS_FILE,
    TOKENIZER_CONFIG_FILE,
    TOKENIZER_FILE,
    Source,
    TextSource,
)
from residentd_build.states import StateError, ports_of_graph, states_of
from residentd_build.text_source import TextFiles, check_stops, read_sampling, read_text

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

EXPORT_AGAIN = "Export it with `optimum-cli export onnx --task text-generation-with-past`"
DIALECT = Dialect(
    opset_min=13,
    opset_max=25,
    domains=frozenset({"", "ai.onnx", "com.microsoft"}),
    again=EXPORT_AGAIN,
    opset_again="Export it again with `--opset 18`",
)
VOCAB_MAX = 1 << 22
CONTEXT_MIN = 8
CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")  # of config.json, as they age
STEP_INPUTS = frozenset({TOKEN_INPUT, POSITION_INPUT, MASK_INPUT, BRANCH_INPUT, KEPT_INPUT})
CACHE_DTYPES = frozenset({ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16})


@dataclass(frozen=True, slots=True)
class _Ports:
    """What a graph carries from run to run, and what is in the canonical form's way but in no other mode's."""

    states: tuple[State, ...] = ()
    uncanonical: tuple[Finding, ...] = ()


def validate(directory: Path, *, context: int | None = None, variant: str | None = None) -> Source:
    """Read and check an exporter's directory, or its ONNX file, for the `context` asked for.

    `variant` names one of several ONNX files. Raises SourceError with every finding, MachineError.
    """
    folder, chosen = split_source(directory, variant)
    with refusing("read"), opening(folder, DIALECT) as reader:
        return _validate(reader, chosen, context)


def _validate(reader: Reader, variant: str | None, context: int | None) -> Source:
    genai: dict[str, Any] = reader.json(GENAI_FILE)
    files = _text_files(reader, genai)
    file = reader.find(variant, genai)
    model = None if file is None else reader.model(file.path)
    ports = _Ports()
    if model is not None and file is not None:
        _settle_heads(model, head_size_of(genai))
        ports = _check_ports(model, reader, file.path)
    text, sampling, tokens = _text(files, reader)
    vocab = _check_vocab(files, text, tokens, model, reader)
    context_max = _check_context(files, context, reader)
    architecture = reader.architecture(files.config)
    reader.raise_if_any()
    assert model is not None
    assert file is not None
    assert text is not None  # each None above came with a finding
    return Source(
        directory=reader.directory.path,
        architecture=architecture,
        vocab=vocab,
        context_max=context_max,
        text=text,
        sampling=sampling,
        model=model,
        sha256=reader.settle(model, file.path),
        states=ports.states,
        uncanonical=ports.uncanonical,
        model_file=file.path,
        chosen=file.line,
    )


# ---- text ----------------------------------------------------------------------------------------------------------


def _text_files(reader: Reader, genai: Mapping[str, Any]) -> TextFiles:
    template = reader.bytes(CHAT_TEMPLATE_FILE, TEMPLATE_BYTES_MAX)
    decoded = None
    if template is not None:
        try:
            decoded = template.decode()
        except UnicodeDecodeError as error:
            what = f"it is not UTF-8 ({error.reason} at byte {error.start})"
            reader.add(what, CHAT_TEMPLATE_FILE, "Save it as UTF-8")
    needed = f"{EXPORT_AGAIN}, which writes it"
    return TextFiles(
        config=config_of(genai) | reader.json(CONFIG_FILE, needed="" if genai else needed),
        generation=generation_of(genai) | reader.json(GENERATION_FILE),
        tokenizer_config=reader.json(TOKENIZER_CONFIG_FILE),
        special_tokens=reader.json(SPECIAL_TOKENS_FILE),
        tokenizer_json=reader.bytes(TOKENIZER_FILE, TOKENIZER_BYTES_MAX, needed=needed) or b"",
        chat_template_file=decoded,
    )


def _text(files: TextFiles, reader: Reader) -> tuple[TextSource | None, SamplingDefaults, int]:
    sampling, findings = read_sampling(files.generation)
    reader.findings += findings
    if not files.tokenizer_json:
        return None, sampling, 0
    text, findings, tokens = read_text(files)
    reader.findings += findings
    return text, sampling, tokens


def _check_vocab(files: TextFiles, text: TextSource | None, tokens: int, model: ir.Model | None, reader: Reader) -> int:
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
        what = f"vocab_size is {cut(repr(configured))}; a number up to {VOCAB_MAX:,} is needed"
        reader.add(what, CONFIG_FILE, RESTORE)
        return 0
    if isinstance(configured, int) and configured != vocab:
        reader.add(
            f"vocab_size is {cut(f'{configured:,}')} and the model gives {vocab:,} logits",
            CONFIG_FILE,
            "Put the files of one model together",
        )
    if tokens > vocab:
        what = f"the tokenizer knows ids up to {tokens - 1:,} and the model gives {vocab:,} logits"
        reader.add(what, TOKENIZER_FILE, "Use the tokenizer that belongs to this model")
    beyond = [index for index in text.eos_ids if index >= vocab] if text is not None else []
    if text is not None and not beyond:
        reader.findings += check_stops(text.eos_ids, vocab)
    for index in beyond:
        reader.add(
            f"end-of-sequence id {index:,} is beyond the {vocab:,} logits", GENERATION_FILE, "Correct eos_token_id"
        )
    return vocab


def _longest(config: Mapping[str, Any]) -> object:
    """What config.json says. Frequencies that change beyond a length (longrope) are exported up to that length only."""
    longest = next((config[key] for key in CONTEXT_KEYS if key in config), None)
    scaling = config.get("rope_scaling")
    if isinstance(scaling, dict) and "longrope" in {scaling.get("type"), scaling.get("rope_type")}:
        original = config.get("original_max_position_embeddings")
        if isinstance(original, int) and isinstance(longest, int):
            return min(longest, original)
    return longest


def _check_context(files: TextFiles, asked: int | None, reader: Reader) -> int:
    """The longest context the model was made for."""
    longest = _longest(files.config)
    if not files.config:
        return 0
    if not isinstance(longest, int) or isinstance(longest, bool) or longest < CONTEXT_MIN:
        what = f"max_position_embeddings is {cut(repr(longest))}; the model's context in tokens is needed"
        reader.add(what, CONFIG_FILE, RESTORE)
        return 0
    if asked is not None and asked > longest:
        what = f"a context of {asked:,} tokens was asked for and the model was made for {longest:,}"
        reader.add(what, CONFIG_FILE, f"Use --context {longest} or less")
    return longest


# ---- graph ---------------------------------------------------------------------------------------------------------


def _settle_heads(model: ir.Model, head_size: int | None) -> None:
    """Caches whose head size the graph leaves open have the configured one."""
    for value in model.graph.inputs:
        shape = value.shape
        is_open = shape is not None and len(shape) == 4 and isinstance(shape[1], int) and not isinstance(shape[3], int)
        if head_size is not None and is_open and PAST_PATTERN.fullmatch(value.name or ""):
            assert shape is not None
            value.shape = ir.Shape([*list(shape)[:3], head_size])


def _check_ports(model: ir.Model, reader: Reader, where: str) -> _Ports:
    inputs = {value.name or "": value for value in model.graph.inputs}
    outputs = {value.name or "" for value in model.graph.outputs}
    if TOKEN_INPUT not in inputs:
        reader.add(f"it has no input {TOKEN_INPUT}", where, EXPORT_AGAIN)
    if LOGITS_OUTPUT not in outputs:
        reader.add(f"it has no output {LOGITS_OUTPUT}", where, EXPORT_AGAIN)
    states: tuple[State, ...] = ()
    with contextlib.suppress(StateError):
        states = states_of(ports_of_graph(model.graph), outputs)
    canonical = Report()
    _check_canonical(inputs, outputs, canonical, where)
    if states:  # and only inputs of known meaning: it runs as it is at least
        return _Ports(states, tuple(canonical.findings))
    reader.findings += canonical.findings
    return _Ports()


def _check_canonical(inputs: dict[str, ir.Value], outputs: set[str], report: Report, where: str) -> None:
    """What the passes and the kernels of the canonical form need of the graph's inputs and outputs."""
    past = {name: value for name, value in inputs.items() if PAST_PATTERN.fullmatch(name)}
    if not past:
        report.add("it has no past_key_values inputs, so it cannot continue a sequence", where, EXPORT_AGAIN)
    unknown = sorted(inputs.keys() - STEP_INPUTS - past.keys())
    if unknown:
        what = f"it has inputs that a text model does not have: {', '.join(unknown)}"
        report.add(what, where, "Export the text model alone, with `--task text-generation-with-past`")
    _check_caches(past, outputs, report, where)


def _check_caches(past: dict[str, ir.Value], outputs: set[str], report: Report, where: str) -> None:
    layers = sorted({int(name.split(".")[1]) for name in past})
    expected = {f"past_key_values.{layer}.{part}" for layer in layers for part in ("key", "value")}
    presents = {f"present.{layer}.{part}" for layer in layers for part in ("key", "value")}
    missing = sorted((expected - past.keys()) | (presents - outputs))
    if missing:
        report.add(f"the caches are incomplete: {', '.join(missing[:6])} missing", where, EXPORT_AGAIN)
    if layers != list(range(len(layers))):
        report.add(f"the cache layers are numbered {layers[0]} to {layers[-1]} with gaps", where, EXPORT_AGAIN)
    wrong = [name for name, value in sorted(past.items()) if not _is_cache(value)]
    if wrong:
        what = (
            f"{wrong[0]} ({len(wrong)} such) is not a floating-point [batch, heads, past, dim] with fixed heads and dim"
        )
        report.add(what, where, EXPORT_AGAIN)


def _is_cache(value: ir.Value) -> bool:
    shape = value.shape
    if shape is None or len(shape) != 4 or value.dtype not in CACHE_DTYPES:
        return False
    return all(isinstance(shape[axis], int) and 0 < int(str(shape[axis])) <= 1 << 16 for axis in (1, 3))
