"""The scheduler, call by call: what the two people of the design would expect of it."""

from __future__ import annotations

import time

import pytest

from residentd.core.invariants import check
from residentd.core.scheduler import Policy, Scheduler
from residentd.types import (
    Event,
    Finish,
    Finished,
    Limits,
    Request,
    RequestId,
    Sampled,
    SamplingParams,
    StepPlan,
    Token,
)

LIMITS = Limits(slots=4, capacity=2_048, step_tokens_max=64, vocab=100)
POLICY = Policy(waiting_max=100, waiting_tokens_max=100_000, retries_max=2)
STOP_ID = 9


def scheduler_of(limits: Limits = LIMITS, policy: Policy = POLICY) -> Scheduler:
    return Scheduler(limits, policy)


def request_of(
    request_id: int,
    prompt_count: int = 3,
    tokens_max: int = 10,
    *,
    tokens_min: int = 0,
    generated: tuple[int, ...] = (),
    resumed: int = 0,
    deadline_ms: int | None = None,
) -> Request:
    params = SamplingParams(tokens_max=tokens_max, tokens_min=tokens_min, stop_ids=frozenset({STOP_ID}))
    prompt = tuple(10 + index % 50 for index in range(prompt_count))
    return Request(RequestId(request_id), prompt, params, generated, deadline_ms, resumed)


def planned(scheduler: Scheduler, prefill_tokens_max: int | None = None) -> StepPlan:
    plan = scheduler.plan(prefill_tokens_max)
    assert plan is not None
    check(scheduler)
    return plan


def committed(scheduler: Scheduler, plan: StepPlan, token: int = 5) -> list[Event]:
    events = scheduler.commit(plan, {row.id: Sampled(token) for row in plan.rows if row.samples})
    check(scheduler)
    return events


def step(scheduler: Scheduler, prefill_tokens_max: int | None = None, token: int = 5) -> list[Event]:
    return committed(scheduler, planned(scheduler, prefill_tokens_max), token)


def shape(plan: StepPlan) -> list[tuple[int, int, int, int, bool]]:
    return [(row.id, row.slot, row.start, len(row.tokens), row.samples) for row in plan.rows]


def token(request_id: int, index: int, value: int = 5) -> Token:
    return Token(RequestId(request_id), index, Sampled(value))


def ended(request_id: int, reason: Finish) -> Finished:
    return Finished(RequestId(request_id), reason)


# -- one code path -----------------------------------------------------------------------------------------------------


def test_one_request_from_prompt_to_end() -> None:
    """A prompt in one step, then one token a step, then LENGTH; the slot is free again."""
    scheduler = scheduler_of()
    assert scheduler.submit(request_of(1, prompt_count=3, tokens_max=2)) == []
    plan = planned(scheduler)
    assert shape(plan) == [(1, 0, 0, 3, True)]
    assert plan.rows[0].tokens == (10, 11, 12)
    assert committed(scheduler, plan, token=6) == [token(1, 0, 6)]
    plan = planned(scheduler)
    assert (shape(plan), plan.rows[0].tokens) == ([(1, 0, 3, 1, True)], (6,))
    assert committed(scheduler, plan, token=7) == [token(1, 1, 7), ended(1, Finish.LENGTH)]
    assert scheduler.plan() is None
    assert not scheduler.has_work


def test_a_prompt_in_chunks_samples_only_at_its_end() -> None:
    """Chunks follow one another in the slot, and only the one that reaches the last token yields a token."""
    scheduler = scheduler_of()
    scheduler.submit(request_of(1, prompt_count=10))
    shapes = []
    for _ in range(3):
        plan = planned(scheduler, 4)
        shapes += shape(plan)
        events = committed(scheduler, plan)
    assert shapes == [(1, 0, 0, 4, False), (1, 0, 4, 4, False), (1, 0, 8, 2, True)]
    assert events == [token(1, 0)]


def test_a_resumed_request_goes_on_where_it_was() -> None:
    """Delivered tokens are computed with the prompt, count towards the end and the index, and are not emitted again."""
    scheduler = scheduler_of()
    scheduler.submit(request_of(1, prompt_count=3, tokens_max=4, generated=(20, 21)))
    plan = planned(scheduler)
    assert plan.rows[0].tokens == (10, 11, 12, 20, 21)
    assert committed(scheduler, plan) == [token(1, 2)]
    assert step(scheduler) == [token(1, 3), ended(1, Finish.LENGTH)]


def test_resumed_requests_go_first_in_their_own_order() -> None:
    """Whether they had sampled or not, they stand before requests that arrived while the worker was away."""
    scheduler = scheduler_of()
    scheduler.submit(request_of(7))
    scheduler.submit(request_of(1, generated=(20,), resumed=1))
    scheduler.submit(request_of(8))
    scheduler.submit(request_of(2, resumed=1))
    assert [row.id for row in planned(scheduler).rows] == [1, 2, 7, 8]


# -- the end of an answer ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens_max", "tokens_min", "sampled", "expected"),
    [
        (1, 0, [5], [None, Finish.LENGTH]),
        (2, 0, [5, 5], [None, None, Finish.LENGTH]),
        (3, 0, [STOP_ID], [None, Finish.STOP]),
        (1, 0, [STOP_ID], [None, Finish.STOP]),
        (3, 1, [STOP_ID, STOP_ID], [None, None, Finish.STOP]),
        (3, 2, [STOP_ID, STOP_ID, STOP_ID], [None, None, None, Finish.STOP]),
        (3, 3, [STOP_ID, STOP_ID, STOP_ID], [None, None, None, Finish.LENGTH]),
    ],
)
def test_where_an_answer_ends(
    tokens_max: int, tokens_min: int, sampled: list[int], expected: list[Finish | None]
) -> None:
    """A stop id ends it once tokens_min others were made, tokens_max always; the ending token is emitted, too."""
    scheduler = scheduler_of()
    scheduler.submit(request_of(1, tokens_max=tokens_max, tokens_min=tokens_min))
    events = [event for value in sampled for event in step(scheduler, token=value)]
    assert [event.reason if isinstance(event, Finished) else None for event in events] == expected
    assert not scheduler.has_work


def test_tokens_min_counts_output_from_before_a_loss() -> None:
    """Output indexes go on after a resumption, for tokens_min as for everything else."""
    scheduler = scheduler_of()
    scheduler.submit(request_of(1, tokens_min=2, generated=(20, 21)))
    assert step(scheduler, token=STOP_ID)[-1] == ended(1, Finish.STOP)


# -- decode and prefill in one step ------------------------------------------------------------------------------------


def test_decodes_come_first_and_prefill_takes_the_rest() -> None:
    """Every running decode has its token in every step; prefill fills up to step_tokens_max."""
    scheduler = scheduler_of()
    scheduler.submit(request_of(1))
    scheduler.submit(request_of(2))
    step(scheduler)
    scheduler.submit(request_of(3, prompt_count=100))
    scheduler.submit(request_of(4, prompt_count=100))
    plan = planned(scheduler)
    assert shape(plan) == [(1, 0, 3, 1, True), (2, 1, 3, 1, True), (3, 2, 0, 62, False)]
    assert plan.tokens_count == LIMITS.step_tokens_max
    committed(scheduler, plan)
    assert shape(planned(scheduler))[2:] == [(3, 2, 62, 38, True), (4, 3, 0, 24, False)]


@pytest.mark.parametrize(
    ("prefill_tokens_max", "expected"), [(-1, 1), (0, 1), (1, 1), (2, 2), (63, 63), (64, 63), (1_000, 63), (None, 63)]
)
def test_the_prefill_budget_at_its_limits(prefill_tokens_max: int | None, expected: int) -> None:
    """Never below 1, so that prefill is not starved; never past step_tokens_max beside the decodes."""
    scheduler = scheduler_of()
    scheduler.submit(request_of(1))
    step(scheduler)
    scheduler.submit(request_of(2, prompt_count=500))
    assert [len(row.tokens) for row in planned(scheduler, prefill_tokens_max).rows] == [1, expected]


def test_prefill_goes_on_with_every_other_slot_decoding() -> None:
    """step_tokens_max just above slots leaves one token for prefill in every step (field case C11)."""
    scheduler = scheduler_of(Limits(slots=4, capacity=64, step_tokens_max=5, vocab=100))
    for request_id in range(3):
        scheduler.submit(request_of(request_id, prompt_count=1, tokens_max=60))
    step(scheduler)
    scheduler.submit(request_of(3, prompt_count=20))
    for start in range(0, 20, 2):  # 3 decodes and 2 of prefill
        plan = planned(scheduler)
        assert shape(plan)[3] == (3, 3, start, 2, start == 18)
        committed(scheduler, plan)


def test_an_arrival_gets_its_first_token_before_any_of_eight_decodes_ends() -> None:
    """Issue 2, in flight: the chunk bound decides how many steps it takes, and the others lose none of theirs."""
    scheduler = scheduler_of(Limits(slots=9, capacity=2_048, step_tokens_max=64, vocab=100))
    for request_id in range(8):
        scheduler.submit(request_of(request_id, prompt_count=1 + request_id, tokens_max=200))
    step(scheduler)
    scheduler.submit(request_of(8, prompt_count=1_000, tokens_max=10))
    steps: list[list[Event]] = []
    while not steps or not any(event.id == 8 for event in steps[-1]):
        plan = planned(scheduler, 32)
        assert [row.id for row in plan.rows] == list(range(9))
        assert [len(row.tokens) for row in plan.rows[:8]] == [1] * 8
        assert len(plan.rows[8].tokens) <= 32, "the chunk bound"
        steps.append(committed(scheduler, plan))
    assert len(steps) == -(-1_000 // 32)
    assert all(isinstance(event, Token) for events in steps for event in events), "one ended before"
    assert all([event.id for event in events][:8] == list(range(8)) for events in steps), "a decode missed a step"


def test_slots_stay_compact() -> None:
    """The lowest free slot is taken first: a backend's cost may follow the highest live one."""
    scheduler = scheduler_of()
    for request_id in range(4):
        scheduler.submit(request_of(request_id))
    step(scheduler)
    for request_id in (3, 1, 0):
        scheduler.cancel(RequestId(request_id))
    for request_id in (5, 6):
        scheduler.submit(request_of(request_id))
    assert {row.id: row.slot for row in planned(scheduler).rows} == {2: 2, 5: 0, 6: 1}


# -- cancel and deadlines ----------------------------------------------------------------------------------------------


def test_cancel_of_a_waiting_request_ends_it_at_once() -> None:
    """It never gets a slot."""
    scheduler = scheduler_of()
    scheduler.submit(request_of(1))
    assert scheduler.cancel(RequestId(1)) == [ended(1, Finish.CANCELLED)]
    assert scheduler.plan() is None


@pytest.mark.parametrize("fails", [False, True])
def test_cancel_of_a_row_in_flight_waits_for_its_step(fails: bool) -> None:  # noqa: FBT001
    """Its slot is free only when the device is done with it; no token comes out any more."""
    scheduler = scheduler_of()
    scheduler.submit(request_of(1))
    plan = planned(scheduler)
    assert scheduler.cancel(RequestId(1), Finish.SLOW_CONSUMER) == []
    assert scheduler.cancel(RequestId(1)) == []
    assert scheduler.running_count == 1
    events = scheduler.abort(plan, fatal=False) if fails else committed(scheduler, plan)
    assert events == [ended(1, Finish.SLOW_CONSUMER)]
    assert not scheduler.has_work


def test_cancel_of_a_running_request_outside_the_step_ends_it_at_once() -> None:
    """Its slot goes to nobody before the next plan."""
    scheduler = scheduler_of()
    scheduler.submit(request_of(1, prompt_count=10))
    step(scheduler, 4)
    scheduler.submit(request_of(2, prompt_count=10))
    assert [row.id for row in planned(scheduler, 4).rows] == [1]
    assert scheduler.cancel(RequestId(2)) == [ended(2, Finish.CANCELLED)]


def test_cancel_of_an_unknown_or_ended_request_is_nothing() -> None:
    """Idempotent (field case D8)."""
    scheduler = scheduler_of()
    assert scheduler.cancel(RequestId(1)) == []
    scheduler.submit(request_of(1, tokens_max=1))
    step(scheduler)
    assert scheduler.cancel(RequestId(1)) == []


@pytest.mark.parametrize(("now_ms", "late"), [(999, False), (1_000, True), (1_001, True)])
def test_a_deadline_at_its_millisecond(now_ms: int, late: bool) -> None:  # noqa: FBT001
    """A waiting request ends when its deadline comes, not before."""
    scheduler = scheduler_of()
    scheduler.submit(request_of(1, deadline_ms=1_000))
    scheduler.submit(request_of(2))
    assert scheduler.expire(now_ms) == ([ended(1, Finish.DEADLINE)] if late else [])
    assert scheduler.expire(now_ms) == []
    assert scheduler.waiting_count == (1 if late else 2)


def test_a_deadline_in_flight_ends_with_the_step() -> None:
    """Within one step of its deadline the slot is free (field case C10), and no token comes out."""
    scheduler = scheduler_of()
    scheduler.submit(request_of(1, deadline_ms=1_000))
    plan = planned(scheduler)
    assert scheduler.expire(2_000) == []
    assert committed(scheduler, plan) == [ended(1, Finish.DEADLINE)]


# -- failures ----------------------------------------------------------------------------------------------------------


def test_a_failed_step_is_planned_again_as_it_was() -> None:
    """Nothing of it is visible, so the same rows come again."""
    scheduler = scheduler_of()
    scheduler.submit(request_of(1))
    step(scheduler)
    scheduler.submit(request_of(2, prompt_count=100))
    failed = planned(scheduler)
    assert scheduler.abort(failed, fatal=False) == []
    check(scheduler)
    assert planned(scheduler).rows == failed.rows


@pytest.mark.parametrize(("failures", "ends"), [(2, False), (3, True)])
def test_retries_at_their_maximum_and_one_above(failures: int, ends: bool) -> None:  # noqa: FBT001
    """retries_max failures in a row are survived, one more ends the request with the count."""
    scheduler = scheduler_of()
    scheduler.submit(request_of(1))
    events = [event for _ in range(failures) for event in scheduler.abort(planned(scheduler), fatal=False)]
    detail = "failed steps in a row under this request: 3; retries_max is 2. Send it again"
    assert events == ([Finished(RequestId(1), Finish.ENGINE_FAILED, detail)] if ends else [])
    assert scheduler.has_work == (not ends)


def test_a_success_forgives_earlier_failures() -> None:
    """Only failures in a row count."""
    scheduler = scheduler_of()
    scheduler.submit(request_of(1))
    for _ in range(4):
        for _ in range(2):
            assert scheduler.abort(planned(scheduler), fatal=False) == []
        assert len(step(scheduler)) == 1


def test_a_fatal_failure_ends_everything_with_its_own_reason() -> None:
    """Waiting, running and cancelled requests each get exactly one end, and every slot is free."""
    scheduler = scheduler_of(Limits(slots=2, capacity=64, step_tokens_max=8, vocab=100))
    for request_id in range(4):
        scheduler.submit(request_of(request_id))
    plan = planned(scheduler)
    scheduler.cancel(RequestId(1))
    events = scheduler.abort(plan, fatal=True)
    assert {event.id: event.reason for event in events if isinstance(event, Finished)} == {
        0: Finish.ENGINE_FAILED,
        1: Finish.CANCELLED,
        2: Finish.ENGINE_FAILED,
        3: Finish.ENGINE_FAILED,
    }
    assert len(events) == 4
    assert not scheduler.has_work
    check(scheduler)


def test_one_step_is_in_flight_at_a_time() -> None:
    """Planning over a step in flight, and ending another step than that one, are our own bugs."""
    scheduler = scheduler_of()
    scheduler.submit(request_of(1))
    plan = planned(scheduler)
    with pytest.raises(AssertionError, match="neither committed nor aborted"):
        scheduler.plan()
    committed(scheduler, plan)
    with pytest.raises(AssertionError, match="only the step in flight"):
        scheduler.commit(plan, {})
    with pytest.raises(AssertionError, match="only the step in flight"):
        scheduler.abort(plan, fatal=False)


# -- what others read --------------------------------------------------------------------------------------------------


def test_the_counts() -> None:
    """Waiting, running, decoding, computed: what metrics and pacing read."""
    scheduler = scheduler_of(Limits(slots=2, capacity=64, step_tokens_max=8, vocab=100))
    for request_id in range(3):
        scheduler.submit(request_of(request_id, prompt_count=5))
    counts = (scheduler.waiting_count, scheduler.waiting_tokens_count, scheduler.running_count)
    assert counts == (3, 15, 0)
    step(scheduler)
    counts = (scheduler.waiting_count, scheduler.waiting_tokens_count, scheduler.running_count)
    assert counts == (1, 5, 2)
    assert (scheduler.decoding_count, scheduler.computed_count) == (1, 8)
    sequence = scheduler.sequence(RequestId(0))
    assert sequence is not None
    assert (sequence.tokens, sequence.output_count) == ([10, 11, 12, 13, 14, 5], 1)
    assert scheduler.sequence(RequestId(99)) is None


def test_a_step_of_128_rows_costs_well_under_a_millisecond() -> None:
    """plan and commit together, best of 50, whatever the length of the sequences: no copy of whole token lists.

    Measured 0.33 ms on one 2026 server core; the bound is 3 times that, in this process's own CPU time.
    """
    rows = 128
    scheduler = scheduler_of(
        Limits(slots=rows, capacity=4_096, step_tokens_max=4_096, vocab=100), Policy(rows, rows * 4_096, 0)
    )
    for request_id in range(rows):
        scheduler.submit(request_of(request_id, prompt_count=3_000, tokens_max=1_000, deadline_ms=1 << 40))
    while scheduler.decoding_count < rows:
        plan = planned(scheduler)
        scheduler.commit(plan, {row.id: Sampled(5) for row in plan.rows if row.samples})
    costs_ns = []
    for now_ms in range(50):
        started_ns = time.process_time_ns()
        scheduler.expire(now_ms)
        step_plan = scheduler.plan(scheduler.decoding_count)
        planned_ns = time.process_time_ns()
        assert step_plan is not None
        sampled = {row.id: Sampled(5) for row in step_plan.rows}
        sampled_ns = time.process_time_ns()
        scheduler.commit(step_plan, sampled)
        costs_ns.append(time.process_time_ns() - sampled_ns + planned_ns - started_ns)
    assert min(costs_ns) < 1_000_000
