"""Runs the compiler as a process of its own: a crash or an out-of-memory kill of it cannot stop serving."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from residentd.errors import AccuracyError, Finding, MachineError, OperatorError, ResidentError, SourceError

LINE_BYTES_MAX: Final = 16 << 20
CANCEL_GRACE_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class BuildOptions:
    """0, "" and None take the compiler's default."""

    directory: str
    name: str
    state: str
    context: int = 0
    slots: int = 0
    step_tokens: int = 0
    keep_active: bool = False
    precision: str = ""
    block: int | None = None
    symmetric: bool | None = None
    embedding: str = ""
    head: str = ""
    kl_max: float = 0.0
    mode: str = ""
    variant: str = ""
    kind: str = ""
    shapes: tuple[str, ...] = ()

    def command(self) -> list[str]:
        base = [sys.executable, "-m", "residentd_build", self.directory, "--state", self.state, "--name", self.name]
        keep = ["--keep-active"] if self.keep_active else []
        return [*base, *self._given(), *keep, "--json"]

    def _given(self) -> Iterator[str]:
        numbers = {"context": self.context, "slots": self.slots, "step-tokens": self.step_tokens}
        texts = {
            "precision": self.precision,
            "embedding": self.embedding,
            "head": self.head,
            "mode": self.mode,
            "variant": self.variant,
            "kind": self.kind,
        }
        yield from (f"--{name}={value}" for name, value in (numbers | texts).items() if value)
        if self.block is not None:
            yield f"--block={self.block}"
        if self.symmetric is not None:
            yield "--symmetric" if self.symmetric else "--asymmetric"
        if self.kl_max:
            yield f"--kl-max={self.kl_max}"
        yield from (f"--shape={shape}" for shape in self.shapes)


async def build(options: BuildOptions) -> AsyncIterator[dict[str, Any]]:
    """The compiler's events, the last of which is "installed". Raises the ResidentError that its failure means.

    Leaving the iteration early cancels the build: SIGTERM, then SIGKILL; the compiler removes what it had staged.
    """
    process = await asyncio.create_subprocess_exec(
        *options.command(),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        limit=LINE_BYTES_MAX,
        start_new_session=True,
    )
    assert process.stdout is not None
    event: dict[str, Any] = {}
    try:
        async for event in _events(process.stdout):
            if event["event"] == "failed":
                break
            yield event
        status = await process.wait()
    finally:
        await _end(process)
    if event.get("event") != "installed":
        raise _error_of(event, status)


async def _events(stream: asyncio.StreamReader) -> AsyncIterator[dict[str, Any]]:
    """The compiler's events; what a library prints, or a line past LINE_BYTES_MAX, is passed over."""
    while True:
        try:
            line = await stream.readline()
        except ValueError:
            continue
        if not line:
            return
        event = _event_of(line)
        if event is not None:
            yield event


def _event_of(line: bytes) -> dict[str, Any] | None:
    """One of the compiler's events; None for a line that a library printed."""
    try:
        event = msgspec.json.decode(line, type=dict[str, Any])
    except msgspec.DecodeError:
        return None
    return event if isinstance(event.get("event"), str) else None


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(process.wait(), CANCEL_GRACE_S)
        except TimeoutError:
            process.kill()
            await process.wait()


def _error_of(event: dict[str, Any], status: int) -> ResidentError:
    message = str(event.get("message", ""))
    match event.get("kind"):
        case "source":
            return SourceError(_findings(event.get("findings", ())))
        case "accuracy":
            return AccuracyError(message)
        case "machine":
            return MachineError(message)
        case "usage" | "operator":
            return OperatorError(message)
        case "internal" | "cancelled" if message:
            return MachineError(message)
        case _:
            ended = f"signal {-status}" if status < 0 else f"status {status}"
            return MachineError(f"the compiler ended with {ended} before it was done. Nothing was installed; try again")


def _findings(entries: Sequence[dict[str, str]]) -> list[Finding]:
    return [Finding(entry["what"], entry["where"], entry["remedy"]) for entry in entries]
