"""The loop of a model that answers in one run: frames in, one run, results out.

No sockets, no threads, no clock of its own: the worker process brings them, and tests bring others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final

from residentd.calls import Call, RunRecord, Value
from residentd.core.batching import Batcher, Run
from residentd.engine.batch_backend import BatchBackend
from residentd.engine.link import Ask, Cancel, FromWorker, Ping, Pong, Results, Submit
from residentd.errors import CallerError, StepRetryableError
from residentd.types import Finish, Finished, Refusal, RequestId

RESULTS_BYTES_MAX: Final = 16 << 20
"""Of one frame, unless a single value is larger: the daemon's end handles other frames in between."""


class BatchLoop:
    """Owns the batcher and the backend of one worker, and the calls that are in it."""

    def __init__(
        self,
        *,
        backend: BatchBackend,
        batcher: Batcher,
        clock_ns: Callable[[], int],
        emit: Callable[[FromWorker], None],
    ) -> None:
        self._backend = backend
        self._batcher = batcher
        self._clock_ns = clock_ns
        self._emit = emit
        self._calls: dict[RequestId, Call] = {}

    @property
    def idle(self) -> bool:
        return not self._batcher.has_work

    def turn(self, frames: Sequence[Submit | Ask | Cancel | Ping]) -> bool:
        """Take in `frames`, then run at most once. False when there was nothing to compute."""
        pings = [frame for frame in frames if isinstance(frame, Ping)]
        for frame in frames:
            self._accept(frame)
        self._publish([], self._batcher.expire(self._clock_ns() // 1_000_000), None)
        run = self._batcher.plan()
        if run is not None:
            self._run(run)
        elif pings:
            self._backend.canary()
        for ping in pings:
            self._emit(Pong(ping.number))
        return run is not None

    def _accept(self, frame: Submit | Ask | Cancel | Ping) -> None:
        match frame:
            case Ask(call):
                self._calls[call.id] = call
                self._publish([], self._submit(call), None)
            case Cancel(request_id, reason):
                self._publish([], self._batcher.cancel(request_id, reason), None)
            case Submit(request):
                detail = "this model answers in one run; it generates nothing"
                self._publish([], [Finished(request.id, Finish.REJECTED, detail, Refusal.INVALID)], None)
            case Ping():
                pass  # answered after this turn's run

    def _submit(self, call: Call) -> list[Finished]:
        pieces = self._backend.pieces(call)
        return self._batcher.submit(call.id, pieces, deadline_ms=call.deadline_ms, resumed=call.resumed > 0)

    def _run(self, run: Run) -> None:
        started_ns = self._clock_ns()
        try:
            values = self._backend.run([(self._calls[request_id], piece) for request_id, piece in run.pieces])
        except CallerError as error:
            self._publish([], self._batcher.refuse(run, str(error)), None)
            return
        except StepRetryableError as error:
            self._publish([], self._batcher.abort(run, str(error)), None)
            return
        record = RunRecord(
            run=run.number,
            rows=run.rows,
            weight=run.rows * run.group.weight,
            elapsed_us=(self._clock_ns() - started_ns) // 1000,
            waiting=self._batcher.waiting_count,
            ids=run.ids,
        )
        places = [(request_id, self._calls[request_id].places[piece.index]) for request_id, piece in run.pieces]
        results = [(request_id, place, value) for (request_id, place), value in zip(places, values, strict=True)]
        self._publish(results, self._batcher.commit(run), record)

    def _publish(
        self,
        results: Sequence[tuple[RequestId, int, Value]],
        finished: Sequence[Finished],
        record: RunRecord | None,
    ) -> None:
        """Emit what has become visible, in as few frames as sizes allow; nothing when there is nothing."""
        for event in finished:
            self._calls.pop(event.id, None)
        *before, last = _cut(results)
        for part in before:
            self._emit(_frame(part, [], None))
        if last or finished or record is not None:
            self._emit(_frame(last, finished, record))


def _frame(
    results: Sequence[tuple[RequestId, int, Value]], finished: Sequence[Finished], record: RunRecord | None
) -> Results:
    return Results(
        record=record,
        ids=[request_id for request_id, _, _ in results],
        places=[place for _, place, _ in results],
        values=[value for _, _, value in results],
        finished=list(finished),
    )


def _cut(results: Sequence[tuple[RequestId, int, Value]]) -> Iterator[list[tuple[RequestId, int, Value]]]:
    """Parts of at most RESULTS_BYTES_MAX, the last of which may be empty."""
    part: list[tuple[RequestId, int, Value]] = []
    size = 0
    for result in results:
        bytes_count = _size(result[2])
        if part and size + bytes_count > RESULTS_BYTES_MAX:
            yield part
            part, size = [], 0
        part.append(result)
        size += bytes_count
    yield part


def _size(value: Value) -> int:
    return len(value) if isinstance(value, bytes) else sum(len(tensor.data) for tensor in value)
