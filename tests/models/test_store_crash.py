"""Stop a publish between any two writes, by kill and by power cut; what is left must be a whole version or none."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from residentd.models.manifest import Manifest
from residentd.models.registry import Registry
from residentd.models.store import Disk, Store, measure_files
from support.manifests import plain_manifest, publish_files, write_files

FILES = {"engine.onnx": b"weights" * 500, "text/tokenizer.json": b"{}" * 20}
KILLED = 86
POINTS_MAX = 60  # more than a publish of FILES has; reaching it means that the loop does not end
POWER_CUT_SEEDS = 40


class CutError(Exception):
    """The power went off."""


@dataclass
class CountingDisk(Disk):
    """Stops before its `stop_at`-th operation."""

    stop_at: int
    operations: int = 0

    def _step(self) -> None:
        self.operations += 1
        if self.operations == self.stop_at:
            self.stop()

    def stop(self) -> None:
        os._exit(KILLED)

    def before_registering(self) -> None:
        self._step()

    def make_directory(self, path: Path) -> None:
        self._step()
        super().make_directory(path)

    def write(self, path: Path, data: bytes) -> None:
        self._step()
        super().write(path, data)

    def chmod(self, path: Path, mode: int) -> None:
        self._step()
        super().chmod(path, mode)

    def sync(self, path: Path) -> None:
        self._step()
        super().sync(path)

    def rename(self, source: Path, target: Path) -> None:
        self._step()
        super().rename(source, target)


class WholeDisk(CountingDisk):
    """Never stops."""

    def __init__(self) -> None:
        super().__init__(stop_at=0)


def _install(state: Path, disk: CountingDisk) -> Manifest:
    """What the builder does: stage, publish, register."""
    store = Store(state, disk=disk)
    with contextlib.closing(Registry(state)) as registry:
        store.sweep(lambda: _registered(registry))
        with store.staging() as stage:
            write_files(stage.path, FILES)
            manifest = plain_manifest(measure_files(stage.path))
            store.publish(stage, manifest)
            disk.before_registering()
            registry.add_version("toy", manifest.digest, activate=True)
    return manifest


def _registered(registry: Registry) -> set[str]:
    return {version.digest for version in registry.versions()}


def _check_whole_or_none(state: Path, expected: str) -> None:
    store = Store(state)
    registry = Registry(state)
    store.sweep(lambda: _registered(registry))
    assert store.digests() in ((), (expected,))
    for digest in store.digests():
        assert {name: (store.load(digest)[1] / name).read_bytes() for name in FILES} == FILES
        store.verify_files(digest)
    assert list((state / "staging").iterdir()) == []
    assert {path.name for path in (state / "versions").iterdir()} == set(store.digests())
    assert _registered(registry) == set(store.digests()), "what nothing names would never be removed"
    assert list((state / "pending").iterdir()) == []
    registry.close()


def test_a_kill_at_any_write_leaves_a_whole_version_or_none(tmp_path: Path) -> None:
    """For every k: kill -9 before the k-th write, reopen, find all or nothing; and installing again succeeds."""
    expected = _install(tmp_path / "undisturbed", WholeDisk()).digest
    outcomes = []
    for point in range(1, POINTS_MAX):
        state = tmp_path / f"state-{point}"
        child = os.fork()
        if child == 0:
            _install(state, CountingDisk(stop_at=point))
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert code in {0, KILLED}
        _check_whole_or_none(state, expected)
        outcomes.append(bool(Store(state).digests()))
        assert _install(state, WholeDisk()).digest == expected
        _check_whole_or_none(state, expected)
        if code == 0:
            break
    else:
        pytest.fail(f"a publish did not end within {POINTS_MAX} writes")
    assert len(outcomes) > 10
    assert outcomes == sorted(outcomes), "once whole, a version stays whole"
    assert outcomes[0] is False
    assert outcomes[-1] is True


@dataclass
class PowerCutDisk(CountingDisk):
    """On the cut, any subset of the unsynced renames is undone and unsynced files are torn, as the seed decides."""

    seed: int = 0
    unsynced_files: set[Path] = field(default_factory=set)
    unsynced_renames: list[tuple[Path, Path]] = field(default_factory=list)

    def stop(self) -> None:
        rng = random.Random(self.seed)
        while self.unsynced_renames:
            source, target = self.unsynced_renames.pop()
            if rng.random() < 0.5:
                target.rename(source)
                self._moved(target, source)
        for path in sorted(self.unsynced_files):
            if rng.random() < 0.8:
                os.truncate(path, rng.randrange(path.stat().st_size + 1))
        raise CutError

    def remove_tree(self, path: Path) -> None:
        """After the cut nothing runs, so nothing is cleaned up."""

    def write(self, path: Path, data: bytes) -> None:
        super().write(path, data)
        self.unsynced_files.add(path)

    def sync(self, path: Path) -> None:
        super().sync(path)
        self.unsynced_files.discard(path)
        self.unsynced_renames = [entry for entry in self.unsynced_renames if entry[1].parent != path]

    def rename(self, source: Path, target: Path) -> None:
        super().rename(source, target)
        self._moved(source, target)
        self.unsynced_renames.append((source, target))

    def _moved(self, source: Path, target: Path) -> None:
        def follow(path: Path) -> Path:
            return target / path.relative_to(source) if path.is_relative_to(source) else path

        self.unsynced_files = {follow(path) for path in self.unsynced_files}
        self.unsynced_renames = [(follow(old), follow(new)) for old, new in self.unsynced_renames]


def _publish_until_cut(state: Path, disk: PowerCutDisk) -> None:
    store = Store(state, disk=disk)
    with contextlib.suppress(CutError), store.staging() as stage:
        write_files(stage.path, FILES)
        disk.unsynced_files |= {stage.path / name for name in FILES}
        store.publish(stage, plain_manifest(measure_files(stage.path)))
        disk._step()  # the cut may also come right after the acknowledgement


def _operations_of_a_publish(state: Path) -> int:
    disk = CountingDisk(stop_at=0)
    publish_files(Store(state, disk=disk), FILES)
    return disk.operations


def test_a_power_cut_at_any_write_leaves_a_whole_version_or_none(tmp_path: Path) -> None:
    """Unsynced renames and torn files at every write point never make a version that loads and is not whole."""
    operations = _operations_of_a_publish(tmp_path / "undisturbed")
    for point in range(1, operations + 2):
        for seed in range(POWER_CUT_SEEDS):
            state = tmp_path / f"{point}-{seed}"
            _publish_until_cut(state, PowerCutDisk(stop_at=point, seed=seed))
            store = Store(state)
            store.sweep()
            for digest in store.digests():
                store.verify_files(digest)
            assert point <= operations or len(store.digests()) == 1, "an acknowledged version must survive"
            shutil.rmtree(state)


class ForgetfulDisk(PowerCutDisk):
    """A planted bug: nothing is ever synced."""

    def sync(self, path: Path) -> None:  # noqa: ARG002 - the bug
        self._step()


def test_the_power_cut_test_notices_a_missing_sync(tmp_path: Path) -> None:
    """Without fsync the same cuts do leave broken or lost versions: the test above can fail."""
    operations = _operations_of_a_publish(tmp_path / "undisturbed")
    broken = 0
    for seed in range(POWER_CUT_SEEDS):
        state = tmp_path / str(seed)
        _publish_until_cut(state, ForgetfulDisk(stop_at=operations + 1, seed=seed))
        store = Store(state)
        broken += not store.digests()
        for digest in store.digests():
            try:
                store.verify_files(digest)
            except Exception:  # noqa: BLE001 - any failure to load is what is counted
                broken += 1
    assert broken > POWER_CUT_SEEDS // 2
