"""serve --dev: the configuration it writes, and the daemon that it becomes."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import pytest
from cli_support import Residentctl
from cli_terminal import WAIT_S_MAX, piped
from hypothesis import given
from hypothesis import strategies as st

from residentd.cli.exits import ExitCode, Failure
from residentd.cli.serve import config_text
from residentd.config import parse


def _text(state: Path, **changes: object) -> str:
    values: dict[str, object] = {"listen": "127.0.0.1:0", "models": [], "scheduling": "throughput", "threads": 0}
    return config_text(state, **{**values, **changes})  # type: ignore[arg-type]


@given(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=60),
    st.lists(st.text("a\"\\\n\x7f\U0001d54f@1'#"), max_size=3),
)
def test_every_path_and_name_survives_the_file(path: str, models: list[str]) -> None:
    """The daemon reads back exactly what was given, whatever characters are in it."""
    config = parse(_text(Path(f"/state/{path}"), models=models))
    assert config.state == str(Path(f"/state/{path}"))
    assert config.models == tuple(models)


def test_the_options_are_in_the_file(tmp_path: Path) -> None:
    """Address, scheduling and threads as given, a readable log, and nothing else changed."""
    config = parse(_text(tmp_path, listen="127.0.0.1:9000", scheduling="interactive", threads=3))
    assert (config.listen.grpc, config.engine.scheduling, config.engine.threads) == ("127.0.0.1:9000", "interactive", 3)
    assert config.log.format == "console"
    assert config.listen.admin_socket == ""


def test_a_value_that_the_daemon_would_refuse_is_refused_here(tmp_path: Path) -> None:
    """Before anything is written, by the daemon's own parser."""
    with pytest.raises(Failure, match="refused") as caught:
        _text(tmp_path, threads=5000)
    assert caught.value.code == ExitCode.USAGE


def test_a_state_directory_whose_socket_would_not_fit(lonely_residentctl: Residentctl, tmp_path: Path) -> None:
    """The length and the limit, and nothing is made."""
    state = tmp_path / ("x" * 100)
    result = lonely_residentctl("serve", "--dev", "--state", str(state))
    assert result.code == ExitCode.USAGE
    assert "107" in result.err
    assert not state.exists()


def test_a_state_directory_that_cannot_be_made(lonely_residentctl: Residentctl, state: Path) -> None:
    """A file is in the way: one line, with the way out."""
    (state / "file").write_text("")
    result = lonely_residentctl("serve", "--dev", "--state", str(state / "file" / "state"))
    assert result.code == ExitCode.USAGE
    assert "--state" in result.err


def test_serve_becomes_the_daemon(lonely_residentctl: Residentctl, state: Path) -> None:
    """It says how to connect, runs, answers residentctl over that configuration, and ends with 0 on SIGTERM."""
    process = piped("serve", "--dev", "--state", str(state), "--listen", "127.0.0.1:0", "--json")
    try:
        assert process.stdout is not None
        said = json.loads(process.stdout.readline())
        assert said["admin_socket"] == f"{state}/admin.sock"
        end = time.monotonic() + WAIT_S_MAX
        while lonely_residentctl("status", "--config", said["config"]).code != ExitCode.OK:
            assert process.poll() is None
            assert time.monotonic() < end
        document = lonely_residentctl("status", "--config", said["config"], "--json").document
        assert (document["engines"], document["state"]) == ([], str(state))
        assert lonely_residentctl("models", "--config", said["config"], "--json").document == {"models": []}
        assert lonely_residentctl("list", "--state", str(state), "--json").document == {"versions": []}
        assert lonely_residentctl("generate", "hello", "--state", str(state)).code == ExitCode.OVERLOADED
        assert lonely_residentctl("load", "toy", "--state", str(state)).code == ExitCode.FAILED
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=WAIT_S_MAX)
    assert process.returncode == 0
