"""Pacing against synthetic machines: noisy, with hiccups, and becoming another machine midway."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from residentd.core.pacing import (
    CHUNK_TOKENS_MIN,
    PROBE_STEPS,
    PROBE_TOKENS,
    PROBES_MIN,
    SLOWDOWN,
    SURPRISE,
    WINDOW,
    Pacer,
    Profile,
    bucket,
)
from residentd.core.scheduler import Policy, Scheduler
from residentd.errors import OperatorError
from residentd.types import Limits, Request, RequestId, Sampled, SamplingParams, StepRecord, Token

PREFILL_MAX = 256
ROWS = 8


def pacer_of(profile: Profile = Profile.INTERACTIVE) -> Pacer:
    return Pacer(profile=profile, prefill_tokens_max=PREFILL_MAX)


def record_of(decode_rows: int, prefill_tokens: int, elapsed_us: float) -> StepRecord:
    return StepRecord(0, decode_rows, int(prefill_tokens > 0), prefill_tokens, round(elapsed_us), 0, 0)


@dataclass(slots=True)
class Machine:
    """A step costs decode_us + token_us * prefill tokens, times the noise."""

    decode_us: float = 24_000
    token_us: float = 2_500
    noise: Callable[[], float] = field(default=lambda: 1.0)

    def step_us(self, prefill_tokens: int) -> float:
        return self.decode_us + self.token_us * prefill_tokens

    def slowdown(self, prefill_tokens: int) -> float:
        """How much longer a step with prefill truly takes than one without."""
        return self.step_us(prefill_tokens) / self.decode_us

    @property
    def ideal(self) -> float:
        return (SLOWDOWN - 1) * self.decode_us / self.token_us

    def run(self, pacer: Pacer, steps: int) -> list[int]:
        """Prefill never pauses: every step carries its whole budget. The budgets."""
        budgets = []
        for _ in range(steps):
            budgets.append(pacer.prefill_budget(ROWS))
            pacer.observe(record_of(ROWS, budgets[-1], self.step_us(budgets[-1]) * self.noise()))
        return budgets


def uniform_noise(seed: int, spread: float) -> Callable[[], float]:
    rng = random.Random(seed)
    return lambda: rng.uniform(1 - spread, 1 + spread)


# -- without noise: exact ----------------------------------------------------------------------------------------------


def test_throughput_takes_what_is_allowed() -> None:
    """Whatever steps cost."""
    pacer = pacer_of(Profile.THROUGHPUT)
    assert set(Machine().run(pacer, 100)) == {PREFILL_MAX}


def test_without_decodes_nobody_waits() -> None:
    """Prefill alone takes what is allowed, in either profile."""
    pacer = pacer_of()
    assert pacer.prefill_budget(0) == PREFILL_MAX
    Machine().run(pacer, 20)
    assert pacer.prefill_budget(0) == PREFILL_MAX


def test_learning_from_nothing() -> None:
    """A probe for the decodes, the smallest chunk for the tokens, then as much as is affordable: 1.5 * 24 / 2.5."""
    assert Machine().run(pacer_of(), 7) == [PROBE_TOKENS, CHUNK_TOKENS_MIN, PROBE_TOKENS, 14, PROBE_TOKENS, 14, 14]


def test_chunks_grow_by_doubling() -> None:
    """A measurement at one chunk size says nothing about sizes far beyond it."""
    assert Machine(token_us=200).run(pacer_of(), 10) == [1, 8, 1, 16, 1, 32, 64, 128, 180, 180]


def test_chunks_stay_below_the_operators_bound() -> None:
    """Free prefill is still bounded by prefill_tokens_max."""
    assert Machine(token_us=0).run(pacer_of(), 12)[-3:] == [PREFILL_MAX] * 3


def test_dear_prefill_progresses_all_the_same() -> None:
    """The smallest chunk is not for the model to refuse: prefill is never starved."""
    budgets = Machine(token_us=1_000_000).run(pacer_of(), 200)
    assert set(budgets) == {PROBE_TOKENS, CHUNK_TOKENS_MIN}
    assert budgets.count(PROBE_TOKENS) <= PROBES_MIN + 200 // PROBE_STEPS


def test_under_endless_prefill_decodes_are_probed_in_due_course() -> None:
    """Once the first probes are in, exactly one in PROBE_STEPS + 1 steps, for ever."""
    budgets = Machine().run(pacer_of(), 5 + 3 * (PROBE_STEPS + 1))
    probes = [step for step, budget in enumerate(budgets) if budget == PROBE_TOKENS]
    assert probes == [0, 2, 4, *(4 + turn * (PROBE_STEPS + 1) for turn in (1, 2, 3))]


def test_steps_without_prefill_are_probes_enough() -> None:
    """Where decodes run alone now and then, no prefill is held back to measure them."""
    pacer, machine = pacer_of(), Machine()
    for _ in range(PROBES_MIN):
        pacer.observe(record_of(ROWS, 0, machine.step_us(0)))
    for _ in range(50):
        pacer.observe(record_of(ROWS, 0, machine.step_us(0)))
        assert PROBE_TOKENS not in machine.run(pacer, PROBE_STEPS - 1)


@pytest.mark.parametrize("prefill_tokens", [0, 8, 14])
def test_one_hiccup_changes_no_chunk(prefill_tokens: int) -> None:
    """A step ten times too long counts for nothing but a probe."""
    pacer, machine = pacer_of(), Machine()
    for _ in range(WINDOW):
        pacer.observe(record_of(ROWS, 0, machine.step_us(0)))
        machine.run(pacer, 2)
    pacer.observe(record_of(ROWS, prefill_tokens, 10 * machine.step_us(prefill_tokens)))
    assert set(machine.run(pacer, 10)) <= {14, PROBE_TOKENS}


def test_rows_are_measured_by_bucket() -> None:
    """Decodes of 2 rows and of 16 cost differently; each chunk follows its own."""
    pacer = pacer_of()
    for rows, decode_us in ((2, 20_000), (16, 80_000)):
        for _ in range(PROBES_MIN):
            pacer.observe(record_of(rows, 0, decode_us))
        pacer.observe(record_of(rows, 32, decode_us + 32 * 2_500))
    assert [pacer.prefill_budget(rows) for rows in (2, 16)] == [12, 48]
    assert pacer.prefill_budget(7) == PROBE_TOKENS, "never measured"


def test_buckets() -> None:
    """Two an octave, so that the rows within one differ by less than half; every row count is in one."""
    edges = [bucket(rows) for rows in range(1, 513)]
    assert sorted(set(edges)) == [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512]
    assert all(rows <= edge < 1.5 * rows for rows, edge in enumerate(edges, 1))


@pytest.mark.parametrize(
    ("prefill_tokens_max", "slowdown", "complaint"),
    [(1, 1.01, None), (0, 2.0, "prefill_tokens_max is 0"), (1, 1.0, "slowdown is 1.0")],
)
def test_settings_at_their_limits(prefill_tokens_max: int, slowdown: float, complaint: str | None) -> None:
    """The operator reads which setting is wrong, and what is needed."""

    def make() -> Pacer:
        return Pacer(profile=Profile.INTERACTIVE, prefill_tokens_max=prefill_tokens_max, slowdown=slowdown)

    if complaint is None:
        assert make().prefill_budget(1) == 1
        return
    with pytest.raises(OperatorError, match=complaint):
        make()


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 300), st.integers(0, 10_000_000)), max_size=80))
def test_any_history_gives_a_budget_within_its_limits(history: list[tuple[int, int, int]]) -> None:
    """At least 1, at most what is allowed, and never nothing but probes: after a probe the next step is none."""
    pacer = pacer_of()
    for decode_rows, prefill_tokens, elapsed_us in history:
        budget = pacer.prefill_budget(decode_rows)
        assert 1 <= budget <= PREFILL_MAX
        assert budget == PROBE_TOKENS or budget >= CHUNK_TOKENS_MIN
        pacer.observe(record_of(decode_rows, min(prefill_tokens, budget), elapsed_us))


# -- with noise: bounds ------------------------------------------------------------------------------------------------

NOISE = 0.05
"""Each step costs up to 5 % more or less than the machine's truth; every bound below follows from that."""


def token_error(machine: Machine) -> float:
    """The smallest chunk and a probe give a token's price as a slope over 7 tokens; larger chunks give it better."""
    slope_tokens = CHUNK_TOKENS_MIN - PROBE_TOKENS
    noise_us = NOISE * (machine.step_us(CHUNK_TOKENS_MIN) + machine.step_us(PROBE_TOKENS))
    return noise_us / (slope_tokens * machine.token_us)


def decode_error(machine: Machine) -> float:
    """A probe gives the decodes' cost once its own token is taken off, with the error of both."""
    noise_us = NOISE * machine.step_us(PROBE_TOKENS) + token_error(machine) * machine.token_us * PROBE_TOKENS
    return noise_us / machine.decode_us


def highest(machine: Machine) -> float:
    return max(CHUNK_TOKENS_MIN, machine.ideal * (1 + decode_error(machine)) / (1 - token_error(machine)))


def lowest(machine: Machine) -> float:
    return max(CHUNK_TOKENS_MIN, math.floor(machine.ideal * (1 - decode_error(machine)) / (1 + token_error(machine))))


def assert_paced(machine: Machine, budgets: list[int]) -> None:
    """Every chunk is within what the noise explains of the ideal one, both ways."""
    chunks = [budget for budget in budgets if budget != PROBE_TOKENS]
    assert chunks
    assert lowest(machine) <= min(chunks) <= max(chunks) <= highest(machine)


def doublings(machine: Machine) -> int:
    return math.ceil(math.log2(highest(machine) / CHUNK_TOKENS_MIN))


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("token_us", [1_500, 2_500, 3_750])
def test_learning_under_noise_takes_the_first_probes_and_the_doublings(seed: int, token_us: int) -> None:
    """Convergence bound: PROBES_MIN + 1 + ceil(log2(ideal / 8)) steps after the start, and paced from then on."""
    machine = Machine(token_us=token_us, noise=uniform_noise(seed, NOISE))
    pacer = pacer_of()
    machine.run(pacer, PROBES_MIN + 1 + doublings(machine))
    assert_paced(machine, machine.run(pacer, 300))


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize(
    ("decode_factor", "token_factor"),
    [(3, 3), (1 / 3, 1 / 3), (3, 1), (1 / 2, 1), (1, 2), (1, 3), (1, 1 / 2), (2, 1 / 2)],
)
def test_another_machine_midway_is_learnt_within_a_bound(decode_factor: float, token_factor: float, seed: int) -> None:
    """Convergence bound: the next probe and the one it asks for (or two mixed steps) show the change, then all is anew.

    A change too small to surprise is taken in by medians, as soon as most of a window is new: WINDOW steps more.
    """
    pacer = pacer_of()
    before = Machine(noise=uniform_noise(seed, NOISE))
    before.run(pacer, 100 + seed)  # so that the change comes anywhere between two probes
    after = Machine(before.decode_us * decode_factor, before.token_us * token_factor, before.noise)
    after.run(pacer, PROBE_STEPS + 2 + WINDOW + PROBES_MIN + 1 + doublings(after))
    assert_paced(after, after.run(pacer, 300))


@pytest.mark.parametrize("factor", [3, 1 / 3])
def test_a_uniform_change_of_speed_never_slows_the_decodes(factor: float) -> None:
    """All costs jump 3 times, as when a neighbour takes the cores: the chunk keeps its proportion even on the way."""
    pacer, before = pacer_of(), Machine()
    before.run(pacer, 100)
    after = Machine(before.decode_us * factor, before.token_us * factor)
    budgets = after.run(pacer, 300)
    assert max(after.slowdown(budget) for budget in budgets) <= SLOWDOWN + 0.01
    assert sum(budget in {13, 14} for budget in budgets) > 0.9 * len(budgets)


@pytest.mark.parametrize("prefill_tokens", [0, 14])
@pytest.mark.parametrize(
    ("second", "learns_anew"),
    [(1.0, False), (1 / (2 * SURPRISE), False), (0.9 * SURPRISE, False), (2 * SURPRISE, True)],
)
def test_two_surprises_in_a_row_are_needed(prefill_tokens: int, second: float, learns_anew: bool) -> None:  # noqa: FBT001
    """SURPRISE once is a hiccup, twice in the same direction another machine; in both directions it is noise."""
    pacer, machine = pacer_of(), Machine()
    machine.run(pacer, 10)
    for factor in (2 * SURPRISE, second):
        pacer.observe(record_of(ROWS, prefill_tokens, machine.step_us(prefill_tokens) * factor))
    chunks = [budget for budget in machine.run(pacer, 3) if budget != PROBE_TOKENS]
    assert (chunks[0] == CHUNK_TOKENS_MIN) == learns_anew


def test_a_surprise_of_each_kind_is_not_two() -> None:
    """A decode step and a mixed one that both took long are two hiccups."""
    pacer, machine = pacer_of(), Machine()
    machine.run(pacer, 10)
    for prefill_tokens in (0, 14):
        pacer.observe(record_of(ROWS, prefill_tokens, machine.step_us(prefill_tokens) * 2 * SURPRISE))
    assert CHUNK_TOKENS_MIN not in machine.run(pacer, 3)


def test_the_rest_of_a_prompt_teaches_nothing() -> None:
    """A few tokens at the end of a prompt measure the step's overhead rather than a token's price."""
    pacer, machine = pacer_of(), Machine()
    machine.run(pacer, 10)
    for _ in range(2 * WINDOW):
        pacer.observe(record_of(ROWS, CHUNK_TOKENS_MIN - 1, machine.step_us(CHUNK_TOKENS_MIN - 1) * 0.8 * SURPRISE))
    assert set(machine.run(pacer, 10)) <= {14, PROBE_TOKENS}


def test_prefill_by_itself_teaches_nothing() -> None:
    """Its cost says nothing about a step with decodes in it."""
    pacer, machine = pacer_of(), Machine()
    pacer.observe(record_of(0, 200, 1.0))
    assert pacer.prefill_budget(1) == PROBE_TOKENS
    machine.run(pacer, 10)
    for _ in range(2 * WINDOW):
        pacer.observe(record_of(0, 200, 1.0))
        pacer.observe(record_of(0, 1, 1.0))
    assert set(machine.run(pacer, 10)) == {14}


# -- the whole loop: the real scheduler on a synthetic machine ---------------------------------------------------------


def additive_us(rows: int, prefill_tokens: int) -> float:
    return 22_000 + 600 * rows + 2_500 * prefill_tokens


def roofline_us(rows: int, prefill_tokens: int) -> float:
    """SmolLM2-135M fp32 on the two-core machine of facts/onnxruntime.md: 24 ms to read the weights, 2.5 ms a token."""
    return max(24_000, 2_500 * (rows + prefill_tokens)) + 300 * rows


def even(rng: random.Random) -> float:
    return math.exp(rng.gauss(0, 0.1))


def spiky(rng: random.Random) -> float:
    """3 steps in 100 take three times as long."""
    return math.exp(rng.gauss(0, 0.08)) * (3 if rng.random() < 0.03 else 1)


@dataclass(frozen=True, slots=True)
class Served:
    tokens_per_s: float
    itl_p50_us: int
    itl_p95_us: int
    prefill_chunk_max: int


class ClosedLoop:
    """`concurrency` clients that each send the next request when one ends, ragged around 128 in and 64 out."""

    def __init__(
        self,
        profile: Profile,
        concurrency: int,
        cost_us: Callable[[int, int], float],
        noise: Callable[[random.Random], float],
    ) -> None:
        self._rng = random.Random(concurrency)
        self._cost_us, self._noise = cost_us, noise
        self._scheduler = Scheduler(Limits(16, 2_048, 512, 100), Policy(100, 1 << 20, 0))
        self._pacer = pacer_of(profile)
        self._now_us = self._count = self._tokens = self._chunk_max = 0
        self._last_us: dict[RequestId, int] = {}
        self._gaps_us: list[int] = []
        for _ in range(concurrency):
            self._submit()

    def _submit(self) -> None:
        prompt, tokens_max = (round(size * self._rng.uniform(0.5, 1.5)) for size in (128, 64))
        self._scheduler.submit(Request(RequestId(self._count), (1,) * prompt, SamplingParams(tokens_max=tokens_max)))
        self._count += 1

    def serve(self, requests: int) -> Served:
        while self._count < requests:
            self._step()
        gaps_us = sorted(self._gaps_us)
        p50, p95 = (gaps_us[int(len(gaps_us) * share)] for share in (0.5, 0.95))
        return Served(self._tokens / self._now_us * 1e6, p50, p95, self._chunk_max)

    def _step(self) -> None:
        plan = self._scheduler.plan(self._pacer.prefill_budget(self._scheduler.decoding_count))
        assert plan is not None
        decode_rows = sum(1 for row in plan.rows if row.samples and len(row.tokens) == 1)
        prefill_tokens = plan.tokens_count - decode_rows
        elapsed_us = int(self._cost_us(decode_rows, prefill_tokens) * self._noise(self._rng))
        self._now_us += elapsed_us
        self._chunk_max = max(self._chunk_max, prefill_tokens if decode_rows else 0)
        for event in self._scheduler.commit(plan, {row.id: Sampled(1) for row in plan.rows if row.samples}):
            if isinstance(event, Token):
                self._tokens += 1
                if event.index:
                    self._gaps_us.append(self._now_us - self._last_us[event.id])
                self._last_us[event.id] = self._now_us
            else:
                self._submit()
        self._pacer.observe(record_of(decode_rows, prefill_tokens, elapsed_us))


@pytest.mark.parametrize("concurrency", [4, 8, 16, 32])
@pytest.mark.parametrize("noise", [even, spiky])
@pytest.mark.parametrize("cost_us", [additive_us, roofline_us])
def test_interactive_keeps_the_pace_of_decodes_at_three_quarters_of_the_throughput(
    cost_us: Callable[[int, int], float], noise: Callable[[random.Random], float], concurrency: int
) -> None:
    """Issue 2, Speed: ITL p95 <= 3 * p50 at >= 0.75 of throughput's tokens/s, which itself stalls decodes."""
    served = {
        profile: ClosedLoop(profile, concurrency, cost_us, noise).serve(requests=80 + concurrency)
        for profile in Profile
    }
    interactive, throughput = served[Profile.INTERACTIVE], served[Profile.THROUGHPUT]
    assert interactive.itl_p95_us <= 3 * interactive.itl_p50_us
    assert interactive.tokens_per_s >= 0.75 * throughput.tokens_per_s
    assert throughput.prefill_chunk_max > 100 > interactive.prefill_chunk_max, "the profiles are the same"
