"""Softcaps that config.json names and an export lacks: the operator is told, and told only then."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest
from lowering import EXPORTS, draft_of, quiet
from tiny_decoder import Decoder, Style

from residentd_build.pipeline import rewrite
from residentd_build.softcaps import CAP_MAX, LOGITS_KEY, SCORES_KEY, left_out, note
from residentd_build.source import Source
from residentd_build.validate import validate

FORMS = {
    "decomposed": Style(mask_form="added"),
    "decomposed, masked by Where": Style(mask_form="where"),
    "decomposed, with sinks": Style(sinks="heads"),
    "standard": Style(attention="standard4"),
    "joined": Style(attention="joined"),
    "grouped": Style(attention="grouped"),
}


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("cap", [0.0, 5.0])
def test_the_cap_of_scores_is_found_in_every_form_of_attention(name: str, cap: float) -> None:
    """As a Tanh before the Softmax, or as the operator's attribute; where it is not, the line says so."""
    style = Style(**{field: getattr(FORMS[name], field) for field in Style.__slots__} | {"softcap": cap})
    line = left_out({SCORES_KEY: 50.0}, Decoder(style).model())
    assert bool(line) == (cap == 0)
    if line:
        assert f"{SCORES_KEY} 50 and no attention of the graph caps its scores" in line
        assert 'attn_implementation="eager"' in line


def uncapped(ends_in: Callable[[ir.Node], bool]) -> ir.Model:
    """Gemma 2 whose Tanh nodes are passed by where `ends_in` says so of what uses them, two nodes on."""
    model = ir.load(EXPORTS / "gemma2" / "model.onnx")
    found = 0
    for node in list(model.graph):
        if node.op_type == "Tanh" and any(
            ends_in(last) for user in node.outputs[0].consumers() for last in following(user)
        ):
            source = node.inputs[0]
            assert source is not None
            ir.convenience.replace_all_uses_with(node.outputs[0], source)
            found += 1
    assert found
    return model


def following(node: ir.Node) -> list[ir.Node]:
    """`node`, and what uses what it gives, up to two nodes on."""
    users = [user for value in node.outputs for user in value.consumers()]
    return [node, *users, *(last for user in users for value in user.outputs for last in value.consumers())]


def is_softmax(node: ir.Node) -> bool:
    return node.op_type == "Softmax"


def gives_logits(node: ir.Node) -> bool:
    return any(value.name == "logits" for value in node.outputs)


def gemma2_config() -> dict[str, Any]:
    config: dict[str, Any] = json.loads((EXPORTS / "gemma2" / "config.json").read_text())
    assert {SCORES_KEY, LOGITS_KEY} <= set(config)
    return config


@pytest.mark.parametrize(
    ("ends_in", "named", "unnamed"), [(is_softmax, SCORES_KEY, LOGITS_KEY), (gives_logits, LOGITS_KEY, SCORES_KEY)]
)
def test_the_cap_that_an_export_of_gemma_2_lacks_is_named(
    ends_in: Callable[[ir.Node], bool], named: str, unnamed: str
) -> None:
    """And no other; the Tanh of its activation function is none."""
    line = left_out(gemma2_config(), uncapped(ends_in))
    assert named in line
    assert unnamed not in line


def test_an_export_with_both_caps_is_not_spoken_of() -> None:
    """As it was exported, and lowered, where one of them is an attribute."""
    source = validate(EXPORTS / "gemma2")
    assert note(source) == ""
    draft = draft_of(source.model, 64)
    rewrite(draft, quiet)
    assert left_out(gemma2_config(), draft.model) == ""


def with_config(directory: Path, name: str, text: str) -> Source:
    shutil.copytree(EXPORTS / name, directory)
    source = validate(directory)
    (directory / "config.json").write_text(text)
    return source


def test_the_note_is_of_the_sources_own_config(tmp_path: Path) -> None:
    """A Llama whose config.json names caps has none of them in its graph; of several models in one, the text's."""
    config = json.loads((EXPORTS / "llama" / "config.json").read_text())
    for index, named in enumerate(
        (config | {SCORES_KEY: 50, LOGITS_KEY: 30}, config | {"text_config": {SCORES_KEY: 50, LOGITS_KEY: 30}})
    ):
        source = with_config(tmp_path / str(index), "llama", json.dumps(named))
        assert f"{SCORES_KEY} 50 and no attention" in note(source)
        assert f"{LOGITS_KEY} 30 and the graph does not" in note(source)


@pytest.mark.parametrize(
    "value", ["null", "0", "-3", "true", '"50"', "[50]", "NaN", "Infinity", "1e7", "1" + "0" * 400]
)
def test_what_is_no_cap_is_not_spoken_of(value: str, tmp_path: Path) -> None:
    """Whatever stands in the file."""
    source = with_config(tmp_path / "source", "llama", f'{{"{SCORES_KEY}": {value}, "{LOGITS_KEY}": {value}}}')
    assert note(source) == ""


@pytest.mark.parametrize("text", ["", "[]", "{", "[" * 100_000])
def test_a_config_that_cannot_be_read_is_another_checks_finding(text: str, tmp_path: Path) -> None:
    """Nothing is said, and nothing fails; nor where there is none."""
    source = with_config(tmp_path / "source", "llama", text)
    assert note(source) == ""
    (tmp_path / "source" / "config.json").unlink()
    assert note(source) == ""


@pytest.mark.parametrize(("cap", "is_named"), [(CAP_MAX, True), (CAP_MAX * 1.01, False)])
def test_caps_have_a_limit(cap: float, is_named: bool) -> None:  # noqa: FBT001
    """At it a cap is one, above it bends nothing."""
    assert bool(left_out({SCORES_KEY: cap}, Decoder(Style()).model())) == is_named
