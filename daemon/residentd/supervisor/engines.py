"""Every loaded version, by NAME@N; which of them a model name means now; and the text model that goes with each."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, TypeVar

import structlog

from residentd.config import Config
from residentd.engine.link import Checked
from residentd.errors import (
    AccuracyError,
    CallerError,
    LoadError,
    NotFoundError,
    OperatorError,
    ResidentError,
    StoreError,
    UnavailableError,
)
from residentd.models.checks import FILES, Check, Part
from residentd.models.encoder import Kind
from residentd.models.manifest import Manifest
from residentd.models.registry import Registry, Version
from residentd.models.store import Store
from residentd.supervisor.checker import check_in_worker
from residentd.supervisor.gate import Gate
from residentd.supervisor.host import EngineHost, State
from residentd.text.encoder_text import EncoderText
from residentd.text.model import TextModel

log = structlog.get_logger("residentd.engines")

T = TypeVar("T")

DEGRADED: Final = "degraded"
"""The state of a version whose last check failed."""
CALLS: Final[Mapping[Kind, str]] = MappingProxyType(
    {
        "generate": "Generate or Complete",
        "embed": "Embed",
        "classify": "Classify",
        "rerank": "Rerank or Classify",
        "tensor": "Infer",
    }
)
"""What each kind of model answers."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """One version that is in a worker, with what the daemon needs to talk to it in text."""

    version: Version
    manifest: Manifest
    host: EngineHost
    texts: TextModel | EncoderText | None  # None: a tensor model

    @property
    def kind(self) -> Kind:
        return self.manifest.content.kind

    @property
    def text(self) -> TextModel:
        """Of a model that generates. Raises CallerError for one that does not."""
        if not isinstance(self.texts, TextModel):
            raise wrong_kind(self, "generates text")
        return self.texts

    @property
    def encoder(self) -> EncoderText:
        """Of a model that embeds, classifies or ranks text. Raises CallerError for one that does not."""
        if not isinstance(self.texts, EncoderText):
            raise wrong_kind(self, "embeds, classifies or ranks text")
        return self.texts


def wrong_kind(loaded: Loaded, wanted: str) -> CallerError:
    """The refusal of a call that this kind of model cannot answer."""
    reference, kind = loaded.version.reference, loaded.kind
    return CallerError(
        f"model {reference} is of kind {kind}; this call wants one that {wanted}. Use {CALLS[kind]}, or name another "
        "model",
        field="model",
    )


class Engines:
    """Owned by the daemon; everything runs on its event loop. The registry decides, this follows.

    One worker for each loaded NAME@N. Changes of one name run one at a time, in tasks of their own: a caller that goes
    away does not leave one half done, and one name does not wait for another.
    """

    def __init__(self, store: Store, registry: Registry, config: Config) -> None:
        self.store = store
        self.registry = registry
        self.gate = Gate(store, registry)
        self._config = config
        self._loaded: dict[str, Loaded] = {}  # by reference; has been READY
        self._loading: dict[str, Loaded] = {}  # by reference; on the way there
        self._failures: dict[str, Exception] = {}  # by reference: why the last load failed
        self._active: dict[str, str] = {}  # name -> reference of what the bare name means now
        self._changing: dict[str, asyncio.Lock] = {}  # by name
        self._tasks: set[asyncio.Task[Any]] = set()

    @property
    def loaded(self) -> tuple[Loaded, ...]:
        return tuple(self._loaded.values())

    @property
    def loading(self) -> tuple[Loaded, ...]:
        return tuple(self._loading.values())

    @property
    def active(self) -> dict[str, Loaded]:
        """What each name that requests may use bare means."""
        return {name: self._loaded[reference] for name, reference in self._active.items()}

    @property
    def live_count(self) -> int:
        return sum(entry.host.live_count for entry in self._loaded.values())

    def state_of(self, version: Version, check: Check | None) -> tuple[str, str]:
        """State and reason of an installed version, whose last check is `check`.

        One of: available, loading, ready, draining, failed, degraded.
        """
        reference = version.reference
        if reference in self._loading:
            host = self._loading[reference].host
            return str(host.state), host.state_reason
        entry, degraded = self._loaded.get(reference), "" if check is None else check.message
        failure = self._failures.get(reference) if entry is None else None
        if failure is not None and not (degraded and isinstance(failure, AccuracyError)):
            return str(State.FAILED), str(failure)
        if degraded:
            serves = entry is not None and entry.host.state is State.READY
            return DEGRADED, degraded + (". It still serves" if serves else "")
        return ("available", "") if entry is None else (str(entry.host.state), entry.host.state_reason)

    def resolve(self, model: str, kinds: Sequence[Kind] = ()) -> Loaded:
        """What a request's `model` names; empty: the only active one, if need be of the first kind that has one.

        Raises NotFoundError, or UnavailableError when it is not loaded. The kind of a named model is not judged here.
        """
        if not model:
            return self._only(kinds)
        entry = self._loaded.get(self._active.get(model, model))
        if entry is not None:
            return entry
        reference = self.registry.resolve(model).reference
        if reference in self._loaded:
            return self._loaded[reference]
        if reference in self._loading:
            raise UnavailableError(f"model {reference} is loading. Retry later")
        if reference in self._failures:
            raise UnavailableError(f"model {reference} could not be loaded; the operator's `residentctl list` says why")
        raise UnavailableError(f"model {reference} is installed but not loaded. Load it: residentctl load {reference}")

    def _only(self, kinds: Sequence[Kind]) -> Loaded:
        for kind in kinds:
            fitting = [entry for entry in self.active.values() if entry.kind == kind]
            if len(fitting) == 1:
                return fitting[0]
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

        The version that the name meant before drains beside it. Raises LoadError with the reason when it does not come
        up; then nothing has changed.
        """
        version = self.registry.resolve(reference)
        return await self._change(version.name, self._load(version, takes_name=version.active))

    async def activate(self, reference: str) -> Loaded:
        """`load`, then let the name mean this version, in the registry too."""
        version = self.registry.resolve(reference)
        return await self._change(version.name, self._activate(version))

    async def load_last_good(self, name: str) -> Loaded:
        """Load what `name` means, or where that does not come up its last good version. Raises LoadError."""
        version = self.registry.active(name)
        return await self._change(name, self._load_first((version, *self._last_good(version))))

    async def verify(self, reference: str) -> Version:
        """Check a version, loaded or not, in a worker of its own; the requests of a loaded one go on.

        Past a bound it is DEGRADED from then on, and its name falls back to the last good version, if there is one; a
        check that passes ends that. Raises NotFoundError, or MachineError when it could not be checked.
        """
        version = self.registry.resolve(reference)
        parts, environment = await self._check(version)
        check = self.gate.record(version, "verify", parts, environment)
        if check.passed:
            self._failures.pop(version.reference, None)
        else:
            await self._fall_back(version)
        return version

    async def unload(self, reference: str) -> bool:
        """Drain and stop a version that is loaded, or give up loading it. Whether every generation ended in time."""
        version = self.registry.resolve(reference)
        loading = self._loading.get(version.reference)
        if loading is not None:
            await loading.host.stop()
            return True
        return await self._change(version.name, self._unload(version))

    async def close(self, drain_s: float) -> bool:
        """Drain everything at once. Whether every generation ended in time."""
        entries = (*self._loaded.values(), *self._loading.values())
        ended = await asyncio.gather(*(entry.host.drain(drain_s) for entry in entries))
        return all(ended)

    async def _change(self, name: str, work: Coroutine[Any, Any, T]) -> T:
        async def alone() -> T:
            async with self._changing.setdefault(name, asyncio.Lock()):
                return await work

        task = asyncio.create_task(alone())
        self._keep(task)
        return await asyncio.shield(task)

    def _keep(self, task: asyncio.Task[Any]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._forget)

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # the caller has it, or has gone away

    async def _check(self, version: Version) -> tuple[tuple[Part, ...], dict[str, str] | None]:
        """Every part of a check, and what the engine was computed with. Raises MachineError."""
        try:
            manifest, directory, files = await asyncio.to_thread(self.gate.check_files, version)
            _, texts = await asyncio.to_thread(self.gate.check_text, manifest, directory)
        except (StoreError, OSError) as error:
            return (Part(name=FILES, checked=1, missed=1, detail=str(error)),), None
        checked = await check_in_worker(directory, self._config)
        return (files, *texts, *checked.parts), checked.environment

    async def _fall_back(self, version: Version) -> None:
        """Let the name of a DEGRADED version mean its last good one. Without one nothing changes."""
        for other in self._last_good(version):
            if self._active.get(version.name) != version.reference:
                return
            try:
                await self._change(version.name, self._relieve(version, other))
            except LoadError as error:
                log.warning("trying_last_good", failed=other.reference, reason=str(error))
        if self._active.get(version.name) == version.reference:
            log.error("no_good_version", model=version.reference)

    def _last_good(self, version: Version) -> list[Version]:
        """What else the operator let the name of `version` mean, the last first, as far as a worker here found it good.

        Not what was only installed, nor what the name was rolled back from: nobody asked for that to serve.
        """
        others = (other for other in self.registry.promoted(version.name) if other.number != version.number)
        return [other for other in others if self.gate.proven(other)]

    async def _relieve(self, version: Version, other: Version) -> None:
        if self._active.get(version.name) == version.reference:
            await self._load(other, takes_name=True)
            log.warning("fell_back", degraded=version.reference, serving=other.reference)

    async def _activate(self, version: Version) -> Loaded:
        entry = await self._load(version, takes_name=False)
        self.registry.activate(version.name, version.number)
        await self._switch(version.name, entry)
        return entry

    async def _load_first(self, versions: tuple[Version, ...]) -> Loaded:
        for version in versions[:-1]:
            try:
                return await self._load(version, takes_name=True)
            except LoadError as error:
                log.warning("trying_last_good", failed=version.reference, reason=str(error))
        return await self._load(versions[-1], takes_name=True)

    async def _load(self, version: Version, *, takes_name: bool) -> Loaded:
        entry = self._loaded.get(version.reference)
        if entry is not None and entry.host.state is State.LOADING:
            await entry.host.wait_until_settled()
        if entry is None or entry.host.state in (State.FAILED, State.STOPPED):
            entry = await self._start(version)
        if takes_name:
            await self._switch(version.name, entry)
        return entry

    async def _unload(self, version: Version) -> bool:
        entry = self._loaded.get(version.reference)
        if entry is None:
            raise NotFoundError(f"model {version.reference} is not loaded", field="model")
        return await self._retire(entry)

    async def _start(self, version: Version) -> Loaded:
        started = time.monotonic()
        try:
            entry = await self._prepare(version)
            self._loading[version.reference] = entry
            try:
                entry.host.start()
                state = await entry.host.wait_until_settled()
            finally:
                del self._loading[version.reference]
            if state is not State.READY:
                reason, refused = entry.host.state_reason, bool(entry.host.refusal)
                await entry.host.stop()
                raise AccuracyError(reason) if refused else LoadError(reason)
        except (ResidentError, OSError, ValueError) as error:
            self._failures[version.reference] = error.with_traceback(None)  # which would keep all that was loaded
            raise LoadError(f"model {version.reference} could not be loaded: {error}") from error
        self._failures.pop(version.reference, None)
        self._loaded[version.reference] = entry
        log.info("model_loaded", model=version.reference, seconds=round(time.monotonic() - started, 2))
        return entry

    async def _prepare(self, version: Version) -> Loaded:
        """Everything before the worker. Every file must still be what its manifest says: 0.4 s for 540 MB."""
        manifest, directory, files = await asyncio.to_thread(self.gate.check_files, version)
        text, texts = await asyncio.to_thread(self.gate.check_text, manifest, directory)
        if not all(part.passed for part in texts):
            raise AccuracyError(self.gate.record(version, "load", (files, *texts)).message)
        if text is None and manifest.content.kind != "tensor":
            raise OperatorError("it has no tokenizer, and only tensor models are served without. Install it again")
        host = EngineHost(
            label=version.reference,
            directory=directory,
            manifest=manifest,
            config=self._config,
            on_checked=lambda checked: self._judge(version, (files, *texts), checked),
            measures=self.gate.lacks_speeds(version),
        )
        return Loaded(version=version, manifest=manifest, host=host, texts=text)

    def _judge(self, version: Version, before: tuple[Part, ...], checked: Checked) -> str:
        """Why a worker that has just started may not serve; empty when it may. `before`: checked without it."""
        parts = (*before, *checked.parts)
        check = self.gate.record(version, "load", parts, checked.environment, checked.speeds)
        if not check.passed and version.reference in self._loaded:  # one that was good took over from a lost one
            self._keep(asyncio.create_task(self._fall_back(version)))
        return check.message

    async def _switch(self, name: str, entry: Loaded) -> None:
        old = self._active.get(name)
        self._active[name] = entry.version.reference
        if old is not None and old != entry.version.reference:
            await self._retire(self._loaded[old])

    async def _retire(self, entry: Loaded) -> bool:
        reference = entry.version.reference
        self._active = {name: active for name, active in self._active.items() if active != reference}
        ended = await entry.host.drain(self._config.engine.drain_s)
        self._loaded.pop(reference, None)
        return ended
