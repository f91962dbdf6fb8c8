"""Statistics of one row of logits, and how far two of them are apart.

Every one of them (the logit of a token, the largest logit, logsumexp, mean, standard deviation) moves by no more than
the largest |Δlogit| when logits move: one bound in logits judges them all. Logits are compared as `comparable` has
them, or else an export that rules out tokens by -1e9 would have differences of thousands drown in the scale of that.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from residentd.models.manifest import LogitStatistics

TOP_COUNT: Final = 4
SAMPLED_COUNT: Final = 4
"""Other tokens of a position: what nobody is likely to choose is compared as well, others at every position."""
_STRIDE: Final = 2_654_435_761  # Knuth: 2^32 divided by the golden ratio, a prime
DIGITS: Final = 7  # a float32 has no more
LIKELY_RANGE: Final = 100.0
"""Below the largest logit. What is less likely than e^-100 is never drawn, and how much less does not matter."""

Row = npt.NDArray[Any]
"""Logits [vocab] of one position, of any floating type."""


@dataclass(frozen=True, slots=True)
class Difference:
    """The statistic that differs most, and by how much; infinity for NaN."""

    name: str
    value: float


def comparable(logits: Row) -> Row:
    """Logits [..., vocab] with those at least LIKELY_RANGE below their row's largest brought up to that."""
    clipped: Row = np.maximum(logits, logits.max(axis=-1, keepdims=True) - logits.dtype.type(LIKELY_RANGE))
    return clipped


def scale_of(logits: Row) -> float:
    """The largest |logit| [..., vocab] of those that `comparable` leaves as they are: what rounding is a share of."""
    likely = logits > logits.max(axis=-1, keepdims=True) - LIKELY_RANGE
    return float(np.abs(logits[likely]).max())


def statistics_of(row: Row, place: int) -> LogitStatistics:
    """The statistics to record of `row`, which must be finite; `place` counts the positions that are recorded."""
    row = comparable(row)
    count = min(TOP_COUNT, row.size)
    best = np.argpartition(row, -count)[-count:]
    best = best[np.lexsort((best, -row[best]))]
    sampled = [(place * SAMPLED_COUNT + index) * _STRIDE % row.size for index in range(SAMPLED_COUNT)]
    ids = list(dict.fromkeys([*best.tolist(), *sampled]))
    logsumexp, mean, deviation = _moments(row)
    return LogitStatistics(
        ids=tuple(ids),
        logits=tuple(rounded(float(value)) for value in row[ids]),
        logsumexp=rounded(logsumexp),
        mean=rounded(mean),
        deviation=rounded(deviation),
    )


def worst_difference(row: Row, recorded: LogitStatistics) -> Difference:
    """The largest difference between `row` and what was recorded of it."""
    if not np.isfinite(row).all():
        return Difference("NaN or infinity", math.inf)
    row = comparable(row)
    logsumexp, mean, deviation = _moments(row)
    found = {
        "logsumexp": abs(logsumexp - recorded.logsumexp),
        "mean": abs(mean - recorded.mean),
        "standard deviation": abs(deviation - recorded.deviation),
        "largest logit": abs(float(row.max()) - recorded.logits[0]),
    }
    for token, logit in zip(recorded.ids, recorded.logits, strict=True):
        found[f"logit of token {token}"] = abs(float(row[token]) - logit)
    name = max(found, key=found.__getitem__)
    return Difference(name, found[name])


def is_clear(recorded: LogitStatistics, bound: float) -> bool:
    """Whether the best token wins by more than any two logits within `bound` can move."""
    return len(recorded.logits) < 2 or recorded.logits[0] - recorded.logits[1] > 2 * bound


def rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")


def _moments(row: Row) -> tuple[float, float, float]:
    """Log of the sum of exponentials, mean and standard deviation, in float64."""
    wide = row.astype(np.float64)
    largest = wide.max()
    return float(largest + np.log(np.exp(wide - largest).sum())), float(wide.mean()), float(wide.std())
