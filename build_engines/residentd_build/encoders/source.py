"""A text encoder's directory, once it has been read and found right."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, get_args

import onnx_ir as ir

from residentd.errors import Finding
from residentd.models.encoder import Activation, Encoder, Kind, TextInput
from residentd.text.limits import TOKENIZER_BYTES_MAX
from residentd_build.encoders.interface import port_of
from residentd_build.encoders.kind import CLASSES_AGAIN, FEATURES_AGAIN, LOGITS, SENTENCE_VECTOR, TOKEN_VECTORS, named
from residentd_build.encoders.sentence import MODULES_FILE, Sentence, read_sentence, refuse_modules
from residentd_build.foreign import cut, token_id_of
from residentd_build.options import CONTEXT_MAX
from residentd_build.source import CONFIG_FILE, TOKENIZER_CONFIG_FILE, TOKENIZER_FILE
from residentd_build.text_source import read_tokenizer

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from residentd.text.tokenizer import Tokenizer
    from residentd_build.encoders.interface import Interface
    from residentd_build.encoders.sentence import Module
    from residentd_build.model_file import ModelFile
    from residentd_build.reading import Reader

TEXT_INPUTS: tuple[TextInput, ...] = get_args(TextInput)
TOKENS_DEFAULT = 512  # where nothing says how long a text may be
MODEL_LENGTH_MAX = 1 << 20  # transformers writes 1e30 where it knows no limit
LABELS_MAX = 65_536
LABEL_CHARS_MAX = 256
POSITION_OFFSET_TYPES = frozenset({"roberta", "xlm-roberta", "xlm-roberta-xl", "camembert", "mpnet", "xmod"})
"""Model types whose first position is pad_token_id + 1, so that many rows of the position table are never used."""
SIGMOID_BY_NAME = {"Sigmoid": "sigmoid", "Identity": "identity"}
RESTORE = "Restore the file from the model's own repository"


@dataclass(frozen=True, slots=True)
class EncoderSource:
    """`encoder` has no goldens and no width yet: what the export gives decides them."""

    directory: Path
    file: ModelFile
    kind: Kind
    architecture: str
    encoder: Encoder
    tokens_max: int
    vocab: int
    tokenizer_json: bytes
    model: ir.Model
    sha256: str

    @property
    def model_path(self) -> Path:
        """The export as it is, for the runtime that is the reference."""
        return self.directory / self.file.path


def read_encoder(
    reader: Reader,
    kind: Kind,
    interface: Interface,
    config: Mapping[str, Any],
    *,
    modules: Sequence[Module] | None,
    context: int | None,
) -> tuple[Encoder, int, Tokenizer | None, bytes]:
    """What the files beside the graph say. Everything that is wrong becomes a finding of `reader`."""
    tokenizer_config: dict[str, Any] = reader.json(TOKENIZER_CONFIG_FILE)
    again = FEATURES_AGAIN if kind == "embed" else CLASSES_AGAIN
    data = reader.bytes(TOKENIZER_FILE, TOKENIZER_BYTES_MAX, needed=f"{again}, which writes it") or b""
    tokenizer, wrong = read_tokenizer(data) if data else (None, [])
    reader.findings += wrong
    output = _output(kind, interface)
    sentence = read_sentence(reader, modules, whole_graph=output == SENTENCE_VECTOR) if kind == "embed" else Sentence()
    if kind == "embed" and output != SENTENCE_VECTOR and modules is None:
        what = "nothing says how the vectors of a text's tokens become one: there is no modules.json"
        remedy = "Copy modules.json, 1_Pooling and sentence_bert_config.json from the model's repository beside it"
        reader.add(what, MODULES_FILE, remedy)
    if kind != "embed":
        refuse_modules(reader, modules)
    labels = () if kind == "embed" else _labels(config, interface, reader)
    encoder = Encoder(
        inputs=_inputs(interface, reader),
        output=output,
        width=max(len(labels), 1),
        pad_id=_pad_id(config, tokenizer, data),
        pooling=sentence.pooling,
        normalise=sentence.normalise,
        activation="identity" if kind == "embed" else _activation(config, len(labels), reader),
        labels=labels,
        prompts=dict(sentence.prompts or {}),
        prompt_default=sentence.prompt_default,
        lowercase=sentence.lowercase,
        similarity=sentence.similarity,
        tolerance=0.0,
        goldens=(),
        texts=(),
    )
    longest = _tokens_max(config, tokenizer_config, sentence, reader, pad_id=encoder.pad_id, context=context)
    return encoder, longest, tokenizer, data


def check_graph(model: ir.Model, kind: Kind, where: str) -> list[Finding]:
    """What the text side needs of the parsed graph: free axes for texts and tokens, whole numbers in."""
    findings = []
    for value in model.graph.inputs:
        if value.name not in TEXT_INPUTS:
            continue  # read_encoder has said so
        port = port_of(ir.to_proto(value))
        if value.dtype is None or value.dtype.name != "INT64":
            what = f"input {value.name} is {value.dtype.name if value.dtype else 'of no type'}; INT64 is needed"
            findings.append(Finding(what, where, FEATURES_AGAIN if kind == "embed" else CLASSES_AGAIN))
        if port.shape is not None and (len(port.shape) != 2 or isinstance(port.shape[1], int)):
            what = f"input {value.name} has shape {list(port.shape)}; two axes, the second free, are needed"
            findings.append(Finding(what, where, "Export it with dynamic axes for batch and sequence"))
    return findings


def _output(kind: Kind, interface: Interface) -> str:
    if kind != "embed":
        return LOGITS
    return next(name for name in (SENTENCE_VECTOR, *TOKEN_VECTORS) if interface.output(name) is not None)


def _inputs(interface: Interface, reader: Reader) -> tuple[TextInput, ...]:
    unknown = [port for port in interface.inputs if port.name not in TEXT_INPUTS]
    if unknown:
        what = f"it has inputs that an encoder of text does not have: {named(tuple(unknown))}"
        reader.add(what, "model.onnx", "Export the text model alone, or install it with --kind tensor")
    return tuple(name for name in TEXT_INPUTS if name in interface.input_names)


def _pad_id(config: Mapping[str, Any], tokenizer: Tokenizer | None, data: bytes) -> int:
    """config.json's, else the tokenizer's own padding, else the token called [PAD] or <pad>, else 0."""
    configured = token_id_of(config.get("pad_token_id"))
    if configured is not None or tokenizer is None:
        return configured or 0
    padding = json.loads(data).get("padding")
    own = token_id_of(padding.get("pad_id")) if isinstance(padding, dict) else None
    named_ids = (tokenizer.inner.token_to_id(name) for name in ("[PAD]", "<pad>"))
    return next((found for found in (own, *named_ids) if found is not None), 0)


def _tokens_max(
    config: Mapping[str, Any],
    tokenizer_config: Mapping[str, Any],
    sentence: Sentence,
    reader: Reader,
    *,
    pad_id: int,
    context: int | None,
) -> int:
    """The longest text in tokens: sentence-transformers' word, else the tokenizer's; never past the position table."""
    positions = config.get("max_position_embeddings")
    ceiling = positions if isinstance(positions, int) and not isinstance(positions, bool) else CONTEXT_MAX
    if config.get("model_type") in POSITION_OFFSET_TYPES:
        ceiling -= pad_id + 1
    length = tokenizer_config.get("model_max_length")
    own = int(length) if isinstance(length, int | float) and 1 <= length <= MODEL_LENGTH_MAX else None
    wanted = sentence.tokens_max or own or min(ceiling, TOKENS_DEFAULT)
    if ceiling < 2:
        reader.add(f"max_position_embeddings is {cut(repr(positions))}; tokens are needed", CONFIG_FILE, RESTORE)
        return TOKENS_DEFAULT
    if context is not None and context > ceiling:
        what = f"a context of {context:,} tokens was asked for and the model was made for {ceiling:,}"
        reader.add(what, CONFIG_FILE, f"Use --context {ceiling} or less")
    return context or min(wanted, ceiling)


def _labels(config: Mapping[str, Any], interface: Interface, reader: Reader) -> tuple[str, ...]:
    """id2label, as many as the graph gives logits; LABEL_n where config.json has none."""
    port = interface.output(LOGITS)
    width = port.shape[-1] if port is not None and port.shape else None
    named_labels = config.get("id2label")
    given = named_labels if isinstance(named_labels, dict) else {}
    count = width if isinstance(width, int) else len(given) or 1
    if count > LABELS_MAX:
        reader.add(f"it gives {count:,} logits; at most {LABELS_MAX:,} classes are served", "model.onnx", CLASSES_AGAIN)
        return ("LABEL_0",)
    if given and len(given) != count:
        what = f"id2label has {len(given):,} labels and the model gives {count:,} logits"
        reader.add(what, CONFIG_FILE, "Put the files of one model together")
    labels = [given.get(str(index), f"LABEL_{index}") for index in range(count)]
    if not all(isinstance(label, str) and len(label) <= LABEL_CHARS_MAX for label in labels):
        reader.add(f"id2label must be texts of at most {LABEL_CHARS_MAX} characters", CONFIG_FILE, RESTORE)
        return tuple(f"LABEL_{index}" for index in range(count))
    return tuple(labels)


def _activation(config: Mapping[str, Any], count: int, reader: Reader) -> Activation:
    """From logits to scores: a cross-encoder's own word, else problem_type, else as transformers' pipeline does."""
    own = config.get("sentence_transformers")
    name = own.get("activation_fn") if isinstance(own, dict) else None
    name = name or config.get("sbert_ce_default_activation_function")
    if isinstance(name, str):
        found = SIGMOID_BY_NAME.get(name.rpartition(".")[2])
        if found is None:
            what = f"its activation is {cut(name)}; {' and '.join(SIGMOID_BY_NAME)} are known"
            reader.add(what, CONFIG_FILE, "Set sentence_transformers.activation_fn to one of them")
        return "sigmoid" if found == "sigmoid" else "identity"
    problem = config.get("problem_type")
    by_problem: dict[Any, Activation] = {
        "regression": "identity",
        "multi_label_classification": "sigmoid",
        "single_label_classification": "softmax",
    }
    if problem is not None and (not isinstance(problem, str) or problem not in by_problem):
        reader.add(f"problem_type is {cut(json.dumps(problem))}, which is not known", CONFIG_FILE, RESTORE)
    if isinstance(problem, str) and problem in by_problem:
        return by_problem[problem]
    return "sigmoid" if count == 1 else "softmax"
