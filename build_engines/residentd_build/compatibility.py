"""Compatibility mode: the export as it is, for what the passes cannot bring into the canonical form."""

from __future__ import annotations

from typing import TYPE_CHECKING

from residentd.errors import Finding, OperatorError, SourceError
from residentd_build.arrived import arrived
from residentd_build.draft import Draft
from residentd_build.foreign import cut
from residentd_build.options import AUTO, CANONICAL, COMPATIBILITY
from residentd_build.passes import branches, rowwise, widen

if TYPE_CHECKING:
    from collections.abc import Sequence

    import onnx_ir as ir

    from residentd.models.manifest import Engine
    from residentd_build.options import Options
    from residentd_build.precision import Precision
    from residentd_build.source import Source

REASON_CHARS_MAX = 300
SHARING = frozenset({rowwise.OPERATOR, *rowwise.FUSED})
ASKED_FOR = Finding("it was asked for with --mode compatibility", "options", "Leave --mode out")


def reasons_before(source: Source, options: Options) -> tuple[Finding, ...]:
    """What rules the canonical form out before any pass has looked at the graph."""
    if options.mode == COMPATIBILITY:
        return (ASKED_FOR, *source.uncanonical)
    return source.uncanonical


def check_possible(source: Source, reasons: Sequence[Finding], options: Options) -> None:
    """Raise SourceError if the export cannot, or shall not, run as it is; OperatorError if that is not what was asked.

    The findings are the reasons: they are what keeps the operator from having it any other way.
    """
    if options.mode == CANONICAL or not source.states:
        raise SourceError(reasons)
    precision = options.weights.precision
    kept = precision_of(source.model)
    if options.weights.details or precision not in {None, AUTO, kept}:
        wanted = f"--precision {precision}" if precision else options.weights.details[0]
        raise OperatorError(
            f"{wanted} needs the canonical form, and this export runs as it is, {kept}: {reason_of(reasons)}. Leave "
            "the option out, or export the model in a form that is recognised"
        )


def reason_of(findings: Sequence[Finding]) -> str:
    """One line for `residentctl list`: the first finding, and how many more there are."""
    first = cut(findings[0].what, REASON_CHARS_MAX)
    more = len(findings) - 1
    return f"{first}; {more:,} more finding{'s' * (more > 1)}" if more else first


def draft_as_it_is(source: Source, model: ir.Model, options: Options) -> Draft:
    return Draft(model, (), options.context_for(source.context_max), options.step_tokens)


def precision_of(model: ir.Model) -> Precision:
    """What the exporter made of the weights."""
    quantised = arrived(model)
    if quantised is not None:
        return quantised.precision
    return widen.stored_precision(model) or "fp32"


def separate(draft: Draft, reasons: Sequence[Finding]) -> tuple[str, ...]:
    """Give each token its own scale where a run's tokens share one, so that no answer depends on how a prompt is cut.

    The manifest's lines, if there was anything to do. Raises SourceError, with `reasons`, where it cannot.
    """
    if not any(node.op_type in SHARING for node in draft.graph.all_nodes()):
        return ()
    try:
        return (branches.run(draft), rowwise.run(draft))
    except SourceError as error:
        raise SourceError([*reasons, *error.findings]) from error


def describe(engine: Engine) -> str:
    """The line of the manifest's passes."""
    return f"compatibility: the graph as it was exported, with {len(engine.states)} states: {engine.mode_reason}"
