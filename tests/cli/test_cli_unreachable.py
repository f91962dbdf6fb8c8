"""Where no daemon answers: one line that says what to do, and exit code 69."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
from cli_support import Residentctl

from residentd.cli.exits import ExitCode

ADMIN = (("list",), ("status",), ("load", "toy"), ("unload", "toy"))
INFERENCE = (("generate", "hello"), ("count-tokens", "hello"), ("models",), ("bench",))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.parametrize("command", ADMIN, ids=" ".join)
def test_without_an_admin_socket(lonely_residentctl: Residentctl, state: Path, command: tuple[str, ...]) -> None:
    """The path that was looked for, and how to start a daemon or name another."""
    result = lonely_residentctl(*command, "--state", str(state))
    assert result.code == ExitCode.UNREACHABLE
    assert result.out == ""
    (line,) = result.err.splitlines()
    assert f"{state}/admin.sock" in line
    assert "residentctl serve --dev" in line


def test_a_socket_that_nobody_listens_on(lonely_residentctl: Residentctl, state: Path) -> None:
    """A daemon that was killed leaves its socket behind: that is not a daemon."""
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(state / "admin.sock"))
    result = lonely_residentctl("list", "--state", str(state))
    assert result.code == ExitCode.UNREACHABLE
    assert "Connection refused" in result.err


@pytest.mark.skipif(os.geteuid() == 0, reason="root may open every socket")
def test_a_socket_of_somebody_else(lonely_residentctl: Residentctl, state: Path) -> None:
    """No permission is said as such, with the group as the way out."""
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(state / "admin.sock"))
        listening.listen()
        (state / "admin.sock").chmod(0)
        result = lonely_residentctl("list", "--state", str(state))
    assert result.code == ExitCode.UNREACHABLE
    assert "group" in result.err


def test_a_socket_path_too_long(lonely_residentctl: Residentctl, tmp_path: Path) -> None:
    """A unix socket's path has a limit of the system, which is named."""
    result = lonely_residentctl("list", "--admin-socket", str(tmp_path / ("x" * 120)))
    assert result.code == ExitCode.UNREACHABLE
    assert "too long" in result.err


@pytest.mark.parametrize("command", INFERENCE, ids=" ".join)
def test_without_an_inference_service(lonely_residentctl: Residentctl, command: tuple[str, ...]) -> None:
    """The address that was tried; --json has the same as an object."""
    address = f"127.0.0.1:{_free_port()}"
    result = lonely_residentctl(*command, "--address", address)
    assert result.code == ExitCode.UNREACHABLE
    (line,) = result.err.splitlines()
    assert f"no daemon answers at {address} (Connection refused)" in line
    machine = lonely_residentctl("--json", *command, "--address", address)
    assert machine.document["error"]["exit_code"] == ExitCode.UNREACHABLE


@pytest.mark.parametrize("address", ["localhost", "box:", ":8470", "box:http", "box:0", "box:65536"])
def test_an_address_that_is_none(lonely_residentctl: Residentctl, address: str) -> None:
    """HOST:PORT is asked for before anything is tried: usage, not unreachable."""
    result = lonely_residentctl("models", "--address", address)
    assert result.code == ExitCode.USAGE
    assert "HOST:PORT" in result.err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("frobnicate",), "No such command 'frobnicate'"),
        (("generate",), "Missing argument 'PROMPT'"),
        (("generate", "x", "--top-k", "many"), "--top-k"),
        (("generate", "x", "--min-tokens", "-1"), "--min-tokens"),
        (("install", "."), "Missing option '--name'"),
        (("--config", "/nonexistent.toml", "list"), "/nonexistent.toml"),
        (("serve",), "add --dev"),
    ],
)
def test_usage_errors_are_one_line(lonely_residentctl: Residentctl, arguments: tuple[str, ...], said: str) -> None:
    """Exit code 2, nothing on stdout, and the way to the help or the fix."""
    result = lonely_residentctl(*arguments)
    assert result.code == ExitCode.USAGE
    assert result.out == ""
    (line,) = result.err.splitlines()
    assert said in line
