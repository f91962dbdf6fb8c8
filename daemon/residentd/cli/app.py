"""The command line of residentctl, and how one run of it ends."""

from __future__ import annotations

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
from residentd.cli.exits import ExitCode, Failure, exit_code_table
from residentd.cli.generate import count_tokens, generate, models
from residentd.cli.install import install
from residentd.cli.options import ConnectionOptions
from residentd.cli.output import open_output, report
from residentd.cli.serve import serve
from residentd.cli.status import status
from residentd.cli.versions import list_versions, load, unload

PROGRAM = "residentctl"
TRACEBACK_VARIABLE = "RESIDENTCTL_TRACEBACK"
_COMMANDS: tuple[tuple[str, str, Callable[..., None]], ...] = (
    ("install", "Models on this machine", install),
    ("list", "Models on this machine", list_versions),
    ("load", "Models on this machine", load),
    ("unload", "Models on this machine", unload),
    ("status", "Models on this machine", status),
    ("generate", "Using a model", generate),
    ("chat", "Using a model", chat),
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
    plain = open_output(as_json=False)
    arguments = arguments or ["--help"]
    try:
        result = build_app()(arguments, prog_name=PROGRAM, standalone_mode=False)
    except typer.TyperException as error:
        report(plain, Failure(_usage_message(error), code=ExitCode.USAGE))
        return ExitCode.USAGE
    except (KeyboardInterrupt, typer.Abort):
        report(plain, Failure("interrupted", code=ExitCode.INTERRUPTED))
        return ExitCode.INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the reader has left; nothing more to say
        return ExitCode.FAILED
    except Exception as error:
        if os.environ.get(TRACEBACK_VARIABLE):
            raise
        message = f"internal error: {type(error).__name__}: {error}. Set {TRACEBACK_VARIABLE}=1 to see where"
        report(plain, Failure(message))
        return ExitCode.FAILED
    return result if isinstance(result, int) else ExitCode.OK


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
    sys.exit(run(sys.argv[1:]))


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt
