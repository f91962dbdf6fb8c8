"""One live request as the daemon keeps it, whatever it asks for: enough to go on in another worker."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from residentd.engine.link import Ask, Submit
from residentd.types import Finished, RequestId


@dataclass(slots=True)
class Times:
    """Nanoseconds of the monotonic clock; 0 until it happened."""

    arrived_ns: int
    scheduled_ns: int = 0
    first_token_ns: int = 0
    last_token_ns: int = 0
    finished_ns: int = 0


class Work:
    """Owned by its host while it lives. `weight` is what it adds to a queue: tokens of text, or bytes of tensors."""

    def __init__(self, request_id: RequestId, weight: int, *, now_ns: int) -> None:
        self.id = request_id
        self.weight = weight
        self.times = Times(arrived_ns=now_ns)
        self.finished: Finished | None = None
        self.resumed_count = 0
        self.barren_losses = 0  # workers lost in a row under this request without progress of it in between
        self._submitted = False  # to the worker of now
        self._submitted_before = False  # to any worker
        self._progressed = False  # since it was last submitted
        self._changed = asyncio.Event()

    @property
    def progressed(self) -> bool:
        """Whether some of the answer has arrived since the request was last submitted."""
        return self._progressed

    def submit(self) -> Submit | Ask:
        """Count as submitted to a new worker, and give what it is sent: all that is still to do."""
        raise NotImplementedError

    def finish(self, finished: Finished, now_ns: int) -> None:
        """Record the one end. Later ends are ignored: a cancel and a stop may cross on the link."""
        if self.finished is None:
            self.finished = finished
            self.times.finished_ns = now_ns
            self._changed.set()

    def lose_worker(self) -> None:
        """The worker that this request was submitted to is gone. A request that was waiting here saw nothing."""
        if self._submitted:
            self.barren_losses = 0 if self._progressed else self.barren_losses + 1
            self._submitted = False

    def _count_submission(self) -> None:
        self.resumed_count += self._submitted_before
        self._submitted, self._submitted_before, self._progressed = True, True, False

    def _progress(self) -> None:
        self._progressed = True
        self._changed.set()
