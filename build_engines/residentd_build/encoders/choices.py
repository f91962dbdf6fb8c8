"""Options that change nothing about a model of some kind: refused, so that nobody takes them for heeded."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

from residentd_build.options import AUTO, COMPATIBILITY, OptionsError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from residentd.models.encoder import Kind
    from residentd_build.options import Options, Weights

NAMES: Mapping[Kind, str] = MappingProxyType(
    {
        "generate": "a model that generates",
        "embed": "an embedding model",
        "classify": "a classifier",
        "rerank": "a reranker",
        "tensor": "a tensor model",
    }
)
AS_EXPORTED = "whose weights stay as they were exported: only models that generate are quantised here"
QUANTISED_ALREADY = "Leave it out, or install an export that is quantised already"


def refuse_unheeded(options: Options, kind: Kind) -> None:
    """Raise OptionsError for the first option that was given and has no effect on a model of `kind`."""
    for option, why, remedy in _unheeded(options, kind):
        raise OptionsError(f"{option} was given for {NAMES[kind]}, {why}. {remedy}")


def refuse_other_precision(options: Options, kind: Kind, kept: str) -> None:
    """Raise OptionsError where fp32 was asked for and the weights are, and stay, `kept`."""
    asked = options.weights.precision
    if asked not in {None, AUTO, kept}:
        raise OptionsError(
            f"--precision {asked} was given for {NAMES[kind]} whose export is {kept}, and its weights stay as they "
            f"were exported. Leave it out, or install an export in {asked}"
        )


def _unheeded(options: Options, kind: Kind) -> Iterator[tuple[str, str, str]]:
    """Each option as it was given, why it has no effect, and what to do."""
    if kind != "tensor" and options.shapes:
        why = "and only a tensor model's inputs have sizes to choose"
        yield f"--shape {options.shapes[0]}", why, "Leave it out, or add --kind tensor"
    if kind == "generate":
        return
    for option in _of_weights(options.weights):
        yield option, AS_EXPORTED, QUANTISED_ALREADY
    if options.weights.kl_max is not None:
        why = "which is held to a bound that its own export decides"
        yield f"--kl-max {options.weights.kl_max:g}", why, "Leave it out"
    if options.mode == COMPATIBILITY:
        yield f"--mode {options.mode}", "which runs as it was exported in any case", "Leave it out"
    if kind == "tensor" and options.context is not None:
        yield f"--context {options.context}", "which has no context", "Leave it out"


def _of_weights(weights: Weights) -> Iterator[str]:
    """Those given. fp32 and auto are no more than what is done anyway; --block and --asymmetric go with others only."""
    if weights.precision not in {None, AUTO, "fp32"}:
        yield f"--precision {weights.precision}"
    if weights.symmetric:
        yield "--symmetric"
    if weights.embedding is not None:
        yield f"--embedding {weights.embedding}"
    if weights.head is not None:
        yield f"--head {weights.head}"
