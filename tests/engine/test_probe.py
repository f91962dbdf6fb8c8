"""The replay of goldens, on the toy model: every token counted once, whatever the slots, chunks and batches."""

from __future__ import annotations

import itertools

import msgspec
import pytest

from residentd.backend.reference import ReferenceBackend, ReferenceModel, continuation
from residentd.backend.replay import AT_ONCE, Cut, replay
from residentd.engine.probe import longest_golden, probe
from residentd.engine.worker import CHECK_SLOTS_MAX, _small
from residentd.models.checks import STATISTICS, STATISTICS_RMS, TOKENS
from residentd.models.manifest import Content, EngineLimits, Golden, Tolerance
from residentd.models.statistics import statistics_of
from residentd.types import Limits, StepPlan
from support.manifests import plain_manifest

VOCAB = 300
MODEL = ReferenceModel(peaks=(16.0, 12.0, 8.0))
PROMPTS = ((1,), (7, 8, 9), tuple(range(40)), (250, 3), tuple(range(100, 117)))
OUTPUT_TOKENS = 6
GOLDENS = tuple(Golden(prompt=prompt, output=continuation(prompt, OUTPUT_TOKENS, MODEL, VOCAB)) for prompt in PROMPTS)
CUTS = (AT_ONCE, Cut(rows_max=1), Cut(rows_max=2, chunk_tokens=3), Cut(chunk_tokens=1))


def backend(model: ReferenceModel = MODEL, *, slots: int = 4, step_tokens_max: int = 16) -> ReferenceBackend:
    return ReferenceBackend(model, Limits(slots, capacity=64, step_tokens_max=step_tokens_max, vocab=VOCAB))


def content(goldens: tuple[Golden, ...] = GOLDENS, *, bound: float | None = None, precision: str = "fp32") -> Content:
    plain = plain_manifest({}).content
    return msgspec.structs.replace(
        plain,
        goldens=goldens,
        engine=msgspec.structs.replace(plain.engine, precision=precision),
        tolerance=None if bound is None else Tolerance(bound=bound, spread=0.0),
    )


def recorded() -> tuple[Golden, ...]:
    found: list[list[object]] = [[] for _ in GOLDENS]
    for place, answer in enumerate(replay(backend(), GOLDENS)):
        found[answer.golden].append(statistics_of(answer.logits, place))
    return tuple(
        msgspec.structs.replace(golden, statistics=tuple(entries))
        for golden, entries in zip(GOLDENS, found, strict=True)
    )


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize(("slots", "step_tokens_max"), [(1, 2), (2, 3), (4, 16), (16, 512)])
def test_every_position_is_answered_once(slots: int, step_tokens_max: int, cut: Cut) -> None:
    """Each output token of each golden, with the logits that follow its own history and nobody else's."""
    seen = []
    for answer in replay(backend(slots=slots, step_tokens_max=step_tokens_max), GOLDENS, cut):
        assert answer.logits.argmax() == GOLDENS[answer.golden].output[answer.output]
        seen.append((answer.golden, answer.output))
    assert sorted(seen) == list(itertools.product(range(len(PROMPTS)), range(OUTPUT_TOKENS)))


def test_cuts_are_kept() -> None:
    """No step has more rows, or more tokens of one golden, than the cut says, nor more tokens than the engine takes."""
    plans: list[StepPlan] = []
    limits = Limits(slots=8, capacity=64, step_tokens_max=16, vocab=VOCAB)
    watched = ReferenceBackend(MODEL, limits, fault=plans.append)
    for _ in replay(watched, GOLDENS, Cut(rows_max=3, chunk_tokens=7)):
        pass
    assert max(len(plan.rows) for plan in plans) == 3
    assert max(len(row.tokens) for plan in plans for row in plan.rows) == 7
    assert max(plan.tokens_count for plan in plans) <= 16


def test_the_engine_that_was_recorded_passes() -> None:
    """Tokens and statistics, each counted at every position."""
    tokens, statistics = probe(backend(), content(recorded(), bound=1e-3))
    assert (tokens.name, tokens.checked, tokens.missed) == (TOKENS, 30, 0)
    assert (statistics.name, statistics.checked, statistics.missed) == (STATISTICS, 30, 0)
    assert statistics.worst < 1e-5  # the seventh digit of 16
    assert statistics.bound == 1e-3
    assert "golden 1, token 1" in statistics.detail


def test_lower_peaks_are_seen_though_every_token_is_right() -> None:
    """The engine chooses as it did, less surely: the statistics tell, with the size and the place."""
    model = ReferenceModel(peaks=(15.5, 12.0, 8.0))
    tokens, statistics = probe(backend(model), content(recorded(), bound=1e-3))
    assert tokens.passed
    assert tokens.missed == 0
    assert not statistics.passed
    assert statistics.missed == 30
    assert statistics.worst == pytest.approx(0.5, abs=0.01)
    assert statistics.detail.startswith(("largest logit", "logit of token"))


@pytest.mark.parametrize(("bound", "passed"), [(0.49, False), (0.51, True)])
def test_the_bound_decides(bound: float, *, passed: bool) -> None:
    """A difference of 0.5 is past 0.49 and within 0.51."""
    model = ReferenceModel(peaks=(15.5, 12.0, 8.0))
    _, statistics = probe(backend(model), content(recorded(), bound=bound))
    assert statistics.passed is passed


def test_another_engine_is_seen_by_its_tokens() -> None:
    """A wrong token counts once: the golden's own output is fed on. The first one is named."""
    other = ReferenceModel(seed=5, peaks=MODEL.peaks)
    (tokens,) = probe(backend(other), content())
    wrong = continuation(PROMPTS[0], 1, other, VOCAB)[0]
    assert tokens.missed > 25
    assert tokens.detail == f"first: golden 1, token 1 is {wrong} instead of {GOLDENS[0].output[0]}"


def test_tokens_that_the_bound_may_turn_are_not_counted() -> None:
    """With a bound of half the gap or more, the choice between the best two says nothing."""
    tokens, statistics = probe(backend(), content(recorded(), bound=2.0))
    assert tokens.checked == 0
    assert statistics.checked == 30


@pytest.mark.parametrize(("allowed", "passed"), [(29, False), (30, True)])
def test_a_quantised_build_may_miss_as_many_tokens_as_rounding_turned(allowed: int, *, passed: bool) -> None:
    """All tokens count, clear or not; the root mean square stands beside the worst."""
    swapped = ReferenceModel(peaks=(12.0, 16.0, 8.0))
    tolerance = Tolerance(bound=20.0, spread=5.0, bound_rms=3.9, tokens_missed_max=allowed)
    made = msgspec.structs.replace(content(recorded(), precision="int8"), tolerance=tolerance)
    tokens, worst, rms = probe(backend(swapped), made)
    assert (tokens.checked, tokens.missed, tokens.passed) == (30, 30, passed)
    assert worst.passed
    assert (rms.name, rms.passed, rms.missed) == (STATISTICS_RMS, False, 30)
    assert rms.worst == pytest.approx(4.0, abs=0.01)


def test_without_goldens_one_step_runs() -> None:
    """READY is never said of an engine that has not computed."""
    plans: list[StepPlan] = []
    watched = ReferenceBackend(MODEL, Limits(4, 64, 16, VOCAB), fault=plans.append)
    assert probe(watched, content(())) == ()
    assert len(plans) == 1


def test_the_longest_golden_says_what_a_slot_must_hold() -> None:
    """A worker that only checks is given no more context than that, and it is enough."""
    longest = longest_golden(GOLDENS)
    assert longest == 46
    small = ReferenceBackend(MODEL, Limits(slots=2, capacity=longest, step_tokens_max=16, vocab=VOCAB))
    assert all(part.passed for part in probe(small, content()))
    assert longest_golden(()) == 1


def test_a_worker_that_only_checks_takes_little_memory() -> None:
    """As many slots and positions as the goldens need, of an engine that serves far more; never more than it has."""
    manifest = plain_manifest({})

    def limits(slots: int, context: int) -> EngineLimits:
        engine = msgspec.structs.replace(
            manifest.content.engine,
            limits=EngineLimits(slots=slots, context=context, step_tokens_max=512, vocab=VOCAB),
        )
        made = msgspec.structs.replace(content(), engine=engine)
        return _small(msgspec.structs.replace(manifest, content=made)).content.engine.limits

    large, small = limits(256, 131_072), limits(2, 46)
    assert (large.slots, large.context, large.step_tokens_max) == (CHECK_SLOTS_MAX, 46, 512)
    assert (small.slots, small.context) == (2, 46)
