"""Renders a conversation with the model's own chat template, and says which of its characters the caller wrote."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

import jinja2

from residentd.errors import CallerError, OperatorError
from residentd.text.budget import Budget, BudgetError
from residentd.text.limits import (
    MESSAGES_CEILING,
    PROMPT_CHARS_CEILING,
    REASON_CHARS_MAX,
    RENDERED_CHARS_MAX,
    ROLE_CHARS_MAX,
    TEMPLATE_BYTES_MAX,
)
from residentd.text.sandbox import BUDGET_KEY, ChatEnvironment, RaisedByTemplateError
from residentd.text.trace import Spans, Traced, join, plain
from residentd.types import ChatMessage

ROLES: Final = frozenset({"system", "developer", "user", "assistant", "tool", "function", "ipython", "observation"})
"""Roles that a template may build a control token of, such as `<|user|>`. Any other counts as the caller's text."""

REMEDY: Final = "Shorten the conversation, or have the model installed with another chat template"
WRONG_TEMPLATE: Final = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)


@dataclass(frozen=True, slots=True)
class Rendered:
    """`user_spans` are the caller's characters in `text`; not `exact`: they hold text of the template's as well."""

    text: str
    user_spans: Spans
    exact: bool


class ChatTemplate:
    """A compiled chat template. Immutable; safe to use from several threads.

    `variables` are the template's own (bos_token, eos_token). `now` is what strftime_now formats, `clock` counts
    seconds for the rendering's time limit.
    """

    def __init__(
        self, source: str, variables: Mapping[str, str], *, now: Callable[[], datetime], clock: Callable[[], float]
    ) -> None:
        """Raise OperatorError if `source` is no template, or goes past its limits on the shortest conversation."""
        size = len(source.encode())
        if size > TEMPLATE_BYTES_MAX:
            raise OperatorError(
                f"the chat template has {size:,} bytes; at most {TEMPLATE_BYTES_MAX:,} are read. "
                "Install the model with another chat template"
            )
        try:
            self._template = ChatEnvironment().template(source)
        except Exception as error:
            raise OperatorError(
                f"the chat template cannot be compiled ({type(error).__name__}: {error}). Correct it and install again"
            ) from error
        self._variables = dict(variables)
        self._now = now
        self._clock = clock
        self._try_out()

    def _try_out(self) -> None:
        try:
            self._write([ChatMessage("user", "Hello")], self._settings(add_generation_prompt=True), mark=Traced)
        except BudgetError as error:
            raise OperatorError(
                f"the chat template takes {error} for one short message. Install the model with another chat template"
            ) from error
        except WRONG_TEMPLATE:
            pass  # it may ask for other messages

    def at(self, moment: datetime) -> ChatTemplate:
        """The same template at a fixed moment: a date that it writes is then always the same."""
        fixed = copy.copy(self)
        fixed._now = lambda: moment
        return fixed

    def render(self, messages: Sequence[ChatMessage], *, add_generation_prompt: bool = True) -> Rendered:
        """Raise CallerError if the template refuses `messages` or they go past a limit."""
        check_messages(messages)
        settings = self._settings(add_generation_prompt=add_generation_prompt)
        try:
            traced = self._write(messages, settings, mark=Traced)
            text = self._write(messages, settings, mark=plain)
        except RaisedByTemplateError as error:
            raise CallerError(
                f"the chat template refuses these messages: {str(error.message)[:REASON_CHARS_MAX].rstrip('.')}. "
                "Change the messages",
                field="messages",
            ) from error
        except BudgetError as error:
            raise CallerError(
                f"the chat template takes {error} for these messages. {REMEDY}", field="messages"
            ) from error
        except WRONG_TEMPLATE as error:
            raise CallerError(
                f"the chat template cannot write these messages ({type(error).__name__}). "
                "Change their roles or order, or have the model installed with another chat template",
                field="messages",
            ) from error
        spans = traced.spans if isinstance(traced, Traced) else ()
        mixed = isinstance(traced, Traced) and traced.mixed
        return Rendered(text, spans, exact=plain(traced) == text and not mixed)

    def _settings(self, *, add_generation_prompt: bool) -> dict[str, Any]:
        """What transformers passes besides the messages; one moment for both renderings."""
        return {
            "tools": None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            "strftime_now": self._now().strftime,
            **self._variables,
        }

    def _write(
        self, messages: Sequence[ChatMessage], settings: Mapping[str, Any], *, mark: Callable[[str], str]
    ) -> str:
        context = {
            "messages": [
                {
                    "role": message.role if message.role in ROLES else mark(message.role),
                    "content": mark(message.content) if message.content else "",
                }
                for message in messages
            ],
            **settings,
            BUDGET_KEY: Budget.start(self._clock),
        }
        parts, length = [], 0
        for part in self._template.generate(context):
            parts.append(part)
            length += len(part)
            if length > RENDERED_CHARS_MAX:
                raise BudgetError(f"more than {RENDERED_CHARS_MAX:,} characters")
        return join(parts)


def check_messages(messages: Sequence[ChatMessage]) -> None:
    """Raise CallerError unless there are messages, within the limits."""
    if not messages:
        raise CallerError("there are no messages. Send at least one", field="messages")
    if len(messages) > MESSAGES_CEILING:
        raise CallerError(
            f"there are {len(messages):,} messages; at most {MESSAGES_CEILING:,} are accepted. Drop or merge old ones",
            field="messages",
        )
    for index, message in enumerate(messages):
        if not 0 < len(message.role) <= ROLE_CHARS_MAX:
            raise CallerError(
                f"the role of message {index} has {len(message.role):,} characters; 1 to {ROLE_CHARS_MAX} are "
                "accepted. Use system, user or assistant",
                field="messages",
            )
    total = sum(len(message.content) for message in messages)
    if total > PROMPT_CHARS_CEILING:
        raise CallerError(
            f"the messages have {total:,} characters together; at most {PROMPT_CHARS_CEILING:,} are accepted. "
            "Shorten them",
            field="messages",
        )
