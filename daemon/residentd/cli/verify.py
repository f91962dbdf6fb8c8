"""verify: a version against what was recorded when it was built."""

from __future__ import annotations

import typer

from resident.v1 import admin_pb2
from residentd.cli.channels import admin_stub
from residentd.cli.checks import check_view
from residentd.cli.command import Session
from residentd.cli.exits import ExitCode, Failure
from residentd.cli.output import fields_of
from residentd.cli.versions import LOAD_S_MAX, ModelArgument


def verify(session: Session, *, model: ModelArgument) -> None:
    """Check a version's files, tokenizer, chat template, golden tokens and logit statistics, loaded or not.

    Runs beside what serves. A version that does not pass is degraded until a check passes, and its name falls back to
    the newest version that is good. Exit code 0: passed. 4: it did not. 5: it could not be checked.
    """
    output = session.output
    with admin_stub(session.target()) as admin, output.waiting(f"verifying {model}"):
        answer = admin.Verify(admin_pb2.VerifyRequest(model=model), timeout=LOAD_S_MAX)
    version, check = answer.version, answer.version.check
    if output.as_json:
        output.emit(fields_of(answer))
        if not check.passed:
            raise typer.Exit(ExitCode.ACCURACY)
        return
    output.out.print(check_view(answer))
    if not check.passed:
        raise Failure(f"{version.name}@{version.number} is degraded: {check.message}", code=ExitCode.ACCURACY)
