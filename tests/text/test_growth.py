"""How much longer a tokenizer's replacements may make a text, before the library is let loose on one."""

from __future__ import annotations

import json
from typing import Any

import pytest
import tokenizers

from residentd.errors import OperatorError
from residentd.text.growth import DEPTH_MAX, GROWTH_MAX, growth
from residentd.text.tokenizer import Tokenizer, encoded
from support.installed import EXPORTS


def replace(pattern: dict[str, str], content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


def sequence(*inner: Any, key: str = "normalizers") -> dict[str, Any]:
    return {"type": "Sequence", key: list(inner)}


ONE_TO_TEN = replace({"String": "a"}, "b" * 10)


@pytest.mark.parametrize(
    ("part", "expected"),
    [
        (None, 1),
        ({"type": "NFKC"}, 1),
        (replace({"String": " "}, "▁"), 1),
        (replace({"String": "abc"}, "d"), 1),
        (replace({"String": "abc"}, "d" * 7), 3),
        (ONE_TO_TEN, 10),
        (replace({"Regex": ".{100}"}, "d" * 7), 7),
        (replace({"String": "a"}, ""), 1),
        (replace({"String": ""}, "abc"), 3),
        (sequence(ONE_TO_TEN, {"type": "NFC"}, ONE_TO_TEN), 100),
        (sequence(ONE_TO_TEN, sequence(ONE_TO_TEN), ONE_TO_TEN), GROWTH_MAX + 1),
        (sequence(ONE_TO_TEN, ONE_TO_TEN, key="decoders"), 100),
        ({"type": "Replace", "pattern": 7, "content": None}, 1),
        ({"type": "Sequence", "normalizers": "none"}, 1),
    ],
)
def test_growth(part: Any, expected: int) -> None:
    """Characters made of one at most, of replacements one after the other."""
    assert growth(part) == expected


def nested(depth: int) -> dict[str, Any]:
    part: dict[str, Any] = ONE_TO_TEN
    for _ in range(depth):
        part = sequence(part)
    return part


def test_a_description_that_nests_too_deep_is_refused() -> None:
    """At the limit it is followed; one deeper it counts as growing past any limit, though the library would take it."""
    assert growth(nested(DEPTH_MAX)) == 10
    assert growth(nested(DEPTH_MAX + 1)) == GROWTH_MAX + 1
    description = json.loads((EXPORTS / "smollm2" / "tokenizer.json").read_text())
    description["normalizer"] = nested(DEPTH_MAX + 1)
    library = tokenizers.Tokenizer.from_str(json.dumps(description))
    assert library.normalizer.normalize_str("a") == "b" * 10
    with pytest.raises(OperatorError, match="the tokenizer's normalizer may make more than 256 characters of one"):
        Tokenizer(json.dumps(description).encode())


@pytest.mark.parametrize("name", ["normalizer", "decoder"])
@pytest.mark.parametrize(("length", "is_accepted"), [(GROWTH_MAX, True), (GROWTH_MAX + 1, False)])
def test_a_tokenizer_is_refused_one_above_the_limit(name: str, length: int, *, is_accepted: bool) -> None:
    """At load, before any text."""
    description = json.loads((EXPORTS / "smollm2" / "tokenizer.json").read_text())
    inner = replace({"String": "\ue123"}, "x" * length)
    before = description[name]
    description[name] = sequence(*([before] if before else []), inner, key=f"{name}s")
    if is_accepted:
        Tokenizer(json.dumps(description).encode())
        return
    with pytest.raises(OperatorError, match=f"the tokenizer's {name} may make more than 256 characters of one"):
        Tokenizer(json.dumps(description).encode())


@pytest.mark.parametrize("name", sorted(path.parent.name for path in EXPORTS.glob("*/tokenizer.json")))
def test_every_real_tokenizer_is_within_the_limit(name: str) -> None:
    """What exporters write makes three characters of one at most."""
    description = json.loads((EXPORTS / name / "tokenizer.json").read_text())
    assert max(growth(description["normalizer"]), growth(description["decoder"])) <= 3


def test_a_pattern_that_takes_too_long_is_the_callers_text_refused() -> None:
    """The library panics, which no handler for exceptions would see."""
    from residentd.errors import CallerError

    description = json.loads((EXPORTS / "smollm2" / "tokenizer.json").read_text())
    pattern = {"Regex": r"(\p{L}+\p{L}*)+\p{N}$"}
    description["pre_tokenizer"] = {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}
    tokenizer = Tokenizer(json.dumps(description).encode())
    with pytest.raises(CallerError, match="gives up on this text"):
        encoded(tokenizer.inner, "abcdefghijklmnopqrstuvwxyz" * 3)
