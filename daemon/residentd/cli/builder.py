"""The compiler as a subprocess, for a machine where no daemon runs. It is never imported: see design.md, section 1."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any

from resident.v1.admin_pb2 import InstallProgress, InstallRequest, Version
from residentd.cli.exits import ExitCode, Failure, Problem
from residentd.cli.formats import plural

LINE_BYTES_MAX = 16 << 20  # a refused source lists every finding in one line
LINES_MAX = 1_000_000
EXIT_S_MAX = 60.0  # from the last line of its output to its end
CANCEL_S_MAX = 2.0  # for cleaning up; native code, which hears no signal, may take any time
SWEEP_S_MAX = 60.0
TAIL_BYTES_MAX = 4096  # of what it wrote to stderr

_EXIT_BY_KIND: Mapping[str, ExitCode] = MappingProxyType(
    {
        "source": ExitCode.SOURCE_REFUSED,
        "accuracy": ExitCode.ACCURACY,
        "machine": ExitCode.MACHINE,
        "usage": ExitCode.USAGE,
        "operator": ExitCode.USAGE,
        "cancelled": ExitCode.INTERRUPTED,
    }
)
_OVERLONG: Mapping[str, str] = MappingProxyType({"event": "overlong"})


def command_line(request: InstallRequest, state: Path) -> list[str]:
    module = [sys.executable, "-m", "residentd_build", request.directory]
    keep = ["--keep-active"] if request.keep_active else []
    return [*module, "--state", str(state), "--name", request.name, *_options(request), *keep, "--json"]


def _options(request: InstallRequest) -> Iterator[str]:
    """Those of the request's own values that are not the compiler's defaults, a word each."""
    numbers = {"context": request.context, "slots": request.slots, "step-tokens": request.step_tokens}
    texts = {
        "precision": request.precision,
        "embedding": request.embedding,
        "head": request.head,
        "mode": request.mode,
        "variant": request.variant,
        "kind": request.kind,
    }
    yield from (f"--{name}={value}" for name, value in (numbers | texts).items() if value)
    if request.HasField("block"):
        yield f"--block={request.block}"
    if request.HasField("symmetric"):
        yield "--symmetric" if request.symmetric else "--asymmetric"
    if request.kl_max:
        yield f"--kl-max={request.kl_max}"
    yield from (f"--shape={shape}" for shape in request.shapes)


def build(words: list[str]) -> Generator[InstallProgress, None, None]:
    """Run the compiler; yields its progress, the installed version last.

    Raises Failure with what it reports. On Ctrl-C, or when the iteration is left early, it gets one SIGTERM and
    a moment to remove what it had staged. It ends with this process, too.
    """
    with tempfile.TemporaryFile() as messages, _started(words, messages) as process:
        last: dict[str, Any] = {}
        try:
            for last in _events(process):
                if last["event"] in {"progress", "installed"}:
                    yield _progress(last)
        except (KeyboardInterrupt, GeneratorExit):
            _cancel(process, words)
            raise
        if last.get("event") not in {"installed", "failed"}:
            _sweep(words)
        if last.get("event") != "installed":
            raise _failure(last, process.returncode, _last_line(messages))


def _started(words: list[str], messages: IO[bytes]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [*words, f"--parent={os.getpid()}"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=messages,  # not the terminal, where a library's warning would tear the progress bar
        process_group=0,  # Ctrl-C in the terminal reaches us alone; we pass it on once
    )


def _events(process: subprocess.Popen[bytes]) -> Iterator[dict[str, Any]]:
    """What the compiler reports, until it has ended."""
    assert process.stdout is not None
    for line in _lines(process.stdout):
        event = _event(line)
        if event is not None:
            yield event
    try:
        process.wait(EXIT_S_MAX)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _lines(stream: IO[bytes]) -> Iterator[bytes | None]:
    """The lines of `stream`; None in the place of one that is longer than LINE_BYTES_MAX."""
    inside = False  # an over-long line, of which the rest is passed over
    for _ in range(LINES_MAX):
        piece = stream.readline(LINE_BYTES_MAX)
        if not piece:
            return
        cut = len(piece) == LINE_BYTES_MAX and not piece.endswith(b"\n")
        if not inside:
            yield None if cut else piece
        inside = cut


def _event(line: bytes | None) -> dict[str, Any] | None:
    """One event, `_OVERLONG` for a line that could not be read; None for what a library printed to stdout."""
    if line is None:
        return dict(_OVERLONG)
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) and isinstance(event.get("event"), str) else None


def _progress(event: dict[str, Any]) -> InstallProgress:
    if event["event"] == "progress":
        return InstallProgress(
            stage=str(event.get("stage", "")),
            fraction=float(event.get("fraction", 0.0)),
            message=str(event.get("message", "")),
        )
    return InstallProgress(stage="done", fraction=1.0, installed=_version(event))


def _version(event: dict[str, Any]) -> Version:
    """The event's fields that a Version has, under the same names; the event calls the number `version`."""
    names = {field.name for field in Version.DESCRIPTOR.fields}
    return Version(**{name: event[name] for name in event if name in names}, number=int(event.get("version", 0)))


def _cancel(process: subprocess.Popen[bytes], words: list[str]) -> None:
    """Ask the compiler to stop, give it a moment to clean up, and do both for it then. Raises Failure where that fails.

    Another Ctrl-C in that moment changes nothing: impatient fingers and `timeout` send several that mean one.
    """
    process.send_signal(signal.SIGTERM)  # handled as SIGINT is, and quiet while it still starts
    give_up_s = time.monotonic() + CANCEL_S_MAX
    while (left_s := give_up_s - time.monotonic()) > 0:
        with contextlib.suppress(KeyboardInterrupt, subprocess.TimeoutExpired):
            process.wait(left_s)
            return
    process.kill()
    process.wait()
    if not _sweep(words):
        raise Failure(
            "cancelled; the compiler did not stop and was killed. The next start removes what it had staged",
            code=ExitCode.INTERRUPTED,
        )


def _sweep(words: list[str]) -> bool:
    """Remove what the compiler that `words` started had staged when it was killed; whether that was done."""
    state = words[words.index("--state") + 1]
    command = [sys.executable, "-m", "residentd_build.sweep", state]
    silent = subprocess.DEVNULL
    try:
        done = subprocess.run(
            command, stdin=silent, stdout=silent, stderr=silent, check=False, timeout=SWEEP_S_MAX, process_group=0
        )
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0


def _failure(event: dict[str, Any], status: int, last_line: str) -> Failure:
    if event == _OVERLONG:
        return Failure(
            f"the compiler failed, and what it reported last is a line of more than {LINE_BYTES_MAX:,} bytes, the most "
            f"that is read. Nothing was installed; run python -m residentd_build yourself to see it",
            code=ExitCode.FAILED,
        )
    if event.get("event") != "failed":
        ended = f"signal {-status}" if status < 0 else f"status {status}"
        why = f": {last_line}" if last_line else ""
        return Failure(
            f"the compiler ended with {ended} before it was done{why}. Nothing was installed; try again",
            code=ExitCode.MACHINE,
        )
    problems = tuple(_problem(finding) for finding in event.get("findings") or ())
    message = str(event.get("message", "")) or "the compiler failed without saying why"
    if problems:
        message = (
            f"the source cannot be installed: {plural(len(problems), 'finding')}. Put right what is listed, then retry"
        )
    return Failure(message, code=_EXIT_BY_KIND.get(str(event.get("kind")), ExitCode.FAILED), problems=problems)


def _last_line(messages: IO[bytes]) -> str:
    """The last thing that the compiler said, such as the exception of its traceback."""
    messages.seek(max(0, messages.seek(0, os.SEEK_END) - TAIL_BYTES_MAX))
    lines = messages.read().decode(errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


def _problem(finding: Mapping[str, Any]) -> Problem:
    what, where, remedy = (str(finding.get(name, "")) for name in ("what", "where", "remedy"))
    return Problem(where=where, text=f"{what}. {remedy}")
