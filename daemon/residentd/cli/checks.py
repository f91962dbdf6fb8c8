"""How a check of a version is shown. Pure: messages in, rich renderables out."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from resident.v1.admin_pb2 import Check, CheckPart, VerifyResponse
from residentd.cli import formats
from residentd.cli.output import printable


def check_view(answer: VerifyResponse) -> RenderableType:
    """A table of what was compared, and what surrounds it."""
    version, check = answer.version, answer.version.check
    verdict = ("passed", "green") if check.passed else ("did not pass", "bold red")
    head = Text.assemble(
        (printable(f"{version.name}@{version.number} "), "bold"),
        verdict,
        (f"  {formats.short_digest(version.digest)}, {formats.milliseconds(answer.seconds * 1000)}", "dim"),
    )
    return Group(head, _parts(check), *(Text(printable(line)) for line in _lines(answer)))


def check_line(check: Check) -> str:
    """The last check in one line, for `status`."""
    measured = [part for part in check.parts if part.bound]
    worst = f", worst difference {_worst(measured[0])}" if measured else ""
    since = f"; {check.since}" if check.since else ""
    verdict = "passed" if check.passed else "did not pass"
    return printable(f"{verdict} at {check.occasion} {check.checked}{worst}{since}")


def _parts(check: Check) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("  COMPARED", "CHECKED", "WRONG", "WORST", "WHERE"):
        table.add_column(name, justify="right" if name in {"CHECKED", "WRONG", "WORST"} else "left", overflow="fold")
    for part in check.parts:
        style = "bold red" if part.missed > part.missed_max else ""
        table.add_row(
            Text(f"  {printable(part.name)}", style=style),
            f"{part.checked:,}",
            Text(f"{part.missed:,}", style=style),
            _worst(part) if part.bound else "",
            Text(printable(part.detail), style="dim"),
        )
    return table


def _worst(part: CheckPart) -> str:
    return f"{part.worst:.1e} of {part.bound:.1e}"


def _lines(answer: VerifyResponse) -> Iterator[str]:
    version, check = answer.version, answer.version.check
    if check.first:
        yield "  environment: no earlier check is recorded"
    elif check.changes:
        yield "  environment: changed since the last good check"
    else:
        yield "  environment: as at the last good check"
    names = [change.name for change in check.changes]
    before = {change.name: change.before for change in check.changes}
    for name in sorted({*check.environment, *names}):
        was = f" (was {before[name] or 'none'})" if name in before else ""
        yield f"    {name} {check.environment.get(name, 'none')}{was}"
    serving = answer.serving or "no version"
    yield f"  {version.name} means {serving} now"
