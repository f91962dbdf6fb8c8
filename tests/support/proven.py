"""A version that has served: what a daemon that loaded it has written down."""

from __future__ import annotations

from pathlib import Path

from residentd.models.checks import FILES, Part
from residentd.models.environment import TEXT_LIBRARIES, engine_environment, library_versions
from residentd.models.registry import Registry


def prove(state: Path, reference: str) -> None:
    """Record a load that found nothing wrong."""
    registry = Registry(state)
    environment = engine_environment() | library_versions(TEXT_LIBRARIES)
    registry.record_check(registry.resolve(reference), "load", [Part(name=FILES, checked=1, missed=0)], environment)
    registry.close()
