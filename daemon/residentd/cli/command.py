"""What every command has in common: the shared options, a session, and an end with the right exit code."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import typer

from residentd.cli.exits import ExitCode, Failure
from residentd.cli.options import ConnectionOptions, SamplingOptions, SourceOptions, WeightOptions
from residentd.cli.output import Output, open_output, report
from residentd.cli.target import Target, resolve

_GROUPS = (ConnectionOptions, SamplingOptions, SourceOptions, WeightOptions)


@dataclass(frozen=True, slots=True)
class Session:
    """What a command works with. `target` is resolved on first use: `--help` and usage errors need no configuration."""

    connection: ConnectionOptions
    output: Output

    def target(self) -> Target:
        """Raises Failure (usage) where the configuration cannot be used."""
        return resolve(self.connection, os.environ)


def command(function: Callable[..., None]) -> Callable[..., None]:
    """Make `function(session, …)` a typer command.

    A parameter annotated with an option group (options.py) becomes that group's options on the command line;
    ConnectionOptions are added to every command, and become `session`. Failure and Ctrl-C become exit codes.
    """
    hints = typing.get_type_hints(function, include_extras=True)
    groups = {name: hint for name, hint in hints.items() if hint in _GROUPS}

    @functools.wraps(function)
    def run(typer_context: typer.Context, **values: Any) -> None:
        connection = _take(ConnectionOptions, values).over(typer_context.obj or ConnectionOptions())
        for name, group in groups.items():
            values[name] = _take(group, values)
        session = Session(connection, open_output(as_json=connection.json))
        with_exit_code(session.output, functools.partial(function, session, **values))

    parameters = [_context_parameter(), *_parameters(function, hints), *_group_parameters(ConnectionOptions)]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def with_exit_code(output: Output, action: Callable[[], None]) -> None:
    """Run `action`; end the command by typer.Exit with the code of its Failure, or 130 after Ctrl-C."""
    try:
        action()
    except Failure as failure:
        report(output, failure)
        raise typer.Exit(failure.code) from failure
    except KeyboardInterrupt as interrupt:
        report(output, Failure("interrupted", code=ExitCode.INTERRUPTED))
        raise typer.Exit(ExitCode.INTERRUPTED) from interrupt


def connection_parameters() -> list[inspect.Parameter]:
    """The context and ConnectionOptions, as the parameters of a typer callback."""
    return [_context_parameter(), *_group_parameters(ConnectionOptions)]


def _take(group: type[Any], values: dict[str, Any]) -> Any:
    return group(**{field.name: values.pop(field.name) for field in dataclasses.fields(group)})


def _parameters(function: Callable[..., None], hints: dict[str, Any]) -> Iterator[inspect.Parameter]:
    _session, *rest = inspect.signature(function).parameters.values()
    for parameter in rest:
        hint = hints[parameter.name]
        if hint in _GROUPS:
            yield from _group_parameters(hint)
        else:
            yield parameter.replace(annotation=hint, kind=inspect.Parameter.KEYWORD_ONLY)


def _group_parameters(group: type[Any]) -> Iterator[inspect.Parameter]:
    hints = typing.get_type_hints(group, include_extras=True)
    for field in dataclasses.fields(group):
        yield inspect.Parameter(
            field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=hints[field.name]
        )


def _context_parameter() -> inspect.Parameter:
    return inspect.Parameter("typer_context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
