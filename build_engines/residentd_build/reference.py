"""What an engine is compared with where the export as it is cannot be the measure.

An export in 16 bits rounds at every node, or needs kernels that the CPU lacks; one whose activations share a scale
gives other answers to a prompt than to its parts. Both get a copy of the graph, with the same weights, that computes in
float32 and with a scale for each token. Nothing else is changed, and the copy is compared with the export where the
runtime takes that.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from residentd.errors import AccuracyError, SourceError
from residentd.models.statistics import scale_of
from residentd_build.draft import draft_from_model
from residentd_build.engine_files import write_files
from residentd_build.passes import branches, rowwise, widen
from residentd_build.verify import Export, apart

if TYPE_CHECKING:
    from pathlib import Path

    import onnx_ir as ir

    from residentd_build.progress import StageProgress
    from residentd_build.source import Source
    from residentd_build.verify import Logits

DIRECTORY = "reference"  # in the stage, until the build is measured; never published
COMPARED_TOKENS = 24
SEED = 20261202
WIDENED_RELATIVE = 0.05
"""Of the largest logit, computed in float32 instead of 16 bits. Rounding in the tiny exports of the tests: 0.004; a
wrong weight changes the order."""
APART_RELATIVE = 2e-5
"""Of the largest logit, with a scale for each token instead of one for all: of a single token the two are the same
number, so that no code may turn. 340 roundings of 2^-24; seen: none at all, in 27 exports up to SmolLM2-135M. One
rounding of each weight there is 0.1, for every code that it turns turns others (2026-12, onnxruntime 1.32.0)."""


def prepare(source: Source, stage: Path, context: int, report: StageProgress) -> tuple[Source, str]:
    """`source` with its reference in the stage, and a line for the manifest; unchanged where it is its own reference.

    Raises SourceError, AccuracyError.
    """
    if not is_needed(source.model):
        return source, ""
    draft = draft_from_model(source.model.clone(), context=context, step_tokens=1)
    branches.run(draft)
    narrow = widen.narrow_weights(draft)
    widen.run(draft)
    rowwise.run(draft)
    widen.store(draft, narrow)
    directory = stage / DIRECTORY
    write_files(draft.model, directory, report)
    prepared = replace(source, reference=directory / "model.onnx")
    if narrow:
        return prepared, f"reference: the export with float32, {_compared_if_it_runs(source, prepared)}"
    return prepared, f"reference: the export with a scale for each token, {_compared_token_by_token(source, prepared)}"


def is_needed(model: ir.Model) -> bool:
    """Whether `model` cannot be its own reference."""
    return shares_scales(model) or bool(widen.narrow_types(model))


def shares_scales(model: ir.Model) -> bool:
    """Whether all tokens of a run share the scale of their activations."""
    return any(node.op_type == rowwise.OPERATOR for node in model.graph.all_nodes())


def prepare_as_exported(source: Source, engine: Path) -> tuple[Source, str]:
    """For compatibility mode: `source` with the `engine` itself as its reference if its scales were taken apart.

    The engine is then compared with the export here, and later only with itself alone. Raises SourceError,
    AccuracyError.
    """
    if not shares_scales(source.model):
        return source, ""
    prepared = replace(source, reference=engine)
    return prepared, f"reference: the engine, {_compared_token_by_token(source, prepared)}"


def _compared_if_it_runs(source: Source, prepared: Source) -> str:
    """How far the copy in float32 is from what it was made of, which the runtime may not take. Raises AccuracyError."""
    found = _read(Export(prepared.model_path), source.vocab)
    try:
        expected = _read(Export(source.model_path, source.model_states), source.vocab)
    except SourceError as error:
        return f"which the runtime cannot run as it is ({str(error).splitlines()[0][:160]})"
    except AccuracyError:
        return "which as it is gives NaN or infinity"
    return _distance(found, expected, WIDENED_RELATIVE, "it computes in float32")


def _compared_token_by_token(source: Source, prepared: Source) -> str:
    """How far one scale for each token is from one for all, where there is one token. Raises what either raises."""
    found = _read(Export(prepared.model_path), source.vocab)
    expected = _read(Export(source.model_path, source.model_states), source.vocab)
    return _distance(found, expected, APART_RELATIVE, "each token has its own scale, although there is one token")


def _read(export: Export, vocab: int) -> Logits:
    """Logits [tokens, vocab] after each of the same random tokens, one a run."""
    tokens = np.random.default_rng(SEED).integers(0, vocab, COMPARED_TOKENS).tolist()
    return np.stack([export.read([token])[-1] for token in tokens])


def _distance(found: Logits, expected: Logits, relative: float, when: str) -> str:
    bound = relative * scale_of(expected)
    worst = apart(found, expected)
    if not worst <= bound:
        raise AccuracyError(
            f"the export's logits change by {worst:.2g} when {when}; the bound is {bound:.2g}. Nothing was published: "
            "export the model as fp32"
        )
    return f"{worst:.2g} from the export as it is"
