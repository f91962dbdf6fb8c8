"""embed, classify, rerank: one call each to a model that answers in one run."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from resident.v1 import inference_pb2
from residentd.cli import formats
from residentd.cli.channels import inference_stub
from residentd.cli.command import Session
from residentd.cli.exits import reading_stdin, usage
from residentd.cli.generate import ModelOption, TimeoutOption
from residentd.cli.output import Output, fields_of, printable
from residentd.cli.requests import UINT32_MAX, checked

STDIN_BYTES_MAX = 64 << 20  # the daemon's own limit is configured, and lower
SHOWN_NUMBERS = 6
SHOWN_CHARACTERS = 60
SIMILARITIES_MAX = 24  # texts of which all pairs are compared on a terminal

TextsArgument = Annotated[list[str], typer.Argument(metavar="TEXT…", help="The texts, or - for the lines of stdin.")]
TruncateOption = Annotated[
    bool, typer.Option("--truncate", help="Cut what is too long at its end, where it would be refused.")
]


def embed(
    session: Session,
    *,
    texts: TextsArgument,
    model: ModelOption = "",
    prompt: Annotated[str, typer.Option(metavar="NAME", help="One of the model's own prompts, such as query.")] = "",
    dimensions: Annotated[int, typer.Option(min=0, max=UINT32_MAX, help="Keep the first N numbers. 0: all.")] = 0,
    truncate: TruncateOption = False,
    timeout: TimeoutOption = 60.0,
) -> None:
    """Embed TEXTs. A person sees how alike they are; --json prints the vectors, a line for each text."""
    output = session.output
    given = _texts(texts)
    request = inference_pb2.EmbedRequest(
        model=model, texts=given, prompt_name=prompt, dimensions=dimensions, truncate=truncate
    )
    with inference_stub(session.target()) as inference:
        answer = inference.Embed(request, timeout=timeout)
    if output.as_json:
        for text, embedding in zip(given, answer.embeddings, strict=True):
            output.emit({"text": text, **fields_of(embedding)})
        return
    output.out.print(_embeddings(given, answer.embeddings))
    _note(output, answer.answered, len(given))


def classify(
    session: Session,
    *,
    texts: TextsArgument,
    model: ModelOption = "",
    pair: Annotated[
        str | None, typer.Option(metavar="TEXT", help="The second text of each, for models that judge two together.")
    ] = None,
    truncate: TruncateOption = False,
    timeout: TimeoutOption = 60.0,
) -> None:
    """Score TEXTs with a classifier; the likeliest label first. --json prints every score and logit."""
    output = session.output
    given = _texts(texts)
    second = None if pair is None else checked(pair)
    items = [inference_pb2.ClassifyRequest.Item(text=text, pair=second) for text in given]
    request = inference_pb2.ClassifyRequest(model=model, items=items, truncate=truncate)
    with inference_stub(session.target()) as inference:
        answer = inference.Classify(request, timeout=timeout)
    if output.as_json:
        for text, found in zip(given, answer.classifications, strict=True):
            scores = dict(zip(answer.labels, fields_of(found)["scores"], strict=True))
            output.emit({"text": text, "labels": scores, **fields_of(found)})
        return
    table = _table("TEXT", "LABEL", ">SCORE", "OTHERS")
    for text, found in zip(given, answer.classifications, strict=True):
        ranked = sorted(zip(answer.labels, found.scores, strict=True), key=lambda entry: -entry[1])
        others = ", ".join(f"{printable(label)} {score:.4f}" for label, score in ranked[1:5])
        table.add_row(_short(text), Text(printable(ranked[0][0]), style="bold"), f"{ranked[0][1]:.4f}", others)
    output.out.print(table)
    _note(output, answer.answered, len(given))


def rerank(
    session: Session,
    *,
    query: Annotated[str, typer.Argument(metavar="QUERY", help="What the documents are to answer.")],
    documents: Annotated[
        list[str], typer.Argument(metavar="DOCUMENT…", help="The documents, or - for the lines of stdin.")
    ],
    model: ModelOption = "",
    top: Annotated[int, typer.Option(min=0, max=UINT32_MAX, help="Only the best N. 0: all.")] = 0,
    truncate: TruncateOption = False,
    timeout: TimeoutOption = 60.0,
) -> None:
    """Order DOCUMENTs by how well they answer QUERY, best first."""
    output = session.output
    given = _texts(documents)
    request = inference_pb2.RerankRequest(
        model=model, query=checked(query), documents=given, top_n=top, truncate=truncate
    )
    with inference_stub(session.target()) as inference:
        answer = inference.Rerank(request, timeout=timeout)
    if output.as_json:
        for ranked in answer.ranked:
            output.emit({**fields_of(ranked), "document": given[ranked.index]})
        return
    table = _table(">RANK", ">SCORE", ">DOCUMENT", "TEXT")
    for rank, ranked in enumerate(answer.ranked, start=1):
        table.add_row(str(rank), f"{ranked.score:.4f}", str(ranked.index + 1), _short(given[ranked.index]))
    output.out.print(table)
    _note(output, answer.answered, len(given))


def _texts(arguments: Sequence[str]) -> list[str]:
    """The arguments, or stdin's lines for a lone -. Raises Failure (usage)."""
    if list(arguments) != ["-"]:
        return [checked(text) for text in arguments]
    with reading_stdin():
        data = sys.stdin.buffer.read(STDIN_BYTES_MAX + 1)
    if len(data) > STDIN_BYTES_MAX:
        raise usage(f"stdin has more than {STDIN_BYTES_MAX:,} bytes, the most that is read. Send less")
    try:
        lines = [line for line in data.decode().splitlines() if line]
    except UnicodeDecodeError as error:
        raise usage(f"stdin is not UTF-8 (byte {error.start:,}). Convert it first, for example with iconv") from error
    if not lines:
        raise usage("stdin has no line with text. Send one text a line")
    return lines


def _embeddings(texts: Sequence[str], embeddings: Sequence[inference_pb2.Embedding]) -> Table:
    """The first numbers of each, and with a few texts every pair's cosine."""
    compare = 1 < len(texts) <= SIMILARITIES_MAX
    numbers = [f">{index}" for index in range(1, len(texts) + 1)] if compare else []
    table = _table(">", "TEXT", ">TOKENS", ">DIMENSIONS", "NUMBERS", *numbers)
    for index, (text, found) in enumerate(zip(texts, embeddings, strict=True)):
        first = ", ".join(f"{number:.3f}" for number in found.values[:SHOWN_NUMBERS])
        cosines = [f"{cosine(found.values, other.values):.3f}" for other in embeddings] if compare else []
        marked = f"{found.tokens:,}{' (cut)' if found.truncated else ''}"
        table.add_row(str(index + 1), _short(text), marked, f"{len(found.values):,}", f"{first}, …", *cosines)
    return table


def cosine(left: Sequence[float], right: Sequence[float]) -> float:
    """0 where one of them has no length."""
    norms = math.hypot(*left) * math.hypot(*right)
    total = sum(one * other for one, other in zip(left, right, strict=True))
    return total / norms if norms else 0.0


def _note(output: Output, answered: inference_pb2.Answered, count: int) -> None:
    parts = [
        answered.model_version,
        formats.plural(count, "text"),
        formats.plural(answered.tokens, "token"),
        formats.milliseconds(answered.total_ms),
    ]
    output.note(" · ".join(parts))


def _short(text: str) -> str:
    shown = printable(text.replace("\n", " "))
    return shown if len(shown) <= SHOWN_CHARACTERS else f"{shown[: SHOWN_CHARACTERS - 1]}…"


def _table(*headers: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for header in headers:
        table.add_column(header.removeprefix(">"), justify="right" if header.startswith(">") else "left")
    return table
