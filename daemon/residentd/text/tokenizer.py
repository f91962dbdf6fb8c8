"""Text to token ids, with what the caller wrote kept apart from the model's control tokens.

Two instances of one tokenizer.json share all ids. The `open` one reads control tokens wherever their text stands, as
transformers does. In the `sealed` one every control token is named by a secret marker instead, in the vocabulary too:
no text can produce its id, and the places where a template wrote one are handed over by that marker. Both encode the
whole text in one go, so merges across the borders of messages are those that the model was trained with.
"""

from __future__ import annotations

import contextlib
import functools
import json
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, Final

import tokenizers
from tokenizers import pre_tokenizers
from tokenizers.models import WordLevel

from residentd.errors import CallerError, OperatorError
from residentd.text.fit import bytes_per_token_max
from residentd.text.frame import Frame, frame_of
from residentd.text.growth import GROWTH_MAX, growth
from residentd.text.limits import TOKENIZER_BYTES_MAX
from residentd.text.trace import Span, Spans

WITHOUT_LOCK_CHARS_MIN: Final = 4096
"""A text from this length on is encoded without Python's lock, in a thread of the library: the hop is worth it then."""

AT_ONCE_CHARS_MAX: Final = 1 << 18
"""Of texts that are encoded together, on all cores: tens of megabytes while they are."""

EXAMPLES_MAX: Final = 1000

PANIC: Final = "PanicException"  # of pyo3, which gives the type no importable name

TRIED_OUT: Final = "Hello 123,\n\u00e9\U0001f600"

BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
SPACE_MARK = "▁"


@dataclass(frozen=True, slots=True)
class Control:
    """Where a control token's text stands."""

    start: int
    end: int
    id: int


@dataclass(frozen=True, slots=True)
class Ids:
    """The first ids of a text, and how many it has."""

    first: tuple[int, ...]
    count: int


class Tokenizer:
    """A tokenizer.json, loaded. Immutable; safe to use from several threads."""

    def __init__(self, data: bytes) -> None:
        """Raise OperatorError if `data` is not a tokenizer.json that can be kept safe."""
        if len(data) > TOKENIZER_BYTES_MAX:
            raise OperatorError(
                f"the tokenizer has {len(data):,} bytes; at most {TOKENIZER_BYTES_MAX:,} are read. "
                "Install the model with its original tokenizer"
            )
        try:
            self._load(data)
        except OperatorError:
            raise
        except Exception as error:  # tokenizers raises bare Exception, and the file may hold anything anywhere
            raise OperatorError(
                f"the tokenizer cannot be read ({type(error).__name__}: {error}). Install the model again"
            ) from error

    def _load(self, data: bytes) -> None:
        description = json.loads(data)
        check_growth(description)
        check_merges(description["model"])
        self.inner = tokenizers.Tokenizer.from_buffer(data)
        description["added_tokens"] = description.get("added_tokens") or []
        quieten(self.inner)
        self.decoder: Mapping[str, Any] | None = description.get("decoder")
        added = self.inner.get_added_tokens_decoder()
        self.special_ids = frozenset(index for index, token in added.items() if token.special)
        names = [token["content"] for token in description["added_tokens"] if is_control(token)]
        self._ids = {name: self._id_of(name) for name in names}
        self._unknown_id = unknown_id(self.inner, description["model"])
        nonce = secrets.token_hex(16)
        self._markers = {name: f"\ue000{nonce}{index:x}\ue001" for index, name in enumerate(names)}
        self._sealed = sealed(description, self._markers)
        self._finder = finder(description, names)
        self._check_sealed()
        normaliser = self.inner.normalizer
        self.bytes_per_token_max = bytes_per_token_max(
            description,
            byte_chars=pre_tokenizers.ByteLevel.alphabet(),
            normalise=str if normaliser is None else normaliser.normalize_str,
        )
        for specials in (False, True):
            self.decode(self.encode(TRIED_OUT, specials=specials))

    def _id_of(self, name: str) -> int:
        found = self.inner.token_to_id(name)
        if found is None:
            raise OperatorError(
                f"the tokenizer has no number for its added token {name!r}. "
                "Save it again with a current transformers, and install again"
            )
        return found

    def _check_sealed(self) -> None:
        for name, marker in self._markers.items():
            if self._sealed.token_to_id(marker) != self._ids[name]:
                raise OperatorError(
                    f"the tokenizer gives its added token {name!r} another number when it is renamed. "
                    "Save it again with a current transformers, and install again"
                )

    @property
    def control_ids(self) -> Mapping[str, int]:
        """Every control token: special ones, and added ones that look like markup rather than text."""
        return dict(self._ids)

    def encode(self, text: str, *, specials: bool) -> list[int]:
        """Ids of `text`; with `specials` its control tokens are read as such, else they are plain text. Adds no BOS."""
        return encoded(self.inner if specials else self._sealed, text).ids

    def ids_of(self, texts: Iterable[str], ids_max: int) -> Iterator[Ids]:
        """Of each of `texts`, all of it plain text, without what a post-processor adds. Without Python's lock.

        An Encoding is some hundred bytes a token: those of a few texts are held at a time.
        """
        for part in parts_of(texts, AT_ONCE_CHARS_MAX):
            with refusing():
                encodings = self._sealed.encode_batch(part, add_special_tokens=False)
            for encoding in encodings:
                ids = encoding.ids
                yield Ids(tuple(ids[:ids_max]), len(ids))

    @functools.cached_property
    def frame(self) -> Frame:
        """Of a row with one text. Raises OperatorError."""
        return frame_of(self.inner, self._example())

    @functools.cached_property
    def pair_frame(self) -> Frame:
        """Of a row with two texts. Raises OperatorError."""
        return frame_of(self.inner, self._example(), self._example())

    def _example(self) -> tokenizers.Encoding:
        names = islice(self.inner.get_vocab(), EXAMPLES_MAX)
        found = (encoded(self._sealed, text) for text in chain([TRIED_OUT], names))
        example = next((encoding for encoding in found if encoding.ids), None)
        if example is None:
            raise OperatorError(
                f"the tokenizer makes no token of {TRIED_OUT!r}, nor of the names of its own. Install the model with "
                "its original tokenizer"
            )
        return example

    def encode_mixed(self, text: str, user_spans: Spans) -> list[int]:
        """Ids of `text`, reading as control tokens only what stands wholly outside `user_spans`.

        Equal to `encode(text, specials=True)` unless that would read something else as a control token as well.
        """
        controls = self.find_controls(text)
        places = [(control.start, control.end) for control in controls]
        if not overlap(places, user_spans):
            encoding = encoded(self.inner, text)
            if self._only(encoding, controls):
                return encoding.ids
        return encoded(self._sealed, self._marked(text, user_spans)).ids

    def tokens_min(self, text_bytes: int) -> int:
        """How many tokens a text of so many bytes (UTF-8) has at least, control tokens apart; 1 where none is known."""
        return 1 if self.bytes_per_token_max is None else -(-text_bytes // self.bytes_per_token_max)

    def find_controls(self, text: str) -> list[Control]:
        """The control tokens that stand in `text`: leftmost first, longest first, as tokenizers reads them."""
        if not self._ids:
            return []
        encoding = encoded(self._finder, text)
        places = zip(encoding.ids, encoding.offsets, strict=True)
        return [Control(start, end, self._ids[text[start:end]]) for index, (start, end) in places if index]

    def decode(self, ids: Sequence[int]) -> str:
        """The whole text of `ids` without special tokens: what a Detokenizer's deltas add up to.

        tokenizers 0.23 itself writes special tokens that are marked as normalised.
        """
        return self.inner.decode([index for index in ids if index not in self.special_ids], skip_special_tokens=True)

    def _only(self, encoding: tokenizers.Encoding, controls: Sequence[Control]) -> bool:
        """Whether each control id of `encoding` stands where one of `controls` does."""
        expected = iter(controls)
        known = set(self._ids.values()) - {self._unknown_id}
        offsets = encoding.offsets
        for index, token in enumerate(encoding.ids):
            if token in known:
                start, end = offsets[index]  # with the blanks that an lstrip or rstrip token takes in
                if not any(token == c.id and start <= c.start and c.end <= end for c in expected):
                    return False
        return True

    def _marked(self, text: str, user_spans: Spans) -> str:
        """`text` with the marker of each control token that stands in a stretch the caller did not write."""
        names = {index: name for name, index in self._ids.items()}
        parts: list[str] = []
        written = 0
        for start, end in gaps(user_spans, len(text)):
            for control in self.find_controls(text[start:end]):
                parts += (text[written : start + control.start], self._markers[names[control.id]])
                written = start + control.end
        return "".join((*parts, text[written:]))


def is_control(token: Mapping[str, Any]) -> bool:
    """Whether an added token is for control: what a caller's text must never become.

    Tokens that are not marked special are taken for text when they are words, runs of blanks or one character (Gemma
    and GPT-NeoX add line breaks and indents, some models add letters). `<think>` or `<|User|>` is control, special or
    not. Byte tokens are neither.
    """
    content = token["content"]
    if BYTE_TOKEN.fullmatch(content) or not content:
        return False
    wordlike = all(char.isalnum() or char.isspace() or char == SPACE_MARK for char in content)
    return bool(token["special"]) or not (wordlike or len(content) == 1)


def check_merges(model: Mapping[str, Any]) -> None:
    """Raise OperatorError for merges that tokenizers 0.23 would end the process over: it cuts the prefix off unseen."""
    prefix = model.get("continuing_subword_prefix")
    if not (isinstance(prefix, str) and prefix):
        return
    for merge in model.get("merges") or ():
        _, right = merge.split(" ") if isinstance(merge, str) else merge
        if not right.startswith(prefix):
            raise OperatorError(
                f"the tokenizer has a merge with {right!r}, which does not begin with its prefix {prefix!r}. "
                "Save it again with a current transformers, and install again"
            )


def check_growth(description: Mapping[str, Any]) -> None:
    """Before the library is given a text: it cannot be stopped. Raises OperatorError."""
    for name in ("normalizer", "decoder"):
        if growth(description.get(name)) > GROWTH_MAX:
            raise OperatorError(
                f"the tokenizer's {name} may make more than {GROWTH_MAX} characters of one. "
                "Install the model with its original tokenizer"
            )


def quieten(inner: tokenizers.Tokenizer) -> None:
    """A prompt is never cut or padded silently, whatever the file says."""
    inner.no_truncation()
    inner.no_padding()


def encoded(inner: tokenizers.Tokenizer, text: str) -> tokenizers.Encoding:
    with refusing():
        if len(text) < WITHOUT_LOCK_CHARS_MIN:
            return inner.encode(text, add_special_tokens=False)
        # encode holds Python's lock to the end, 1.2 s for 2 MB; encode_batch lets it go (tokenizers 0.23).
        return inner.encode_batch([text], add_special_tokens=False)[0]


@contextlib.contextmanager
def refusing() -> Iterator[None]:
    """A text that the library cannot encode is the caller's: CallerError."""
    try:
        yield
    except TypeError as error:  # lone surrogates
        raise CallerError("the text is not valid Unicode: it holds half of a surrogate pair. Send UTF-8") from error
    except BaseException as error:
        # What Rust calls a panic is no Exception in Python. A pattern that takes too long to search for is one.
        if type(error).__name__ != PANIC:
            raise
        raise CallerError(f"the model's tokenizer gives up on this text ({error}). Send another one") from error


def parts_of(texts: Iterable[str], chars_max: int) -> Iterator[list[str]]:
    """`texts` in their order, in parts of at most `chars_max` characters; a longer one is a part by itself."""
    part: list[str] = []
    chars = 0
    for text in texts:
        if part and chars + len(text) > chars_max:
            yield part
            part, chars = [], 0
        part.append(text)
        chars += len(text)
    if part:
        yield part


def unknown_id(inner: tokenizers.Tokenizer, model: Mapping[str, Any]) -> int | None:
    """The id that the model itself gives to text it has no token for."""
    if isinstance(model.get("unk_id"), int):
        return int(model["unk_id"])
    name = model.get("unk_token")
    return inner.token_to_id(name) if isinstance(name, str) else None


def sealed(description: Mapping[str, Any], markers: Mapping[str, str]) -> tokenizers.Tokenizer:
    """The tokenizer of `description` with each name in `markers` replaced by its marker, ids unchanged."""
    added = [
        token
        | {"content": markers.get(token["content"], token["content"])}
        | ({"normalized": False, "single_word": False} if token["content"] in markers else {})
        for token in description["added_tokens"]
        if not BYTE_TOKEN.fullmatch(token["content"])
    ]
    changed = {
        **description,
        "added_tokens": added,
        "model": renamed_model(description["model"], markers),
        "post_processor": None,
    }
    inner = tokenizers.Tokenizer.from_str(json.dumps(changed))
    quieten(inner)
    return inner


def renamed_model(model: Mapping[str, Any], markers: Mapping[str, str]) -> dict[str, Any]:
    """`model` with each name in `markers` replaced, and without the merges that would make one of them."""
    changed = dict(model)
    vocabulary = model["vocab"]
    if isinstance(vocabulary, Mapping):
        changed["vocab"] = {markers.get(name, name): index for name, index in vocabulary.items()}
    else:  # Unigram: [name, score], the id is the place
        changed["vocab"] = [[markers.get(name, name), score] for name, score in vocabulary]
    if isinstance(model.get("unk_token"), str):
        changed["unk_token"] = markers.get(model["unk_token"], model["unk_token"])
    if "merges" in model:
        changed["merges"] = [merge for merge in model["merges"] if not merges_into(merge, markers)]
    return changed


def merges_into(merge: str | Sequence[str], names: Mapping[str, str]) -> bool:
    left, right = merge.split(" ") if isinstance(merge, str) else merge
    return left + right in names or left in names or right in names


def finder(description: Mapping[str, Any], names: Sequence[str]) -> tokenizers.Tokenizer:
    """A tokenizer that knows nothing but `names`: everything between them is id 0."""
    inner = tokenizers.Tokenizer(WordLevel({"": 0}, unk_token=""))
    flags = {token["content"]: token["single_word"] for token in description["added_tokens"]}
    inner.add_tokens([tokenizers.AddedToken(name, single_word=flags[name], normalized=False) for name in names])
    return inner


def overlap(left: Sequence[Span], right: Sequence[Span]) -> bool:
    """Whether a span of `left` shares a character with one of `right`. Both ascend."""
    waiting = iter(right)
    span = next(waiting, None)
    for start, end in left:
        while span is not None and span[1] <= start:
            span = next(waiting, None)
        if span is not None and span[0] < end:
            return True
    return False


def gaps(spans: Spans, length: int) -> list[Span]:
    """What lies between `spans` in a text of `length` characters."""
    edges = [0, *chain.from_iterable(spans), length]
    return [(start, end) for start, end in zip(edges[::2], edges[1::2], strict=True) if start < end]
