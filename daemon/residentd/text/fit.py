"""How few tokens a text can become, so that one that cannot fit is refused before it is tokenized."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

SHRINKS: Final[Mapping[str, int]] = MappingProxyType({"NFC": 4, "Prepend": 1, "ByteLevel": 1})
"""Normalisers that keep all text, by how many times fewer bytes (UTF-8) they can make of it.

NFC: U+0390 has 2 bytes and may have been written with 7; no character does worse (Unicode 15)."""
KEEPING: Final = frozenset({"ByteLevel", "Digits", "Metaspace", "UnicodeScripts"})
"""Pre-tokenizers that cut and drop nothing. Metaspace writes three bytes for a blank's one."""
KEEPING_UNLESS_REMOVED: Final = frozenset({"Split", "Punctuation"})
BYTE_NAMES: Final = tuple(f"<0x{byte:02X}>" for byte in range(256))


def bytes_per_token_max(
    description: Mapping[str, Any], *, byte_chars: Sequence[str], normalise: Callable[[str], str]
) -> int | None:
    """The most bytes of text (UTF-8) that one token can stand for; None where no number can be shown.

    `description` is a tokenizer.json, `byte_chars` the alphabet of ByteLevel, `normalise` what the normaliser makes of
    a text. None: a step that drops text, or unknown text of any length that becomes one token.
    """
    before, cuts = list(steps(description, "normalizer")), list(steps(description, "pre_tokenizer"))
    shrinks = [shrink(step) for step in before]
    added = description["added_tokens"]
    if None in shrinks or not all(map(keeps, cuts)) or any(token["lstrip"] or token["rstrip"] for token in added):
        return None
    names = names_of(description["model"])
    is_byte_level = any(step.get("type") == "ByteLevel" for step in (*before, *cuts))
    if not has_every_byte(description["model"], names, byte_chars if is_byte_level else None):
        return None
    sizes = [len(name) if is_byte_level else len(name.encode()) for name in names]
    sizes += [
        len((normalise(token["content"]) if token["normalized"] else token["content"]).encode()) for token in added
    ]
    longest = max(sizes)
    for factor in shrinks:
        longest *= factor or 1
    return longest


def steps(description: Mapping[str, Any], part: str) -> Iterator[Mapping[str, Any]]:
    """The single steps of a normaliser or pre-tokenizer, sequences within sequences laid out."""
    waiting = [description.get(part)]
    while waiting:
        step = waiting.pop(0)
        if step is None:
            continue
        if step.get("type") == "Sequence":
            waiting = [*step.get("normalizers", step.get("pretokenizers", ())), *waiting]
        else:
            yield step


def shrink(step: Mapping[str, Any]) -> int | None:
    """How many times fewer bytes a normaliser can make of a text; None: any number."""
    if step.get("type") == "Replace":
        pattern, content = step["pattern"].get("String"), step["content"]
        return 1 if pattern is not None and len(content.encode()) >= len(pattern.encode()) else None
    return SHRINKS.get(step.get("type", ""))


def keeps(step: Mapping[str, Any]) -> bool:
    """Whether a pre-tokenizer drops nothing."""
    if step.get("type") in KEEPING_UNLESS_REMOVED:
        return bool(step["behavior"] != "Removed")
    return step.get("type") in KEEPING


def names_of(model: Mapping[str, Any]) -> list[str]:
    """The vocabulary; Unigram's is a list of names with scores."""
    vocabulary = model["vocab"]
    return list(vocabulary) if isinstance(vocabulary, Mapping) else [name for name, _ in vocabulary]


def has_every_byte(model: Mapping[str, Any], names: Sequence[str], byte_chars: Sequence[str] | None) -> bool:
    """Whether the model has a token for every byte, so that it never drops text or makes one unknown token of much."""
    if model.get("type") not in {"BPE", "Unigram"}:
        return False
    if model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
        return False
    known = set(names)
    if byte_chars is not None:
        return known.issuperset(byte_chars)
    return bool(model.get("byte_fallback")) and known.issuperset(BYTE_NAMES)
