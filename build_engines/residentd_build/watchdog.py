"""Ends this process where nothing else can: native code that does not come back, a parent that is gone.

What a graph of a few bytes may ask for has no end: a loop of 2^62 turns, constants that take days to compute. ONNX
Runtime can be told to stop between two nodes of a run; while it loads a graph, or is inside a node, it cannot
(onnxruntime 1.32.0 does not ask for its load cancellation flag while it folds constants). It lets other threads run,
though, and a build has a process of its own: that is ended then, by one of them, once its last event is written.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import signal
import threading
import time
from contextvars import ContextVar
from itertools import islice
from typing import TYPE_CHECKING

from residentd.errors import Finding, SourceError
from residentd_build.foreign import REMEDY, cut

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    import onnxruntime as ort

    from residentd_build.progress import Progress

    GiveUp = Callable[[SourceError], None]

PR_SET_PDEATHSIG = 1  # linux/prctl.h
LOAD_S_MAX, LOAD_S_MAX_PER_BYTE = 60.0, 2e-7
"""Of loading one graph, and for each byte of its folder: a disk of 20 MB/s, and as much again three times."""
SILENCE_S_MAX, SILENCE_S_MAX_PER_BYTE = 300.0, 1e-6
"""Between two reports of progress, for each byte of the source: several runs of the export, whose times have limits of
their own, may lie in between."""
SILENCE_S_CAP = 43_200.0  # a file may claim any size and lie on no disk
GRACE_S = 30.0  # from telling a run to stop to the end of the process, if the node that it is in does not end
ENTRIES_MAX = 10_000
BUSY = "If the machine is busy with other work, try again when it is not. Else do not trust it, or export it again"

GIVING_UP: ContextVar[GiveUp | None] = ContextVar("giving up", default=None)
"""How this process is ended, while a build runs in it; called from another thread than the build's."""


@contextlib.contextmanager
def watching(report: Progress, source: Path, give_up: GiveUp) -> Iterator[Progress]:
    """Progress to report to instead of `report`. Calls `give_up`, from another thread, when nothing is heard of it.

    Not after the context has ended; and while `give_up` runs, the context does not end.
    """
    turn = threading.Lock()

    def give_up_in_turn(error: SourceError) -> None:
        with turn:
            give_up(error)

    silence = _Silence(report, silence_s_max(source), give_up_in_turn)
    token = GIVING_UP.set(give_up_in_turn)
    try:
        yield silence.progress
    finally:
        GIVING_UP.reset(token)
        silence.end()
        turn.acquire()  # for good: who is late waits until the process ends


class _Silence:
    """Measures the time since progress was reported last."""

    def __init__(self, report: Progress, limit_s: float, give_up: GiveUp) -> None:
        self._report, self._limit_s, self._give_up = report, limit_s, give_up
        self._heard_s = time.monotonic()
        self._doing = "starting"
        self._ended = threading.Event()
        threading.Thread(target=self._watch, daemon=True, name="silence").start()

    def progress(self, stage: str, fraction: float, message: str) -> None:
        self._heard_s = math.inf  # whoever reads may take his time
        self._report(stage, fraction, message)
        self._doing = f"{stage}: {message}"
        self._heard_s = time.monotonic()

    def end(self) -> None:
        self._ended.set()

    def _watch(self) -> None:
        while (left_s := self._heard_s + self._limit_s - time.monotonic()) > 0:
            if self._ended.wait(min(left_s, self._limit_s)):
                return
        what = f"the build did not get on within {self._limit_s:,.0f} s ({cut(self._doing)})"
        self._give_up(SourceError([Finding(what, "source", BUSY)]))


@contextlib.contextmanager
def loading(path: Path, where: str) -> Iterator[None]:
    """The graph at `path`, `where` in findings, is loaded in time, or the process ends."""
    limit_s = LOAD_S_MAX + LOAD_S_MAX_PER_BYTE * _bytes_in(path.parent)
    what = f"ONNX Runtime had not loaded it within {limit_s:,.0f} s: it may hold constants that take so long to compute"
    with _ending(limit_s, Finding(what, where, BUSY)):
        yield


@contextlib.contextmanager
def running(limit_s: float, where: str) -> Iterator[ort.RunOptions]:
    """The options for one run of the export `where`. Raises SourceError if it does not end in time."""
    import onnxruntime as ort  # noqa: PLC0415 - a wrong option is refused before a second of imports

    options = ort.RunOptions()
    finding = Finding(
        f"a run of the export did not end within {limit_s:,.0f} s", where, f"Look for loops in its graph. {REMEDY}"
    )
    stop = threading.Timer(limit_s, setattr, (options, "terminate", True))
    stop.daemon = True
    stop.start()
    try:
        with _ending(limit_s + GRACE_S, finding):
            yield options
    except Exception as error:
        if not options.terminate:
            raise
        raise SourceError([finding]) from error
    finally:
        stop.cancel()


@contextlib.contextmanager
def _ending(limit_s: float, finding: Finding) -> Iterator[None]:
    """What is inside ends within `limit_s`, or the process does. No limit where no build runs."""
    give_up = GIVING_UP.get()
    if give_up is None:
        yield
        return
    timer = threading.Timer(limit_s, give_up, (SourceError([finding]),))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def silence_s_max(source: Path) -> float:
    """How long nothing may be heard of a build of `source`, a directory or an ONNX file in one."""
    folder = source if source.is_dir() else source.parent
    return min(SILENCE_S_MAX + SILENCE_S_MAX_PER_BYTE * _bytes_in(folder), SILENCE_S_CAP)


def _bytes_in(folder: Path) -> int:
    """Of the files in `folder` and in the folders in it; 0 where it cannot be read."""
    count = 0
    for pattern in ("*", "*/*"):
        with contextlib.suppress(OSError):
            count += sum(path.stat().st_size for path in islice(folder.glob(pattern), ENTRIES_MAX) if path.is_file())
    return count


def end_with(parent: int) -> None:
    """Let the kernel kill this process when the process `parent`, which started it, ends: whatever this one is doing.

    prctl(2) speaks of the parent that there is when it is called, so one that ended before is asked for afterwards.
    """
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)
