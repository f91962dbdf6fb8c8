"""Which versions a model name has had, and which one is active.

Transitions are pure functions over `RegistryState`; `Registry` runs each inside one SQLite transaction.
"""

from __future__ import annotations

import contextlib
import difflib
import json
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from residentd.errors import NotFoundError, StoreError
from residentd.models.checks import Check, Occasion, Part, Speeds, judge
from residentd.models.environment import Environment, changes_between
from residentd.models.manifest import check_name

SCHEMA = 1
FILE_NAME = "registry.sqlite3"
FILE_MODE = 0o640
BUSY_MS_MAX = 10_000
BUSY_POLL_S = 0.01
MODELS_MAX = 1024
VERSIONS_PER_MODEL_MAX = 10_000
NAMES_SHOWN_MAX = 8
CHECKS_KEPT_MAX = 32  # of one version; the last that passed is kept beside them

_TABLES = """
CREATE TABLE schema (only INTEGER PRIMARY KEY CHECK (only = 1), version INTEGER NOT NULL);
CREATE TABLE versions (
    name TEXT NOT NULL, number INTEGER NOT NULL CHECK (number > 0), digest TEXT NOT NULL, created TEXT NOT NULL,
    PRIMARY KEY (name, number), UNIQUE (name, digest)
);
CREATE TABLE active (
    name TEXT PRIMARY KEY, number INTEGER NOT NULL, FOREIGN KEY (name, number) REFERENCES versions (name, number)
);
"""
_LATER_TABLES = """
CREATE TABLE IF NOT EXISTS checks (
    number INTEGER PRIMARY KEY AUTOINCREMENT, name TEXT NOT NULL, digest TEXT NOT NULL, passed INTEGER NOT NULL,
    found TEXT NOT NULL, FOREIGN KEY (name, digest) REFERENCES versions (name, digest)
);
CREATE INDEX IF NOT EXISTS checks_of_version ON checks (name, digest, number);
CREATE TABLE IF NOT EXISTS promotions (
    turn INTEGER PRIMARY KEY AUTOINCREMENT, name TEXT NOT NULL, number INTEGER NOT NULL,
    UNIQUE (name, number), FOREIGN KEY (name, number) REFERENCES versions (name, number)
)
"""
"""Added to registries of before them: whoever does not know them serves as it always did, so the schema stays 1."""


@dataclass(frozen=True, slots=True)
class Version:
    """`name`@`number`; `created` is ISO 8601, UTC."""

    name: str
    number: int
    digest: str
    created: str
    active: bool

    @property
    def reference(self) -> str:
        return f"{self.name}@{self.number}"


_FORGET_CHECKS = """
DELETE FROM checks WHERE name = :name AND digest = :digest AND number NOT IN (
    SELECT number FROM (SELECT number FROM checks WHERE name = :name AND digest = :digest
                        ORDER BY number DESC LIMIT :kept)
    UNION SELECT coalesce(max(number), 0) FROM checks WHERE name = :name AND digest = :digest AND passed
)
"""


_VERSIONS = (
    "SELECT v.name, v.number, v.digest, v.created, a.number IS NOT NULL FROM versions v "
    "LEFT JOIN active a ON a.name = v.name AND a.number = v.number"
)
_UNRECORDED_PROMOTIONS = """
SELECT name, number FROM active WHERE number IS NOT
    (SELECT number FROM promotions WHERE name = active.name ORDER BY turn DESC LIMIT 1)
"""
"""By a residentd that does not know `promotions`: of what it promoted only the last is known."""
_ROLL_BACK = """
DELETE FROM promotions WHERE name = :name AND turn >
    (SELECT turn FROM promotions WHERE name = :name AND number = :number)
"""
"""Nothing is greater than what a version that was not promoted before gives here: NULL."""


@dataclass(frozen=True, slots=True)
class RegistryState:
    """Every name with its versions in the order of their numbers 1, 2, 3, …; at most one of them is active."""

    models: Mapping[str, tuple[Version, ...]]


def add(state: RegistryState, name: str, digest: str, *, created: str) -> tuple[RegistryState, Version]:
    """Give `digest` the next number of `name`, or find the number that it has. Raises OperatorError, StoreError."""
    check_name(name)
    known = state.models.get(name, ())
    for version in known:
        if version.digest == digest:
            return state, version
    if not known and len(state.models) >= MODELS_MAX:
        raise StoreError(f"the registry holds {MODELS_MAX:,} model names, the most it takes. Remove one first")
    if len(known) >= VERSIONS_PER_MODEL_MAX:
        raise StoreError(f"model {name} has {VERSIONS_PER_MODEL_MAX:,} versions, the most a name takes. Use a new name")
    number = known[-1].number + 1 if known else 1
    version = Version(name=name, number=number, digest=digest, created=created, active=False)
    return RegistryState({**state.models, name: (*known, version)}), version


def activate(state: RegistryState, name: str, number: int) -> RegistryState:
    """Make `name`@`number` the one that the bare name means. Raises NotFoundError."""
    find(state, name, number)
    versions = tuple(replace(version, active=version.number == number) for version in state.models[name])
    return RegistryState({**state.models, name: versions})


def find(state: RegistryState, name: str, number: int | None) -> Version:
    """`name`@`number`, or the active version when `number` is None. Raises NotFoundError saying what there is."""
    versions = state.models.get(name)
    if versions is None:
        raise NotFoundError(_unknown_name(name, sorted(state.models)), field="model")
    for version in versions:
        if version.number == number or (number is None and version.active):
            return version
    have = ", ".join(version.reference for version in versions[-NAMES_SHOWN_MAX:])
    if number is None:
        raise NotFoundError(f"model {name} has no active version; it has {have}. Name one of them", field="model")
    raise NotFoundError(f"model {name} has no version {number}; it has {have}. Name one of them", field="model")


def parse_reference(reference: str) -> tuple[str, int | None]:
    """Split "name" or "name@N". Raises NotFoundError for anything that can name no version."""
    name, at, number = reference.partition("@")
    if not at:
        return name, None
    if not (number.isascii() and number.isdigit() and len(number) <= 9 and int(number) > 0):
        raise NotFoundError(
            f"{_shown(reference)} names no version: after @ stands a whole number from 1. Write name or name@N",
            field="model",
        )
    return name, int(number)


class Registry:
    """The registry of one state directory. Several processes and threads may use it; each call is one transaction."""

    def __init__(self, state: Path, *, now: Callable[[], datetime] = lambda: datetime.now(UTC)) -> None:
        self._now = now
        self._mutex = threading.Lock()
        with _explained():
            self._connection = _connect(state / FILE_NAME)
        try:
            with _explained():
                _prepare(self._connection)
        except BaseException:
            self._connection.close()
            raise

    def add_version(self, name: str, digest: str, *, activate: bool) -> int:
        """Register `digest` under `name` and return its number: the same one when it is already registered."""
        with self._writing() as state:
            created = self._now().astimezone(UTC).isoformat(timespec="seconds")
            changed, version = add(state, name, digest, created=created)
            if changed is not state:
                self._connection.execute(
                    "INSERT INTO versions VALUES (?, ?, ?, ?)", (name, version.number, digest, version.created)
                )
            if activate:
                self._write_active(changed, name, version.number)
        return version.number

    def activate(self, name: str, number: int) -> None:
        """Make `name`@`number` the active one. Raises NotFoundError."""
        with self._writing() as state:
            self._write_active(state, name, number)

    def active(self, name: str) -> Version:
        """The active version of `name`. Raises NotFoundError."""
        return find(self.state(), name, None)

    def versions(self, name: str | None = None) -> tuple[Version, ...]:
        """All versions by name and number, or those of one name. Raises NotFoundError for an unknown name."""
        models = self.state().models
        if name is None:
            return tuple(version for key in sorted(models) for version in models[key])
        if name not in models:
            raise NotFoundError(_unknown_name(name, sorted(models)), field="model")
        return models[name]

    def digests(self) -> set[str]:
        """Of everything that any name has: what a sweep of the store must leave."""
        return {version.digest for version in self.versions()}

    def promoted(self, name: str) -> tuple[Version, ...]:
        """What `name` means and meant before, the last first, without versions that it was rolled back from."""
        with self._mutex, _explained():
            rows = self._connection.execute(
                f"{_VERSIONS} JOIN promotions p ON p.name = v.name AND p.number = v.number "
                "WHERE v.name = ? ORDER BY p.turn DESC",
                (name,),
            )
            return tuple(_version(row) for row in rows)

    def resolve(self, reference: str) -> Version:
        """The version that "name" (the active one) or "name@N" means. Raises NotFoundError."""
        name, number = parse_reference(reference)
        return find(self.state(), name, number)

    def record_check(
        self,
        version: Version,
        occasion: Occasion,
        parts: Sequence[Part],
        environment: Environment,
        speeds: Speeds | None = None,
    ) -> Check:
        """Judge what a check of `version` found against its last good one, and keep it as its last."""
        with self._writing():
            checked = self._now().astimezone(UTC).isoformat(timespec="seconds")
            last_good = self._check(version, "AND passed")
            check = judge(occasion, parts, environment, checked=checked, last_good=last_good)
            check = msgspec.structs.replace(check, speeds=speeds or _still_true(self._check(version, ""), environment))
            # json, not msgspec: an engine of NaN differs by infinity
            row = (version.name, version.digest, check.passed, json.dumps(msgspec.to_builtins(check)))
            self._connection.execute("INSERT INTO checks (name, digest, passed, found) VALUES (?, ?, ?, ?)", row)
            self._connection.execute(
                _FORGET_CHECKS, {"name": version.name, "digest": version.digest, "kept": CHECKS_KEPT_MAX}
            )
        return check

    def last_check(self, version: Version) -> Check | None:
        """The last check of `version`; one that failed makes it DEGRADED."""
        with self._mutex, _explained():
            return self._check(version, "")

    def last_check_of(self, version: Version, occasions: Collection[Occasion]) -> Check | None:
        """The last check of `version` on one of `occasions`."""
        with self._mutex, _explained():
            found = self._connection.execute(
                "SELECT found FROM checks WHERE name = ? AND digest = ? ORDER BY number DESC",
                (version.name, version.digest),
            )
            checks = (_decoded(text) for (text,) in found)
            return next((check for check in checks if check is not None and check.occasion in occasions), None)

    def state(self) -> RegistryState:
        with self._mutex, _explained():
            return _read(self._connection)

    def close(self) -> None:
        with self._mutex:
            self._connection.close()

    def _write_active(self, state: RegistryState, name: str, number: int) -> None:
        activate(state, name, number)
        self._connection.execute("INSERT OR REPLACE INTO active VALUES (?, ?)", (name, number))
        _promote(self._connection, name, number)

    def _check(self, version: Version, condition: str) -> Check | None:
        found = self._connection.execute(
            f"SELECT found FROM checks WHERE name = ? AND digest = ? {condition} ORDER BY number DESC LIMIT 1",  # noqa: S608 - ours
            (version.name, version.digest),
        ).fetchone()
        return None if found is None else _decoded(found[0])

    @contextlib.contextmanager
    def _writing(self) -> Iterator[RegistryState]:
        with self._mutex, _explained(), _transaction(self._connection):
            yield _read(self._connection)


def _connect(path: Path) -> sqlite3.Connection:
    fd = os.open(path, os.O_RDWR | os.O_CREAT, FILE_MODE)  # SQLite gives its -wal and -shm files the same mode
    try:
        if os.fstat(fd).st_size == 0:
            os.fchmod(fd, FILE_MODE)
    finally:
        os.close(fd)
    connection = sqlite3.connect(path, timeout=BUSY_MS_MAX / 1000, isolation_level=None, check_same_thread=False)
    _use_write_ahead_log(connection)
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("PRAGMA foreign_keys = ON")
    return connection


def _use_write_ahead_log(connection: sqlite3.Connection) -> None:
    """Wait for another that opens the same new file: for this SQLite itself waits at no timeout."""
    give_up = time.monotonic() + BUSY_MS_MAX / 1000
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or time.monotonic() > give_up:
                raise
            time.sleep(BUSY_POLL_S)
        else:
            return


def _prepare(connection: sqlite3.Connection) -> None:
    """Create the tables in an empty file, or refuse a file that a newer residentd wrote."""
    with _transaction(connection):
        if connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0] == 0:
            for statement in _TABLES.split(";"):
                connection.execute(statement)
            connection.execute("INSERT INTO schema VALUES (1, ?)", (SCHEMA,))
        found = connection.execute("SELECT version FROM schema").fetchone()[0]
        if found == SCHEMA:
            for statement in _LATER_TABLES.split(";"):
                connection.execute(statement)
            for name, number in connection.execute(_UNRECORDED_PROMOTIONS).fetchall():
                _promote(connection, name, number)
    if found > SCHEMA:
        raise StoreError(
            f"the registry has schema {found}; this residentd reads up to {SCHEMA}. Upgrade residentd, or restore the "
            "state directory from a backup of the older one"
        )


def _promote(connection: sqlite3.Connection, name: str, number: int) -> None:
    """Note that `name` means `number` from now on. What was promoted after it is what it is rolled back from."""
    connection.execute(_ROLL_BACK, {"name": name, "number": number})
    connection.execute("INSERT OR IGNORE INTO promotions (name, number) VALUES (?, ?)", (name, number))


def _decoded(text: str) -> Check | None:
    """None for a form that another residentd wrote: the version is simply checked again."""
    try:
        return msgspec.convert(json.loads(text), Check)
    except ValueError:
        return None


def _read(connection: sqlite3.Connection) -> RegistryState:
    models: dict[str, list[Version]] = {}
    for row in connection.execute(f"{_VERSIONS} ORDER BY v.name, v.number"):
        version = _version(row)
        models.setdefault(version.name, []).append(version)
    return RegistryState({name: tuple(versions) for name, versions in models.items()})


def _version(row: Sequence[Any]) -> Version:
    name, number, digest, created, active = row
    return Version(name=name, number=number, digest=digest, created=created, active=bool(active))


@contextlib.contextmanager
def _transaction(connection: sqlite3.Connection) -> Iterator[None]:
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
    except BaseException:
        connection.execute("ROLLBACK")
        raise
    connection.execute("COMMIT")


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    try:
        yield
    except sqlite3.OperationalError as error:
        raise StoreError(
            f"the registry cannot be used ({error}). Check the state directory's free space and permissions, and that "
            "no other program holds it"
        ) from error
    except sqlite3.DatabaseError as error:
        raise StoreError(f"the registry is damaged ({error}). Restore {FILE_NAME} from a backup") from error
    except OSError as error:
        raise StoreError(
            f"the registry cannot be opened ({error.strerror}). Make the state directory writable"
        ) from error


def _unknown_name(name: str, known: list[str]) -> str:
    if not known:
        return f"there is no model {_shown(name)}: none is installed. Install one first"
    close = difflib.get_close_matches(name, known, n=1)
    shown = ", ".join(known[:NAMES_SHOWN_MAX]) + (", …" if len(known) > NAMES_SHOWN_MAX else "")
    hint = f"Did you mean {close[0]}? " if close else ""
    return f"there is no model {_shown(name)}. {hint}Installed: {shown}"


def _shown(text: str) -> str:
    """A caller's string inside a message: quoted, and cut where it could flood a log."""
    return repr(text if len(text) <= 80 else text[:77] + "…")


def _still_true(last: Check | None, environment: Environment) -> Speeds | None:
    """What was measured before, unless other libraries or another processor compute now."""
    return None if last is None or changes_between(last.environment, environment) else last.speeds
