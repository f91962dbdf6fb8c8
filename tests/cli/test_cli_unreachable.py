"""Where no daemon answers: one line that says what to do, and exit code 69."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from cli_support import Residentctl
from cli_terminal import unprivileged

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


def test_a_socket_of_somebody_else(state: Path) -> None:
    """No permission is said as such, with the group as the way out."""
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(state / "admin.sock"))
        listening.listen()
        (state / "admin.sock").chmod(0)
        state.chmod(0o755)
        code, said = unprivileged("list", "--state", str(state))
    assert code == ExitCode.UNREACHABLE
    (line,) = said.splitlines()
    assert f"you may not open the admin socket {state}/admin.sock" in line
    assert "group" in line


def test_a_state_directory_of_somebody_else(state: Path) -> None:
    """A user whom the daemon's directory is closed to is served on TCP, where the configuration says."""
    state.chmod(0)
    path = state.with_suffix(".toml")
    address = f"127.0.0.1:{_free_port()}"
    path.write_text(f'state = "{state}"\n[listen]\ngrpc = "{address}"\n')
    try:
        code, said = unprivileged("models", "--config", str(path))
    finally:
        path.unlink()
        state.chmod(0o700)
    assert code == ExitCode.UNREACHABLE
    assert f"no daemon answers at {address} (Connection refused)" in said


@pytest.mark.parametrize("command", INFERENCE, ids=" ".join)
@pytest.mark.parametrize("named", ["--state", "--config"])
def test_the_default_port_is_not_the_named_daemon(
    lonely_residentctl: Residentctl, state: Path, named: str, command: tuple[str, ...]
) -> None:
    """Where the daemon over a named state is down, whatever listens on its configured port is left alone."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        other.setblocking(False)
        (state / "dev.toml").write_text(f'state = "{state}"\n[listen]\ngrpc = "127.0.0.1:{other.getsockname()[1]}"\n')
        result = lonely_residentctl(*command, named, str(state if named == "--state" else state / "dev.toml"))
        with pytest.raises(BlockingIOError):
            other.accept()
    assert result.code == ExitCode.UNREACHABLE
    (line,) = result.err.splitlines()
    assert f"no daemon: there is no admin socket {state}/admin.sock" in line
    assert "--address" in line


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
    for with_json in (("--json", *arguments), (*arguments, "--json")):
        error = lonely_residentctl(*with_json).document["error"]
        assert said in error["message"]
        assert error["exit_code"] == ExitCode.USAGE


def test_json_behind_two_dashes_is_no_option(lonely_residentctl: Residentctl) -> None:
    """An argument that looks like the option changes nothing."""
    result = lonely_residentctl("count-tokens", "--bogus", "--", "--json")
    assert (result.code, result.out) == (ExitCode.USAGE, "")
