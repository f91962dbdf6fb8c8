"""Texts to rows: special tokens, pairs, truncation, prompts. On the committed tiny tokenizers."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from residentd.errors import CallerError
from residentd.models.encoder import Encoder
from residentd.text.encoder_text import CHARS_A_TOKEN, CUT_MARGIN_TOKENS, EncoderText, longest_first
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


class Watched:
    """A tokenizer of the library that remembers what it was given."""

    def __init__(self, text: EncoderText) -> None:
        self.texts: list[str] = []
        self._inner, text.tokenizer._sealed = text.tokenizer._sealed, self
        self.encode = self._inner.encode

    def encode_batch(self, texts: list[str], **options: bool) -> Any:
        self.texts += texts
        return self._inner.encode_batch(texts, **options)


@pytest.mark.parametrize("name", ["embed-bert", "embed-roberta", "rerank-bert"])
def test_a_text_is_tokenized_once_however_often_it_is_there(name: str) -> None:
    """A query with every document, or one text again and again: cut for each row as it would be alone."""
    text, watched = text_of(name), text_of(name)
    query, documents = "waiting for the river " * 40, ["you", "the capital of france " * 30, "you", "a"]
    alone = [text.encode([query], [document], truncate=True)[0] for document in documents]
    watch = Watched(watched)
    assert watched.encode([query] * 4, documents, truncate=True) == alone
    assert sorted(watch.texts) == sorted({query, *documents})
    watch.texts.clear()
    assert watched.encode(["you"] * 9) == text.encode(["you"]) * 9
    assert watch.texts == ["you"]


@pytest.mark.parametrize("name", ["embed-bert", "embed-roberta"])
def test_of_what_cannot_fit_little_is_tokenized(name: str) -> None:
    """A text of a megabyte is refused as its beginning would be, with a number that is not the whole truth."""
    text = text_of(name)
    watch = Watched(text)
    with pytest.raises(CallerError, match=r"item 1 has at least [\d,]+ tokens and 2 special ones; .* 64") as caught:
        text.encode(["a", "the river " * 100_000], field="items")
    assert caught.value.field == "items"
    assert max(map(len, watch.texts)) == (62 + CUT_MARGIN_TOKENS) * CHARS_A_TOKEN


def test_a_text_of_nothing_but_blanks_is_read_to_its_end() -> None:
    """Its beginning has too few tokens to say that the rest is not needed."""
    text = text_of("embed-bert")
    watch = Watched(text)
    blank = " " * 5 * (62 + CUT_MARGIN_TOKENS) * CHARS_A_TOKEN
    (found,) = text.encode([blank + "you"])
    assert found == text.encode(["you"])[0]
    tried = [len(text) for text in watch.texts[:3]]
    assert tried == [len(blank) // 5, len(blank) // 5 * 4, len(blank) + 3]


WORDS = ("the", " river", "x", "7", "  ", "capital", "é", "?!", "\n", "aaaa")


@pytest.mark.parametrize("name", ["embed-bert", "embed-roberta", "rerank-bert"])
@given(words=st.lists(st.sampled_from(WORDS), min_size=1, max_size=12), pair=st.sampled_from([None, "you", "a" * 9000]))
def test_a_long_text_keeps_the_tokens_that_it_has_as_a_whole(name: str, words: list[str], pair: str | None) -> None:
    """Though its end is never looked at."""
    text = text_of(name, 24)
    long = "".join(words) * (4000 // len("".join(words)) + 1)
    frame = text.tokenizer.frame if pair is None else text.tokenizer.pair_frame
    first, second = (text.tokenizer.encode(part, specials=False) for part in (long, pair or ""))
    counts, room = (len(first), len(second)), 24 - frame.specials_count
    is_cut = sum(counts) > room
    kept = longest_first(counts, room) if is_cut else counts
    (found,) = text.encode([long], None if pair is None else [pair], truncate=True)
    assert found.row == frame.row(first[: kept[0]], second[: kept[1]])
    assert found.truncated == is_cut


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


@pytest.mark.parametrize("tokens_max", [8, 9, 16])
def test_what_is_kept_of_a_pair_is_what_the_library_keeps(tokens_max: int) -> None:
    """transformers' fast tokenizers leave the cutting to it, and cross-encoders were trained on that."""
    text = text_of("rerank-bert", tokens_max)
    inner = tokenizers.Tokenizer.from_str(text.tokenizer.inner.to_str())
    inner.enable_truncation(tokens_max, strategy="longest_first")
    for first, second in itertools.product(["a " * count for count in range(14)], repeat=2):
        (found,) = text.encode([first], [second], truncate=True)
        whole = inner.encode(first, second)
        assert (list(found.row.ids), list(found.row.types)) == (whole.ids, whole.type_ids)
