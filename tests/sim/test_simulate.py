"""The seeded simulator over the real core: 2,000 lives a run, and the simulator itself under test."""

from __future__ import annotations

import collections
import os
import subprocess
import sys
from pathlib import Path

import pytest

from residentd.types import Finish, Limits, Refusal, Request, RequestId, Row, SamplingParams, StepPlan
from sim.device import FakeDevice, chosen, solo
from sim.life import Life
from sim.mutants import MUTANTS, mutated
from sim.simulate import main, simulate, simulate_many

SEEDS = 2_000
REPLAYED = 50
ROOT = Path(__file__).parents[2]


def test_the_core_lives_2000_lives_without_a_fault() -> None:
    """No seed finds a lost, repeated or foreign token, a leak, a stall, a broken bound or a second end."""
    report = simulate_many(0, SEEDS)
    assert report.failures == {}
    assert report.tokens > 10 * SEEDS, "the seeds do next to nothing"


def test_a_seed_replays_byte_for_byte() -> None:
    """Everything that leaves the core is a function of the seed."""
    first = [simulate(seed) for seed in range(REPLAYED)]
    assert [simulate(seed) for seed in range(REPLAYED)] == first
    assert len({outcome.digest for outcome in first}) == REPLAYED, "the digest does not see what happened"


def test_a_seed_replays_in_another_process() -> None:
    """Replay does not hang on the hash seed of the interpreter."""

    def told(hash_seed: str) -> str:
        environment = os.environ | {"PYTHONHASHSEED": hash_seed, "PYTHONPATH": f"{ROOT / 'daemon'}:{ROOT / 'tests'}"}
        command = [sys.executable, "-m", "sim.simulate", "--seed", "17", "--trace"]
        return subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout

    assert told("1") == told("2")
    assert told("1").count("\n") > 100


def test_the_seeds_reach_every_situation() -> None:
    """A situation that no seed reaches is not simulated: each end, each refusal, each fault and their mixes occur."""
    seen: collections.Counter[str] = collections.Counter()

    class Witness(Life):
        def at_rest(self) -> None:
            super().at_rest()
            for client in self.clients.values():
                assert client.end is not None
                seen[client.end.reason] += 1
                seen[client.end.refusal or "accepted"] += 1
                served = client.end.reason in {Finish.STOP, Finish.LENGTH} and client.leaving is None
                seen["resumed with output and completed"] += served and client.losses > 0 and len(client.delivered) > 1
                seen["lost twice and completed"] += served and client.losses > 1
                seen["late in a deadline's step"] += client.end.reason is Finish.DEADLINE and len(client.delivered) > 0
            for what, *rest in self.log:
                seen[f"log {what}"] += 1
                seen["mixed step"] += what == "plan" and {1} < {tokens_count for *_, tokens_count in rest[1:]}

    for seed in range(200):
        simulate(seed, life_class=Witness)
    expected = [*Finish, *Refusal, "log abort", "log lost", "log cancel", "mixed step", "lost twice and completed"]
    expected += ["resumed with output and completed", "late in a deadline's step"]
    assert {situation: seen[situation] for situation in expected if seen[situation] < 5} == {}


def test_a_broken_core_is_reported_with_its_first_seed() -> None:
    """A failure names the oracle and the seed that shows it."""
    leak = next(mutant for mutant in MUTANTS if mutant.name == "the slot leaks at the end")
    report = simulate_many(40, 5, mutated(leak))
    assert report.failures == {"AssertionError: a slot is lost or was made up": (5, 40)}


def test_the_front_end_prints_the_rate(capsys: pytest.CaptureFixture[str]) -> None:
    """tools/sim --seeds N --first S says how many lives it lived, how fast, and how many failed."""
    assert main(["--seeds", "3", "--first", "7"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("3 seeds in ")
    assert " seeds/s): " in out
    assert out.rstrip().endswith("; 0 failures")


def test_the_front_end_tells_one_life(capsys: pytest.CaptureFixture[str]) -> None:
    """tools/sim --seed K --trace tells every plan, and ends with the digest that the seed always has."""
    assert main(["--seed", "3", "--trace"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("plan ") for line in lines) == simulate(3).steps
    assert lines[-1].endswith(simulate(3).digest)


@pytest.mark.parametrize("count", ["0", "-1", "many"])
def test_the_front_end_refuses_to_live_no_life(capsys: pytest.CaptureFixture[str], count: str) -> None:
    """Nothing simulated is no success: exit status 2, and the value."""
    with pytest.raises(SystemExit) as ended:
        main(["--seeds", count])
    assert ended.value.code == 2
    assert f"{count}" in capsys.readouterr().err.splitlines()[-1]


def test_the_front_end_fails_when_the_core_does(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit status 1, and the command that shows the first failure."""
    broken = mutated(next(mutant for mutant in MUTANTS if mutant.name == "one token too many"))
    monkeypatch.setattr("sim.simulate.Core", lambda: broken)
    assert main(["--seeds", "2", "--first", "11"]) == 1
    assert "first: tools/sim --seed 11 --trace" in capsys.readouterr().out


# -- the fake device ---------------------------------------------------------------------------------------------------

LIMITS = Limits(slots=2, capacity=12, step_tokens_max=12, vocab=1 << 20)
REQUEST = Request(RequestId(1), (3, 1, 4, 1, 5), SamplingParams(tokens_max=3))


def sampled_after(device: FakeDevice, *rows: Row) -> int:
    """The first output token of REQUEST after `rows`, the last of which samples."""
    for step, row in enumerate(rows):
        prefixes = device.run(StepPlan(step, (row,)))
    return chosen(prefixes[REQUEST.id], REQUEST.params.seed, 0, LIMITS.vocab)


def row_of(start: int, end: int, slot: int = 0) -> Row:
    return Row(REQUEST.id, slot, start, REQUEST.prompt[start:end], samples=end == len(REQUEST.prompt))


def test_the_device_agrees_with_the_solo_oracle_however_the_prompt_is_cut() -> None:
    """Chunked, whole, and in another slot: the same first token."""
    want = solo(REQUEST, LIMITS.vocab)[0]
    assert sampled_after(FakeDevice(LIMITS), row_of(0, 5)) == want
    assert sampled_after(FakeDevice(LIMITS), row_of(0, 2), row_of(2, 4), row_of(4, 5)) == want
    assert sampled_after(FakeDevice(LIMITS), row_of(0, 5, slot=1)) == want


@pytest.mark.parametrize(
    "rows",
    [
        pytest.param([row_of(0, 2), row_of(3, 5)], id="a position was skipped"),
        pytest.param([row_of(0, 3, slot=1), row_of(3, 5)], id="the prefix is in another slot"),
        pytest.param([row_of(0, 4), Row(RequestId(2), 0, 1, (9,), samples=False), row_of(4, 5)], id="a foreign write"),
        pytest.param([row_of(0, 4), row_of(0, 2), row_of(4, 5)], id="a stale rest behind a rewritten start"),
        pytest.param([row_of(1, 5)], id="nothing at position 0"),
    ],
)
def test_the_device_shows_a_mix_up_as_another_token(rows: list[Row]) -> None:
    """Any wrong content anywhere in the prefix changes what is sampled (chance of a miss: 1 in a million)."""
    assert sampled_after(FakeDevice(LIMITS), *rows) != solo(REQUEST, LIMITS.vocab)[0]


def test_the_device_ruins_what_a_failed_step_was_given_and_nothing_else() -> None:
    """Positions from the row's start on are garbage after a failure; those before it are not."""
    want = solo(REQUEST, LIMITS.vocab)[0]
    device = FakeDevice(LIMITS)
    device.run(StepPlan(1, (row_of(0, 2),)))
    device.wreck(StepPlan(2, (row_of(2, 4),)))
    assert sampled_after(device, row_of(4, 5)) != want
    assert sampled_after(device, row_of(2, 5)) == want


@pytest.mark.parametrize(
    ("rows", "complaint"),
    [
        ((row_of(0, 1), row_of(1, 2)), "two rows write one slot"),
        ((), "the step does not fit"),
        ((Row(RequestId(1), 0, 0, (1,) * 13, samples=True),), "the step does not fit"),
        ((Row(RequestId(1), 2, 0, (1,), samples=True),), "no such slot"),
        ((Row(RequestId(1), 0, 11, (1, 1), samples=True),), "positions outside the slot"),
        ((Row(RequestId(1), 0, 0, (), samples=True), row_of(0, 1, slot=1)), "positions outside the slot"),
    ],
)
def test_the_device_refuses_an_impossible_step(rows: tuple[Row, ...], complaint: str) -> None:
    """What no engine could compute is an error at once, not a wrong token later."""
    with pytest.raises(AssertionError, match=complaint):
        FakeDevice(LIMITS).run(StepPlan(1, rows))
