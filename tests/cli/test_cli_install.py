"""install: through a daemon, or by the compiler itself; its progress, its end, and its cancellation."""

from __future__ import annotations

import io
import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cli_fake_daemon import Running, version
from cli_support import Residentctl
from cli_terminal import CONTROL_C, WAIT_S_MAX, Terminal, module_directory, piped

from resident.v1.admin_pb2 import InstallRequest
from residentd.cli.builder import _lines, command_line
from residentd.cli.exits import ExitCode
from residentd.cli.progress import installed_lines

# A compiler for these tests: what it does is the first word of its source directory's name.
COMPILER = """
import json, pathlib, signal, sys, time

source, state = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[3])
staged = state / "staging" / "work"
kind = source.name.partition("-")[0]

def say(**event):
    print(json.dumps(event), flush=True)

def cancel(*_):
    if kind == "stubborn":
        return
    (state / "asked").write_text("")
    if kind == "slow":
        time.sleep(0.5)
    staged.unlink()
    say(event="failed", kind="cancelled", message="cancelled; nothing was installed", findings=[])
    sys.exit(130)

signal.signal(signal.SIGTERM, cancel)
staged.parent.mkdir(parents=True)
staged.write_text("half")
print("a library says hello")
say(event="progress", stage="read", fraction=0.1, message=" ".join(sys.argv[4:]))
while kind in {"hang", "slow", "stubborn"}:
    time.sleep(60)
if kind == "crash":
    raise OSError("the disk is on fire")
staged.unlink()
if kind == "long":
    say(event="failed", kind="accuracy", message="it does not work", detail="x" * (2 << 20))
    sys.exit(1)
if kind == "good":
    say(event="installed", name=sys.argv[5], version=3, digest="ab" * 32, context=64, slots=4, bytes=1000,
        precision="fp32", target="onnxruntime-cpu", mode="canonical", active=True, greedy_equal=9, greedy_total=9,
        logit_diff_max=1e-5, logit_diff_bound=1e-3, passes=["fused"])
    sys.exit(0)
say(event="failed", kind=kind, message="it does not work", findings=[
    {"what": "bad opset", "where": "model.onnx", "remedy": "Export again"}] if kind == "source" else [])
sys.exit(1)
"""


@pytest.fixture
def export(tmp_path: Path) -> Path:
    path = tmp_path / "export"
    path.mkdir()
    return path


def test_install_through_the_daemon(
    residentctl: Residentctl, running: Running, export: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The daemon gets an absolute path and every option; a log gets a line a stage, stdout what was installed."""
    monkeypatch.chdir(export.parent)
    result = residentctl(
        "install", "export", "--name", "toy", "--context", "512", "--slots", "4", "--step-tokens", "128",
        "--keep-active",
    )  # fmt: skip
    assert result.code == ExitCode.OK
    assert running.daemon.installs == [
        InstallRequest(directory=str(export), name="toy", context=512, slots=4, step_tokens=128, keep_active=True)
    ]
    assert result.err.splitlines() == [
        "  2 %  read: model.onnx, 538 MB",
        " 30 %  canonicalise: 30 attention cores",
        " 50 %  verify: batch 1 of 2",
        " 88 %  publish",
    ]
    assert result.out.splitlines() == installed_lines(version(2, state="ready"))
    assert "installed toy@2 (22222222)" in result.out


def test_install_json_is_a_line_for_each_event(residentctl: Residentctl, export: Path) -> None:
    """Every progress message, then the version; nothing on stderr."""
    result = residentctl("install", str(export), "--name", "toy", "--json")
    *progress, last = result.events
    assert [event["stage"] for event in progress] == ["read", "canonicalise", "verify", "verify", "publish"]
    assert progress[0] == {"event": "progress", "stage": "read", "fraction": 0.02, "message": "model.onnx, 538 MB"}
    assert last["event"] == "installed"
    assert (last["version"]["name"], last["version"]["number"]) == ("toy", 2)
    assert result.err == ""


def test_installed_lines_name_the_agreement() -> None:
    """The figures that matter: what it is, and how well it reproduces its export."""
    lines = installed_lines(version(1, active=True))
    assert lines[0] == "installed toy@1 (11111111), active"
    assert "60/60 greedy tokens, logits within 7.2e-05 (bound 1.0e-03)" in lines[2]
    assert lines[3] == (
        "  beside its export: KL 0.031 (bound 0.05), perplexity 20.1 (19.4), the same first choice at 90.1% of "
        "2,040 positions"
    )
    assert lines[4:] == [
        "  1.9 GB of memory",
        "  on this machine: 41.2 tokens/s for one sequence, 110 for 8, 309 of prompt",
    ]
    auto = installed_lines(
        version(1, precision="int8", weights="row8; head int8", candidates=["fp32: KL 0", "rule: r"])
    )
    assert auto[1].startswith("  int8 (row8; head int8) for onnxruntime-cpu")
    assert auto[-2:] == ["  fp32: KL 0", "  rule: r"]
    odd = installed_lines(version(1, mode="compatibility", mode_reason="no attention was found"))
    assert odd[-1] == "  in compatibility mode: no attention was found"


def test_an_installation_without_a_result_is_an_error(residentctl: Residentctl, running: Running, export: Path) -> None:
    """A stream that just ends is not success."""
    running.daemon.hold_after = 0
    running.daemon.cancelled.set()  # the fake ends its stream after the first stage
    for arguments in ((), ("--json",)):
        result = residentctl("install", str(export), "--name", "toy", *arguments)
        assert result.code == ExitCode.FAILED
        assert "without a version" in result.err


@pytest.mark.parametrize("kind", ["missing", "file"])
def test_a_source_that_is_no_directory_is_a_usage_error(
    residentctl: Residentctl, running: Running, tmp_path: Path, kind: str
) -> None:
    """Said at once, without asking the daemon. The ONNX file itself may be named instead."""
    path = tmp_path / "model.bin"
    if kind == "file":
        path.write_text("")
    result = residentctl("install", str(path), "--name", "toy")
    assert result.code == ExitCode.USAGE
    assert str(path) in result.err
    assert not running.daemon.installs


def test_ctrl_c_cancels_the_call(running: Running, export: Path) -> None:
    """SIGINT reaches the daemon as a cancelled call; the command says so and ends with 130."""
    running.daemon.hold_after = 1
    process = piped("--state", str(running.state), "install", str(export), "--name", "toy")
    assert running.daemon.holding.wait(WAIT_S_MAX)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=WAIT_S_MAX)
    assert running.daemon.cancelled.wait(WAIT_S_MAX)
    assert process.returncode == ExitCode.INTERRUPTED
    assert out == b""
    assert err.decode().splitlines()[-1] == "residentctl: cancelled; nothing is left behind"


def test_a_progress_bar_in_a_terminal(running: Running, export: Path) -> None:
    """A bar with stage, percent and message; Ctrl-C takes it away and leaves one line."""
    running.daemon.hold_after = 1
    terminal = Terminal("--state", str(running.state), "install", str(export), "--name", "toy")
    terminal.wait_for("canonicalise")
    terminal.wait_for("30 %")
    terminal.wait_for("━")
    terminal.type(CONTROL_C)
    terminal.wait_for("cancelled; nothing is left behind")
    assert terminal.wait() == ExitCode.INTERRUPTED
    assert running.daemon.cancelled.wait(WAIT_S_MAX)


SWEEP = """
import pathlib, sys

(pathlib.Path(sys.argv[1]) / "staging" / "work").unlink()
"""


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """`python -m residentd_build` is COMPILER, and what sweeps after it SWEEP, for this process's children."""
    modules = module_directory(tmp_path, "residentd_build", COMPILER)
    monkeypatch.setenv("PYTHONPATH", str(modules))
    sweep = modules / "residentd_build" / "sweep.py"
    sweep.write_text(SWEEP)
    return sweep


def _source(tmp_path: Path, kind: str) -> str:
    path = tmp_path / f"{kind}-export"
    path.mkdir()
    return str(path)


@pytest.mark.usefixtures("compiler")
def test_without_a_daemon_the_compiler_is_run(lonely_residentctl: Residentctl, state: Path, tmp_path: Path) -> None:
    """The same progress and the same end, and a note that a daemon will load it when it starts."""
    arguments = ("install", _source(tmp_path, "good"), "--name", "toy", "--slots", "4", "--state", str(state))
    result = lonely_residentctl(*arguments)
    assert result.code == ExitCode.OK
    assert result.out.splitlines()[0] == f"installed toy@3 ({'ab' * 4}), active"
    assert "10 %  read: --name toy --slots=4 --json" in result.err
    assert "it loads toy when it starts" in result.err


@pytest.mark.usefixtures("compiler")
def test_the_compilers_json_is_the_daemons(lonely_residentctl: Residentctl, state: Path, tmp_path: Path) -> None:
    """A program need not know which of the two did it."""
    source = _source(tmp_path, "good")
    *progress, last = lonely_residentctl("install", source, "--name", "toy", "--state", str(state), "--json").events
    assert [event["event"] for event in progress] == ["progress"]
    assert (last["event"], last["version"]["number"], last["version"]["greedy_total"]) == ("installed", 3, 9)


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize(
    ("kind", "code", "said"),
    [
        ("source", ExitCode.SOURCE_REFUSED, "model.onnx: bad opset. Export again"),
        ("accuracy", ExitCode.ACCURACY, "it does not work"),
        ("machine", ExitCode.MACHINE, "it does not work"),
        ("usage", ExitCode.USAGE, "it does not work"),
        ("operator", ExitCode.USAGE, "it does not work"),
        ("internal", ExitCode.FAILED, "it does not work"),
        ("long", ExitCode.ACCURACY, "it does not work"),  # a line of 2 MiB, as thousands of findings make
        ("crash", ExitCode.MACHINE, "ended with status 1 before it was done: OSError: the disk is on fire"),
    ],
)
def test_the_compilers_failures_have_the_daemons_exit_codes(
    lonely_residentctl: Residentctl, state: Path, tmp_path: Path, *, kind: str, code: ExitCode, said: str
) -> None:
    """One table of exit codes, whoever compiled; a compiler that dies without a word is named as dead."""
    result = lonely_residentctl("install", _source(tmp_path, kind), "--name", "toy", "--state", str(state))
    assert result.code == code
    assert said in result.err
    assert result.out == ""
    assert "Traceback" not in result.err


@pytest.mark.usefixtures("compiler")
def test_a_line_that_is_too_long_is_named_as_such(
    lonely_residentctl: Residentctl, state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not taken for a crash, and its length does not matter to what follows it."""
    monkeypatch.setattr("residentd.cli.builder.LINE_BYTES_MAX", 1 << 10)
    result = lonely_residentctl("install", _source(tmp_path, "long"), "--name", "toy", "--state", str(state))
    assert result.code == ExitCode.FAILED
    assert "a line of more than 1,024 bytes" in result.err


def test_lines_around_one_that_is_too_long_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the long one is passed over, wherever its pieces end; the limit includes the newline."""
    monkeypatch.setattr("residentd.cli.builder.LINE_BYTES_MAX", 4)
    for long in (b"long\n", b"longlon\n", b"longlong\n", b"longlonglo\n"):
        assert list(_lines(io.BytesIO(b"abc\n" + long + b"d\n\nend"))) == [b"abc\n", None, b"d\n", b"\n", b"end"]


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_cancels_the_compiler_which_cleans_up(state: Path, tmp_path: Path, number: signal.Signals) -> None:
    """The compiler gets to remove what it had staged before the command ends with 130."""
    process = piped("install", _source(tmp_path, "hang"), "--name", "toy", "--state", str(state), "--json")
    assert process.stdout is not None
    assert json.loads(process.stdout.readline())["stage"] == "read"
    staged = state / "staging" / "work"
    assert staged.exists()
    process.send_signal(number)
    out, err = process.communicate(timeout=WAIT_S_MAX)
    assert process.returncode == ExitCode.INTERRUPTED
    assert not staged.exists()
    assert json.loads(out)["error"]["exit_code"] == ExitCode.INTERRUPTED
    assert b"Traceback" not in err


@pytest.mark.usefixtures("compiler")
def test_several_signals_that_mean_one_let_the_compiler_clean_up(state: Path, tmp_path: Path) -> None:
    """`timeout -s INT` signals twice, and so does an impatient finger: the compiler still gets its moment."""
    process = piped("install", _source(tmp_path, "slow"), "--name", "toy", "--state", str(state), "--json")
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(signal.SIGINT)
    end = time.monotonic() + WAIT_S_MAX
    while not (state / "asked").exists():  # the first has arrived: they are two, and not one
        assert time.monotonic() < end
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=WAIT_S_MAX)
    assert process.returncode == ExitCode.INTERRUPTED
    assert err == b"residentctl: cancelled; nothing is left behind\n"
    assert not (state / "staging" / "work").exists()


@pytest.mark.parametrize("sweeps", [True, False])
def test_a_compiler_that_does_not_stop_is_killed(
    lonely_residentctl: Residentctl,
    state: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    compiler: Path,
    *,
    sweeps: bool,
) -> None:
    """Within a limit; what it had staged is removed, or it is said that it is left."""
    monkeypatch.setattr("residentd.cli.builder.CANCEL_S_MAX", 0.2)
    monkeypatch.setattr("residentd.cli.install.follow", _interrupted_after_one)
    if not sweeps:
        compiler.unlink()
    result = lonely_residentctl("install", _source(tmp_path, "stubborn"), "--name", "toy", "--state", str(state))
    assert result.code == ExitCode.INTERRUPTED
    assert ("nothing is left behind" if sweeps else "was killed") in result.err
    assert (state / "staging" / "work").exists() is not sweeps


@pytest.mark.usefixtures("compiler")
def test_what_a_crashed_compiler_had_staged_is_removed(
    lonely_residentctl: Residentctl, state: Path, tmp_path: Path
) -> None:
    """At once, since no daemon will start soon."""
    result = lonely_residentctl("install", _source(tmp_path, "crash"), "--name", "toy", "--state", str(state))
    assert result.code == ExitCode.MACHINE
    assert not (state / "staging" / "work").exists()


def _interrupted_after_one(_output: object, events: Iterator[object]) -> None:
    """Ctrl-C after the first event."""
    next(events)
    raise KeyboardInterrupt


@pytest.mark.usefixtures("compiler")
def test_ctrl_c_in_a_terminal_reaches_the_compiler_once(state: Path, tmp_path: Path) -> None:
    """The terminal signals the whole foreground group; the compiler is outside it, and is asked to stop by us alone."""
    terminal = Terminal("install", _source(tmp_path, "hang"), "--name", "toy", "--state", str(state))
    terminal.wait_for("read")
    terminal.type(CONTROL_C)
    terminal.wait_for("cancelled; nothing is left behind")
    assert terminal.wait() == ExitCode.INTERRUPTED
    assert not (state / "staging" / "work").exists()
    assert "Traceback" not in terminal.shown


def test_without_daemon_and_state_nothing_is_compiled(lonely_residentctl: Residentctl, export: Path) -> None:
    """The default state directory is the machine's: without a daemon there, the command stops at that."""
    result = lonely_residentctl("install", str(export), "--name", "toy", "--admin-socket", "/nonexistent/admin.sock")
    assert result.code == ExitCode.UNREACHABLE


EVERY_OPTION = {
    "context": 1, "slots": 2, "step_tokens": 3, "keep_active": True, "precision": "int4", "block": 0,
    "symmetric": False, "embedding": "int8", "head": "fp32", "kl_max": 0.25, "mode": "canonical",
    "variant": "model_q4.onnx", "kind": "embed", "shapes": ["x=1x30", "y=2"],
}  # fmt: skip


@pytest.mark.parametrize("given", [{}, EVERY_OPTION, *({name: value} for name, value in EVERY_OPTION.items())])
def test_the_compilers_command_line_is_the_daemons(tmp_path: Path, given: dict[str, Any]) -> None:
    """Both start `python -m residentd_build` alike, so an installation does not depend on who was there."""
    installer = pytest.importorskip("residentd.supervisor.installer")
    options = installer.BuildOptions("/d", "n", str(tmp_path), **given)
    assert command_line(InstallRequest(directory="/d", name="n", **given), tmp_path) == options.command()


def test_every_option_of_the_contract_reaches_the_compiler(tmp_path: Path) -> None:
    """No field of the request is forgotten: each changes the command line, and the compiler's parser takes it."""
    from residentd_build.__main__ import _parser

    plain = InstallRequest(directory="/d", name="n")
    fields = {field.name for field in InstallRequest.DESCRIPTOR.fields}
    assert fields == EVERY_OPTION.keys() | {"directory", "name"}
    for name, value in EVERY_OPTION.items():
        changed = InstallRequest(directory="/d", name="n", **{name: value})
        assert command_line(changed, tmp_path) != command_line(plain, tmp_path)
        parsed = vars(_parser().parse_args(command_line(changed, tmp_path)[3:]))
        assert parsed[name] == value


def test_weight_options_reach_the_daemon(residentctl: Residentctl, running: Running, export: Path) -> None:
    """What is left out stays unset, so that a default is decided in one place."""
    result = residentctl(
        "install", str(export), "--name", "toy", "--precision", "int4", "--block", "32", "--asymmetric",
        "--embedding", "int8", "--head", "fp32", "--kl-max", "0.25",
    )  # fmt: skip
    assert result.code == ExitCode.OK
    residentctl("install", str(export), "--name", "toy")
    full, plain = running.daemon.installs
    assert full == InstallRequest(
        directory=str(export), name="toy", precision="int4", block=32, symmetric=False, embedding="int8", head="fp32",
        kl_max=0.25,
    )  # fmt: skip
    assert plain == InstallRequest(directory=str(export), name="toy")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--precision", "int9"), "'fp32', 'fp16', 'bf16', 'int8', 'int4', 'auto'"),
        (("--block", "64"), "'0', '32', '128'"),
        (("--head", "bf16"), "'same', 'fp32', 'int8', 'int4'"),
        (("--kl-max", "0"), "--kl-max is 0"),
    ],
)
def test_a_wrong_weight_option_is_refused_at_once(
    residentctl: Residentctl, running: Running, export: Path, words: tuple[str, str], said: str
) -> None:
    """With what is possible, before the daemon is asked."""
    result = residentctl("install", str(export), "--name", "toy", *words)
    assert result.code == ExitCode.USAGE
    assert said in result.err
    assert not running.daemon.installs
