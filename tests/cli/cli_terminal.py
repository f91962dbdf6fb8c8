"""residentctl in a process of its own: on a pseudo-terminal with a person's keys, or on pipes."""

from __future__ import annotations

import errno
import fcntl
import os
import pty
import select
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

WAIT_S_MAX = 20.0
RETYPE_S = 1.0  # long after a key has been answered, on a busy machine as well
NOBODY = 65534
CONTROL_C = "\x03"
CONTROL_D = "\x04"
# Takes the terminal as its controlling one, so that Ctrl-C becomes SIGINT, and turns into residentctl.
_IN_TERMINAL = (
    "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
    "os.execv(sys.executable, [sys.executable, '-m', 'residentd.cli.main', *sys.argv[1:]])"
)


class Terminal:
    """One command on a pseudo-terminal of `columns`; everything it prints is in `shown`."""

    def __init__(self, *arguments: str, columns: int = 80, environment: dict[str, str] | None = None) -> None:
        self._fd, inner = pty.openpty()
        fcntl.ioctl(inner, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
        self._process = subprocess.Popen(
            [sys.executable, "-c", _IN_TERMINAL, *arguments],
            stdin=inner,
            stdout=inner,
            stderr=inner,
            start_new_session=True,
            env={**_without_columns(), "TERM": "xterm", **(environment or {})},
        )
        os.close(inner)
        self.shown = ""

    def wait_for(self, text: str, *, times: int = 1) -> None:
        """Read until `text` has been printed `times` times since the start."""
        end = time.monotonic() + WAIT_S_MAX
        while self.shown.count(text) < times:
            assert time.monotonic() < end, f"{text!r} was not printed within {WAIT_S_MAX} s: {self.shown!r}"
            assert self._read(), f"the command ended before it printed {text!r}: {self.shown!r}"

    def type(self, keys: str) -> None:
        os.write(self._fd, keys.encode())

    def type_until(self, keys: str, text: str, *, times: int = 1) -> None:
        """Type `keys`, again if need be, until `text` has been printed `times` times.

        For Ctrl-C at a prompt: CPython's input() misses a signal between the prompt and its select(), until the next.
        """
        end = time.monotonic() + WAIT_S_MAX
        while self.shown.count(text) < times:
            assert time.monotonic() < end, f"{text!r} was not printed within {WAIT_S_MAX} s: {self.shown!r}"
            self.type(keys)
            typed_s = time.monotonic()
            while self.shown.count(text) < times and time.monotonic() < typed_s + RETYPE_S:
                assert self._read(), f"the command ended before it printed {text!r}: {self.shown!r}"

    def wait(self) -> int:
        """Read to the end; the exit code."""
        end = time.monotonic() + WAIT_S_MAX
        while self._read():
            assert time.monotonic() < end, f"the command did not end within {WAIT_S_MAX} s: {self.shown!r}"
        os.close(self._fd)
        return self._process.wait(WAIT_S_MAX)

    def _read(self) -> bool:
        """Take what is there within a tenth of a second; False once the other end is closed."""
        readable, _, _ = select.select([self._fd], [], [], 0.1)
        if not readable:
            return True
        try:
            data = os.read(self._fd, 1 << 16)
        except OSError as error:
            if error.errno == errno.EIO:  # Linux: every holder of the other end has gone
                return False
            raise
        self.shown += data.decode(errors="replace")
        return bool(data)


def piped(*arguments: str, environment: dict[str, str] | None = None) -> subprocess.Popen[bytes]:
    """residentctl with its output on pipes."""
    return subprocess.Popen(
        [sys.executable, "-m", "residentd.cli.main", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**_without_columns(), **(environment or {})},
    )


def redirected(redirections: str, *arguments: str) -> subprocess.CompletedProcess[bytes]:
    """residentctl behind the shell's `redirections`, such as `<&- >/dev/full`; what is not redirected is captured."""
    words = ["sh", "-c", f'exec "$@" {redirections}', "sh", sys.executable, "-m", "residentd.cli.main", *arguments]
    return subprocess.run(words, check=False, capture_output=True, timeout=WAIT_S_MAX, env=_without_columns())


# All that it imports is imported before it gives up its rights: the interpreter may lie where only root can read.
_UNPRIVILEGED = f"""
import os, sys
from residentd.cli.app import run
run(["list", "--state", "/nonexistent"])
run(["models", "--address", "127.0.0.1:1"])
print("--", file=sys.stderr, flush=True)
if os.geteuid() == 0:
    os.setgroups([])
    os.setgid({NOBODY})
    os.setuid({NOBODY})
sys.exit(run(sys.argv[1:]))
"""


def unprivileged(*arguments: str) -> tuple[int, str]:
    """Exit code and stderr of residentctl as a user whom permissions bind, whoever runs the tests."""
    words = [sys.executable, "-c", _UNPRIVILEGED, *arguments]
    ended = subprocess.run(words, check=False, capture_output=True, text=True, timeout=WAIT_S_MAX)
    return ended.returncode, ended.stderr.partition("--\n")[2]


def module_directory(parent: Path, name: str, main: str) -> Path:
    """A directory for PYTHONPATH in which `python -m name` runs the source `main`."""
    package = parent / "modules" / name
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "__main__.py").write_text(main)
    return package.parent


def _without_columns() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in {"COLUMNS", "LINES", "NO_COLOR"}}
