"""A check in a worker of its own: it answers once, and nothing of it is left whatever happens."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import sys
from pathlib import Path

import msgspec
import psutil
import pytest

from residentd.backend.reference import PlannedFault, ReferenceModel
from residentd.config import Config, Engine
from residentd.errors import MachineError
from residentd.models.checks import TOKENS
from residentd.models.environment import engine_environment
from residentd.models.store import Store
from residentd.supervisor import checker
from residentd.supervisor.checker import check_in_worker
from support.toy_version import make_toy_version

CONFIG = Config(engine=Engine(load_timeout_s=30.0))


def version(state: Path, model: ReferenceModel | None = None) -> Path:
    return Store(state).load(make_toy_version(state, model=model, slots=64, context=100_000))[1]


def children() -> list[int]:
    return [child.pid for child in psutil.Process(os.getpid()).children() if child.status() != psutil.STATUS_ZOMBIE]


def test_the_answer_is_what_the_worker_computed(tmp_path: Path) -> None:
    """Parts and environment; the worker is gone."""
    before = children()
    checked = asyncio.run(check_in_worker(version(tmp_path), CONFIG))
    (tokens,) = checked.parts
    assert (tokens.name, tokens.checked, tokens.missed) == (TOKENS, 12, 0)
    assert checked.environment == engine_environment()
    assert children() == before


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("crash", "the engine worker was ended by signal SIGKILL"),
        ("error", "RuntimeError: the toy model met a bug, as planned"),
        ("lost", "the toy model lost its backend, as planned"),
    ],
)
def test_a_worker_that_fails_is_the_machines_fault(tmp_path: Path, kind: str, message: str) -> None:
    """No verdict about the version: the error says why there is none."""
    model = ReferenceModel(faults=(PlannedFault(kind=kind, step=2),))  # type: ignore[arg-type]
    with pytest.raises(MachineError, match=f"the check could not be made: {message}"):
        asyncio.run(check_in_worker(version(tmp_path, model), CONFIG))


def test_a_worker_that_ends_before_it_reads_is_the_machines_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody is left to take the question: as with a worker that ends later, the error says how it ended."""

    async def ended(link: socket.socket) -> asyncio.subprocess.Process:
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", "raise SystemExit(7)")
        await process.wait()
        return process

    monkeypatch.setattr(checker, "spawn_worker", ended)
    with pytest.raises(MachineError, match="could not be made: the engine worker exited with status 7"):
        asyncio.run(check_in_worker(tmp_path, CONFIG))


@pytest.mark.parametrize("number", [errno.EAGAIN, errno.ENOMEM, errno.EMFILE])
def test_a_worker_that_cannot_be_started_is_the_machines_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """No process, memory or descriptor left: the error says which."""

    async def refused(link: socket.socket) -> asyncio.subprocess.Process:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(checker, "spawn_worker", refused)
    with pytest.raises(MachineError, match=rf"no engine worker could be started \({os.strerror(number)}\)"):
        asyncio.run(check_in_worker(tmp_path, CONFIG))


def test_a_worker_that_hangs_is_ended_at_the_limit(tmp_path: Path) -> None:
    """After engine.load_timeout_s, which the message names."""
    before = children()
    hanging = version(tmp_path, ReferenceModel(faults=(PlannedFault(kind="hang", step=1),)))
    config = msgspec.structs.replace(CONFIG, engine=Engine(load_timeout_s=1.0))
    with pytest.raises(MachineError, match=r"it took more than 1 s \(engine.load_timeout_s\)"):
        asyncio.run(check_in_worker(hanging, config))
    assert children() == before


def test_a_caller_that_leaves_takes_the_worker_with_it(tmp_path: Path) -> None:
    """Cancelled in the middle, no process stays."""
    before = children()
    slow = version(tmp_path, ReferenceModel(step_ms=5_000))

    async def leave() -> None:
        task = asyncio.create_task(check_in_worker(slow, CONFIG))
        while children() == before:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(leave())
    assert children() == before
