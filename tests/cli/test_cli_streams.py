"""generate, chat and status --watch in a terminal and on pipes: streaming, Ctrl-C, and a conversation that stays."""

from __future__ import annotations

import json
import signal
import socket
from pathlib import Path

import pytest
from cli_fake_daemon import Running
from cli_terminal import CONTROL_C, CONTROL_D, WAIT_S_MAX, Terminal, piped, redirected
from google.rpc import code_pb2, status_pb2

from residentd.cli.chat import Conversation
from residentd.cli.exits import ExitCode


def _said(running: Running) -> list[list[tuple[str, str]]]:
    return [[(entry.role, entry.content) for entry in request.chat.messages] for request in running.daemon.requests]


def test_generate_streams_and_ctrl_c_stops_it(running: Running) -> None:
    """Tokens are there before the answer ends; SIGINT cancels the call and the command ends with 130."""
    running.daemon.hold_after = 2
    process = piped("--state", str(running.state), "generate", "one two three")
    assert process.stdout is not None
    assert process.stdout.read(len(" w0 w1")) == b" w0 w1"
    assert running.daemon.holding.wait(WAIT_S_MAX)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=WAIT_S_MAX)
    assert running.daemon.cancelled.wait(WAIT_S_MAX)
    assert (process.returncode, out, err) == (ExitCode.INTERRUPTED, b"", b"residentctl: interrupted\n")


def test_generate_in_a_terminal_ends_its_line(running: Running) -> None:
    """A newline and the figures follow the answer where a person reads it."""
    terminal = Terminal("--state", str(running.state), "generate", "one two")
    terminal.wait_for("toy@1 · 2 tokens")
    assert terminal.wait() == ExitCode.OK
    assert terminal.shown.startswith(" w0 w1\r\n")


def test_generate_into_a_closed_pipe_ends_quietly(running: Running) -> None:
    """`residentctl generate … | head -c1` is no traceback."""
    running.daemon.token_delay_s = 0.01
    process = piped("--state", str(running.state), "generate", "hello", "--max-tokens", "500")
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.read(1)
    process.stdout.close()
    assert process.wait(WAIT_S_MAX) == ExitCode.FAILED
    assert process.stderr.read() == b""
    process.stderr.close()


@pytest.mark.parametrize(
    ("redirection", "arguments", "said"),
    [
        ("<&-", ("chat",), "stdin cannot be read: Bad file descriptor"),
        ("<&-", ("generate", "-"), "stdin cannot be read: Bad file descriptor"),
        (">&-", ("generate", "one two"), "stdout cannot be written: Bad file descriptor"),
        (">&-", ("list",), "stdout cannot be written: Bad file descriptor"),
        (">&-", ("--help",), "stdout cannot be written: Bad file descriptor"),
        (">/dev/full", ("generate", "one two", "--json"), "stdout cannot be written: No space left on device"),
        (">/dev/full", ("status",), "stdout cannot be written: No space left on device"),
        (">/dev/full", ("--version",), "stdout cannot be written: No space left on device"),
    ],
)
def test_a_stream_that_is_closed_or_full_is_one_line(
    running: Running, redirection: str, arguments: tuple[str, ...], said: str
) -> None:
    """The stream and the reason; what cannot be read is a usage error, what cannot be written a failure."""
    ended = redirected(redirection, "--state", str(running.state), *arguments)
    (line,) = ended.stderr.decode().splitlines()
    assert line.startswith(f"residentctl: {said}. ")
    assert ended.returncode == (ExitCode.USAGE if "stdin" in said else ExitCode.FAILED)


@pytest.mark.parametrize("redirection", ["2>&-", "2>/dev/full", "<&- >&- 2>&-"])
def test_what_cannot_be_said_leaves_the_exit_code(state: Path, redirection: str) -> None:
    """A script that closes stderr still learns how the command ended."""
    ended = redirected(redirection, "list", "--state", str(state))
    assert (ended.returncode, ended.stdout, ended.stderr) == (ExitCode.UNREACHABLE, b"", b"")


def test_a_failure_is_told_where_its_json_cannot_be_written(state: Path) -> None:
    """stderr has the failure itself, not that of its report."""
    for redirection in (">&-", ">/dev/full"):
        ended = redirected(redirection, "list", "--json", "--state", str(state))
        assert ended.returncode == ExitCode.UNREACHABLE
        (line,) = ended.stderr.decode().splitlines()
        assert "no daemon: there is no admin socket" in line


def test_chat_keeps_the_conversation(running: Running) -> None:
    """Every question goes out with all that was said before; /reset forgets it, but not the system message."""
    terminal = Terminal("--state", str(running.state), "chat", "--system", "Be brief.", "--max-tokens", "2")
    for line, shown, times in (
        ("first", "2 tokens", 1),
        ("second", "2 tokens", 2),
        ("/reset", "forgotten", 1),
        ("third", "2 tokens", 3),
    ):
        terminal.type(f"{line}\n")
        terminal.wait_for(shown, times=times)
    terminal.type("/exit\n")
    assert terminal.wait() == ExitCode.OK
    system = ("system", "Be brief.")
    assert _said(running) == [
        [system, ("user", "first")],
        [system, ("user", "first"), ("assistant", " w0 w1"), ("user", "second")],
        [system, ("user", "third")],
    ]


def test_ctrl_c_stops_the_answer_and_not_the_chat(running: Running) -> None:
    """What was answered so far stays in the conversation; the next question is answered as ever."""
    running.daemon.hold_after = 2
    terminal = Terminal("--state", str(running.state), "chat", "--max-tokens", "4")
    terminal.wait_for("> ")
    terminal.type("first\n")
    terminal.wait_for(" w0 w1")
    assert running.daemon.holding.wait(WAIT_S_MAX)
    terminal.type(CONTROL_C)
    terminal.wait_for("stopped")
    assert running.daemon.cancelled.wait(WAIT_S_MAX)
    running.daemon.hold_after = None
    terminal.wait_for("> ", times=2)
    terminal.type("second\n")
    terminal.wait_for("> ", times=3)  # at a prompt Ctrl-D is end of file; before it, the terminal may drop it
    terminal.type(CONTROL_D)
    assert terminal.wait() == ExitCode.OK
    assert _said(running)[1] == [("user", "first"), ("assistant", " w0 w1"), ("user", "second")]


def test_ctrl_c_at_the_prompt_is_answered_with_help(running: Running) -> None:
    """It neither leaves nor prints a traceback; an unknown command is named as one."""
    terminal = Terminal("--state", str(running.state), "chat")
    terminal.wait_for("> ")
    terminal.type_until(CONTROL_C, "/exit or Ctrl-D leaves", times=2)
    terminal.type("/what\n")
    terminal.wait_for("/what is not a command")
    terminal.type("/exit\n")
    assert terminal.wait() == ExitCode.OK
    assert "Traceback" not in terminal.shown
    assert not running.daemon.requests


def test_chat_survives_an_error(running: Running) -> None:
    """An answer that fails is reported, its question is dropped, and the chat goes on."""
    running.daemon.faults["Generate"] = status_pb2.Status(code=code_pb2.RESOURCE_EXHAUSTED, message="no room")
    terminal = Terminal("--state", str(running.state), "chat", "--max-tokens", "1")
    terminal.wait_for("> ")
    terminal.type("first\n")
    terminal.wait_for("no room")
    running.daemon.faults.clear()
    terminal.type("second\n")
    terminal.wait_for("1 token")
    terminal.type("/exit\n")
    assert terminal.wait() == ExitCode.OK
    assert _said(running) == [[("user", "first")], [("user", "second")]]


def test_chat_reads_lines_from_a_pipe(running: Running) -> None:
    """Without a terminal there is no prompt; --json gives the events of every answer."""
    for arguments in ((), ("--json",)):
        running.daemon.requests.clear()
        process = piped("--state", str(running.state), "chat", "--max-tokens", "1", *arguments)
        out, err = process.communicate("first\n\nsecönd\n/exit\nnever\n".encode(), timeout=WAIT_S_MAX)
        assert (process.returncode, err) == (ExitCode.OK, b"")
        assert _said(running)[-1] == [("user", "first"), ("assistant", " w0"), ("user", "secönd")]
        if arguments:
            events = [json.loads(line)["event"] for line in out.splitlines()]
            assert events == ["started", "delta", "finished"] * 2
        else:
            assert out == b" w0\n w0\n"


def test_chat_on_a_pipe_ends_with_the_errors_code(running: Running) -> None:
    """Nobody is there to ask again: the first failure ends it."""
    running.daemon.faults["Generate"] = status_pb2.Status(code=code_pb2.INVALID_ARGUMENT, message="too long")
    process = piped("--state", str(running.state), "chat")
    _, err = process.communicate(b"first\nsecond\n", timeout=WAIT_S_MAX)
    assert process.returncode == ExitCode.USAGE
    assert err == b"residentctl: too long\n"
    assert len(running.daemon.requests) == 1


@pytest.mark.parametrize(("answer", "turns"), [("yes", 2), ("", 0)])
def test_a_question_without_an_answer_is_taken_back(answer: str, turns: int) -> None:
    """Most templates refuse two user messages in a row."""
    conversation = Conversation("")
    conversation.ask("really?")
    conversation.keep(answer)
    assert len(conversation.turns) == turns


def test_watch_follows_the_daemon_and_ends_with_ctrl_c(running: Running) -> None:
    """A JSON line a look; one that fails is a line as well, for a daemon that is being restarted; SIGINT is its end."""
    process = piped("--state", str(running.state), "status", "--watch", "--interval", "0.1", "--json")
    assert process.stdout is not None
    assert json.loads(process.stdout.readline())["engines"][0]["slots_used"] == 5
    running.daemon.faults["Status"] = status_pb2.Status(code=code_pb2.UNAVAILABLE, message="going down")
    while "error" not in (look := json.loads(process.stdout.readline())):
        assert look["engines"]
    assert "going down" in look["error"]["message"]
    running.daemon.faults.clear()
    while "error" in (look := json.loads(process.stdout.readline())):
        assert "going down" in look["error"]["message"]
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=WAIT_S_MAX)
    assert (process.returncode, err) == (ExitCode.OK, b"")


def test_watch_redraws_in_a_terminal(running: Running) -> None:
    """The view is drawn over itself on the alternate screen, and the terminal is as before when it ends."""
    terminal = Terminal("--state", str(running.state), "status", "--watch", "--interval", "0.1")
    terminal.wait_for("5 of 8 used", times=2)
    terminal.type(CONTROL_C)
    assert terminal.wait() == ExitCode.OK
    enter, leave = "\x1b[?1049h", "\x1b[?1049l"
    assert terminal.shown.index(enter) < terminal.shown.index("5 of 8 used") < terminal.shown.index(leave)


def test_nothing_but_loopback_is_contacted(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy in the environment is not asked: a prompt goes to the daemon and nowhere else."""
    with socket.socket() as proxy:
        proxy.bind(("127.0.0.1", 0))
        proxy.listen()
        proxy.setblocking(False)
        url = f"http://127.0.0.1:{proxy.getsockname()[1]}"
        names = ("http_proxy", "https_proxy", "grpc_proxy", "HTTP_PROXY", "HTTPS_PROXY")
        process = piped(
            "generate", "one", "--address", running.address,
            environment={**dict.fromkeys(names, url), "no_proxy": "", "NO_PROXY": ""},
        )  # fmt: skip
        out, _ = process.communicate(timeout=WAIT_S_MAX)
        assert (process.returncode, out) == (ExitCode.OK, b" w0")
        with pytest.raises(BlockingIOError):
            proxy.accept()
