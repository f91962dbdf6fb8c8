"""The batcher against a plain model of the same rules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from residentd.core.batching import BUCKET_MIN, Batcher, Group, Piece, Policy, Run, bucket_of
from residentd.types import Finish, Finished, Refusal, RequestId

ROWS_MAX, WEIGHT_MAX, PASSED_MAX = 4, 64, 3


def policy(**changes: int) -> Policy:
    values = {
        "run_rows_max": ROWS_MAX,
        "run_weight_max": WEIGHT_MAX,
        "waiting_max": 1000,
        "waiting_weight_max": 1 << 30,
        "retries_max": 2,
        "passed_max": PASSED_MAX,
    }
    return Policy(**(values | changes))


def texts(*lengths: int) -> list[Piece]:
    return [Piece(index, Group(bucket_of(length))) for index, length in enumerate(lengths)]


def ids_of(run: Run) -> list[int]:
    return [int(request_id) for request_id, _ in run.pieces]


def run_all(batcher: Batcher, runs_max: int = 10_000) -> list[Run]:
    runs = []
    while (run := batcher.plan()) is not None:
        batcher.commit(run)
        runs.append(run)
        assert len(runs) <= runs_max
    return runs


# ---- length buckets ------------------------------------------------------------------------------------------------


@given(st.integers(1, 100_000))
def test_a_bucket_holds_its_length_and_wastes_at_most_half(length: int) -> None:
    """The edge is at least the length; above 16 tokens the padding is less than half of the text."""
    edge = bucket_of(length)
    assert edge >= length
    assert edge <= max(BUCKET_MIN * 2, length * 3 // 2)
    assert bucket_of(edge) == edge


def test_bucket_edges_are_the_documented_ones() -> None:
    """8, 16, 24, 32, 48, 64, 96, 128, 192, 256."""
    assert sorted({bucket_of(length) for length in range(1, 257)}) == [8, 16, 24, 32, 48, 64, 96, 128, 192, 256]


# ---- one rule at a time --------------------------------------------------------------------------------------------


def test_nothing_waits_while_nothing_runs() -> None:
    """A lone text is the next run at once: nothing is held back to fill it."""
    batcher = Batcher(policy())
    batcher.submit(RequestId(1), texts(5))
    run = batcher.plan()
    assert run is not None
    assert run.rows == 1


@pytest.mark.parametrize(("length", "rows"), [(8, 4), (16, 4), (24, 2), (32, 2), (48, 1), (64, 1), (512, 1)])
def test_a_run_is_filled_up_to_rows_and_tokens(length: int, rows: int) -> None:
    """At most 4 rows and 64 tokens with padding; a text longer than that runs alone."""
    batcher = Batcher(policy())
    batcher.submit(RequestId(1), texts(*[length] * 9))
    runs = run_all(batcher)
    assert [run.rows for run in runs] == [rows] * (9 // rows) + ([9 % rows] if 9 % rows else [])


def test_short_texts_are_not_held_up_by_long_ones() -> None:
    """A short text that arrives behind a queue of long ones is in the next run."""
    batcher = Batcher(policy())
    for number in range(20):
        batcher.submit(RequestId(number), texts(60))
    batcher.submit(RequestId(99), texts(3))
    run = batcher.plan()
    assert run is not None
    assert ids_of(run) == [99]


def test_long_texts_do_not_starve_under_a_flood_of_short_ones() -> None:
    """With short texts always waiting, every fourth run is for who has waited longest."""
    batcher = Batcher(policy())
    batcher.submit(RequestId(0), texts(60))
    served, number = 0, 1
    for _ in range(PASSED_MAX + 1):
        for _ in range(ROWS_MAX):
            batcher.submit(RequestId(number), texts(3))
            number += 1
        run = batcher.plan()
        assert run is not None
        served += 0 in ids_of(run)
        batcher.commit(run)
    assert served == 1


def test_after_the_turn_of_who_waited_longest_short_texts_go_first_again() -> None:
    """Two requests with queues of long texts get every fourth run, not more, while short ones come."""
    batcher = Batcher(policy())
    batcher.submit(RequestId(0), texts(*[30] * 10))
    batcher.submit(RequestId(100), texts(*[30] * 10))
    long_runs = []
    for number in range(1, 13):
        batcher.submit(RequestId(number), texts(3))
        run = batcher.plan()
        assert run is not None
        long_runs.append(0 in ids_of(run))
        batcher.commit(run)
    assert long_runs == [False, False, False, True] * 3


def test_requests_of_one_group_take_turns() -> None:
    """A thousand texts of one request leave room in the next run for the one text of another."""
    batcher = Batcher(policy(run_rows_max=4, run_weight_max=1 << 20))
    batcher.submit(RequestId(1), texts(*[8] * 1000))
    batcher.submit(RequestId(2), texts(8))
    run = batcher.plan()
    assert run is not None
    assert ids_of(run) == [1, 2, 1, 1]


def test_groups_of_different_shape_never_share_a_run() -> None:
    """Equal weight is not enough: the keys differ."""
    batcher = Batcher(policy())
    batcher.submit(RequestId(1), [Piece(0, Group(8, "x[3]"))])
    batcher.submit(RequestId(2), [Piece(0, Group(8, "x[4]"))])
    assert [ids_of(run) for run in run_all(batcher)] == [[1], [2]]


def test_a_full_queue_refuses_and_a_resumed_request_is_taken() -> None:
    """At the limit of requests, and of weight, and one above; what was admitted before is never refused."""
    batcher = Batcher(policy(waiting_max=2))
    assert not batcher.submit(RequestId(1), texts(8))
    assert not batcher.submit(RequestId(2), texts(8))
    (refused,) = batcher.submit(RequestId(3), texts(8))
    assert (refused.reason, refused.refusal) == (Finish.REJECTED, Refusal.FULL)
    assert not batcher.submit(RequestId(4), texts(8), resumed=True)
    batcher = Batcher(policy(waiting_weight_max=16))
    assert not batcher.submit(RequestId(1), texts(8))
    assert not batcher.submit(RequestId(2), texts(8))
    assert batcher.submit(RequestId(3), texts(8))
    batcher = Batcher(policy(waiting_weight_max=16))
    assert not batcher.submit(RequestId(1), texts(64)), "one that alone is over the limit is served when nothing waits"


def test_a_failed_run_is_tried_piece_by_piece_and_only_the_culprit_ends() -> None:
    """Pieces that shared a failed run run alone; the one that goes on failing ends its request after retries_max."""
    batcher = Batcher(policy())
    for number in range(4):
        batcher.submit(RequestId(number), texts(8))
    ended: list[Finished] = []
    failures = 0
    while (run := batcher.plan()) is not None:
        if 2 in ids_of(run):
            failures += 1
            ended += batcher.abort(run, "out of memory")
        else:
            ended += batcher.commit(run)
    assert {int(event.id): event.reason for event in ended} == {
        0: Finish.STOP,
        1: Finish.STOP,
        2: Finish.ENGINE_FAILED,
        3: Finish.STOP,
    }
    assert failures == 1 + 1 + policy().retries_max


def test_a_refused_input_ends_only_its_own_request() -> None:
    """The others of its run are computed without it."""
    batcher = Batcher(policy())
    for number in range(4):
        batcher.submit(RequestId(number), texts(8))
    ended: list[Finished] = []
    while (run := batcher.plan()) is not None:
        ended += batcher.refuse(run, "shape 3 by 4") if 1 in ids_of(run) else batcher.commit(run)
    bad = next(event for event in ended if event.id == 1)
    assert (bad.reason, bad.refusal, bad.detail) == (Finish.REJECTED, Refusal.INVALID, "shape 3 by 4")
    assert sorted(int(event.id) for event in ended if event.reason is Finish.STOP) == [0, 2, 3]


def test_deadlines_end_what_waits() -> None:
    """At its deadline a request ends once, and its pieces are gone."""
    batcher = Batcher(policy())
    batcher.submit(RequestId(1), texts(8, 60), deadline_ms=100)
    assert batcher.expire(99) == []
    assert [(event.id, event.reason) for event in batcher.expire(100)] == [(1, Finish.DEADLINE)]
    assert batcher.plan() is None
    assert not batcher.has_work
    assert batcher.waiting_weight == 0


def test_a_request_without_pieces_has_its_answer() -> None:
    """What a lost worker had already delivered in full ends at once."""
    assert [event.reason for event in Batcher(policy()).submit(RequestId(1), [], resumed=True)] == [Finish.STOP]


# ---- starvation ----------------------------------------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.lists(st.integers(1, 70), min_size=1, max_size=5), min_size=1, max_size=12),
    st.lists(st.lists(st.integers(1, 70), min_size=1, max_size=4), max_size=60),
)
def test_every_piece_is_served_within_its_bound(first: Sequence[list[int]], later: Sequence[list[int]]) -> None:
    """Whatever arrives later, a request is whole after (passed_max + 1) runs for each piece that was there with it."""
    batcher = Batcher(policy())
    for number, lengths in enumerate(first):
        batcher.submit(RequestId(number), texts(*lengths))
    bound = (PASSED_MAX + 1) * sum(map(len, first))
    waiting, number, runs = set(range(len(first))), len(first), 0
    arrivals = iter(later)
    while waiting:
        lengths = next(arrivals, [1, 1, 1, 1])  # a flood without end of the shortest
        batcher.submit(RequestId(number), texts(*lengths))
        number += 1
        run = batcher.plan()
        assert run is not None
        runs += 1
        assert runs <= bound, f"{sorted(waiting)} still wait after {runs} runs"
        waiting -= {int(event.id) for event in batcher.commit(run)}


# ---- any history ---------------------------------------------------------------------------------------------------


@dataclass
class Known:
    pieces: dict[int, Piece]
    done: set[int] = field(default_factory=set)


class BatcherMachine(RuleBasedStateMachine):
    """Every piece is computed once, in a run of its group within the limits, or its request has ended otherwise."""

    @initialize(rows=st.integers(1, 5), weight=st.integers(8, 80), passed=st.integers(0, 4), retries=st.integers(0, 2))
    def start(self, rows: int, weight: int, passed: int, retries: int) -> None:
        self.policy = policy(
            run_rows_max=rows,
            run_weight_max=weight,
            passed_max=passed,
            retries_max=retries,
            waiting_max=8,
            waiting_weight_max=400,
        )
        self.batcher = Batcher(self.policy)
        self.live: dict[int, Known] = {}
        self.deadlines: dict[int, int] = {}
        self.ended: dict[int, Finish] = {}
        self.run_now: Run | None = None
        self.tainted: set[tuple[int, int]] = set()  # pieces that met a failure in company
        self.next_id = 0
        self.now_ms = 0

    def close(self, events: Sequence[Finished]) -> None:
        for event in events:
            assert event.id not in self.ended, "a request ends once"
            known = self.live.pop(int(event.id), None)
            if event.reason is Finish.STOP:
                assert known is None or known.done == set(known.pieces), "it ended with pieces left"
            self.ended[int(event.id)] = event.reason
            self.deadlines.pop(int(event.id), None)

    @rule(
        pieces=st.lists(st.tuples(st.integers(1, 90), st.sampled_from(["", "a"]), st.integers(1, 3)), max_size=6),
        wait_ms=st.one_of(st.none(), st.integers(0, 20)),
        resumed=st.booleans(),
    )
    def submit(self, pieces: list[tuple[int, str, int]], wait_ms: int | None, *, resumed: bool) -> None:
        made = [Piece(i, Group(bucket_of(weight), key), rows) for i, (weight, key, rows) in enumerate(pieces)]
        request_id = self.next_id
        self.next_id += 1
        deadline_ms = None if wait_ms is None else self.now_ms + wait_ms
        full = len(self.live) >= self.policy.waiting_max
        self.live[request_id] = Known({piece.index: piece for piece in made})
        events = self.batcher.submit(RequestId(request_id), made, deadline_ms=deadline_ms, resumed=resumed)
        if made and full and not resumed:
            assert [event.reason for event in events] == [Finish.REJECTED]
        if resumed:
            assert all(event.reason is not Finish.REJECTED for event in events)
        if not events and deadline_ms is not None:
            self.deadlines[request_id] = deadline_ms
        self.close(events)

    @precondition(lambda self: self.run_now is None)
    @rule()
    def plan(self) -> None:
        run = self.batcher.plan()
        waits = any(set(known.pieces) - known.done for known in self.live.values())
        assert (run is not None) == waits, "work that waits is planned at once"
        if run is None:
            return
        self.run_now = run
        assert len(set(run.pieces)) == len(run.pieces)
        for request_id, piece in run.pieces:
            known = self.live[int(request_id)]
            assert known.pieces[piece.index] == piece
            assert piece.index not in known.done
            assert (piece.group.weight, piece.group.key) == (run.group.weight, run.group.key)
        if len(run.pieces) > 1:
            assert not self.tainted & {(int(request_id), piece.index) for request_id, piece in run.pieces}
            assert run.rows <= self.policy.run_rows_max
            assert run.rows * run.group.weight <= self.policy.run_weight_max

    @precondition(lambda self: self.run_now is not None)
    @rule(how=st.sampled_from(["commit", "commit", "commit", "abort", "refuse"]))
    def end_run(self, how: str) -> None:
        run, self.run_now = self.run_now, None
        assert run is not None
        if how != "commit" and len(run.pieces) > 1:
            self.tainted |= {(int(request_id), piece.index) for request_id, piece in run.pieces}
        if how == "commit":
            for request_id, piece in run.pieces:
                if int(request_id) in self.live:
                    self.live[int(request_id)].done.add(piece.index)
            self.close(self.batcher.commit(run))
        elif how == "abort":
            self.close(self.batcher.abort(run, "failed"))
        else:
            events = self.batcher.refuse(run, "refused")
            assert len(run.pieces) == 1 or not events
            self.close(events)

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        if self.live:
            request_id = data.draw(st.sampled_from(sorted(self.live)))
            self.close(self.batcher.cancel(RequestId(request_id), Finish.CANCELLED))
        assert self.batcher.cancel(RequestId(10**6), Finish.CANCELLED) == []

    @rule(step_ms=st.integers(0, 10))
    def expire(self, step_ms: int) -> None:
        self.now_ms += step_ms
        late = {request_id for request_id, due_ms in self.deadlines.items() if due_ms <= self.now_ms}
        events = self.batcher.expire(self.now_ms)
        assert {int(event.id) for event in events} == late
        self.close(events)

    @invariant()
    def counts_agree(self) -> None:
        running = {(int(i), piece.index) for i, piece in self.run_now.pieces} if self.run_now else set()
        waiting = [
            piece
            for request_id, known in self.live.items()
            for index, piece in known.pieces.items()
            if index not in known.done and (request_id, index) not in running
        ]
        assert self.batcher.has_work == bool(self.live)
        assert self.batcher.waiting_weight == sum(piece.weight for piece in waiting)

    def teardown(self) -> None:
        if not hasattr(self, "batcher"):
            return
        if self.run_now is not None:
            self.end_run("commit")
        for _ in range(1000):
            self.plan()
            if self.run_now is None:
                break
            self.end_run("commit")
        assert not self.live, "everything ends"
        assert not self.batcher.has_work


TestBatcher = BatcherMachine.TestCase
TestBatcher.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
