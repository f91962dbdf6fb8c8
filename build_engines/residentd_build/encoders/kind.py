"""What kind of model a directory holds: from the graph's inputs and outputs, config.json and modules.json. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, get_args

from residentd.errors import Finding
from residentd.models.encoder import Kind
from residentd_build.foreign import cut

if TYPE_CHECKING:
    from collections.abc import Mapping

    from residentd_build.encoders.interface import Interface, Port

MODEL_KINDS: tuple[Kind, ...] = get_args(Kind)
CACHE = re.compile(r"past_key|past\.|present[._]|past_\d|cache_params|past_key_values")
TOKENS = "input_ids"
TOKEN_VECTORS = ("last_hidden_state", "token_embeddings")
SENTENCE_VECTOR = "sentence_embedding"
LOGITS = "logits"
CLASSIFIER = "ForSequenceClassification"
GENERATORS = ("ForCausalLM", "LMHeadModel")  # how the names of transformers' classes end
ENCODERS = ("Model", "ForMaskedLM", CLASSIFIER)
NAMED_MAX = 8
FEATURES_AGAIN = "Export it with `optimum-cli export onnx --task feature-extraction`"
CLASSES_AGAIN = "Export it with `optimum-cli export onnx --task text-classification`"


@dataclass(frozen=True, slots=True)
class Evidence:
    """What a directory shows. `modules`: names of modules.json's modules; None without the file."""

    interface: Interface
    config: Mapping[str, Any]
    modules: tuple[str, ...] | None


@dataclass(frozen=True, slots=True)
class Guess:
    kind: Kind
    why: str


def recognise(evidence: Evidence) -> Guess | Finding:
    """The kind, or why there is none. What has a cache generates, what takes no token ids is a tensor model."""
    interface, architecture = evidence.interface, architecture_of(evidence.config)
    names = interface.input_names
    if any(CACHE.match(name) for name in names):
        return Guess("generate", "it has past_key_values inputs")
    if TOKENS not in names:
        return Guess("tensor", f"its inputs are {named(interface.inputs)}")
    if interface.output(SENTENCE_VECTOR) is not None:
        return Guess("embed", f"it has an output {SENTENCE_VECTOR}")
    if evidence.modules is not None and "Pooling" in evidence.modules:
        return Guess("embed", "modules.json has a Pooling module")
    logits = interface.output(LOGITS)
    if logits is not None and (architecture.endswith(CLASSIFIER) or _rank(logits) == 2):
        return _classifier(evidence, logits)
    if any(interface.output(name) is not None for name in TOKEN_VECTORS):
        return Guess("embed", f"its outputs are {named(interface.outputs)}")
    if logits is not None and (not architecture or architecture.endswith(GENERATORS)):
        return Guess("generate", f"config.json says {architecture or 'nothing'} and it gives logits")
    if logits is not None:
        what = f"config.json says {cut(architecture)}, which nothing here serves as such"
        remedy = f"{FEATURES_AGAIN} to embed with it, or install it with --kind tensor to be called with its tensors"
        return Finding(what, "config.json", remedy)
    return Guess("tensor", f"it takes {named(interface.inputs)} and gives {named(interface.outputs)}")


def may_generate(config: Mapping[str, Any], modules: tuple[str, ...] | None) -> bool:
    """Whether config.json and modules.json alone leave it possible."""
    architecture = architecture_of(config)
    return modules is None and (architecture.endswith(GENERATORS) or not architecture.endswith(ENCODERS))


def misfit(kind: Kind, evidence: Evidence) -> Finding | None:
    """Why the directory cannot be installed as `kind`, whoever said so; None if it may be."""
    interface = evidence.interface
    if kind in {"generate", "tensor"}:
        return None  # the one has its own findings, the other takes any graph
    if TOKENS not in interface.input_names:
        what = f"it takes {named(interface.inputs)} and no {TOKENS}, so it is no model of kind {kind}"
        return Finding(what, "model.onnx", "Install it with --kind tensor, or export the text model")
    if any(CACHE.match(name) for name in interface.input_names):
        what = f"it has past_key_values inputs, so it continues sequences and is no model of kind {kind}"
        return Finding(what, "model.onnx", FEATURES_AGAIN if kind == "embed" else CLASSES_AGAIN)
    wanted = (SENTENCE_VECTOR, *TOKEN_VECTORS) if kind == "embed" else (LOGITS,)
    if not any(interface.output(name) is not None for name in wanted):
        what = f"kind {kind} needs an output {' or '.join(wanted)}, and it has {named(interface.outputs)}"
        return Finding(what, "model.onnx", FEATURES_AGAIN if kind == "embed" else CLASSES_AGAIN)
    return None


def architecture_of(config: Mapping[str, Any]) -> str:
    """The first of config.json's architectures; empty where it names none."""
    names = config.get("architectures")
    first = names[0] if isinstance(names, list) and names else ""
    return first if isinstance(first, str) else ""


def named(ports: tuple[Port, ...]) -> str:
    """Names for a message; of hostile lengths and numbers, a part."""
    shown = ", ".join(cut(port.name, 40) for port in ports[:NAMED_MAX])
    return f"{shown} and {len(ports) - NAMED_MAX} more" if len(ports) > NAMED_MAX else shown or "nothing"


def _classifier(evidence: Evidence, logits: Port) -> Guess:
    """One score is a rank; several are classes."""
    width = logits.shape[-1] if logits.shape else None
    labels = evidence.config.get("id2label")
    count = width if isinstance(width, int) else len(labels) if isinstance(labels, dict) else None
    if count == 1:
        return Guess("rerank", "it gives one logit a text")
    return Guess("classify", f"it gives {count or 'some'} logits a text")


def _rank(port: Port) -> int | None:
    return None if port.shape is None else len(port.shape)
