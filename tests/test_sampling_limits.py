from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from residentd.errors import CallerError
from residentd.sampling import validate
from residentd.types import SamplingParams

VOCAB = 1000
PARAMS = SamplingParams(tokens_max=8)

GOOD: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.0},
    {"temperature": 100.0},
    {"temperature": 1},
    {"top_k": 0},
    {"top_k": 2**31 - 1},
    {"top_p": 1.0},
    {"top_p": 5e-324},
    {"min_p": 0.0},
    {"min_p": math.nextafter(1.0, 0.0)},
    {"repetition_penalty": 0.1},
    {"repetition_penalty": 0.10000000149011612},  # 0.1 as it comes off the wire, a float32
    {"repetition_penalty": 10.0},
    {"frequency_penalty": -2.0},
    {"frequency_penalty": 2.0},
    {"presence_penalty": -2.0},
    {"presence_penalty": 2.0},
    {"seed": 0},
    {"seed": 2**64 - 1},
    {"tokens_max": 1},
    {"tokens_min": 8},
    {"logprobs": 0},
    {"logprobs": 20},
    {"stop_ids": frozenset({0, VOCAB - 1})},
    {"stop_ids": frozenset(range(64))},
    {"logit_bias": ((0, -100.0), (VOCAB - 1, 100.0))},
    {"logit_bias": tuple((token, 1.0) for token in range(300))},
)

BAD: tuple[tuple[str, Any, str], ...] = (
    ("temperature", -0.1, "-0.1"),
    ("temperature", math.nextafter(100.0, 200.0), "100"),
    ("temperature", math.nan, "nan"),
    ("temperature", math.inf, "inf"),
    ("top_k", -1, "-1"),
    ("top_k", 2**31, "2147483648"),
    ("top_p", 0.0, "0.0"),
    ("top_p", math.nextafter(1.0, 2.0), "1.0000000000000002"),
    ("top_p", math.nan, "nan"),
    ("min_p", -0.5, "-0.5"),
    ("min_p", 1.0, "1.0"),
    ("min_p", math.nan, "nan"),
    ("repetition_penalty", 0.0, "0.0"),
    ("repetition_penalty", math.nextafter(0.1, 0.0), "0.0999"),
    ("repetition_penalty", 10.1, "10.1"),
    ("repetition_penalty", math.inf, "inf"),
    ("repetition_penalty", math.nan, "nan"),
    ("frequency_penalty", -2.1, "-2.1"),
    ("frequency_penalty", 2.1, "2.1"),
    ("frequency_penalty", math.nan, "nan"),
    ("presence_penalty", -2.1, "-2.1"),
    ("presence_penalty", 2.1, "2.1"),
    ("presence_penalty", -math.inf, "-inf"),
    ("seed", -1, "-1"),
    ("seed", 2**64, "18446744073709551616"),
    ("tokens_max", 0, "0"),
    ("tokens_min", -1, "-1"),
    ("tokens_min", 9, "9"),
    ("logprobs", -1, "-1"),
    ("logprobs", 21, "21"),
    ("stop_ids", frozenset({VOCAB}), "1000"),
    ("stop_ids", frozenset({-1}), "-1"),
    ("stop_ids", frozenset(range(65)), "65"),
    ("logit_bias", ((VOCAB, 1.0),), "1000"),
    ("logit_bias", ((-1, 1.0),), "-1"),
    ("logit_bias", ((3, 100.1),), "100.1"),
    ("logit_bias", ((3, -100.1),), "-100.1"),
    ("logit_bias", ((3, math.nan),), "nan"),
    ("logit_bias", ((3, -math.inf),), "-inf"),
    ("logit_bias", ((3, 1.0), (3, 2.0)), "more than once"),
    ("logit_bias", tuple((token, 1.0) for token in range(301)), "301"),
)


@pytest.mark.parametrize("changes", GOOD, ids=str)
def test_every_limit_itself_is_accepted(changes: dict[str, Any]) -> None:
    """A value at its limit passes."""
    validate(replace(PARAMS, **changes), VOCAB)


@pytest.mark.parametrize(("field", "value", "named"), BAD, ids=lambda part: str(part)[:40])
def test_one_past_a_limit_is_the_callers_error(field: str, value: Any, named: str) -> None:
    """A value past its limit, or not a number, is refused with the caller's name of it, the value and the way out."""
    with pytest.raises(CallerError) as caught:
        validate(replace(PARAMS, **{field: value}), VOCAB)
    name = {"tokens_max": "max_tokens", "tokens_min": "min_tokens", "stop_ids": "stop_token_ids"}.get(field, field)
    assert caught.value.field == f"sampling.{name}"
    message = str(caught.value)
    assert message.startswith(f"{name} ")
    assert named in message
    assert message.count(". ") >= 1, "a message says what to do next"
    assert message.endswith(".")


def test_a_token_outside_the_vocabulary_is_refused_with_the_ids_that_exist() -> None:
    """Field case E1: an id past the vocabulary is told apart from the engine's fault, and the range is named."""
    with pytest.raises(CallerError) as caught:
        validate(replace(PARAMS, logit_bias=((49_152, 1.0),)), 49_152)
    assert str(caught.value) == (
        "logit_bias names token 49152; this model's ids are 0 to 49,151. Take the ids from this model's tokenizer."
    )


def test_a_range_reads_as_a_sentence() -> None:
    """Open and closed ends are told apart."""
    with pytest.raises(CallerError) as caught:
        validate(replace(PARAMS, top_p=0.0), VOCAB)
    assert str(caught.value) == "top_p is 0.0; it must be more than 0.0 and at most 1.0. 1 turns it off."
