"""Every loaded version, by digest; which of them a model name means now; and the text model that goes with each."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

import structlog

from residentd.config import Config
from residentd.errors import MachineError, NotFoundError, UnavailableError
from residentd.models.manifest import Manifest
from residentd.models.registry import Registry, Version, parse_reference
from residentd.models.store import Store
from residentd.supervisor.host import EngineHost, State
from residentd.text.model import TextModel

log = structlog.get_logger("residentd.engines")


@dataclass(frozen=True, slots=True)
class Loaded:
    """One version that is in a worker, with what the daemon needs to talk to it in text."""

    version: Version
    manifest: Manifest
    host: EngineHost
    text: TextModel


class Engines:
    """Owned by the daemon; everything runs on its event loop. The registry decides, this follows."""

    def __init__(self, store: Store, registry: Registry, config: Config) -> None:
        self.store = store
        self.registry = registry
        self._config = config
        self._loaded: dict[str, Loaded] = {}  # by digest
        self._active: dict[str, str] = {}  # name -> digest of what the bare name means
        self._changing = asyncio.Lock()

    @property
    def loaded(self) -> tuple[Loaded, ...]:
        return tuple(self._loaded.values())

    @property
    def live_count(self) -> int:
        return sum(entry.host.live_count for entry in self._loaded.values())

    def active_references(self) -> dict[str, str]:
        """NAME@N of every name that requests may use bare."""
        return {name: self._loaded[digest].version.reference for name, digest in self._active.items()}

    def find(self, digest: str) -> Loaded | None:
        return self._loaded.get(digest)

    def resolve(self, model: str) -> Loaded:
        """What a request's `model` names. Raises NotFoundError, or UnavailableError when it is not loaded."""
        if not model:
            return self._only()
        name, number = parse_reference(model)
        if number is None and name in self._active:
            return self._loaded[self._active[name]]
        version = self.registry.resolve(model)
        entry = self._loaded.get(version.digest)
        if entry is None:
            raise UnavailableError(
                f"model {version.reference} is installed but not loaded. Load it: residentctl load {version.reference}"
            )
        return entry

    def _only(self) -> Loaded:
        if len(self._active) == 1:
            return self._loaded[next(iter(self._active.values()))]
        if not self._active:
            raise UnavailableError("no model is loaded. Install one with: residentctl install DIR --name NAME")
        raise NotFoundError(
            f"the request names no model. Name one of: {', '.join(sorted(self._active))}", field="model"
        )

    async def load(self, reference: str) -> Loaded:
        """Put a version into a worker and wait for READY; a bare name's requests go to it from then on.

        The version that the name meant before drains beside it. Raises MachineError with the worker's reason when it
        does not come up; then nothing has changed.
        """
        async with self._changing:
            version = self.registry.resolve(reference)
            entry = self._loaded.get(version.digest)
            if entry is None or entry.host.state in (State.FAILED, State.STOPPED):
                entry = await self._start(version)
            if parse_reference(reference)[1] is None or version.active:
                await self._switch(version.name, entry)
            return entry

    async def unload(self, reference: str) -> bool:
        """Drain and stop a loaded version. Whether every generation ended within the drain limit."""
        async with self._changing:
            version = self.registry.resolve(reference)
            entry = self._loaded.get(version.digest)
            if entry is None:
                raise NotFoundError(f"model {version.reference} is not loaded", field="model")
            return await self._retire(entry)

    async def close(self, drain_s: float) -> bool:
        """Drain everything at once. Whether every generation ended in time."""
        ended = await asyncio.gather(*(entry.host.drain(drain_s) for entry in self._loaded.values()))
        return all(ended)

    async def _start(self, version: Version) -> Loaded:
        manifest, directory = self.store.load(version.digest)
        text = await asyncio.to_thread(TextModel.load, manifest.content.text, directory)
        text.verify(manifest.content.text_goldens)
        host = EngineHost(label=version.reference, directory=directory, manifest=manifest, config=self._config)
        entry = Loaded(version=version, manifest=manifest, host=host, text=text)
        self._loaded[version.digest] = entry
        started = time.monotonic()
        host.start()
        if await host.wait_until_settled() is not State.READY:
            del self._loaded[version.digest]
            await host.stop()
            raise MachineError(f"model {version.reference} could not be loaded: {host.state_reason}")
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
