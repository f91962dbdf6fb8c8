"""generate, count-tokens, models: one call to the Inference service each."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from resident.v1 import inference_pb2
from residentd.cli import answers, formats
from residentd.cli.channels import UNARY_S_MAX, inference_stub
from residentd.cli.command import Session
from residentd.cli.exits import reading_stdin, usage
from residentd.cli.options import SamplingOptions
from residentd.cli.output import Output, fields_of
from residentd.cli.requests import chat_request, count_request, message, prompt_request
from residentd.cli.tables import models_table

PROMPT_BYTES_MAX = 64 << 20  # what is read from stdin; the daemon's own limit is configured, and lower
GENERATION_S_MAX = 86_400.0

PromptArgument = Annotated[str, typer.Argument(metavar="PROMPT", help="The text, or - to read it from stdin.")]
ModelOption = Annotated[
    str,
    typer.Option("--model", "-m", metavar="NAME[@N]", help="The model. May be left out where exactly one is served."),
]
TimeoutOption = Annotated[
    float, typer.Option(min=0.001, max=GENERATION_S_MAX, metavar="SECONDS", help="The deadline of one answer.")
]


def generate(
    session: Session,
    *,
    prompt: PromptArgument,
    model: ModelOption = "",
    chat: Annotated[
        bool, typer.Option("--chat", "-c", help="Ask through the model's chat template, as a user's message.")
    ] = False,
    system: Annotated[str, typer.Option(metavar="TEXT", help="The system message of --chat, which it implies.")] = "",
    stats: Annotated[bool, typer.Option("--stats", help="Say on stderr how many tokens came how fast.")] = False,
    timeout: TimeoutOption = 3600.0,
    sampling: SamplingOptions,
) -> None:
    """Stream the model's continuation of PROMPT, or with --chat its answer to it."""
    output = session.output
    text = _prompt(prompt)
    if chat or system:
        messages = [message("system", system)] if system else []
        request = chat_request(model, [*messages, message("user", text)], sampling)
    else:
        request = prompt_request(model, text, sampling)
    answer = answers.Answer()
    with inference_stub(session.target()) as inference:
        call = inference.Generate(request, timeout=timeout)
        try:
            answers.stream(output, call, answer)
        finally:
            call.cancel()  # without effect on a call that has ended
            _end_line(output, answer)
    if output.as_json:
        return
    if sampling.logprobs is not None:
        output.out.print(answers.logprobs_table(answer.logprobs))
    if stats or (output.out.is_terminal and output.err.is_terminal):
        output.note(answers.summary(answer))


def _end_line(output: Output, answer: answers.Answer) -> None:
    """On a terminal the next thing starts on its own line; a file gets the answer's bytes and no others."""
    if output.out.is_terminal and not output.as_json and answer.text and not answer.text.endswith("\n"):
        output.text("\n")


def _prompt(argument: str) -> str:
    if argument != "-":
        return argument
    with reading_stdin():
        data = sys.stdin.buffer.read(PROMPT_BYTES_MAX + 1)
    if len(data) > PROMPT_BYTES_MAX:
        raise usage(f"stdin has more than {PROMPT_BYTES_MAX:,} bytes, the most that is read as a prompt. Send less")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise usage(f"stdin is not UTF-8 (byte {error.start:,}). Convert it first, for example with iconv") from error


def count_tokens(
    session: Session,
    *,
    prompt: PromptArgument,
    model: ModelOption = "",
    chat: Annotated[
        bool, typer.Option("--chat", "-c", help="Count it as a user's message, with the chat template around it.")
    ] = False,
) -> None:
    """Count the tokens of PROMPT without generating; --json lists them."""
    output = session.output
    request = count_request(model, _prompt(prompt), chat=chat)
    with inference_stub(session.target()) as inference:
        answer = inference.CountTokens(request, timeout=UNARY_S_MAX)
    if output.as_json:
        output.emit(fields_of(answer))
    else:
        output.line(f"{formats.plural(answer.tokens, 'token')} of {answer.context:,}")


def models(session: Session) -> None:
    """List the models that requests can name, as the Inference service tells every caller."""
    output = session.output
    with inference_stub(session.target()) as inference:
        answer = inference.ListModels(inference_pb2.ListModelsRequest(), timeout=UNARY_S_MAX)
    if output.as_json:
        output.emit({"models": [fields_of(model) for model in answer.models]})
    else:
        output.out.print(models_table(answer.models, columns=output.out.width))
