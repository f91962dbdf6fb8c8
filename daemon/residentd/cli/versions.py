"""list, load, unload: the versions on this machine."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated

import typer

from resident.v1 import admin_pb2
from residentd.cli import formats
from residentd.cli.channels import UNARY_S_MAX, admin_stub
from residentd.cli.command import Session
from residentd.cli.output import fields_of
from residentd.cli.tables import versions_table

LOAD_S_MAX = 3600.0  # a large engine from a slow disk, then its goldens

ModelArgument = Annotated[str, typer.Argument(metavar="NAME[@N]", help="NAME for the active version, or one version.")]


def list_versions(
    session: Session,
    *,
    name: Annotated[str, typer.Argument(metavar="[NAME]", help="Only the versions of this model.")] = "",
) -> None:
    """List the installed versions: state, engine, limits, size, speed, and how well each reproduces its export.

    QUALITY is first the canonical fp32 form beside the export: greedy tokens equal, and the largest difference of a
    logit. Then the build itself over a text: mean KL divergence, share of equal first choices, perplexity (and the
    export's). TOKENS/S is decoding 1 sequence and 8 together on the machine that built it.
    """
    output = session.output
    with admin_stub(session.target()) as admin:
        answer = admin.ListVersions(admin_pb2.ListVersionsRequest(name=name), timeout=UNARY_S_MAX)
    if output.as_json:
        output.emit({"versions": [fields_of(version) for version in answer.versions]})
    else:
        output.out.print(versions_table(answer.versions, now=datetime.now(UTC), columns=output.out.width))


def load(session: Session, *, model: ModelArgument) -> None:
    """Load a version into an engine worker; returns once it has passed its goldens."""
    output = session.output
    with admin_stub(session.target()) as admin, output.waiting(f"loading {model}"):
        version = admin.Load(admin_pb2.LoadRequest(model=model), timeout=LOAD_S_MAX).version
    if output.as_json:
        output.emit({"version": fields_of(version)})
    else:
        digest = formats.short_digest(version.digest)
        output.line(f"{version.name}@{version.number} is {version.state or 'loaded'} ({digest})")


def unload(session: Session, *, model: ModelArgument) -> None:
    """Let the running generations of a version finish, then stop its worker."""
    output = session.output
    with admin_stub(session.target()) as admin, output.waiting(f"draining {model}"):
        admin.Unload(admin_pb2.UnloadRequest(model=model), timeout=LOAD_S_MAX)
    if output.as_json:
        output.emit({"unloaded": model})
    else:
        output.line(f"{model} is unloaded")
