"""Every invariant can fail: a scheduler damaged in one place is found, by the invariant that states it."""

from __future__ import annotations

import ast
import dataclasses
import inspect
from collections.abc import Callable

import pytest

from residentd.core import invariants
from residentd.core.invariants import check
from residentd.core.scheduler import Policy, Scheduler
from residentd.types import Finish, Limits, Request, RequestId, Row, Sampled, SamplingParams, StepPlan

RUNNING, DECODING, WAITING = RequestId(0), RequestId(1), RequestId(3)


def put(damaged: object, **values: object) -> None:
    for name, value in values.items():
        setattr(damaged, name, value)


def rename(scheduler: Scheduler) -> None:
    scheduler._live[RequestId(9)] = scheduler._running[RequestId(9)] = scheduler._live.pop(RUNNING)
    del scheduler._running[RUNNING]


def fly(scheduler: Scheduler, *rows: Row) -> None:
    """Put `rows` beside those in flight."""
    assert scheduler._in_flight is not None
    scheduler._in_flight = StepPlan(1, (*scheduler._in_flight.rows, *rows))
    scheduler._in_flight_ids = frozenset(row.id for row in scheduler._in_flight.rows)


def late_resumption(scheduler: Scheduler) -> None:
    sequence = scheduler._live[WAITING]
    sequence.request = dataclasses.replace(sequence.request, resumed=1)


def empty_row(scheduler: Scheduler) -> None:
    sequence = scheduler._seat()
    assert sequence.slot is not None
    fly(scheduler, Row(sequence.request.id, sequence.slot, 0, (), samples=False))


DAMAGES: dict[str, Callable[[Scheduler], object]] = {
    "a request waits twice": lambda s: s._waiting._resumed.update({WAITING: s._live[WAITING]}),
    "a request waits and runs": lambda s: s._running.update({WAITING: s._live[WAITING]}),
    "live is not waiting and running": lambda s: s._live.pop(RUNNING),
    "a key is not its request's id": rename,
    "a running sequence has no slot": lambda s: put(s._live[RUNNING], slot=None),
    "a slot has two owners": lambda s: put(s._live[RUNNING], slot=s._live[DECODING].slot),
    "an owned slot is free": lambda s: s._slots.give(0),
    "a slot is lost or was made up": lambda s: s._slots.take(),
    "a waiting sequence has K/V": lambda s: put(s._live[WAITING], computed=1),
    "tokens are miscounted": lambda s: put(s._waiting, _tokens_count=1),
    "the queue holds too many requests": lambda s: put(s, policy=Policy(1 - s.limits.slots, 64, 1)),
    "the queue holds too many tokens": lambda s: put(s, policy=Policy(2, 7, 1)),
    "a new request waits before a resumed one": late_resumption,
    "nothing is pending, or more is computed than there is": lambda s: put(s._live[RUNNING], computed=99),
    "delivered tokens are missing": lambda s: put(s._live[DECODING], computed=3, tokens=[1] * 4),
    "a complete sequence lives on": lambda s: s._live[RUNNING].tokens.extend([1] * 8),
    "a sequence can outgrow its slot": lambda s: put(s, limits=Limits(3, 11, 8, 9)),
    "retries are not bounded": lambda s: put(s._live[RUNNING], retries=2),
    "the ids in flight are not the plan's": lambda s: put(s, _in_flight_ids=frozenset()),
    "a request has two rows in one step": lambda s: fly(s, Row(RUNNING, 0, 0, (1,), samples=False)),
    "a row in flight was released before its step ended": lambda s: s._release(s._live[RUNNING], Finish.CANCELLED),
    "a request waits for the end of a step that it is not in": lambda s: put(s, _doomed={WAITING: Finish.STOP}),
    "a step has too many tokens": lambda s: put(s, limits=Limits(3, 16, 1, 9)),
    "a row is not where its sequence stands": lambda s: put(s._live[RUNNING], computed=1),
    "a row is empty": empty_row,
    "a row samples before its end": lambda s: s._live[DECODING].tokens.append(1),
    "a deadline outlives its request": lambda s: s._deadlines.add(RequestId(77), 5),
    "a deadline is lost": lambda s: s._deadlines.discard(RUNNING),
}


def busy_scheduler() -> Scheduler:
    """A decode and the middle of a prompt in flight, two waiting, one slot free."""
    scheduler = Scheduler(Limits(slots=3, capacity=16, step_tokens_max=8, vocab=9), Policy(4, 64, 1))
    for request_id, generated in enumerate([(), (2,), (), ()]):
        params = SamplingParams(tokens_max=8)
        deadline_ms = 1_000 if request_id == 0 else None
        scheduler.submit(Request(RequestId(request_id), (1, 1, 1, 1), params, generated, deadline_ms))
    plan = scheduler.plan(7)
    assert plan is not None
    scheduler.commit(plan, {row.id: Sampled(3) for row in plan.rows if row.samples})
    scheduler.plan(1)
    return scheduler


def test_a_sound_scheduler_passes() -> None:
    """The damages below are the only thing wrong with it."""
    check(busy_scheduler())


@pytest.mark.parametrize("complaint", DAMAGES)
def test_a_damage_is_named(complaint: str) -> None:
    """The first invariant that does not hold is in the message."""
    scheduler = busy_scheduler()
    DAMAGES[complaint](scheduler)
    with pytest.raises(AssertionError, match=complaint):
        check(scheduler)


def test_every_invariant_has_a_damage() -> None:
    """No assertion of the module is one that cannot fail."""
    asserts = [node for node in ast.walk(ast.parse(inspect.getsource(invariants))) if isinstance(node, ast.Assert)]
    assert {node.msg.value for node in asserts if isinstance(node.msg, ast.Constant)} == set(DAMAGES)
    assert len(asserts) == len(DAMAGES)
