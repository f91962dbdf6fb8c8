"""The sampler as the step loop sees it: rows, requests, history, resumption, refusal."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import sampling_reference as reference
from residentd.errors import BackendLostError, CallerError
from residentd.sampling import Sampler
from residentd.sampling.adjustments import Adjustments
from residentd.sampling.philox import uniform
from residentd.sampling.row import MASS_ERROR, RowBuffer
from residentd.types import Request, RequestId, Sampled, SamplingParams

Row = npt.NDArray[np.float32]

GREEDY = SamplingParams(tokens_max=100)
EVERYTHING = SamplingParams(
    tokens_max=100,
    tokens_min=4,
    temperature=0.9,
    top_k=900,
    top_p=0.97,
    min_p=0.001,
    repetition_penalty=1.2,
    frequency_penalty=0.3,
    presence_penalty=0.2,
    logit_bias=((3, 2.5), (4, -100.0)),
    seed=7,
    stop_ids=frozenset({1, 2}),
    logprobs=3,
)
KINDS = {
    "greedy": GREEDY,
    "penalties": replace(GREEDY, repetition_penalty=1.3, frequency_penalty=0.5),
    "tokens_min": replace(GREEDY, tokens_min=50, stop_ids=frozenset({0, 5})),
    "logprobs": replace(GREEDY, logprobs=5),
    "unfiltered": replace(GREEDY, temperature=1.0, seed=1),
    "top_k": replace(GREEDY, temperature=0.7, top_k=40, seed=2),
    "top_p": replace(GREEDY, temperature=0.8, top_p=0.95, seed=3, logprobs=2),
    "min_p": replace(GREEDY, temperature=1.1, min_p=0.02, seed=2**64 - 1),
    "everything": EVERYTHING,
}


def request(
    number: int, params: SamplingParams, prompt: tuple[int, ...] = (1, 2, 3), generated: tuple[int, ...] = ()
) -> Request:
    return Request(id=RequestId(number), prompt=prompt, params=params, generated=generated)


def sampler_of(vocab: int, requests: Sequence[Request]) -> Sampler:
    sampler = Sampler(vocab)
    for one in requests:
        sampler.add(one)
    return sampler


def sample_alone(vocab: int, one: Request, row: Row) -> Sampled:
    return sampler_of(vocab, [one]).sample([one.id], row[np.newaxis, :])[0]


def random_rows(seed: int, rows: int, vocab: int, scale: float = 3.0) -> Row:
    return (np.random.default_rng(seed).standard_normal((rows, vocab)) * scale).astype(np.float32)


def placed(rows: Row, offset: int, gap: int) -> Row:
    """The same rows `offset` floats past an allocation's start, `gap` floats apart."""
    count, vocab = rows.shape
    store = np.full(offset + count * (vocab + gap), 1e30, dtype=np.float32)
    view = store[offset:].reshape(count, vocab + gap)[:, :vocab]
    view[:] = rows
    return view


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    kinds=st.lists(st.sampled_from(sorted(KINDS)), min_size=1, max_size=9),
    vocab=st.sampled_from([901, 1024, 5003, 9000]),
    scale=st.sampled_from([0.1, 3.0, 30.0]),
    offset=st.integers(0, 17),
    gap=st.integers(0, 3),
)
def test_a_row_is_the_same_bits_alone_and_in_any_batch(
    *, seed: int, kinds: list[str], vocab: int, scale: float, offset: int, gap: int
) -> None:
    """Token and logprobs depend on the row alone: not on neighbours, place, stride or alignment (field case F6)."""
    rows = random_rows(seed, len(kinds), vocab, scale)
    requests = [request(number, KINDS[kind], generated=(number,)) for number, kind in enumerate(kinds)]
    batch = sampler_of(vocab, requests).sample([one.id for one in requests], placed(rows, offset, gap))
    assert batch == [sample_alone(vocab, one, row) for one, row in zip(requests, rows, strict=True)]
    backwards = sampler_of(vocab, requests).sample([one.id for one in reversed(requests)], rows[::-1])
    assert backwards == batch[::-1]


def test_a_row_is_the_same_bits_at_full_size() -> None:
    """The same over a 49,152 vocabulary, every kind of request in one batch of 27."""
    rows = random_rows(11, 27, 49_152)
    requests = [request(number, KINDS[sorted(KINDS)[number % 9]]) for number in range(27)]
    batch = sampler_of(49_152, requests).sample([one.id for one in requests], placed(rows, 3, 1))
    assert batch == [sample_alone(49_152, one, row) for one, row in zip(requests, rows, strict=True)]


def test_equal_rows_get_equal_logprobs_and_different_rows_their_own() -> None:
    """Field case F6: the alternatives of one position never show up at another."""
    rows = random_rows(3, 4, 700)
    rows[3] = rows[0]
    requests = [request(number, replace(GREEDY, logprobs=20)) for number in range(4)]
    results = sampler_of(700, requests).sample([one.id for one in requests], rows)
    assert results[0] == results[3]
    assert len({result.logprobs for result in results}) == 3


def test_the_logits_are_only_read() -> None:
    """No kind of request changes the backend's memory."""
    rows = random_rows(4, len(KINDS), 2000)
    before = rows.tobytes()
    rows.flags.writeable = False
    requests = [request(number, params) for number, params in enumerate(KINDS.values())]
    sampler_of(2000, requests).sample([one.id for one in requests], rows)
    assert rows.tobytes() == before


VALUES = st.one_of(st.integers(-6, 6).map(lambda quarter: quarter / 4), st.floats(-40, 40, width=32))
VOCAB = 12
TOKENS = st.integers(0, VOCAB - 1)


@st.composite
def any_params(draw_from: st.DrawFn) -> SamplingParams:
    penalty = st.one_of(st.just(0.0), st.floats(-2, 2))
    return SamplingParams(
        tokens_max=100,
        tokens_min=draw_from(st.integers(0, 6)),
        temperature=draw_from(st.sampled_from([0.0, 0.0, 0.3, 1.0, 2.0])),
        top_k=draw_from(st.integers(0, 14)),
        top_p=draw_from(st.one_of(st.just(1.0), st.floats(0.01, 1.0))),
        min_p=draw_from(st.one_of(st.just(0.0), st.floats(0.0, 0.9))),
        repetition_penalty=draw_from(st.one_of(st.just(1.0), st.floats(0.1, 5.0))),
        frequency_penalty=draw_from(penalty),
        presence_penalty=draw_from(penalty),
        logit_bias=tuple(draw_from(st.dictionaries(TOKENS, st.floats(-100, 100), max_size=4)).items()),
        seed=draw_from(st.integers(0, 2**64 - 1)),
        stop_ids=draw_from(st.frozensets(TOKENS, max_size=3)),
        logprobs=draw_from(st.one_of(st.none(), st.integers(0, 15))),
    )


@settings(max_examples=400, deadline=None)
@given(
    params=any_params(),
    prompt=st.lists(TOKENS, max_size=8).map(tuple),
    rows=st.lists(st.lists(VALUES, min_size=VOCAB, max_size=VOCAB), min_size=1, max_size=6),
    resume_at=st.integers(0, 5),
)
def test_a_whole_answer_is_what_the_definition_says(
    params: SamplingParams, prompt: tuple[int, ...], rows: list[list[float]], resume_at: int
) -> None:
    """Step by step, token and logprobs agree with the naive reference, also when the answer is resumed half way."""
    sampler = Sampler(VOCAB, row=RowBuffer(VOCAB, groups=5, sample_stride=2))
    sampler.add(request(1, params, prompt))
    generated: list[int] = []
    for step, row in enumerate(rows):
        if step == resume_at:
            sampler = sampler_of(VOCAB, [request(1, params, prompt, tuple(generated))])
        logits = np.array([row], dtype=np.float32)
        (sampled,) = sampler.sample([RequestId(1)], logits)
        assert sampled.token in expected_tokens(logits[0].tolist(), params, prompt, generated)
        check_logprobs(sampled, logits[0].tolist(), params.logprobs)
        sampler.commit(RequestId(1), sampled.token)
        generated.append(sampled.token)


def expected_tokens(
    logits: list[float], params: SamplingParams, prompt: tuple[int, ...], generated: list[int]
) -> set[int]:
    adjusted = reference.adjusted(logits, params, prompt, generated)
    if params.temperature == 0.0:
        return {adjusted.index(max(adjusted))}
    return reference.acceptable(adjusted, params, uniform(params.seed, len(generated)))


def check_logprobs(sampled: Sampled, logits: list[float], count: int | None) -> None:
    """Against float64, of the logits as the engine gave them. ln(1 + MASS_ERROR) is the only error."""
    assert (sampled.logprobs is None) == (count is None)
    if sampled.logprobs is None or count is None:
        return
    assert sampled.logprobs.chosen == pytest.approx(reference.logprob(logits, sampled.token), abs=MASS_ERROR)
    order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    assert [token for token, _ in sampled.logprobs.top] == order[:count]
    for token, value in sampled.logprobs.top:
        assert value == pytest.approx(reference.logprob(logits, token), abs=MASS_ERROR)


@settings(deadline=None)
@given(
    params=any_params(),
    prompt=st.lists(TOKENS, max_size=8).map(tuple),
    generated=st.lists(TOKENS, max_size=30),
    row=st.lists(VALUES, min_size=VOCAB, max_size=VOCAB),
)
def test_adjusted_logits_are_the_definition_bit_for_bit(
    params: SamplingParams, prompt: tuple[int, ...], generated: list[int], row: list[float]
) -> None:
    """Bias, then repetition, then frequency and presence, then the mask, in float32; counted at once or one by one."""
    expected = np.array(reference.adjusted(row, params, prompt, generated), dtype=np.float32)
    at_once = Adjustments(params, prompt, tuple(generated))
    one_by_one = Adjustments(params, prompt, ())
    for token in generated:
        one_by_one.record(token)
    for adjustments in (at_once, one_by_one):
        logits = np.array(row, dtype=np.float32)
        adjustments.apply(logits)
        assert logits.tobytes() == expected.tobytes()
        assert adjustments.active or expected.tobytes() == np.array(row, dtype=np.float32).tobytes()


def test_a_long_history_keeps_every_token() -> None:
    """Past the first capacity of 64 distinct tokens, and over a long prompt, each token is still penalised."""
    params = replace(GREEDY, repetition_penalty=2.0, presence_penalty=1.0)
    generated = tuple(range(0, 1000, 3))
    prompt = tuple(range(0, 1000, 5))
    row = [float(1 + token % 7) for token in range(1000)]
    logits = np.array(row, dtype=np.float32)
    Adjustments(params, prompt, generated).apply(logits)
    assert logits.tolist() == reference.adjusted(row, params, prompt, generated)


def test_greedy_takes_the_first_of_equals() -> None:
    """The smallest id among the largest logits, +0 and -0 being equal, fast path or not."""
    rows = np.zeros((3, 5000), dtype=np.float32)
    rows[0, [4100, 4101, 70]] = 2.0
    rows[1] = -1.0
    rows[1, 4000], rows[1, 17], rows[1, 18] = 0.0, -0.0, 0.0
    for params in (GREEDY, replace(GREEDY, logprobs=0), replace(GREEDY, presence_penalty=1e-30)):
        requests = [request(number, params, generated=(9,)) for number in range(3)]
        sampled = sampler_of(5000, requests).sample([one.id for one in requests], rows)
        assert [one.token for one in sampled] == [70, 17, 0]


@pytest.mark.parametrize(
    ("changes", "token"),
    [
        ({}, 0),
        ({"logit_bias": ((1, 2.0),)}, 1),
        ({"repetition_penalty": 2.0}, 2),
        ({"frequency_penalty": 0.4}, 1),
        ({"presence_penalty": 1.5}, 1),
        ({"tokens_min": 5, "stop_ids": frozenset({0})}, 1),
        ({"tokens_min": 3, "stop_ids": frozenset({0})}, 0),
        ({"temperature": 100.0, "seed": 5}, 3),
    ],
    ids=str,
)
def test_each_parameter_alone_moves_the_choice(changes: dict[str, Any], token: int) -> None:
    """Logits 4, 3, 2.5, 2 after prompt 1 and output 0, 0, 0: greedy is 0, and each parameter alone tells."""
    row = np.array([4.0, 3.0, 2.5, 2.0], dtype=np.float32)
    assert sample_alone(4, request(1, replace(GREEDY, **changes), (1,), (0, 0, 0)), row).token == token


def test_temperatures_next_to_nothing_are_greedy() -> None:
    """Below 1e-5 no draw is made: the first of equals, whatever the seed."""
    row = np.array([[0.0, 3.0, 3.0]], dtype=np.float32)
    for seed in range(20):
        assert sample_alone(3, request(1, replace(GREEDY, temperature=9e-6, seed=seed)), row[0]).token == 1
    drawn = {
        sample_alone(3, request(1, replace(GREEDY, temperature=1e-5, seed=seed)), row[0]).token for seed in range(20)
    }
    assert drawn == {1, 2}


def test_stop_ids_wait_for_tokens_min() -> None:
    """With tokens_min 2 the favourite stop id is chosen third, and not before."""
    params = replace(GREEDY, tokens_min=2, stop_ids=frozenset({3}))
    sampler = sampler_of(5, [request(1, params)])
    row = np.array([[0, 2, 1, 9, 0]], dtype=np.float32)
    tokens = []
    for _ in range(3):
        tokens.append(sampler.sample([RequestId(1)], row)[0].token)
        sampler.commit(RequestId(1), tokens[-1])
    assert tokens == [1, 1, 3]


def test_a_step_that_is_not_committed_leaves_no_trace() -> None:
    """Sampling again without a commit gives the same token; what was sampled in an aborted step is never penalised."""
    rows = random_rows(8, 1, 500)
    sampler = sampler_of(500, [request(1, EVERYTHING)])
    first = sampler.sample([RequestId(1)], rows)
    assert [sampler.sample([RequestId(1)], rows) for _ in range(3)] == [first] * 3
    sampler.commit(RequestId(1), 42)  # not what was sampled: only what is committed counts
    assert sampler.sample([RequestId(1)], rows) == [sample_alone(500, request(1, EVERYTHING, generated=(42,)), rows[0])]


def answer(params: SamplingParams, rows: Row, generated: tuple[int, ...] = ()) -> list[int]:
    sampler = sampler_of(rows.shape[1], [request(1, params, generated=generated)])
    tokens = list(generated)
    for row in rows[len(generated) :]:
        tokens.append(sampler.sample([RequestId(1)], row[np.newaxis, :])[0].token)
        sampler.commit(RequestId(1), tokens[-1])
    return tokens


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_resumed_answer_goes_on_as_if_nothing_had_happened(kind: str) -> None:
    """A worker lost after any number of tokens: the next one's tokens are those of the undisturbed answer."""
    rows = random_rows(21, 12, 3000)
    whole = answer(KINDS[kind], rows)
    for done in range(len(whole)):
        assert answer(KINDS[kind], rows, tuple(whole[:done])) == whole


def test_another_process_draws_the_same_tokens() -> None:
    """Same seed, same rows: a new process with its own memory layout and hash seed gives the same answer."""
    rows = random_rows(31, 6, 3000)
    script = (
        "import json, sys; import numpy as np; from residentd.sampling import Sampler; from residentd.types import *\n"
        "rows = (np.random.default_rng(31).standard_normal((6, 3000)) * 3.0).astype(np.float32)\n"
        "sampler = Sampler(3000); tokens = []\n"
        "sampler.add(Request(1, (1, 2, 3), SamplingParams(tokens_max=100, temperature=0.8, top_p=0.95, seed=3)))\n"
        "for row in rows:\n"
        "    tokens.append(sampler.sample([1], row[None, :])[0].token)\n"
        "    sampler.commit(1, tokens[-1])\n"
        "print(json.dumps(tokens))\n"
    )
    result = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert json.loads(result.stdout) == answer(replace(KINDS["top_p"], logprobs=None), rows)


def test_different_seeds_give_different_answers_and_seed_0_is_a_seed() -> None:
    """The seed alone decides among likely tokens."""
    rows = random_rows(41, 20, 300, scale=0.5)
    answers = {tuple(answer(replace(KINDS["unfiltered"], seed=seed), rows)) for seed in range(10)}
    assert len(answers) == 10


@pytest.mark.parametrize("kind", sorted(KINDS))
@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("place", [0, 5, 15, 16, 1999, 4999])
def test_a_poisoned_row_is_refused_by_name(kind: str, poison: float, place: int) -> None:
    """NaN and +inf anywhere are the engine's fault: nothing is sampled, and the request is named. Neighbours are sound.

    Places 0 and 5 are masked by tokens_min in one of the kinds: the mask must not hide them.
    """
    rows = random_rows(51, 3, 5000)
    requests = [request(700 + number, KINDS[kind]) for number in range(3)]
    sampler = sampler_of(5000, requests)
    ids = [one.id for one in requests]
    sampler.sample(ids, rows)
    rows[1, place] = poison
    with pytest.raises(BackendLostError, match=r"request 701\b.*finite"):
        sampler.sample(ids, rows)
    sampler.add(request(703, KINDS["unfiltered"]))  # a batch of several kinds takes another path
    with pytest.raises(BackendLostError, match=r"request 701\b.*finite"):
        sampler.sample([*ids, RequestId(703)], rows[[0, 1, 2, 0]])


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_row_without_any_possible_token_is_refused(kind: str) -> None:
    """All -inf from the engine leaves nothing to choose: refused. One finite logit is enough."""
    row = np.full((1, 5000), -np.inf, dtype=np.float32)
    sampler = sampler_of(5000, [request(5, KINDS[kind])])
    with pytest.raises(BackendLostError, match=r"request 5\b"):
        sampler.sample([RequestId(5)], row)
    row[0, 4321] = -7.0
    assert sampler.sample([RequestId(5)], row)[0].token == 4321


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_where_the_caller_masks_everything_the_mask_is_ignored(temperature: float) -> None:
    """tokens_min over a vocabulary of stop ids leaves nothing: that token is chosen as if nothing had been asked."""
    params = SamplingParams(
        tokens_max=9, tokens_min=9, temperature=temperature, logit_bias=((0, 50.0),), stop_ids=frozenset(range(3))
    )
    row = np.array([1.0, 30.0, 2.0], dtype=np.float32)
    assert sample_alone(3, request(1, params), row).token == 1


def test_a_bias_of_minus_100_on_every_token_changes_nothing() -> None:
    """The worst that logit_bias may ask for moves all logits alike."""
    params = replace(GREEDY, logit_bias=tuple((token, -100.0) for token in range(8)))
    row = np.array([1, 5, 2, 4, 0, 0, 0, 3], dtype=np.float32)
    assert sample_alone(8, request(1, params), row).token == 1


def test_logprobs_describe_the_model_and_not_the_request() -> None:
    """Temperature, bias, penalties and masks move the choice and leave the logprobs alone; -inf is no alternative."""
    row = np.array([4.0, 3.0, -np.inf, 1.0, 2.0], dtype=np.float32)
    params = replace(EVERYTHING, top_k=1, logit_bias=((1, 90.0),), logprobs=20, stop_ids=frozenset({0}))
    sampled = sample_alone(5, request(1, params, prompt=(0, 1)), row)
    assert sampled.token == 1
    assert sampled.logprobs is not None
    assert [token for token, _ in sampled.logprobs.top] == [0, 1, 4, 3]
    for token, value in sampled.logprobs.top:
        assert value == pytest.approx(reference.logprob(row.tolist(), token), abs=MASS_ERROR)
    assert sampled.logprobs.chosen == dict(sampled.logprobs.top)[1]


def test_extreme_logits_overflow_nothing() -> None:
    """Logits at both ends of float32, with every kind of request, warn of nothing and choose the largest."""
    row = np.full((1, 1000), -3.4e38, dtype=np.float32)
    row[0, 77] = 3.4e38
    for params in KINDS.values():
        with np.errstate(all="raise", under="ignore"):
            assert sample_alone(1000, request(1, params, prompt=()), row[0]).token == 77


def test_parameters_out_of_range_are_refused_before_anything_is_kept() -> None:
    """Field case E1: an id outside the vocabulary is the caller's error, and the sampler goes on as before."""
    sampler = sampler_of(100, [request(1, GREEDY)])
    with pytest.raises(CallerError) as caught:
        sampler.add(request(2, replace(GREEDY, logit_bias=((100, 1.0),))))
    assert caught.value.field == "sampling.logit_bias"
    sampler.add(request(2, GREEDY))
    assert len(sampler.sample([RequestId(1), RequestId(2)], random_rows(1, 2, 100))) == 2


def test_requests_come_and_go_without_touching_each_other() -> None:
    """Removing one request, or one that never came, leaves the others' next tokens as they were."""
    rows = random_rows(61, 3, 800)
    requests = [request(number, replace(EVERYTHING, seed=number)) for number in range(3)]
    expected = [sample_alone(800, one, row) for one, row in zip(requests, rows, strict=True)]
    sampler = sampler_of(800, requests)
    sampler.commit(RequestId(1), 5)
    sampler.remove(RequestId(1))
    sampler.remove(RequestId(99))
    assert sampler.sample([RequestId(2), RequestId(0)], rows[[2, 0]]) == [expected[2], expected[0]]
    with pytest.raises(KeyError):
        sampler.sample([RequestId(1)], rows[:1])


def test_no_rows_are_no_tokens() -> None:
    """A step of nothing but prefill chunks samples nothing."""
    assert Sampler(50).sample([], np.empty((0, 50), dtype=np.float32)) == []
