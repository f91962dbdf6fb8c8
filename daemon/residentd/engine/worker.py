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

from residentd.backend.base import Backend
from residentd.core.pacing import Pacer, Profile
from residentd.core.scheduler import Policy, Scheduler
from residentd.engine.link import (
    Cancel,
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
from residentd.engine.probe import probe_goldens
from residentd.errors import BackendLostError, LinkError, ResidentError
from residentd.models.manifest import Manifest, decode
from residentd.sampling import Sampler

RECEIVE_BYTES: Final = 1 << 18
TURN_FRAMES_MAX: Final = 1024
"""Frames taken in before one step: a burst of cancels must not hold up the running rows for ever."""
PR_SET_PDEATHSIG: Final = 1

Inbox = queue.SimpleQueue[Submit | Cancel | Ping | Stop]
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
        loop, backend, ready = _load(start, emit)
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


def _run(loop: Loop, inbox: Inbox) -> None:
    """Turn until a Stop frame. Blocks on the inbox while idle."""
    while True:
        frames: list[Submit | Cancel | Ping] = []
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


def _load(start: Start, emit: Callable[[FromWorker], None]) -> tuple[Loop, Backend, Ready]:
    started_ns = time.monotonic_ns()
    directory = Path(start.version_dir)
    manifest = decode((directory / "manifest.json").read_bytes())
    emit(Loading(stage="loading the engine"))
    backend = open_backend(manifest, directory, threads=start.threads, spin_us=start.spin_us)
    pacer = Pacer(profile=Profile(start.scheduling), prefill_tokens_max=start.prefill_tokens_max)
    policy = Policy(
        waiting_max=start.waiting_max,
        # One request that fills the context must be admissible, whatever the model's context is.
        waiting_tokens_max=max(start.waiting_tokens_max, backend.limits.capacity),
        retries_max=start.retries_max,
    )
    emit(Loading(stage="replaying the goldens"))
    probe_goldens(backend, manifest.content.goldens, exact=manifest.content.engine.precision == "fp32")
    loop = Loop(
        backend=backend,
        scheduler=Scheduler(backend.limits, policy),
        sampler=Sampler(backend.limits.vocab),
        pacer=pacer,
        clock_ns=time.monotonic_ns,
        emit=emit,
    )
    return loop, backend, Ready(limits=backend.limits, load_ms=(time.monotonic_ns() - started_ns) // 1_000_000)


def open_backend(manifest: Manifest, directory: Path, *, threads: int, spin_us: int) -> Backend:
    """The backend that `manifest` was built for. Runtimes are imported here, so a worker loads only its own."""
    engine = manifest.content.engine
    match engine.target:
        case "onnxruntime-cpu":
            from residentd.backend.onnxruntime import OnnxRuntimeBackend, RuntimeOptions  # noqa: PLC0415

            return OnnxRuntimeBackend(directory, engine, options=RuntimeOptions(threads=threads, spin_us=spin_us))
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


def _expect_request(frame: ToWorker) -> Submit | Cancel | Ping | Stop:
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
