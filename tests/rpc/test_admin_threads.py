"""Where the Admin service reads what: files in a thread, engines on their event loop."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from pathlib import Path
from typing import Any

from resident.v1 import admin_pb2
from residentd.config import Config
from residentd.models.checks import FILES, Check, Part
from residentd.models.manifest import Manifest
from residentd.models.registry import Registry, Version
from residentd.models.store import Store
from residentd.rpc.admin import AdminServicer
from residentd.rpc.health import HealthFeed
from residentd.supervisor.engines import Engines
from support.toy_version import make_toy_version

VERSIONS = 3


class Here:
    """Counts calls by their name and by whether they come from this thread."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self.counts: Counter[tuple[str, bool]] = Counter()

    def note(self, name: str) -> None:
        self.counts[name, threading.get_ident() == self._thread] += 1


class WatchedEngines(Engines):
    here: Here

    def state_of(self, *arguments: Any) -> tuple[str, str]:
        self.here.note("state")
        return super().state_of(*arguments)


class WatchedRegistry(Registry):
    here: Here

    def last_check(self, version: Version) -> Check | None:
        self.here.note("check")
        return super().last_check(version)


class WatchedStore(Store):
    here: Here

    def load(self, digest: str) -> tuple[Manifest, Path]:
        self.here.note("files")
        return super().load(digest)


def test_a_listing_asks_the_engines_on_their_loop_and_the_rest_once(tmp_path: Path) -> None:
    """A load that begins or ends meanwhile changes what state_of looks into: no other thread may look."""
    for number in range(VERSIONS):
        make_toy_version(tmp_path, vocab=512 + number)
    here = WatchedEngines.here = WatchedRegistry.here = WatchedStore.here = Here()
    registry, config = WatchedRegistry(tmp_path), Config(state=str(tmp_path))
    registry.record_check(registry.resolve("toy"), "load", [Part(name=FILES, checked=1, missed=0)], {})
    engines = WatchedEngines(WatchedStore(tmp_path), registry, config)

    async def listed() -> admin_pb2.ListVersionsResponse:
        servicer = AdminServicer(engines, HealthFeed(engines), config)
        context: Any = None  # for errors only
        return await servicer.ListVersions(admin_pb2.ListVersionsRequest(), context)

    versions = asyncio.run(listed()).versions
    registry.close()
    assert [version.state for version in versions] == ["available"] * VERSIONS
    assert [version.HasField("check") for version in versions] == [False, False, True]
    assert here.counts == {("state", True): VERSIONS, ("files", False): VERSIONS, ("check", False): VERSIONS}


def test_a_version_whose_files_are_gone_is_listed_as_failed(tmp_path: Path) -> None:
    """The others are listed beside it."""
    digest = make_toy_version(tmp_path)
    make_toy_version(tmp_path, vocab=2048)
    (tmp_path / "versions" / digest).rename(tmp_path / "elsewhere")
    registry, config = Registry(tmp_path), Config(state=str(tmp_path))
    engines = Engines(Store(tmp_path), registry, config)
    context: Any = None

    async def listed() -> admin_pb2.ListVersionsResponse:
        servicer = AdminServicer(engines, HealthFeed(engines), config)
        return await servicer.ListVersions(admin_pb2.ListVersionsRequest(), context)

    gone, there = asyncio.run(listed()).versions
    registry.close()
    assert (gone.state, there.state) == ("failed", "available")
    assert "is not in the store" in gone.state_reason
