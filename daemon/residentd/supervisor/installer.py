"""Runs the compiler as a process of its own: a crash or an out-of-memory kill of it cannot stop serving."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from residentd.errors import AccuracyError, Finding, MachineError, OperatorError, ResidentError, SourceError
from residentd.models.registry import Registry
from residentd.models.store import Store

LINE_BYTES_MAX: Final = 16 << 20
CANCEL_GRACE_S: Final = 2.0  # for cleaning up; native code, which hears no signal, may take any time
EXIT_S_MAX: Final = 60.0  # from its last event to its end
LAST_EVENTS: Final = frozenset({"installed", "failed"})  # after these, the compiler has cleaned up itself


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

    Leaving the iteration early cancels the build: SIGTERM, then SIGKILL. However it ends, it has ended then, and
    nothing that it had staged is left. It ends with this process, too.
    """
    process = await asyncio.create_subprocess_exec(
        *options.command(),
        f"--parent={os.getpid()}",
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
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), EXIT_S_MAX)
    finally:
        try:
            await _end(process)
        finally:
            if event.get("event") not in LAST_EVENTS:
                await asyncio.to_thread(_sweep, Path(options.state))
    status = process.returncode
    assert status is not None
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
    """SIGTERM, if it has not ended by itself, and SIGKILL where that is not enough or nobody can wait."""
    try:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), CANCEL_GRACE_S)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


def _sweep(state: Path) -> None:
    """What a compiler that was killed had staged, or published and not registered. The next start tries again."""
    with contextlib.suppress(ResidentError), contextlib.closing(Registry(state)) as registry:
        Store(state).sweep(registry.digests)


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
