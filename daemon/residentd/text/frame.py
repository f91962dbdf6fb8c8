"""What a tokenizer's post-processor writes around one text or two, learnt from one example and then put around ids.

The library's own takes whole encodings. One that was cut keeps what was cut off, and two of those are put together in
every combination: 100 kB of text beside 128 short ones took 20 s and 1 GB (tokenizers 0.23, 2026-12).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import tokenizers

from residentd.calls import TextRow
from residentd.errors import OperatorError


@dataclass(frozen=True, slots=True)
class Piece:
    """A stretch of a row: special tokens, or where `text` is a number the ids of that text. All have one type."""

    text: int | None
    ids: tuple[int, ...]
    type: int


@dataclass(frozen=True, slots=True)
class Frame:
    """The pieces of a row in their order."""

    pieces: tuple[Piece, ...]

    @property
    def specials_count(self) -> int:
        return sum(len(piece.ids) for piece in self.pieces if piece.text is None)

    def row(self, *texts: Sequence[int]) -> TextRow:
        """The row of as many texts, given as ids, as the frame was learnt from."""
        ids: list[int] = []
        types: list[int] = []
        for piece in self.pieces:
            part = piece.ids if piece.text is None else texts[piece.text]
            ids += part
            types += (piece.type,) * len(part)
        return TextRow(tuple(ids), tuple(types) if any(types) else ())


def frame_of(
    inner: tokenizers.Tokenizer, first: tokenizers.Encoding, second: tokenizers.Encoding | None = None
) -> Frame:
    """What `inner` writes around one or two texts, given as examples with at least one token each.

    The examples come of a tokenizer without a post-processor: one that has seen a text calls it the first of a row for
    ever (tokenizers 0.23). Raises OperatorError for what is no frame, as where a text is written twice.
    """
    whole = inner.post_process(first, second)
    places = zip(whole.sequence_ids, whole.type_ids, whole.ids, strict=True)
    pieces = []
    for (text, kind), part in groupby(places, key=lambda place: place[:2]):
        ids = tuple(token for _, _, token in part)
        pieces.append(Piece(text, ids if text is None else (), kind))
    frame = Frame(tuple(pieces))
    examples = [example.ids for example in (first, second) if example is not None]
    written = sorted(piece.text for piece in pieces if piece.text is not None)
    is_frame = (
        written == list(range(len(examples)))
        and frame.specials_count == sum(whole.special_tokens_mask)
        and frame.row(*examples) == TextRow(tuple(whole.ids), tuple(whole.type_ids) if any(whole.type_ids) else ())
    )
    if not is_frame:
        raise OperatorError(
            "the tokenizer's post-processor does more than to write special tokens before and after each text. Save it "
            "again with a current transformers, and install again"
        )
    return frame
