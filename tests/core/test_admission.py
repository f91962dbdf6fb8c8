"""Admission: tables at every limit and one beyond it, and the words that callers read."""

from __future__ import annotations

import pytest

from residentd.core.scheduler import Policy, Scheduler
from residentd.errors import OperatorError
from residentd.types import Event, Finish, Finished, Limits, Refusal, Request, RequestId, SamplingParams

LIMITS = Limits(slots=2, capacity=8_192, step_tokens_max=256, vocab=1_000)
POLICY = Policy(waiting_max=3, waiting_tokens_max=10_000, retries_max=2)


def request_of(
    request_id: int,
    prompt: int | tuple[int, ...],
    tokens_max: int = 10,
    *,
    generated: tuple[int, ...] = (),
    resumed: int = 0,
    bias: tuple[tuple[int, float], ...] = (),
    stop_ids: frozenset[int] = frozenset(),
) -> Request:
    ids = (1,) * prompt if isinstance(prompt, int) else prompt
    params = SamplingParams(tokens_max=tokens_max, logit_bias=bias, stop_ids=stop_ids)
    return Request(RequestId(request_id), ids, params, generated, resumed=resumed)


def refusals(events: list[Event]) -> list[Refusal | None]:
    return [event.refusal for event in events if isinstance(event, Finished)]


@pytest.mark.parametrize(
    ("prompt", "tokens_max", "bias", "detail"),
    [
        (1, 1, (), None),
        (1, 8_191, (), None),
        (1, 8_192, (), "prompt has 1 tokens and max_tokens is 8,192: 8,193 of at most 8,192"),
        (8_191, 1, (), None),
        (8_192, 1, (), "8,192 tokens and max_tokens is 1: 8,193 of at most 8,192"),
        (7_692, 500, (), None),
        (7_693, 500, (), "prompt has 7,693 tokens and max_tokens is 500: 8,193 of at most 8,192"),
        (0, 1, (), "prompt has 0 tokens; at least 1"),
        (1, 0, (), "max_tokens is 0; at least 1"),
        (1, -1, (), "max_tokens is -1; at least 1"),
        ((0, 999), 1, (), None),
        ((0, 1_000), 1, (), "prompt has token id 1,000 at index 1; this model has ids 0 to 999"),
        ((0, 5, -1), 1, (), "prompt has token id -1 at index 2; this model has ids 0 to 999"),
        (1, 1, ((0, 1.0), (999, -1.0)), None),
        (1, 1, ((3, 1.0), (1_000, 1.0)), "logit_bias has token id 1,000 at index 1; this model has ids 0 to 999"),
        (1, 1, ((-1, 1.0),), "logit_bias has token id -1 at index 0"),
    ],
)
def test_what_can_never_fit_is_refused_with_the_arithmetic(
    prompt: int | tuple[int, ...], tokens_max: int, bias: tuple[tuple[int, float], ...], detail: str | None
) -> None:
    """At the limit a request is admitted; one beyond it is refused as INVALID, with the numbers."""
    scheduler = Scheduler(LIMITS, POLICY)
    events = scheduler.submit(request_of(1, prompt, tokens_max, bias=bias))
    if detail is None:
        assert (events, scheduler.waiting_count) == ([], 1)
        return
    (event,) = events
    assert isinstance(event, Finished)
    assert (event.id, event.reason, event.refusal) == (1, Finish.REJECTED, Refusal.INVALID)
    assert detail in event.detail
    assert not scheduler.has_work


def test_the_refusal_reads_as_the_design_says() -> None:
    """What, the values, the limit, and the ways out, with the number to install."""
    (event,) = Scheduler(LIMITS, POLICY).submit(request_of(1, 9_213, 500))
    assert event == Finished(
        RequestId(1),
        Finish.REJECTED,
        "prompt has 9,213 tokens and max_tokens is 500: 9,713 of at most 8,192. Shorten the prompt, lower max_tokens, "
        "or install a version built with --context 9713",
        Refusal.INVALID,
    )


def test_what_can_never_fit_is_refused_as_such_even_when_the_queue_is_full() -> None:
    """A retry would not help, so the answer is never "retry later"."""
    scheduler = Scheduler(LIMITS, POLICY)
    for request_id in range(LIMITS.slots + POLICY.waiting_max):
        assert scheduler.submit(request_of(request_id, 1)) == []
    assert refusals(scheduler.submit(request_of(9, 8_192))) == [Refusal.INVALID]


def test_the_queue_is_bounded_by_requests() -> None:
    """As many as there are slots and waiting_max more live; one more is refused as FULL, before and after a plan.

    An end makes room for exactly one.
    """
    scheduler = Scheduler(LIMITS, POLICY)
    room = LIMITS.slots + POLICY.waiting_max
    assert [scheduler.submit(request_of(request_id, 1)) for request_id in range(room)] == [[]] * room
    (event,) = scheduler.submit(request_of(room, 1))
    detail = "the queue holds 3 of at most 3 requests. Retry later"
    assert event == Finished(RequestId(room), Finish.REJECTED, detail, Refusal.FULL)
    scheduler.cancel(RequestId(1))
    assert scheduler.submit(request_of(21, 1)) == []
    assert refusals(scheduler.submit(request_of(22, 1))) == [Refusal.FULL]
    assert scheduler.plan() is not None
    assert refusals(scheduler.submit(request_of(23, 1))) == [Refusal.FULL]
    scheduler.cancel(RequestId(4))
    assert scheduler.submit(request_of(24, 1)) == []
    assert refusals(scheduler.submit(request_of(25, 1))) == [Refusal.FULL]


def test_the_queue_is_bounded_by_tokens() -> None:
    """waiting_tokens_max tokens wait; one more is refused as FULL, with the sum."""
    scheduler = Scheduler(LIMITS, POLICY)
    assert scheduler.submit(request_of(1, 6_000)) == []
    (event,) = scheduler.submit(request_of(2, 4_001))
    assert isinstance(event, Finished)
    assert event.refusal is Refusal.FULL
    assert "holds 6,000 tokens and this request has 4,001: 10,001 of at most 10,000. Retry later" in event.detail
    assert scheduler.submit(request_of(3, 4_000)) == []
    assert scheduler.waiting_tokens_count == 10_000
    assert refusals(scheduler.submit(request_of(4, 1))) == [Refusal.FULL]


def test_an_empty_queue_admits_the_largest_request_there_is() -> None:
    """However small the token bound may be, it admits one request that fits the context."""
    scheduler = Scheduler(LIMITS, Policy(waiting_max=1, waiting_tokens_max=8_192, retries_max=0))
    assert scheduler.submit(request_of(1, 8_191, 1)) == []


@pytest.mark.parametrize("resumed", [request_of(9, 1, generated=(4,)), request_of(9, 1, resumed=1)])
def test_a_resumed_request_is_never_refused_by_a_full_queue(resumed: Request) -> None:
    """It was admitted once; whether it had sampled already or not makes no difference."""
    scheduler = Scheduler(LIMITS, POLICY)
    for request_id in range(20, 20 + LIMITS.slots + POLICY.waiting_max):
        scheduler.submit(request_of(request_id, 1))
    assert scheduler.submit(resumed) == []
    assert refusals(scheduler.submit(request_of(10, 1))) == [Refusal.FULL]


@pytest.mark.parametrize(
    ("generated", "tokens_max", "reason"),
    [
        ((5, 5), 3, None),
        ((5, 5, 5), 3, Finish.LENGTH),
        ((5, 7), 3, Finish.STOP),
        ((7, 5), 3, None),
        ((7,), 1, Finish.STOP),
    ],
)
def test_a_resumed_request_that_was_complete_ends_at_once(
    generated: tuple[int, ...], tokens_max: int, reason: Finish | None
) -> None:
    """A worker lost between the last token and the end loses only the end."""
    request = request_of(1, 4, tokens_max, generated=generated, stop_ids=frozenset({7}))
    scheduler = Scheduler(LIMITS, POLICY)
    assert scheduler.submit(request) == ([] if reason is None else [Finished(RequestId(1), reason)])
    assert scheduler.has_work == (reason is None)


def test_an_id_that_is_live_is_our_own_bug() -> None:
    """Ids are unique by contract: a second submission ends the worker instead of mixing two streams."""
    scheduler = Scheduler(LIMITS, POLICY)
    scheduler.submit(request_of(1, 1))
    with pytest.raises(AssertionError, match="request 1 is live already"):
        scheduler.submit(request_of(1, 1))


@pytest.mark.parametrize(
    ("limits", "policy", "complaint"),
    [
        (Limits(4, 64, 5, 100), Policy(1, 64, 0), None),
        (Limits(4, 64, 4, 100), Policy(1, 64, 0), "step_tokens_max is 4 with 4 slots; at least 5"),
        (Limits(0, 64, 5, 100), Policy(1, 64, 0), "slots is 0"),
        (Limits(4, 0, 5, 100), Policy(1, 64, 0), "capacity is 0"),
        (Limits(4, 64, 5, 0), Policy(1, 64, 0), "vocab is 0"),
        (Limits(4, 64, 5, 100), Policy(0, 64, 0), "waiting_max is 0"),
        (Limits(4, 64, 5, 100), Policy(1, 63, 0), "waiting_tokens_max is 63 and one request may have 64 tokens"),
        (Limits(4, 64, 5, 100), Policy(1, 64, -1), "retries_max is -1"),
    ],
)
def test_limits_that_cannot_be_kept_are_refused_at_the_start(
    limits: Limits, policy: Policy, complaint: str | None
) -> None:
    """Each at its smallest and one below: the operator reads which one, and what is needed."""
    if complaint is None:
        assert Scheduler(limits, policy).waiting_count == 0
        return
    with pytest.raises(OperatorError, match=complaint):
        Scheduler(limits, policy)
