"""Which waiting pieces of work run together next, for models that answer in one run. Pure.

A request is one or more pieces: a text each, or one call with tensors. Pieces of one group (texts of like length,
tensors of like shape) may share a run. The rules:

- Nothing waits while nothing runs: a run takes what is there, in one group, up to the limits.
- The lightest group goes first, so that short texts are not held up by long ones.
- Who has waited longest is passed over by at most `passed_max` runs in a row, so that nothing starves.
- Within a group the requests take turns, so that a thousand texts of one do not hold up the one text of another.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from residentd.core.deadlines import Deadlines
from residentd.types import Finish, Finished, Refusal, RequestId

BUCKET_MIN = 8


@dataclass(frozen=True, slots=True, order=True)
class Group:
    """What may run together. `weight` is what one row of it costs, in the unit of Policy.run_weight_max."""

    weight: int
    key: str = ""


@dataclass(frozen=True, slots=True)
class Piece:
    """`rows` of `group` that cannot be parted; `index` is its place in its request."""

    index: int
    group: Group
    rows: int = 1

    @property
    def weight(self) -> int:
        return self.rows * self.group.weight


@dataclass(frozen=True, slots=True)
class Run:
    """One run of the model: pieces of one group, each with its request."""

    number: int
    group: Group
    pieces: tuple[tuple[RequestId, Piece], ...]

    @property
    def rows(self) -> int:
        return sum(piece.rows for _, piece in self.pieces)

    @property
    def ids(self) -> tuple[RequestId, ...]:
        return tuple(dict.fromkeys(request_id for request_id, _ in self.pieces))


@dataclass(frozen=True, slots=True)
class Policy:
    """`waiting_weight_max` bounds what waits in all requests together; `retries_max` the failed runs of one piece."""

    run_rows_max: int
    run_weight_max: int
    waiting_max: int
    waiting_weight_max: int
    retries_max: int = 3
    passed_max: int = 3


@dataclass(slots=True)
class _Request:
    waiting: dict[int, Piece]
    alone: set[int] = field(default_factory=set)  # pieces that met a failure in company
    failures: dict[int, int] = field(default_factory=dict)


class Batcher:
    """Owns what waits. One run at a time: plan, then commit, abort or refuse it before the next."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._requests: OrderedDict[RequestId, _Request] = OrderedDict()  # in the order of their submission
        self._groups: dict[Group, OrderedDict[RequestId, deque[int]]] = {}
        self._deadlines = Deadlines()
        self._weight = 0
        self._runs = 0
        self._passed = 0
        self._running: Run | None = None

    # ---- what is there ---------------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        return bool(self._requests)

    @property
    def waiting_count(self) -> int:
        """Requests of which a piece waits."""
        return sum(bool(request.waiting) for request in self._requests.values())

    @property
    def waiting_weight(self) -> int:
        return self._weight

    @property
    def running_count(self) -> int:
        return len(self._running.ids) if self._running else 0

    # ---- requests --------------------------------------------------------------------------------------------------

    def submit(
        self, request_id: RequestId, pieces: Sequence[Piece], *, deadline_ms: int | None = None, resumed: bool = False
    ) -> list[Finished]:
        """Take a request in, or answer why not. One that was admitted before (`resumed`) is never refused for room."""
        assert request_id not in self._requests, "request ids are never reused"
        assert len({piece.index for piece in pieces}) == len(pieces), "a piece is submitted once"
        if not pieces:
            return [Finished(request_id, Finish.STOP)]
        refusal = None if resumed else self._refusal(sum(piece.weight for piece in pieces))
        if refusal is not None:
            return [Finished(request_id, Finish.REJECTED, refusal, Refusal.FULL)]
        self._requests[request_id] = _Request(waiting={})
        for piece in pieces:
            self._enqueue(request_id, piece)
        if deadline_ms is not None:
            self._deadlines.add(request_id, deadline_ms)
        return []

    def cancel(self, request_id: RequestId, reason: Finish) -> list[Finished]:
        """End a request now. What of it runs is computed to no avail; what waits is gone. Unknown ids are ignored."""
        if request_id not in self._requests:
            return []
        return [self._end(request_id, reason)]

    def expire(self, now_ms: int) -> list[Finished]:
        """End the requests whose deadline has passed."""
        return [self._end(request_id, Finish.DEADLINE) for request_id in self._deadlines.pop_late(now_ms)]

    # ---- runs ------------------------------------------------------------------------------------------------------

    def plan(self) -> Run | None:
        """The next run, None when nothing waits. Its pieces are the run's until it is committed, aborted or refused."""
        assert self._running is None, "one run at a time"
        first = self._first()
        if first is None:
            return None
        oldest = next(request_id for request_id, request in self._requests.items() if request.waiting)
        pieces = tuple(self._take(*first))
        self._runs += 1
        self._passed = 0 if any(request_id == oldest for request_id, _ in pieces) else self._passed + 1
        self._running = Run(self._runs, pieces[0][1].group, pieces)
        return self._running

    def commit(self, run: Run) -> list[Finished]:
        """The run's results are out. Ends the requests of which nothing is left."""
        self._take_back(run)
        done = [
            request_id
            for request_id in run.ids
            if (request := self._requests.get(request_id)) is not None and not request.waiting
        ]
        return [self._end(request_id, Finish.STOP) for request_id in done]

    def abort(self, run: Run, detail: str) -> list[Finished]:
        """The run failed and gave nothing. Pieces that shared it run alone from now on; one that did is tried again.

        A piece that has failed alone more than `retries_max` times ends its request.
        """
        self._take_back(run)
        if len(run.pieces) > 1:
            self._run_alone(run)
            return []
        (request_id, piece), *_ = run.pieces
        request = self._requests.get(request_id)
        if request is None:
            return []
        failures = request.failures[piece.index] = request.failures.get(piece.index, 0) + 1
        if failures > self._policy.retries_max:
            return [self._end(request_id, Finish.ENGINE_FAILED, detail)]
        self._run_alone(run)
        return []

    def refuse(self, run: Run, detail: str) -> list[Finished]:
        """The model cannot run this input. If pieces shared the run each is tried alone; the one at fault then ends."""
        self._take_back(run)
        if len(run.pieces) > 1:
            self._run_alone(run)
            return []
        request_id = run.pieces[0][0]
        if request_id not in self._requests:
            return []
        return [self._end(request_id, Finish.REJECTED, detail, Refusal.INVALID)]

    # ---- inside ----------------------------------------------------------------------------------------------------

    def _refusal(self, weight: int) -> str | None:
        policy = self._policy
        if len(self._requests) >= policy.waiting_max:
            return f"the queue holds {len(self._requests):,} of at most {policy.waiting_max:,} requests. Retry later"
        if self._weight + weight > policy.waiting_weight_max and self._weight:
            return (
                f"the queue holds {self._weight:,} and this request adds {weight:,}; at most "
                f"{policy.waiting_weight_max:,} may wait. Retry later"
            )
        return None

    def _first(self) -> tuple[Group, RequestId | None] | None:
        """The group of the next run, and the request that must be in it, if one must."""
        if not self._groups:
            return None
        if self._passed < self._policy.passed_max:
            return min(self._groups), None
        request_id = next(request_id for request_id, request in self._requests.items() if request.waiting)
        return min(group for group, queue in self._groups.items() if request_id in queue), request_id

    def _take(self, group: Group, first: RequestId | None) -> Iterator[tuple[RequestId, Piece]]:
        """Take pieces of `group` out, one of each request in turn, while they fit; the first in any case."""
        queue = self._groups[group]
        if first is not None:
            queue.move_to_end(first, last=False)
        rows = 0
        while queue:
            request_id, indexes = next(iter(queue.items()))
            request = self._requests[request_id]
            piece = request.waiting[indexes[0]]
            if rows and not self._fits(group, rows + piece.rows):
                break
            rows += piece.rows
            self._dequeue(group, request_id)
            yield request_id, piece

    def _fits(self, group: Group, rows: int) -> bool:
        return rows <= self._policy.run_rows_max and rows * group.weight <= self._policy.run_weight_max

    def _enqueue(self, request_id: RequestId, piece: Piece) -> None:
        request = self._requests[request_id]
        request.waiting[piece.index] = piece
        group = self._group_of(request_id, piece)
        self._groups.setdefault(group, OrderedDict()).setdefault(request_id, deque()).append(piece.index)
        self._weight += piece.weight

    def _dequeue(self, group: Group, request_id: RequestId) -> None:
        """Take the request's first piece out of `group`; the request goes to the end of its line."""
        queue = self._groups[group]
        indexes = queue[request_id]
        piece = self._requests[request_id].waiting.pop(indexes.popleft())
        self._weight -= piece.weight
        if indexes:
            queue.move_to_end(request_id)
        else:
            del queue[request_id]
        if not queue:
            del self._groups[group]

    def _group_of(self, request_id: RequestId, piece: Piece) -> Group:
        """A piece that must run alone is a group of its own."""
        if piece.index in self._requests[request_id].alone:
            return Group(piece.group.weight, f"{piece.group.key} alone {request_id} {piece.index}")
        return piece.group

    def _run_alone(self, run: Run) -> None:
        for request_id, piece in run.pieces:
            request = self._requests.get(request_id)
            if request is not None:
                request.alone.add(piece.index)
                self._enqueue(request_id, piece)

    def _take_back(self, run: Run) -> None:
        assert run is self._running, "only the run that was planned last can end"
        self._running = None

    def _end(self, request_id: RequestId, reason: Finish, detail: str = "", refusal: Refusal | None = None) -> Finished:
        request = self._requests[request_id]
        for piece in request.waiting.values():
            self._weight -= piece.weight
            group = self._group_of(request_id, piece)
            queue = self._groups.get(group)
            if queue is not None:
                queue.pop(request_id, None)
                if not queue:
                    del self._groups[group]
        del self._requests[request_id]
        self._deadlines.discard(request_id)
        return Finished(request_id, reason, detail, refusal)


def bucket_of(length: int) -> int:
    """The length that a text of `length` tokens is grouped under: 8, 16, 24, 32, 48, 64, 96, … so padding stays small.

    A run is padded to its longest text only; the bucket bounds how far the others are from it.
    """
    edge = BUCKET_MIN
    while edge < length:
        edge = edge * 3 // 2 if edge & (edge - 1) == 0 and edge > BUCKET_MIN else _next_power(edge)
    return edge


def _next_power(edge: int) -> int:
    return 1 << edge.bit_length()
