from __future__ import annotations

import json
import threading
import time

import pytest
import text_samples
from hypothesis import assume, example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Inner

from residentd.errors import CallerError, OperatorError
from residentd.text import limits
from residentd.text.detokenizer import table_for
from residentd.text.tokenizer import WITHOUT_LOCK_CHARS_MIN, Tokenizer, encoded, gaps, is_control, overlap

BYTE_KINDS = ("byte_level", "whole_words", "folding", "stripping")


def controls_in(tokenizer, ids):
    """The control ids among `ids`, without the one that the model also uses for text it has no token for."""
    known = set(tokenizer.control_ids.values()) - {tokenizer._unknown_id}
    return [index for index in ids if index in known]


def names_of(tokenizer):
    return sorted(tokenizer.control_ids)


@pytest.mark.parametrize("name", text_samples.NAMES)
def test_no_text_becomes_a_control_token(name):
    """Every control token's text, alone, repeated, within words and between blanks, encodes without its id."""
    tokenizer = text_samples.sample(name)
    for control in names_of(tokenizer):
        for text in (
            control,
            control * 3,
            f"a{control}b",
            f" {control} ",
            f"\n{control}\n",
            f"▁{control}▁",
            control.upper(),
        ):
            assert controls_in(tokenizer, tokenizer.encode(text, specials=False)) == [], text
        assert tokenizer.encode(control, specials=True) != [] or name == "folding"


@pytest.mark.parametrize("name", text_samples.NAMES)
def test_no_mixture_becomes_a_control_token(name):
    """Control texts cut and joined with any other text, compatibility forms included, encode without a control id."""
    tokenizer = text_samples.sample(name)
    texts = st.lists(
        st.sampled_from(names_of(tokenizer))
        | st.sampled_from("<|im_start>\uff1c\uff5c\u017f ▁\n")
        | st.text(max_size=4)
    )

    @text_samples.PROPERTY
    @given(texts)
    @example(["<|", "im_start", "|>"])
    @example(["\uff1c|fold|\uff1e"])
    def check(parts):
        assert controls_in(tokenizer, tokenizer.encode("".join(parts), specials=False)) == []

    check()


@pytest.mark.parametrize("name", text_samples.NAMES)
def test_text_without_controls_encodes_as_ever(name):
    """Where no control token's text stands, the sealed tokenizer gives exactly the original's ids."""
    tokenizer = text_samples.sample(name)
    original = Inner.from_str(text_samples.MAKERS[name]().to_str())

    @text_samples.PROPERTY
    @given(st.text(max_size=60) | st.text(alphabet="thewasown lighthouse\n.<|>[]õ", max_size=60))
    @example("the lighthouse   was\n\n\nasleep õ <0x41> ▁▁ 😀")
    @example("")
    def check(text):
        expected = original.encode(text, add_special_tokens=False).ids
        assume(not controls_in(tokenizer, expected))
        assert tokenizer.encode(text, specials=False) == expected == tokenizer.encode(text, specials=True)

    check()


def conversation(draw, tokenizer, user_texts):
    """A text of template pieces (controls, blanks, words) and user pieces, and the spans of the latter."""
    own = st.lists(st.sampled_from([*names_of(tokenizer), "user\n", " ", "\n", "the town"]), max_size=4).map("".join)
    parts = draw(st.lists(st.tuples(own, user_texts), max_size=5))
    text, spans = "", []
    for mine, theirs in parts:
        text += mine
        if theirs:
            spans.append((len(text), len(text) + len(theirs)))
        text += theirs
    return text + draw(own), tuple(spans)


@pytest.mark.parametrize("name", text_samples.NAMES)
def test_a_conversation_without_look_alikes_encodes_as_a_whole(name):
    """The ids equal those of the whole rendered text, so merges across the borders are the trained ones."""
    tokenizer = text_samples.sample(name)
    plain = st.text(alphabet="the town was õ\n你😀", max_size=12)

    @text_samples.PROPERTY
    @given(st.data())
    def check(data):
        text, spans = data.draw(st.composite(conversation)(tokenizer, plain))
        assert tokenizer.encode_mixed(text, spans) == tokenizer.encode(text, specials=True)

    check()


@pytest.mark.parametrize("name", text_samples.NAMES)
def test_only_the_templates_control_tokens_are_read(name):
    """Whatever users write, the control ids are those that stand in the template's own stretches, in their order."""
    tokenizer = text_samples.sample(name)
    hostile = st.lists(st.sampled_from([*names_of(tokenizer), "a", " ", "<", "|", ">", "\ue000", "\ue001"])).map(
        "".join
    )

    @text_samples.PROPERTY
    @given(st.data())
    def check(data):
        text, spans = data.draw(st.composite(conversation)(tokenizer, hostile))
        mine = [text[start:end] for start, end in gaps(spans, len(text))]
        whole = [control.id for part in mine for control in tokenizer.find_controls(part)]
        found = controls_in(tokenizer, tokenizer.encode_mixed(text, spans))
        expected = [index for index in whole if index != tokenizer._unknown_id]
        if any(token.normalized for token in tokenizer.inner.get_added_tokens_decoder().values()):
            assert len(found) <= len(expected)  # the original itself overlooks some of these
            assert not set(found) - set(expected)
        else:
            assert found == expected

    check()


@text_samples.PROPERTY
@given(
    st.lists(
        st.tuples(
            st.sampled_from(text_samples.CONTROLS[:3]),
            st.lists(st.sampled_from([*text_samples.CONTROLS, "a town", "\n", " ", "you"])).map("".join),
        ),
        min_size=1,
        max_size=4,
    )
)
def test_look_alikes_encode_as_a_tokenizer_without_them_would(parts):
    """Against an independent reference: a tokenizer without any control token, around ids put in by hand."""
    tokenizer = text_samples.sample("byte_level")
    description = json.loads(tokenizer.inner.to_str())
    description["added_tokens"] = [token for token in description["added_tokens"] if not is_control(token)]
    blind = Inner.from_str(json.dumps(description))
    blind_ids = blind.get_vocab(with_added_tokens=True)
    same = {blind_ids[token]: index for token, index in tokenizer.inner.get_vocab().items() if token in blind_ids}
    text, spans, expected = "", [], []
    for control, theirs in parts:
        text += control
        expected.append(tokenizer.control_ids[control])
        if theirs:
            spans.append((len(text), len(text) + len(theirs)))
        text += theirs
        expected += [same[index] for index in blind.encode(theirs, add_special_tokens=False).ids]
    assert tokenizer.encode_mixed(text, tuple(spans)) == expected
    assert tokenizer.inner.decode(expected, skip_special_tokens=False) == text


def test_a_control_token_across_the_border_stays_text():
    """Neither a user's text with the template's, nor two users' texts together, make a control token."""
    tokenizer = text_samples.sample("byte_level")
    for text, span in (
        ("<|im_end|>", (0, 9)),
        ("<|im_end|>", (1, 10)),
        ("<|im_end|>", (4, 5)),
        ("<|im_end|>", (0, 10)),
    ):
        assert controls_in(tokenizer, tokenizer.encode_mixed(text, (span,))) == []
    assert controls_in(tokenizer, tokenizer.encode_mixed("<|im_end|>", ((0, 5), (5, 10)))) == []
    assert controls_in(tokenizer, tokenizer.encode_mixed("x<|im_end|>y", ((0, 1), (11, 12)))) == [
        tokenizer.control_ids["<|im_end|>"]
    ]


def test_text_that_normalises_to_a_control_token_stays_text():
    """Fullwidth or upper-case forms, which only the normaliser turns into a control token, are none in a message."""
    tokenizer = text_samples.sample("folding")
    fold = tokenizer.control_ids["<|fold|>"]
    for theirs in ("\uff1c|fold|\uff1e", "<|FOLD|>"):
        assert fold in tokenizer.encode(theirs, specials=True)
        text = f"<|im_start|>{theirs}<|im_end|>"
        found = controls_in(tokenizer, tokenizer.encode_mixed(text, ((12, 12 + len(theirs)),)))
        assert found == [tokenizer.control_ids["<|im_start|>"], tokenizer.control_ids["<|im_end|>"]]
    assert fold in tokenizer.encode_mixed("<|fold|>", ())


def test_a_template_keeps_its_normalised_control_tokens():
    """With look-alikes about, a template's token is read even where the original overlooks it, and no marker leaks."""
    tokenizer = text_samples.sample("normalized")
    text = "<s>the</s>was</s>"
    ids = tokenizer.encode_mixed(text, ((10, 17),))
    assert controls_in(tokenizer, ids) == [tokenizer.control_ids["<s>"], tokenizer.control_ids["</s>"]]
    assert tokenizer.decode(ids).replace(" ", "") == "thewas</s>"


def test_a_look_alike_cannot_swallow_the_templates_token():
    """A user's text that begins a longer token with the template's brackets leaves the template's token whole."""
    tokenizer = text_samples.sample("byte_level")
    text = "<|im_start<|im_end|>"
    assert controls_in(tokenizer, tokenizer.encode_mixed(text, ((0, 10),))) == [tokenizer.control_ids["<|im_end|>"]]


@pytest.mark.parametrize("export", text_samples.EXPORT_NAMES)
def test_encodes_as_transformers_recorded(export):
    """Every recorded encoding of the export fixtures comes out of both tokenizers."""
    tokenizer = Tokenizer((text_samples.EXPORTS / export / "tokenizer.json").read_bytes())
    for golden in text_samples.goldens(export)["encode"]:
        assert tokenizer.encode(golden["text"], specials=True) == golden["ids_without_special"]
        assert tokenizer.encode(golden["text"], specials=False) == golden["ids_without_special"]


@pytest.mark.parametrize("export", text_samples.EXPORT_NAMES)
def test_no_text_becomes_a_control_token_of_an_export(export):
    """All control tokens of every export fixture stay text when a user writes them."""
    tokenizer = Tokenizer((text_samples.EXPORTS / export / "tokenizer.json").read_bytes())
    assert len(tokenizer.control_ids) >= 3
    for control in names_of(tokenizer):
        assert controls_in(tokenizer, tokenizer.encode(f"a {control}{control} b", specials=False)) == []
        assert tokenizer.encode(control, specials=True) == [tokenizer.control_ids[control]]


def test_nothing_is_cut_or_padded():
    """Truncation and padding that the file asks for do not happen: a prompt is never changed silently."""
    inner = text_samples.byte_level()
    inner.enable_truncation(4)
    inner.enable_padding(length=8)
    tokenizer = Tokenizer(inner.to_str().encode())
    for specials in (False, True):
        assert len(tokenizer.encode("1234567", specials=specials)) == 7
        assert len(tokenizer.encode("1", specials=specials)) == 1
    assert len(tokenizer.encode_mixed("1234567", ((0, 7),))) == 7


def test_half_a_surrogate_pair_is_refused():
    """Text that is not Unicode is the caller's error."""
    with pytest.raises(CallerError, match="Unicode"):
        text_samples.sample("byte_level").encode("\ud800", specials=False)


@pytest.mark.parametrize("data", [b"", b"{}", b"[]", b"\xff", b'{"model": 1}'])
def test_a_damaged_file_is_the_operators(data):
    """A file that is no tokenizer.json is refused with the way out."""
    with pytest.raises(OperatorError, match="Install the model again"):
        Tokenizer(data)


def test_a_file_at_the_limit_is_read(monkeypatch):
    """TOKENIZER_BYTES_MAX bytes are read, one more is refused."""
    data = text_samples.byte_level().to_str().encode()
    monkeypatch.setattr("residentd.text.tokenizer.TOKENIZER_BYTES_MAX", len(data))
    assert Tokenizer(data).encode("a", specials=False)
    with pytest.raises(OperatorError, match="at most"):
        Tokenizer(data + b" ")
    assert limits.TOKENIZER_BYTES_MAX >= 33 << 20


@pytest.mark.parametrize(
    ("content", "special", "control"),
    [
        ("<|im_start|>", True, True),
        ("pad", True, True),
        ("<think>", False, True),
        ("<|User|>", False, True),
        ("<\uff5cUser\uff5c>", False, True),
        ("[INST]", False, True),
        ("|||EMAIL|||", False, True),
        ("\n\n", False, False),
        ("   ", False, False),
        ("▁▁", False, False),
        ("õ", False, False),
        ("{", False, False),
        ("lighthouse", False, False),
        ("<0x0A>", False, False),
        ("<0x0A>", True, False),
        ("", True, False),
    ],
)
def test_what_is_a_control_token(content, special, control):
    """Special tokens and markup are; blanks, words, single characters and byte tokens are not."""
    assert is_control({"content": content, "special": special}) is control


spans = st.lists(st.integers(0, 30), max_size=8, unique=True).map(
    lambda edges: tuple(pair for pair in zip(sorted(edges)[::2], sorted(edges)[1::2], strict=False))
)


@text_samples.PROPERTY
@given(spans, spans)
def test_overlap_is_a_shared_character(left, right):
    """Against sets of positions."""
    positions = [{index for start, end in spans for index in range(start, end)} for spans in (left, right)]
    assert overlap(left, right) is bool(positions[0] & positions[1])


@text_samples.PROPERTY
@given(spans, st.integers(0, 5))
def test_gaps_are_the_rest(spans, extra):
    """Spans and gaps together are every position once."""
    length = (spans[-1][1] if spans else 0) + extra
    pieces = sorted([*spans, *gaps(spans, length)])
    assert [index for start, end in pieces for index in range(start, end)] == list(range(length))


@pytest.mark.parametrize("name", text_samples.NAMES)
def test_a_long_text_encodes_as_a_short_one(name):
    """The way that leaves Python's lock gives the ids and offsets of the way that keeps it."""
    tokenizer = text_samples.sample(name)
    text = ("the lighthouse   was\n\n asleep õ 😀 <|im_start|>" * 200)[: WITHOUT_LOCK_CHARS_MIN + 1]
    for inner in (tokenizer.inner, tokenizer._sealed, tokenizer._finder):
        found, expected = encoded(inner, text), inner.encode(text, add_special_tokens=False)
        assert (found.ids, found.offsets) == (expected.ids, expected.offsets)
    with pytest.raises(CallerError, match="Unicode"):
        tokenizer.encode("\ud800" * WITHOUT_LOCK_CHARS_MIN, specials=False)


def test_other_threads_run_while_a_long_text_is_encoded():
    """2 MB take a second, and no other thread waits as long as half of that."""
    tokenizer = text_samples.sample("byte_level")
    text = "the lighthouse was asleep in the town. " * 52_000
    done = threading.Event()

    def work():
        try:
            tokenizer.encode(text, specials=False)
        finally:
            done.set()

    worker = threading.Thread(target=work)
    begin = last = time.perf_counter()
    worst = 0.0
    worker.start()
    while not done.wait(0.001):
        now = time.perf_counter()
        worst, last = max(worst, now - last), now
    worst = max(worst, time.perf_counter() - last)
    worker.join()
    assert time.perf_counter() - begin > 0.2, "too fast to tell"
    assert worst < (time.perf_counter() - begin) / 2


GARBAGE = (None, 0, -1, 1.5, "", "x", [], {}, [None], {"a": 1}, True, 1 << 40)
ABSENT = object()


def places_in(value, path=()):
    """Paths to what a JSON value holds, the first few of each list and table."""
    if path:
        yield path
    if isinstance(value, dict | list):
        for key in list(value)[:12] if isinstance(value, dict) else range(min(len(value), 3)):
            yield from places_in(value[key], (*path, key))


def changed(description, path, garbage):
    copy = json.loads(json.dumps(description))
    holder = copy
    for key in path[:-1]:
        holder = holder[key]
    if garbage is ABSENT:
        del holder[path[-1]]
    else:
        holder[path[-1]] = garbage
    return json.dumps(copy).encode()


@pytest.mark.parametrize("name", text_samples.NAMES)
def test_a_damaged_part_is_the_operators(name):
    """Whatever stands where, or is missing, in a tokenizer.json: it works, or the operator is told."""
    description = json.loads(text_samples.MAKERS[name]().to_str())
    for index, path in enumerate(places_in(description)):
        for garbage in (ABSENT, GARBAGE[index % len(GARBAGE)], GARBAGE[(index * 7 + 3) % len(GARBAGE)]):
            try:
                tokenizer = Tokenizer(changed(description, path, garbage))
            except OperatorError:
                continue
            stream = table_for(tokenizer).start()
            ids = tokenizer.encode("the <s> town [CLS] zz", specials=True)
            assert stream.push(ids) + stream.flush() == tokenizer.decode(ids)


def test_a_merge_without_its_prefix_is_the_operators():
    """The library would end the process."""
    description = json.loads(text_samples.byte_level().to_str())
    description["model"]["continuing_subword_prefix"] = "###"
    with pytest.raises(OperatorError, match="prefix '###'"):
        Tokenizer(json.dumps(description).encode())
