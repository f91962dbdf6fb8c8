"""How far outputs are from those that were recorded, and what of a large output is recorded."""

from __future__ import annotations

from typing import Final

import numpy as np

from residentd.backend.graph import Array
from residentd.models.encoder import TensorSample

SAMPLES_MAX: Final = 1024
"""Elements of one output that a golden keeps."""
ORDINARY_MAX: Final = 1e4
"""What masks write in place of a number begins here: -10000, -65504, -1e9, the lowest float32.

Such numbers are compared by their own size and leave the scale of the others alone: with one label of -1e9, a bound of
2e-5 of the largest would allow every other logit to be off by 20,000.
"""


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
    """The largest number of it, signs apart, below ORDINARY_MAX; that, where only larger ones are not 0."""
    wide = np.abs(array.astype(np.float64).reshape(-1))
    ordinary = float(wide[wide < ORDINARY_MAX].max(initial=0.0))
    return ordinary or min(ORDINARY_MAX, float(wide[np.isfinite(wide)].max(initial=0.0)))


def gaps_of(found: Array, expected: Array) -> Array:
    """How far each number is from the one expected of it, in float64; infinite where only one of them is a number."""
    one, other = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    same = (one == other) | (np.isnan(one) & np.isnan(other))
    with np.errstate(invalid="ignore", over="ignore"):
        gaps: Array = np.where(same, 0.0, np.abs(one - other))
    return np.where(np.isnan(gaps), np.inf, gaps)


def distance(found: Array, expected: Array) -> float:
    """The largest difference; infinite for another shape, or where only one of them is a number.

    A difference from a number of ORDINARY_MAX or more counts as the same share of the others' scale.
    """
    if found.shape != expected.shape:
        return float("inf")
    gaps, sizes = gaps_of(found, expected).reshape(-1), np.abs(expected.astype(np.float64).reshape(-1))
    large = (sizes >= ORDINARY_MAX) & np.isfinite(sizes)
    gaps[large] *= scale_of(expected) / sizes[large]
    return float(gaps.max(initial=0.0))
