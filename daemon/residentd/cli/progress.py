"""Three ways to show an installation: a bar for a person, lines for a log, JSON lines for a program."""

from __future__ import annotations

from collections.abc import Iterable

from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column
from rich.text import Text

from resident.v1.admin_pb2 import InstallProgress, Quality, Speeds, Version
from residentd.cli import formats
from residentd.cli.exits import ExitCode, Failure
from residentd.cli.output import Output, fields_of, printable

LINE_EVERY = 0.1  # of the whole: a log gets a line at a new stage or after this much, not one a message


def follow(output: Output, events: Iterable[InstallProgress]) -> Version:
    """Show `events` as they come; returns the version that the last one brings. Raises Failure where none does."""
    if output.as_json:
        return _follow_json(output, events)
    return _follow_bar(output, events) if output.interactive else _follow_lines(output, events)


def _follow_json(output: Output, events: Iterable[InstallProgress]) -> Version:
    version = None
    for event in events:
        if event.HasField("installed"):
            version = event.installed
        else:
            output.emit({"event": "progress", **_fields(event)})
    if version is None:
        raise _no_result()
    output.emit({"event": "installed", "version": fields_of(version)})
    return version


def _fields(event: InstallProgress) -> dict[str, object]:
    return {"stage": event.stage, "fraction": round(event.fraction, 6), "message": event.message}


def _follow_lines(output: Output, events: Iterable[InstallProgress]) -> Version:
    stage, shown = "", 0.0
    version = None
    for event in events:
        if event.HasField("installed"):
            version = event.installed
        elif event.stage != stage or event.fraction >= shown + LINE_EVERY:
            stage, shown = event.stage, event.fraction
            output.say(Text(f"{_percent(event)}  {_description(event)}"))
    if version is None:
        raise _no_result()
    return version


def _follow_bar(output: Output, events: Iterable[InstallProgress]) -> Version:
    version = None
    bar = Progress(
        TextColumn("{task.fields[stage]}", style="bold", markup=False),
        BarColumn(bar_width=None, table_column=Column(ratio=1)),
        TextColumn("{task.percentage:>3.0f} %"),
        TimeElapsedColumn(),
        TextColumn(
            "{task.fields[detail]}",
            style="dim",
            markup=False,
            table_column=Column(ratio=2, no_wrap=True, overflow="ellipsis"),
        ),
        console=output.err,
        expand=True,
        transient=True,
    )
    with bar:
        task = bar.add_task("install", total=1.0, stage="starting", detail="")
        for event in events:
            if event.HasField("installed"):
                version = event.installed
            bar.update(
                task, completed=event.fraction, stage=f"{printable(event.stage):<12}", detail=printable(event.message)
            )
    if version is None:
        raise _no_result()
    return version


def _percent(event: InstallProgress) -> str:
    return f"{100 * event.fraction:>3.0f} %"


def _description(event: InstallProgress) -> str:
    return printable(f"{event.stage}: {event.message}" if event.message else event.stage)


def _no_result() -> Failure:
    return Failure(
        "the installation ended without a version and without a reason. See the daemon's journal, then run it again",
        code=ExitCode.FAILED,
    )


def installed_lines(version: Version) -> list[str]:
    """What was installed, for a person."""
    digest = formats.short_digest(version.digest)
    lines = [f"installed {version.name}@{version.number} ({digest}){', active' if version.active else ''}"]
    if version.precision:
        weights = f" ({version.weights})" if version.weights else ""
        lines.append(
            f"  {version.precision}{weights} for {version.target}, context {version.context:,} × "  # noqa: RUF001
            f"{formats.plural(version.slots, 'slot')}, {formats.size(version.bytes)}"
        )
    if version.greedy_total:
        lines.append(
            f"  agrees with its export: {version.greedy_equal}/{version.greedy_total} greedy tokens, "
            f"logits within {version.logit_diff_max:.1e} (bound {version.logit_diff_bound:.1e})"
        )
    if version.HasField("quality"):
        lines.append(f"  {_quality(version.quality)}")
    if version.HasField("cost"):
        lines.append(f"  {formats.size(version.cost.memory_bytes)} of memory")
    if version.HasField("speeds"):
        lines.append(f"  {_speeds(version.speeds)}")
    lines.extend(f"  {line}" for line in version.candidates)
    if version.mode == "compatibility":
        lines.append(f"  in compatibility mode: {version.mode_reason}")
    return lines


def _quality(quality: Quality) -> str:
    """What the build lost, over the text that the compiler carries."""
    return (
        f"beside its export: KL {formats.divergence(quality.kl_mean)} (bound {quality.kl_bound:g}), perplexity "
        f"{formats.three_digits(quality.perplexity)} ({formats.three_digits(quality.perplexity_export)}), the same "
        f"first choice at {quality.top1:.1%} of {quality.positions:,} positions"
    )


def _speeds(speeds: Speeds) -> str:
    one, many, prefill = (
        formats.three_digits(rate) for rate in (speeds.decode_one, speeds.decode_many, speeds.prefill)
    )
    return f"on this machine: {one} tokens/s for one sequence, {many} for {speeds.rows}, {prefill} of prompt"
