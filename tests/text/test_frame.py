"""What is written around texts, against the library's own post-processors."""

from __future__ import annotations

import json
from typing import Any

import pytest
import tokenizers
from tokenizers import processors

from residentd.calls import TextRow
from residentd.errors import OperatorError
from residentd.text.frame import frame_of
from residentd.text.tokenizer import Tokenizer, parts_of
from support.installed import EXPORTS

BEGIN, END = ("<s>", 1), ("</s>", 2)
PROCESSORS: dict[str, Any] = {
    "none": None,
    "bytes": processors.ByteLevel(trim_offsets=True),
    "bert": processors.BertProcessing(END, BEGIN),
    "roberta": processors.RobertaProcessing(END, BEGIN),
    "template": processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> </s> $B:1 </s>:1", special_tokens=[BEGIN, END]
    ),
    "swapped": processors.TemplateProcessing(
        single="$A </s>:3", pair="$B:1 <s>:2 $A </s>:3", special_tokens=[BEGIN, END]
    ),
    "several": processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(single="<s> $A", pair="<s> $A $B:1", special_tokens=[BEGIN]),
        ]
    ),
}
TEXTS = ("the river", "x" * 40 + "?", "a", "")


def tokenizer_with(processor: Any) -> tokenizers.Tokenizer:
    inner = tokenizers.Tokenizer.from_file(str(EXPORTS / "smollm2" / "tokenizer.json"))
    if processor is None:
        description = json.loads(inner.to_str()) | {"post_processor": None}
        return tokenizers.Tokenizer.from_str(json.dumps(description))
    inner.post_processor = processor
    return inner


def row_of(whole: tokenizers.Encoding) -> TextRow:
    return TextRow(tuple(whole.ids), tuple(whole.type_ids) if any(whole.type_ids) else ())


@pytest.mark.parametrize("name", PROCESSORS)
def test_rows_are_those_of_the_library(name: str) -> None:
    """Ids and types of single texts and of pairs, empty ones included, and how many tokens are added."""
    inner = tokenizer_with(PROCESSORS[name])
    bare = tokenizer_with(None)
    example, *encodings = [bare.encode(text, add_special_tokens=False) for text in ("Hello 1", *TEXTS)]
    single, pair = frame_of(inner, example), frame_of(inner, example, example)
    assert single.specials_count == inner.num_special_tokens_to_add(is_pair=False)
    assert pair.specials_count == inner.num_special_tokens_to_add(is_pair=True)
    for first in encodings:
        assert single.row(first.ids) == row_of(inner.post_process(first))
        for second in encodings:
            assert pair.row(first.ids, second.ids) == row_of(inner.post_process(first, second))


@pytest.mark.parametrize("single", ["$A $A", "<s> $A </s> $A"])
def test_what_writes_a_text_twice_is_refused(single: str) -> None:
    """Its rows would be longer than was counted."""
    inner = tokenizer_with(processors.TemplateProcessing(single=single, pair="$A $B", special_tokens=[BEGIN, END]))
    with pytest.raises(OperatorError, match="post-processor does more than to write special tokens"):
        frame_of(inner, tokenizer_with(None).encode("Hello 1", add_special_tokens=False))


def test_a_tokenizer_that_makes_no_token_of_anything_has_no_frame() -> None:
    """The usual example may be unknown to it; then a name of its own is one, and without such it is refused."""
    assert Tokenizer(with_vocabulary({"z": 0})).frame.row((0,)) == TextRow((0,))
    with pytest.raises(OperatorError, match="makes no token of 'Hello 123"):
        _ = Tokenizer(with_vocabulary({})).frame


def with_vocabulary(vocabulary: dict[str, int]) -> bytes:
    """A tokenizer.json that drops what it does not know."""
    parts = ("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor", "decoder")
    model = {"type": "BPE", "vocab": vocabulary, "merges": []}
    return json.dumps(dict.fromkeys(parts) | {"version": "1.0", "added_tokens": [], "model": model}).encode()


@pytest.mark.parametrize(
    ("texts", "parts"),
    [
        ([], []),
        (["abc", "d"], [["abc", "d"]]),
        (["abc", "de"], [["abc"], ["de"]]),
        (["abcdefgh", "i"], [["abcdefgh"], ["i"]]),
        (["", "", "abcd", ""], [["", "", "abcd", ""]]),
    ],
)
def test_texts_are_encoded_in_parts(texts: list[str], parts: list[list[str]]) -> None:
    """Four characters at once, or one text that is longer."""
    assert list(parts_of(iter(texts), 4)) == parts
