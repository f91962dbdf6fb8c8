"""How much may wait in one model's queue: one rule, for the daemon's end of it and the worker's. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from residentd.models.encoder import Kind
from residentd.models.manifest import EngineLimits


@dataclass(frozen=True, slots=True)
class QueueLimit:
    """`most` of `unit` may wait, as `key` of the configuration says, or what the model needs if that is more."""

    unit: str
    key: str
    most: int


def queue_limit(kind: Kind, limits: EngineLimits, *, tokens_max: int, bytes_max: int) -> QueueLimit:
    """Of a model of `kind`. A request that fills the context, or one run, can wait whatever the configuration says."""
    if kind == "tensor":
        return QueueLimit("bytes", "limits.waiting_bytes_max", bytes_max)
    most = max(tokens_max, limits.context, limits.step_tokens_max)
    return QueueLimit("tokens", "limits.waiting_tokens_max", most)
