"""What is true of a scheduler between any two calls. Stated once; the simulator checks it after every transition."""

from __future__ import annotations

from residentd.core.scheduler import Scheduler
from residentd.core.sequence import Sequence
from residentd.core.waiting import is_resumed


def check(scheduler: Scheduler) -> None:
    """Raise AssertionError naming the first invariant that does not hold. Costs O(live sequences)."""
    _check_membership(scheduler)
    _check_slots(scheduler)
    _check_queue(scheduler)
    for sequence in scheduler._live.values():
        _check_sequence(scheduler, sequence)
    _check_flight(scheduler)
    _check_deadlines(scheduler)


def _check_membership(scheduler: Scheduler) -> None:
    waiting = {sequence.request.id: sequence for sequence in scheduler._waiting}
    assert len(waiting) == len(scheduler._waiting), "a request waits twice"
    assert not waiting.keys() & scheduler._running.keys(), "a request waits and runs"
    assert waiting | scheduler._running == scheduler._live, "live is not waiting and running"
    assert all(key == sequence.request.id for key, sequence in scheduler._live.items()), "a key is not its request's id"


def _check_slots(scheduler: Scheduler) -> None:
    owned = [sequence.slot for sequence in scheduler._running.values()]
    free = scheduler._slots.free
    assert None not in owned, "a running sequence has no slot"
    assert len(owned) == len(set(owned)), "a slot has two owners"
    assert not set(owned) & set(free), "an owned slot is free"
    assert sorted([*free, *(slot for slot in owned if slot is not None)]) == list(range(scheduler.limits.slots)), (
        "a slot is lost or was made up"
    )


def _check_queue(scheduler: Scheduler) -> None:
    waiting, policy = list(scheduler._waiting), scheduler.policy
    new = [sequence for sequence in waiting if not is_resumed(sequence)]
    assert all(sequence.slot is None and sequence.computed == 0 for sequence in waiting), "a waiting sequence has K/V"
    assert scheduler.waiting_tokens_count == sum(len(sequence.tokens) for sequence in waiting), "tokens are miscounted"
    assert len(new) <= policy.waiting_max + scheduler.limits.slots, "the queue holds too many requests"
    assert sum(len(sequence.tokens) for sequence in new) <= policy.waiting_tokens_max, "the queue holds too many tokens"
    assert waiting[len(waiting) - len(new) :] == new, "a new request waits before a resumed one"


def _check_sequence(scheduler: Scheduler, sequence: Sequence) -> None:
    request = sequence.request
    prompt_count = len(request.prompt)
    assert 0 <= sequence.computed < len(sequence.tokens), "nothing is pending, or more is computed than there is"
    assert sequence.output_count >= len(request.generated), "delivered tokens are missing"
    assert sequence.output_count < request.params.tokens_max, "a complete sequence lives on"
    assert prompt_count + request.params.tokens_max <= scheduler.limits.capacity, "a sequence can outgrow its slot"
    assert 0 <= sequence.retries <= scheduler.policy.retries_max, "retries are not bounded"


def _check_flight(scheduler: Scheduler) -> None:
    plan = scheduler._in_flight
    rows = plan.rows if plan is not None else ()
    ids = {row.id for row in rows}
    assert scheduler._in_flight_ids == ids, "the ids in flight are not the plan's"
    assert len(ids) == len(rows), "a request has two rows in one step"
    assert ids <= scheduler._running.keys(), "a row in flight was released before its step ended"
    assert scheduler._doomed.keys() <= ids, "a request waits for the end of a step that it is not in"
    assert sum(len(row.tokens) for row in rows) <= scheduler.limits.step_tokens_max, "a step has too many tokens"
    for row in rows:
        sequence = scheduler._running[row.id]
        assert (row.slot, row.start) == (sequence.slot, sequence.computed), "a row is not where its sequence stands"
        assert row.tokens, "a row is empty"
        assert row.samples == (row.start + len(row.tokens) == len(sequence.tokens)), "a row samples before its end"


def _check_deadlines(scheduler: Scheduler) -> None:
    due_ms = scheduler._deadlines.due_ms
    assert due_ms.keys() <= scheduler._live.keys(), "a deadline outlives its request"
    for request_id, sequence in scheduler._live.items():
        doomed = request_id in scheduler._doomed
        assert doomed or due_ms.get(request_id) == sequence.request.deadline_ms, "a deadline is lost"
