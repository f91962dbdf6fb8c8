"""The pure scheduler: what happens comes in as calls with plain values, what should happen goes out as values.

    submit | cancel | expire  ->  events
    plan  ->  a step for the backend  ->  commit | abort  ->  events

- One step is in flight at a time. Nothing it computed is visible before its commit, and nothing at all after an abort.
- A row in flight is released at commit or abort of its step, never earlier: the backend may still write its slot.
- Every request gets exactly one Finished, and nothing after it.
- Decodes first, one token each in every step; then prefill, first come, first served, in the same step. Prefill gets at
  least one token of every step, so neither starves the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from residentd.core.admission import misfit_of
from residentd.core.deadlines import Deadlines
from residentd.core.sequence import Sequence, ending_of, sequence_from
from residentd.core.slots import SlotPool
from residentd.core.waiting import WaitingQueue, is_resumed
from residentd.errors import OperatorError
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


@dataclass(frozen=True, slots=True)
class Policy:
    """What the operator allows."""

    waiting_max: int  # new requests beyond those that the slots hold or, as soon as a step is planned, will hold
    waiting_tokens_max: int  # their tokens
    retries_max: int  # failed steps in a row that one request survives


class Scheduler:
    """Owns every live sequence, the slots and the step in flight. Raises OperatorError for limits it cannot keep."""

    def __init__(self, limits: Limits, policy: Policy) -> None:
        _check_limits(limits)
        _check_policy(policy, limits)
        self.limits = limits
        self.policy = policy
        self._slots = SlotPool(limits.slots)
        self._waiting = WaitingQueue()
        self._running: dict[RequestId, Sequence] = {}  # in the order in which they got their slots
        self._live: dict[RequestId, Sequence] = {}  # waiting and running
        self._deadlines = Deadlines()
        self._in_flight: StepPlan | None = None
        self._in_flight_ids: frozenset[RequestId] = frozenset()
        self._doomed: dict[RequestId, Finish] = {}  # rows in flight that end with their step
        self._step = 0

    @property
    def waiting_count(self) -> int:
        return len(self._waiting)

    @property
    def waiting_tokens_count(self) -> int:
        return self._waiting.tokens_count

    @property
    def running_count(self) -> int:
        return len(self._running)

    @property
    def decoding_count(self) -> int:
        """Running sequences that compute one token in the next step and sample. Walks the running ones."""
        return sum(1 for sequence in self._running.values() if sequence.pending == 1)

    @property
    def computed_count(self) -> int:
        """Tokens whose K/V the live slots hold. Walks the running sequences."""
        return sum(sequence.computed for sequence in self._running.values())

    @property
    def has_work(self) -> bool:
        return bool(self._live)

    def sequence(self, request_id: RequestId) -> Sequence | None:
        """The live sequence, for reading only."""
        return self._live.get(request_id)

    # -- what happens --------------------------------------------------------------------------------------------------

    def submit(self, request: Request) -> list[Event]:
        """Queue `request`, or end it at once: refused, or (resumed) already complete."""
        assert request.id not in self._live, f"request {request.id} is live already"
        if misfit := misfit_of(request, self.limits):
            return [Finished(request.id, Finish.REJECTED, misfit, Refusal.INVALID)]
        if reason := ending_of(request):
            return [Finished(request.id, reason)]
        sequence = sequence_from(request)
        if not is_resumed(sequence) and (lack := self._lack_of_room(sequence)):
            return [Finished(request.id, Finish.REJECTED, lack, Refusal.FULL)]
        self._live[request.id] = sequence
        self._waiting.push(sequence)
        if request.deadline_ms is not None:
            self._deadlines.add(request.id, request.deadline_ms)
        return []

    def cancel(self, request_id: RequestId, reason: Finish = Finish.CANCELLED) -> list[Event]:
        """End a request for `reason`: now, or with its step. Idempotent; unknown and ended ids are no error."""
        sequence = self._live.get(request_id)
        if sequence is None:
            return []
        if request_id in self._in_flight_ids:
            self._doomed.setdefault(request_id, reason)
            return []
        return [self._release(sequence, reason)]

    def expire(self, now_ms: int) -> list[Event]:
        """End every request whose deadline is at or before `now_ms`."""
        return [
            event
            for request_id in self._deadlines.pop_late(now_ms)
            for event in self.cancel(request_id, Finish.DEADLINE)
        ]

    # -- one step ------------------------------------------------------------------------------------------------------

    def plan(self, prefill_tokens_max: int | None = None) -> StepPlan | None:
        """The next step, in flight from now on; None when nothing lives.

        `prefill_tokens_max` bounds this step's prefill; it counts as at least 1, and never lifts step_tokens_max.
        """
        assert self._in_flight is None, "the step in flight was neither committed nor aborted"
        rows = [sequence.row(1) for sequence in self._running.values() if sequence.pending == 1]
        room = self.limits.step_tokens_max - len(rows)
        budget = room if prefill_tokens_max is None else min(room, max(prefill_tokens_max, 1))
        rows += self._prefill_rows(budget)
        if not rows:
            return None
        self._step += 1
        self._in_flight = StepPlan(self._step, tuple(rows))
        self._in_flight_ids = frozenset(row.id for row in rows)
        return self._in_flight

    def commit(self, plan: StepPlan, sampled: Mapping[RequestId, Sampled]) -> list[Event]:
        """Make the step in flight visible. `sampled` has one entry for each row that samples."""
        self._land(plan)
        events: list[Event] = []
        for row in plan.rows:
            sequence = self._running[row.id]
            sequence.computed += len(row.tokens)
            sequence.retries = 0
            reason = self._doomed.pop(row.id, None)
            if reason is None and row.samples:
                token = sampled[row.id]
                events.append(Token(row.id, sequence.output_count, token))
                reason = sequence.accept(token)
            if reason is not None:
                events.append(self._release(sequence, reason))
        return events

    def abort(self, plan: StepPlan, *, fatal: bool) -> list[Event]:
        """The step in flight failed: forget it, so that the next plan repeats it, at most retries_max times in a row.

        `fatal`: the backend is lost and nobody resumes these requests; every live one ends.
        """
        self._land(plan)
        events: list[Event] = []
        for row in plan.rows:
            sequence = self._running[row.id]
            sequence.retries += 1
            if (reason := self._doomed.pop(row.id, None)) is not None:
                events.append(self._release(sequence, reason))
            elif sequence.retries > self.policy.retries_max:
                detail = _given_up(sequence.retries, self.policy.retries_max)
                events.append(self._release(sequence, Finish.ENGINE_FAILED, detail))
        if fatal:
            events += [self._release(sequence, Finish.ENGINE_FAILED, _LOST) for sequence in list(self._live.values())]
        return events

    # -- parts ---------------------------------------------------------------------------------------------------------

    def _lack_of_room(self, sequence: Sequence) -> str | None:
        policy, waiting, tokens_count = self.policy, self._waiting, len(sequence.tokens)
        queued_count = (
            len(self._live) - self.limits.slots
        )  # what is left when every slot, free ones too, has its sequence
        if queued_count >= policy.waiting_max:
            return f"the queue holds {queued_count:,} of at most {policy.waiting_max:,} requests. Retry later"
        total = waiting.tokens_count + tokens_count
        if total > policy.waiting_tokens_max:
            return (
                f"the queue holds {waiting.tokens_count:,} tokens and this request has {tokens_count:,}: {total:,} of "
                f"at most {policy.waiting_tokens_max:,}. Retry later"
            )
        return None

    def _prefill_rows(self, budget: int) -> list[Row]:
        """At most `budget` tokens, oldest sequence first; waiting ones get a slot while there is a slot and budget."""
        rows: list[Row] = []
        for sequence in self._running.values():
            if not budget:
                return rows
            if sequence.pending > 1:
                rows.append(sequence.row(budget))
                budget -= len(rows[-1].tokens)
        while budget and self._waiting and self._slots.free_count:
            rows.append(self._seat().row(budget))
            budget -= len(rows[-1].tokens)
        return rows

    def _seat(self) -> Sequence:
        """Move the first waiting sequence into a slot."""
        sequence = self._waiting.pop()
        sequence.slot = self._slots.take()
        self._running[sequence.request.id] = sequence
        return sequence

    def _land(self, plan: StepPlan) -> None:
        assert plan is self._in_flight, "only the step in flight can be committed or aborted"
        self._in_flight = None
        self._in_flight_ids = frozenset()

    def _release(self, sequence: Sequence, reason: Finish, detail: str = "") -> Finished:
        request_id = sequence.request.id
        del self._live[request_id]
        self._deadlines.discard(request_id)
        if sequence.slot is None:
            self._waiting.remove(request_id)
        else:
            del self._running[request_id]
            self._slots.give(sequence.slot)
        return Finished(request_id, reason, detail)


_LOST = "the engine was lost and is not restarted. Send the request again once the model is served"


def _given_up(failures: int, retries_max: int) -> str:
    return f"failed steps in a row under this request: {failures:,}; retries_max is {retries_max:,}. Send it again"


def _check_limits(limits: Limits) -> None:
    for name in ("slots", "capacity", "vocab"):
        if getattr(limits, name) < 1:
            raise OperatorError(f"{name} is {getattr(limits, name):,}; at least 1 is needed. Install the model again")
    if limits.step_tokens_max <= limits.slots:
        raise OperatorError(
            f"step_tokens_max is {limits.step_tokens_max:,} with {limits.slots:,} slots; at least {limits.slots + 1:,} "
            "are needed, one for each decoding slot and one for prefill. Install a version with fewer slots"
        )


def _check_policy(policy: Policy, limits: Limits) -> None:
    if policy.waiting_max < 1:
        raise OperatorError(f"waiting_max is {policy.waiting_max:,}; at least 1 is needed to admit anything. Raise it")
    if policy.waiting_tokens_max < limits.capacity:
        raise OperatorError(
            f"waiting_tokens_max is {policy.waiting_tokens_max:,} and one request may have {limits.capacity:,} tokens, "
            f"which could never be admitted. Raise it to {limits.capacity} or more"
        )
    if policy.retries_max < 0:
        raise OperatorError(f"retries_max is {policy.retries_max:,}; at least 0 is needed. Raise it")
