"""One integer seed, one whole life of the core: traffic, faults, cancels, worker losses and time, then calm.

tools/sim --seeds 2000              2,000 lives; prints the rate, and each kind of failure with its first seed
tools/sim --seed 1234 --trace       one life, told step by step
"""

from __future__ import annotations

import argparse
import hashlib
import random
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from residentd.core.pacing import Pacer, Profile
from residentd.core.scheduler import Policy
from residentd.types import Finish, Limits, Request, RequestId, SamplingParams, StepRecord
from sim.life import Core, Life

BOGUS_ID = RequestId(1_000_000)
LEAVING = (Finish.CANCELLED, Finish.CANCELLED, Finish.SLOW_CONSUMER, Finish.STOP)


@dataclass(frozen=True, slots=True)
class Odds:
    """Chance of each event a tick. Each seed draws its own, many of them 0 (swarm testing)."""

    arrival: float
    cancel: float
    bogus: float
    deadline: float
    fault: float
    fatal: float
    loss: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one seed did. `digest` covers everything that came out of the core."""

    digest: str
    steps: int
    requests: int
    tokens: int


def simulate(
    seed: int,
    core: Core | None = None,
    trace: Callable[[str], None] | None = None,
    life_class: type[Life] = Life,
) -> Outcome:
    """Live one life. Any exception, AssertionError or other, is a finding about the core."""
    return _Simulation(random.Random(seed), core or Core(), trace, life_class).run()


class _Simulation:
    def __init__(
        self, rng: random.Random, core: Core, trace: Callable[[str], None] | None, life_class: type[Life]
    ) -> None:
        self._rng = rng
        self._odds = _odds(rng)
        limits = _limits(rng)
        policy = Policy(
            waiting_max=rng.randint(1, 10),
            waiting_tokens_max=limits.capacity + rng.randint(0, 2 * limits.capacity),
            retries_max=rng.randint(0, 3),
        )
        self._life = life_class(limits, policy, core, trace)
        self._alphabet = rng.choice([1, 2, limits.vocab])
        self._shared = [rng.randrange(self._alphabet) for _ in range(limits.capacity)]
        self._pacing = rng.choice(["none", "fixed", "random", "pacer"])
        self._fixed = rng.randint(1, 8)
        self._pacer = Pacer(profile=Profile.INTERACTIVE, prefill_tokens_max=rng.randint(1, 32))
        self._chance = rng.random

    def run(self) -> Outcome:
        steps = sum(self._tick() for _ in range(self._rng.randint(20, 120)))
        steps += self._calm()
        life = self._life
        life.at_rest()
        digest = hashlib.blake2b(repr(life.log).encode(), digest_size=8).hexdigest()
        return Outcome(digest, steps, len(life.clients), sum(len(c.delivered) for c in life.clients.values()))

    def _tick(self) -> bool:
        """One turn of the worker's loop, with whatever happens around it."""
        life, odds = self._life, self._odds
        self._traffic()
        life.expire(self._rng.randint(0, 20))
        if self._chance() < odds.loss:
            life.lose_worker(self._newcomer())
        if not life.start_step(self._budget()):
            return False
        self._traffic()  # while the device computes
        if self._chance() < 0.1:
            life.expire(self._rng.randint(0, 20))
        self._end_step()
        return True

    def _end_step(self) -> None:
        life, odds, chance = self._life, self._odds, self._chance
        if chance() < odds.loss:
            if chance() < 0.5:  # the step was committed, and its events got out in part
                life.commit(delivered=self._rng.randint(0, life.limits.slots))
            life.lose_worker(self._newcomer())
        elif chance() < odds.fault:
            life.abort(fatal=chance() < odds.fatal)
        else:
            self._commit()

    def _commit(self) -> None:
        plan = self._life.plan
        assert plan is not None
        decode_rows = sum(1 for row in plan.rows if row.samples and len(row.tokens) == 1)
        prefill_rows, prefill_tokens = len(plan.rows) - decode_rows, plan.tokens_count - decode_rows
        elapsed_us = int((1000 + 50 * decode_rows + 100 * prefill_tokens) * self._rng.uniform(0.8, 1.2))
        self._pacer.observe(StepRecord(plan.step, decode_rows, prefill_rows, prefill_tokens, elapsed_us, 0, 0))
        self._life.commit()

    def _calm(self) -> int:
        """Liveness: no traffic and no faults any more. Every step computes a token, so the end is near."""
        bound = self._life.work_left
        steps = 0
        while self._life.start_step(self._budget()):
            steps += 1
            assert steps <= bound, f"liveness: work is left after {bound} calm steps"
            self._commit()
        return steps

    # -- traffic -------------------------------------------------------------------------------------------------------

    def _traffic(self) -> None:
        life, odds, chance = self._life, self._odds, self._chance
        while chance() < odds.arrival:
            life.submit(self._request())
        if life.clients and chance() < odds.cancel:
            victims = life.live if life.live and chance() < 0.8 else list(life.clients)
            victim = self._rng.choice(victims)
            life.cancel(victim, self._rng.choice(LEAVING))
            if chance() < 0.2:
                life.cancel(victim)
        if chance() < odds.bogus:
            life.cancel(BOGUS_ID)

    def _newcomer(self) -> Request | None:
        return self._request() if self._chance() < 0.5 else None

    def _request(self) -> Request:
        rng, life = self._rng, self._life
        capacity, vocab = life.limits.capacity, life.limits.vocab
        count = rng.randint(1, max(1, capacity * 2 // 3))
        tokens_max = rng.randint(1, max(1, capacity // 2))
        if rng.random() < 0.15:  # around the largest that fits
            tokens_max = max(1, capacity - count + rng.choice([-1, 0, 0, 1, 2]))
        if rng.random() < 0.02:
            count, tokens_max = rng.choice([(0, 1), (1, 0), (capacity, 1), (1, capacity)])
        shared = rng.randint(0, count)
        prompt = (*self._shared[:shared], *(rng.randrange(self._alphabet) for _ in range(count - shared)))
        if rng.random() < 0.01:
            prompt = (*prompt[:-1], rng.choice([-1, vocab]))
        late = rng.random() < self._odds.deadline
        return Request(
            id=RequestId(len(life.clients)),
            prompt=prompt,
            params=SamplingParams(
                tokens_max=tokens_max,
                tokens_min=rng.choice([0, 0, rng.randint(0, tokens_max)]),
                seed=rng.randrange(4),
                stop_ids=frozenset(rng.sample(range(vocab), rng.choice([0, 1, vocab // 8]))),
            ),
            deadline_ms=life.now_ms + rng.randint(0, 300) if late else None,
        )

    def _budget(self) -> int | None:
        match self._pacing:
            case "fixed":
                return self._fixed
            case "random":
                return self._rng.randint(-1, self._life.limits.step_tokens_max + 1)
            case "pacer":
                return self._pacer.prefill_budget(self._life.decoding_count)
        return None


def _limits(rng: random.Random) -> Limits:
    slots = rng.randint(1, 6)
    return Limits(
        slots=slots,
        capacity=rng.choice([rng.randint(3, 12), rng.randint(12, 64)]),
        step_tokens_max=slots + rng.choice([1, 2, rng.randint(1, 24)]),
        vocab=rng.choice([16, 64, 200]),
    )


def _odds(rng: random.Random) -> Odds:
    def rare() -> float:
        return rng.choice([0, 0, 0.02, 0.2])

    return Odds(
        arrival=rng.choice([0.05, 0.15, 0.4]),
        cancel=rare(),
        bogus=rare(),
        deadline=rng.choice([0, 0, 0.3]),
        fault=rng.choice([0, 0, 0.05, 0.4]),
        fatal=rng.choice([0, 0, 0.1]),
        loss=rng.choice([0, 0, 0.01, 0.08]),
    )


# -- tools/sim ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Report:
    """Many seeds. `failures` maps what went wrong to how often and the first seed."""

    seeds: int
    steps: int
    requests: int
    tokens: int
    digest: str
    failures: dict[str, tuple[int, int]]


def simulate_many(first: int, count: int, core: Core | None = None) -> Report:
    outcomes: list[Outcome] = []
    failures: dict[str, tuple[int, int]] = {}
    for seed in range(first, first + count):
        try:
            outcomes.append(simulate(seed, core))
        except Exception as error:  # noqa: BLE001  (whatever a broken core raises is a finding)
            kind = f"{type(error).__name__}: {str(error)[:100]}"
            times, first_seed = failures.get(kind, (0, seed))
            failures[kind] = (times + 1, first_seed)
    digest = hashlib.blake2b("".join(outcome.digest for outcome in outcomes).encode(), digest_size=8).hexdigest()
    return Report(
        count,
        sum(outcome.steps for outcome in outcomes),
        sum(outcome.requests for outcome in outcomes),
        sum(outcome.tokens for outcome in outcomes),
        digest,
        failures,
    )


def _seed_count(text: str) -> int:
    """A number of lives. None at all would pass without having tested anything."""
    count = int(text)
    if count < 1:
        raise argparse.ArgumentTypeError(f"{count} is not a number of lives. Give 1 or more")
    return count


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="tools/sim", description="Simulate lives of the scheduling core by seed.")
    parser.add_argument("--seeds", type=_seed_count, default=2000, metavar="N", help="how many lives (2000)")
    parser.add_argument("--first", type=int, default=0, metavar="S", help="the first seed (0)")
    parser.add_argument("--seed", type=int, metavar="K", help="one life only; a failure shows its traceback")
    parser.add_argument("--trace", action="store_true", help="with --seed: tell it step by step")
    options = parser.parse_args(arguments)
    if options.seed is not None:
        outcome = simulate(options.seed, trace=print if options.trace else None)
        print(
            f"seed {options.seed}: {outcome.steps:,} steps, {outcome.requests:,} requests, {outcome.tokens:,} tokens, "
            f"digest {outcome.digest}"
        )
        return 0
    started = time.perf_counter()
    report = simulate_many(options.first, options.seeds)
    seconds = time.perf_counter() - started
    failed = sum(times for times, _ in report.failures.values())
    print(
        f"{report.seeds:,} seeds in {seconds:.1f} s ({report.seeds / seconds:.0f} seeds/s): {report.steps:,} steps, "
        f"{report.requests:,} requests, {report.tokens:,} tokens, digest {report.digest}; {failed:,} failures"
    )
    for kind, (times, seed) in sorted(report.failures.items(), key=lambda item: item[1][1]):
        print(f"  {times:,} x {kind}\n      first: tools/sim --seed {seed} --trace")
    return 1 if failed else 0


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `tools/sim --seed 1 --trace | head` ends quietly
    sys.exit(main())
