"""Everything textual of one loaded model version: prompts to ids, ids to text."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from residentd.errors import CallerError, StoreError
from residentd.models import manifest
from residentd.text.chat import ChatTemplate
from residentd.text.detokenizer import Detokenizer, DetokenizerTable, table_for
from residentd.text.limits import PROMPT_CHARS_CEILING
from residentd.text.stops import StopMatcher, StopSet, stop_set
from residentd.text.tokenizer import Tokenizer
from residentd.types import ChatMessage


@dataclass(frozen=True, slots=True)
class TextDelta:
    """What a batch of tokens adds to the answer.

    `stopped` is the stop string that ended it, if one did. `tokens_used` of the batch's tokens belong to the answer:
    all, or those up to and including the one that completed the stop string.
    """

    text: str
    stopped: str | None
    tokens_used: int


class TextStream:
    """The text of one answer: ids to text, with stop strings cut off. Owned by its request."""

    __slots__ = ("_detokenizer", "_matcher", "_stopped")

    def __init__(self, detokenizer: Detokenizer, stops: StopSet) -> None:
        self._detokenizer = detokenizer
        self._matcher = StopMatcher(stops) if stops.stops else None
        self._stopped = False

    def push(self, token_ids: Sequence[int]) -> TextDelta:
        """Take the tokens of one event batch. After a stop string nothing more comes, and no token is used."""
        if self._matcher is None:
            return TextDelta(self._detokenizer.push(token_ids), None, len(token_ids))
        if self._stopped:
            return TextDelta("", None, 0)
        texts = []
        for index, token in enumerate(token_ids):
            text, stopped = self._match(self._matcher, token)
            texts.append(text)
            if stopped is not None:
                self._stopped = True
                return TextDelta("".join(texts), stopped, index + 1)
        return TextDelta("".join(texts), None, len(token_ids))

    def _match(self, matcher: StopMatcher, token: int) -> tuple[str, str | None]:
        """One token. A match is seen as soon as the text so far holds it, held-back bytes included."""
        text = self._detokenizer.push((token,))
        pending = self._detokenizer.pending()
        if pending and matcher.would_match(text + pending):
            text += pending
        return matcher.push(text)

    def finish(self) -> TextDelta:
        """The last token has been pushed: what was held back."""
        if self._matcher is None:
            return TextDelta(self._detokenizer.flush(), None, 0)
        if self._stopped:
            return TextDelta("", None, 0)
        text, stopped = self._matcher.push(self._detokenizer.flush())
        self._stopped = True
        return TextDelta(text + self._matcher.flush(), stopped, 0)


@dataclass(frozen=True, slots=True)
class TextModel:
    """Tokenizer, chat template, detokenizer table and BOS rule of one version. Safe to use from several threads."""

    tokenizer: Tokenizer
    table: DetokenizerTable
    template: ChatTemplate | None
    bos_id: int | None
    adds_bos: bool

    @classmethod
    def load(
        cls,
        text: manifest.Text,
        directory: Path,
        *,
        now: Callable[[], datetime] = datetime.now,
        clock: Callable[[], float] = time.monotonic,
    ) -> TextModel:
        """Read the files that `text` names in the version's directory. Raises StoreError or OperatorError."""
        tokenizer = Tokenizer(read(directory / text.tokenizer, "tokenizer"))
        template = None
        if text.chat_template is not None:
            source = read(directory / text.chat_template, "chat template").decode(errors="replace")
            variables = {"bos_token": text.bos_token, "eos_token": text.eos_token}
            variables = {name: token for name, token in variables.items() if token}
            template = ChatTemplate(source, variables, now=now, clock=clock)
        return cls(tokenizer, table_for(tokenizer), template, text.bos_id, text.adds_bos)

    def from_completion(self, prompt: str, *, tokens_max: int | None = None) -> tuple[int, ...]:
        """Ids of a plain prompt, all of it text, after one BOS if the model has it. Raises CallerError.

        A prompt that cannot have `tokens_max` tokens or fewer is refused before it is tokenized, where that is known.
        """
        if len(prompt) > PROMPT_CHARS_CEILING:
            raise CallerError(
                f"the prompt has {len(prompt):,} characters; at most {PROMPT_CHARS_CEILING:,} are accepted. Shorten it",
                field="prompt",
            )
        self._check_fits(byte_count(prompt), tokens_max, "prompt")
        ids = self._with_one_bos(self.tokenizer.encode(prompt, specials=False))
        if ids:
            return ids
        if self.bos_id is None:
            raise CallerError(
                "the prompt is empty, and this model has no token to begin with. Send at least one character",
                field="prompt",
            )
        return (self.bos_id,)

    def from_chat(
        self, messages: Sequence[ChatMessage], *, add_generation_prompt: bool = True, tokens_max: int | None = None
    ) -> tuple[int, ...]:
        """Ids of a conversation as the model's template writes it, after exactly one BOS if it has one.

        Control tokens are the template's alone: their text inside a message stays text. Raises CallerError; as
        from_completion does for what cannot have `tokens_max` tokens or fewer.
        """
        if self.template is None:
            raise CallerError("this model has no chat template. Send a prompt instead of messages", field="messages")
        rendered = self.template.render(messages, add_generation_prompt=add_generation_prompt)
        if rendered.exact:
            # What the template wrote may be a BOS too many, which is dropped; what a caller wrote never is.
            text = "".join([rendered.text[start:end] for start, end in rendered.user_spans])
            self._check_fits(byte_count(text), tokens_max, "messages")
            ids = self.tokenizer.encode_mixed(rendered.text, rendered.user_spans)
        else:
            self._check_free_of_controls(messages)
            ids = self.tokenizer.encode(rendered.text, specials=True)
        if not (ids or self.adds_bos):
            raise CallerError(
                "the chat template writes no tokens for these messages. Send a message that is not empty",
                field="messages",
            )
        return self._with_one_bos(ids)

    def stream(self, stops: Sequence[str]) -> TextStream:
        """A new answer's text, ended by the first of `stops`. Raises CallerError."""
        return TextStream(self.table.start(), stop_set(stops))

    def _check_fits(self, text_bytes: int, tokens_max: int | None, field: str) -> None:
        least = self.tokenizer.tokens_min(text_bytes)
        if tokens_max is not None and least > tokens_max:
            raise CallerError(
                f"the prompt has {text_bytes:,} bytes, so at least {least:,} tokens; it cannot fit the context of "
                f"{tokens_max:,} tokens. Shorten it",
                field=field,
            )

    def _with_one_bos(self, ids: list[int]) -> tuple[int, ...]:
        if not self.adds_bos:
            return tuple(ids)
        assert self.bos_id is not None, "the manifest adds a BOS that it does not name"
        start = 0
        while start < len(ids) and ids[start] == self.bos_id:
            start += 1
        return (self.bos_id, *ids[start:])

    def _check_free_of_controls(self, messages: Sequence[ChatMessage]) -> None:
        """Raise CallerError if a message holds a control token that the template cannot be shown to keep apart."""
        for index, message in enumerate(messages):
            if self.tokenizer.find_controls(message.content) or self.tokenizer.find_controls(message.role):
                raise CallerError(
                    f"message {index} contains the text of one of the model's control tokens, and its chat template "
                    "mixes messages with its own text in a way that cannot be kept apart. Take it out of the message",
                    field="messages",
                )


def byte_count(text: str) -> int:
    """Bytes of `text` in UTF-8, half surrogate pairs included: those are refused where the text is encoded."""
    return len(text.encode(errors="surrogatepass"))


def read(path: Path, what: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise StoreError(
            f"the {what} of this version cannot be read ({error.strerror}). Reinstall the version"
        ) from error
