"""residentctl: a thin gRPC client of residentd. Imports almost nothing, so that Ctrl-C is quiet from the start."""

from __future__ import annotations

import importlib
import sys

INTERRUPTED = 130  # ExitCode.INTERRUPTED, before it can be imported


def main() -> None:
    """The entry point."""
    try:
        app = importlib.import_module("residentd.cli.app")
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    app.main()


if __name__ == "__main__":
    main()
