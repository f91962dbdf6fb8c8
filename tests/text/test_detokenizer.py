from __future__ import annotations

import itertools

import pytest
import text_samples
from hypothesis import example, given
from hypothesis import strategies as st

from residentd.text.detokenizer import PieceDetokenizer, WholeDetokenizer, common_start, leading_blanks
from residentd.text.limits import BYTE_RUN_TOKENS_MAX, WHOLE_DECODE_LAG_TOKENS, WHOLE_DECODE_LOOKS


def streamed(stream, ids, cuts):
    """The text of `ids`, pushed in batches that end at `cuts`."""
    edges = [0, *sorted({cut % (len(ids) + 1) for cut in cuts}), len(ids)]
    parts = [stream.push(ids[start:end]) for start, end in itertools.pairwise(edges)]
    return "".join((*parts, stream.flush()))


@pytest.mark.parametrize("name", text_samples.NAMES)
def test_each_decoder_gets_its_table(name):
    """A known decoder is not left to the slow way, and an unknown one is not trusted to a table."""
    assert text_samples.table(name).kind == text_samples.KINDS[name]


@pytest.mark.parametrize("name", text_samples.NAMES)
def test_deltas_add_up_to_the_whole_decode(name):
    """For any ids (special, unknown and lone bytes among them) and any split, the deltas are the whole decode."""
    tokenizer, table = text_samples.sample(name), text_samples.table(name)
    size = max(tokenizer.inner.get_vocab(with_added_tokens=True).values()) + 3
    lone = [index for index, part in enumerate(table.parts) if isinstance(part, bytes)] or [0]
    marks = [index for index, part in enumerate(table.parts) if isinstance(part, str) and not part.strip()] or [0]
    ids = st.lists(st.integers(0, size) | st.sampled_from(lone) | st.sampled_from(marks), max_size=40)

    @text_samples.PROPERTY
    @given(ids, st.lists(st.integers(0, 1000), max_size=20))
    def check(ids, cuts):
        assert streamed(table.start(), ids, cuts) == tokenizer.decode(ids)
        assert streamed(table.start(), ids, range(len(ids))) == tokenizer.decode(ids)

    check()


@pytest.mark.parametrize("name", text_samples.NAMES)
def test_encoded_text_streams_back(name):
    """Text, cut anywhere between its tokens and in the middle of its characters, comes back as the whole decode."""
    tokenizer, table = text_samples.sample(name), text_samples.table(name)

    @text_samples.PROPERTY
    @given(st.text(max_size=30), st.lists(st.integers(0, 1000), max_size=20))
    @example("  two  spaces 😀\n\n你好 ▁ \u00a0", [1, 2, 3, 5, 8, 9, 10, 11, 12])
    def check(text, cuts):
        ids = tokenizer.encode(text, specials=False)
        assert streamed(table.start(), ids, cuts) == tokenizer.decode(ids)

    check()


@text_samples.PROPERTY
@given(st.lists(st.sampled_from(b"A\x80\xbf\xc2\xe0\xa0\xed\x9f\xf0\x90\xf4\x8f\xf5\xff\xe4\xbd\xc0\xe1"), max_size=12))
def test_invalid_utf8_reads_as_in_the_whole_decode(data):
    """Byte by byte, ill-formed sequences give as many U+FFFD as the tokenizer's own decode, for both byte kinds."""
    byte_level, llama = text_samples.table("byte_level"), text_samples.table("llama2")
    by_byte = {
        part if isinstance(part, bytes) else part.encode(): index for index, part in enumerate(byte_level.parts) if part
    }
    for table, ids in (
        (byte_level, [by_byte[bytes([byte])] for byte in data]),
        (llama, [len(text_samples.SPECIALS) + byte for byte in data]),
    ):
        assert streamed(table.start(), ids, range(len(ids))) == table.tokenizer.decode(ids)


@pytest.mark.parametrize("export", text_samples.EXPORT_NAMES)
def test_decodes_as_transformers_recorded(export, tmp_path):
    """Every recorded decode of the export fixtures comes out, a token at a time."""
    model = text_samples.TextModel.load(text_samples.export_text(export, tmp_path), tmp_path)
    for golden in text_samples.goldens(export)["decode"]:
        assert streamed(model.table.start(), golden["ids"], range(len(golden["ids"]))) == golden["text"]
    assert model.table.kind in {"bytes", "pieces"}


@pytest.mark.parametrize("name", ["byte_level", "llama2", "unigram"])
def test_known_decoders_hold_back_only_what_may_change(name):
    """All but an incomplete character, or the byte run at the end, leaves at once."""
    tokenizer, table = text_samples.sample(name), text_samples.table(name)
    ids = tokenizer.encode("the town was the town", specials=False)
    stream = table.start()
    for count in range(1, len(ids)):
        so_far = stream.push(ids[count - 1 : count])
        if tokenizer.decode(ids[:count]) and not isinstance(table.parts[ids[count - 1]], bytes):
            assert stream.pending() == ""
            assert so_far or count == 1


def test_pending_is_what_a_flush_would_add():
    """`pending` names the whole characters held back, leading blank removed, and changes nothing."""
    tokenizer, table = text_samples.sample("llama2"), text_samples.table("llama2")
    byte_ids = [len(text_samples.SPECIALS) + byte for byte in " é".encode()]
    stream = table.start()
    assert stream.push(byte_ids) == ""
    assert (stream.pending(), stream.pending()) == ("é", "é")
    assert stream.flush() == "é" == tokenizer.decode(byte_ids)
    stream = table.start()
    stream.push(byte_ids[:-1])
    assert stream.pending() == ""
    assert stream.flush() == "\ufffd" * 2 == tokenizer.decode(byte_ids[:-1])


@text_samples.PROPERTY
@given(st.integers(0, 3), st.lists(st.sampled_from(" abc"), max_size=8), st.lists(st.integers(0, 99), max_size=4))
def test_leading_blanks_are_stripped_once(count, chars, cuts):
    """Up to as many blanks as the decoder says, at the start only, whether text or byte tokens write them."""
    parts = (" ", "a", b" ", b"a")
    ids = [{" ": 0, "a": 1, "b": 2, "c": 3}[char] for char in chars]
    text = "".join(" " if index in {0, 2} else "a" for index in ids)
    stream = PieceDetokenizer(parts, leading_blanks=count, first=None)
    assert streamed(stream, ids, cuts) == text[min(count, leading_blanks(text)) :]


@pytest.mark.parametrize("extra", [0, 1])
def test_a_long_byte_run_streams(extra):
    """A run of BYTE_RUN_TOKENS_MAX byte tokens is held back whole; one token more lets its characters go."""
    parts = tuple(bytes([byte]) for byte in range(256))
    stream = PieceDetokenizer(parts, leading_blanks=0, first=None)
    data = ("é" * BYTE_RUN_TOKENS_MAX).encode()[: BYTE_RUN_TOKENS_MAX + extra]
    out = stream.push(list(data))
    assert out == ("é" * (BYTE_RUN_TOKENS_MAX // 2) if extra else "")
    assert out + stream.flush() == ("é" * (BYTE_RUN_TOKENS_MAX // 2) + ("\ufffd" if extra else ""))


def test_a_long_byte_run_that_is_no_text_is_let_go():
    """Past the limit a run that can no longer become text is one U+FFFD a byte, and memory stays bounded."""
    parts = tuple(bytes([byte]) for byte in range(256))
    stream = PieceDetokenizer(parts, leading_blanks=0, first=None)
    data = b"\xff" * (10 * BYTE_RUN_TOKENS_MAX)
    out = "".join(stream.push([byte]) for byte in data)
    assert len(stream._run) <= BYTE_RUN_TOKENS_MAX
    assert out + stream.flush() == "\ufffd" * len(data)


def test_unknown_decoders_lag_by_a_named_number_of_tokens():
    """The slow way still streams: what is older than WHOLE_DECODE_LAG_TOKENS has left."""
    tokenizer, table = text_samples.sample("wordpiece"), text_samples.table("wordpiece")
    ids = tokenizer.encode("the town was " * 20, specials=False)
    stream = table.start()
    out = stream.push(ids)
    assert out == tokenizer.decode(ids[:-WHOLE_DECODE_LAG_TOKENS])
    assert out + stream.pending() == tokenizer.decode(ids)


@pytest.mark.parametrize(
    ("left", "right", "start"),
    [("", "", ""), ("ab", "abc", "ab"), ("abd", "abc", "ab"), ("abc", "ab", "ab"), ("x", "y", "")],
)
def test_common_start(left, right, start):
    """The longest text that both begin with, also when one is the other's beginning."""
    assert common_start(left, right) == start


@pytest.mark.parametrize(("text", "blanks"), [("", 0), ("a ", 0), ("  a", 2), ("   ", 3), ("\u00a0", 0), ("\n ", 0)])
def test_leading_blanks(text, blanks):
    """Only U+0020 is a blank."""
    assert leading_blanks(text) == blanks


def test_unknown_decoders_do_not_decode_each_token_anew():
    """A stream of 4,000 tokens decodes a bounded number of times, adds up, and is never far behind."""
    counts = []

    def decode(ids):
        counts.append(len(ids))
        return "x" * len(ids)

    stream = WholeDetokenizer(decode)
    out = 0
    for index in range(4000):
        out += len(stream.push([index]))
        assert index + 1 - out <= WHOLE_DECODE_LAG_TOKENS + (index + 1) // WHOLE_DECODE_LOOKS + 1
    assert out + len(stream.flush()) == 4000
    assert len(counts) <= 2 * 8 * WHOLE_DECODE_LOOKS
