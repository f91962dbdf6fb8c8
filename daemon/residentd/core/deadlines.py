"""Which requests are late. Costs nothing while none is."""

from __future__ import annotations

from collections.abc import Mapping

from residentd.types import RequestId


class Deadlines:
    """Deadlines of the live requests, on the caller's clock."""

    def __init__(self) -> None:
        self._due_ms: dict[RequestId, int] = {}
        self._earliest_ms: int | None = None  # never later than the true earliest; earlier once that one was discarded

    @property
    def due_ms(self) -> Mapping[RequestId, int]:
        return self._due_ms

    def add(self, request_id: RequestId, due_ms: int) -> None:
        self._due_ms[request_id] = due_ms
        if self._earliest_ms is None or due_ms < self._earliest_ms:
            self._earliest_ms = due_ms

    def discard(self, request_id: RequestId) -> None:
        self._due_ms.pop(request_id, None)

    def pop_late(self, now_ms: int) -> list[RequestId]:
        """Take out the requests that are due at `now_ms`, in the order of their arrival."""
        if self._earliest_ms is None or now_ms < self._earliest_ms:
            return []
        late = [request_id for request_id, due_ms in self._due_ms.items() if due_ms <= now_ms]
        for request_id in late:
            del self._due_ms[request_id]
        self._earliest_ms = min(self._due_ms.values(), default=None)
        return late
