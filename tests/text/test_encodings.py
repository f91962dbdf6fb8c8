"""Texts of encoders that a tokenizer cannot encode."""

from __future__ import annotations

import json

import pytest

from residentd.errors import CallerError
from residentd.text.tokenizer import Tokenizer
from support.installed import EXPORTS

SOURCE = EXPORTS.parent / "encoders" / "embed-bert" / "tokenizer.json"


@pytest.mark.parametrize(
    ("text", "says"), [("abcdefghijklmnopqrstuvwxyz" * 3, "gives up on this text"), ("half \ud800", "surrogate pair")]
)
def test_a_text_that_cannot_be_encoded_is_the_callers(text: str, says: str) -> None:
    """The library panics at a pattern that takes too long, which no handler for exceptions would see."""
    pattern = {"Regex": r"(\p{L}+\p{L}*)+\p{N}$"}
    split = {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}
    tokenizer = Tokenizer(json.dumps(json.loads(SOURCE.read_text()) | {"pre_tokenizer": split}).encode())
    with pytest.raises(CallerError, match=says):
        list(tokenizer.ids_of(["a", text], 100))
