"""How a command ends: the exit codes, and the one exception that carries what to print."""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType


class ExitCode(enum.IntEnum):
    """69 and 75 are EX_UNAVAILABLE and EX_TEMPFAIL of sysexits.h; 130 is what a shell reports for SIGINT."""

    OK = 0
    FAILED = 1
    USAGE = 2
    SOURCE_REFUSED = 3
    ACCURACY = 4
    MACHINE = 5
    UNREACHABLE = 69
    OVERLOADED = 75
    INTERRUPTED = 130


EXIT_MEANINGS: Mapping[ExitCode, str] = MappingProxyType(
    {
        ExitCode.OK: "done",
        ExitCode.FAILED: "failed; the message says why",
        ExitCode.USAGE: "the command or the request is wrong, and would be wrong again",
        ExitCode.SOURCE_REFUSED: "install: the source is refused; every finding is listed",
        ExitCode.ACCURACY: "the engine does not reproduce its export, or what was recorded of it",
        ExitCode.MACHINE: "the machine lacks memory, disk or a library",
        ExitCode.UNREACHABLE: "no daemon answers there",
        ExitCode.OVERLOADED: "no room just now; try again later",
        ExitCode.INTERRUPTED: "interrupted by Ctrl-C",
    }
)


def exit_code_table() -> str:
    """One line for each code, for --help."""
    return "\n".join(f"{code.value:>5}  {meaning}" for code, meaning in EXIT_MEANINGS.items())


@dataclass(frozen=True, slots=True)
class Problem:
    """One finding against a source or a request, as the daemon or the builder reports it."""

    where: str
    text: str  # what is wrong, and the way out


class Failure(Exception):  # noqa: N818 - a command's outcome; "Error" is what the other side reports
    """A command that cannot go on: what to print, and how to exit."""

    def __init__(
        self,
        message: str,
        *,
        code: ExitCode = ExitCode.FAILED,
        problems: tuple[Problem, ...] = (),
        retry_after_ms: int | None = None,
        status: str = "",
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.problems = problems
        self.retry_after_ms = retry_after_ms
        self.status = status  # the gRPC status name, where one was received

    def to_json(self) -> dict[str, object]:
        """The object that --json prints."""
        error: dict[str, object] = {"message": self.message, "exit_code": int(self.code)}
        if self.status:
            error["status"] = self.status
        if self.problems:
            error["findings"] = [{"where": problem.where, "text": problem.text} for problem in self.problems]
        if self.retry_after_ms is not None:
            error["retry_after_ms"] = self.retry_after_ms
        return error


def usage(message: str) -> Failure:
    """A Failure with exit code 2."""
    return Failure(message, code=ExitCode.USAGE)


@contextlib.contextmanager
def reading_stdin() -> Iterator[None]:
    """Turn an error of reading stdin, which may be closed or a directory, into a Failure (usage)."""
    try:
        yield
    except OSError as error:
        raise usage(f"stdin cannot be read: {error.strerror}. Redirect a file or a pipe to it") from error
