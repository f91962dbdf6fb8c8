"""The engine worker process: one model version, one backend, one step loop, one socket to the daemon.

    python -m residentd.engine.worker FD

Exit status: 0 told to stop or the daemon is gone, 1 failed (a Failed frame said why).
"""

from __future__ import annotations

import ctypes
import os
import queue
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Final, NoReturn

import msgspec

from residentd.backend.base import Backend
from residentd.backend.speed import measure_speeds
from residentd.core.pacing import Pacer, Profile
from residentd.core.scheduler import Policy, Scheduler
from residentd.engine.batch_backend import BatchBackend
from residentd.engine.batch_loop import BatchLoop
from residentd.engine.batch_worker import check_batches, load_batches
from residentd.engine.link import (
    Ask,
    Cancel,
    Checked,
    Failed,
    FrameReader,
    FromWorker,
    Loading,
    Ping,
    Ready,
    Start,
    Stop,
    Submit,
    ToWorker,
    decode_to_worker,
    send,
)
from residentd.engine.loop import Loop
from residentd.engine.probe import longest_golden, probe
from residentd.engine.queue_limit import queue_limit
from residentd.errors import AccuracyError, BackendLostError, LinkError, ResidentError, StepRetryableError
from residentd.models.checks import Part, Speeds, failure_message
from residentd.models.environment import engine_environment
from residentd.models.manifest import Content, Manifest, decode
from residentd.sampling import Sampler

RECEIVE_BYTES: Final = 1 << 18
TURN_FRAMES_MAX: Final = 1024
"""Frames taken in before one step: a burst of cancels must not hold up the running rows for ever."""
PR_SET_PDEATHSIG: Final = 1
CHECK_SLOTS_MAX: Final = 8
CHECK_NICENESS: Final = 10
"""A worker that only checks leaves the processor to those that serve."""

Inbox = queue.SimpleQueue[Submit | Ask | Cancel | Ping | Stop]
"""Bounded by the daemon: at most one Submit and one Cancel for each of its `limits.requests_max` live requests."""


def main() -> NoReturn:
    _die_with_parent()
    connection = socket.socket(fileno=int(sys.argv[1]))
    reader = FrameReader()
    start, rest = _receive_start(connection, reader)
    inbox: Inbox = queue.SimpleQueue()
    for frame in rest:
        inbox.put(_expect_request(frame))
    threading.Thread(target=_receive, args=(connection, reader, inbox), daemon=True, name="link").start()
    _leave(_serve(start, inbox, lambda frame: send(connection, frame)))


def _serve(start: Start, inbox: Inbox, emit: Callable[[FromWorker], None]) -> int:
    """Load, prove, serve until told to stop. Returns the exit status."""
    try:
        manifest = _manifest(start)
        if start.purpose == "check":
            _check(start, manifest, emit)
            return 0
        loop, backend, ready = _load(start, manifest, emit)
        emit(ready)
        _run(loop, inbox)
    except (BrokenPipeError, ConnectionResetError):
        return 0
    except ResidentError as error:
        emit(Failed(message=str(error), permanent=not isinstance(error, BackendLostError)))
        return 1
    except Exception as error:  # noqa: BLE001  (the last words of a dying process: our own bug, or the runtime's)
        traceback.print_exc()
        emit(Failed(message=f"{type(error).__name__}: {error}", permanent=False))
        return 1
    backend.close()
    return 0


def _run(loop: Loop | BatchLoop, inbox: Inbox) -> None:
    """Turn until a Stop frame. Blocks on the inbox while idle."""
    while True:
        frames: list[Submit | Ask | Cancel | Ping] = []
        if loop.idle:
            first = inbox.get()
            if isinstance(first, Stop):
                return
            frames.append(first)
        while len(frames) < TURN_FRAMES_MAX and not inbox.empty():
            frame = inbox.get()
            if isinstance(frame, Stop):
                return
            frames.append(frame)
        loop.turn(frames)


def _load(
    start: Start, manifest: Manifest, emit: Callable[[FromWorker], None]
) -> tuple[Loop | BatchLoop, Backend | BatchBackend, Ready]:
    if manifest.content.kind != "generate":
        return load_batches(start, manifest, emit)
    started_ns = time.monotonic_ns()
    backend, content = _open(start, manifest, emit)
    failure = failure_message(_replay(backend, content, emit, measures=start.measures), ())
    if failure:
        raise AccuracyError(failure)
    pacer = Pacer(profile=Profile(start.scheduling), prefill_tokens_max=start.prefill_tokens_max)
    limit = queue_limit(
        "generate",
        content.engine.limits,
        tokens_max=start.waiting_tokens_max,
        bytes_max=start.waiting_bytes_max,
    )
    policy = Policy(
        waiting_max=start.waiting_max,
        waiting_tokens_max=limit.most,
        retries_max=start.retries_max,
    )
    loop = Loop(
        backend=backend,
        scheduler=Scheduler(backend.limits, policy),
        sampler=Sampler(backend.limits.vocab),
        pacer=pacer,
        clock_ns=time.monotonic_ns,
        emit=emit,
    )
    return loop, backend, Ready(limits=backend.limits, load_ms=(time.monotonic_ns() - started_ns) // 1_000_000)


def _manifest(start: Start) -> Manifest:
    return decode((Path(start.version_dir) / "manifest.json").read_bytes())


def _check(start: Start, manifest: Manifest, emit: Callable[[FromWorker], None]) -> None:
    """Replay the goldens beside whatever serves: at low priority, in no more memory than they need."""
    os.nice(CHECK_NICENESS)
    if manifest.content.kind != "generate":
        check_batches(start, manifest, emit).close()
        return
    backend, content = _open(start, manifest, emit)
    _replay(backend, content, emit, measures=False)
    backend.close()


def _open(start: Start, manifest: Manifest, emit: Callable[[FromWorker], None]) -> tuple[Backend, Content]:
    directory = Path(start.version_dir)
    if start.purpose == "check":
        manifest = _small(manifest)
    emit(Loading(stage="loading the engine"))
    return open_backend(manifest, directory, threads=start.threads, spin_us=start.spin_us), manifest.content


def _replay(
    backend: Backend, content: Content, emit: Callable[[FromWorker], None], *, measures: bool
) -> tuple[Part, ...]:
    emit(Loading(stage="replaying the goldens"))
    parts = probe(backend, content)
    speeds = None
    if measures and not failure_message(parts, ()):
        emit(Loading(stage="measuring its speed"))
        speeds = _measured(backend, content)
    emit(Checked(parts=parts, environment=engine_environment(), speeds=speeds))
    return parts


def _measured(backend: Backend, content: Content) -> Speeds | None:
    """None where a step failed as steps may: that is no reason not to serve, and the next load measures again."""
    longest = max((golden.prompt for golden in content.goldens), key=len, default=())
    try:
        return measure_speeds(backend, longest)
    except StepRetryableError:
        return None


def _small(manifest: Manifest) -> Manifest:
    """`manifest` with the slots and context that its goldens need."""
    content = manifest.content
    limits = content.engine.limits
    limits = msgspec.structs.replace(
        limits,
        slots=min(limits.slots, CHECK_SLOTS_MAX),
        context=min(limits.context, longest_golden(content.goldens)),
    )
    engine = msgspec.structs.replace(content.engine, limits=limits)
    return msgspec.structs.replace(manifest, content=msgspec.structs.replace(content, engine=engine))


def open_backend(manifest: Manifest, directory: Path, *, threads: int, spin_us: int) -> Backend:
    """The backend that `manifest` was built for. Runtimes are imported here, so a worker loads only its own."""
    engine = manifest.content.engine
    match engine.target:
        case "onnxruntime-cpu":
            from residentd.backend.modes import open_engine  # noqa: PLC0415
            from residentd.backend.onnxruntime import RuntimeOptions  # noqa: PLC0415

            return open_engine(directory, engine, RuntimeOptions(threads=threads, spin_us=spin_us))
        case "reference":
            from residentd.backend import reference  # noqa: PLC0415

            return reference.load(directory, engine)


def _receive_start(connection: socket.socket, reader: FrameReader) -> tuple[Start, list[ToWorker]]:
    while True:
        chunk = connection.recv(RECEIVE_BYTES)
        if not chunk:
            _leave(0)
        bodies = reader.feed(chunk)
        if bodies:
            first, *rest = [decode_to_worker(body) for body in bodies]
            if not isinstance(first, Start):
                raise LinkError(f"the first frame is {type(first).__name__}; Start is expected")
            return first, rest


def _receive(connection: socket.socket, reader: FrameReader, inbox: Inbox) -> None:
    """The link thread. The end of the link is the end of the process, even in the middle of a step."""
    try:
        while chunk := connection.recv(RECEIVE_BYTES):
            for body in reader.feed(chunk):
                inbox.put(_expect_request(decode_to_worker(body)))
    except (LinkError, MemoryError) as error:
        sys.stderr.write(f"engine worker: {error}\n")
        _leave(1)
    except OSError:
        pass
    _leave(0)


def _expect_request(frame: ToWorker) -> Submit | Ask | Cancel | Ping | Stop:
    if isinstance(frame, Start):
        raise LinkError("a second Start frame")
    return frame


def _leave(status: int) -> NoReturn:
    """Exit at once: no finaliser of a runtime's may hang the way out."""
    sys.stderr.flush()
    os._exit(status)


def _die_with_parent() -> None:
    """Ask the kernel to end this process with its daemon (prctl(2)); signals of the terminal are the daemon's."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


if __name__ == "__main__":
    main()
