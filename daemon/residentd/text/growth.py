"""How much longer a tokenizer may make a text: its replacements follow one another, and each may lengthen it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

GROWTH_MAX: Final = 256
"""Of characters for one. The forms of Unicode alone make up to 18 of one, and a blank becomes one ▁ or three bytes."""
DEPTH_MAX: Final = 16


def growth(part: object, depth: int = 0) -> int:
    """Characters that `part` of a tokenizer's description, a normaliser or decoder, may make of one. Above a cap: more.

    Regular expressions count as finding something at every character; what nests deeper than DEPTH_MAX, which the
    library takes, counts as above the cap.
    """
    if not isinstance(part, Mapping):
        return 1
    if depth > DEPTH_MAX:
        return GROWTH_MAX + 1
    if part.get("type") == "Replace":
        return _replacement(part)
    total = 1
    for inner in (*_listed(part, "normalizers"), *_listed(part, "decoders")):
        total = min(total * growth(inner, depth + 1), GROWTH_MAX + 1)
    return total


def _replacement(part: Mapping[str, Any]) -> int:
    content, pattern = part.get("content"), part.get("pattern")
    if not isinstance(content, str) or not isinstance(pattern, Mapping):
        return 1
    found = pattern.get("String")
    length = len(found) if isinstance(found, str) and found else 1
    return max(1, -(-len(content) // length))


def _listed(part: Mapping[str, Any], key: str) -> Sequence[object]:
    inner = part.get(key)
    return inner if isinstance(inner, list) else ()
