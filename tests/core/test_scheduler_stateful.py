"""Any sequence of calls whatsoever: Hypothesis drives the simulator's own account of what is right, and shrinks."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from residentd.core.scheduler import Policy
from residentd.types import Finish, Limits, Request, RequestId, SamplingParams
from sim.life import Core, Life

VOCAB = 16
NEWCOMER = st.tuples(
    st.lists(st.integers(0, VOCAB), max_size=12), st.integers(0, 8), st.integers(0, 4), st.none() | st.integers(0, 100)
)


class SchedulerMachine(RuleBasedStateMachine):
    """Every rule is one call of the daemon or one end of a step; `Life` judges each of them."""

    life: Life

    @initialize(
        engine=st.tuples(st.integers(1, 3), st.integers(1, 14), st.integers(1, 6)),
        policy=st.builds(Policy, st.integers(1, 4), st.integers(14, 30), st.integers(0, 2)),
    )
    def start(self, engine: tuple[int, int, int], policy: Policy) -> None:
        slots, capacity, spare = engine
        self.life = Life(Limits(slots, capacity, slots + spare, VOCAB), policy, Core())

    @rule(newcomer=NEWCOMER)
    def submit(self, newcomer: tuple[list[int], int, int, int | None]) -> None:
        self.life.submit(self._request(newcomer))

    @rule(victim=st.integers(0, 20), reason=st.sampled_from([Finish.CANCELLED, Finish.STOP, Finish.SLOW_CONSUMER]))
    def cancel(self, victim: int, reason: Finish) -> None:
        self.life.cancel(RequestId(victim), reason)

    @rule(elapsed_ms=st.integers(0, 50))
    def expire(self, elapsed_ms: int) -> None:
        self.life.expire(elapsed_ms)

    @precondition(lambda self: self.life.plan is None)
    @rule(prefill_tokens_max=st.none() | st.integers(-1, 12))
    def plan(self, prefill_tokens_max: int | None) -> None:
        self.life.start_step(prefill_tokens_max)

    @precondition(lambda self: self.life.plan is not None)
    @rule()
    def commit(self) -> None:
        self.life.commit()

    @precondition(lambda self: self.life.plan is not None)
    @rule(fatal=st.booleans())
    def abort(self, fatal: bool) -> None:  # noqa: FBT001
        self.life.abort(fatal=fatal)

    @rule(delivered=st.none() | st.integers(0, 3), newcomer=st.none() | NEWCOMER)
    def lose_worker(self, delivered: int | None, newcomer: tuple[list[int], int, int, int | None] | None) -> None:
        if self.life.plan is not None and delivered is not None:
            self.life.commit(delivered=delivered)
        self.life.lose_worker(self._request(newcomer) if newcomer is not None else None)

    def teardown(self) -> None:
        """Whatever happened, the rest of the work ends in as many steps as it has tokens."""
        if not hasattr(self, "life"):
            return
        life = self.life
        if life.plan is not None:
            life.commit()
        for _ in range(life.work_left):
            if not life.start_step(None):
                break
            life.commit()
        life.at_rest()

    def _request(self, newcomer: tuple[list[int], int, int, int | None]) -> Request:
        prompt, tokens_max, tokens_min, within_ms = newcomer
        params = SamplingParams(tokens_max=tokens_max, tokens_min=tokens_min, stop_ids=frozenset({1, 2}))
        deadline_ms = None if within_ms is None else self.life.now_ms + within_ms
        return Request(RequestId(len(self.life.clients)), tuple(prompt), params, deadline_ms=deadline_ms)


SchedulerMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestScheduler = SchedulerMachine.TestCase
