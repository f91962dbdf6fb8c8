from __future__ import annotations

import contextlib
import errno
import multiprocessing
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec
import pytest

from residentd.errors import ConflictError, NotFoundError, StoreError
from residentd.models import store as store_module
from residentd.models.manifest import File
from residentd.models.store import FILES_MAX, Disk, Store, measure_files
from support.manifests import plain_manifest, publish_files, write_files

NOBODY = 65534
FILES = {"engine.onnx": b"weights" * 50, "text/tokenizer.json": b"{}", "empty": b""}


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "state")


def test_a_published_version_loads_with_every_file(store: Store) -> None:
    """What was staged comes back byte for byte under its digest, and the stage is gone."""
    manifest, directory = publish_files(store, FILES)
    loaded, where = store.load(manifest.digest)
    assert loaded == manifest
    assert where == directory == store.state / "versions" / manifest.digest
    assert {name: (where / name).read_bytes() for name in FILES} == FILES
    assert store.verify_files(manifest.digest) == manifest
    assert store.digests() == (manifest.digest,)
    assert list((store.state / "staging").iterdir()) == []


def test_publishing_the_same_content_twice_keeps_the_first(store: Store) -> None:
    """The digest is the identity: a second publish changes nothing on disk, not even the build record."""
    manifest, directory = publish_files(store, FILES)
    before = (directory / "manifest.json").stat()
    again, where = publish_files(store, FILES)
    assert where == directory
    assert again.digest == manifest.digest
    assert (directory / "manifest.json").stat().st_ino == before.st_ino


def test_publishing_over_a_damaged_version_repairs_it(store: Store) -> None:
    """ "Install it again" is the remedy that the errors name, so it must work even when the size still fits."""
    manifest, directory = publish_files(store, FILES)
    (directory / "engine.onnx").write_bytes(b"WEIGHTS" * 50)
    publish_files(store, FILES)
    assert store.verify_files(manifest.digest) == manifest
    assert [name.startswith("damaged-") for name in store.sweep()] == [True]


@pytest.mark.parametrize("umask", [0o000, 0o027, 0o077, 0o777])
def test_modes_do_not_depend_on_the_umask(tmp_path: Path, umask: int) -> None:
    """Directories are 0750 and files 0640 whatever umask the service manager set."""
    if umask == 0o777 and os.geteuid() != 0:
        pytest.skip("files made under umask 0777 can only be read back by root")
    before = os.umask(umask)
    try:
        _, directory = publish_files(Store(tmp_path / "state"), FILES)
    finally:
        os.umask(before)
    modes = {path: path.stat().st_mode & 0o777 for path in [directory, *directory.rglob("*")]}
    assert modes == {path: (0o750 if path.is_dir() else 0o640) for path in modes}
    for name in ("", "versions", "staging"):
        assert (tmp_path / "state" / name).stat().st_mode & 0o777 == 0o750


@pytest.mark.parametrize(
    ("change", "named"),
    [
        pytest.param({"engine.onnx": b"other"}, "engine.onnx has 5 bytes", id="size"),
        pytest.param({"engine.onnx": b"WEIGHTS" * 50}, "engine.onnx has 350 bytes, SHA-256", id="content"),
        pytest.param({"extra": b""}, "extra is in the stage and not in the manifest", id="extra"),
        pytest.param({"empty": None}, "empty is in the manifest and not in the stage", id="missing"),
    ],
)
def test_a_stage_that_differs_from_its_manifest_is_refused(
    store: Store, change: dict[str, bytes | None], named: str
) -> None:
    """Any difference between files and manifest names the file and publishes nothing."""
    with store.staging() as stage:
        write_files(stage.path, FILES)
        manifest = plain_manifest(measure_files(stage.path))
        for name, data in change.items():
            (stage.path / name).unlink(missing_ok=True) if data is None else (stage.path / name).write_bytes(data)
        with pytest.raises(StoreError, match=named):
            store.publish(stage, manifest)
    assert store.digests() == ()
    assert list((store.state / "staging").iterdir()) == []


@pytest.mark.parametrize("name", ["../x", "/etc/x", "a/../b", "a//b", "./a", "", "manifest.json", "manifest.json.tmp"])
def test_a_file_name_that_leaves_the_version_is_refused(store: Store, name: str) -> None:
    """A manifest cannot make the store touch anything outside the version's directory, nor its own manifest."""
    manifest = plain_manifest({name: File(sha256="0" * 64, bytes=0)})
    with store.staging() as stage, pytest.raises(StoreError, match="file name"):
        store.publish(stage, manifest)
    directory = store.state / "versions" / manifest.digest
    directory.mkdir()
    (directory / "manifest.json").write_bytes(msgspec.json.encode(manifest))
    with pytest.raises(StoreError, match="file name"):
        store.load(manifest.digest)


def test_links_are_refused(store: Store) -> None:
    """A version is plain files: a link could point anywhere at load."""
    with store.staging() as stage:
        (stage.path / "model").symlink_to("/dev/null")
        with pytest.raises(StoreError, match="model is a link"):
            measure_files(stage.path)


def test_the_number_of_files_is_limited(store: Store) -> None:
    """FILES_MAX files are measured; one more is refused."""
    with store.staging() as stage:
        write_files(stage.path, {f"{index:04}": b"" for index in range(FILES_MAX)})
        assert len(measure_files(stage.path)) == FILES_MAX
        (stage.path / "more").touch()
        with pytest.raises(StoreError, match=f"at most {FILES_MAX} files"):
            measure_files(stage.path)


def test_a_manifest_with_a_wrong_digest_is_refused(store: Store) -> None:
    """The digest is recomputed, never believed, at publish and at load."""
    forged = msgspec.structs.replace(plain_manifest({}), digest="0" * 64)
    with store.staging() as stage, pytest.raises(StoreError, match="does not match its digest"):
        store.publish(stage, forged)
    manifest, directory = publish_files(store, FILES)
    directory.rename(directory.with_name("0" * 64))
    with pytest.raises(StoreError, match=f"000000000000 carries the manifest of {manifest.digest[:12]}"):
        store.load("0" * 64)


@pytest.mark.parametrize(
    ("damage", "message", "seen_by_load"),
    [
        pytest.param(lambda path: path.unlink(), "engine.onnx is missing", True, id="missing"),
        pytest.param(lambda path: path.write_bytes(b"x"), "engine.onnx has 1 bytes instead of 350", True, id="short"),
        pytest.param(lambda path: path.write_bytes(b"W" * 350), "engine.onnx is damaged", False, id="same size"),
    ],
)
def test_damage_is_named_by_file(store: Store, damage: object, message: str, *, seen_by_load: bool) -> None:
    """Load notices presence and size; verify_files notices every changed byte; both name the file."""
    manifest, directory = publish_files(store, FILES)
    assert callable(damage)
    damage(directory / "engine.onnx")
    if seen_by_load:
        with pytest.raises(StoreError, match=message):
            store.load(manifest.digest)
    else:
        store.load(manifest.digest)
    with pytest.raises(StoreError, match=message):
        store.verify_files(manifest.digest)


@pytest.mark.parametrize("digest", ["", "..", "f" * 64, "../versions"])
def test_an_unknown_digest_is_not_found(store: Store, digest: str) -> None:
    """Anything that is not a stored digest is NotFound, never a path."""
    with pytest.raises(NotFoundError, match="not in the store"):
        store.load(digest)


def test_a_full_disk_is_an_error_with_arithmetic(store: Store) -> None:
    """One byte more than the file system has is refused, and the message carries need, free and shortfall."""
    store.check_room(0)
    needed = 1 << 62
    with pytest.raises(StoreError, match=rf"needs {needed:,} bytes more and .* free \([\d,]+ short\)"):
        store.check_room(needed)


class FullDisk(Disk):
    def sync(self, path: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


def test_a_disk_that_fills_up_publishes_nothing(tmp_path: Path) -> None:
    """ENOSPC inside a stage, from our writes or the builder's, is a StoreError that leaves nothing behind."""
    store = Store(tmp_path / "state", disk=FullDisk())
    with pytest.raises(StoreError, match="is full"):
        publish_files(store, FILES)
    with pytest.raises(StoreError, match="is full"), store.staging():
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with pytest.raises(PermissionError), store.staging():
        raise PermissionError
    assert store.digests() == ()
    assert list((store.state / "staging").iterdir()) == []


def _hold_stage(state: Path, ready: Connection) -> None:
    with Store(state).staging() as stage:
        (stage.path / "half").write_bytes(b"written")
        ready.send(stage.path.name)
        ready.recv()  # until killed


def test_sweep_spares_a_living_owner_and_takes_a_dead_ones_stage(store: Store) -> None:
    """A stage belongs to its process: kept while that lives, removed by the next sweep after kill -9."""
    ours, theirs = multiprocessing.Pipe()
    child = multiprocessing.get_context("fork").Process(target=_hold_stage, args=(store.state, theirs))
    child.start()
    try:
        name = ours.recv()
        with store.staging():
            assert store.sweep() == ()
        child.kill()
        child.join()
        assert store.sweep() == (name,)
    finally:
        child.kill()
        child.join()
    assert list((store.state / "staging").iterdir()) == []


def test_sweep_removes_versions_without_a_manifest_and_nothing_else(store: Store) -> None:
    """An incomplete version goes; whole ones, damaged ones and foreign names stay."""
    manifest, _ = publish_files(store, FILES)
    versions = store.state / "versions"
    write_files(versions, {f"{'0' * 64}/engine.onnx": b"x", "lost+found/x": b"", f"{'1' * 64}/manifest.json": b"torn"})
    assert set(store.digests()) == {"1" * 64, manifest.digest}
    assert store.sweep() == ("0" * 64,)
    assert {path.name for path in versions.iterdir()} == {manifest.digest, "lost+found", "1" * 64}
    with pytest.raises(StoreError, match="manifest is damaged"):
        store.load("1" * 64)


def test_waiting_for_another_writer_is_bounded(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer that never finishes is a ConflictError after LOCK_WAIT_S_MAX, not a hang."""
    monkeypatch.setattr(store_module, "LOCK_WAIT_S_MAX", 0.05)
    with store._writing(), pytest.raises(ConflictError, match="another process"):
        Store(store.state).sweep()
    assert store.sweep() == ()


def test_a_state_directory_that_cannot_be_made_is_explained(tmp_path: Path) -> None:
    """The state path standing on a plain file is a StoreError, not a traceback."""
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match="cannot be prepared"):
        Store(tmp_path / "file" / "state")


@dataclass(slots=True)
class RecordingDisk(Disk):
    synced: list[Path] = field(default_factory=list)

    def sync(self, path: Path) -> None:
        self.synced.append(path)
        Disk.sync(self, path)


def test_every_file_and_directory_is_synced(tmp_path: Path) -> None:
    """No file, no directory and no rename of a publish is left to the page cache."""
    disk = RecordingDisk()
    store = Store(tmp_path / "state", disk=disk)
    _, directory = publish_files(store, FILES)
    names = {path.relative_to(tmp_path / "state").parts[2:] for path in disk.synced}
    assert {tuple(name.split("/")) for name in FILES} | {("text",), (), ("manifest.json.tmp",)} == names
    assert disk.synced[-1] == directory.parent


def publish_held(store: Store, stack: contextlib.ExitStack) -> str:
    """What a build has done that is about to register; it lives until `stack` ends."""
    stage = stack.enter_context(store.staging())
    write_files(stage.path, FILES)
    manifest = plain_manifest(measure_files(stage.path))
    store.publish(stage, manifest)
    return manifest.digest


def test_sweep_removes_a_version_that_was_never_registered(store: Store) -> None:
    """Kept while a build that published it lives, the second of two included; removed once both are gone."""
    with contextlib.ExitStack() as first:
        digest = publish_held(store, first)
        with contextlib.ExitStack() as second:
            assert publish_held(store, second) == digest
            assert store.sweep(set) == ()
            first.close()
            assert store.sweep(set) == ()
            store.verify_files(digest)
    assert store.sweep() == (), "without a registry to ask nothing whole is removed"
    assert [name.startswith("unregistered-") for name in store.sweep(set)] == [True]
    assert store.digests() == ()


def test_sweep_spares_registered_versions_for_good(store: Store) -> None:
    """A version that a sweep has once seen registered stays, even should the registry be lost afterwards."""
    manifest, _ = publish_files(store, FILES)
    assert store.sweep(lambda: {manifest.digest}) == ()
    assert store.sweep(set) == ()
    store.verify_files(manifest.digest)


def test_sweep_asks_the_registry_after_it_looked_at_the_locks(store: Store) -> None:
    """A build that registers and ends just after the registry was asked keeps its version."""
    with contextlib.ExitStack() as build:
        digest = publish_held(store, build)

        def asked_too_early() -> set[str]:
            build.close()
            return set()

        assert store.sweep(asked_too_early) == ()
    store.verify_files(digest)


def test_sweep_passes_over_a_stage_that_another_process_removes(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its owner may be done between any two looks of ours; the next stage is taken all the same."""
    for name in ("a", "b"):
        (store.state / "staging" / name).mkdir()
    ask = store_module._is_ownerless

    def after_its_owner_left(stage: Path) -> bool:
        if stage.name == "a":
            stage.rmdir()
        return ask(stage)

    monkeypatch.setattr(store_module, "_is_ownerless", after_its_owner_left)
    assert store.sweep() == ("b",)
    assert list((store.state / "staging").iterdir()) == []


def test_sweep_unlinks_a_link_in_staging_and_ignores_one_in_versions(store: Store, tmp_path: Path) -> None:
    """Neither is ours, and neither is followed: what they point to stays."""
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / "kept").mkdir(parents=True)
    for name in ("to-directory", "to-nothing"):
        (store.state / "staging" / name).symlink_to(elsewhere if name == "to-directory" else tmp_path / "nothing")
    version = store.state / "versions" / ("f" * 64)
    version.symlink_to(elsewhere)
    (store.state / "pending" / version.name).write_bytes(b"")
    (store.state / "pending" / ("e" * 64)).mkdir()
    assert set(store.sweep(lambda: ())) == {"to-directory", "to-nothing"}
    assert list((store.state / "staging").iterdir()) == []
    assert version.is_symlink()
    assert (elsewhere / "kept").is_dir()


@contextlib.contextmanager
def as_somebody_else(state: Path) -> Iterator[None]:
    """Without the right to write `state`; root gives up its own for the time."""
    paths = [state, *state.rglob("*")]
    modes = {path: path.stat().st_mode for path in paths}
    for path in paths:
        path.chmod(0o555 if path.is_dir() else 0o444)
    before = os.geteuid()
    if before == 0:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(before)
        for path, mode in modes.items():
            path.chmod(mode)


def sweep(store: Store) -> object:
    return store.sweep(lambda: ())


def stage(store: Store) -> object:
    with store.staging() as opened:
        return opened


@pytest.mark.parametrize("use", [sweep, stage])
@pytest.mark.parametrize("has_lock", [True, False])
def test_a_state_directory_that_cannot_be_written_is_explained(
    use: Callable[[Store], object], *, has_lock: bool
) -> None:
    """Restored as another user, or mounted read-only: a StoreError that says what to do."""
    with tempfile.TemporaryDirectory() as outside:  # pytest's own directories are closed to other users
        Path(outside).chmod(0o755)
        store = Store(Path(outside) / "state")
        publish_files(store, FILES)
        (store.state / "staging" / "stale").mkdir()
        if not has_lock:
            (store.state / "lock").unlink()
        with as_somebody_else(store.state), pytest.raises(StoreError, match="Make it writable for this user"):
            use(store)


class ReadOnlyDisk(Disk):
    def rename(self, source: Path, target: Path) -> None:
        assert source != target
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(target))


def test_a_file_system_that_turns_read_only_is_explained(tmp_path: Path) -> None:
    """As Linux does after a fault of the disk, here while the files are published."""
    store = Store(tmp_path / "state", disk=ReadOnlyDisk())
    with pytest.raises(StoreError, match="Read-only file system"):
        publish_files(store, FILES)
    assert store.digests() == ()
