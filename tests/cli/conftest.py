from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_fake_daemon import FakeDaemon, Running, start
from cli_support import Residentctl


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No configuration of the machine or its user leaks into a test."""
    for name in ("RESIDENTD_CONFIG", "XDG_STATE_HOME", "FORCE_COLOR", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr("residentd.cli.target.SYSTEM_CONFIG", tmp_path / "no-system-config.toml")


@pytest.fixture
def state() -> Iterator[Path]:
    """A state directory with a short path: a unix socket's has 107 bytes at most."""
    path = Path(tempfile.mkdtemp(prefix="cli"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def running(state: Path) -> Iterator[Running]:
    listening, server = start(state, FakeDaemon())
    yield listening
    listening.daemon.cancelled.set()
    server.stop(None).wait()


@pytest.fixture
def residentctl(running: Running, capsys: pytest.CaptureFixture[str]) -> Residentctl:
    """residentctl beside a daemon that listens."""
    return Residentctl(capsys, running.state)


@pytest.fixture
def lonely_residentctl(capsys: pytest.CaptureFixture[str]) -> Residentctl:
    """residentctl where nothing is said about a daemon."""
    return Residentctl(capsys, None)
