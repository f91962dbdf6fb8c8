"""One scheduler's life under a daemon that keeps what it delivered, judged after every transition.

`Life` is driven with plain values, by the seeded simulator and by Hypothesis alike. It keeps its own account of what
each request must be doing, from plans and events only, and compares.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from residentd.core.invariants import check
from residentd.core.scheduler import Policy, Scheduler
from residentd.types import (
    Event,
    Finish,
    Finished,
    Limits,
    Refusal,
    Request,
    RequestId,
    Row,
    Sampled,
    StepPlan,
    Token,
)
from sim.device import FakeDevice, chosen, solo


@dataclass(frozen=True, slots=True)
class Core:
    """The code under test; mutants bring their own."""

    scheduler: Callable[[Limits, Policy], Scheduler] = Scheduler
    check: Callable[[Scheduler], None] = check


@dataclass(slots=True)
class Client:
    """One request as the daemon and its client know it."""

    request: Request  # as first submitted
    delivered: list[int] = field(default_factory=list)
    end: Finished | None = None
    leaving: Finish | None = None  # a cancel or a deadline took effect: no further token
    slot: int | None = None
    computed: int = 0
    failures: int = 0  # steps in a row
    losses: int = 0
    alone: list[int] = field(default_factory=list)  # cache of `want`

    def want(self, vocab: int) -> list[int]:
        """What the request gets served alone."""
        self.alone = self.alone or solo(self.request, vocab)
        return self.alone

    @property
    def tokens(self) -> list[int]:
        return [*self.request.prompt, *self.delivered]

    @property
    def pending(self) -> int:
        return len(self.request.prompt) + len(self.delivered) - self.computed


class Life:
    """Daemon, scheduler and device together. Every method raises AssertionError when what happened is not right."""

    def __init__(self, limits: Limits, policy: Policy, core: Core, trace: Callable[[str], None] | None = None) -> None:
        self.limits, self.policy, self._core = limits, policy, core
        self.clients: dict[RequestId, Client] = {}
        self.log: list[tuple[Any, ...]] = []  # everything that came out, for replay
        self.now_ms = 0
        self.plan: StepPlan | None = None
        self._trace = trace
        self._queue_resumed: list[RequestId] = []
        self._queue_new: list[RequestId] = []
        self._seated: list[RequestId] = []
        self._worker()

    @property
    def live(self) -> list[RequestId]:
        return [*self._seated, *self._queue_resumed, *self._queue_new]

    @property
    def waiting_full(self) -> bool:
        return len(self.live) >= self.limits.slots + self.policy.waiting_max

    @property
    def work_left(self) -> int:
        """Token computations until every live request has ended, at most."""
        clients = [self.clients[request_id] for request_id in self.live]
        return sum(client.pending + client.request.params.tokens_max - len(client.delivered) for client in clients)

    @property
    def decoding_count(self) -> int:
        count = sum(1 for request_id in self._seated if self.clients[request_id].pending == 1)
        assert count == self._scheduler.decoding_count, "decodes are miscounted"
        return count

    def _worker(self) -> None:
        self._scheduler = self._core.scheduler(self.limits, self.policy)
        self._device = FakeDevice(self.limits)

    # -- traffic -------------------------------------------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        """A new request arrives."""
        assert request.id not in self.clients
        self.clients[request.id] = Client(request)
        self._say("submit", request.id, len(request.prompt), request.params.tokens_max)
        refusal = self._refusal_due(request)
        events = self._scheduler.submit(request)
        if refusal is None:
            self._queue_new.append(request.id)
            assert not events, f"{request.id} fits and was answered with {events}"
        else:
            assert [(event.id, _refusal_of(event)) for event in events] == [(request.id, refusal)], (
                f"{request.id} had to be refused as {refusal}, got {events}"
            )
        self._deliver(events)

    def _refusal_due(self, request: Request) -> Refusal | None:
        count, tokens_max = len(request.prompt), request.params.tokens_max
        outside = any(not 0 <= token < self.limits.vocab for token in request.prompt)
        if count < 1 or tokens_max < 1 or count + tokens_max > self.limits.capacity or outside:
            return Refusal.INVALID
        waiting = [self.clients[other] for other in (*self._queue_resumed, *self._queue_new)]
        tokens = sum(len(client.tokens) for client in waiting) + count
        if self.waiting_full or tokens > self.policy.waiting_tokens_max:
            return Refusal.FULL
        return None

    def cancel(self, request_id: RequestId, reason: Finish = Finish.CANCELLED) -> None:
        """The client of `request_id` leaves; it may have ended, left before, or never existed."""
        self._say("cancel", request_id, reason)
        client = self.clients.get(request_id)
        alive = client is not None and client.end is None
        in_flight = self._in_flight(request_id)
        events = self._scheduler.cancel(request_id, reason)
        if not alive or in_flight:
            assert not events, f"cancel of {request_id} had to be silent, got {events}"
        else:
            assert events == [Finished(request_id, reason)], f"cancel of {request_id} gave {events}"
        if client is not None and alive:
            client.leaving = client.leaving or reason
        self._deliver(events)

    def expire(self, elapsed_ms: int) -> None:
        """Time passes; every deadline that has come is kept now, or with the step in flight."""
        self.now_ms += elapsed_ms
        late = [request_id for request_id in self.live if self._is_late(request_id)]
        events = self._scheduler.expire(self.now_ms)
        at_once = {request_id for request_id in late if not self._in_flight(request_id)}
        assert {event.id for event in events} == at_once, f"late are {at_once}, ended were {events}"
        for request_id in late:
            self.clients[request_id].leaving = self.clients[request_id].leaving or Finish.DEADLINE
        self._deliver(events)

    def _is_late(self, request_id: RequestId) -> bool:
        deadline_ms = self.clients[request_id].request.deadline_ms
        return deadline_ms is not None and deadline_ms <= self.now_ms

    # -- steps ---------------------------------------------------------------------------------------------------------

    def start_step(self, prefill_tokens_max: int | None) -> bool:
        """Plan a step and hand it to the device. False when nothing lives."""
        assert self.plan is None
        plan = self._scheduler.plan(prefill_tokens_max)
        if plan is None:
            assert not self.live, f"stuck: {self.live} live and nothing is planned"
            return False
        self._say("plan", plan.step, *((row.id, row.slot, row.start, len(row.tokens)) for row in plan.rows))
        self._judge_plan(plan, prefill_tokens_max)
        self.plan = plan
        self._core.check(self._scheduler)
        return True

    def commit(self, delivered: int | None = None) -> None:
        """The step in flight succeeds. `delivered`: the worker dies with only that many of its events out."""
        plan = self._landed()
        sampled = {
            request_id: Sampled(self._chosen(request_id, prefix))
            for request_id, prefix in self._device.run(plan).items()
        }
        events = self._scheduler.commit(plan, sampled)
        self._judge_commit(plan, events)
        if delivered is not None:
            events = events[:delivered]
        for row in plan.rows:
            client = self.clients[row.id]
            client.computed += len(row.tokens)
            client.failures = 0
        self._deliver(events)

    def abort(self, *, fatal: bool) -> None:
        """The step in flight fails, having scribbled over what it was given."""
        plan = self._landed()
        self._device.wreck(plan)
        due = {}
        for row in plan.rows:
            client = self.clients[row.id]
            client.failures += 1
            if client.leaving or client.failures > self.policy.retries_max:
                due[row.id] = client.leaving or Finish.ENGINE_FAILED
        if fatal:
            due |= {request_id: Finish.ENGINE_FAILED for request_id in self.live if request_id not in due}
            self._device = FakeDevice(self.limits)
        self._say("abort", fatal)
        events = self._scheduler.abort(plan, fatal=fatal)
        assert {event.id: _reason_of(event) for event in events} == due, f"after a failed step due: {due}, got {events}"
        self._deliver(events)

    def lose_worker(self, newcomer: Request | None = None) -> None:
        """The worker dies with everything it held. The daemon starts another and resubmits what is live.

        `newcomer` arrives in the midst of that.
        """
        self._say("lost")
        survivors = sorted(self.live)
        self.plan = None
        self._seated, self._queue_resumed, self._queue_new = [], [], []
        self._worker()
        for position, request_id in enumerate(survivors):
            if newcomer is not None and position == len(survivors) // 2:
                self.submit(newcomer)
            self._resubmit(request_id)
        self._core.check(self._scheduler)

    def _resubmit(self, request_id: RequestId) -> None:
        client = self.clients[request_id]
        client.slot, client.computed, client.failures = None, 0, 0
        client.losses += 1
        if client.leaving is not None:  # the daemon knows: it does not come back
            self._end(Finished(request_id, client.leaving))
            return
        request = dataclasses.replace(client.request, generated=tuple(client.delivered), resumed=client.losses)
        events = self._scheduler.submit(request)
        complete = client.delivered == client.want(self.limits.vocab)
        assert bool(events) == complete, f"{request_id} is {complete=} and was resumed with {events}"
        if not complete:
            self._queue_resumed.append(request_id)
        self._deliver(events)

    # -- what is right -------------------------------------------------------------------------------------------------

    def _judge_plan(self, plan: StepPlan, prefill_tokens_max: int | None) -> None:
        decoding = [request_id for request_id in self._seated if self.clients[request_id].pending == 1]
        prefilling = [request_id for request_id in self._seated if self.clients[request_id].pending > 1]
        lengths = {row.id: len(row.tokens) for row in plan.rows}
        assert len(lengths) == len(plan.rows), "two rows for one request"
        assert plan.tokens_count <= self.limits.step_tokens_max, "step_tokens_max is exceeded"
        assert all(lengths.get(request_id) == 1 for request_id in decoding), "a decode was skipped"
        room = self.limits.step_tokens_max - len(decoding)
        budget = room if prefill_tokens_max is None else min(room, max(1, prefill_tokens_max))
        left = budget - (plan.tokens_count - len(decoding))
        assert left >= 0, "the prefill budget is exceeded"
        assert not prefilling or lengths.get(prefilling[0], 0) >= 1, "the oldest prefill is starved"
        self._judge_seating([row for row in plan.rows if row.id not in self._seated])
        for row in plan.rows:
            self._judge_row(row)
        if left:
            idle = [request_id for request_id in self._seated if request_id not in lengths]
            assert not idle, f"{idle} stand still although {left} tokens of budget remain"
            assert all(row.samples for row in plan.rows), f"a prefill stops although {left} tokens of budget remain"
            full = len(self._seated) == self.limits.slots
            assert full or not (self._queue_resumed or self._queue_new), "a request waits beside a free slot"
        order = [
            request_id for request_id in self._seated if lengths.get(request_id, 0) > 0 and request_id in prefilling
        ]
        assert order == prefilling[: len(order)], "prefill is not first come, first served"

    def _judge_seating(self, rows: list[Row]) -> None:
        """New rows take the first waiting requests, in order, into the lowest free slots."""
        for row in rows:
            queue = self._queue_resumed or self._queue_new
            assert queue, f"{row.id} has a row and does not wait"
            assert queue.pop(0) == row.id, f"{row.id} was seated out of turn"
            taken = {self.clients[request_id].slot for request_id in self._seated}
            free = min(slot for slot in range(self.limits.slots) if slot not in taken)
            assert row.slot == free, f"{row.id} got slot {row.slot}, the lowest free one is {free}"
            self.clients[row.id].slot = row.slot
            self._seated.append(row.id)

    def _judge_row(self, row: Row) -> None:
        client = self.clients[row.id]
        end = row.start + len(row.tokens)
        assert (row.slot, row.start) == (client.slot, client.computed), f"{row} is not where {row.id} stands"
        assert row.tokens == tuple(client.tokens[row.start : end]), f"{row} has other tokens than {row.id}"
        assert row.samples == (end == len(client.tokens)), f"{row} samples at {end} of {len(client.tokens)}"

    def _judge_commit(self, plan: StepPlan, events: list[Event]) -> None:
        """Exactly the rows that sample and do not leave emit; those that leave end, and others as `_end` judges."""
        emitting = [row.id for row in plan.rows if row.samples and self.clients[row.id].leaving is None]
        leaving = {row.id for row in plan.rows if self.clients[row.id].leaving is not None}
        assert [event.id for event in events if isinstance(event, Token)] == emitting, "another row emitted"
        ended = {event.id for event in events if isinstance(event, Finished)}
        assert leaving <= ended, f"{leaving - ended} had to end with their step"

    def _deliver(self, events: list[Event]) -> None:
        for event in events:
            client = self.clients[event.id]
            assert client.end is None, f"after its end, {event.id} got {event}"
            if isinstance(event, Finished):
                self._end(event)
                continue
            self._say("token", event.id, event.index, event.sampled.token)
            assert client.leaving is None, f"{event.id} had left and got {event}"
            assert event.index == len(client.delivered), f"{event} is not the next token of {event.id}"
            client.delivered.append(event.sampled.token)
        self._core.check(self._scheduler)

    def _end(self, event: Finished) -> None:
        self._say("end", event.id, event.reason)
        client = self.clients[event.id]
        client.end = event
        for queue in (self._seated, self._queue_resumed, self._queue_new):
            if event.id in queue:
                queue.remove(event.id)
        if event.reason in {Finish.REJECTED, Finish.ENGINE_FAILED}:
            assert event.detail, f"{event} says nothing"
            return
        want = client.want(self.limits.vocab)
        if client.leaving is not None:
            assert event.reason is client.leaving, f"{event.id} left by {client.leaving}, got {event}"
            assert client.delivered == want[: len(client.delivered)], f"{event.id} was not served as alone"
            return
        assert client.delivered == want, f"{event.id} got {client.delivered}, alone it gets {want}"
        stopped = want[-1] in client.request.params.stop_ids and len(want) > client.request.params.tokens_min
        assert event.reason is (Finish.STOP if stopped else Finish.LENGTH), f"{event} has the wrong reason"

    def at_rest(self) -> None:
        """Everything ended, every slot is free."""
        assert all(client.end is not None for client in self.clients.values()), "a request never got its end"
        assert not self._scheduler.has_work, "work is left at rest"
        assert (self._scheduler.waiting_count, self._scheduler.running_count) == (0, 0), "a count is not 0 at rest"
        assert self._scheduler.waiting_tokens_count == 0, "waiting tokens are left at rest"
        self._core.check(self._scheduler)

    # -- parts ---------------------------------------------------------------------------------------------------------

    def _landed(self) -> StepPlan:
        plan, self.plan = self.plan, None
        assert plan is not None
        return plan

    def _in_flight(self, request_id: RequestId) -> bool:
        return self.plan is not None and any(row.id == request_id for row in self.plan.rows)

    def _chosen(self, request_id: RequestId, prefix: list[int]) -> int:
        client = self.clients[request_id]
        return chosen(prefix, client.request.params.seed, len(client.delivered), self.limits.vocab)

    def _say(self, *what: object) -> None:
        self.log.append(what)
        if self._trace is not None:
            self._trace(" ".join(map(str, what)))


def _reason_of(event: Event) -> Finish | None:
    return event.reason if isinstance(event, Finished) else None


def _refusal_of(event: Event) -> Refusal | None:
    return event.refusal if isinstance(event, Finished) else None
