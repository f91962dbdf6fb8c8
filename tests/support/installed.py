"""Compile an export into a state directory, as an operator does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

EXPORTS = Path(__file__).resolve().parent.parent / "fixtures" / "exports"


def install(source: Path, state: Path, name: str, *options: str) -> None:
    command = [sys.executable, "-m", "residentd_build", source, "--state", state, "--name", name, *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
