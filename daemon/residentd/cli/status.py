"""status: what the daemon and its engines do right now."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Annotated

import typer
from rich.console import RenderableType
from rich.live import Live
from rich.text import Text

from resident.v1 import admin_pb2
from residentd.cli.channels import UNARY_S_MAX, admin_stub
from residentd.cli.command import Session
from residentd.cli.exits import Failure
from residentd.cli.output import Output, fields_of, printable
from residentd.cli.tables import status_view
from residentd.cli.target import Target


def status(
    session: Session,
    *,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Go on until Ctrl-C.")] = False,
    interval: Annotated[
        float, typer.Option(min=0.1, max=3600.0, metavar="SECONDS", help="Between two looks with --watch.")
    ] = 1.0,
) -> None:
    """Show slots, queue, tokens/s, and the percentiles of TTFT and ITL over the last minute."""
    target = session.target()
    first = _status(target)
    if not watch:
        _show(session.output, first)
        return
    with contextlib.suppress(KeyboardInterrupt):  # the documented way to end a watch
        _watch(session.output, target, first, interval_s=interval)


def _status(target: Target) -> admin_pb2.StatusResponse:
    with admin_stub(target) as admin:
        return admin.Status(admin_pb2.StatusRequest(), timeout=UNARY_S_MAX)


def _watch(output: Output, target: Target, first: admin_pb2.StatusResponse, *, interval_s: float) -> None:
    """Show `first` and what follows. A daemon that goes away is waited for: it may be restarting."""
    looks = _looks(target, first, interval_s=interval_s)
    if output.as_json or not output.out.is_terminal:
        for look in looks:
            _show(output, look)
        return
    with Live(console=output.out, auto_refresh=False, screen=True) as live:
        for look in looks:
            live.update(_view(look), refresh=True)


def _looks(
    target: Target, first: admin_pb2.StatusResponse, *, interval_s: float
) -> Iterator[admin_pb2.StatusResponse | Failure]:
    yield first
    while True:
        time.sleep(interval_s)
        try:
            look: admin_pb2.StatusResponse | Failure = _status(target)
        except Failure as failure:
            look = failure
        yield look


def _show(output: Output, look: admin_pb2.StatusResponse | Failure) -> None:
    if not output.as_json:
        output.out.print(_view(look))
    elif isinstance(look, Failure):
        output.emit({"error": look.to_json()})
    else:
        output.emit(fields_of(look))


def _view(look: admin_pb2.StatusResponse | Failure) -> RenderableType:
    if isinstance(look, Failure):
        return Text(printable(look.message), style="red")
    return status_view(look)
