"""Goldens of a model that answers in one run, replayed through the backend that will serve it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from residentd.backend.encoder import EncoderModel
from residentd.backend.samples import distance, sample_distance, sample_of
from residentd.backend.tensor_model import TensorModel, golden_feeds
from residentd.calls import TextRow
from residentd.models.checks import OUTPUTS, Part
from residentd.models.statistics import comparable


def probe_rows(model: EncoderModel, rows_max: int) -> tuple[Part, ...]:
    """Every golden text, alone and in company, against what the export itself gave for it alone."""
    encoder = model.encoder
    rows = [TextRow(golden.ids, golden.types) for golden in encoder.goldens]
    expected = [np.frombuffer(golden.output, "<f4") for golden in encoder.goldens]
    compared = comparable if encoder.labels else np.asarray  # logits, as the build compared them
    worst, detail = 0.0, ""
    for name, batch in _ways(range(len(rows)), rows_max):
        found = model.vectors([rows[index] for index in batch])
        for index, vector in zip(batch, found, strict=True):
            difference = distance(compared(vector), compared(expected[index]))
            if difference > worst or not detail:
                worst, detail = difference, f"golden {index + 1}, {name}"
    return (_part(len(rows), worst, encoder.tolerance, detail),)


def probe_tensors(model: TensorModel) -> tuple[Part, ...]:
    """Every golden call against what the export itself gave, in units of each output's tolerance."""
    tensors = model.tensors
    names = [spec.name for spec in tensors.outputs]
    worst, detail = 0.0, ""
    for number, golden in enumerate(tensors.goldens, start=1):
        feeds = golden_feeds(tensors.inputs, golden.shapes, golden.seed, golden.whole_max)
        for name, array in zip(names, model.outputs(feeds, names), strict=True):
            difference = sample_distance(sample_of(array), golden.outputs[name]) / tensors.tolerances[name]
            if difference > worst or not detail:
                worst, detail = difference, f"in tolerances: golden {number}, output {name}"
    return (_part(len(tensors.goldens), worst, 1.0, detail),)


def _ways(indexes: range, rows_max: int) -> Iterator[tuple[str, Sequence[int]]]:
    for index in indexes:
        yield "alone", [index]
    if rows_max > 1:
        for first in range(0, len(indexes), rows_max):
            yield "in company", indexes[first : first + rows_max]


def _part(checked: int, worst: float, bound: float, detail: str) -> Part:
    return Part(name=OUTPUTS, checked=checked, missed=int(worst > bound), worst=worst, bound=bound, detail=detail)
