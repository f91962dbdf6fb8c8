"""residentctl: a thin gRPC client of residentd. Imports almost nothing, so that Ctrl-C is quiet from the start."""

from __future__ import annotations

import importlib
import os
import sys

INTERRUPTED = 130  # ExitCode.INTERRUPTED, before it can be imported


def main() -> None:
    """The entry point."""
    _fill_closed_streams()
    try:
        app = importlib.import_module("residentd.cli.app")
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    app.main()


def _fill_closed_streams() -> None:
    """Open what the caller has closed (`<&-`), or a socket would get its number and what is printed.

    What reads stdin or writes stdout then fails as such, with EBADF; what is said on a closed stderr goes nowhere.
    """
    if sys.stdin is None:
        sys.stdin = os.fdopen(_null(os.O_WRONLY), encoding="utf-8")
    if sys.stdout is None:
        sys.stdout = os.fdopen(_null(os.O_RDONLY), "w", encoding="utf-8")
    if sys.stderr is None:
        sys.stderr = os.fdopen(_null(os.O_WRONLY), "w", encoding="utf-8")


def _null(flags: int) -> int:
    descriptor = os.open(os.devnull, flags)  # the lowest that is free: the closed stream's own
    os.set_inheritable(descriptor, True)
    return descriptor


if __name__ == "__main__":
    main()
