"""Texts and pairs of texts to rows of token ids, as an encoder was trained on them: special tokens, prompts, length."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Final

from residentd.calls import TextRow
from residentd.errors import CallerError
from residentd.models import manifest
from residentd.models.checks import TOKENIZER, Part
from residentd.models.encoder import EncodedGolden, Encoder
from residentd.text.frame import Frame
from residentd.text.model import read
from residentd.text.tokenizer import Ids, Tokenizer

CUT_MARGIN_TOKENS: Final = 256
"""Made beyond what is kept of a text, at least, so that the place where it was cut is far from there."""
CHARS_A_TOKEN: Final = 8
"""Of a text whose end may not be needed so many characters are tried first: twice what English has a token."""
CHARS_GROWTH: Final = 4  # of that stretch, as long as it has too few tokens


@dataclass(frozen=True, slots=True)
class Encoded:
    """A row, and whether some of its text was left out to make it fit."""

    row: TextRow
    truncated: bool


@dataclass(frozen=True, slots=True)
class EncoderText:
    """Tokenizer, prompts and length limit of one encoder. Safe to use from several threads."""

    tokenizer: Tokenizer
    encoder: Encoder
    tokens_max: int

    @classmethod
    def load(cls, content: manifest.Content, directory: Path) -> EncoderText:
        """Read the tokenizer that `content` names in the version's directory. Raises StoreError or OperatorError."""
        assert content.text is not None
        assert content.encoder is not None
        tokenizer = Tokenizer(read(directory / content.text.tokenizer, "tokenizer"))
        return cls(tokenizer, content.encoder, content.engine.limits.context)

    def prompt(self, name: str) -> str:
        """The prompt of that name, or the model's default one for "". Raises CallerError."""
        wanted = name or self.encoder.prompt_default
        if not wanted:
            return ""
        if wanted not in self.encoder.prompts:
            known = ", ".join(sorted(self.encoder.prompts)) or "none"
            raise CallerError(
                f"the model has no prompt of that name; it has: {known}. Use one of these", field="prompt_name"
            )
        return self.encoder.prompts[wanted]

    def encode(
        self,
        texts: Sequence[str],
        pairs: Sequence[str] | None = None,
        *,
        prompt: str = "",
        truncate: bool = False,
        field: str = "texts",
    ) -> list[Encoded]:
        """A row for each of `texts`, or for each with its partner of `pairs`. Raises CallerError naming `field`.

        Control tokens in a text are text. What does not fit is refused, or with `truncate` cut at its end. A text that
        is there several times is tokenized once.
        """
        frame = self.tokenizer.frame if pairs is None else self.tokenizer.pair_frame
        cases = self._cases(texts, pairs, prompt)
        ids = self._ids(dict.fromkeys(chain.from_iterable(cases)), self.tokens_max - frame.specials_count)
        return [
            self._row(_name(field, index), [ids[text] for text in case], frame, field, truncate=truncate)
            for index, case in enumerate(cases)
        ]

    def _cases(self, texts: Sequence[str], pairs: Sequence[str] | None, prompt: str) -> list[tuple[str, ...]]:
        """What is tokenized for each row: its text, or its text and its partner, as the model was trained on them."""
        first = {text: self._written(prompt + text) for text in dict.fromkeys(texts)}
        if pairs is None:
            return [(first[text],) for text in texts]
        second = {text: self._written(text) for text in dict.fromkeys(pairs)}
        return [(first[text], second[pair]) for text, pair in zip(texts, pairs, strict=True)]

    def _written(self, text: str) -> str:
        return text.lower() if self.encoder.lowercase else text

    def _ids(self, texts: Iterable[str], room: int) -> dict[str, Ids]:
        """The first `room` ids of each of `texts`; of one that has more not many more are made.

        How a text is cut into tokens is decided near each of them, so the first ones are those of the whole text.
        """
        found: dict[str, Ids] = {}
        left, chars = list(texts), (room + CUT_MARGIN_TOKENS) * CHARS_A_TOKEN
        while left:
            found |= zip(left, self.tokenizer.ids_of((text[:chars] for text in left), room), strict=True)
            left = [text for text in left if len(text) > chars and found[text].count < room + CUT_MARGIN_TOKENS]
            chars *= CHARS_GROWTH
        return found

    def _row(self, name: str, texts: Sequence[Ids], frame: Frame, field: str, *, truncate: bool) -> Encoded:
        room = self.tokens_max - frame.specials_count
        counts = (texts[0].count, texts[1].count if len(texts) > 1 else 0)
        fits = sum(counts) <= room
        if not fits and not truncate:
            least = "at least " if max(counts) >= room + CUT_MARGIN_TOKENS else ""
            raise CallerError(
                f"{name} has {least}{sum(counts):,} tokens and {frame.specials_count} special ones; the model accepts "
                f"{self.tokens_max:,} together. Shorten it, or set truncate to have its end cut off",
                field=field,
            )
        kept = counts if fits else longest_first(counts, room)
        row = frame.row(*(text.first[:count] for text, count in zip(texts, kept, strict=False)))
        if not row.ids:
            raise CallerError(f"{name} has no token. Send at least one character", field=field)
        return Encoded(row, truncated=not fits)

    def check(self) -> tuple[Part, ...]:
        """Whether the golden texts still give the ids that were recorded: a changed tokenizers library is seen here."""
        missed = 0
        for golden in self.encoder.texts:
            pairs = None if golden.pair is None else [golden.pair]
            (found,) = self.encode([golden.text], pairs, truncate=True)
            missed += (found.row.ids, found.row.types) != (golden.ids, golden.types)
        return (Part(name=TOKENIZER, checked=len(self.encoder.texts), missed=missed),)

    def record(self, cases: Sequence[tuple[str, str | None]]) -> tuple[EncodedGolden, ...]:
        """What `check` compares with later."""
        goldens = []
        for text, pair in cases:
            (found,) = self.encode([text], None if pair is None else [pair], truncate=True)
            goldens.append(EncodedGolden(text=text, pair=pair, ids=found.row.ids, types=found.row.types))
        return tuple(goldens)


def _name(field: str, index: int) -> str:
    """What entry `index` of a request's `field`, a plural, is called."""
    return f"{field.removesuffix('s')} {index}"


def longest_first(counts: tuple[int, int], room: int) -> tuple[int, int]:
    """How many tokens of each text are kept: the longer gives first, until both are equal (tokenizers' rule).

    Of an odd room the longer keeps one more; of two equal ones the second.
    """
    first, second = counts
    assert first + second >= room, "what fits is not cut"
    shorter = min(first, second, room // 2)
    return (room - shorter, shorter) if first > second else (shorter, room - shorter)
