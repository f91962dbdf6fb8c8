"""resident.v1.Admin: what the operator's tools call, on the unix socket only."""

from __future__ import annotations

import asyncio
import importlib.metadata
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import psutil

from resident.v1 import admin_pb2, admin_pb2_grpc
from residentd.config import Config
from residentd.errors import ConflictError, NotFoundError, OperatorError, ResidentError, StoreError
from residentd.models.checks import Check
from residentd.models.manifest import Manifest, check_name
from residentd.models.registry import Version
from residentd.rpc import convert
from residentd.rpc.health import HealthFeed
from residentd.supervisor.engines import Engines, Loaded
from residentd.supervisor.installer import BuildOptions, build
from residentd.supervisor.stats import Percentiles

LOAD_FRACTION = 0.9  # of an installation, when the build is done and loading begins


class AdminServicer(admin_pb2_grpc.AdminServicer):
    def __init__(self, engines: Engines, feed: HealthFeed, config: Config) -> None:
        self._engines = engines
        self._feed = feed  # refreshed before a change is answered, so that health agrees with the answer
        self._config = config
        self._started = time.monotonic()
        self._installing = asyncio.Lock()
        self._verifying = asyncio.Lock()

    async def Install(
        self, request: admin_pb2.InstallRequest, context: convert.Context
    ) -> AsyncIterator[admin_pb2.InstallProgress]:
        async with convert.reporting(context):
            if self._installing.locked():
                raise ConflictError("another installation is running. Wait for its end, or cancel it")
            async with self._installing:
                installed: dict[str, Any] = {}
                async for event in build(_options(request, self._config)):
                    installed = event
                    if event["event"] == "progress":
                        yield admin_pb2.InstallProgress(
                            stage=event["stage"],
                            fraction=event["fraction"] * LOAD_FRACTION,
                            message=event.get("message", ""),
                        )
                reference = f"{installed['name']}@{installed['version']}"
                if not request.keep_active:
                    yield admin_pb2.InstallProgress(
                        stage="load", fraction=LOAD_FRACTION, message=f"loading {reference}"
                    )
                    await self._engines.activate(reference)
                    await self._feed.refresh()
                message = await self._version_message(self._engines.registry.resolve(reference))
                yield admin_pb2.InstallProgress(stage="done", fraction=1.0, message=reference, installed=message)

    async def ListVersions(
        self, request: admin_pb2.ListVersionsRequest, context: convert.Context
    ) -> admin_pb2.ListVersionsResponse:
        async with convert.reporting(context):
            versions = await asyncio.to_thread(self._engines.registry.versions, request.name or None)
            return admin_pb2.ListVersionsResponse(versions=await self._version_messages(versions))
        raise AssertionError("reporting() does not swallow")

    async def Status(self, _request: admin_pb2.StatusRequest, context: convert.Context) -> admin_pb2.StatusResponse:
        async with convert.reporting(context):
            return admin_pb2.StatusResponse(
                residentd_version=importlib.metadata.version("residentd"),
                uptime_s=time.monotonic() - self._started,
                engines=[self._engine_status(entry) for entry in (*self._engines.loaded, *self._engines.loading)],
                state=self._config.state,
            )
        raise AssertionError("reporting() does not swallow")

    async def Load(self, request: admin_pb2.LoadRequest, context: convert.Context) -> admin_pb2.LoadResponse:
        async with convert.reporting(context):
            loaded = await self._engines.load(request.model)
            await self._feed.refresh()
            return admin_pb2.LoadResponse(version=await self._version_message(loaded.version))
        raise AssertionError("reporting() does not swallow")

    async def Unload(self, request: admin_pb2.UnloadRequest, context: convert.Context) -> admin_pb2.UnloadResponse:
        async with convert.reporting(context):
            await self._engines.unload(request.model)
            await self._feed.refresh()
            return admin_pb2.UnloadResponse()
        raise AssertionError("reporting() does not swallow")

    async def Verify(self, request: admin_pb2.VerifyRequest, context: convert.Context) -> admin_pb2.VerifyResponse:
        async with convert.reporting(context):
            if self._verifying.locked():
                raise ConflictError("another verification is running. Wait for its end, or cancel it")
            started = time.monotonic()
            async with self._verifying:
                version = await self._engines.verify(request.model)
                await self._feed.refresh()
            serving = self._engines.active.get(version.name)
            return admin_pb2.VerifyResponse(
                version=await self._version_message(version),
                serving="" if serving is None else serving.version.reference,
                seconds=time.monotonic() - started,
            )
        raise AssertionError("reporting() does not swallow")

    def _engine_status(self, entry: Loaded) -> admin_pb2.EngineStatus:
        message = _engine_status(entry, self._config)
        check = self._engines.gate.last(entry.version)
        if check is not None:
            message.check.CopyFrom(convert.check_message(check))
        return message

    async def _version_message(self, version: Version) -> admin_pb2.Version:
        (message,) = await self._version_messages((version,))
        return message

    async def _version_messages(self, versions: Sequence[Version]) -> list[admin_pb2.Version]:
        """What is on disk is read in a thread; what the engines do is known on their event loop only."""
        found = await asyncio.to_thread(lambda: [self._recorded(version) for version in versions])
        return [
            _version_message(version, self._engines.state_of(version, check), check, manifest)
            for version, (check, manifest) in zip(versions, found, strict=True)
        ]

    def _recorded(self, version: Version) -> tuple[Check | None, Manifest | ResidentError]:
        """Its last check and its manifest, or why that cannot be had."""
        check = self._engines.gate.last(version)
        try:
            manifest, _ = self._engines.store.load(version.digest)
        except (StoreError, NotFoundError) as error:
            return check, error
        return check, manifest


def _version_message(
    version: Version, state: tuple[str, str], check: Check | None, manifest: Manifest | ResidentError
) -> admin_pb2.Version:
    message = admin_pb2.Version(
        name=version.name,
        number=version.number,
        digest=version.digest,
        created=version.created,
        active=version.active,
        state=state[0],
        state_reason=state[1],
    )
    if check is not None:
        message.check.CopyFrom(convert.check_message(check))
        if check.speeds is not None:
            message.speeds.CopyFrom(admin_pb2.Speeds(**msgspec.structs.asdict(check.speeds)))
    if isinstance(manifest, ResidentError):
        message.state, message.state_reason = "failed", str(manifest)
    else:
        _describe(message, manifest)
    return message


def _describe(message: admin_pb2.Version, manifest: Manifest) -> None:
    content, agreement = manifest.content, manifest.agreement
    message.kind = content.kind
    message.architecture = content.architecture
    message.target = content.engine.target
    message.precision = content.engine.precision
    message.mode = content.engine.mode
    message.mode_reason = content.engine.mode_reason
    message.context = content.engine.limits.context
    message.slots = content.engine.limits.slots
    message.bytes = sum(file.bytes for file in content.files.values())
    message.logit_diff_max = agreement.logit_diff_max
    message.logit_diff_bound = agreement.logit_diff_bound
    message.greedy_equal = agreement.greedy_equal
    message.greedy_total = agreement.greedy_total
    message.weights = content.engine.weights
    message.candidates.extend(manifest.build.candidates)
    if manifest.quality is not None:
        message.quality.CopyFrom(admin_pb2.Quality(**msgspec.structs.asdict(manifest.quality)))
    if manifest.cost is not None:
        message.cost.CopyFrom(admin_pb2.Cost(**msgspec.structs.asdict(manifest.cost)))


def _engine_status(loaded: Loaded, config: Config) -> admin_pb2.EngineStatus:
    host, now_ns = loaded.host, time.monotonic_ns()
    stats, limits = host.stats, loaded.manifest.content.engine.limits
    return admin_pb2.EngineStatus(
        model_version=loaded.version.reference,
        digest=loaded.version.digest,
        state=str(host.state),
        state_reason=host.state_reason,
        worker_pid=host.pid,
        worker_restarts=host.restarts,
        slots=limits.slots,
        slots_used=stats.running if host.live_count else 0,
        waiting=stats.waiting if host.live_count else 0,
        kv_tokens_used=host.kv_tokens_used,
        kv_tokens_total=limits.slots * limits.context if loaded.kind == "generate" else 0,
        kind=loaded.kind,
        mode=loaded.manifest.content.engine.mode,
        steps=stats.steps,
        prompt_tokens_per_s=stats.prompt_tokens.rate_per_s(now_ns, stats.started_ns),
        output_tokens_per_s=stats.output_tokens.rate_per_s(now_ns, stats.started_ns),
        ttft_ms=_percentiles(stats.ttft_ms.percentiles(now_ns)),
        itl_ms=_percentiles(stats.itl_ms.percentiles(now_ns)),
        finished=dict(stats.finished),
        worker_memory_bytes=_memory_bytes(host.pid),
        scheduling=config.engine.scheduling,
        batch_rows_max=stats.batch_rows_max,
    )


def _percentiles(values: Percentiles) -> admin_pb2.Percentiles:
    return admin_pb2.Percentiles(p50=values.p50, p95=values.p95, p99=values.p99, count=values.count)


def _memory_bytes(pid: int) -> int:
    """Resident memory of the worker; 0 where there is none."""
    if not pid:
        return 0
    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.NoSuchProcess:
        return 0


def _options(request: admin_pb2.InstallRequest, config: Config) -> BuildOptions:
    if not Path(request.directory).is_absolute():
        raise OperatorError(f"the directory {request.directory!r} is not an absolute path. Give one")
    return BuildOptions(
        directory=request.directory,
        name=check_name(request.name),
        state=config.state,
        context=request.context,
        slots=request.slots,
        step_tokens=request.step_tokens,
        keep_active=True,  # the name moves once the version has come up, not before
        precision=request.precision,
        block=request.block if request.HasField("block") else None,
        symmetric=request.symmetric if request.HasField("symmetric") else None,
        embedding=request.embedding,
        head=request.head,
        kl_max=request.kl_max,
        mode=request.mode,
        variant=request.variant,
        kind=request.kind,
        shapes=tuple(request.shapes),
    )
