"""Read what a source directory holds, and nothing that it points to.

Every file is opened relative to the directory's own descriptor, one path component at a time and never through a link,
and is judged by its descriptor. What was judged is what is read or mapped: nothing is opened twice by name.
"""

from __future__ import annotations

import errno
import itertools
import mmap
import os
import stat
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from types import TracebackType

LINK_HINT = "Copy the directory with `cp -rL`, which replaces links by what they point to"
PATH_CHARACTERS_MAX = 1024
NAMES_MAX = 10_000  # of one folder: a model in a file a tensor has some thousands


class RefusedError(Exception):
    """The file is not one to read. The text is a clause about it; `remedy` says what to do."""

    def __init__(self, what: str, remedy: str) -> None:
        super().__init__(what)
        self.what = what
        self.remedy = remedy


class MissingError(RefusedError):
    """There is no such file."""


class SourceDirectory:
    """An open directory. Use as a context manager."""

    def __init__(self, path: Path) -> None:
        """Raises RefusedError if `path` is not a readable directory."""
        self.path = path
        try:
            self._descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        except OSError as error:
            raise RefusedError(
                f"is not a readable directory ({error.strerror})", "Name the directory that the exporter wrote"
            ) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _type: type[BaseException] | None, _value: BaseException | None, _traceback: TracebackType | None
    ) -> None:
        os.close(self._descriptor)

    def read(self, name: str, *, bytes_max: int) -> bytes:
        """The whole of a regular file. Raises RefusedError, MissingError if there is none."""
        with os.fdopen(self._open(name), "rb") as file:
            _check_size(os.fstat(file.fileno()), bytes_max)
            return file.read(bytes_max)

    def names(self, folder: str) -> list[str]:
        """Names in `folder`, a path below the directory or "", in no order; none if there is no such folder."""
        parts = _parts(folder) if folder else ()
        descriptor = os.dup(self._descriptor)
        try:
            for part in parts:
                below = _open_component(descriptor, part, os.O_DIRECTORY)
                os.close(descriptor)
                descriptor = below
            with os.scandir(descriptor) as entries:
                return [entry.name for entry in itertools.islice(entries, NAMES_MAX)]
        except RefusedError:
            return []
        finally:
            os.close(descriptor)

    def map(self, name: str, *, bytes_max: int) -> mmap.mmap:
        """A read-only mapping of a regular file that has one name only. Raises RefusedError, MissingError."""
        descriptor = self._open(name)
        try:
            status = os.fstat(descriptor)
            if status.st_nlink != 1:
                raise RefusedError(
                    f"has {status.st_nlink} names (hard links), so it may be a file from elsewhere",
                    "Copy the directory, which gives the file one name",
                )
            if status.st_size == 0:
                raise RefusedError("is empty", "Export the model again, or copy it completely")
            _check_size(status, bytes_max)
            return mmap.mmap(descriptor, 0, prot=mmap.PROT_READ)
        finally:
            os.close(descriptor)

    def _open(self, name: str) -> int:
        parts = _parts(name)
        parents: list[int] = []
        try:
            directory = self._descriptor
            for part in parts[:-1]:
                directory = _open_component(directory, part, os.O_DIRECTORY)
                parents.append(directory)
            # O_NONBLOCK: opening a pipe must not wait for its writer.
            descriptor = _open_component(directory, parts[-1], os.O_NONBLOCK)
        finally:
            for parent in parents:
                os.close(parent)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise RefusedError("is not a regular file", LINK_HINT)
        return descriptor


def _check_size(status: os.stat_result, bytes_max: int) -> None:
    if status.st_size > bytes_max:
        raise RefusedError(
            f"has {status.st_size:,} bytes; at most {bytes_max:,} are read", "Check that this is the exporter's file"
        )


def _parts(name: str) -> tuple[str, ...]:
    path = PurePosixPath(name)
    remedy = "Move the file into the directory and export, or save, the model again"
    if not name or "\0" in name or len(name) > PATH_CHARACTERS_MAX:
        raise RefusedError("is not a usable file name", remedy)
    if path.is_absolute():
        raise RefusedError("is an absolute path", remedy)
    if ".." in path.parts:
        raise RefusedError("leaves the directory (..)", remedy)
    return path.parts


def _open_component(directory: int, name: str, flags: int) -> int:
    try:
        return os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | flags, dir_fd=directory)
    except FileNotFoundError as error:
        raise MissingError("is missing", "Export the model again, or copy it completely") from error
    except OSError as error:
        # O_NOFOLLOW answers ELOOP for a link, with O_DIRECTORY it answers ENOTDIR (open(2)).
        if error.errno in {errno.ELOOP, errno.ENOTDIR}:
            raise RefusedError("is, or lies behind, a symbolic link", LINK_HINT) from error
        raise RefusedError(f"cannot be opened ({error.strerror})", "Make it readable for this user") from error
