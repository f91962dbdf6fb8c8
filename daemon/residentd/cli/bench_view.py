"""A benchmark's report for a person. Pure: a report in, a rich renderable out."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from residentd.cli import formats
from residentd.cli.output import printable
from residentd.cli.statistics import Report, Summary

CLIENT_CORES_NOTABLE = 0.8
FAILURES_SHOWN_MAX = 5
_HOW = (
    "ITL per token: a message of k tokens that comes g after the one before counts as k intervals of g/k; what comes "
    "with a first token counts 0. Message gap: g itself."
)


def report_view(report: Report, *, title: str, client_cores: float, rows: int | None) -> RenderableType:
    parts: list[RenderableType] = [Text(printable(title), style="bold"), Text(), _latencies(report), Text()]
    parts.append(_figures(report, rows))
    parts.extend(
        Text(f"{times:,} failed: {printable(message)}", style="red")
        for message, times in report.failures[:FAILURES_SHOWN_MAX]
    )
    if client_cores > CLIENT_CORES_NOTABLE:
        parts.append(
            Text(
                f"This client used {100 * client_cores:.0f} % of a core: it may itself be the limit. Run several.",
                style="yellow",
            )
        )
    parts.extend((Text(), Text(_HOW, style="dim")))
    return Group(*parts)


def _latencies(report: Report) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="dim")
    table.add_column("")
    for header in ("p50", "p95", "p99", "max", "samples"):
        table.add_column(header, justify="right")
    for name, values in (
        ("TTFT", report.ttft_ms),
        ("ITL per token", report.itl_ms),
        ("message gap", report.message_gap_ms),
    ):
        cells = (formats.milliseconds(value) for value in (values.p50, values.p95, values.p99, values.max))
        table.add_row(Text(name, style="bold"), *cells, f"{values.count:,}")
    return table


def _figures(report: Report, rows: int | None) -> Table:
    grid = Table.grid(padding=(0, 3, 0, 0))
    grid.add_row(
        Text("aggregate", style="bold"),
        f"{formats.rate(report.output_tokens_per_s)} output tokens/s, "
        f"{formats.rate(report.prompt_tokens_per_s)} prompt tokens/s",
    )
    grid.add_row(Text("per request", style="bold"), _per_request(report.request_tokens_per_s))
    per_message = report.output_tokens / report.messages if report.messages else 0.0
    grid.add_row(
        Text("wall", style="bold"),
        f"{report.wall_s:.2f} s for {report.output_tokens:,} output and {report.prompt_tokens:,} prompt tokens, "
        f"{per_message:.2f} tokens a message",
    )
    if rows is not None:
        grid.add_row(
            Text("batch", style="bold"), f"at most {formats.plural(rows, 'row')} in one step since the worker started"
        )
    return grid


def _per_request(rates: Summary) -> str:
    if not rates.count:
        return formats.NONE
    median, slowest, fastest = (formats.rate(value) for value in (rates.p50, rates.min, rates.max))
    return f"{median} tokens/s median, {slowest} slowest, {fastest} fastest"
