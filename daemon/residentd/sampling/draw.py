"""One token from one row: temperature, top-k, top-p, min-p, then inverse CDF. The package states the semantics.

Works on the likeliest tokens and takes more only while those cannot decide. How many were taken never shows in the
result: sums run from the likeliest on, so the sums of a shorter prefix are the first of a longer one's.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from residentd.sampling.row import Prefix, RowBuffer
from residentd.types import SamplingParams


class _Ranked:
    """A prefix, its weights exp((logit - peak) / temperature) in float64, likeliest first, and their running sums."""

    def __init__(self, prefix: Prefix, temperature: float) -> None:
        logits = prefix.negated.astype(np.float64)
        self.prefix = prefix
        self.weights: npt.NDArray[np.float64] = np.exp((logits[0] - logits) / temperature)
        self.sums: npt.NDArray[np.float64] = self.weights.cumsum()

    @property
    def mass(self) -> float:
        return float(self.sums[-1])

    def count_until(self, sum_wanted: float) -> int:
        """How many tokens it takes to gather `sum_wanted`: the one that crosses the line counts.

        One more than there are, if these do not hold that much.
        """
        return 1 + int(self.sums.searchsorted(sum_wanted, side="left"))

    def count_above(self, weight: float) -> int:
        return int(np.count_nonzero(self.weights >= weight))

    def pick(self, count: int, mass: float, uniform: float) -> int:
        """The id among the first `count` that `uniform` of `mass` falls on: the first whose sum exceeds it.

        So never one of weight 0. Rounding can put the target at the far end: then the last that has any weight.
        """
        sums = self.sums[:count]
        index = int(sums.searchsorted(uniform * mass, side="right"))
        if index == len(sums):
            index = int(sums.searchsorted(sums[-1], side="left"))
        return self.prefix.token_at(index)


def draw(row: RowBuffer, params: SamplingParams, uniform: float) -> int:
    """The id that `uniform` in (0, 1) picks. `row.peak` must be finite and `params.temperature` above 0."""
    if 0 < params.top_k < row.vocab:
        ranked, count = _keep_top_k(row, params)
    elif params.top_p < 1.0:
        ranked, count = _keep_nucleus(row, params)
    elif params.min_p > 0.0:
        ranked, count = _keep_likely(row, params)
    else:
        return _draw_unfiltered(row, params.temperature, uniform)
    if params.min_p > 0.0:
        count = min(count, ranked.count_above(params.min_p))
    return ranked.pick(count, float(ranked.sums[count - 1]), uniform)


def _keep_top_k(row: RowBuffer, params: SamplingParams) -> tuple[_Ranked, int]:
    """top_k, with the equals of the k-th, then top_p of what those hold."""
    ranked = _Ranked(row.prefix(params.top_k), params.temperature)
    count = ranked.prefix.count_from(params.top_k - 1)
    if params.top_p < 1.0:
        count = min(count, ranked.count_until(params.top_p * float(ranked.sums[count - 1])))
    return ranked, count


def _keep_nucleus(row: RowBuffer, params: SamplingParams) -> tuple[_Ranked, int]:
    mass = row.weigh(params.temperature)
    for prefix in row.prefixes_but((1.0 - params.top_p) * mass, params.temperature):
        ranked = _Ranked(prefix, params.temperature)
        count = ranked.count_until(params.top_p * mass)
        if count <= len(ranked.sums) or prefix.complete:
            return ranked, min(count, len(ranked.sums))
    raise AssertionError("the whole row decides")


def _keep_likely(row: RowBuffer, params: SamplingParams) -> tuple[_Ranked, int]:
    """Every token that min_p can keep. The threshold is a little low, for its own rounding."""
    least = row.peak + params.temperature * (math.log(params.min_p) - 1e-3)
    ranked = _Ranked(row.prefix_from(least - abs(row.peak) * 1e-6), params.temperature)
    return ranked, len(ranked.sums)


def _draw_unfiltered(row: RowBuffer, temperature: float, uniform: float) -> int:
    mass = row.weigh(temperature)
    for prefix in row.prefixes_but((1.0 - uniform) * mass, temperature):
        ranked = _Ranked(prefix, temperature)
        if uniform * mass < ranked.mass or prefix.complete:
            return ranked.pick(len(ranked.sums), mass, uniform)
    raise AssertionError("the whole row decides")
