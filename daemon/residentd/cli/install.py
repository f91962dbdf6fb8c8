"""install: from an ONNX export to a version that is served."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Generator
from pathlib import Path
from typing import Annotated

import typer

from resident.v1.admin_pb2 import InstallProgress, InstallRequest
from residentd.cli import builder
from residentd.cli.channels import admin_stub, reach_admin
from residentd.cli.command import Session
from residentd.cli.exits import ExitCode, Failure, usage
from residentd.cli.options import SourceOptions, WeightOptions
from residentd.cli.progress import follow, installed_lines
from residentd.cli.requests import UINT32_MAX, checked
from residentd.cli.target import Target

INSTALL_S_MAX = 86_400.0


def install(
    session: Session,
    *,
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="The export: model.onnx, config.json, tokenizer.json, …")
    ],
    name: Annotated[str, typer.Option(metavar="NAME", help="The name that requests will use.")],
    context: Annotated[
        int, typer.Option(min=0, max=UINT32_MAX, help="Tokens of one sequence. 0: the model's own limit, at most 2048.")
    ] = 0,
    slots: Annotated[
        int, typer.Option(min=0, max=UINT32_MAX, help="Sequences in one batch. 0: the builder's default.")
    ] = 0,
    step_tokens: Annotated[
        int, typer.Option(min=0, max=UINT32_MAX, help="Tokens of one step at most. 0: the builder's default.")
    ] = 0,
    keep_active: Annotated[
        bool, typer.Option("--keep-active", help="Leave the version that NAME means now as it is.")
    ] = False,
    source: SourceOptions,
    weights: WeightOptions,
) -> None:
    """Compile an ONNX export for this machine, verify it against the export, and serve it.

    DIR is what `optimum-cli export onnx` writes: with --task text-generation-with-past a model that generates, with
    feature-extraction one that embeds (modules.json and 1_Pooling beside it), with text-classification one that
    classifies or ranks; or any ONNX file. Ctrl-C cancels, and nothing is left behind. Where no daemon runs, the
    compiler is run directly, and the daemon loads the version when it starts.
    """
    request = InstallRequest(
        directory=str(_export(directory)),
        name=name,
        context=context,
        slots=slots,
        step_tokens=step_tokens,
        keep_active=keep_active,
        precision=weights.precision or "",
        block=None if weights.block is None else int(weights.block),
        symmetric=weights.symmetric,
        embedding=weights.embedding or "",
        head=weights.head or "",
        kl_max=_kl_max(weights.kl_max),
        mode=source.mode or "",
        variant=source.variant,
        kind=source.kind,
        shapes=[checked(entry) for entry in source.shape or ()],
    )
    output = session.output
    target = session.target()
    events, through_daemon = _events(target, request)
    try:
        with contextlib.closing(events):
            version = follow(output, events)
    except KeyboardInterrupt:
        raise Failure("cancelled; nothing is left behind", code=ExitCode.INTERRUPTED) from None
    if output.as_json:
        return
    for line in installed_lines(version):
        output.line(line)
    if not through_daemon:
        output.note(f"no daemon answers on {target.admin_socket}; it loads {name} when it starts")


def _kl_max(value: float | None) -> float:
    """0 stands for the default in the contract, so it cannot be asked for. Raises Failure (usage)."""
    if value == 0:
        raise usage("--kl-max is 0; no build of less than fp32 loses nothing. Give a bound in nats, such as 0.05")
    return value or 0.0


def _export(directory: Path) -> Path:
    """The absolute path of `directory`. One that this user cannot look into is left to the daemon to judge."""
    path = Path(os.path.abspath(directory))  # noqa: PTH100 - Path.absolute() keeps `..`, resolve() follows links
    with contextlib.suppress(PermissionError):
        if not path.exists():
            raise usage(f"there is no directory {path}. Give the directory that holds model.onnx")
        if not path.is_dir() and path.suffix != ".onnx":
            raise usage(f"{path} is not a directory. Give the directory that holds model.onnx and config.json")
    return path


def _events(target: Target, request: InstallRequest) -> tuple[Generator[InstallProgress, None, None], bool]:
    """The installation's progress, through the daemon or, where none listens, from the compiler itself."""
    try:
        reach_admin(target)
    except Failure as failure:
        listening = isinstance(failure.__cause__, PermissionError)
        if listening or target.state is None or not _writable(target.state):
            raise
        return builder.build(builder.command_line(request, target.state)), False
    return _daemon_events(target, request), True


def _daemon_events(target: Target, request: InstallRequest) -> Generator[InstallProgress, None, None]:
    with admin_stub(target) as admin:
        call = admin.Install(request, timeout=INSTALL_S_MAX)
        try:
            yield from call
        finally:
            call.cancel()  # without effect on a call that has ended


def _writable(state: Path) -> bool:
    """The compiler could make its files there: in the directory, or in a new one of that name."""
    existing = next(parent for parent in (state, *state.parents) if parent.exists())
    return existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)
