from __future__ import annotations

import multiprocessing
import os
import shutil
import sqlite3
import tempfile
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from residentd.errors import NotFoundError, OperatorError, StoreError
from residentd.models import registry as registry_module
from residentd.models.registry import (
    FILE_NAME,
    MODELS_MAX,
    SCHEMA,
    VERSIONS_PER_MODEL_MAX,
    Registry,
    RegistryState,
    Version,
    add,
    parse_reference,
)

NAMES = ["llama", "llama-8b", "qwen"]
DIGESTS = [letter * 64 for letter in "abcd"]


def test_numbers_count_from_one_per_name_and_stay(tmp_path: Path) -> None:
    """Each name counts its own versions; a digest keeps its number however often it is added."""
    registry = Registry(tmp_path)
    assert [registry.add_version("llama", digest, activate=False) for digest in ["a", "b", "a", "c", "b"]] == [
        1,
        2,
        1,
        3,
        2,
    ]
    assert registry.add_version("qwen", "a", activate=False) == 1
    assert [version.reference for version in registry.versions()] == ["llama@1", "llama@2", "llama@3", "qwen@1"]


def test_the_bare_name_means_the_active_version(tmp_path: Path) -> None:
    """Activation moves the bare name; name@N always means N."""
    registry = Registry(tmp_path, now=lambda: datetime(2026, 11, 2, 3, 4, 5, tzinfo=UTC))
    registry.add_version("llama", "a", activate=True)
    registry.add_version("llama", "b", activate=False)
    assert registry.resolve("llama") == Version("llama", 1, "a", "2026-11-02T03:04:05+00:00", active=True)
    registry.activate("llama", 2)
    assert registry.resolve("llama").digest == registry.active("llama").digest == "b"
    assert registry.resolve("llama@1").digest == "a"
    registry.add_version("llama", "a", activate=True)
    assert registry.resolve("llama").number == 1


def promoted(registry: Registry, name: str = "llama") -> list[int]:
    return [version.number for version in registry.promoted(name)]


def test_what_a_name_meant_is_remembered_without_what_it_was_rolled_back_from(tmp_path: Path) -> None:
    """The last first; what was only installed is not among them; a rollback takes what came after away."""
    registry = Registry(tmp_path)
    for digest, activate in (("a", True), ("b", False), ("c", True), ("d", True)):
        registry.add_version("llama", digest, activate=activate)
    assert promoted(registry) == [4, 3, 1]
    registry.activate("llama", 3)
    assert promoted(registry) == [3, 1]
    registry.activate("llama", 3)
    assert promoted(registry) == [3, 1]
    registry.activate("llama", 2)
    assert promoted(Registry(tmp_path)) == [2, 3, 1]
    assert [version.active for version in registry.promoted("llama")] == [True, False, False]
    assert promoted(registry, "qwen") == []


def test_promotions_that_another_residentd_did_not_record_are_caught_up_with(tmp_path: Path) -> None:
    """A registry of before, and one that an older residentd wrote since: the version of now is known, and what was."""
    registry = Registry(tmp_path)
    for digest in "abc":
        registry.add_version("llama", digest, activate=True)
    registry.close()
    with sqlite3.connect(tmp_path / FILE_NAME) as connection:
        connection.execute("DROP TABLE promotions")
    assert promoted(Registry(tmp_path)) == [3]
    with sqlite3.connect(tmp_path / FILE_NAME) as connection:
        connection.execute("UPDATE active SET number = 2")
    assert promoted(Registry(tmp_path)) == [2, 3]
    with sqlite3.connect(tmp_path / FILE_NAME) as connection:
        connection.execute("UPDATE active SET number = 3")
    assert promoted(Registry(tmp_path)) == [3]


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("lama-8b", "there is no model 'lama-8b'. Did you mean llama-8b\\? Installed: empty, llama-8b, qwen"),
        ("zzz", "there is no model 'zzz'. Installed: empty, llama-8b, qwen"),
        ("llama-8b@3", "model llama-8b has no version 3; it has llama-8b@1, llama-8b@2"),
        ("empty", "model empty has no active version; it has empty@1"),
        ("qwen@0", ".* names no version: after @ stands a whole number from 1"),
        ("qwen@", ".* names no version: after @ stands a whole number from 1"),
        ("qwen@-1", ".* names no version: after @ stands a whole number from 1"),
        ("qwen@٣", ".* names no version: after @ stands a whole number from 1"),
        ("qwen@" + "9" * 10, ".* names no version: after @ stands a whole number from 1"),
        ("", "there is no model ''"),
        ("x" * 5000, "there is no model 'x{77}…'"),
    ],
)
def test_a_reference_that_names_nothing_says_what_there_is(tmp_path: Path, reference: str, message: str) -> None:
    """NotFound carries the known names, a near miss as suggestion, and never more than a line of the caller's text."""
    registry = Registry(tmp_path)
    for name in ("llama-8b", "qwen"):
        registry.add_version(name, "a", activate=True)
    registry.add_version("llama-8b", "b", activate=False)
    registry.add_version("empty", "a", activate=False)
    with pytest.raises(NotFoundError, match=f"^{message}") as caught:
        registry.resolve(reference)
    assert caught.value.field == "model"


def test_an_empty_registry_says_that_nothing_is_installed(tmp_path: Path) -> None:
    """The first mistake on a fresh machine gets the way out."""
    with pytest.raises(NotFoundError, match=r"none is installed\. Install one first"):
        Registry(tmp_path).versions("llama")


def test_parse_reference_table() -> None:
    """A name, or a name and a number."""
    assert parse_reference("llama") == ("llama", None)
    assert parse_reference("llama@12") == ("llama", 12)


@pytest.mark.parametrize("name", ["", "A", "../x", "a b", "a@1", "x" * 65])
def test_names_outside_the_alphabet_are_refused(tmp_path: Path, name: str) -> None:
    """Names become parts of references and file names, so the alphabet is checked where they enter."""
    with pytest.raises(OperatorError, match="not allowed"):
        Registry(tmp_path).add_version(name, "a", activate=True)


def test_names_and_versions_are_limited() -> None:
    """MODELS_MAX names and VERSIONS_PER_MODEL_MAX versions fit; one more is refused."""
    one = tuple(Version("m", number, f"{number}", "", active=False) for number in range(1, VERSIONS_PER_MODEL_MAX))
    state, last = add(RegistryState({"m": one}), "m", "last", created="")
    assert last.number == VERSIONS_PER_MODEL_MAX
    with pytest.raises(StoreError, match=f"{VERSIONS_PER_MODEL_MAX:,} versions"):
        add(state, "m", "more", created="")
    assert add(state, "m", "last", created="") == (state, last)
    names = {f"m{index}": one[:1] for index in range(MODELS_MAX - 1)}
    state, _ = add(RegistryState(names), "last", "a", created="")
    with pytest.raises(StoreError, match=f"{MODELS_MAX:,} model names"):
        add(state, "more", "a", created="")


def test_activating_what_does_not_exist_changes_nothing(tmp_path: Path) -> None:
    """A refused activation rolls back whole."""
    registry = Registry(tmp_path)
    registry.add_version("llama", "a", activate=True)
    with pytest.raises(NotFoundError):
        registry.activate("llama", 2)
    with pytest.raises(NotFoundError):
        registry.activate("qwen", 1)
    assert registry.resolve("llama").number == 1


def test_a_newer_schema_is_refused_with_the_way_out(tmp_path: Path) -> None:
    """An older daemon never guesses at a newer store."""
    Registry(tmp_path).close()
    with sqlite3.connect(tmp_path / FILE_NAME) as connection:
        connection.execute("UPDATE schema SET version = ?", (SCHEMA + 1,))
    with pytest.raises(StoreError, match=f"has schema {SCHEMA + 1}; this residentd reads up to {SCHEMA}. Upgrade"):
        Registry(tmp_path)


def test_a_damaged_file_is_explained(tmp_path: Path) -> None:
    """Bytes that are not a database are a StoreError that says what to restore."""
    (tmp_path / FILE_NAME).write_bytes(b"not a database" * 100)
    with pytest.raises(StoreError, match=f"damaged .* Restore {FILE_NAME}"):
        Registry(tmp_path)


def test_a_missing_directory_is_explained(tmp_path: Path) -> None:
    """A state directory that is not there is a StoreError, not a traceback."""
    with pytest.raises(StoreError, match="cannot be opened"):
        Registry(tmp_path / "missing")


def test_the_file_mode_does_not_depend_on_the_umask(tmp_path: Path) -> None:
    """The database and its write-ahead log are 0640 under any umask."""
    before = os.umask(0o077)
    try:
        registry = Registry(tmp_path)
        registry.add_version("llama", "a", activate=True)
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()}
    assert modes == {FILE_NAME: 0o640, f"{FILE_NAME}-wal": 0o640, f"{FILE_NAME}-shm": 0o640}


def test_durability_settings(tmp_path: Path) -> None:
    """A commit survives a power cut: WAL with synchronous=FULL."""
    connection = Registry(tmp_path)._connection
    assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    assert connection.execute("PRAGMA synchronous").fetchone() == (2,)


def test_a_busy_registry_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer that holds the file past the busy limit is a StoreError; readers are not blocked by it."""
    monkeypatch.setattr(registry_module, "BUSY_MS_MAX", 20)
    registry = Registry(tmp_path)
    registry.add_version("llama", "a", activate=True)
    other = sqlite3.connect(tmp_path / FILE_NAME, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    assert registry.resolve("llama").number == 1
    with pytest.raises(StoreError, match="locked"):
        registry.add_version("llama", "b", activate=True)
    other.execute("ROLLBACK")
    assert registry.add_version("llama", "b", activate=True) == 2


def _add_many(state: Path, process: int) -> None:
    registry = Registry(state)
    for index in range(10):
        registry.add_version("llama", f"{process}-{index}", activate=True)
    registry.close()


def test_processes_share_one_registry(tmp_path: Path) -> None:
    """Concurrent writers in four processes, starting on an empty directory, lose nothing and never share a number."""
    context = multiprocessing.get_context("fork")
    children = [context.Process(target=_add_many, args=(tmp_path, process)) for process in range(4)]
    for child in children:
        child.start()
    for child in children:
        child.join()
    assert [child.exitcode for child in children] == [0] * 4
    versions = Registry(tmp_path).versions("llama")
    assert [version.number for version in versions] == list(range(1, 41))
    assert {version.digest for version in versions} == {
        f"{process}-{index}" for process in range(4) for index in range(10)
    }
    assert sum(version.active for version in versions) == 1


def _add_then_die(state: Path, *, inside: bool) -> None:
    registry = Registry(state)
    if inside:
        with registry._writing():
            registry._connection.execute("INSERT INTO versions VALUES ('llama', 2, 'b', '')")
            os._exit(0)
    registry.add_version("llama", "b", activate=True)
    os._exit(0)


@pytest.mark.parametrize("inside", [True, False])
def test_a_kill_keeps_or_drops_a_transaction_whole(tmp_path: Path, *, inside: bool) -> None:
    """kill -9 inside a transaction leaves the old state, after the commit the new one."""
    Registry(tmp_path).add_version("llama", "a", activate=True)
    child = multiprocessing.get_context("fork").Process(
        target=_add_then_die, args=(tmp_path,), kwargs={"inside": inside}
    )
    child.start()
    child.join()
    assert Registry(tmp_path).resolve("llama").digest == ("a" if inside else "b")
    assert len(Registry(tmp_path).versions("llama")) == (1 if inside else 2)


class RegistryMachine(RuleBasedStateMachine):
    """The registry against a dictionary of lists, reopened at any point."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp())
        self.registry = Registry(self.directory)
        self.digests: dict[str, list[str]] = {}
        self.active: dict[str, int] = {}
        self.line: dict[str, list[int]] = {name: [] for name in NAMES}

    def promote(self, name: str, number: int) -> None:
        self.active[name] = number
        line = self.line[name]
        self.line[name] = [*line[: line.index(number) if number in line else len(line)], number]

    @rule(name=st.sampled_from(NAMES), digest=st.sampled_from(DIGESTS), activate=st.booleans())
    def add_version(self, name: str, digest: str, *, activate: bool) -> None:
        known = self.digests.setdefault(name, [])
        if digest not in known:
            known.append(digest)
        expected = known.index(digest) + 1
        assert self.registry.add_version(name, digest, activate=activate) == expected
        if activate:
            self.promote(name, expected)

    @rule(name=st.sampled_from(NAMES), number=st.integers(1, 5))
    def activate(self, name: str, number: int) -> None:
        if number <= len(self.digests.get(name, [])):
            self.registry.activate(name, number)
            self.promote(name, number)
        else:
            with pytest.raises(NotFoundError):
                self.registry.activate(name, number)

    @rule()
    def reopen(self) -> None:
        self.registry.close()
        self.registry = Registry(self.directory)

    @invariant()
    def resolves_like_the_model(self) -> None:
        found = {(version.name, version.number): version.digest for version in self.registry.versions()}
        assert found == {
            (name, index + 1): digest for name, digests in self.digests.items() for index, digest in enumerate(digests)
        }
        for name in NAMES:
            assert promoted(self.registry, name) == self.line[name][::-1]
            if name in self.active:
                assert self.registry.resolve(name).number == self.active[name]
            else:
                with pytest.raises(NotFoundError):
                    self.registry.resolve(name)

    def teardown(self) -> None:
        self.registry.close()
        shutil.rmtree(self.directory)


TestRegistryMachine = RegistryMachine.TestCase
TestRegistryMachine.settings = settings(max_examples=40, stateful_step_count=20, deadline=None)
