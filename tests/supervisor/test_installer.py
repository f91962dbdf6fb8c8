"""A build that is cancelled, killed or orphaned: it ends, and nothing of it is left."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from residentd.errors import MachineError
from residentd.supervisor import installer
from residentd.supervisor.installer import BuildOptions, build

EXPORT = Path(__file__).resolve().parent.parent / "fixtures" / "exports" / "llama"
WAIT_S_MAX = 30.0

# A compiler that stages something, says its pid, and hears no signal, as in native code; or crashes, as that may.
COMPILER = """
import json, os, pathlib, signal, sys
from residentd.models.store import Store

signal.signal(signal.SIGTERM, signal.SIG_IGN)
with Store(pathlib.Path(sys.argv[3])).staging() as stage:
    (stage.path / "half").write_text("done")
    event = {"event": "progress", "stage": "verify", "fraction": 0.5, "message": str(os.getpid())}
    print(json.dumps(event), flush=True)
    if sys.argv[1] == "crash":
        os.kill(os.getpid(), signal.SIGKILL)
    while True:
        signal.pause()
"""


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A state directory; `python -m residentd_build` is COMPILER, for this process's children."""
    package = tmp_path / "modules" / "residentd_build"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "__main__.py").write_text(COMPILER)
    monkeypatch.setenv("PYTHONPATH", str(package.parent))
    return tmp_path / "state"


async def first_then_close(options: BuildOptions) -> int:
    """The compiler's pid; the build is cancelled when it has said it."""
    async with contextlib.aclosing(build(options)) as events:
        async for event in events:
            return int(event["message"])
    raise AssertionError("the compiler said nothing")


def test_a_cancelled_build_has_ended_and_left_nothing(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the cancelling returns: whoever asks next finds no process, no stage, and no lock."""
    monkeypatch.setattr(installer, "CANCEL_GRACE_S", 0.2)
    started = time.monotonic()
    pid = asyncio.run(first_then_close(BuildOptions("hang", "toy", str(state))))
    assert not psutil.pid_exists(pid)
    assert list((state / "staging").iterdir()) == []
    assert time.monotonic() - started < WAIT_S_MAX


def test_a_cancelled_build_whose_canceller_is_cancelled_too_has_ended(state: Path) -> None:
    """A daemon that stops waits for nobody, and still leaves no compiler and no stage behind."""

    async def cancel_twice() -> int:
        told: asyncio.Queue[int] = asyncio.Queue()

        async def follow() -> None:
            async for event in build(BuildOptions("hang", "toy", str(state))):
                told.put_nowait(int(event["message"]))

        task = asyncio.create_task(follow())
        pid = await told.get()
        task.cancel()
        await asyncio.sleep(0)  # the first has reached the build, which waits for the compiler
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        return pid

    assert not psutil.pid_exists(asyncio.run(cancel_twice()))
    assert list((state / "staging").iterdir()) == []


def test_a_build_that_is_killed_leaves_nothing(state: Path) -> None:
    """By the kernel for want of memory, say: what it had staged goes at once, not with the next installation."""

    async def follow() -> None:
        async for _ in build(BuildOptions("crash", "toy", str(state))):
            pass

    with pytest.raises(MachineError, match="ended with signal 9"):
        asyncio.run(follow())
    assert list((state / "staging").iterdir()) == []


def test_a_build_ends_with_its_daemon(tmp_path: Path) -> None:
    """kill -9 of the daemon, which can tell nobody."""
    script = f"""
import asyncio, os, psutil
from residentd.supervisor.installer import BuildOptions, build

async def follow():
    async for _ in build(BuildOptions({str(EXPORT)!r}, "toy", {str(tmp_path / "state")!r})):
        print(psutil.Process().children()[0].pid, flush=True)
        await asyncio.Event().wait()

asyncio.run(follow())
"""
    daemon = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert daemon.stdout is not None
    builder = psutil.Process(int(daemon.stdout.readline()))
    daemon.kill()
    daemon.communicate(timeout=WAIT_S_MAX)
    gone = psutil.wait_procs([builder], timeout=WAIT_S_MAX)[0]
    assert gone or builder.status() == psutil.STATUS_ZOMBIE
