"""A text that cannot fit is refused before it is tokenized, and only such a text is."""

from __future__ import annotations

import json
import unicodedata
from fractions import Fraction

import pytest
import text_samples
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Inner

from residentd.errors import CallerError
from residentd.text.fit import SHRINKS
from residentd.text.model import TextModel
from residentd.text.tokenizer import Tokenizer
from residentd.types import ChatMessage

BOUNDED = ("byte_level", "whole_words", "llama2", "normalized", "metaspace", "gemma")


def loaded(inner: Inner) -> Tokenizer:
    return Tokenizer(inner.to_str().encode())


def with_nfc() -> Tokenizer:
    inner = text_samples.byte_level()
    inner.normalizer = normalizers.NFC()
    inner.add_tokens([AddedToken("e\u0301 e\u0301", normalized=True)])
    return loaded(inner)


@pytest.mark.parametrize("name", text_samples.NAMES)
def test_which_tokenizers_have_a_bound(name: str) -> None:
    """Those that keep every byte and know every byte; none where text is dropped, folded or unknown as a whole."""
    assert (text_samples.sample(name).bytes_per_token_max is not None) is (name in BOUNDED)


@pytest.mark.parametrize("name", [*BOUNDED, "nfc"])
def test_no_text_has_fewer_tokens(name: str) -> None:
    """Whatever is encoded, as text or with its control tokens read, has at least tokens_min tokens."""
    tokenizer = with_nfc() if name == "nfc" else text_samples.sample(name)
    pieces = st.sampled_from(
        [*tokenizer.control_ids, "   ", "\n\n", "lighthouse", "\u03b9\u0308\u0301", "▁", "e\u0301"]
    )

    @text_samples.PROPERTY
    @given(st.lists(pieces | st.text(max_size=6), max_size=12).map("".join))
    @example("")
    @example("\u03b9\u0308\u0301" * 40)
    @example("<|endoftext|>" * 40)
    @example("▁e\u0301 e\u0301" * 9)
    def check(text: str) -> None:
        least = tokenizer.tokens_min(len(text.encode()))
        for specials in (False, True):
            assert len(tokenizer.encode(text, specials=specials)) >= least

    check()


def test_the_bound_is_the_longest_token() -> None:
    """Exact where nothing is normalised: a text of the longest token alone meets it."""
    tokenizer = text_samples.sample("byte_level")
    longest = max((token for token in tokenizer.inner.get_vocab()), key=len)
    assert tokenizer.bytes_per_token_max == len(longest)
    assert tokenizer.tokens_min(len(longest)) == 1
    assert tokenizer.tokens_min(len(longest) + 1) == 2


def test_how_much_nfc_shrinks() -> None:
    """No character of Unicode was made of more than SHRINKS["NFC"] times its bytes."""
    characters = [chr(code) for code in range(0x110000) if not 0xD800 <= code < 0xE000]
    share: dict[str, Fraction] = {}  # the most bytes that a character of a decomposition can have been written with
    for char in characters:
        parts = unicodedata.normalize("NFD", char)
        for part in parts:
            share[part] = max(share.get(part, Fraction(0)), Fraction(len(char.encode()), len(parts)))
    worst = max(
        sum(share[part] for part in unicodedata.normalize("NFD", char)) / len(char.encode()) for char in characters
    )
    assert SHRINKS["NFC"] - 1 < worst <= SHRINKS["NFC"]


@pytest.mark.parametrize(
    ("part", "step"),
    [
        ("normalizer", normalizers.Strip()),
        ("normalizer", normalizers.NFKC()),
        ("normalizer", normalizers.Replace("aa", "a")),
        ("normalizer", normalizers.Replace(Regex("a"), "aa")),
        ("normalizer", normalizers.Sequence([normalizers.NFC(), normalizers.Sequence([normalizers.Nmt()])])),
        ("pre_tokenizer", pre_tokenizers.Split(" ", "removed")),
        ("pre_tokenizer", pre_tokenizers.Whitespace()),
        ("pre_tokenizer", pre_tokenizers.Sequence([pre_tokenizers.ByteLevel(), pre_tokenizers.WhitespaceSplit()])),
    ],
)
def test_a_step_that_drops_text_leaves_no_bound(part: str, step: object) -> None:
    """Then nothing is refused early."""
    inner = text_samples.byte_level()
    setattr(inner, part, step)
    tokenizer = loaded(inner)
    assert tokenizer.bytes_per_token_max is None
    assert tokenizer.tokens_min(1 << 30) == 1


@pytest.mark.parametrize("change", [{"byte_fallback": False}, {"end_of_word_suffix": "</w>"}])
def test_unknown_text_leaves_no_bound(change: dict[str, object]) -> None:
    """A model that lacks a byte makes one token of any amount of unknown text."""
    description = json.loads(text_samples.sentencepiece(style="gemma").to_str())
    description["model"] |= change
    assert Tokenizer(json.dumps(description).encode()).bytes_per_token_max is None


def test_what_cannot_fit_is_refused_untokenized(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt, or a conversation, one byte past what the context can hold; at that size it is tokenized."""
    model = text_samples.text_model("byte_level")
    longest = model.tokenizer.bytes_per_token_max
    assert longest is not None
    text = "\u00e9" * (5 * longest)

    def refused(text: str, context: int, field: str) -> None:
        with monkeypatch.context() as patched:
            patched.setattr("residentd.text.tokenizer.encoded", None)
            with pytest.raises(CallerError, match=rf"{10 * longest:,} bytes.*at least 10 tokens.*9 tokens") as caught:
                ids_of(model, text, context, field)
            assert caught.value.field == field

    for field in ("prompt", "messages"):
        refused(text, 9, field)
        assert len(ids_of(model, text, 10, field)) > 10
        assert ids_of(model, text, 10, field) == ids_of(model, text, None, field)


def ids_of(model: TextModel, text: str, tokens_max: int | None, field: str) -> tuple[int, ...]:
    if field == "prompt":
        return model.from_completion(text, tokens_max=tokens_max)
    return model.from_chat([ChatMessage("user", text)], tokens_max=tokens_max)
