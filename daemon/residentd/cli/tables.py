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
from residentd.cli.checks import check_line
from residentd.cli.output import printable

WIDE_COLUMNS_MIN = 160
BAR_COLUMNS = 20
ACTIVE_MARK = "●"
_STATE_STYLES = {
    "ready": "green",
    "serving": "green",
    "loading": "yellow",
    "starting": "yellow",
    "draining": "yellow",
    "degraded": "bold red",
    "failed": "bold red",
    "not_serving": "bold red",
}


def versions_table(versions: Sequence[Version], *, now: datetime, columns: int) -> RenderableType:
    """Every version: one line each where there is room, else three."""
    if not versions:
        return Text("No model is installed. Install one: residentctl install DIR --name NAME")
    build = _wide_versions if columns >= WIDE_COLUMNS_MIN else _narrow_versions
    notes = [note for version in versions for note in _notes(version)]
    parts: list[RenderableType] = [build(versions, now)]
    parts.extend(Padding(Text(note, style="yellow"), (0, 0, 0, 3)) for note in notes)
    return Group(*parts)


def _wide_versions(versions: Iterable[Version], now: datetime) -> Table:
    table = _table(
        *("", "MODEL", "STATE", "ENGINE", ">CONTEXT", ">SIZE", ">AGREEMENT", ">KL", ">TOP-1", ">PERPLEXITY"),
        *(">TOKENS/S", "DIGEST", ">AGE"),
    )
    for version in versions:
        table.add_row(
            _mark(version),
            Text(printable(f"{version.name}@{version.number}"), style="bold"),
            _state(version.state),
            printable(_engine(version)),
            f"{formats.count(version.context) if version.context else formats.NONE} × {version.slots}",  # noqa: RUF001
            formats.size(version.bytes),
            f"{_greedy(version)} {_logits(version)}",
            *_quality(version),
            ", ".join(_speeds(version)),
            Text(formats.short_digest(version.digest), style="dim"),
            formats.age(version.created, now),
        )
    return table


def _narrow_versions(versions: Iterable[Version], now: datetime) -> Table:
    """Three lines a version, in 80 columns."""
    table = _table("", "MODEL", "STATE", ">SIZE", ">QUALITY", ">TOKENS/S")
    for version in versions:
        slots = formats.plural(version.slots, "slot")
        divergence, top1, perplexity = _quality(version)
        measured = version.HasField("quality")
        table.add_row(
            _mark(version),
            _lines(
                f"{version.name}@{version.number}",
                _engine(version),
                f"{formats.count(version.context)} × {slots}",  # noqa: RUF001
                style="bold",
            ),
            Text.assemble(
                _state(version.state),
                ("\n" + formats.short_digest(version.digest), "dim"),
                ("\n" + formats.age(version.created, now), "dim"),
            ),
            formats.size(version.bytes),
            _lines(
                f"{_greedy(version)} {_logits(version)}",
                f"KL {divergence}, {top1}" if measured else formats.NONE,
                f"ppl {perplexity}" if measured else "",
            ),
            _lines(*_speeds(version)),
        )
    return table


def _engine(version: Version) -> str:
    """What it does where it does not generate, and what with."""
    kind = f"{version.kind} " if version.kind not in {"", "generate"} else ""
    parts = f" ({version.weights})" if version.precision in {"fp32", "fp16", "bf16"} and version.weights else ""
    return f"{kind}{version.precision}{parts} {version.target}"


def _quality(version: Version) -> tuple[str, str, str]:
    """KL divergence from the export, share of equal first choices, perplexity (and the export's)."""
    if not version.HasField("quality"):
        return formats.NONE, formats.NONE, formats.NONE
    quality = version.quality
    perplexities = (formats.three_digits(value) for value in (quality.perplexity, quality.perplexity_export))
    return formats.divergence(quality.kl_mean), f"{100 * quality.top1:.1f} %", "{} ({})".format(*perplexities)


def _speeds(version: Version) -> tuple[str, ...]:
    """Tokens a second of one sequence and of several together, as the first load measured them."""
    if not version.HasField("speeds"):
        return (formats.NONE,)
    one, many = (formats.three_digits(rate) for rate in (version.speeds.decode_one, version.speeds.decode_many))
    return f"{one} at 1", f"{many} at {version.speeds.rows}"


def _table(*headers: str) -> Table:
    """A table without lines; a header that starts with > is a column of numbers."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for header in headers:
        right = header.startswith(">")
        name = header.removeprefix(">")
        table.add_column(name, justify="right" if right else "left", overflow="fold", no_wrap=name in {"", "STATE"})
    return table


def _lines(first: str, *others: str, style: str = "") -> Text:
    """One cell: `first`, and the others dim below it."""
    return Text.assemble((printable(first), style), *((f"\n{printable(other)}", "dim") for other in others))


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
    table = _table("MODEL", "STATE", "KIND", *architecture, "PRECISION", ">CONTEXT", ">SLOTS", ">VOCABULARY", "CHAT")
    for model in models:
        table.add_row(
            Text(printable(model_reference(model)), style="bold"),
            _state("ready" if model.ready else "not ready"),
            printable(model.kind or "generate"),
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
        (f"  {formats.short_digest(engine.digest)}  {printable(_scheduling(engine))}", "dim"),
    )
    lines: list[RenderableType] = [head]
    if engine.state_reason:
        lines.append(Text(f"  {printable(engine.state_reason)}", style="yellow"))
    lines.extend((_usage(engine), _latencies(engine)))
    return Group(*lines)


def _scheduling(engine: EngineStatus) -> str:
    return engine.scheduling if engine.kind in {"", "generate"} else ""


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
    ]
    if engine.kind not in {"", "generate"}:
        rows = [
            ("kind", engine.kind),
            ("rows/s", f"{output}, {engine.waiting} requests waiting"),
            ("runs", f"{engine.steps:,}, at most {formats.plural(engine.batch_rows_max, 'row')} in one"),
        ]
    if engine.mode not in {"", "canonical"}:
        rows.append(("mode", f"{printable(engine.mode)}; residentctl list has the reason"))
    rows += [
        ("worker", f"{worker}, {formats.plural(engine.worker_restarts, 'restart')}"),
        ("checked", check_line(engine.check) if engine.HasField("check") else formats.NONE),
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
    shown = [("TTFT", engine.ttft_ms), ("ITL", engine.itl_ms)]
    if engine.kind not in {"", "generate"}:
        shown = [("whole", engine.ttft_ms)]
    for name, percentiles in shown:
        table.add_row(Text(f"  {name}", style="dim"), *_percentiles(percentiles))
    return table


def _percentiles(value: Percentiles) -> tuple[str, str, str, str]:
    if not value.count:
        return formats.NONE, formats.NONE, formats.NONE, "0"
    p50, p95, p99 = (formats.milliseconds(number) for number in (value.p50, value.p95, value.p99))
    return p50, p95, p99, f"{value.count:,}"
