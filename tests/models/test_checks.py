"""Checks of a version: judged against the last good one, kept in the registry, and what makes a version DEGRADED."""

from __future__ import annotations

import math
import sqlite3
from datetime import UTC, datetime
from pathlib import Path

import pytest

from residentd.models import registry as registry_module
from residentd.models.checks import CHAT, FILES, STATISTICS, TOKENS, Check, Part, judge
from residentd.models.registry import FILE_NAME, Registry, Version

GOOD = Part(name=STATISTICS, checked=128, missed=0, worst=1e-6, bound=1e-3, detail="mean, golden 1, token 2")
BAD = Part(name=STATISTICS, checked=128, missed=3, worst=0.25, bound=1e-3, detail="logsumexp, golden 4, token 7")
OLD, NEW = {"onnxruntime": "1.31.1", "numpy": "2.1"}, {"onnxruntime": "1.32.0", "numpy": "2.1"}
WHEN = "2026-12-01T00:00:00+00:00"


@pytest.fixture
def registry(tmp_path: Path) -> Registry:
    return Registry(tmp_path, now=lambda: datetime(2026, 12, 1, tzinfo=UTC))


def added(registry: Registry, digest: str = "a", name: str = "llama") -> Version:
    number = registry.add_version(name, digest, activate=True)
    return registry.resolve(f"{name}@{number}")


def test_a_failed_check_says_the_numbers_the_change_and_the_way_out() -> None:
    """The operator reads what differs, where, by how much of what bound, what changed since, and what to do."""
    last = judge("load", [GOOD], OLD, checked=WHEN, last_good=None)
    check = judge("verify", [GOOD, BAD], NEW, checked=WHEN, last_good=last)
    assert not check.passed
    assert check.message == (
        "it does not reproduce what was recorded when it was built. logit statistics: worst difference 0.25, the bound "
        "is 0.001 (logsumexp, golden 4, token 7). Changed since its last good check: onnxruntime 1.31.1 → 1.32.0. "
        "Undo that, or install the model again here"
    )


@pytest.mark.parametrize(
    ("part", "numbers", "remedy"),
    [
        (BAD, "worst difference 0.25", "Install the model again on this machine"),
        (Part(name=CHAT, checked=5, missed=2), "chat template: 2 of 5 differ.", "Install the model again"),
        (Part(name=FILES, checked=1, missed=1, detail="weights.bin is damaged"), "weights.bin", "Restore the files"),
    ],
)
def test_without_a_change_the_way_out_is_another(part: Part, numbers: str, remedy: str) -> None:
    """Nothing changed: what is left is to install again; damaged files come out of a backup."""
    last = judge("load", [GOOD], OLD, checked=WHEN, last_good=None)
    check = judge("load", [part], OLD, checked=WHEN, last_good=last)
    assert numbers in check.message
    assert remedy in check.message
    assert check.since == ""


def test_a_share_of_tokens_may_miss_where_it_was_agreed() -> None:
    """At missed_max a part passes, one more does not."""
    at, past = (Part(name=TOKENS, checked=40, missed=missed, missed_max=4) for missed in (4, 5))
    assert judge("load", [at], OLD, checked=WHEN, last_good=None).passed
    assert not judge("load", [past], OLD, checked=WHEN, last_good=None).passed


def test_the_first_check_after_a_change_says_so(registry: Registry) -> None:
    """In the words of the log and of status; the next check has nothing to say."""
    version = added(registry)
    assert registry.record_check(version, "install", [GOOD], OLD).since == "the first check that is recorded"
    assert registry.record_check(version, "load", [GOOD], NEW).since == "first check since onnxruntime 1.31.1 → 1.32.0"
    assert registry.record_check(version, "load", [GOOD], NEW).since == ""


def test_changes_are_counted_from_the_last_good_check(registry: Registry) -> None:
    """A check that failed on the new library does not make the new library the normal one."""
    version = added(registry)
    registry.record_check(version, "install", [GOOD], OLD)
    registry.record_check(version, "load", [BAD], NEW)
    again = registry.record_check(version, "verify", [BAD], NEW)
    assert "onnxruntime 1.31.1 → 1.32.0" in again.message
    assert registry.record_check(version, "verify", [GOOD], OLD).since == ""


def test_a_version_is_degraded_until_a_check_passes(tmp_path: Path, registry: Registry) -> None:
    """Another process sees the last check whole, and each version has its own."""
    version, other = added(registry, "a"), added(registry, "b")
    assert registry.last_check(version) is None
    recorded = registry.record_check(version, "verify", [GOOD, BAD], NEW)
    assert Registry(tmp_path).last_check(version) == recorded
    assert isinstance(recorded, Check)
    assert (recorded.checked, recorded.environment) == (WHEN, NEW)
    assert registry.last_check(other) is None
    registry.record_check(version, "verify", [GOOD], NEW)
    found = registry.last_check(version)
    assert found is not None
    assert found.passed


def test_two_names_of_one_digest_are_checked_apart(registry: Registry) -> None:
    """DEGRADED is a state of a version of a name, as ready is."""
    one, two = added(registry, "a", "one"), added(registry, "a", "two")
    registry.record_check(one, "verify", [BAD], NEW)
    assert registry.last_check(two) is None


def test_an_engine_of_nan_can_be_recorded(registry: Registry) -> None:
    """Infinity comes back as infinity."""
    version = added(registry)
    nan = Part(name=STATISTICS, checked=1, missed=1, worst=math.inf, bound=1e-3)
    registry.record_check(version, "load", [nan], NEW)
    found = registry.last_check(version)
    assert found is not None
    assert found.parts == (nan,)


def test_checks_are_bounded_and_the_last_good_one_is_kept(
    tmp_path: Path, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the limit nothing goes; past it the oldest, but never the one that changes are counted from."""
    monkeypatch.setattr(registry_module, "CHECKS_KEPT_MAX", 4)
    version, other = added(registry, "a"), added(registry, "b")

    def kept() -> int:
        with sqlite3.connect(tmp_path / FILE_NAME) as connection:
            return int(connection.execute("SELECT count(*) FROM checks WHERE digest = 'a'").fetchone()[0])

    registry.record_check(other, "load", [GOOD], NEW)
    for _ in range(4):
        registry.record_check(version, "load", [BAD], NEW)
    assert kept() == 4
    registry.record_check(version, "load", [BAD], NEW)
    assert kept() == 4
    good = registry.record_check(version, "install", [GOOD], OLD)
    for _ in range(9):
        registry.record_check(version, "load", [BAD], NEW)
    assert kept() == 5
    changes = registry.record_check(version, "load", [BAD], OLD | {"numpy": "2.2"}).changes
    assert [(change.name, change.before) for change in changes] == [("numpy", good.environment["numpy"])]
    assert registry.last_check(other) is not None


def test_the_last_check_on_an_occasion_is_found_behind_others(registry: Registry) -> None:
    """What an installation found says nothing of how a version loads."""
    version = added(registry)
    registry.record_check(version, "load", [GOOD], NEW)
    failed = registry.record_check(version, "verify", [BAD], NEW)
    registry.record_check(version, "install", [GOOD], NEW)
    assert registry.last_check_of(version, ("load", "verify")) == failed
    assert registry.last_check_of(added(registry, "b"), ("load", "verify")) is None


def test_a_registry_of_before_checks_is_taken_over(tmp_path: Path, registry: Registry) -> None:
    """It gets the table when it is opened; its versions stay."""
    version = added(registry)
    registry.close()
    with sqlite3.connect(tmp_path / FILE_NAME) as connection:
        connection.execute("DROP TABLE checks")
    opened = Registry(tmp_path)
    assert opened.last_check(version) is None
    assert opened.record_check(version, "load", [GOOD], NEW).first


def test_a_check_in_another_form_counts_as_none(tmp_path: Path, registry: Registry) -> None:
    """What another residentd wrote does not stop this one: the version is checked again."""
    version = added(registry)
    registry.record_check(version, "load", [BAD], NEW)
    with sqlite3.connect(tmp_path / FILE_NAME) as connection:
        connection.execute("UPDATE checks SET found = '{}'")
    assert registry.last_check(version) is None
