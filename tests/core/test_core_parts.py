"""The small parts of the core against obvious models of them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from residentd.core.deadlines import Deadlines
from residentd.core.sequence import sequence_from
from residentd.core.slots import SlotPool
from residentd.core.waiting import WaitingQueue
from residentd.types import Request, RequestId, SamplingParams


@given(st.integers(1, 8), st.lists(st.integers(0, 7), max_size=40))
def test_the_pool_hands_out_the_lowest_free_slot(count: int, moves: list[int]) -> None:
    """Like a sorted set, whatever the order in which slots come back."""
    pool, free, taken = SlotPool(count), set(range(count)), list[int]()
    for move in moves:
        if taken and (move % 2 or not free):
            slot = taken.pop(move % len(taken))
            pool.give(slot)
            free.add(slot)
        else:
            slot = pool.take()
            assert slot == min(free)
            free.remove(slot)
            taken.append(slot)
        assert (pool.free_count, set(pool.free)) == (len(free), free)


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("push"), st.integers(0, 1), st.integers(1, 9)),
            st.tuples(st.just("pop"), st.just(0), st.just(0)),
            st.tuples(st.just("remove"), st.integers(0, 30), st.just(0)),
        ),
        max_size=60,
    )
)
def test_the_queue_is_two_lists(moves: list[tuple[str, int, int]]) -> None:
    """Resumed before new, each first come, first served; lengths and tokens always add up."""
    queue, lanes = WaitingQueue(), (list[int](), list[int]())
    sizes: dict[int, int] = {}
    for number, (move, argument, size) in enumerate(moves):
        standing = [*lanes[0], *lanes[1]]
        if move == "push":
            request = Request(RequestId(number), (1,) * size, SamplingParams(tokens_max=1), resumed=1 - argument)
            queue.push(sequence_from(request))
            lanes[argument].append(number)
            sizes[number] = size
        elif standing:
            victim = standing[0] if move == "pop" else standing[argument % len(standing)]
            if move == "pop":
                assert queue.pop().request.id == victim
            else:
                queue.remove(RequestId(victim))
            lanes[victim in lanes[1]].remove(victim)
        standing = [*lanes[0], *lanes[1]]
        assert [sequence.request.id for sequence in queue] == standing
        assert (len(queue), queue.tokens_count) == (len(standing), sum(sizes[entry] for entry in standing))


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("add"), st.integers(0, 100)),
            st.tuples(st.just("discard"), st.integers(0, 30)),
            st.tuples(st.just("pop"), st.integers(0, 100)),
        ),
        max_size=60,
    )
)
def test_deadlines_are_a_dictionary(moves: list[tuple[str, int]]) -> None:
    """The shortcut for "nothing is late" never hides one that is."""
    deadlines, due_ms = Deadlines(), dict[int, int]()
    for number, (move, value) in enumerate(moves):
        if move == "add":
            deadlines.add(RequestId(number), value)
            due_ms[number] = value
        elif move == "discard":
            deadlines.discard(RequestId(value))
            due_ms.pop(value, None)
        else:
            late = [entry for entry, due in due_ms.items() if due <= value]
            assert deadlines.pop_late(value) == late
            due_ms = {entry: due for entry, due in due_ms.items() if due > value}
        assert deadlines.due_ms == due_ms
