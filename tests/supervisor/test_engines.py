"""Which version a name may fall back to, and what is said of one that could not be loaded. No worker is started."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from residentd.config import Config
from residentd.errors import AccuracyError, LoadError
from residentd.models.checks import FILES, STATISTICS, Check, Occasion, Part
from residentd.models.registry import Registry, Version
from residentd.models.store import Store
from residentd.supervisor.engines import Engines

GOOD = Part(name=STATISTICS, checked=8, missed=0, worst=1e-6, bound=1e-3)
BAD = Part(name=STATISTICS, checked=8, missed=8, worst=0.25, bound=1e-3)
DAMAGED = Part(name=FILES, checked=1, missed=1, detail="weights.bin is damaged")


@pytest.fixture
def engines(tmp_path: Path) -> Iterator[Engines]:
    registry = Registry(tmp_path)
    yield Engines(Store(tmp_path), registry, Config(state=str(tmp_path)))
    registry.close()


def add(engines: Engines, number: int, *, activate: bool = True, found: dict[Occasion, Part] | None = None) -> Version:
    """Version `number` of toy, and what checks of it found; by default that a load passed."""
    registry = engines.registry
    assert registry.add_version("toy", f"{number}" * 64, activate=activate) == number
    version = registry.resolve(f"toy@{number}")
    for occasion, part in ({"load": GOOD} if found is None else found).items():
        registry.record_check(version, occasion, [part], {})
    return version


def last_good(engines: Engines, version: Version) -> list[int]:
    return [other.number for other in engines._last_good(version)]


def test_a_name_falls_back_to_what_it_meant_last(engines: Engines) -> None:
    """Not to the highest number: version 1 was promoted again after 2, as far as 3 knows."""
    add(engines, 1, activate=False)
    add(engines, 2)
    engines.registry.activate("toy", 1)
    assert last_good(engines, add(engines, 3)) == [1, 2]


def test_a_version_that_nobody_promoted_is_none_to_fall_back_to(engines: Engines) -> None:
    """It was installed beside what serves, however often it was found good there."""
    first = add(engines, 1)
    add(engines, 2, activate=False, found={"load": GOOD, "verify": GOOD})
    assert last_good(engines, first) == []


def test_a_version_that_was_rolled_back_from_is_none_to_fall_back_to(engines: Engines) -> None:
    """The operator took it away; it is one again once it is promoted again."""
    first, second = add(engines, 1), add(engines, 2)
    engines.registry.activate("toy", 1)
    assert last_good(engines, first) == []
    engines.registry.activate("toy", 2)
    assert last_good(engines, second) == [1]


@pytest.mark.parametrize(
    ("found", "is_good"),
    [
        ({}, False),
        ({"install": GOOD}, False),
        ({"load": GOOD}, True),
        ({"verify": GOOD}, True),
        ({"load": BAD}, False),
        ({"load": GOOD, "verify": BAD}, False),
        ({"load": BAD, "verify": GOOD}, True),
        ({"load": BAD, "install": GOOD}, False),
    ],
)
def test_what_a_worker_here_found_last_decides(engines: Engines, found: dict[Occasion, Part], *, is_good: bool) -> None:
    """A version that was never checked in a worker here is not known to be good."""
    add(engines, 1, found=found)
    assert last_good(engines, add(engines, 2)) == ([1] if is_good else [])


@pytest.mark.parametrize(
    ("failure", "state", "reason"),
    [
        (AccuracyError("worst difference 0.25"), "degraded", "weights.bin is damaged"),
        (LoadError("12 MiB too few; it does not reproduce what was recorded"), "failed", "12 MiB too few"),
        (OSError("no descriptor"), "failed", "no descriptor"),
    ],
)
def test_the_kind_of_failure_decides_the_state(engines: Engines, failure: Exception, state: str, reason: str) -> None:
    """A version that was refused for what it computes is degraded, with what was found last; any other is failed."""
    version = add(engines, 1, found={"load": BAD, "verify": DAMAGED})
    engines._failures[version.reference] = failure
    found, why = engines.state_of(version, engines.gate.last(version))
    assert found == state
    assert reason in why


def test_a_failure_that_quotes_a_check_is_a_failure(engines: Engines) -> None:
    """What it says does not decide what it is."""
    version = add(engines, 1, found={"load": BAD})
    check: Check | None = engines.gate.last(version)
    assert check is not None
    engines._failures[version.reference] = LoadError(f"no memory. Before: {check.message}")
    assert engines.state_of(version, check)[0] == "failed"
