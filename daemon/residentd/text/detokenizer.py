"""Token ids to text, a few at a time: the deltas add up to the decode of all ids, however they are split.

A `DetokenizerTable` is built once per model from the decoder that its tokenizer.json names; it holds what each id
writes. Three kinds of decoder are met:

- bytes (ByteLevel): each token is bytes, and all of them together are UTF-8, with U+FFFD for what is not;
- pieces (SentencePiece style: replacements, byte fallback, a leading blank stripped; Metaspace): each token is text or
  one byte, and a run of byte tokens is either valid UTF-8 as a whole or one U+FFFD a byte;
- whole (anything else): decoded anew each time, and given out with a lag.

The first two are checked against the tokenizer's own decode when the table is built; one that disagrees becomes the
third.
"""

from __future__ import annotations

import codecs
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, Final, Protocol

from residentd.text.limits import BYTE_RUN_TOKENS_MAX, WHOLE_DECODE_LAG_TOKENS, WHOLE_DECODE_LOOKS
from residentd.text.tokenizer import BYTE_TOKEN, SPACE_MARK, Tokenizer

REPLACEMENT: Final = "\ufffd"
CHECKED_SEQUENCES: Final = 256
CHECKED_LENGTH: Final = 24

Part = str | bytes | None
"""What an id writes: text that stands for itself, bytes that are UTF-8 only with others, or nothing (skipped)."""


class Detokenizer(Protocol):
    """The text of one stream of ids. `push(a); push(b); flush()` add up to the decode of a + b."""

    def push(self, ids: Sequence[int]) -> str:
        """Take `ids`; return the text that no later id can change."""
        ...

    def pending(self) -> str:
        """Text that a flush would add, as far as it is whole characters. Changes nothing."""
        ...

    def flush(self) -> str:
        """The stream is over: the rest of the text."""
        ...


class ByteDetokenizer:
    """For decoders of the kind `bytes`. Holds back at most three bytes: an incomplete character."""

    __slots__ = ("_parts", "_size", "_tail")

    def __init__(self, parts: Sequence[Part]) -> None:
        self._parts = parts
        self._size = len(parts)
        self._tail = b""

    def push(self, ids: Sequence[int]) -> str:
        texts = []
        for token in ids:
            part = self._parts[token] if token < self._size else None
            if part is None:
                continue
            if self._tail or isinstance(part, bytes):
                data = self._tail + (part.encode() if isinstance(part, str) else part)
                text, used = codecs.utf_8_decode(data, "replace", False)
                self._tail = data[used:]
                texts.append(text)
            else:
                texts.append(part)
        return "".join(texts)

    def pending(self) -> str:
        return ""

    def flush(self) -> str:
        tail, self._tail = self._tail, b""
        return tail.decode(errors="replace")


class PieceDetokenizer:
    """For decoders of the kind `pieces`. Holds back a run of byte tokens until it ends.

    Only the end of a run tells whether its bytes are text. A run past BYTE_RUN_TOKENS_MAX gives out its whole
    characters all the same, so that text in a script without tokens of its own still streams.
    """

    __slots__ = ("_blanks", "_first", "_parts", "_run", "_size")

    def __init__(self, parts: Sequence[Part], *, leading_blanks: int, first: Callable[[int], str] | None) -> None:
        """`leading_blanks`: how many are stripped at the start. `first`: what the first token writes, if special."""
        self._parts = parts
        self._size = len(parts)
        self._blanks = leading_blanks
        self._first = first
        self._run = bytearray()

    def push(self, ids: Sequence[int]) -> str:
        texts = []
        for token in ids:
            part = self._parts[token] if token < self._size else None
            if part is None:
                continue
            if isinstance(part, bytes):
                self._run += part
                if len(self._run) > BYTE_RUN_TOKENS_MAX:
                    texts.append(self._shortened())
                continue
            if self._run:
                texts.append(self._ended())
            if self._first is not None:
                part, self._first = self._first(token), None
            texts.append(part)
        text = "".join(texts)
        return self._stripped(text) if self._blanks and text else text

    def pending(self) -> str:
        try:
            text = self._run.decode()
        except UnicodeDecodeError:
            return ""
        return text[min(self._blanks, leading_blanks(text)) :]

    def flush(self) -> str:
        return self._stripped(self._ended())

    def _ended(self) -> str:
        """The text of the byte run, which is over."""
        run, self._run = self._run, bytearray()
        try:
            return run.decode()
        except UnicodeDecodeError:
            return REPLACEMENT * len(run)

    def _shortened(self) -> str:
        """The whole characters at the start of a long byte run; all of it if it can no longer be text."""
        try:
            text, used = codecs.utf_8_decode(self._run, "strict", False)
        except UnicodeDecodeError:
            return self._ended()
        del self._run[:used]
        return text

    def _stripped(self, text: str) -> str:
        """`text` without the blanks that are still to be stripped at the start of the stream."""
        blanks = min(self._blanks, leading_blanks(text))
        if text:
            self._blanks = self._blanks - blanks if blanks == len(text) else 0
        return text[blanks:]


class WholeDetokenizer:
    """For any other decoder: gives out what the last WHOLE_DECODE_LAG_TOKENS ids have not changed.

    Looks once in so many ids as there are WHOLE_DECODE_LOOKS in the stream so far, so a long stream costs no more than
    about a thousand decodes.
    """

    __slots__ = ("_decode", "_decoded", "_given", "_ids", "_looked", "_whole")

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._ids: list[int] = []
        self._given = ""
        self._looked = 0  # ids at the last look
        self._whole, self._decoded = "", 0  # the text of so many ids

    def push(self, ids: Sequence[int]) -> str:
        self._ids += ids
        count = len(self._ids)
        if count <= WHOLE_DECODE_LAG_TOKENS or count - self._looked < max(1, count // WHOLE_DECODE_LOOKS):
            return ""
        self._looked = count
        settled = self._decode(self._ids[:-WHOLE_DECODE_LAG_TOKENS])
        return self._give(common_start(settled, self._text()).rstrip(REPLACEMENT))

    def pending(self) -> str:
        return self._text()[len(self._given) :].rstrip(REPLACEMENT)

    def _text(self) -> str:
        if self._decoded != len(self._ids):
            self._whole, self._decoded = self._decode(self._ids), len(self._ids)
        return self._whole

    def flush(self) -> str:
        return self._give(self._text())

    def _give(self, text: str) -> str:
        given, self._given = self._given, max(self._given, text, key=len)
        return text[len(given) :]


@dataclass(frozen=True, slots=True)
class DetokenizerTable:
    """What each id of a model writes. Built once, shared by all its streams."""

    kind: str  # "bytes", "pieces" or "whole"
    parts: tuple[Part, ...]
    leading_blanks: int
    first_drops_marks: bool  # Metaspace: the first token loses its space marks
    tokenizer: Tokenizer

    def start(self) -> Detokenizer:
        """The detokenizer of a new stream."""
        if self.kind == "bytes":
            return ByteDetokenizer(self.parts)
        if self.kind == "pieces":
            first = self._without_marks if self.first_drops_marks else None
            return PieceDetokenizer(self.parts, leading_blanks=self.leading_blanks, first=first)
        return WholeDetokenizer(self.tokenizer.decode)

    def _without_marks(self, token: int) -> str:
        name = self.tokenizer.inner.id_to_token(token)
        return "" if name is None else name.replace(SPACE_MARK, "")


def table_for(tokenizer: Tokenizer) -> DetokenizerTable:
    """The table of the decoder that `tokenizer` names."""
    table = described(tokenizer, tokenizer.decoder)
    if table is not None and agrees(table):
        return table
    return DetokenizerTable("whole", (), 0, first_drops_marks=False, tokenizer=tokenizer)


def described(tokenizer: Tokenizer, decoder: Mapping[str, Any] | None) -> DetokenizerTable | None:
    """The table that `decoder` describes, or None if it is of no known kind."""
    steps = [] if decoder is None else decoder.get("decoders", [decoder])
    kinds = [step.get("type") for step in steps]
    if kinds == ["ByteLevel"]:
        parts = parts_of(tokenizer, byte_level_part)
        return DetokenizerTable("bytes", parts, 0, first_drops_marks=False, tokenizer=tokenizer)
    if kinds == ["Metaspace"] and steps[0].get("replacement") == SPACE_MARK:
        parts = parts_of(tokenizer, lambda name: name.replace(SPACE_MARK, " "))
        drops = steps[0].get("prepend_scheme") != "never"
        return DetokenizerTable("pieces", parts, 0, first_drops_marks=drops, tokenizer=tokenizer)
    replaces = list(takewhile(lambda step: step.get("type") == "Replace" and "String" in step["pattern"], steps))
    strip: Mapping[str, Any] = steps[-1] if kinds[-1:] == ["Strip"] else {"content": " ", "start": 0, "stop": 0}
    rest = [kind for kind in kinds[len(replaces) :] if kind != "Strip"]
    if rest != ["ByteFallback", "Fuse"] or strip["content"] != " " or strip["stop"]:
        return None
    parts = parts_of(tokenizer, lambda name: piece_part(name, replaces))
    return DetokenizerTable("pieces", parts, strip["start"], first_drops_marks=False, tokenizer=tokenizer)


def parts_of(tokenizer: Tokenizer, part: Callable[[str], Part]) -> tuple[Part, ...]:
    """`part` of each id's token; None where there is no token, or a special one."""
    inner = tokenizer.inner
    names = {index: name for name, index in inner.get_vocab(with_added_tokens=True).items()}
    names |= {index: str(inner.id_to_token(index)) for index in inner.get_added_tokens_decoder()}
    size = max(names, default=-1) + 1
    return tuple(
        part(names[index]) if index in names and index not in tokenizer.special_ids else None for index in range(size)
    )


def byte_values() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 stands for itself, the other bytes are moved above U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + index): byte for index, byte in enumerate(moved)}


BYTE_VALUES: Final[Mapping[str, int]] = byte_values()


def byte_level_part(name: str) -> Part:
    """Bytes of a byte-level token; a name outside the alphabet (an added token) stands for itself."""
    data = bytes(BYTE_VALUES[char] for char in name) if all(char in BYTE_VALUES for char in name) else name.encode()
    try:
        return data.decode()
    except UnicodeDecodeError:
        return data


def piece_part(name: str, replaces: Sequence[Mapping[str, Any]]) -> Part:
    for step in replaces:
        name = name.replace(step["pattern"]["String"], step["content"])
    return bytes([int(name[3:5], 16)]) if BYTE_TOKEN.fullmatch(name) else name


def common_start(left: str, right: str) -> str:
    """The longest text that both begin with."""
    if right.startswith(left):
        return left
    pairs = enumerate(zip(left, right, strict=False))
    return left[: next((index for index, (a, b) in pairs if a != b), len(right))]


def leading_blanks(text: str) -> int:
    return len(text) - len(text.lstrip(" "))


def agrees(table: DetokenizerTable) -> bool:
    """Whether the table decodes fixed pseudo-random ids as its tokenizer does: mostly odd ones, half of them bytes."""
    source = random.Random(0)  # noqa: S311 - the same sample at each load
    lone = [index for index, part in enumerate(table.parts) if isinstance(part, bytes)] or [0]
    for _ in range(CHECKED_SEQUENCES):
        size = source.randint(1, CHECKED_LENGTH)
        ids = [
            source.choice(lone) if source.random() < 0.5 else source.randrange(len(table.parts) + 2)
            for _ in range(size)
        ]
        stream = table.start()
        if "".join([*(stream.push([token]) for token in ids), stream.flush()]) != table.tokenizer.decode(ids):
            return False
    return True
