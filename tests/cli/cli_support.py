"""residentctl as a function of its arguments, for tests."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from residentd.cli.app import run


@dataclass(frozen=True)
class Result:
    """How one command ended."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        """The one JSON document on stdout."""
        (line,) = self.out.splitlines()
        return json.loads(line)

    @property
    def events(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.out.splitlines()]


class Residentctl:
    """residentctl in this process, its state directory given."""

    def __init__(self, capture: pytest.CaptureFixture[str], state: Path | None) -> None:
        self._capture = capture
        self._state = state

    def __call__(self, *arguments: str) -> Result:
        before = ["--state", str(self._state)] if self._state else []
        self._capture.readouterr()
        code = run([*before, *arguments])
        captured = self._capture.readouterr()
        return Result(int(code), captured.out, captured.err)
