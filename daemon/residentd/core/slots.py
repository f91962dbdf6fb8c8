"""The pool of KV slots. A sequence owns one slot from its first step until it ends."""

from __future__ import annotations

import heapq


class SlotPool:
    """Hands out the lowest free slot, so that live slots stay compact.

    A backend that computes over slots 0 … highest live one pays for the gaps (ONNX Runtime does).
    """

    def __init__(self, count: int) -> None:
        self._free = list(range(count))  # ascending, hence already a heap

    @property
    def free_count(self) -> int:
        return len(self._free)

    @property
    def free(self) -> tuple[int, ...]:
        """The free slots, in no order."""
        return tuple(self._free)

    def take(self) -> int:
        assert self._free, "no slot is free"
        return heapq.heappop(self._free)

    def give(self, slot: int) -> None:
        heapq.heappush(self._free, slot)
