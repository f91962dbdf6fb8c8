"""One live request to a model that answers in one run: its values arrive in any order, each of them once."""

from __future__ import annotations

import dataclasses

from residentd.calls import Call, Value
from residentd.engine.link import Ask
from residentd.supervisor.work import Work


class Asked(Work):
    """Filled by the host as runs end; `whole` waits until it has ended."""

    def __init__(self, call: Call, *, weight: int, now_ns: int) -> None:
        super().__init__(call.id, weight, now_ns=now_ns)
        self.call = call
        self._values: dict[int, Value] = {}

    def accept(self, place: int, value: Value, now_ns: int) -> None:
        assert place not in self._values, f"value {place} arrived twice"
        self._values[place] = value
        self.times.first_token_ns = self.times.first_token_ns or now_ns
        self.times.last_token_ns = now_ns
        self._progress()

    def submit(self) -> Ask:
        """What has arrived is not asked for again."""
        self._count_submission()
        if not self._values:
            return Ask(dataclasses.replace(self.call, resumed=self.resumed_count))
        left = [index for index, place in enumerate(self.call.places) if place not in self._values]
        return Ask(
            dataclasses.replace(
                self.call,
                places=tuple(self.call.places[index] for index in left),
                rows=tuple(self.call.rows[index] for index in left),
                resumed=self.resumed_count,
            )
        )

    async def whole(self) -> list[Value]:
        """Every value in the request's order once it has ended; fewer where it ended badly."""
        while self.finished is None:
            self._changed.clear()
            await self._changed.wait()
        return [self._values[place] for place in self.call.places if place in self._values]
