"""chat: a conversation in the terminal. Ctrl-C stops an answer, never the chat."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated

import typer
from rich.text import Text

from resident.v1 import inference_pb2_grpc
from resident.v1.inference_pb2 import Message
from residentd.cli import answers
from residentd.cli.channels import failing_plainly, inference_stub
from residentd.cli.command import Session
from residentd.cli.exits import Failure, reading_stdin, usage
from residentd.cli.generate import ModelOption, TimeoutOption
from residentd.cli.options import SamplingOptions
from residentd.cli.output import Output, report
from residentd.cli.requests import chat_request, message

PROMPT = "> "
LINE_BYTES_MAX = 16 << 20
HELP = "/reset starts over · /exit or Ctrl-D leaves · Ctrl-C stops an answer"


@dataclass(slots=True)
class Conversation:
    """The messages so far; `system`, if any, survives a reset."""

    system: str
    turns: list[Message] = field(default_factory=list)

    def messages(self) -> list[Message]:
        first = [message("system", self.system)] if self.system else []
        return [*first, *self.turns]

    def ask(self, text: str) -> None:
        self.turns.append(message("user", text))

    def keep(self, answer: str) -> None:
        """Add what the model said. Without an answer the question goes as well: roles must alternate."""
        if answer:
            self.turns.append(message("assistant", answer))
        else:
            self.turns.pop()

    def reset(self) -> None:
        self.turns.clear()


def chat(
    session: Session,
    *,
    model: ModelOption = "",
    system: Annotated[str, typer.Option("--system", "-s", metavar="TEXT", help="The system message.")] = "",
    timeout: TimeoutOption = 3600.0,
    sampling: SamplingOptions,
) -> None:
    """Talk with a model. Reads a message a line; where stdin is not a terminal, without any prompt.

    Commands: /reset forgets the conversation, /exit leaves, /help.
    """
    output = session.output
    conversation = Conversation(system)
    asking = sys.stdin.isatty() and not output.as_json
    if asking:
        importlib.import_module("readline")  # line editing and history for input()
        output.note(HELP)
    with inference_stub(session.target()) as inference:
        for line in _lines(output, asking=asking):
            if line.startswith("/"):
                if not _command(output, conversation, line):
                    return
                continue
            conversation.ask(line)
            _turn(_Turn(output, inference, model, sampling, timeout, asking), conversation)


@dataclass(frozen=True, slots=True)
class _Turn:
    """What one exchange needs."""

    output: Output
    inference: inference_pb2_grpc.InferenceStub
    model: str
    sampling: SamplingOptions
    timeout_s: float
    asking: bool


def _turn(turn: _Turn, conversation: Conversation) -> None:
    """Stream the answer to the last question. Raises Failure only where nobody is there to ask again."""
    output, answer = turn.output, answers.Answer()
    request = chat_request(turn.model, conversation.messages(), turn.sampling)
    call = turn.inference.Generate(request, timeout=turn.timeout_s)
    stopped, failure = False, None
    try:
        with failing_plainly():
            answers.stream(output, call, answer)
    except KeyboardInterrupt:
        if not turn.asking:
            raise
        stopped = True
    except Failure as error:
        if not turn.asking:
            raise
        failure = error
    finally:
        call.cancel()  # without effect on a call that has ended
        if not output.as_json and (answer.text or stopped):
            output.text("\n")
    conversation.keep(answer.text)
    if failure is not None:
        report(output, failure)
    elif turn.asking:
        output.note("stopped" if stopped else answers.summary(answer))


def _command(output: Output, conversation: Conversation, line: str) -> bool:
    """Obey `line`; False to leave."""
    word = line.split(maxsplit=1)[0]
    if word in {"/exit", "/quit"}:
        return False
    if word == "/reset":
        conversation.reset()
        output.note("the conversation is forgotten")
    elif word == "/help":
        output.note(HELP)
    else:
        output.note(f"{word} is not a command: {HELP}")
    return True


def _lines(output: Output, *, asking: bool) -> Iterator[str]:
    """The messages as they are typed, or the lines of stdin; blank ones are left out."""
    if not asking:
        yield from _piped_lines()
        return
    while True:
        try:
            line = _typed(output)
        except EOFError:
            output.say(Text())
            return
        except KeyboardInterrupt:
            output.say(Text())
            output.note(HELP)
            continue
        if line.strip():
            yield line


def _typed(output: Output) -> str:
    if output.out.is_terminal:
        return input(PROMPT)
    output.say(Text(PROMPT), end="")  # the answers go to a file; the prompt must not
    return input()


def _piped_lines() -> Iterator[str]:
    while True:
        with reading_stdin():
            data = sys.stdin.buffer.readline(LINE_BYTES_MAX + 1)
        if not data:
            return
        if len(data) > LINE_BYTES_MAX:
            raise usage(f"a line has more than {LINE_BYTES_MAX:,} bytes, the most that one message takes. Shorten it")
        try:
            line = data.decode().rstrip("\r\n")
        except UnicodeDecodeError as error:
            raise usage(f"stdin is not UTF-8 (byte {error.start:,} of a line). Convert it first") from error
        if line.strip():
            yield line
