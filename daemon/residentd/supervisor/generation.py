"""One live request as the daemon keeps it: enough to go on in another worker with no token lost or repeated."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator

from residentd.engine.link import Submit
from residentd.supervisor.work import Work
from residentd.types import Request, Sampled


class Generation(Work):
    """Tokens go in at one end as the worker makes them and come out at the other in batches, at the reader's pace."""

    def __init__(self, request: Request, *, now_ns: int, unread_max: int) -> None:
        super().__init__(request.id, len(request.prompt), now_ns=now_ns)
        self.request = request
        self._tokens: list[Sampled] = []
        self._read = 0
        self._unread_max = unread_max

    @property
    def tokens_count(self) -> int:
        return len(self._tokens)

    def accept(self, index: int, sampled: Sampled, now_ns: int) -> bool:
        """Take token `index`. False when the reader is so far behind that the request must end."""
        assert index == len(self._tokens), f"token {index} arrived; {len(self._tokens)} was due"
        self._tokens.append(sampled)
        self.times.first_token_ns = self.times.first_token_ns or now_ns
        self.times.last_token_ns = now_ns
        self._progress()
        return len(self._tokens) - self._read <= self._unread_max

    def submit(self) -> Submit:
        """Everything delivered so far is context for the worker."""
        self._count_submission()
        if not self.resumed_count:
            return Submit(self.request)
        generated = tuple(sampled.token for sampled in self._tokens)
        return Submit(dataclasses.replace(self.request, generated=generated, resumed=self.resumed_count))

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
