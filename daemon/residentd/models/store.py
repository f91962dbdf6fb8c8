"""Directories of whole versions, published atomically.

<state>/versions/<digest>/    manifest.json and the files that it lists; the name appears only when all of it is on disk
<state>/staging/<random>/     work in progress; its owner holds a flock on the directory while it lives
<state>/pending/<digest>      an empty file: this version was published, and may not have been registered
<state>/lock                  flock: one process at a time creates, publishes or sweeps
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from residentd.errors import ConflictError, NotFoundError, StoreError
from residentd.models.manifest import MANIFEST_BYTES_MAX, File, Manifest, content_digest, decode, encode

MANIFEST_NAME = "manifest.json"
FILE_MODE = 0o640
DIRECTORY_MODE = 0o750
FILES_MAX = 1024
LOCK_WAIT_S_MAX = 30.0
LOCK_POLL_S = 0.02
HASH_CHUNK_BYTES = 1 << 20
DIGEST_PATTERN = re.compile(r"^[0-9a-f]{64}$")


class Disk:
    """Every write that an atomic publish depends on. Tests subclass it to stop between any two of them."""

    def make_directory(self, path: Path) -> None:
        path.mkdir(mode=0o700)
        path.chmod(DIRECTORY_MODE)  # mkdir's mode passes through the umask; chmod's does not

    def write(self, path: Path, data: bytes) -> None:
        path.write_bytes(data)

    def chmod(self, path: Path, mode: int) -> None:
        path.chmod(mode)

    def sync(self, path: Path) -> None:
        """Make a file's content, or a directory's names, survive a power cut."""
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def rename(self, source: Path, target: Path) -> None:
        source.rename(target)

    def remove_tree(self, path: Path) -> None:
        shutil.rmtree(path)


@dataclass(frozen=True, slots=True)
class Stage:
    """A private directory to build a version in. Removed when its context ends, unless it was published.

    Its context keeps it, and the version that it becomes, from `sweep`: register the version before it ends.
    """

    path: Path
    held: contextlib.ExitStack


class Store:
    """The versions under one state directory. Safe to open from several processes; holds nothing open between calls."""

    def __init__(self, state: Path, *, disk: Disk | None = None) -> None:
        self.state = state
        self._disk = disk or Disk()
        self._versions = state / "versions"
        self._staging = state / "staging"
        self._pending = state / "pending"
        try:
            for directory in (state, self._versions, self._staging, self._pending):
                if not directory.is_dir():
                    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
                    directory.chmod(DIRECTORY_MODE)
        except OSError as error:
            raise StoreError(
                f"the state directory {state} cannot be prepared ({error.strerror}). Make it writable for this user"
            ) from error

    def digests(self) -> tuple[str, ...]:
        """Every published version, damaged ones included, in a stable order."""
        names = (entry.name for entry in self._versions.iterdir() if (entry / MANIFEST_NAME).is_file())
        return tuple(sorted(name for name in names if DIGEST_PATTERN.fullmatch(name)))

    def check_room(self, needed_bytes: int) -> None:
        """Raise StoreError with the arithmetic when the file system has less than `needed_bytes` left for this user."""
        free_bytes = shutil.disk_usage(self.state).free
        if needed_bytes > free_bytes:
            raise StoreError(_no_room(needed_bytes, free_bytes))

    @contextlib.contextmanager
    def staging(self) -> Iterator[Stage]:
        """A new private directory, locked against `sweep` while this process lives.

        A full disk met anywhere inside the context comes out as StoreError.
        """
        with contextlib.ExitStack() as held:
            with self._writing():
                path = self._staging / secrets.token_hex(8)
                self._disk.make_directory(path)
                held.enter_context(_holding(path))
            try:
                with _explaining_full_disk(self.state):
                    yield Stage(path, held)
            finally:
                if path.is_dir():
                    with _explaining(self.state):
                        self._disk.remove_tree(path)

    def publish(self, stage: Stage, manifest: Manifest) -> Path:
        """Turn a stage that holds exactly the manifest's files into a version; return its directory.

        Idempotent: a whole version of that digest is kept as it is, a damaged one is replaced. Files first, then the
        manifest, then the directory's name, each on disk before the next. Raises StoreError.
        """
        if content_digest(manifest.content) != manifest.digest:
            raise StoreError("the manifest does not match its digest; nothing was published. Build the version again")
        _check_stage(stage.path, manifest)
        with _explaining(self.state):
            self._seal(stage.path, manifest)
            with self._writing():
                target = self._move_in(stage.path, manifest.digest)
                stage.held.enter_context(_holding(target))
                return target

    def load(self, digest: str) -> tuple[Manifest, Path]:
        """The manifest and directory of a version whose files are all present at their recorded sizes.

        Raises NotFoundError, or StoreError naming the first file that is missing or has another size.
        """
        directory = self._versions / digest
        if not DIGEST_PATTERN.fullmatch(digest) or not directory.is_dir():
            raise NotFoundError(f"version {digest[:12]} is not in the store. List versions, or install it again")
        manifest = _read_manifest(directory / MANIFEST_NAME, digest)
        for name, file in manifest.content.files.items():
            _check_size(directory, name, file, digest)
        return manifest, directory

    def verify_files(self, digest: str) -> Manifest:
        """`load`, and compare every file's SHA-256. Raises StoreError naming the damaged file."""
        manifest, directory = self.load(digest)
        for name, file in manifest.content.files.items():
            if file_sha256(directory / name) != file.sha256:
                raise StoreError(
                    f"version {digest[:12]}: {name} is damaged (SHA-256 differs). Install the version again"
                )
        return manifest

    def sweep(self, registered: Callable[[], Collection[str]] | None = None) -> tuple[str, ...]:
        """Remove stages without a living owner, and version directories without a manifest; return their names.

        With `registered`, which gives the digests that the registry names, also versions that a build published and
        did not live to register.
        """
        with self._writing():
            if registered is not None:
                self._put_away_unregistered(registered)
            stale = [path for path in sorted(self._staging.iterdir()) if path.is_symlink() or _is_ownerless(path)]
            stale += [path for path in sorted(self._versions.iterdir()) if _is_incomplete(path)]
            for path in stale:
                self._remove(path)
        return tuple(path.name for path in stale)

    def _remove(self, path: Path) -> None:
        with contextlib.suppress(FileNotFoundError):  # whoever else removes it has the same in mind
            if path.is_symlink():
                path.unlink()
            else:
                self._disk.remove_tree(path)

    def _put_away_unregistered(self, registered: Callable[[], Collection[str]]) -> None:
        """Move them among the stages that nobody owns.

        Only versions that are pending: were the registry lost, what it had named must not be lost with it.
        """
        marks = [path for path in sorted(self._pending.iterdir()) if DIGEST_PATTERN.fullmatch(path.name)]
        marks = [mark for mark in marks if mark.is_file() or mark.is_symlink()]
        free = [mark for mark in marks if not self._is_held(mark.name)]
        # Asked after the locks were looked at: who let go in between has registered, or never will.
        named = frozenset(registered()) if free else frozenset()
        for mark in free:
            version = self._versions / mark.name
            if mark.name not in named and _is_own_directory(version):
                self._disk.rename(version, self._staging / f"unregistered-{secrets.token_hex(8)}")
                self._disk.sync(self._versions)
            mark.unlink()

    def _is_held(self, digest: str) -> bool:
        version = self._versions / digest
        return _is_own_directory(version) and not _is_ownerless(version)

    def _seal(self, stage: Path, manifest: Manifest) -> None:
        directories = {stage}
        for name in manifest.content.files:
            path = stage / name
            self._disk.chmod(path, FILE_MODE)
            self._disk.sync(path)
            directories.update(parent for parent in path.parents if stage in parent.parents)
        for directory in sorted(directories, reverse=True):
            self._disk.chmod(directory, DIRECTORY_MODE)
            self._disk.sync(directory)
        temporary = stage / f"{MANIFEST_NAME}.tmp"
        self._disk.write(temporary, encode(manifest))
        self._disk.chmod(temporary, FILE_MODE)
        self._disk.sync(temporary)
        self._disk.rename(temporary, stage / MANIFEST_NAME)
        self._disk.sync(stage)

    def _move_in(self, stage: Path, digest: str) -> Path:
        target = self._versions / digest
        if target.is_dir():
            try:
                self.verify_files(digest)
            except StoreError:
                # Its files may be mapped by a running worker: moved aside, they live on until it ends.
                self._disk.rename(target, self._staging / f"damaged-{secrets.token_hex(8)}")
            else:
                return target
        self._disk.write(self._pending / digest, b"")
        self._disk.sync(self._pending)
        self._disk.rename(stage, target)
        self._disk.sync(self._versions)
        return target

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """One writer at a time, across processes. Raises ConflictError after LOCK_WAIT_S_MAX.

        What the file system refuses inside comes out as StoreError.
        """
        with _explaining(self.state):
            fd = os.open(self.state / "lock", os.O_RDWR | os.O_CREAT, FILE_MODE)
            try:
                _lock_bounded(fd)
                yield
            finally:
                os.close(fd)


def file_sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(HASH_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def measure_files(directory: Path) -> dict[str, File]:
    """Every file under `directory`, by its POSIX path relative to it: what `Content.files` holds.

    Raises StoreError for a link or special file, and above FILES_MAX files.
    """
    files: dict[str, File] = {}
    for path in sorted(_walk(directory)):
        files[path.relative_to(directory).as_posix()] = File(sha256=file_sha256(path), bytes=path.stat().st_size)
    return files


def _walk(directory: Path) -> Iterator[Path]:
    found = 0
    for path in directory.rglob("*"):
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            raise StoreError(
                f"{path.relative_to(directory)} is a link or special file; a version holds plain files only"
            )
        if path.is_dir():
            continue
        found += 1
        if found > FILES_MAX:
            raise StoreError(f"a version holds at most {FILES_MAX} files; this one has more")
        yield path


def _check_stage(stage: Path, manifest: Manifest) -> None:
    expected = manifest.content.files
    for name in expected:
        _check_name(name)
    present = measure_files(stage)
    present.pop(MANIFEST_NAME, None)  # left by an interrupted publish of this very stage
    present.pop(f"{MANIFEST_NAME}.tmp", None)
    for name in sorted(expected.keys() | present.keys()):
        if name not in present:
            raise StoreError(f"{name} is in the manifest and not in the stage; nothing was published")
        if name not in expected:
            raise StoreError(f"{name} is in the stage and not in the manifest; nothing was published")
        if present[name] != expected[name]:
            raise StoreError(
                f"{name} has {present[name].bytes:,} bytes, SHA-256 {present[name].sha256[:12]}; the manifest says "
                f"{expected[name].bytes:,} bytes, {expected[name].sha256[:12]}. Nothing was published; build it again"
            )


def _check_name(name: str) -> None:
    path = PurePosixPath(name)
    if not name or path.is_absolute() or ".." in path.parts or path.as_posix() != name or "\0" in name:
        raise StoreError(
            f"file name {name!r} in the manifest leaves the version's directory. Install the version again"
        )
    if path.parts[0] in {MANIFEST_NAME, f"{MANIFEST_NAME}.tmp"}:
        raise StoreError(f"file name {name!r} in the manifest is the manifest's own. Build the version again")


def _read_manifest(path: Path, digest: str) -> Manifest:
    try:
        with path.open("rb") as file:
            manifest = decode(file.read(MANIFEST_BYTES_MAX + 1))
    except OSError as error:
        raise StoreError(
            f"version {digest[:12]}: the manifest cannot be read ({error.strerror}). Install the version again"
        ) from error
    if manifest.digest != digest:
        raise StoreError(
            f"version {digest[:12]} carries the manifest of {manifest.digest[:12]}. Install the version again"
        )
    return manifest


def _check_size(directory: Path, name: str, file: File, digest: str) -> None:
    _check_name(name)
    path = directory / name
    if path.is_symlink() or not path.is_file():
        raise StoreError(f"version {digest[:12]}: {name} is missing. Install the version again")
    if path.stat().st_size != file.bytes:
        raise StoreError(
            f"version {digest[:12]}: {name} has {path.stat().st_size:,} bytes instead of {file.bytes:,}. "
            "Install the version again"
        )


@contextlib.contextmanager
def _holding(directory: Path) -> Iterator[None]:
    """Keep `sweep` from `directory`, wherever it is moved. Several may hold one: two builds of the same version."""
    owner = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(owner, fcntl.LOCK_SH | fcntl.LOCK_NB)  # sweep asks for its own under the store's lock, as we do
        yield
    finally:
        os.close(owner)


def _is_own_directory(path: Path) -> bool:
    """A link to a directory is not ours: somebody put it there, and nothing behind it is touched."""
    return path.is_dir() and not path.is_symlink()


def _is_ownerless(stage: Path) -> bool:
    """Whether `stage` is a directory that no living process holds."""
    try:
        fd = os.open(stage, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except (FileNotFoundError, NotADirectoryError):  # its owner has just removed it; or it never was a stage
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    else:
        return True
    finally:
        os.close(fd)


def _is_incomplete(path: Path) -> bool:
    is_version = _is_own_directory(path) and DIGEST_PATTERN.fullmatch(path.name) is not None
    return is_version and not (path / MANIFEST_NAME).is_file()


def _lock_bounded(fd: int) -> None:
    give_up = time.monotonic() + LOCK_WAIT_S_MAX
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > give_up:
                raise ConflictError(
                    f"another process has been writing the store for {LOCK_WAIT_S_MAX:.0f} s. Try again when it is done"
                ) from None
            time.sleep(LOCK_POLL_S)
        else:
            return


def _no_room(needed_bytes: int, free_bytes: int) -> str:
    return (
        f"the version needs {needed_bytes:,} bytes more and the state file system has {free_bytes:,} free "
        f"({needed_bytes - free_bytes:,} short). Free some, or choose another state directory"
    )


@contextlib.contextmanager
def _explaining_full_disk(directory: Path) -> Iterator[None]:
    """Turn "no space left" from anywhere inside into a StoreError; other errors pass."""
    try:
        yield
    except OSError as error:
        if error.errno not in {errno.ENOSPC, errno.EDQUOT}:
            raise
        raise StoreError(
            f"the state file system or its quota is full ({shutil.disk_usage(directory).free:,} bytes free); nothing "
            "was published. Free some, or choose another state directory"
        ) from error


@contextlib.contextmanager
def _explaining(directory: Path) -> Iterator[None]:
    """Turn what the file system refuses of our own operations into a StoreError."""
    try:
        with _explaining_full_disk(directory):
            yield
    except OSError as error:
        raise StoreError(
            f"the state directory {directory} cannot be changed ({error.strerror}, at {error.filename}). "
            "Make it writable for this user, with all that is in it"
        ) from error
