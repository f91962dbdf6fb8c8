"""One live request as the daemon keeps it: enough to go on in another worker with no token lost or repeated."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from dataclasses import dataclass

from residentd.types import Finished, Request, Sampled


@dataclass(slots=True)
class Times:
    """Nanoseconds of the monotonic clock; 0 until it happened."""

    arrived_ns: int
    scheduled_ns: int = 0
    first_token_ns: int = 0
    last_token_ns: int = 0
    finished_ns: int = 0


class Generation:
    """Tokens go in at one end as the worker makes them and come out at the other in batches, at the reader's pace."""

    def __init__(self, request: Request, *, now_ns: int, unread_max: int) -> None:
        self.request = request
        self.times = Times(arrived_ns=now_ns)
        self.finished: Finished | None = None
        self.resumed_count = 0
        self.barren_losses = 0  # workers lost in a row under this request without a token of it in between
        self._submitted = False  # to the worker of now
        self._submitted_before = False  # to any worker
        self._progressed = False  # a token since it was last submitted
        self._tokens: list[Sampled] = []
        self._read = 0
        self._unread_max = unread_max
        self._changed = asyncio.Event()

    @property
    def tokens_count(self) -> int:
        return len(self._tokens)

    def accept(self, index: int, sampled: Sampled, now_ns: int) -> bool:
        """Take token `index`. False when the reader is so far behind that the request must end."""
        assert index == len(self._tokens), f"token {index} arrived; {len(self._tokens)} was due"
        self._tokens.append(sampled)
        self.times.first_token_ns = self.times.first_token_ns or now_ns
        self.times.last_token_ns = now_ns
        self._progressed = True
        self._changed.set()
        return len(self._tokens) - self._read <= self._unread_max

    def finish(self, finished: Finished, now_ns: int) -> None:
        """Record the one end. Later ends are ignored: a cancel and a stop may cross on the link."""
        if self.finished is None:
            self.finished = finished
            self.times.finished_ns = now_ns
            self._changed.set()

    def submission(self) -> Request:
        """The request for a worker: everything delivered so far is context there."""
        self.resumed_count += self._submitted_before
        self._submitted, self._submitted_before, self._progressed = True, True, False
        if not self.resumed_count:
            return self.request
        generated = tuple(sampled.token for sampled in self._tokens)
        return dataclasses.replace(self.request, generated=generated, resumed=self.resumed_count)

    def lose_worker(self) -> None:
        """The worker that this request was submitted to is gone. A request that was waiting here saw nothing."""
        if self._submitted:
            self.barren_losses = 0 if self._progressed else self.barren_losses + 1
            self._submitted = False

    @property
    def progressed(self) -> bool:
        """Whether a token has arrived since the request was last submitted."""
        return self._progressed

    async def batches(self) -> AsyncIterator[list[Sampled]]:
        """Whatever has arrived since the last batch, until the end. Coalescing is what happens to a late reader."""
        while True:
            self._changed.clear()
            if self._read < len(self._tokens):
                batch = self._tokens[self._read :]
                self._read = len(self._tokens)
                yield batch
            elif self.finished is not None:
                return
            else:
                await self._changed.wait()
