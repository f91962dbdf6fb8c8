"""Compare an encoder with the export it came from, and decide whether its texts may share a run.

The reference is the export on ONNX Runtime without any of its graph optimisations, one text at a time, unpadded; what
follows the graph (pooling, length 1) is computed here once more, by its definition over masks and in float64.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from residentd.backend.encoder import EncoderModel
from residentd.backend.graph import GraphError
from residentd.backend.onnxruntime_graph import OnnxRuntimeGraph
from residentd.backend.samples import distance, scale_of
from residentd.calls import TextRow
from residentd.errors import AccuracyError, Finding, MachineError, SourceError, StepRetryableError
from residentd.models import statistics
from residentd.models.encoder import RowGolden
from residentd.models.manifest import Agreement
from residentd_build import watchdog
from residentd_build.compatibility import precision_of
from residentd_build.encoders.export import ExportGraph
from residentd_build.encoders.margins import MARGINS
from residentd_build.encoders.rows import doubt_of
from residentd_build.tensors import weight_bytes_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from residentd.backend.graph import Array, Floats, Graph
    from residentd.models.encoder import Encoder
    from residentd.models.manifest import EngineLimits
    from residentd_build.encoders.margins import Margins
    from residentd_build.encoders.source import EncoderSource

    Progress = Callable[[float, str], None]

SEED = 20261201
RANDOM_LENGTHS = (2, 7, 8, 9, 16, 17, 31, 33, 64, 100, 128)
REPEATS = 4
COMPANY_ROWS = 16  # of a run of the export
GOLDENS = 6
NOISE_FACTOR = 16
"""The engine sums in another order than the export, as the export does when its texts are batched otherwise; both
differences have one cause, so one is the scale of the other."""
FIX_EXPORT = "Export the model again, and try it with onnxruntime itself"


@dataclass(frozen=True, slots=True)
class Verified:
    encoder: Encoder  # with width, goldens, tolerance, and whether its texts run alone
    agreement: Agreement
    lines: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Reference:
    """What the export gives for each text alone, float32 [rows, width], and how far its own batches are from that.

    scale: the largest number, without what masks write.
    """

    rows: tuple[TextRow, ...]
    outputs: Floats
    noise: float
    scale: float

    @property
    def share(self) -> float:
        """The noise as a share of the largest number."""
        return self.noise / self.scale if self.scale else 0.0


def sample_rows(encoded: Sequence[TextRow], source: EncoderSource) -> tuple[TextRow, ...]:
    """The texts' rows, random ids of many lengths, the longest row there may be, and the highest id."""
    rng = np.random.default_rng(SEED)
    specials = encoded[0].ids[0], encoded[0].ids[-1]
    lengths = [length for length in RANDOM_LENGTHS if length < source.tokens_max] + [source.tokens_max]
    random = [
        TextRow((specials[0], *map(int, rng.integers(0, source.vocab, length - 2)), specials[1])) for length in lengths
    ]
    return (*encoded, *random, TextRow((specials[0], source.vocab - 1, specials[1])))


def reference_of(
    source: EncoderSource, rows: tuple[TextRow, ...], limits: EngineLimits, progress: Progress
) -> Reference:
    """Raises SourceError when the export cannot be run as its files say."""
    graph = ExportGraph(source.model_path, source.file.path, weight_bytes_of(source.model))
    encoder = source.encoder
    outputs: list[Floats] = []
    for index, row in enumerate(rows):
        progress(index / len(rows), f"the export: text {index + 1} of {len(rows)}")
        outputs.append(_alone(graph, encoder, row, source))
    wide = np.stack(outputs)
    if not np.isfinite(wide).all():
        raise AccuracyError("the export itself gives NaN or infinity; nothing was published. Export it again as fp32")
    scale = statistics.scale_of(wide) if encoder.labels else scale_of(wide)
    parts = _companies(rows, COMPANY_ROWS, limits.step_tokens_max)
    noise = max((_batched(graph, encoder, rows, part, wide) for part in parts), default=0.0)
    graph.close()
    return Reference(rows, wide, noise, scale)


def verify(
    source: EncoderSource, engine: Path, reference: Reference, limits: EngineLimits, progress: Progress
) -> Verified:
    """Run the engine over the reference's rows, alone and in ragged runs. Raises AccuracyError past the bound."""
    margins = MARGINS[precision_of(source.model)]
    alone = _mixing_reason(source) or _alone_reason(reference, margins)
    bound = bound_of(reference, margins, alone=bool(alone))
    encoder = msgspec.structs.replace(source.encoder, width=reference.outputs.shape[1], tolerance=bound, alone=alone)
    with watchdog.loading(engine, source.file.path):
        graph = OnnxRuntimeGraph(engine, has_arena=True, remedy="Export the model again")
    model = EncoderModel(encoder, graph)
    try:
        singles = np.concatenate([_run(model, [row]) for row in reference.rows])
        worst = _check(singles, reference, range(len(reference.rows)), encoder, "alone")
        exact = True
        parts = [] if alone else list(_companies(reference.rows, limits.slots, limits.step_tokens_max))
        for number, part in enumerate(parts):
            progress(number / len(parts), f"runs of several texts: {len(part)} together")
            found = _run(model, [reference.rows[index] for index in part])
            worst = max(worst, _check(found, reference, part, encoder, f"in a run of {len(part)}"))
            exact = exact and bool((found == singles[list(part)]).all())
    finally:
        model.graph.close()
    tops = [
        int(found.argmax()) == int(wanted.argmax()) for found, wanted in zip(singles, reference.outputs, strict=True)
    ]
    counts = encoder.width > 1 and source.kind != "embed"
    agreement = Agreement(
        logit_diff_max=worst,
        logit_diff_bound=bound,
        greedy_equal=sum(tops) if counts else 0,
        greedy_total=len(tops) if counts else 0,
        positions=len(reference.rows),
    )
    goldens = tuple(
        RowGolden(ids=row.ids, types=row.types, output=output.astype("<f4").tobytes())
        for row, output in list(zip(reference.rows, reference.outputs, strict=True))[:GOLDENS]
    )
    return Verified(
        msgspec.structs.replace(encoder, goldens=goldens), agreement, (_line(reference, alone, exact=exact),)
    )


def bound_of(reference: Reference, margins: Margins, *, alone: bool) -> float:
    """How far the engine may be from the export, in units of the output."""
    share = margins.ceiling if alone else min(margins.ceiling, max(margins.floor, NOISE_FACTOR * reference.share))
    return share * reference.scale


def _mixing_reason(source: EncoderSource) -> str:
    """Where the graph is shown to let texts meet, numbers that do not say so only were not the right ones.

    Where nothing is shown either way (exporters number the texts of a batch to look up their masks), numbers decide.
    """
    axes = dict.fromkeys(map(str, source.encoder.inputs), ("texts", "tokens"))
    doubt = doubt_of(source.model, axes, [source.encoder.output])
    return doubt.why if doubt is not None and doubt.is_certain else ""


def _alone_reason(reference: Reference, margins: Margins) -> str:
    if reference.share <= margins.company:
        return ""
    return f"the export itself gives a text another answer in company, by {reference.share:.1%} of its largest number"


def _line(reference: Reference, alone: str, *, exact: bool) -> str:
    if alone:
        return f"runs: one text each: {alone}"
    equal = "to the bit" if exact else "within the bound"
    own = f"the export's own batches: {reference.share:.1e}"
    return f"runs: several texts together; each equals the text alone {equal} ({own})"


def _check(found: Floats, reference: Reference, part: Sequence[int], encoder: Encoder, where: str) -> float:
    worst, bound = 0.0, encoder.tolerance
    for vector, index in zip(found, part, strict=True):
        gap = _gap(vector, reference.outputs[index], encoder)
        worst = max(worst, gap)
        if not gap <= bound:
            raise AccuracyError(
                f"the engine's output differs from its export's by {gap:.2g}, the bound is {bound:.2g}: a text of "
                f"{len(reference.rows[index].ids)} tokens {where}. Nothing was published: report the model, its "
                "exporter and the exporter's version"
            )
    return worst


def _gap(found: Floats, wanted: Floats, encoder: Encoder) -> float:
    """How far apart they are; of logits, as far as it matters how unlikely a label is."""
    if encoder.labels and found.shape == wanted.shape:
        return distance(statistics.comparable(found), statistics.comparable(wanted))
    return distance(found, wanted)


def _run(model: EncoderModel, rows: Sequence[TextRow]) -> Floats:
    try:
        return model.vectors(rows)
    except StepRetryableError as error:
        raise _out_of_memory(error, rows) from error
    except GraphError as error:
        raise AccuracyError(f"the engine cannot run what its export ran: {error}. Nothing was published") from error


def _companies(rows: Sequence[TextRow], rows_max: int, tokens_max: int) -> Iterator[Sequence[int]]:
    """Ragged runs of all rows, mixed in several ways; by length, as the scheduler puts them; and one row many times.

    None takes more than the daemon's would: `rows_max` rows and, with its padding, `tokens_max` tokens.
    """
    rng = np.random.default_rng(SEED)
    lengths = [len(row.ids) for row in rows]
    by_length = sorted(range(len(rows)), key=lengths.__getitem__)
    for order in (rng.permutation(len(rows)).tolist(), rng.permutation(len(rows)).tolist(), by_length):
        yield from _runs(order, lengths, rows_max, tokens_max)
    middle = by_length[len(rows) // 2]
    yield from _runs([middle] * REPEATS, lengths, rows_max, tokens_max)


def _runs(order: Sequence[int], lengths: Sequence[int], rows_max: int, tokens_max: int) -> Iterator[Sequence[int]]:
    """`order` cut into runs of several rows; what has room for no other is no company."""
    part: list[int] = []
    for index in order:
        longest = max(lengths[place] for place in (*part, index))
        if part and (len(part) == rows_max or (len(part) + 1) * longest > tokens_max):
            if len(part) > 1:
                yield part
            part = []
        part.append(index)
    if len(part) > 1:
        yield part


def _alone(graph: Graph, encoder: Encoder, row: TextRow, source: EncoderSource) -> Floats:
    """One text through the export, without padding, and what follows by definition."""
    try:
        (output,) = graph.run(_feeds(encoder, [row]), [encoder.output])
    except StepRetryableError as error:
        raise _out_of_memory(error, [row]) from error
    except GraphError as error:
        raise _cannot_run(f"a text of {len(row.ids)} tokens: {error}", source) from error
    expected_axes = 3 if encoder.pooling else 2
    if output.ndim != expected_axes or output.shape[0] != 1:
        raise _cannot_run(f"output {encoder.output} of one text has shape {list(output.shape)}", source)
    vector: Floats = _defined(encoder, output, [row])[0]
    return vector


def _batched(graph: Graph, encoder: Encoder, rows: Sequence[TextRow], part: Sequence[int], alone: Floats) -> float:
    """How far the export's own answers are in company; infinite where it cannot run several texts."""
    together = [rows[index] for index in part]
    try:
        (output,) = graph.run(_feeds(encoder, together), [encoder.output])
        return _gap(_defined(encoder, output, together), alone[list(part)], encoder)
    except StepRetryableError as error:
        raise _out_of_memory(error, together) from error
    except (GraphError, ValueError):
        return math.inf


def _feeds(encoder: Encoder, rows: Sequence[TextRow]) -> dict[str, Array]:
    longest = max(len(row.ids) for row in rows)
    padded = [row.ids + (encoder.pad_id,) * (longest - len(row.ids)) for row in rows]
    types = [(row.types or (0,) * len(row.ids)) + (0,) * (longest - len(row.ids)) for row in rows]
    arrays = {
        "input_ids": np.array(padded, np.int64),
        "attention_mask": np.array([[1] * len(row.ids) + [0] * (longest - len(row.ids)) for row in rows], np.int64),
        "token_type_ids": np.array(types, np.int64),
        "position_ids": np.tile(np.arange(longest, dtype=np.int64), (len(rows), 1)),
    }
    return {name: arrays[name] for name in encoder.inputs}


def _defined(encoder: Encoder, output: Array, rows: Sequence[TextRow]) -> Floats:
    """Pooling and length 1 as sentence-transformers defines them, over masks, in float64."""
    vectors = output.astype(np.float64)
    if encoder.pooling:
        lengths = np.array([len(row.ids) for row in rows])
        mask = (np.arange(output.shape[1])[None] < lengths[:, None])[..., None]
        parts = [_pooled(mode, vectors, mask, lengths) for mode in encoder.pooling]
        vectors = np.concatenate(parts, axis=1)
    if encoder.normalise:
        vectors = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
    result: Floats = vectors.astype(np.float32)
    return result


def _pooled(mode: str, hidden: Array, mask: Array, lengths: Array) -> Array:
    """float64 [rows, tokens, hidden] and a mask of the tokens that count -> [rows, hidden]."""
    rows = np.arange(len(hidden))
    weights = mask * (np.arange(1, hidden.shape[1] + 1)[None, :, None] if mode == "weighted_mean" else 1.0)
    total: Array = np.where(mask, hidden * weights, 0).sum(axis=1)
    match mode:
        case "cls":
            first: Array = hidden[rows, 0]
            return first
        case "last":
            last: Array = hidden[rows, lengths - 1]
            return last
        case "max":
            highest: Array = np.where(mask, hidden, -np.inf).max(axis=1)
            return highest
        case "mean_sqrt_len":
            scaled: Array = total / np.sqrt(lengths)[:, None]
            return scaled
        case _:
            mean: Array = total / weights.sum(axis=1)
            return mean


def _out_of_memory(error: StepRetryableError, rows: Sequence[TextRow]) -> MachineError:
    longest = max(len(row.ids) for row in rows)
    return MachineError(
        f"verification needs runs of {len(rows)} texts of up to {longest:,} tokens, and one took more memory than this "
        f"machine has free: {error}. Free some, or use fewer --step-tokens or a shorter --context"
    )


def _cannot_run(what: str, source: EncoderSource) -> SourceError:
    return SourceError([Finding(f"the export cannot be run: {what}", source.file.path, FIX_EXPORT)])
