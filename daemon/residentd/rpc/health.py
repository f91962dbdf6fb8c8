"""grpc.health.v1, fed from what the engines do.

service ""                         SERVING when every active model is READY and makes progress, and there is one
service "resident.v1.Inference"    likewise
service NAME or NAME@N             SERVING when that model is READY and makes progress; SERVICE_UNKNOWN if not loaded

A version that loads beside the active one, or drains after it, changes nothing for those who name no version.
"""

from __future__ import annotations

import asyncio
import time
from typing import Final

from grpc_health.v1 import health, health_pb2

from residentd.supervisor.engines import Engines

PERIOD_S: Final = 0.25
INFERENCE_SERVICE: Final = "resident.v1.Inference"
_STATUS: Final = health_pb2.HealthCheckResponse


class HealthFeed:
    """Copies the engines' progress into a HealthServicer, a few times a second."""

    def __init__(self, engines: Engines) -> None:
        self.servicer = health.aio.HealthServicer()
        self._engines = engines
        self._shown: dict[str, bool] = {}

    async def run(self) -> None:
        while True:
            await self.refresh()
            await asyncio.sleep(PERIOD_S)

    async def refresh(self) -> None:
        now = time.monotonic()
        by_name = {name: entry.host.progressing(now=now) for name, entry in self._engines.active.items()}
        states = {entry.version.reference: entry.host.progressing(now=now) for entry in self._engines.loaded} | by_name
        states[""] = states[INFERENCE_SERVICE] = bool(by_name) and all(by_name.values())
        for gone in self._shown.keys() - states.keys():
            await self.servicer.set(gone, _STATUS.SERVICE_UNKNOWN)
        for service, serving in states.items():
            if self._shown.get(service) != serving:
                await self.servicer.set(service, _STATUS.SERVING if serving else _STATUS.NOT_SERVING)
        self._shown = states
