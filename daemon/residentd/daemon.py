"""The daemon's life: lock the state, listen, load what is active, serve, drain, leave."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import signal
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, Final

import grpc
import structlog

from residentd.config import Config
from residentd.errors import ConfigError, ResidentError
from residentd.models.registry import Registry
from residentd.models.store import Store
from residentd.rpc.health import HealthFeed
from residentd.rpc.server import admin_socket, serve_admin, serve_inference
from residentd.supervisor.engines import Engines

STATE_MODE: Final = 0o750
WRITABLE_BY_OTHERS: Final = 0o022
CALLS_GRACE_S: Final = 1.0  # for the last messages of drained streams to leave

log = structlog.get_logger("residentd")


async def run(config: Config) -> None:
    """Serve until SIGTERM or SIGINT. Raises ResidentError when it cannot start."""
    state = _own_state(Path(config.state))
    with _sole_daemon(state):
        store = Store(state)
        registry = Registry(state)
        try:
            store.sweep(registry.digests)
            engines = Engines(store, registry, config)
            await _serve(engines, config)
        finally:
            registry.close()


async def _serve(engines: Engines, config: Config) -> None:
    stopping = _stop_signal()
    feed = HealthFeed(engines)
    await feed.refresh()
    servers: list[grpc.aio.Server] = []
    tasks: list[asyncio.Task[None]] = []
    try:
        servers.append(await serve_admin(engines, feed, config))
        if config.listen.grpc:
            server, port = await serve_inference(engines, feed, config)
            servers.append(server)
            _publish_address(config, port)
        log.info("listening", grpc=config.listen.grpc, admin=str(admin_socket(config)))
        tasks += [_watched(feed.run(), stopping), _watched(_load_all(engines, config), stopping)]
        await stopping.wait()
    finally:
        await _leave(engines, feed, servers, tasks, config)
    for task in tasks:
        if not task.cancelled() and (error := task.exception()) is not None:
            raise error


def _watched(work: Coroutine[Any, Any, None], stopping: asyncio.Event) -> asyncio.Task[None]:
    """A background task whose failure stops the daemon: systemd starts a whole one again."""

    def ended(task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:
            log.error("background_task_failed", exc_info=task.exception())
            stopping.set()

    task = asyncio.create_task(work)
    task.add_done_callback(ended)
    return task


async def _leave(
    engines: Engines,
    feed: HealthFeed,
    servers: list[grpc.aio.Server],
    tasks: list[asyncio.Task[None]],
    config: Config,
) -> None:
    """NOT_SERVING, finish what runs within the drain limit, close. New calls are refused with a retry hint."""
    log.info("draining", live=engines.live_count, limit_s=config.engine.drain_s)
    for task in tasks:
        task.cancel()
    await feed.servicer.enter_graceful_shutdown()
    ended = await engines.close(config.engine.drain_s)
    await asyncio.gather(*(server.stop(CALLS_GRACE_S) for server in servers))
    for path in (admin_socket(config), _address_file(config)):
        path.unlink(missing_ok=True)
    log.info("stopped", all_ended=ended)


async def _load_all(engines: Engines, config: Config) -> None:
    """Load what the configuration names, or what every name means; one that fails is logged and leaves the others."""

    async def one(load: Callable[[str], Coroutine[Any, Any, object]], reference: str) -> None:
        try:
            await load(reference)
        except ResidentError as error:
            log.error("load_failed", model=reference, reason=str(error))  # noqa: TRY400  (the reason says it all)

    if config.models:
        await asyncio.gather(*(one(engines.load, reference) for reference in config.models))
    else:
        names = {version.name for version in engines.registry.versions() if version.active}
        await asyncio.gather(*(one(engines.load_last_good, name) for name in sorted(names)))


def _own_state(state: Path) -> Path:
    """The state directory, made if need be. Raises ConfigError where others could put their files into it."""
    try:
        state.mkdir(mode=STATE_MODE, parents=True, exist_ok=True)
        found = state.stat()
    except OSError as error:
        raise ConfigError(
            f"the state directory {state} cannot be used: {error.strerror}. Set `state` to another"
        ) from error
    if found.st_uid != os.geteuid() or found.st_mode & WRITABLE_BY_OTHERS:
        raise ConfigError(
            f"the state directory {state} belongs to user {found.st_uid} with mode {found.st_mode & 0o777:04o}: others "
            f"could replace a model in it. Run: chown {os.geteuid()} {state}; chmod {STATE_MODE:o} {state}"
        )
    return state


def _publish_address(config: Config, port: int) -> None:
    """Write the bound HOST:PORT where local tools look for it: the configured port may be 0."""
    host = config.listen.grpc.rpartition(":")[0]
    path = _address_file(config)
    path.parent.mkdir(mode=STATE_MODE, exist_ok=True)
    temporary = path.with_suffix(".new")
    temporary.write_text(f"{host}:{port}\n")
    temporary.rename(path)


def _address_file(config: Config) -> Path:
    return Path(config.state) / "run" / "address"


def _stop_signal() -> asyncio.Event:
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    return stopping


@contextlib.contextmanager
def _sole_daemon(state: Path) -> Iterator[None]:
    """Hold the state's daemon lock: a second daemon would silently take over a live unix socket."""
    try:
        fd = os.open(state / "daemon.lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o640)
    except OSError as error:
        reason = f"the state directory {state} cannot be written: {error.strerror}. Make it writable"
        raise ConfigError(reason) from error
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(
                f"another residentd runs on the state directory {state}. Stop it, or set another `state`"
            ) from error
        yield
    finally:
        os.close(fd)
