"""Texts to rows: special tokens, pairs, truncation, prompts. On the committed tiny tokenizers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from residentd.errors import CallerError
from residentd.models.encoder import Encoder
from residentd.text.encoder_text import EncoderText, longest_first
from residentd.text.tokenizer import Tokenizer

FIXTURES = Path(__file__).resolve().parent.parent / "fixtures" / "encoders"


def encoder(**changes: object) -> Encoder:
    values = {
        "inputs": ("input_ids", "attention_mask"),
        "output": "logits",
        "width": 1,
        "tolerance": 0.0,
        "goldens": (),
        "texts": (),
    }
    return Encoder(**(values | changes))  # type: ignore[arg-type]


def text_of(name: str, tokens_max: int = 64, **changes: object) -> EncoderText:
    return EncoderText(Tokenizer((FIXTURES / name / "tokenizer.json").read_bytes()), encoder(**changes), tokens_max)


@pytest.mark.parametrize("name", ["embed-bert", "embed-roberta", "classify-distilbert", "rerank-bert"])
def test_ids_are_those_of_transformers(name: str) -> None:
    """Every golden text and pair, truncation included."""
    tokens_max = {"embed-bert": 48, "embed-roberta": 48}.get(name, 64)
    text = text_of(name, tokens_max)
    for golden in json.loads((FIXTURES / name / "goldens.json").read_text()):
        pairs = None if golden["pair"] is None else [golden["pair"]]
        (found,) = text.encode([golden["text"]], pairs, truncate=True)
        assert list(found.row.ids) == golden["ids"]


def test_the_second_text_of_a_pair_is_marked() -> None:
    """Token types are 0 up to the first separator and 1 after it; a lone text has none."""
    text = text_of("rerank-bert")
    (pair,) = text.encode(["you"], ["the river"])
    ends = [place for place, token in enumerate(pair.row.ids) if token == pair.row.ids[-1]]
    assert pair.row.types == (0,) * (ends[0] + 1) + (1,) * (ends[1] - ends[0])
    assert text.encode(["you"])[0].row.types == ()


def test_control_tokens_of_a_text_are_text() -> None:
    """[SEP] in a text becomes no separator: only the template writes those."""
    text = text_of("rerank-bert")
    (row,) = text.encode(["a [SEP] b [CLS] [PAD]"])
    special = set(text.tokenizer.control_ids.values()) - {text.tokenizer.control_ids["[UNK]"]}
    assert [token for token in row.row.ids if token in special] == [row.row.ids[0], row.row.ids[-1]]


def test_what_does_not_fit_is_refused_or_cut_and_said() -> None:
    """At the limit it fits; one token more is refused with the numbers, or cut and marked."""
    text = text_of("embed-bert", tokens_max=8)
    (fits,) = text.encode(["a a a a a a"])
    assert (len(fits.row.ids), fits.truncated) == (8, False)
    with pytest.raises(CallerError, match="text 1 has 7 tokens and 2 special ones; the model accepts 8") as caught:
        text.encode(["a", "a a a a a a a"])
    assert caught.value.field == "texts"
    (cut,) = text.encode(["a a a a a a a"], truncate=True)
    assert (cut.row, cut.truncated) == (fits.row, True)


def test_prompts_are_the_models_own() -> None:
    """By name, by default, and none; an unknown one is refused with those that there are."""
    text = text_of("embed-bert", prompts={"query": "q: ", "document": ""}, prompt_default="query")
    assert (text.prompt("query"), text.prompt("document"), text.prompt("")) == ("q: ", "", "q: ")
    assert text_of("embed-bert").prompt("") == ""
    with pytest.raises(CallerError, match="it has: document, query"):
        text.prompt("passage")
    assert text.encode(["a"], prompt="you ") == text.encode(["you a"])


def test_lowercase_is_before_the_tokenizer() -> None:
    """With byte-level BPE the case would stay."""
    lowered, plain = (text_of("embed-roberta", lowercase=lowercase) for lowercase in (True, False))
    assert lowered.encode(["PARIS"]) == plain.encode(["paris"]) != plain.encode(["PARIS"])


def test_half_a_surrogate_is_the_callers_mistake() -> None:
    """It is no text; nothing else breaks over it."""
    with pytest.raises(CallerError, match="surrogate"):
        text_of("embed-bert").encode(["ok", "\ud800"])


def test_a_changed_tokenizer_is_seen() -> None:
    """The goldens of one tokenizer are not those of another."""
    text = text_of("rerank-bert")
    goldens = text.record([("What is the capital?", None), ("you", "the river")])
    assert [part.missed for part in text_of("rerank-bert", texts=goldens).check()] == [0]
    (part,) = text_of("embed-roberta", texts=goldens).check()
    assert part.missed == 2
    assert not part.passed


@given(st.integers(0, 200), st.integers(0, 200), st.integers(1, 150))
def test_the_longer_text_gives_first(first: int, second: int, room: int) -> None:
    """What is kept fills the room; neither text is cut while it is the shorter, and no more than one token apart."""
    if first + second < room:
        return
    kept = longest_first((first, second), room)
    assert sum(kept) == room
    assert 0 <= kept[0] <= first
    assert 0 <= kept[1] <= second
    for mine, whole, other in ((kept[0], first, kept[1]), (kept[1], second, kept[0])):
        assert mine == whole or mine >= other - 1
