"""Every loaded version, by digest; which of them a model name means now; and the text model that goes with each."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

import structlog

from residentd.config import Config
from residentd.errors import LoadError, NotFoundError, UnavailableError
from residentd.models.manifest import Manifest
from residentd.models.registry import Registry, Version
from residentd.models.store import Store
from residentd.supervisor.host import EngineHost, State
from residentd.text.model import TextModel

log = structlog.get_logger("residentd.engines")

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Loaded:
    """One version that is in a worker, with what the daemon needs to talk to it in text."""

    version: Version
    manifest: Manifest
    host: EngineHost
    text: TextModel


class Engines:
    """Owned by the daemon; everything runs on its event loop. The registry decides, this follows.

    Changes run one at a time in tasks of their own: a caller that goes away does not leave one half done.
    """

    def __init__(self, store: Store, registry: Registry, config: Config) -> None:
        self.store = store
        self.registry = registry
        self._config = config
        self._loaded: dict[str, Loaded] = {}  # by digest; has been READY
        self._loading: dict[str, Loaded] = {}  # by digest; on the way there
        self._active: dict[str, str] = {}  # name -> digest of what the bare name means
        self._changing = asyncio.Lock()
        self._tasks: set[asyncio.Task[Any]] = set()

    @property
    def loaded(self) -> tuple[Loaded, ...]:
        return tuple(self._loaded.values())

    @property
    def active(self) -> dict[str, Loaded]:
        """What each name that requests may use bare means."""
        return {name: self._loaded[digest] for name, digest in self._active.items()}

    @property
    def live_count(self) -> int:
        return sum(entry.host.live_count for entry in self._loaded.values())

    def find(self, digest: str) -> Loaded | None:
        """The entry of a version that is loaded or on the way there."""
        return self._loading.get(digest) or self._loaded.get(digest)

    def resolve(self, model: str) -> Loaded:
        """What a request's `model` names. Raises NotFoundError, or UnavailableError when it is not loaded."""
        if not model:
            return self._only()
        if model in self._active:
            return self._loaded[self._active[model]]
        for entry in self._loaded.values():
            if entry.version.reference == model:
                return entry
        version = self.registry.resolve(model)
        if version.digest in self._loading:
            raise UnavailableError(f"model {version.reference} is loading. Retry later")
        if version.digest in self._loaded:
            return self._loaded[version.digest]
        raise UnavailableError(
            f"model {version.reference} is installed but not loaded. Load it: residentctl load {version.reference}"
        )

    def _only(self) -> Loaded:
        if len(self._active) == 1:
            return self._loaded[next(iter(self._active.values()))]
        if self._active:
            names = ", ".join(sorted(self._active))
            raise NotFoundError(f"the request names no model. Name one of: {names}", field="model")
        if self._loading:
            raise UnavailableError("no model is ready yet. Retry later")
        raise UnavailableError("no model is loaded. Install one with: residentctl install DIR --name NAME")

    async def load(self, reference: str) -> Loaded:
        """Put a version into a worker and wait for READY. If its name means it, so do requests from then on.

        The version that the name meant before drains beside it. Raises LoadError with the worker's reason when it does
        not come up; then nothing has changed.
        """
        return await self._change(self._load(reference, activate=False))

    async def activate(self, reference: str) -> Loaded:
        """`load`, then let the name mean this version, in the registry too."""
        return await self._change(self._load(reference, activate=True))

    async def unload(self, reference: str) -> bool:
        """Drain and stop a loaded version. Whether every generation ended within the drain limit."""
        return await self._change(self._unload(reference))

    async def close(self, drain_s: float) -> bool:
        """Drain everything at once. Whether every generation ended in time."""
        entries = (*self._loaded.values(), *self._loading.values())
        ended = await asyncio.gather(*(entry.host.drain(drain_s) for entry in entries))
        return all(ended)

    async def _change(self, work: Coroutine[Any, Any, T]) -> T:
        async def alone() -> T:
            async with self._changing:
                return await work

        task = asyncio.create_task(alone())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return await asyncio.shield(task)

    async def _load(self, reference: str, *, activate: bool) -> Loaded:
        version = self.registry.resolve(reference)
        entry = self._loaded.get(version.digest)
        if entry is None or entry.host.state in (State.FAILED, State.STOPPED):
            entry = await self._start(version)
        if activate:
            self.registry.activate(version.name, version.number)
        if activate or version.active:
            await self._switch(version.name, entry)
        return entry

    async def _unload(self, reference: str) -> bool:
        version = self.registry.resolve(reference)
        entry = self._loaded.get(version.digest)
        if entry is None:
            raise NotFoundError(f"model {version.reference} is not loaded", field="model")
        return await self._retire(entry)

    async def _start(self, version: Version) -> Loaded:
        manifest, directory = self.store.load(version.digest)
        text = await asyncio.to_thread(TextModel.load, manifest.content.text, directory)
        await asyncio.to_thread(text.verify, manifest.content.text_goldens)
        host = EngineHost(label=version.reference, directory=directory, manifest=manifest, config=self._config)
        entry = Loaded(version=version, manifest=manifest, host=host, text=text)
        self._loading[version.digest] = entry
        started = time.monotonic()
        host.start()
        try:
            state = await host.wait_until_settled()
        finally:
            del self._loading[version.digest]
        if state is not State.READY:
            reason = host.state_reason
            await host.stop()
            raise LoadError(f"model {version.reference} could not be loaded: {reason}")
        self._loaded[version.digest] = entry
        log.info("model_loaded", model=version.reference, seconds=round(time.monotonic() - started, 2))
        return entry

    async def _switch(self, name: str, entry: Loaded) -> None:
        old = self._active.get(name)
        self._active[name] = entry.version.digest
        if old is not None and old != entry.version.digest and old not in self._active.values():
            await self._retire(self._loaded[old])

    async def _retire(self, entry: Loaded) -> bool:
        digest = entry.version.digest
        self._active = {name: active for name, active in self._active.items() if active != digest}
        ended = await entry.host.drain(self._config.engine.drain_s)
        self._loaded.pop(digest, None)
        return ended
