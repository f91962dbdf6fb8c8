from __future__ import annotations

import itertools

import pytest

from residentd.backend.reference import ReferenceBackend, ReferenceModel, continuation
from residentd.core.pacing import Pacer, Profile
from residentd.core.scheduler import Policy, Scheduler
from residentd.engine.link import Cancel, Events, FromWorker, Ping, Pong, Submit
from residentd.engine.loop import Loop
from residentd.errors import BackendLostError, StepRetryableError
from residentd.sampling import Sampler
from residentd.types import Finish, Limits, Refusal, Request, RequestId, SamplingParams, StepPlan

LIMITS = Limits(slots=16, capacity=2048, step_tokens_max=512, vocab=1024)
MODEL = ReferenceModel()
CHUNK = 64


class Bench:
    """A loop over the toy backend with a clock that each step advances, and everything that it emitted."""

    def __init__(self, *, profile: Profile = Profile.THROUGHPUT, waiting_max: int = 100) -> None:
        self.now_ns = 0
        self.emitted: list[FromWorker] = []
        self.fault: Exception | None = None
        self.plans: list[StepPlan] = []
        self.loop = Loop(
            backend=ReferenceBackend(MODEL, LIMITS, fault=self._before_step),
            scheduler=Scheduler(LIMITS, Policy(waiting_max, 100_000, retries_max=2)),
            sampler=Sampler(LIMITS.vocab),
            pacer=Pacer(profile=profile, prefill_tokens_max=CHUNK),
            clock_ns=lambda: self.now_ns,
            emit=self.emitted.append,
        )

    def _before_step(self, plan: StepPlan) -> None:
        self.plans.append(plan)
        self.now_ns += 10_000_000
        if self.fault is not None:
            fault, self.fault = self.fault, None
            raise fault

    def run(self) -> None:
        """Turn until idle."""
        for _ in range(10_000):
            if not self.loop.turn([]):
                return
        raise AssertionError("the loop did not become idle")

    def turns(self, count: int) -> None:
        for _ in range(count):
            assert self.loop.turn([])

    @property
    def events(self) -> list[Events]:
        return [frame for frame in self.emitted if isinstance(frame, Events)]

    def tokens_of(self, number: int) -> list[int]:
        return [
            token
            for frame in self.events
            for request_id, token in zip(frame.ids, frame.tokens, strict=True)
            if request_id == number
        ]

    def steps_of(self, number: int) -> list[int]:
        """The number of the step in which each token of `number` came."""
        return [frame.record.step for frame in self.events if frame.record for other in frame.ids if other == number]


def request(number: int, prompt_tokens: int = 5, output_tokens: int = 20, **fields: object) -> Request:
    prompt = tuple((number * 31 + index) % LIMITS.vocab for index in range(prompt_tokens))
    return Request(RequestId(number), prompt, SamplingParams(tokens_max=output_tokens), **fields)  # type: ignore[arg-type]


def test_everything_that_a_step_made_visible_is_one_frame() -> None:
    """One frame a step, with every row's token; the answers are the oracle's."""
    bench = Bench()
    bench.loop.turn([Submit(request(number)) for number in range(6)])
    bench.run()
    assert len(bench.events) == len(bench.plans)
    for number in range(6):
        assert bench.tokens_of(number) == list(continuation(request(number).prompt, 20, MODEL, LIMITS.vocab))


def test_a_newcomer_gets_its_first_token_before_any_of_eight_others_ends() -> None:
    """In-flight batching, by step records: a request that arrives while eight decode joins the next step."""
    bench = Bench()
    bench.loop.turn([Submit(request(number, output_tokens=100)) for number in range(8)])
    bench.turns(10)
    arrived = len(bench.plans)
    bench.loop.turn([Submit(request(8, output_tokens=5))])
    bench.run()
    first_token = bench.steps_of(8)[0]
    ends = [bench.steps_of(number)[-1] for number in range(8)]
    assert first_token == arrived + 1 < min(ends)
    assert {len(bench.steps_of(number)) for number in range(8)} == {100}


@pytest.mark.parametrize("profile", list(Profile))
def test_a_long_prompt_never_holds_up_a_decode(profile: Profile) -> None:
    """A 1,000-token prompt is computed in chunks of at most the bound, and every step has a token of each decode."""
    bench = Bench(profile=profile)
    bench.loop.turn([Submit(request(number, output_tokens=300)) for number in range(8)])
    bench.turns(10)
    bench.loop.turn([Submit(request(8, prompt_tokens=1000, output_tokens=5))])
    bench.run()
    records = [frame.record for frame in bench.events if frame.record is not None]
    chunks = [record for record in records if record.prefill_tokens and record.step > 1]
    assert sum(record.prefill_tokens for record in chunks) >= 1000 - 1
    for record in chunks:
        assert record.prefill_tokens <= CHUNK
        assert record.decode_rows == 8
    for number in range(8):
        steps = bench.steps_of(number)
        assert all(after - before == 1 for before, after in itertools.pairwise(steps))


def test_a_cancel_frees_the_slot_within_one_step() -> None:
    """After the turn that takes in a cancel no step has that request's row, and nothing more of it is emitted."""
    bench = Bench()
    bench.loop.turn([Submit(request(1, output_tokens=50)), Submit(request(2, output_tokens=50))])
    bench.turns(3)
    bench.loop.turn([Cancel(RequestId(1), Finish.CANCELLED)])
    count = len(bench.tokens_of(1))
    bench.run()
    assert all(row.id != 1 for plan in bench.plans[4:] for row in plan.rows)
    assert len(bench.tokens_of(1)) == count
    assert len(bench.tokens_of(2)) == 50
    bench.loop.turn([Cancel(RequestId(1), Finish.CANCELLED), Cancel(RequestId(99), Finish.CANCELLED)])


def test_a_deadline_ends_a_request_before_the_next_step() -> None:
    """A request whose deadline has passed is in no further step."""
    bench = Bench()
    bench.loop.turn([Submit(request(1, output_tokens=500, deadline_ms=45))])
    bench.run()
    assert len(bench.plans) == 5
    assert bench.events[-1].finished[0].reason is Finish.DEADLINE


def test_a_retryable_failure_is_repeated_and_leaves_no_trace() -> None:
    """The step is planned again and the answer is the same; past retries_max only its rows end."""
    bench = Bench()
    bench.loop.turn([Submit(request(1))])
    bench.fault = StepRetryableError("again")
    bench.run()
    assert bench.tokens_of(1) == list(continuation(request(1).prompt, 20, MODEL, LIMITS.vocab))
    for _ in range(3):
        bench.fault = StepRetryableError("again")
        bench.loop.turn([Submit(request(2))] if bench.loop.idle else [])
    bench.run()
    assert bench.events[-1].finished[0].reason is Finish.ENGINE_FAILED


def test_a_lost_backend_is_not_survived_here() -> None:
    """BackendLostError leaves the loop: the worker ends with it, and the daemon starts another."""
    bench = Bench()
    bench.fault = BackendLostError("gone")
    with pytest.raises(BackendLostError):
        bench.loop.turn([Submit(request(1))])


def test_a_refusal_is_told_at_once() -> None:
    """Requests past the queue's bound are answered in the turn that takes them in, before its step."""
    bench = Bench(waiting_max=1)
    bench.loop.turn([Submit(request(number)) for number in range(20)])
    refused = [finished for frame in bench.events if frame.record is None for finished in frame.finished]
    assert [finished.id for finished in refused] == [17, 18, 19]
    assert {finished.refusal for finished in refused} == {Refusal.FULL}


def test_parameters_that_cannot_be_sampled_end_that_request_only() -> None:
    """What the sampler refuses is a refusal, not the end of the worker."""
    bench = Bench()
    bad = Request(RequestId(1), (1,), SamplingParams(tokens_max=5, stop_ids=frozenset({LIMITS.vocab})))
    bench.loop.turn([Submit(bad), Submit(request(2))])
    bench.run()
    assert [finished.refusal for finished in bench.events[0].finished] == [Refusal.INVALID]
    assert len(bench.tokens_of(2)) == 20


def test_an_idle_engine_answers_a_ping_with_a_real_step() -> None:
    """A canary step runs before the pong, and disturbs nothing."""
    bench = Bench()
    bench.loop.turn([Ping(4)])
    assert bench.emitted == [Pong(4)]
    assert len(bench.plans) == 1
    bench.loop.turn([Submit(request(1))])
    bench.run()
    assert bench.tokens_of(1) == list(continuation(request(1).prompt, 20, MODEL, LIMITS.vocab))


def test_a_busy_engine_answers_a_ping_after_its_step() -> None:
    """With work there is no canary: the step itself is the proof."""
    bench = Bench()
    bench.loop.turn([Submit(request(1)), Ping(7)])
    assert isinstance(bench.emitted[-1], Pong)
    assert len(bench.plans) == 1


def test_a_resumed_request_goes_on_at_its_position() -> None:
    """Tokens delivered before are context: they are not emitted again, and indexes count on."""
    bench = Bench()
    whole = list(continuation(request(1).prompt, 20, MODEL, LIMITS.vocab))
    bench.loop.turn([Submit(request(1, generated=tuple(whole[:7]), resumed=1))])
    bench.run()
    assert bench.tokens_of(1) == whole[7:]
    assert [index for frame in bench.events for index in frame.indexes] == list(range(7, 20))
