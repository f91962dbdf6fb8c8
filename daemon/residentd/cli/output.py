"""Where a command's output goes: the result to stdout, everything about it to stderr; JSON or for a person."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import struct
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import IO, Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from rich.console import Console
from rich.table import Table
from rich.text import Text

from residentd.cli.exits import Failure

PIPE_WIDTH = 160  # columns of a table that goes to a pipe or a file: wide enough that nothing is cut
_KEPT_CONTROLS = frozenset("\n\t")


@dataclass(frozen=True, slots=True)
class Output:
    """One command's stdout and stderr."""

    out: Console
    err: Console
    as_json: bool

    @property
    def interactive(self) -> bool:
        """A person watches: progress may be drawn over itself."""
        return self.err.is_terminal and not self.as_json

    def emit(self, value: Mapping[str, Any]) -> None:
        """Write one JSON document as one line, at once."""
        line = json.dumps(finite(value), ensure_ascii=False, separators=(", ", ": "))
        self.out.file.write(line + "\n")
        self.out.file.flush()

    def note(self, message: str) -> None:
        """One line for the person, on stderr."""
        self.say(Text(printable(message), style="dim"))

    def say(self, line: Text, *, end: str = "\n") -> None:
        """`line` on stderr, or nowhere if that cannot be written: the command's work and its exit code matter more."""
        with contextlib.suppress(OSError):
            print_line(self.err, line, end=end)

    def line(self, message: str) -> None:
        """One line of the result, on stdout."""
        print_line(self.out, Text(printable(message)))

    @contextlib.contextmanager
    def waiting(self, message: str) -> Iterator[None]:
        """A spinner on stderr while a person watches a call that may take long."""
        if not self.interactive:
            yield
            return
        with self.err.status(Text(printable(message))):
            yield

    def text(self, text: str) -> None:
        """A piece of an answer to stdout, at once; made harmless where a terminal would obey it."""
        self.out.file.write(printable(text) if self.out.is_terminal else text)
        self.out.file.flush()


def open_output(*, as_json: bool) -> Output:
    """Output over the process's own streams; colour and width as the terminal has them."""
    return Output(out=_console(sys.stdout), err=_console(sys.stderr), as_json=as_json)


class _Console(Console):
    """A Console that leaves a reader who has gone to its caller; rich would end the process, whatever its exit code."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


def _console(file: IO[str]) -> Console:
    piped_width = None if file.isatty() or "COLUMNS" in os.environ else PIPE_WIDTH
    return _Console(file=file, width=piped_width, markup=False, highlight=False, emoji=False)


def printable(text: str) -> str:
    """`text` with terminal control characters shown instead of obeyed: a model or a file name may contain any."""
    return "".join(
        character if character.isprintable() or character in _KEPT_CONTROLS else _shown(character) for character in text
    )


def _shown(character: str) -> str:
    code = ord(character)
    if code < 0x20:
        return chr(0x2400 + code)  # the Unicode control pictures
    if code == 0x7F or 0x80 <= code < 0xA0:
        return f"\\x{code:02x}"
    return character


def settle(stream: IO[str]) -> None:
    """Write out what `stream` still holds, or drop it where it cannot be written."""
    try:
        stream.flush()
    except OSError:
        discard(stream)


def discard(stream: IO[str]) -> None:
    """Send what `stream` still holds, and all that follows, nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def print_line(console: Console, line: Text, *, end: str = "\n") -> None:
    """`line`, wrapped at words for a person and left whole for a program."""
    console.print(line, soft_wrap=not console.is_terminal, end=end)


def report(output: Output, failure: Failure) -> None:
    """Print `failure`: a line (and its findings) on stderr, and the JSON object on stdout where JSON was asked for.

    As far as the two can be written: the exit code stays the failure's own.
    """
    if output.as_json:
        with contextlib.suppress(OSError):
            output.emit({"error": failure.to_json()})
    line = Text("residentctl: ", style="bold red").append(printable(failure.message), style="default not bold")
    if failure.retry_after_ms is not None:
        line.append(f" (try again in {_seconds(failure.retry_after_ms)})", style="default not bold")
    output.say(line)
    for number, problem in enumerate(failure.problems, start=1):
        entry = Text(printable(problem.where), style="bold")
        entry.append(f"{': ' if problem.where else ''}{printable(problem.text)}", style="not bold")
        _say_numbered(output, number, entry)


def _say_numbered(output: Output, number: int, entry: Text) -> None:
    if not output.err.is_terminal:
        output.say(Text(f"  {number}. ").append_text(entry))
        return
    grid = Table.grid(padding=(0, 1, 0, 0))
    grid.add_row(f"{number:>3}.", entry)
    with contextlib.suppress(OSError):
        output.err.print(grid)


def _seconds(milliseconds: int) -> str:
    return f"{milliseconds} ms" if milliseconds < 1000 else f"{milliseconds / 1000:.3g} s"


def finite(value: Any) -> Any:
    """`value` with NaN and infinities, which JSON does not have, as null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


def fields_of(message: Message) -> dict[str, Any]:
    """A protobuf message as plain values under its own field names: 64-bit integers stay numbers, unset parts go."""
    plain: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        if field.has_presence and not message.HasField(field.name):
            continue
        value = getattr(message, field.name)
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            values = field.message_type.fields_by_name["value"]
            plain[field.name] = {str(key): _plain(item, values) for key, item in sorted(value.items())}
        elif field.is_repeated:
            plain[field.name] = [_plain(item, field) for item in value]
        else:
            plain[field.name] = _plain(value, field)
    return plain


def _plain(value: Any, field: Any) -> Any:  # a FieldDescriptor of either protobuf runtime
    if isinstance(value, Message):
        return fields_of(value)
    if field.enum_type is not None:
        return field.enum_type.values_by_number[value].name
    if field.cpp_type == FieldDescriptor.CPPTYPE_FLOAT:
        return _shortest(value)
    return value


def _shortest(value: float) -> float:
    """The shortest decimal that is the same float32: 0.7, not 0.699999988079071."""
    if not math.isfinite(value):
        return value
    return next(
        short
        for digits in range(6, 10)
        if struct.pack("f", short := float(f"{value:.{digits}g}")) == struct.pack("f", value)
    )
