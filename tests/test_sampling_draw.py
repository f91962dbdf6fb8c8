"""One row: which tokens are kept, which is drawn, and that shortcuts never show."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import sampling_reference as reference
from residentd.sampling.adjustments import Adjustments
from residentd.sampling.draw import draw
from residentd.sampling.philox import uniform
from residentd.sampling.row import MASS_ERROR, Prefix, RowBuffer
from residentd.types import SamplingParams

GOLDENS = json.loads((Path(__file__).parent / "fixtures/sampling_goldens.json").read_text())

Row = npt.NDArray[np.float32]
UNIFORMS = st.floats(2.0**-53, 1.0 - 2.0**-53)
LOGITS = st.one_of(
    st.integers(-6, 6).map(lambda quarter: quarter / 4),  # equals are frequent
    st.floats(-40, 40, width=32),
    st.sampled_from([-math.inf, 0.0, -0.0, 3e38, -3e38]),
)
ROWS = st.lists(LOGITS, min_size=1, max_size=40).filter(lambda row: max(row) > -math.inf)


@st.composite
def drawing_params(draw_from: st.DrawFn) -> SamplingParams:
    """Temperature above 0, and each filter on about half of the time."""
    return SamplingParams(
        tokens_max=1,
        temperature=draw_from(st.one_of(st.sampled_from([0.5, 1.0, 100.0, 1e-5]), st.floats(0.05, 5.0))),
        top_k=draw_from(st.one_of(st.just(0), st.integers(1, 45))),
        top_p=draw_from(st.one_of(st.just(1.0), st.floats(1e-6, 1.0, exclude_max=True), st.sampled_from([0.25, 0.5]))),
        min_p=draw_from(st.one_of(st.just(0.0), st.floats(1e-9, 1.0, exclude_max=True), st.just(5e-324))),
    )


class WholeRow(RowBuffer):
    """The same row without any shortcut: every prefix is the whole row."""

    def prefixes_but(self, tail: float, temperature: float) -> Iterator[Prefix]:
        del tail, temperature
        yield self._whole()

    def prefix_from(self, threshold: float) -> Prefix:
        del threshold
        return self._whole()


def loaded(row: RowBuffer, logits: Row) -> RowBuffer:
    row.load(logits)
    return row


@pytest.fixture(autouse=True)
def _overflow_is_no_news() -> Iterator[None]:
    """As in Sampler.sample: a difference past float32's range is -inf, and weighs 0."""
    with np.errstate(over="ignore"):
        yield


@settings(max_examples=600, deadline=None)
@given(ROWS, drawing_params(), UNIFORMS, st.integers(1, 8), st.integers(1, 4))
def test_the_token_is_the_one_that_the_definition_names(
    logits: list[float], params: SamplingParams, number: float, groups: int, stride: int
) -> None:
    """Every combination of temperature, top_k, top_p and min_p draws what the naive reference draws."""
    values = np.array(logits, dtype=np.float32)
    row = loaded(RowBuffer(len(logits), groups=groups, sample_stride=stride), values)
    assert draw(row, params, number) in reference.acceptable(values.tolist(), params, number)


@settings(max_examples=300, deadline=None)
@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from([300, 4096, 5003, 9001]),
    st.sampled_from([0.05, 0.5, 4.0, 60.0]),
    drawing_params(),
    UNIFORMS,
)
def test_how_many_tokens_were_looked_at_never_shows(
    seed: int, vocab: int, scale: float, params: SamplingParams, number: float
) -> None:
    """A draw from a prefix is the draw from the whole sorted row, for peaked rows and for flat ones."""
    logits = (np.random.default_rng(seed).standard_normal(vocab) * scale).astype(np.float32)
    for precision in (logits, np.round(logits)):
        short = draw(loaded(RowBuffer(vocab), precision), params, number)
        assert short == draw(loaded(WholeRow(vocab), precision), params, number)


def count_prefixes(row: RowBuffer, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The lengths of the prefixes that `row` makes from now on."""
    lengths: list[int] = []
    ranked: Callable[..., Prefix] = row._ranked

    def counted(ids: npt.NDArray[np.int64], logits: Row) -> Prefix:
        lengths.append(len(ids))
        return ranked(ids, logits)

    monkeypatch.setattr(row, "_ranked", counted)
    return lengths


def test_a_sample_that_misleads_costs_a_second_look_and_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the sampled tokens are unlike the rest, longer prefixes are taken, and at last the whole row."""
    logits = np.linspace(0.0, 4.0, 4096, dtype=np.float32)
    logits[::32] = 9.0  # the sample holds these and nothing else: it sees no tail
    row = loaded(RowBuffer(4096), logits)
    lengths = count_prefixes(row, monkeypatch)
    params = SamplingParams(tokens_max=1, temperature=1.0, top_p=0.999)
    token = draw(row, params, 1.0 - 2.0**-53)
    assert lengths == [128, 128, 4096]
    assert token == draw(loaded(WholeRow(4096), logits), params, 1.0 - 2.0**-53)


def test_a_peaked_row_is_decided_by_few_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Proof by counts that a usual row sorts a small part of a 49,152 vocabulary, once."""
    logits = (np.random.default_rng(5).standard_normal(49_152) * 2).astype(np.float32)
    logits[7_000:7_020] += 14.0
    row = loaded(RowBuffer(49_152), logits)
    lengths = count_prefixes(row, monkeypatch)
    for params in (
        SamplingParams(tokens_max=1, temperature=0.8, top_p=0.95),
        SamplingParams(tokens_max=1, temperature=0.8, min_p=0.05),
        SamplingParams(tokens_max=1, temperature=0.8, top_k=50),
        SamplingParams(tokens_max=1, temperature=0.8),
    ):
        draw(row, params, 0.5)
    assert len(lengths) == 4
    assert max(lengths) < 1_000


@pytest.mark.parametrize("index", range(len(GOLDENS["cases"])))
def test_what_transformers_keeps_is_kept_with_its_probability(index: int) -> None:
    """Goldens of transformers' logits processors: bias, repetition, minimum length, temperature, top_k, top_p, min_p.

    The middle of each kept token's part of (0, 1) draws that token, and so do both ends up to 2e-6. Parts below 1e-5
    are passed over: transformers works in float32. Among equals its sort has no order, so logits are compared, not ids.
    """
    case: dict[str, Any] = GOLDENS["cases"][index]
    params = SamplingParams(
        tokens_max=100,
        tokens_min=case["tokens_min"],
        temperature=case["temperature"],
        top_k=case["top_k"],
        top_p=case["top_p"],
        min_p=case["min_p"],
        repetition_penalty=case["repetition_penalty"],
        logit_bias=tuple((token, bias) for token, bias in case["logit_bias"]),
        stop_ids=frozenset(GOLDENS["stop_ids"]),
    )
    row = loaded(RowBuffer(len(case["logits"]), groups=4, sample_stride=2), np.array(case["logits"], dtype=np.float32))
    row.adjust(Adjustments(params, tuple(case["prompt"]), tuple(case["generated"])).apply)
    kept = sorted(((float(row.logits[int(token)]), share) for token, share in case["kept"].items()), reverse=True)
    start = 0.0
    for logit, share in kept:
        numbers = (start + 2e-6, start + share / 2, start + share - 2e-6) if share > 1e-5 else ()
        for number in numbers:
            assert float(row.logits[draw(row, params, number)]) == logit
        start += share


def test_a_number_on_the_line_between_two_tokens_draws_the_second() -> None:
    """The first token whose running share exceeds the number, so 0.5 of two equals is the second."""
    for make in (RowBuffer, WholeRow):
        row = loaded(make(2), np.zeros(2, dtype=np.float32))
        for min_p, top_p in ((0.0, 1.0), (0.5, 1.0), (0.0, 0.9)):
            params = SamplingParams(tokens_max=1, temperature=1.0, min_p=min_p, top_p=top_p)
            numbers = (0.25, math.nextafter(0.5, 0.0), 0.5, 0.75)
            assert [draw(row, params, number) for number in numbers] == [0, 0, 1, 1]


@pytest.mark.parametrize("temperature", [0.3, 0.9, 1.7])
def test_a_token_exactly_as_likely_as_min_p_asks_stays(temperature: float) -> None:
    """Less than min_p times the likeliest is dropped, as much is kept; the next float64 above drops it."""
    row = loaded(RowBuffer(300), np.full(300, -50.0, dtype=np.float32))
    row.adjust(lambda logits: logits.__setitem__(slice(0, 2), (21.25, 20.0)))
    least = float(np.exp(np.float64(-1.25) / temperature))
    for min_p, last in ((least, 1), (math.nextafter(least, 1.0), 0)):
        params = SamplingParams(tokens_max=1, temperature=temperature, min_p=min_p)
        assert draw(row, params, 1.0 - 2.0**-53) == last


def test_top_k_one_below_the_vocabulary_drops_the_last() -> None:
    """top_k 2 of 3 never draws the third, top_k 3 and more are no limit."""
    row = loaded(RowBuffer(3), np.array([0.2, 0.0, 0.1], dtype=np.float32))
    for top_k, last in ((1, 0), (2, 2), (3, 1), (4, 1)):
        params = SamplingParams(tokens_max=1, temperature=100.0, top_k=top_k)
        assert draw(row, params, 1.0 - 2.0**-53) == last


def test_equals_of_the_last_top_k_token_stay() -> None:
    """top_k 2 of logits 3, 1, 1, 1, 0 keeps four tokens, equals in id order."""
    row = loaded(RowBuffer(5), np.array([1, 0, 1, 3, 1], dtype=np.float32))
    params = SamplingParams(tokens_max=1, temperature=100.0, top_k=2)  # nearly even shares
    assert [draw(row, params, number) for number in (0.1, 0.4, 0.6, 0.9)] == [3, 0, 2, 4]


def test_the_token_that_crosses_top_p_stays_and_the_smaller_id_goes_first() -> None:
    """Four equal tokens and top_p 0.5 or a little less keep ids 0 and 1, a little more keeps 2 as well."""
    row = loaded(RowBuffer(4), np.zeros(4, dtype=np.float32))
    for top_p, last in ((0.49, 1), (0.5, 1), (0.51, 2), (0.2, 0), (1e-9, 0)):
        params = SamplingParams(tokens_max=1, temperature=1.0, top_p=top_p)
        assert draw(row, params, 1.0 - 2.0**-53) == last


def test_min_p_does_not_move_the_nucleus() -> None:
    """transformers' order: top_p is judged before min_p. vLLM's order would keep two tokens here, and this keeps one.

    Shares 0.5, 0.26 and 24 of 0.01; top_p 0.6 keeps two tokens, min_p 0.4 keeps both of those; with min_p first the
    same two are all there is, and 0.5 of 0.76 already passes 0.6.
    """
    shares = np.array([0.5, 0.26, *[0.01] * 24])
    row = loaded(RowBuffer(26), np.log(shares).astype(np.float32))
    params = SamplingParams(tokens_max=1, temperature=1.0, top_p=0.6, min_p=0.4)
    assert draw(row, params, 0.99) == 1


def test_no_impossible_token_is_ever_drawn() -> None:
    """Weight 0, by -inf or by underflow, is never drawn, not even at the ends of (0, 1)."""
    logits = np.array([-np.inf, 5.0, -2000.0, 5.0, -np.inf, -2000.0], dtype=np.float32)
    for changes in ({}, {"top_k": 4}, {"top_k": 6}, {"top_p": math.nextafter(1.0, 0.0)}, {"min_p": 5e-324}):
        for make in (RowBuffer, WholeRow):
            row = loaded(make(6), logits)
            params = SamplingParams(tokens_max=1, temperature=1.0, **changes)
            assert {draw(row, params, number) for number in (2.0**-53, 0.3, 0.7, 1.0 - 2.0**-53)} == {1, 3}


def test_rounding_at_the_far_end_draws_the_last_possible_token() -> None:
    """Where the float32 mass is a little more than the float64 sums, the last number is the last token with weight.

    Of 60 rows with a masked half, some must be of that sort: checked, so that the test cannot pass by luck.
    """
    params = SamplingParams(tokens_max=1, temperature=1.0)
    beyond = 0
    for seed in range(60):
        logits = np.random.default_rng(seed).standard_normal(300).astype(np.float32)
        logits[::2] = -np.inf
        row = loaded(WholeRow(300), logits)
        sums = np.exp(np.sort(-logits[1::2].astype(np.float64)) * -1.0 - row.peak).cumsum()
        beyond += (1.0 - 2.0**-53) * row.weigh(1.0) > sums[-1]
        assert draw(row, params, 1.0 - 2.0**-53) == int(np.where(np.isinf(logits), np.inf, logits).argmin())
    assert beyond > 5


CRITICAL_19 = 51.1
"""Chi-square with 19 degrees of freedom passes it with probability 9e-5, with fewer more rarely; fixed draws."""


def chi_square(tokens: list[int], shares: npt.NDArray[np.float64]) -> float:
    counts = np.bincount(tokens, minlength=len(shares))
    assert not counts[shares == 0.0].any(), "a token that was filtered out was drawn"
    expected = shares[shares > 0] * len(tokens)
    return float((((counts[shares > 0] - expected) ** 2) / expected).sum())


@pytest.mark.parametrize("vary", ["seed", "position"])
@pytest.mark.parametrize(
    "changes", [{}, {"top_k": 12}, {"top_p": 0.9}, {"min_p": 0.05}, {"top_k": 12, "top_p": 0.8, "min_p": 0.05}], ids=str
)
def test_draws_follow_the_filtered_softmax(vary: str, changes: dict[str, Any]) -> None:
    """20,000 draws fit the reference's shares, over seeds and over positions; and do not fit slightly wrong ones."""
    logits = np.random.default_rng(1).standard_normal(20).astype(np.float32)
    params = SamplingParams(tokens_max=1, temperature=0.9, **changes)
    row = loaded(RowBuffer(20, groups=4, sample_stride=2), logits)
    numbers = (uniform(index, 3) if vary == "seed" else uniform(99, index) for index in range(20_000))
    tokens = [draw(row, params, number) for number in numbers]
    shares = shares_of(logits, params)
    assert chi_square(tokens, shares) < CRITICAL_19
    wrong = shares**0.6
    assert chi_square(tokens, wrong / wrong.sum()) > CRITICAL_19


def shares_of(logits: Row, params: SamplingParams) -> npt.NDArray[np.float64]:
    shares = np.zeros(len(logits))
    for one in reference.filtered(logits.tolist(), params):
        shares[one.token] = one.weight
    normalised: npt.NDArray[np.float64] = shares / shares.sum()
    return normalised


@settings(max_examples=200, deadline=None)
@given(ROWS, st.floats(0.05, 5.0))
def test_the_mass_keeps_its_stated_error(logits: list[float], temperature: float) -> None:
    """weigh() is the float64 sum within MASS_ERROR, whatever the range of the logits."""
    values = np.array(logits, dtype=np.float32)
    row = loaded(RowBuffer(len(logits), groups=4), values)
    peak = float(values.max())
    exact = math.fsum(math.exp((logit - peak) / temperature) for logit in values.tolist())
    assert row.weigh(temperature) == pytest.approx(exact, rel=MASS_ERROR, abs=0)


@pytest.mark.parametrize("scale", [0.01, 1.0, 4.0, 20.0])
@pytest.mark.parametrize("vocab", [49_152, 262_144])
def test_the_mass_keeps_its_stated_error_over_a_large_vocabulary(vocab: int, scale: float) -> None:
    """The same, where the roundings of a quarter of a million terms add up."""
    logits = (np.random.default_rng(2).standard_normal(vocab) * scale).astype(np.float32)
    row = loaded(RowBuffer(vocab), logits)
    exact = math.fsum(np.exp(logits.astype(np.float64) - row.peak).tolist())
    assert row.weigh(1.0) == pytest.approx(exact, rel=MASS_ERROR, abs=0)


@settings(deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 700), st.integers(0, 15))
def test_numpy_gives_a_row_the_same_bits_wherever_it_lies(seed: int, length: int, offset: int) -> None:
    """What rows and restarts rely on: exp, sums and running sums depend on neither alignment nor what comes after."""
    values = -np.abs(np.random.default_rng(seed).standard_normal(length) * 10)
    for dtype in (np.float32, np.float64):
        here = values.astype(dtype)
        there = np.empty(length + 16, dtype=dtype)[offset : offset + length]
        there[:] = here
        assert np.exp(here).tobytes() == np.exp(there).tobytes()
        assert np.add.reduce(here).tobytes() == np.add.reduce(there).tobytes()
        cut = max(1, length // 2)
        assert np.exp(here[:cut]).tobytes() == np.exp(there)[:cut].tobytes()
        assert here[:cut].cumsum().tobytes() == there.cumsum()[:cut].tobytes()


@settings(deadline=None)
@given(ROWS, st.integers(0, 45), st.integers(1, 8))
def test_top_is_the_head_of_the_sorted_row(logits: list[float], count: int, groups: int) -> None:
    """The likeliest, best first, equals by id; more than exist are not invented, and impossible ones are left out."""
    values = np.array(logits, dtype=np.float32)
    row = loaded(RowBuffer(len(logits), groups=groups), values)
    order = sorted(range(len(logits)), key=lambda token: (-values[token], token))
    expected = [(token, float(values[token])) for token in order[:count] if values[token] > -np.inf]
    assert row.top(count) == expected


@settings(deadline=None)
@given(ROWS, st.integers(1, 40), st.integers(1, 8))
def test_a_prefix_misses_no_token_that_is_as_likely_as_one_it_has(logits: list[float], count: int, groups: int) -> None:
    """A prefix holds as many as asked, is closed under equals, and token_at walks it in order."""
    values = np.array(logits, dtype=np.float32)
    prefix = loaded(RowBuffer(len(logits), groups=groups), values).prefix(count)
    order = sorted(range(len(logits)), key=lambda token: (-values[token], token))
    length = len(prefix.ids)
    assert length >= min(count, len(logits))
    assert [prefix.token_at(index) for index in range(length)] == order[:length]
    assert length == len(logits) or values[order[length]] < values[order[length - 1]]
    assert prefix.complete == (length == len(logits))
