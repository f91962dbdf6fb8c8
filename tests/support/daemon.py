"""A real residentd process on a state directory, for tests that need the whole thing."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import psutil

from resident.v1 import admin_pb2, admin_pb2_grpc, inference_pb2, inference_pb2_grpc

START_S_MAX = 60.0
STOP_S_MAX = 30.0


def wait_for(condition: Callable[[], bool], what: str, limit_s: float = START_S_MAX) -> None:
    """Return as soon as `condition` holds; fail naming `what` when it does not within the limit."""
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {limit_s:.0f} s for: {what}"
        time.sleep(0.01)


@dataclass(slots=True)
class Daemon:
    """A running daemon and channels to both of its listeners."""

    process: subprocess.Popen[bytes]
    state: Path
    address: str
    log: Path
    killed: set[int] = field(default_factory=set)

    def channel(self) -> grpc.Channel:
        return grpc.insecure_channel(self.address)

    @contextlib.contextmanager
    def admin(self) -> Iterator[admin_pb2_grpc.AdminStub]:
        with grpc.insecure_channel(f"unix:{self.state / 'admin.sock'}") as channel:
            yield admin_pb2_grpc.AdminStub(channel)

    def status(self) -> admin_pb2.StatusResponse:
        with self.admin() as stub:
            return stub.Status(admin_pb2.StatusRequest())

    def worker_pids(self) -> list[int]:
        try:
            children = psutil.Process(self.process.pid).children()
            return [child.pid for child in children if "residentd.engine.worker" in child.cmdline()]
        except psutil.NoSuchProcess:
            return []

    def kill_worker(self) -> bool:
        """SIGKILL a worker that was not killed before. False when there was none just now."""
        for pid in set(self.worker_pids()) - self.killed:
            self.killed.add(pid)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                return True
        return False

    def stop(self) -> int:
        self.process.terminate()
        return self.process.wait(STOP_S_MAX)


@contextlib.contextmanager
def running(state: Path, *, config: str = "", models: int = 1) -> Iterator[Daemon]:
    """A daemon on `state` with extra TOML `config`, once it serves `models` models. Killed at the end."""
    state.mkdir(parents=True, exist_ok=True)
    path, log = state / "test.toml", state / "daemon.log"
    listen = "" if "[listen]" in config else '[listen]\ngrpc = "127.0.0.1:0"\n'
    path.write_text(f'state = "{state}"\n{listen}{config}')
    address = state / "run" / "address"
    address.unlink(missing_ok=True)
    with log.open("wb") as stream:
        process = subprocess.Popen([sys.executable, "-m", "residentd", "--config", path], stderr=stream)
    try:
        wait_for(lambda: address.exists() or process.poll() is not None, "the daemon to listen")
        assert process.poll() is None, log.read_text()
        daemon = Daemon(process, state, address.read_text().strip(), log)
        wait_for(lambda: ready_count(daemon) >= models, f"{models} models to be ready")
        yield daemon
    finally:
        process.kill()
        process.wait()


def ready_count(daemon: Daemon) -> int:
    assert daemon.process.poll() is None, daemon.log.read_text()
    with daemon.channel() as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        try:
            models = stub.ListModels(inference_pb2.ListModelsRequest(), timeout=5).models
        except grpc.RpcError:
            return 0
    return sum(model.ready for model in models)
