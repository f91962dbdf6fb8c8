"""What sampling means, written for the eye: one row at a time, plain Python, no prefix, no shortcut.

Adjusted logits are float32, operation by operation, as the product's are; everything after them is float64.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from residentd.sampling.row import MASS_ERROR
from residentd.types import SamplingParams


def adjusted(
    logits: Sequence[float], params: SamplingParams, prompt: Sequence[int], generated: Sequence[int]
) -> list[float]:
    """Bias, repetition, frequency and presence, and the mask of tokens_min, id by id."""
    bias = dict(params.logit_bias)
    counts = Counter(generated)
    result = []
    for token, value in enumerate(logits):
        logit = np.float32(value)
        if token in bias:
            logit += np.float32(bias[token])
        if params.repetition_penalty != 1.0 and (token in counts or token in prompt):
            penalty = np.float32(params.repetition_penalty)
            logit = logit / penalty if logit > 0 else logit * penalty
        if token in counts:
            logit -= np.float32(params.frequency_penalty * counts[token] + params.presence_penalty)
        if len(generated) < params.tokens_min and token in params.stop_ids:
            logit = np.float32(-math.inf)
        result.append(float(logit))
    return result


@dataclass(frozen=True)
class Kept:
    """One token that may be drawn, and its weight, not normalised."""

    token: int
    logit: float
    weight: float


def filtered(logits: Sequence[float], params: SamplingParams) -> list[Kept]:
    """Temperature, top_k, top_p, min_p: what is left, likeliest first, equals by id."""
    order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    peak = logits[order[0]]
    kept = [Kept(token, logits[token], math.exp((logits[token] - peak) / params.temperature)) for token in order]
    if 0 < params.top_k < len(kept):
        least = kept[params.top_k - 1].logit
        kept = [one for one in kept if one.logit >= least]
    if params.top_p < 1.0:
        mass = math.fsum(one.weight for one in kept)
        before = [math.fsum(one.weight for one in kept[:index]) for index in range(len(kept))]
        kept = [one for one, sum_before in zip(kept, before, strict=True) if sum_before < params.top_p * mass]
    return [one for one in kept if one.weight >= params.min_p]


def drawn(kept: Sequence[Kept], uniform: float) -> int:
    """Inverse CDF: the first token whose running share exceeds `uniform`, or the last that has any weight."""
    mass = math.fsum(one.weight for one in kept)
    for index, one in enumerate(kept):
        if math.fsum(each.weight for each in kept[: index + 1]) > uniform * mass:
            return one.token
    return [one.token for one in kept if one.weight > 0.0][-1]


def acceptable(logits: Sequence[float], params: SamplingParams, uniform: float) -> set[int]:
    """The right token, and its neighbour where a limit lies nearer to the line than the stated error of the mass."""
    return {drawn(filtered(logits, near), near_uniform) for near, near_uniform in _near(params, uniform)}


def _near(params: SamplingParams, uniform: float) -> Iterator[tuple[SamplingParams, float]]:
    for top_p, min_p, mass in itertools.product((-1, 0, 1), repeat=3):
        near = replace(
            params,
            top_p=min(1.0, params.top_p * (1.0 + top_p * 2 * MASS_ERROR)) if params.top_p < 1.0 else 1.0,
            min_p=min(1.0, params.min_p * (1.0 + min_p * 1e-12)),
        )
        yield near, uniform * (1.0 + mass * 2 * MASS_ERROR)


def logprob(logits: Sequence[float], token: int) -> float:
    peak = max(logits)
    return logits[token] - peak - math.log(math.fsum(math.exp(logit - peak) for logit in logits))
