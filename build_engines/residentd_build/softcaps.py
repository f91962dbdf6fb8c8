"""Softcaps that config.json names and the exported graph has not.

A softcap bends scores or logits, cap · tanh(x / cap). transformers' "sdpa" attention has none, so an export of Gemma 2
that was traced with it lacks the cap of the scores that the model was trained with. The graph is what is built and what
the build is compared with, so nothing is refused; the operator is told.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from residentd_build.draft import LOGITS_OUTPUT
from residentd_build.files import RefusedError, SourceDirectory
from residentd_build.rules import attribute
from residentd_build.source import CONFIG_FILE

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import onnx_ir as ir

    from residentd_build.source import Source

SCORES_KEY, LOGITS_KEY = "attn_logit_softcapping", "final_logit_softcapping"
CONFIG_BYTES_MAX = 1 << 20  # some thousand are usual
CAP_MAX = 1e6  # a larger one bends nothing that a model computes
PRODUCTS = ("MatMul", "Gemm", "Einsum")  # parts of the operators' names: MatMulNBits, FusedMatMul, QGemm


def note(source: Source) -> str:
    """What `left_out` says of the source's config.json; empty without one."""
    try:
        with SourceDirectory(source.directory) as directory:
            config = json.loads(directory.read(CONFIG_FILE, bytes_max=CONFIG_BYTES_MAX))
    except (RefusedError, ValueError, RecursionError):
        return ""  # validate has judged it
    return left_out(config, source.model) if isinstance(config, dict) else ""


def left_out(config: Mapping[str, Any], model: ir.Model) -> str:
    """A line that names the softcaps of `config` that `model` does not apply, and what to do; empty: none."""
    nested = config.get("text_config")
    config = {**config, **nested} if isinstance(nested, dict) else config
    missing = [
        f"{key} {config[key]:g} and {what}"
        for key, what, applies in (
            (SCORES_KEY, "no attention of the graph caps its scores", _caps_scores),
            (LOGITS_KEY, "the graph does not cap its logits", _caps_logits),
        )
        if _is_cap(config.get(key)) and not applies(model)
    ]
    if not missing:
        return ""
    return (
        f"softcaps: {CONFIG_FILE} says {', '.join(missing)}: this version answers as the export does, which may not be "
        'as the model was trained. Export it again with attn_implementation="eager"'
    )


def _is_cap(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value <= CAP_MAX


def _caps_scores(model: ir.Model) -> bool:
    """Whether a node of attention has a cap of its own, or a Tanh stands between a product and its Softmax."""
    for node in _nodes(model):
        if attribute(node, "softcap", 0.0):
            return True
        if node.op_type == "Softmax" and _follows_tanh(node.inputs[0]):
            return True
    return False


def _caps_logits(model: ir.Model) -> bool:
    return any(_follows_tanh(value) for value in model.graph.outputs if value.name == LOGITS_OUTPUT)


def _nodes(model: ir.Model) -> Iterator[ir.Node]:
    yield from model.graph.all_nodes()
    for function in model.functions.values():
        yield from function.all_nodes()


def _follows_tanh(value: ir.Value | None) -> bool:
    """Whether a Tanh is among what `value` is computed from, looking back as far as the products before it."""
    seen: set[ir.Value] = set()
    waiting = [value]
    while waiting:
        found = waiting.pop()
        node = None if found is None or found in seen else found.producer()
        if found is None or node is None:
            continue
        seen.add(found)
        if node.op_type == "Tanh":
            return True
        if not any(name in node.op_type for name in PRODUCTS):
            waiting += node.inputs
    return False
