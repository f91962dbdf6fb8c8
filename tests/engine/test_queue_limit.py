"""One rule for what may wait, at both ends of the link."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from residentd.config import Config, Limits
from residentd.engine.queue_limit import QueueLimit, queue_limit
from residentd.models.encoder import Kind
from residentd.models.manifest import EngineLimits, Manifest
from residentd.supervisor.host import EngineHost
from support.manifests import plain_manifest

TEXT_KINDS: tuple[Kind, ...] = ("generate", "embed", "classify", "rerank")


@pytest.mark.parametrize("kind", TEXT_KINDS)
@pytest.mark.parametrize(
    ("tokens_max", "context", "step_tokens_max", "most"),
    [(1000, 64, 128, 1000), (100, 64, 128, 128), (10, 64, 32, 64)],
)
def test_tokens_of_a_whole_context_and_of_a_whole_run_may_wait(
    kind: Kind, tokens_max: int, context: int, step_tokens_max: int, most: int
) -> None:
    """Whatever the configuration says: else there would be requests that no empty queue takes."""
    limits = EngineLimits(slots=1, context=context, step_tokens_max=step_tokens_max, vocab=9)
    expected = QueueLimit("tokens", "limits.waiting_tokens_max", most)
    assert queue_limit(kind, limits, tokens_max=tokens_max, bytes_max=7) == expected


def test_tensors_wait_by_their_bytes() -> None:
    """With a key of their own."""
    limits = EngineLimits(slots=1, context=64, step_tokens_max=128, vocab=9)
    expected = QueueLimit("bytes", "limits.waiting_bytes_max", 7)
    assert queue_limit("tensor", limits, tokens_max=1000, bytes_max=7) == expected


def manifest_of(kind: Kind) -> Manifest:
    plain = plain_manifest({})
    return msgspec.structs.replace(plain, content=msgspec.structs.replace(plain.content, kind=kind))


@pytest.mark.parametrize(("kind", "key"), [("tensor", "waiting_bytes_max"), ("embed", "waiting_tokens_max")])
def test_the_daemons_end_keeps_it(kind: Kind, key: str) -> None:
    """By the operator's configuration."""
    config = Config(limits=Limits(waiting_tokens_max=50, waiting_bytes_max=60))
    host = EngineHost(label="toy@1", directory=Path(), manifest=manifest_of(kind), config=config)
    assert host.queue_limit.key == f"limits.{key}"
    assert host.queue_limit.most == getattr(config.limits, key)
