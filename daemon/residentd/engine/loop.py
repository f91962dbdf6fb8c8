"""The step loop: frames in, one step, events out. Schedule, compute, sample, commit, emit.

No sockets, no threads, no clock of its own: the worker process brings them, and tests bring others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from residentd.backend.base import Backend
from residentd.core.pacing import Pacer
from residentd.core.scheduler import Scheduler
from residentd.engine.link import Ask, Cancel, Events, FromWorker, Ping, Pong, Submit
from residentd.errors import CallerError, StepRetryableError
from residentd.sampling import Sampler
from residentd.types import Event, Finish, Finished, Refusal, Request, RequestId, Row, StepPlan, StepRecord, Token

CANARY_ID: Final = RequestId(-1)
"""The row of a canary step. It goes to slot 0 of an idle engine, whose content nobody needs any more."""


class Loop:
    """Owns the scheduler, the sampler and the backend of one worker."""

    def __init__(
        self,
        *,
        backend: Backend,
        scheduler: Scheduler,
        sampler: Sampler,
        pacer: Pacer,
        clock_ns: Callable[[], int],
        emit: Callable[[FromWorker], None],
    ) -> None:
        self._backend = backend
        self._scheduler = scheduler
        self._sampler = sampler
        self._pacer = pacer
        self._clock_ns = clock_ns
        self._emit = emit
        self._canary_steps = 0

    @property
    def idle(self) -> bool:
        return not self._scheduler.has_work

    def turn(self, frames: Sequence[Submit | Ask | Cancel | Ping]) -> bool:
        """Take in `frames`, then run at most one step. False when there was nothing to compute."""
        pings = [frame for frame in frames if isinstance(frame, Ping)]
        for frame in frames:
            self._accept(frame)
        self._publish(self._scheduler.expire(self._clock_ns() // 1_000_000), None)
        plan = self._scheduler.plan(self._pacer.prefill_budget(self._scheduler.decoding_count))
        if plan is not None:
            self._step(plan)
        elif pings:
            self._canary()
        for ping in pings:
            self._emit(Pong(ping.number))
        return plan is not None

    def _accept(self, frame: Submit | Ask | Cancel | Ping) -> None:
        match frame:
            case Submit(request):
                self._publish(self._submit(request), None)
            case Cancel(request_id, reason):
                self._publish(self._scheduler.cancel(request_id, reason), None)
            case Ask(call):
                detail = "this model generates; it has no answer in one run"
                self._publish([Finished(call.id, Finish.REJECTED, detail, Refusal.INVALID)], None)
            case Ping():
                pass  # answered after this turn's step

    def _submit(self, request: Request) -> list[Event]:
        """Admit, or answer why not. What ends here is taken out of the sampler again when it is published."""
        try:
            self._sampler.add(request)
        except CallerError as error:
            return [Finished(request.id, Finish.REJECTED, str(error), Refusal.INVALID)]
        return self._scheduler.submit(request)

    def _step(self, plan: StepPlan) -> None:
        started_ns = self._clock_ns()
        sampling = [row.id for row in plan.rows if row.samples]
        try:
            logits = self._backend.step(plan)
            sampled = self._sampler.sample(sampling, logits) if sampling else []
        except StepRetryableError:
            self._publish(self._scheduler.abort(plan, fatal=False), None)
            return
        events = self._scheduler.commit(plan, dict(zip(sampling, sampled, strict=True)))
        for event in events:
            if isinstance(event, Token):
                self._sampler.commit(event.id, event.sampled.token)
        record = self._record(plan, (self._clock_ns() - started_ns) // 1000)
        self._pacer.observe(record)
        self._publish(events, record)

    def _record(self, plan: StepPlan, elapsed_us: int) -> StepRecord:
        prefills = [row for row in plan.rows if not (row.samples and len(row.tokens) == 1)]
        return StepRecord(
            step=plan.step,
            decode_rows=len(plan.rows) - len(prefills),
            prefill_rows=len(prefills),
            prefill_tokens=sum(len(row.tokens) for row in prefills),
            elapsed_us=elapsed_us,
            waiting=self._scheduler.waiting_count,
            running=self._scheduler.running_count,
            ids=tuple(row.id for row in plan.rows if row.start == 0),
        )

    def _publish(self, events: list[Event], record: StepRecord | None) -> None:
        """Emit one frame with everything that has become visible; nothing when there is nothing."""
        if not events and record is None:
            return
        tokens = [event for event in events if isinstance(event, Token)]
        finished = [event for event in events if isinstance(event, Finished)]
        for event in finished:
            self._sampler.remove(event.id)
        logprobs = [event.sampled.logprobs for event in tokens]
        self._emit(
            Events(
                record=record,
                ids=[event.id for event in tokens],
                indexes=[event.index for event in tokens],
                tokens=[event.sampled.token for event in tokens],
                logprobs=logprobs if any(entry is not None for entry in logprobs) else [],
                finished=finished,
            )
        )

    def _canary(self) -> None:
        """One real step of an idle engine: proof that the backend still computes."""
        self._canary_steps += 1
        row = Row(id=CANARY_ID, slot=0, start=0, tokens=(0,), samples=True)
        self._backend.step(StepPlan(step=-self._canary_steps, rows=(row,)))
