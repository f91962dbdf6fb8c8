"""Text that knows which of its characters came from the caller.

A chat template may trim, split, slice, replace and join what a message says before it writes it. `Traced` is a `str`
that compares, searches and hashes like any other, and carries through these operations which parts are the caller's.
What it cannot follow character by character counts as the caller's as a whole, so a lost trace can only take a control
token away from the template, never give one to the caller.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Any, Final, Self, SupportsIndex

Span = tuple[int, int]
Spans = tuple[Span, ...]
"""Half-open, ascending, disjoint, never empty."""


class Traced(str):
    """A string of which `spans` came from the caller; without `spans`, all of it.

    `mixed`: somewhere on the way the template's own text was counted as the caller's, as it could not be told apart.
    """

    __slots__ = ("mixed", "spans")
    spans: Spans
    mixed: bool

    def __new__(cls, text: str = "", spans: Spans | None = None, *, mixed: bool = False) -> Self:
        self = super().__new__(cls, text)
        self.spans = (((0, len(text)),) if text else ()) if spans is None else spans
        self.mixed = mixed
        return self

    def __str__(self) -> str:
        return self

    def __add__(self, other: str) -> str:
        return join((self, other)) if isinstance(other, str) else NotImplemented

    def __radd__(self, other: str) -> str:
        return join((other, self)) if isinstance(other, str) else NotImplemented

    def __mul__(self, count: SupportsIndex) -> str:
        return join([self] * count)

    __rmul__ = __mul__

    def __mod__(self, values: Any) -> str:
        return Traced(plain(self) % values, mixed=True)

    def __rmod__(self, template: Any) -> str:
        return Traced(template % (plain(self),), mixed=True)

    def __getitem__(self, key: SupportsIndex | slice) -> str:
        text = super().__getitem__(key)
        if not isinstance(key, slice):
            index = range(len(self))[key]
            return self._part(text, index, index + 1)
        start, _, step = key.indices(len(self))
        if step == 1:
            return self._part(text, start, start + len(text))
        return Traced(text, mixed=self.mixed or not is_whole(self)) if self.spans else text

    def __iter__(self) -> Iterator[str]:
        return (self[index] for index in range(len(self)))

    def _part(self, text: str, start: int, end: int) -> str:
        """`text` is this string's characters from `start` to `end`."""
        if not text:
            return ""
        spans = tuple((max(a, start) - start, min(b, end) - start) for a, b in self.spans if a < end and b > start)
        return Traced(text, spans, mixed=self.mixed) if spans else plain(text)

    def _at(self, text: str, start: int) -> str:
        return self._part(text, start, start + len(text))

    def _found(self, texts: Iterable[str]) -> list[str]:
        """`texts` occur in this order and do not overlap."""
        parts, position = [], 0
        for text in texts:
            position = self.index(text, position)
            parts.append(self._at(text, position))
            position += len(text)
        return parts

    def _spaced(self, texts: Iterable[str], gap: int) -> list[str]:
        """`texts`, with `gap` characters between each two, are this string."""
        parts, position = [], 0
        for text in texts:
            parts.append(self._at(text, position))
            position += len(text) + gap
        return parts

    def _as_long(self, text: str) -> str:
        """`text` was made character by character, unless its length has changed."""
        if len(text) == len(self):
            return self._at(text, 0)
        return Traced(text, mixed=self.mixed or not is_whole(self)) if self.spans else text

    def strip(self, chars: str | None = None, /) -> str:
        return self._at(super().strip(chars), len(self) - len(super().lstrip(chars)))

    def lstrip(self, chars: str | None = None, /) -> str:
        text = super().lstrip(chars)
        return self._at(text, len(self) - len(text))

    def rstrip(self, chars: str | None = None, /) -> str:
        return self._at(super().rstrip(chars), 0)

    def removeprefix(self, prefix: str, /) -> str:
        text = super().removeprefix(prefix)
        return self._at(text, len(self) - len(text))

    def removesuffix(self, suffix: str, /) -> str:
        return self._at(super().removesuffix(suffix), 0)

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        texts = super().split(sep, maxsplit)
        return self._found(texts) if sep is None else self._spaced(texts, len(sep))

    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        texts = super().rsplit(sep, maxsplit)
        return self._found(texts) if sep is None else self._spaced(texts, len(sep))

    def splitlines(self, keepends: bool = False) -> list[str]:  # noqa: FBT001, FBT002 - str's own signature
        lines = self._spaced(super().splitlines(keepends=True), 0)
        return lines if keepends else [line[: len(end)] for line, end in zip(lines, super().splitlines(), strict=True)]

    def partition(self, sep: str, /) -> tuple[str, str, str]:
        before, found, after = self._spaced(super().partition(sep), 0)
        return before, found, after

    def rpartition(self, sep: str, /) -> tuple[str, str, str]:
        before, found, after = self._spaced(super().rpartition(sep), 0)
        return before, found, after

    def replace(self, old: str, new: str, count: SupportsIndex = -1, /) -> str:
        if old:
            return join(interleave(new, self.split(old, count)))
        return Traced(super().replace(old, plain(new), count), mixed=True)

    def join(self, texts: Iterable[str], /) -> str:
        return join(interleave(self, list(texts)))

    def lower(self) -> str:
        return self._as_long(super().lower())

    def upper(self) -> str:
        return self._as_long(super().upper())

    def casefold(self) -> str:
        return self._as_long(super().casefold())

    def capitalize(self) -> str:
        return self._as_long(super().capitalize())

    def title(self) -> str:
        return self._as_long(super().title())

    def swapcase(self) -> str:
        return self._as_long(super().swapcase())


FOLLOWED: Final = frozenset(
    (
        *("strip", "lstrip", "rstrip", "removeprefix", "removesuffix", "split", "rsplit", "splitlines", "partition"),
        *("rpartition", "replace", "join", "lower", "upper", "casefold", "capitalize", "title", "swapcase"),
    )
)
"""The methods of str that Traced follows itself."""


def plain(text: str) -> str:
    """The same characters without their trace."""
    return str.__str__(text) if isinstance(text, Traced) else text


def redacted(text: str) -> str:
    """`text` with an ellipsis for each part that is the caller's."""
    if not isinstance(text, Traced):
        return text
    kept: list[str] = []
    position = 0
    for start, end in text.spans:
        kept += (text[position:start], "…")
        position = end
    return plain("".join((*kept, text[position:])))


def is_whole(text: str) -> bool:
    """Whether every character is the caller's."""
    if not isinstance(text, Traced):
        return not text
    return not text.mixed and sum(end - start for start, end in text.spans) == len(text)


def interleave(separator: str, texts: list[str]) -> list[str]:
    parts = texts[:1]
    for text in texts[1:]:
        parts += (separator, text)
    return parts


def join(texts: Iterable[str]) -> str:
    """The concatenation; a plain str if no part of it is the caller's."""
    parts = list(texts)
    spans: list[Span] = []
    position, mixed = 0, False
    for part in parts:
        if isinstance(part, Traced):
            mixed |= part.mixed
            spans += ((start + position, end + position) for start, end in part.spans)
        position += len(part)
    text = "".join(parts)
    return Traced(text, merged(spans), mixed=mixed) if spans else plain(text)


def merged(spans: list[Span]) -> Spans:
    """Join spans that touch, so that long texts built from pieces stay cheap to carry."""
    if not spans or all(left[1] < right[0] for left, right in pairwise(spans)):
        return tuple(spans)
    result = [spans[0]]
    for start, end in spans[1:]:
        if start == result[-1][1]:
            result[-1] = (result[-1][0], end)
        else:
            result.append((start, end))
    return tuple(result)


def derived(result: str, inputs: list[str]) -> str:
    """`result`, made from `inputs` in a way that is not followed: the caller's as a whole if any input has a trace."""
    if not result or not any(isinstance(text, Traced) and text.spans for text in inputs):
        return result
    return Traced(plain(result), mixed=not all(is_whole(text) for text in inputs))
