"""Tables of versions, models and engines. Pure: messages in, rich renderables out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from resident.v1.admin_pb2 import EngineStatus, Percentiles, StatusResponse, Version
from resident.v1.inference_pb2 import Model
from residentd.cli import formats
from residentd.cli.output import printable

WIDE_COLUMNS_MIN = 110
BAR_COLUMNS = 20
ACTIVE_MARK = "●"
_STATE_STYLES = {
    "ready": "green",
    "serving": "green",
    "loading": "yellow",
    "starting": "yellow",
    "draining": "yellow",
    "failed": "bold red",
    "not_serving": "bold red",
}


def versions_table(versions: Sequence[Version], *, now: datetime, columns: int) -> RenderableType:
    """Every version: one line each where there is room, else two."""
    if not versions:
        return Text("No model is installed. Install one: residentctl install DIR --name NAME")
    build = _wide_versions if columns >= WIDE_COLUMNS_MIN else _narrow_versions
    notes = [note for version in versions for note in _notes(version)]
    parts: list[RenderableType] = [build(versions, now)]
    parts.extend(Padding(Text(note, style="yellow"), (0, 0, 0, 3)) for note in notes)
    return Group(*parts)


def _wide_versions(versions: Iterable[Version], now: datetime) -> Table:
    table = _table("", "MODEL", "STATE", "ENGINE", ">CONTEXT", ">SLOTS", ">SIZE", ">AGREEMENT", "DIGEST", ">AGE")
    for version in versions:
        table.add_row(
            _mark(version),
            Text(printable(f"{version.name}@{version.number}"), style="bold"),
            _state(version.state),
            printable(f"{version.precision} {version.target}"),
            formats.count(version.context),
            str(version.slots),
            formats.size(version.bytes),
            f"{_greedy(version)}, {_logits(version)}",
            Text(formats.short_digest(version.digest), style="dim"),
            formats.age(version.created, now),
        )
    return table


def _narrow_versions(versions: Iterable[Version], now: datetime) -> Table:
    table = _table("", "MODEL", "STATE", ">CONTEXT", ">SIZE", ">AGREEMENT")
    for version in versions:
        table.add_row(
            _mark(version),
            _two(f"{version.name}@{version.number}", f"{version.precision} {version.target}", style="bold"),
            Text.assemble(_state(version.state), "\n", (formats.short_digest(version.digest), "dim")),
            _two(formats.count(version.context), f"× {formats.plural(version.slots, 'slot')}"),  # noqa: RUF001
            _two(formats.size(version.bytes), f"{formats.age(version.created, now)} old"),
            _two(_greedy(version), _logits(version)),
        )
    return table


def _table(*headers: str) -> Table:
    """A table without lines; a header that starts with > is a column of numbers."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for header in headers:
        right = header.startswith(">")
        name = header.removeprefix(">")
        table.add_column(name, justify="right" if right else "left", overflow="fold", no_wrap=name in {"", "STATE"})
    return table


def _two(first: str, second: str, *, style: str = "") -> Text:
    return Text.assemble((printable(first), style), "\n", (printable(second), "dim"))


def _mark(version: Version) -> Text:
    return Text(ACTIVE_MARK if version.active else " ", style="green")


def _state(state: str) -> Text:
    return Text(printable(state), style=_STATE_STYLES.get(state.lower(), ""))


def _greedy(version: Version) -> str:
    """Greedy tokens equal to the export's, of those compared."""
    return f"{version.greedy_equal}/{version.greedy_total}" if version.greedy_total else formats.NONE


def _logits(version: Version) -> str:
    return f"Δ {version.logit_diff_max:.0e}"


def _notes(version: Version) -> Iterable[str]:
    reference = printable(f"{version.name}@{version.number}")
    if version.state_reason:
        yield f"{reference} {printable(version.state)}: {printable(version.state_reason)}"
    if version.mode and version.mode != "canonical":
        yield f"{reference} runs in {printable(version.mode)} mode: {printable(version.mode_reason)}"


def models_table(models: Sequence[Model], *, columns: int) -> RenderableType:
    """What the Inference service offers; the architecture where there is room."""
    if not models:
        return Text("No model is served.")
    wide = columns >= WIDE_COLUMNS_MIN
    architecture = ("ARCHITECTURE",) if wide else ()
    table = _table("MODEL", "STATE", *architecture, "PRECISION", ">CONTEXT", ">SLOTS", ">VOCABULARY", "CHAT")
    for model in models:
        table.add_row(
            Text(printable(model_reference(model)), style="bold"),
            _state("ready" if model.ready else "not ready"),
            *((printable(model.architecture),) if wide else ()),
            printable(model.precision),
            formats.count(model.context),
            str(model.slots),
            formats.count(model.vocabulary),
            "yes" if model.chat else "no",
        )
    return table


def model_reference(model: Model) -> str:
    """NAME@N, whether the daemon sends N or NAME@N as the version."""
    return model.version if "@" in model.version or not model.version else f"{model.name}@{model.version}"


def status_view(status: StatusResponse) -> RenderableType:
    """The daemon, and a block for each engine."""
    head = Text.assemble(
        ("residentd ", "bold"),
        (printable(status.residentd_version), "bold"),
        f" · up {formats.duration(status.uptime_s)}",
        (f" · {printable(status.state)}", "dim"),
    )
    if not status.engines:
        return Group(head, Text("No model is loaded. Load one: residentctl load NAME"))
    return Group(head, *(Padding(engine_view(engine), (1, 0, 0, 0)) for engine in status.engines))


def engine_view(engine: EngineStatus) -> RenderableType:
    head = Text.assemble(
        (f"{ACTIVE_MARK} ", _STATE_STYLES.get(engine.state.lower(), "")),
        (printable(engine.model_version), "bold"),
        "  ",
        _state(engine.state),
        (f"  {formats.short_digest(engine.digest)}  {printable(engine.scheduling)}", "dim"),
    )
    lines: list[RenderableType] = [head]
    if engine.state_reason:
        lines.append(Text(f"  {printable(engine.state_reason)}", style="yellow"))
    lines.extend((_usage(engine), _latencies(engine)))
    return Group(*lines)


def _usage(engine: EngineStatus) -> Table:
    kv_used, kv_total = engine.kv_tokens_used, engine.kv_tokens_total
    slots = f"{engine.slots_used} of {engine.slots} used, {engine.waiting} waiting"
    cache = f"{formats.share(kv_used, kv_total)}, {kv_used:,} of {kv_total:,} tokens"
    output, prompt = formats.rate(engine.output_tokens_per_s), formats.rate(engine.prompt_tokens_per_s)
    worker = f"pid {engine.worker_pid}, {formats.size(engine.worker_memory_bytes)}"
    by_count = sorted(engine.finished.items(), key=lambda item: -item[1])
    rows: list[tuple[str, str | Text]] = [
        ("slots", _bar(engine.slots_used, engine.slots).append(slots, style="default")),
        ("KV", _bar(kv_used, kv_total).append(cache, style="default")),
        ("tokens/s", f"{output} output, {prompt} prompt"),
        ("steps", f"{engine.steps:,}, at most {formats.plural(engine.batch_rows_max, 'row')} in one"),
        ("worker", f"{worker}, {formats.plural(engine.worker_restarts, 'restart')}"),
        ("ended", " · ".join(f"{printable(reason)} {total:,}" for reason, total in by_count) or formats.NONE),
    ]
    grid = Table.grid(padding=(0, 2, 0, 0))
    for name, value in rows:
        grid.add_row(Text(f"  {name}", style="dim"), value)
    return grid


def _bar(used: int, total: int) -> Text:
    return Text(formats.bar(used, total, width=BAR_COLUMNS), style="cyan").append("  ")


def _latencies(engine: EngineStatus) -> Table:
    table = _table("          ", ">p50", ">p95", ">p99", ">samples")
    for name, percentiles in (("TTFT", engine.ttft_ms), ("ITL", engine.itl_ms)):
        table.add_row(Text(f"  {name}", style="dim"), *_percentiles(percentiles))
    return table


def _percentiles(value: Percentiles) -> tuple[str, str, str, str]:
    if not value.count:
        return formats.NONE, formats.NONE, formats.NONE, "0"
    p50, p95, p99 = (formats.milliseconds(number) for number in (value.p50, value.p95, value.p99))
    return p50, p95, p99, f"{value.count:,}"
