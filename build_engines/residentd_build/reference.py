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

from residentd.errors import AccuracyError, ResidentError
from residentd_build.draft import draft_from_model
from residentd_build.engine_files import write_files
from residentd_build.passes import branches, rowwise, widen
from residentd_build.verify import Export

if TYPE_CHECKING:
    from pathlib import Path

    import onnx_ir as ir

    from residentd_build.progress import StageProgress
    from residentd_build.source import Source

DIRECTORY = "reference"  # in the stage, until the build is measured; never published
COMPARED_TOKENS = 24
SEED = 20261202
DIFFERENCE_RELATIVE = 0.05
"""Of the largest logit. 16-bit rounding in the tiny exports of the tests: 0.004; a wrong weight changes the order."""


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
    write_files(draft, directory, report)
    prepared = replace(source, reference=directory / "model.onnx")
    kind = "float32" if narrow else "a scale for each token"
    return prepared, f"reference: the export with {kind}, {_compared(source, prepared)}"


def is_needed(model: ir.Model) -> bool:
    """Whether `model` cannot be its own reference."""
    return shares_scales(model) or bool(widen.narrow_types(model))


def shares_scales(model: ir.Model) -> bool:
    """Whether all tokens of a run share the scale of their activations."""
    return any(node.op_type == rowwise.OPERATOR for node in model.graph.all_nodes())


def prepare_as_exported(source: Source, engine: Path) -> tuple[Source, str]:
    """For compatibility mode: `source` with the `engine` itself as its reference if its scales were taken apart.

    The engine is then compared with the export here, and later only with itself alone. Raises AccuracyError.
    """
    if not shares_scales(source.model):
        return source, ""
    prepared = replace(source, reference=engine)
    return prepared, f"reference: the engine, {_compared(source, prepared)}"


def _compared(source: Source, prepared: Source) -> str:
    """How far the two are apart, token by token. Raises AccuracyError past the bound."""
    tokens = np.random.default_rng(SEED).integers(0, source.vocab, COMPARED_TOKENS).tolist()
    copy = Export(prepared.model_path)
    try:
        original = Export(source.model_path, source.model_states)
        pairs = [(original.read([token])[-1], copy.read([token])[-1]) for token in tokens]
    except ResidentError as error:
        return f"which the runtime cannot run as it is ({str(error).splitlines()[0][:160]})"
    scale = max(float(np.abs(found).max()) for _, found in pairs)
    worst = max(float(np.abs(left - right).max()) for left, right in pairs)
    if not worst <= DIFFERENCE_RELATIVE * scale:
        raise AccuracyError(
            f"the export's logits change by {worst:.2g} when it computes in float32, the bound is "
            f"{DIFFERENCE_RELATIVE * scale:.2g}. Nothing was published: export the model as fp32"
        )
    return f"{worst:.2g} from the export as it is"
