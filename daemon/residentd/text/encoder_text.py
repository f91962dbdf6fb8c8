"""Texts and pairs of texts to rows of token ids, as an encoder was trained on them: special tokens, prompts, length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tokenizers

from residentd.calls import TextRow
from residentd.errors import CallerError
from residentd.models import manifest
from residentd.models.checks import TOKENIZER, Part
from residentd.models.encoder import EncodedGolden, Encoder
from residentd.text.model import read
from residentd.text.tokenizer import Tokenizer


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
        self, texts: Sequence[str], pairs: Sequence[str] | None = None, *, prompt: str = "", truncate: bool = False
    ) -> list[Encoded]:
        """A row for each of `texts`, or for each with its partner of `pairs`. Raises CallerError.

        Control tokens in a text are text. What does not fit is refused, or with `truncate` cut at its end.
        """
        first = self.tokenizer.encodings([self._written(prompt + text) for text in texts])
        second = None if pairs is None else self.tokenizer.encodings([self._written(text) for text in pairs])
        partners = second if second is not None else [None] * len(first)
        room = self.tokens_max - self.tokenizer.inner.num_special_tokens_to_add(second is not None)
        return [
            self._row(index, one, other, room, truncate=truncate)
            for index, (one, other) in enumerate(zip(first, partners, strict=True))
        ]

    def _written(self, text: str) -> str:
        return text.lower() if self.encoder.lowercase else text

    def _row(
        self,
        index: int,
        first: tokenizers.Encoding,
        second: tokenizers.Encoding | None,
        room: int,
        *,
        truncate: bool,
    ) -> Encoded:
        counts = (len(first.ids), 0 if second is None else len(second.ids))
        fits = sum(counts) <= room
        if not fits and not truncate:
            special = self.tokens_max - room
            raise CallerError(
                f"text {index} has {sum(counts):,} tokens and {special} special ones; the model accepts "
                f"{self.tokens_max:,} together. Shorten it, or set truncate to have its end cut off",
                field="texts",
            )
        if not fits:
            kept = longest_first(counts, room)
            first.truncate(kept[0])
            if second is not None:
                second.truncate(kept[1])
        whole = self.tokenizer.inner.post_process(first, second)
        if not whole.ids:
            raise CallerError(f"text {index} has no token. Send at least one character", field="texts")
        types = tuple(whole.type_ids)
        return Encoded(TextRow(tuple(whole.ids), types if any(types) else ()), truncated=not fits)

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


def longest_first(counts: tuple[int, int], room: int) -> tuple[int, int]:
    """How many tokens of each text are kept: the longer gives first, until both are equal (transformers' rule)."""
    first, second = counts
    surplus = first + second - room
    assert surplus >= 0, "what fits is not cut"
    if first > second:
        given = min(surplus, first - second)
        first, surplus = first - given, surplus - given
    elif second > first:
        given = min(surplus, second - first)
        second, surplus = second - given, surplus - given
    # Equal now, or nothing left to give. The first text gives the odd one.
    return first - (surplus + 1) // 2, second - surplus // 2
