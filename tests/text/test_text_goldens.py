"""Golden texts and conversations: a changed tokenizer or template library is seen before it changes a prompt."""

import dataclasses
from datetime import UTC, datetime

import msgspec
import pytest
import text_samples

from residentd.models.checks import CHAT, TOKENIZER
from residentd.text import goldens as module
from residentd.text.goldens import check_texts, record_chats, record_texts
from residentd.text.model import TextModel
from residentd.types import ChatMessage
from support.manifests import plain_manifest

DATED = "{{ strftime_now('%d %B %Y') }} " + text_samples.CHATML
NO_SYSTEM = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}"


def content_of(model):
    return msgspec.structs.replace(
        plain_manifest({}).content, text_goldens=record_texts(model), chat_goldens=record_chats(model)
    )


def parts_of(model, content):
    return {part.name: part for part in check_texts(model, content)}


@pytest.mark.parametrize("export", text_samples.EXPORT_NAMES)
def test_an_export_passes_what_was_recorded_of_it(export, tmp_path):
    """Recorded by one instance, checked by another, as two processes do."""
    text = text_samples.export_text(export, tmp_path)
    content = content_of(TextModel.load(text, tmp_path))
    parts = parts_of(TextModel.load(text, tmp_path), content)
    assert parts[TOKENIZER].checked == len(module.TEXTS)
    assert text.chat_template is None or parts[CHAT].checked == 5
    assert all(part.missed == 0 for part in parts.values())


def test_a_template_that_writes_the_date_passes_tomorrow():
    """Goldens are rendered at a fixed moment; what is served has the real one."""
    model = text_samples.text_model("byte_level", DATED)
    content = content_of(model)
    assert content.chat_goldens[0].text.startswith("02 January 2026 ")
    tomorrow = dataclasses.replace(model, template=model.template.at(datetime(2031, 5, 6, tzinfo=UTC)))
    assert parts_of(tomorrow, content)[CHAT].passed
    assert tomorrow.template.render([ChatMessage("user", "x")]).text.startswith("06 May 2031 ")


def test_conversations_hold_what_tokenizers_trip_over():
    """One turn, several with a system message, several scripts, and every control token's own text."""
    model = text_samples.text_model("byte_level", text_samples.CHATML)
    chats = record_chats(model)
    assert len(chats) == 5
    assert any(role == "system" for role, _ in chats[1].messages)
    look_alike = chats[3].messages[0][1]
    assert "<|im_start|>" in look_alike
    assert sum(name in look_alike for name in model.tokenizer.control_ids) >= module.CONTROLS_MAX
    assert not chats[4].add_generation_prompt
    assert all(chat.ids and chat.text for chat in chats)


def test_another_template_is_seen():
    """The text differs, so the rendered golden does: counted for each conversation, the first one named."""
    content = content_of(text_samples.text_model("byte_level", text_samples.CHATML))
    other = text_samples.text_model("byte_level", text_samples.CHATML.replace("'\\n' + message", "' ' + message"))
    part = parts_of(other, content)[CHAT]
    assert (part.checked, part.missed, part.passed) == (5, 5, False)
    assert part.detail.startswith("first: conversation 1 renders to")


def test_another_tokenizer_is_seen_in_both_parts():
    """Texts and conversations alike; lengths and the first wrong place are told, no text is."""
    content = content_of(text_samples.text_model("byte_level", text_samples.CHATML))
    parts = parts_of(text_samples.text_model("whole_words", text_samples.CHATML), content)
    assert not parts[TOKENIZER].passed
    assert not parts[CHAT].passed
    assert "ids instead of" in parts[TOKENIZER].detail
    assert "Hello" not in parts[TOKENIZER].detail


def test_one_id_of_one_text_is_enough():
    """A golden text that gives one other id fails the part, and the token is named."""
    model = text_samples.text_model("byte_level")
    content = content_of(model)
    first, *rest = content.text_goldens
    wrong = msgspec.structs.replace(first, ids=(*first.ids[:2], first.ids[2] + 1, *first.ids[3:]))
    part = parts_of(model, msgspec.structs.replace(content, text_goldens=(*rest, wrong)))[TOKENIZER]
    assert (part.missed, part.checked) == (1, len(module.TEXTS))
    assert "text 5" in part.detail
    assert "other ids from token 3 on" in part.detail


def test_what_was_refused_must_go_on_being_refused():
    """A template library that lets a conversation through which the model's template refused is a change too."""
    strict = text_samples.text_model("byte_level", NO_SYSTEM + text_samples.CHATML)
    content = content_of(strict)
    assert [chat.refused for chat in content.chat_goldens] == [False, True, False, False, True]
    assert parts_of(strict, content)[CHAT].passed
    lax = parts_of(text_samples.text_model("byte_level", text_samples.CHATML), content)[CHAT]
    assert lax.missed == 2
    assert lax.detail == "first: conversation 2 was refused and is accepted now"


def test_look_alikes_that_cannot_be_kept_apart_are_recorded_as_refused():
    """The safety rule itself is golden: a change that would let such text become control tokens is seen."""
    mixed = text_samples.CHATML.replace("message['content']", "(('<b>' ~ message['content']) | title)")
    model = text_samples.text_model("byte_level", mixed)
    assert [chat.refused for chat in record_chats(model)] == [False, False, False, True, False]


def test_a_model_without_a_template_has_no_chat_part():
    """Plain prompts only: nothing to render, nothing to check."""
    model = text_samples.text_model("byte_level", None)
    content = content_of(model)
    assert content.chat_goldens == ()
    assert list(parts_of(model, content)) == [TOKENIZER]
