from __future__ import annotations

import itertools

import pytest
import text_samples
from hypothesis import example, given
from hypothesis import strategies as st

from residentd.errors import CallerError, StoreError
from residentd.text import limits
from residentd.text.model import TextDelta, TextModel
from residentd.types import ChatMessage

HELLO = [ChatMessage("user", "Hello")]
WRITES_BOS = "{{ bos_token }}[INST] {{ messages[0].content }} [/INST]"


@pytest.mark.parametrize("name", ["llama2", "metaspace", "byte_level"])
@pytest.mark.parametrize(
    "template", [WRITES_BOS, WRITES_BOS.removeprefix("{{ bos_token }}"), "{{ bos_token }}" + WRITES_BOS]
)
def test_exactly_one_bos(name, template):
    """Whether the template writes BOS, or does not, or twice, the ids begin with one if the tokenizer adds it."""
    bos = "<|im_start|>" if name == "byte_level" else "<s>"
    model = text_samples.text_model(name, template, bos=bos, adds_bos=True)
    ids = model.from_chat(HELLO)
    assert ids[0] == model.bos_id
    assert ids.count(model.bos_id) == 1
    assert model.from_completion("Hello")[0] == model.bos_id
    assert model.from_completion("Hello").count(model.bos_id) == 1


def test_a_later_bos_of_the_template_stays():
    """Templates that begin every turn with BOS keep that: only the start is put right."""
    source = "{% for m in messages %}{{ bos_token + m.content }}{% endfor %}"
    model = text_samples.text_model("llama2", source, bos="<s>", adds_bos=True)
    assert model.from_chat(HELLO * 2).count(model.bos_id) == 2


def test_a_bos_that_the_client_writes_is_text():
    """A prompt or message that begins with the BOS's text gets no second BOS."""
    model = text_samples.text_model("llama2", WRITES_BOS, bos="<s>", adds_bos=True)
    assert model.from_completion("<s>Hello").count(model.bos_id) == 1
    assert model.from_chat([ChatMessage("user", "<s>Hello")]).count(model.bos_id) == 1


def test_no_bos_where_the_tokenizer_adds_none():
    """A model may know a BOS and not use it: then only its template writes it."""
    model = text_samples.text_model("byte_level", WRITES_BOS, bos="<|im_start|>", adds_bos=False)
    assert model.bos_id not in model.from_completion("Hello")
    assert model.from_chat(HELLO).count(model.bos_id) == 1


def test_an_empty_prompt_is_bos_or_refused():
    """An empty prompt begins with the model's BOS if it has one; else there is nothing to begin with."""
    assert text_samples.text_model("llama2", bos="<s>", adds_bos=True).from_completion("") == (1,)
    model = text_samples.text_model("byte_level", bos="<|im_start|>")
    assert model.from_completion("") == (model.bos_id,)
    with pytest.raises(CallerError, match="empty") as caught:
        text_samples.text_model("byte_level").from_completion("")
    assert caught.value.field == "prompt"


def test_the_length_limit_of_a_prompt(monkeypatch):
    """PROMPT_CHARS_CEILING characters are accepted, one more is refused and the message says both numbers."""
    model = text_samples.text_model("byte_level")
    with pytest.raises(CallerError, match="16,777,217 characters; at most 16,777,216"):
        model.from_completion("1" * (limits.PROMPT_CHARS_CEILING + 1))
    monkeypatch.setattr("residentd.text.model.PROMPT_CHARS_CEILING", 2000)  # the real one takes seconds to encode
    assert len(model.from_completion("1" * 2000)) == 2000
    with pytest.raises(CallerError, match="2,001 characters; at most 2,000"):
        model.from_completion("1" * 2001)


def test_a_model_without_a_chat_template_refuses_messages():
    """The way out is a prompt."""
    model = text_samples.text_model("byte_level", None)
    with pytest.raises(CallerError, match="Send a prompt"):
        model.from_chat(HELLO)


def test_a_chat_that_renders_to_nothing_is_refused():
    """There is no prompt of no tokens."""
    with pytest.raises(CallerError, match="no tokens"):
        text_samples.text_model("byte_level", "{# #}").from_chat(HELLO)


@pytest.mark.parametrize("export", text_samples.EXPORT_NAMES)
def test_an_export_loads_from_its_directory(export, tmp_path):
    """Prompts of every export fixture get the ids that transformers gives them."""
    model = TextModel.load(text_samples.export_text(export, tmp_path), tmp_path)
    for golden in text_samples.goldens(export)["encode"]:
        if golden["ids"]:
            assert list(model.from_completion(golden["text"])) == golden["ids"]


def test_missing_files_are_the_stores(tmp_path):
    """A file that the manifest names and the disk lacks is a damaged version, and no path is told."""
    text = text_samples.export_text("llama", tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    with pytest.raises(StoreError, match="chat template") as caught:
        TextModel.load(text, tmp_path)
    assert str(tmp_path) not in str(caught.value)


def first_stop(text, stops):
    """(end, -length) of the match that is complete first, the longest of those."""
    return min(((text.find(stop) + len(stop), -len(stop)) for stop in stops if stop in text), default=None)


def outcome(model, ids, stops):
    """The rule, from whole decodes: the text of the fewest tokens that hold a stop, cut before it."""
    for count in range(len(ids) + 1):
        text = model.tokenizer.decode(ids[:count])
        if (match := first_stop(text, stops)) is not None:
            return text[: match[0] + match[1]], count
    return model.tokenizer.decode(ids), None


def streamed(model, ids, stops, cuts):
    """The text of `ids` pushed in batches that end at `cuts`, and how many tokens were used if a stop ended it."""
    stream, texts, used = model.stream(stops), [], 0
    edges = [0, *sorted({cut % (len(ids) + 1) for cut in cuts}), len(ids)]
    for start, end in itertools.pairwise(edges):
        delta = stream.push(ids[start:end])
        texts.append(delta.text)
        used += delta.tokens_used
        if delta.stopped is not None:
            assert delta.stopped in stops
            assert stream.push(ids[end:]) == stream.finish() == TextDelta("", None, 0)
            return "".join(texts), used
        assert delta.tokens_used == end - start
    last = stream.finish()
    assert last.tokens_used == 0
    assert last.stopped is None
    return "".join((*texts, last.text)), None


@pytest.mark.parametrize("name", ["byte_level", "llama2", "gemma", "unigram"])
def test_a_stop_string_cuts_text_and_tokens(name):
    """Text ends before the match, at the token that completed it: as many tokens as need be, however they come."""
    model = text_samples.text_model(name, None)
    stops = st.lists(st.text(alphabet="the wasn\né你", min_size=1, max_size=4), max_size=4)

    @text_samples.PROPERTY
    @given(st.text(alphabet="the wasn\né你😀", max_size=20), stops, st.lists(st.integers(0, 1000), max_size=10))
    @example("the\n\nwas", ["\n\n"], [])
    @example("was\n", ["\n"], [1, 2, 3, 4])
    @example("é你\né", ["你\n"], [])
    def check(text, stops, cuts):
        ids = model.tokenizer.encode(text, specials=False)
        assert streamed(model, ids, stops, cuts) == outcome(model, ids, stops)
        assert streamed(model, ids, stops, range(len(ids))) == outcome(model, ids, stops)

    check()


@text_samples.PROPERTY
@given(
    st.lists(st.integers(0, 300), max_size=30), st.lists(st.sampled_from(["e", "\n", "a\n", "\x01", "<"]), max_size=3)
)
def test_stop_strings_in_any_ids(ids, stops):
    """The rule holds for ids that are not text as well, SentencePiece bytes among them."""
    model = text_samples.text_model("llama2", None)
    assert streamed(model, ids, stops, range(len(ids))) == outcome(model, ids, stops)


def test_a_stop_of_byte_tokens_is_seen_at_once():
    """SentencePiece writes a line break as a byte token, held back; a stop at it waits for no further token."""
    model = text_samples.text_model("llama2", None)
    newline = len(text_samples.SPECIALS) + ord("\n")
    stream = model.stream(["\n"])
    word = model.tokenizer.encode("the", specials=False)
    assert stream.push([*word, newline, newline, *word]) == TextDelta("the", "\n", len(word) + 1)


def test_a_beginning_of_a_stop_leaves_at_the_end():
    """What was held back for a stop string that did not come is given out by finish."""
    model = text_samples.text_model("byte_level", None)
    ids = model.tokenizer.encode("the sto", specials=False)
    stream = model.stream(["stop"])
    assert stream.push(ids) == TextDelta("the ", None, len(ids))
    assert stream.finish() == TextDelta("sto", None, 0)


def test_a_stop_that_only_the_end_completes():
    """U+FFFD for a character that never became whole can end a match at finish."""
    model = text_samples.text_model("byte_level", None)
    ids = model.tokenizer.encode("a😀", specials=False)[:-1]
    stream = model.stream(["\ufffd"])
    assert stream.push(ids) == TextDelta("a", None, len(ids))
    assert stream.finish() == TextDelta("", "\ufffd", 0)


def test_too_many_stop_strings_are_refused():
    """The limits of stops are checked where a stream begins."""
    with pytest.raises(CallerError, match="at most 64"):
        text_samples.text_model("byte_level", None).stream(["a"] * (limits.STOPS_CEILING + 1))
