"""Microseconds of Python that one step costs beside the model; run by tools/bench_step.

One function below makes one line of the table. To add a line, write a function that returns a Case, and name it in
CASES. CPU time is this thread's: another process on the cores shows in the wall column, and here only by the caches.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from residentd.core.pacing import Pacer, Profile
from residentd.core.scheduler import Policy, Scheduler
from residentd.engine.link import Submit, encode
from residentd.engine.loop import Loop
from residentd.sampling import Sampler
from residentd.types import Limits, Request, RequestId, SamplingParams, StepPlan

VOCAB = 49_152
PROMPT_TOKENS = 200
WARM_UP_STEPS = 5
STEPS = 60
GREEDY = SamplingParams(tokens_max=1 << 20)
WARM = replace(GREEDY, temperature=0.8)

Logits = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Case:
    """One line: `step` is called once a step, and must take at most `bound_us` of CPU time in the median."""

    name: str
    rows: int
    step: Callable[[], object]
    bound_us: int | None = None


def model_like_logits(rows: int) -> Logits:
    """Rows as a small model gives them: a head that falls with the logarithm of the rank, over a bell of deviation 3.

    At temperature 0.8, top_p 0.95 keeps 40 tokens in the median and 700 at most; on SmolLM2 it is 50 and 3,500.
    """
    rng = np.random.default_rng(1)
    head = np.float32(12.0) - np.float32(1.5) * np.log(np.arange(1, 401, dtype=np.float32))
    logits = (rng.standard_normal((rows, VOCAB)) * 3.0).astype(np.float32)
    for row in logits:
        row[rng.choice(VOCAB, len(head), replace=False)] += head
    return logits


def sampling_case(name: str, rows: int, params: SamplingParams, *, bound_us: int | None = None) -> Case:
    """`rows` requests with `params` and seeds of their own; each step samples and commits a token for each."""
    rng = np.random.default_rng(2)
    sampler = Sampler(VOCAB)
    ids = [RequestId(number) for number in range(rows)]
    for request_id in ids:
        prompt = tuple(rng.integers(0, VOCAB, PROMPT_TOKENS).tolist())
        sampler.add(Request(id=request_id, prompt=prompt, params=replace(params, seed=request_id)))
    logits = model_like_logits(rows)

    def step() -> None:
        for request_id, sampled in zip(ids, sampler.sample(ids, logits), strict=True):
            sampler.commit(request_id, sampled.token)

    return Case(name, rows, step, bound_us)


def argmax_alone() -> Case:
    """The floor of the greedy line: reading 25 MB once."""
    logits = model_like_logits(128)
    return Case("numpy argmax alone, the floor", 128, lambda: logits.argmax(axis=1))


def greedy() -> Case:
    return sampling_case("sampling, greedy", 128, GREEDY, bound_us=1500)


def greedy_logprobs() -> Case:
    return sampling_case("sampling, greedy, top 5 logprobs", 16, replace(GREEDY, logprobs=5))


def greedy_penalties() -> Case:
    return sampling_case("sampling, greedy, repetition penalty", 16, replace(GREEDY, repetition_penalty=1.1))


def unfiltered() -> Case:
    return sampling_case("sampling, temperature 0.8", 16, WARM, bound_us=2000)


def top_k() -> Case:
    return sampling_case("sampling, top_k 50", 16, replace(WARM, top_k=50), bound_us=2000)


def top_p() -> Case:
    return sampling_case("sampling, top_p 0.95", 16, replace(WARM, top_p=0.95), bound_us=2000)


def top_k_and_top_p() -> Case:
    return sampling_case("sampling, top_k 50, top_p 0.95", 16, replace(WARM, top_k=50, top_p=0.95), bound_us=2000)


def min_p() -> Case:
    return sampling_case("sampling, min_p 0.05", 16, replace(WARM, min_p=0.05), bound_us=2000)


def flat() -> Case:
    return sampling_case("sampling, temperature 10, the slow way", 16, replace(GREEDY, temperature=10.0))


def everything() -> Case:
    params = replace(WARM, top_p=0.95, repetition_penalty=1.1, frequency_penalty=0.1, logprobs=5)
    return sampling_case("sampling, top_p, penalties, logprobs", 16, params)


class IdleBackend:
    """Answers every step with the same logits: what is measured is everything around the model."""

    def __init__(self, rows: int) -> None:
        self.limits = Limits(slots=rows, capacity=1 << 20, step_tokens_max=1 << 15, vocab=VOCAB)
        self._logits = model_like_logits(rows)

    def step(self, plan: StepPlan) -> Logits:
        return self._logits[: sum(row.samples for row in plan.rows)]

    def close(self) -> None:
        """Nothing is held."""


def whole_step() -> Case:
    """Expire, plan, sample, commit and the encoded frame of events: one turn of the worker's loop."""
    rows = 128
    backend = IdleBackend(rows)
    loop = Loop(
        backend=backend,
        scheduler=Scheduler(backend.limits, Policy(waiting_max=rows, waiting_tokens_max=1 << 20, retries_max=3)),
        sampler=Sampler(VOCAB),
        pacer=Pacer(profile=Profile.THROUGHPUT, prefill_tokens_max=1 << 15),
        clock_ns=time.monotonic_ns,
        emit=encode,
    )
    params = replace(GREEDY, tokens_max=1 << 19)
    loop.turn([Submit(Request(RequestId(number), (1,) * PROMPT_TOKENS, params)) for number in range(rows)])
    return Case("schedule + sample + emit, greedy", rows, lambda: loop.turn([]), bound_us=2000)


CASES = (
    argmax_alone,
    whole_step,
    greedy,
    greedy_logprobs,
    greedy_penalties,
    unfiltered,
    top_k,
    top_p,
    top_k_and_top_p,
    min_p,
    flat,
    everything,
)


@dataclass(frozen=True, slots=True)
class Timing:
    cpu_us: float
    wall_us: float


def measure(case: Case, steps: int) -> Timing:
    """Medians over `steps` steps."""
    for _ in range(WARM_UP_STEPS):
        case.step()
    cpu, wall = [], []
    for _ in range(steps):
        started_cpu, started_wall = time.thread_time_ns(), time.perf_counter_ns()
        case.step()
        cpu.append((time.thread_time_ns() - started_cpu) / 1000)
        wall.append((time.perf_counter_ns() - started_wall) / 1000)
    return Timing(statistics.median(cpu), statistics.median(wall))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split(";", maxsplit=1)[0])
    parser.add_argument("--steps", type=int, default=STEPS, help=f"steps a line, default {STEPS}")
    parser.add_argument("--check", action="store_true", help="exit 1 if a line is over its bound")
    arguments = parser.parse_args()
    print(f"vocabulary {VOCAB:,}, numpy {np.__version__}, median of {arguments.steps} steps")
    print(f"{'':44}{'rows':>5}{'CPU µs':>9}{'wall µs':>9}{'a row':>8}{'bound':>7}")
    over = 0
    for make in CASES:
        case = make()
        timing = measure(case, arguments.steps)
        missed = case.bound_us is not None and timing.cpu_us > case.bound_us
        over += missed
        bound = "" if case.bound_us is None else f"{case.bound_us}"
        figures = f"{case.rows:5}{timing.cpu_us:9.0f}{timing.wall_us:9.0f}{timing.cpu_us / case.rows:8.1f}{bound:>7}"
        print(f"{case.name:44}{figures}{'  OVER' if missed else ''}", flush=True)
    return 1 if over and arguments.check else 0


if __name__ == "__main__":
    sys.exit(main())
