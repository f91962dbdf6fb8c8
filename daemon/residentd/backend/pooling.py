"""From token vectors to one vector a text. Padding is never looked at, so a text's vector is that of the text alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Final

import numpy as np

from residentd.backend.graph import Array, Floats
from residentd.models.encoder import Pooling

NORM_MIN: Final = 1e-12  # torch.nn.functional.normalize, which sentence-transformers uses


def _mean(tokens: Array) -> Array:
    mean: Array = tokens.mean(axis=0, dtype=np.float64)
    return mean


def _mean_sqrt_len(tokens: Array) -> Array:
    scaled: Array = tokens.sum(axis=0, dtype=np.float64) / np.sqrt(len(tokens))
    return scaled


def _weighted_mean(tokens: Array) -> Array:
    """Token n of a text weighs n, counted from 1."""
    weights = np.arange(1, len(tokens) + 1, dtype=np.float64)
    mean: Array = weights @ tokens / weights.sum()
    return mean


MODES: Final[Mapping[Pooling, Callable[[Array], Array]]] = MappingProxyType(
    {
        "cls": lambda tokens: tokens[0],
        "max": lambda tokens: tokens.max(axis=0),
        "mean": _mean,
        "mean_sqrt_len": _mean_sqrt_len,
        "weighted_mean": _weighted_mean,
        "last": lambda tokens: tokens[-1],
    }
)
"""float [tokens, hidden] of one text, without padding -> [hidden]. sentence_transformers.models.Pooling."""


def pool(hidden: Array, lengths: Sequence[int], modes: Sequence[Pooling]) -> Floats:
    """One float32 row a text, [B, H * modes], the modes side by side, from [B, S, H] with padding after `lengths`."""
    rows = [
        np.concatenate([MODES[mode](row[:length]) for mode in modes])
        for row, length in zip(hidden, lengths, strict=True)
    ]
    return np.stack(rows).astype(np.float32)


def normalised(vectors: Floats) -> Floats:
    """Each row at length 1; a row of zeros stays one."""
    norms = np.sqrt(np.square(vectors, dtype=np.float64).sum(axis=1, keepdims=True))
    scaled: Floats = (vectors / np.maximum(norms, NORM_MIN)).astype(np.float32)
    return scaled
