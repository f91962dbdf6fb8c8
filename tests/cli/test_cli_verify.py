"""verify, and what status shows of the last check: for a person and for a program."""

from __future__ import annotations

import io

import pytest
from cli_fake_daemon import Running, version
from cli_support import Residentctl
from google.rpc import code_pb2, error_details_pb2, status_pb2
from rich.console import Console

from resident.v1 import admin_pb2
from residentd.cli.checks import check_line, check_view
from residentd.cli.exits import ExitCode
from residentd.cli.tables import status_view

WHEN = "2026-12-01T04:00:00+00:00"
FAILURE = "it does not reproduce what was recorded when it was built. logit statistics: worst difference 0.25"


def check(*, passed: bool = True, **fields: object) -> admin_pb2.Check:
    statistics = admin_pb2.CheckPart(
        name="logit statistics",
        checked=128,
        missed=0 if passed else 7,
        worst=3.1e-6 if passed else 0.25,
        bound=2e-4,
        detail="logsumexp, golden 3, token 5",
    )
    return admin_pb2.Check(
        occasion="verify",
        checked=WHEN,
        passed=passed,
        message="" if passed else FAILURE,
        parts=[admin_pb2.CheckPart(name="files", checked=4), statistics],
        environment={"onnxruntime": "1.32.0", "numpy": "2.4.6"},
        **fields,
    )


CHANGE = admin_pb2.EnvironmentChange(name="onnxruntime", before="1.31.1", after="1.32.0")
GONE = admin_pb2.EnvironmentChange(name="old-library", before="3.0")


def drawn(answer: admin_pb2.VerifyResponse, columns: int) -> list[str]:
    file = io.StringIO()
    Console(file=file, width=columns, color_system=None, highlight=False).print(check_view(answer))
    return [line.rstrip() for line in file.getvalue().splitlines()]


def answer(checked: admin_pb2.Check) -> admin_pb2.VerifyResponse:
    return admin_pb2.VerifyResponse(version=version(2, check=checked), serving="toy@1", seconds=4.25)


def test_a_check_that_passed(residentctl: Residentctl, running: Running) -> None:
    """Exit code 0, and a table on stdout: what was compared, the worst difference, and where it stands."""
    running.daemon.versions = [version(2, check=check())]
    result = residentctl("verify", "toy@2")
    assert result.code == ExitCode.OK
    assert result.err == ""
    lines = [" ".join(line.split()) for line in result.out.splitlines()]
    assert lines[0].startswith("toy@2 passed 22222222, 4.25 s")
    assert "files 4 0" in lines
    assert "logit statistics 128 0 3.1e-06 of 2.0e-04 logsumexp, golden 3, token 5" in lines
    assert "environment: as at the last good check" in lines
    assert "onnxruntime 1.32.0" in lines
    assert lines[-1] == "toy means toy@1 now"


def test_a_check_that_did_not_pass(residentctl: Residentctl, running: Running) -> None:
    """Exit code 4; the table is on stdout all the same, and stderr has the numbers in one line."""
    running.daemon.versions = [version(2, check=check(passed=False))]
    result = residentctl("verify", "toy@2")
    assert result.code == ExitCode.ACCURACY == 4
    assert "toy@2 did not pass" in result.out
    assert result.err == f"residentctl: toy@2 is degraded: {FAILURE}\n"


@pytest.mark.parametrize("passed", [True, False])
def test_json_is_one_document_either_way(residentctl: Residentctl, running: Running, *, passed: bool) -> None:
    """What a program reads has the same shape whether it passed or not; the exit code tells."""
    running.daemon.versions = [version(2, check=check(passed=passed))]
    result = residentctl("verify", "toy@2", "--json")
    assert result.code == (ExitCode.OK if passed else ExitCode.ACCURACY)
    document = result.document
    assert document["version"]["check"]["passed"] is passed
    assert [part["name"] for part in document["version"]["check"]["parts"]] == ["files", "logit statistics"]
    assert (document["serving"], document["seconds"]) == ("toy@1", 4.25)


def test_a_check_that_could_not_be_made(residentctl: Residentctl, running: Running) -> None:
    """Exit code 5: the machine's fault, not the version's."""
    status = status_pb2.Status(code=code_pb2.RESOURCE_EXHAUSTED, message="the check could not be made: 12 MiB too few")
    status.details.add().Pack(error_details_pb2.ErrorInfo(reason="MACHINE", domain="residentd"))
    running.daemon.faults["Verify"] = status
    result = residentctl("verify", "toy")
    assert result.code == ExitCode.MACHINE == 5
    assert "the check could not be made" in result.err


def test_an_unknown_version_is_refused(residentctl: Residentctl) -> None:
    """With the daemon's own words."""
    result = residentctl("verify", "toy@9")
    assert result.code == ExitCode.FAILED
    assert "toy@9 is not installed" in result.err


def test_what_changed_is_named_with_both_sides() -> None:
    """A version that was raised, a library that went, and a first check."""
    lines = drawn(answer(check(changes=[CHANGE, GONE])), 100)
    assert "  environment: changed since the last good check" in lines
    assert "    onnxruntime 1.32.0 (was 1.31.1)" in lines
    assert "    old-library none (was 3.0)" in lines
    assert "  environment: no earlier check is recorded" in drawn(answer(check(first=True)), 100)


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_the_table_fits_its_terminal(columns: int) -> None:
    """No line is broken by the terminal, and no figure is lost."""
    lines = drawn(answer(check(passed=False)), columns)
    assert max(map(len, lines)) <= columns
    text = "".join("".join(lines).split())
    for figure in ("128", "2.5e-01", "2.0e-04"):
        assert figure in text


def test_status_shows_the_last_check() -> None:
    """In one line: verdict, occasion, worst difference, and what changed before it."""
    since = "first check since onnxruntime 1.31.1 → 1.32.0"
    line = check_line(check(since=since))
    assert line == f"passed at verify {WHEN}, worst difference 3.1e-06 of 2.0e-04; {since}"
    engine = admin_pb2.EngineStatus(model_version="toy@1", state="ready", check=check(since=since))
    file = io.StringIO()
    Console(file=file, width=160, color_system=None).print(status_view(admin_pb2.StatusResponse(engines=[engine])))
    assert line in file.getvalue()


def test_names_from_the_daemon_are_made_harmless() -> None:
    """A detail with control characters does not reach the terminal as such."""
    part = admin_pb2.CheckPart(name="files", checked=1, missed=1, detail="\x1b[2Jgone")
    text = "\n".join(drawn(answer(admin_pb2.Check(parts=[part])), 80))
    assert "\x1b" not in text
    assert "gone" in text
