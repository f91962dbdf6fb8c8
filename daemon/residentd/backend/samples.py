"""How far outputs are from those that were recorded, and what of a large output is recorded."""

from __future__ import annotations

from typing import Final

import numpy as np

from residentd.backend.graph import Array
from residentd.models.encoder import TensorSample

SAMPLES_MAX: Final = 1024
"""Elements of one output that a golden keeps."""


def sample_of(array: Array) -> TensorSample:
    """At most SAMPLES_MAX elements of `array`, evenly spread from the first."""
    flat = np.ascontiguousarray(array).reshape(-1)
    step = max(1, -(-flat.size // SAMPLES_MAX))
    return TensorSample(shape=tuple(array.shape), values=flat[::step].astype("<f8").tobytes())


def sample_distance(found: TensorSample, expected: TensorSample) -> float:
    """`distance` of two samples; infinite for another shape."""
    if found.shape != expected.shape:
        return float("inf")
    return distance(np.frombuffer(found.values, "<f8"), np.frombuffer(expected.values, "<f8"))


def scale_of(array: Array) -> float:
    """The largest finite number of it, signs apart."""
    wide = np.abs(array.astype(np.float64))
    return float(wide[np.isfinite(wide)].max(initial=0.0))


def distance(found: Array, expected: Array) -> float:
    """The largest difference; infinite for another shape, or where only one of them is a number."""
    if found.shape != expected.shape:
        return float("inf")
    one, other = found.astype(np.float64), expected.astype(np.float64)
    same = (one == other) | (np.isnan(one) & np.isnan(other))
    with np.errstate(invalid="ignore"):
        gaps = np.where(same, 0.0, np.abs(one - other))
    return float("inf") if np.isnan(gaps).any() else float(gaps.max(initial=0.0))
