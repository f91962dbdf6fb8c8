"""serve --dev: the daemon from a checkout, with its state in a directory of one's own."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from residentd.cli.command import Session
from residentd.cli.exits import ExitCode, Failure, usage
from residentd.cli.target import dev_config, dev_state
from residentd.config import UNIX_PATH_BYTES_MAX, Config, parse
from residentd.errors import ConfigError

_HEADER = "# Written by `residentctl serve --dev`, anew at every start. Copy it to keep changes.\n"


def serve(
    session: Session,
    *,
    dev: Annotated[
        bool, typer.Option("--dev", help="Required: for development. A machine has the unit instead.")
    ] = False,
    listen: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="The Inference service; port 0 takes a free one.")
    ] = Config().listen.grpc,
    model: Annotated[
        list[str] | None, typer.Option("--model", "-m", metavar="NAME[@N]", help="Load only these. Repeatable.")
    ] = None,
    scheduling: Annotated[
        Literal["throughput", "interactive"],
        typer.Option(help="interactive: a new prompt never slows the others much."),
    ] = "interactive",
    threads: Annotated[int, typer.Option(min=0, max=1024, help="Compute threads of a worker. 0: all cores.")] = 0,
) -> None:
    """Run the daemon in this terminal, with state under --state DIR (default ~/.local/state/residentd)."""
    if not dev:
        raise usage("serve is for development: add --dev. On a machine: systemctl start residentd")
    state = (session.connection.state or dev_state(os.environ)).absolute()
    socket = state / "admin.sock"
    if len(os.fsencode(socket)) > UNIX_PATH_BYTES_MAX:
        raise usage(
            f"the admin socket {socket} would have a path of {len(os.fsencode(socket))} bytes; a unix socket takes "
            f"{UNIX_PATH_BYTES_MAX}. Choose a shorter --state"
        )
    path = dev_config(state)
    _write(path, config_text(state, listen=listen, models=model or [], scheduling=scheduling, threads=threads))
    _tell(session, path, socket, listen)
    os.execv(sys.executable, [sys.executable, "-m", "residentd", "--config", str(path)])  # noqa: S606 - ourselves


def config_text(state: Path, *, listen: str, models: list[str], scheduling: str, threads: int) -> str:
    """The configuration of a development daemon. Raises Failure (usage) where a value is refused."""
    text = (
        f"{_HEADER}state = {_quoted(str(state))}\n"
        f"models = [{', '.join(_quoted(model) for model in models)}]\n\n"
        f"[listen]\ngrpc = {_quoted(listen)}\n\n"
        f"[engine]\nscheduling = {_quoted(scheduling)}\nthreads = {threads}\n\n"
        f'[log]\nformat = "console"\n'
    )
    try:
        parse(text)
    except ConfigError as error:
        raise usage(str(error)) from error
    return text


def _quoted(text: str) -> str:
    """A TOML basic string (TOML 1.0, section String)."""
    escaped = "".join(_escaped(character) for character in text)
    return f'"{escaped}"'


def _escaped(character: str) -> str:
    if character in '"\\':
        return f"\\{character}"
    return character if character.isprintable() else f"\\U{ord(character):08x}"


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(mode=0o750, parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except (OSError, UnicodeEncodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "its name is not UTF-8"
        raise Failure(
            f"the state directory {path.parent} cannot be used: {reason}. Choose another with --state",
            code=ExitCode.USAGE,
        ) from error


def _tell(session: Session, path: Path, socket: Path, listen: str) -> None:
    output = session.output
    if output.as_json:
        output.emit({"config": str(path), "state": str(path.parent), "address": listen, "admin_socket": str(socket)})
    else:
        output.note(f"state {path.parent}, admin socket {socket}, gRPC {listen}")
        output.note("in another terminal:")
        for words in (
            f"export RESIDENTD_CONFIG={shlex.quote(str(path))}",
            "residentctl install DIR --name NAME",
            "residentctl chat",
        ):
            output.note(f"  {words}")
    output.out.file.flush()
    output.err.file.flush()
