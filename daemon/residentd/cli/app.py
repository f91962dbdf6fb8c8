"""The command line of residentctl, and how one run of it ends."""

from __future__ import annotations

import errno
import importlib.metadata
import inspect
import os
import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import Annotated, Any

import typer

from residentd.cli.bench import bench
from residentd.cli.chat import chat
from residentd.cli.command import command, connection_parameters
from residentd.cli.encode import classify, embed, rerank
from residentd.cli.exits import ExitCode, Failure, exit_code_table
from residentd.cli.generate import count_tokens, generate, models
from residentd.cli.infer import infer
from residentd.cli.install import install
from residentd.cli.options import ConnectionOptions
from residentd.cli.output import discard, open_output, report, settle
from residentd.cli.serve import serve
from residentd.cli.status import status
from residentd.cli.verify import verify
from residentd.cli.versions import list_versions, load, unload

PROGRAM = "residentctl"
TRACEBACK_VARIABLE = "RESIDENTCTL_TRACEBACK"
_WRITE_ERRORS = frozenset({errno.EBADF, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.ENOSPC})
"""Of an OSError without a file name: stdout's. Nothing else is written without one, and reads of stdin are guarded."""
_COMMANDS: tuple[tuple[str, str, Callable[..., None]], ...] = (
    ("install", "Models on this machine", install),
    ("list", "Models on this machine", list_versions),
    ("load", "Models on this machine", load),
    ("unload", "Models on this machine", unload),
    ("status", "Models on this machine", status),
    ("verify", "Models on this machine", verify),
    ("generate", "Using a model", generate),
    ("chat", "Using a model", chat),
    ("embed", "Using a model", embed),
    ("classify", "Using a model", classify),
    ("rerank", "Using a model", rerank),
    ("infer", "Using a model", infer),
    ("count-tokens", "Using a model", count_tokens),
    ("models", "Using a model", models),
    ("bench", "Using a model", bench),
    ("serve", "Development", serve),
)


def build_app() -> typer.Typer:
    """The whole command line."""
    app = typer.Typer(
        name=PROGRAM,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode="rich",
        context_settings={"help_option_names": ["--help", "-h"]},
        epilog=f"Exit codes:\n{exit_code_table()}",
    )
    app.callback()(_with_connection(_root))
    for name, panel, function in _COMMANDS:
        app.command(name, rich_help_panel=panel)(command(function))
    return app


def _root(context: typer.Context, connection: ConnectionOptions) -> None:
    """Install models on this machine, serve them, and talk to them: the client of residentd."""
    context.obj = connection


def _with_connection(function: Callable[[typer.Context, ConnectionOptions], None]) -> Callable[..., None]:
    """Make `function` a typer callback that takes the connection's options, and --version."""

    def root(typer_context: typer.Context, *, version: bool, **values: Any) -> None:
        del version  # its callback has ended the program
        function(typer_context, ConnectionOptions(**values))

    root.__doc__ = function.__doc__
    parameters = [*connection_parameters(), _version_parameter()]
    root.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    root.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return root


def _version_parameter() -> inspect.Parameter:
    option = typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version and leave.")
    return inspect.Parameter(
        "version", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=Annotated[bool, option]
    )


def _print_version(*, value: bool) -> None:
    if value:
        typer.echo(f"{PROGRAM} {importlib.metadata.version('residentd')}")
        raise typer.Exit


def run(arguments: list[str]) -> int:
    """Run one command line; returns the exit code. Prints one line where it fails, and no traceback."""
    try:
        result = build_app()(arguments or ["--help"], prog_name=PROGRAM, standalone_mode=False)
        if not result:
            sys.stdout.flush()
    except typer.TyperException as error:
        failure = Failure(_usage_message(error), code=ExitCode.USAGE)
    except (KeyboardInterrupt, typer.Abort):
        failure = Failure("interrupted", code=ExitCode.INTERRUPTED)
    except BrokenPipeError:
        discard(sys.stdout)  # the reader has left; nothing more to say
        return ExitCode.FAILED
    except Exception as error:  # noqa: BLE001 - a mistake of ours is one line as well, unless asked otherwise
        failure = _unexpected(error)
    else:
        return result if isinstance(result, int) else ExitCode.OK
    report(open_output(as_json=_wants_json(arguments)), failure)
    return failure.code


def _wants_json(arguments: list[str]) -> bool:
    """Whether --json is among the options, where the command line could not be parsed to the end."""
    options = arguments[: arguments.index("--")] if "--" in arguments else arguments
    return "--json" in options


def _unexpected(error: Exception) -> Failure:
    """The Failure of a stdout that cannot be written, or else of a mistake of ours, which is raised where asked for."""
    if isinstance(error, OSError) and error.filename is None and error.errno in _WRITE_ERRORS:
        discard(sys.stdout)
        return Failure(f"stdout cannot be written: {error.strerror}. Send the output elsewhere, or make room there")
    if os.environ.get(TRACEBACK_VARIABLE):
        raise error
    return Failure(f"internal error: {type(error).__name__}: {error}. Set {TRACEBACK_VARIABLE}=1 to see where")


def _usage_message(error: typer.TyperException) -> str:
    context = getattr(error, "ctx", None)
    path = context.command_path if context is not None else PROGRAM
    message = " ".join(error.format_message().split()).rstrip(".")
    return f"{message}. See: {path} --help" if message else f"See: {path} --help"


def main() -> None:
    """Run the process's own command line. SIGTERM and SIGHUP end it as Ctrl-C does, and so does what it started."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, _interrupt)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    try:
        sys.exit(run(sys.argv[1:]))
    finally:
        for stream in (sys.stdout, sys.stderr):
            settle(stream)  # or the interpreter, which flushes them as well, would end with a code of its own


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt
