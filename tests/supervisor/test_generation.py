from __future__ import annotations

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from residentd.supervisor.generation import Generation
from residentd.types import Finish, Finished, Request, RequestId, Sampled, SamplingParams

REQUEST = Request(RequestId(1), (4, 5), SamplingParams(tokens_max=50))


def generation(unread_max: int = 1000) -> Generation:
    return Generation(REQUEST, now_ns=0, unread_max=unread_max)


async def drained(live: Generation) -> list[list[int]]:
    return [[sampled.token for sampled in batch] async for batch in live.batches()]


@given(st.lists(st.sampled_from(["token", "read"]), max_size=60))
def test_every_token_is_read_once_and_in_order(script: list[str]) -> None:
    """Whatever the interleaving of arrivals and reads, the batches joined are the tokens, none lost or repeated."""

    async def scenario() -> None:
        live, sent = generation(), 0
        reader = asyncio.create_task(drained(live))
        for action in script:
            if action == "token":
                live.accept(sent, Sampled(sent), 1)
                sent += 1
            else:
                await asyncio.sleep(0)
        live.finish(Finished(REQUEST.id, Finish.LENGTH), 2)
        batches = await reader
        assert [token for batch in batches for token in batch] == list(range(sent))
        assert all(batches)

    asyncio.run(scenario())


def test_tokens_that_wait_leave_in_one_batch() -> None:
    """A reader that comes late gets everything that is waiting at once."""

    async def scenario() -> None:
        live = generation()
        for index in range(30):
            live.accept(index, Sampled(index), 1)
        live.finish(Finished(REQUEST.id, Finish.LENGTH), 2)
        assert await drained(live) == [list(range(30))]

    asyncio.run(scenario())


def test_unread_tokens_are_bounded() -> None:
    """Exactly unread_max tokens may wait; the next one says that the reader is too slow."""
    live = generation(unread_max=3)
    assert [live.accept(index, Sampled(index), 1) for index in range(4)] == [True, True, True, False]


def test_the_first_end_stands() -> None:
    """A second end, crossing the first on the link, changes nothing."""
    live = generation()
    live.finish(Finished(REQUEST.id, Finish.STOP), 1)
    live.finish(Finished(REQUEST.id, Finish.CANCELLED), 2)
    assert live.finished == Finished(REQUEST.id, Finish.STOP)


def test_a_resubmission_carries_what_was_delivered() -> None:
    """The second submission has the delivered tokens as context and says that it is a resumption; the first has not."""
    live = generation()
    assert live.submit().request == REQUEST
    live.accept(0, Sampled(8), 1)
    live.lose_worker()
    resumed = live.submit().request
    assert (resumed.generated, resumed.resumed, live.resumed_count) == ((8,), 1, 1)


def test_losses_without_a_token_in_between_are_counted() -> None:
    """barren_losses grows with each loss that saw no token and starts again from 0 after one that did."""
    live, counts = generation(), []
    for token_arrives in (False, False, True, False):
        live.submit()
        if token_arrives:
            live.accept(live.tokens_count, Sampled(1), 1)
        live.lose_worker()
        counts.append(live.barren_losses)
    assert counts == [1, 2, 0, 1]


def test_a_request_that_was_not_submitted_suffers_no_loss() -> None:
    """A worker that dies while a request still waits in the daemon says nothing about that request."""
    live = generation()
    live.lose_worker()
    assert (live.barren_losses, live.submit().request) == (0, REQUEST)
