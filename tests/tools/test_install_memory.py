"""The memory that an install takes, measured as an operator would."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).resolve().parent.parent.parent / "tools"
GIB = "3"


@pytest.mark.slow
def test_an_install_of_3_gib_takes_little_memory(tmp_path: Path) -> None:
    """At most 1.5 times the largest tensor and 300 MiB, and every stage says how far it is."""
    export = tmp_path / "export"
    subprocess.run([sys.executable, TOOLS / "make_synthetic_export.py", export, "--gib", GIB], check=True)
    command = [sys.executable, TOOLS / "install_memory.py", export, "--state", tmp_path / "state"]
    result = subprocess.run(command, check=False, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
