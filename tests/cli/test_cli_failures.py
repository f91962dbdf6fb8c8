"""Every way a call can fail: the exit code and the line that a person reads."""

from __future__ import annotations

import inspect

import grpc
import pytest
from cli_fake_daemon import Running
from cli_support import Residentctl
from google.protobuf import any_pb2, duration_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2

from residentd import errors
from residentd.cli.exits import EXIT_MEANINGS, ExitCode, Failure, exit_code_table
from residentd.cli.failures import EXIT_BY_REASON
from residentd.cli.output import printable
from residentd.rpc import convert

FINDINGS = (
    errors.Finding("`lm_head.weight` points outside the directory", "model.onnx", "Export again into one directory"),
    errors.Finding("the file is missing", "tokenizer.json", "Export with the tokenizer"),
)
EXAMPLES: tuple[tuple[errors.ResidentError, ExitCode], ...] = (
    (errors.ResidentError("something of ours broke"), ExitCode.FAILED),
    (errors.CallerError("top_p is 3; it goes from 0 to 1", field="sampling.top_p"), ExitCode.USAGE),
    (errors.NotFoundError("there is no model 'x'"), ExitCode.FAILED),
    (errors.OverloadedError("256 wait, the most", retry_after_ms=1500), ExitCode.OVERLOADED),
    (errors.UnavailableError("the model is loading"), ExitCode.OVERLOADED),
    (errors.DeadlineError("the deadline passed"), ExitCode.FAILED),
    (errors.EngineFailedError("the engine died 5 times"), ExitCode.FAILED),
    (errors.OperatorError("model name 'X' is not allowed"), ExitCode.USAGE),
    (errors.ConfigError("unknown key"), ExitCode.FAILED),
    (errors.LoadError("model x@2 could not be loaded: it differs from its goldens"), ExitCode.MACHINE),
    (errors.ConflictError("another installation is running"), ExitCode.FAILED),
    (errors.SourceError(FINDINGS), ExitCode.SOURCE_REFUSED),
    (errors.AccuracyError("logits differ by 0.3; the bound is 0.001"), ExitCode.ACCURACY),
    (errors.MachineError("12 GB are needed, 8 GB are free"), ExitCode.MACHINE),
    (errors.StoreError("the manifest is damaged"), ExitCode.MACHINE),
    (errors.BackendLostError("the worker is gone"), ExitCode.MACHINE),
    (errors.StepRetryableError("the step failed"), ExitCode.MACHINE),
    (errors.LinkError("a frame is malformed"), ExitCode.FAILED),
)


def as_status(error: errors.ResidentError) -> status_pb2.Status:
    """What the daemon sends for `error`, by the daemon's own conversion."""
    code = next(code for kind, code in convert.STATUS_BY_ERROR if isinstance(error, kind))
    return status_pb2.Status(code=getattr(code_pb2, code.name), message=str(error), details=convert._details(error))


def test_the_examples_cover_the_error_tree() -> None:
    """A new class of error needs a decision about its exit code here."""
    tree = {kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, errors.ResidentError)}
    assert {type(error) for error, _ in EXAMPLES} == tree
    reasons = {kind.__name__.removesuffix("Error").upper() for kind in tree}
    assert set(EXIT_BY_REASON) <= reasons


@pytest.mark.parametrize(("error", "code"), EXAMPLES, ids=lambda value: type(value).__name__)
def test_exit_code_of_every_error(
    residentctl: Residentctl, running: Running, error: errors.ResidentError, code: ExitCode
) -> None:
    """Whose fault it is decides the exit code, over the wire and back; stderr has one line, stdout the JSON."""
    running.daemon.faults["Load"] = as_status(error)
    human = residentctl("load", "toy")
    assert human.code == code
    assert human.out == ""
    lines = human.err.splitlines()
    assert lines[0].startswith("residentctl: ")
    assert len(lines) == 1 + (len(FINDINGS) if code == ExitCode.SOURCE_REFUSED else 0)
    assert "Traceback" not in human.err
    machine = residentctl("load", "toy", "--json")
    assert machine.code == code
    assert machine.document["error"]["exit_code"] == code
    if code != ExitCode.SOURCE_REFUSED:
        assert str(error) in lines[0]
        assert str(error) in machine.document["error"]["message"]


def test_every_finding_of_a_refused_source_is_listed(residentctl: Residentctl, running: Running) -> None:
    """Where, what and the way out of each, numbered; --json has the same as a list."""
    running.daemon.faults["Load"] = as_status(errors.SourceError(FINDINGS))
    lines = residentctl("load", "toy").err.splitlines()
    assert "2 findings" in lines[0]
    assert lines[1:] == [
        "  1. model.onnx: `lm_head.weight` points outside the directory. Export again into one directory",
        "  2. tokenizer.json: the file is missing. Export with the tokenizer",
    ]
    assert residentctl("--json", "load", "toy").document["error"]["findings"] == [
        {
            "where": "model.onnx",
            "text": "`lm_head.weight` points outside the directory. Export again into one directory",
        },
        {"where": "tokenizer.json", "text": "the file is missing. Export with the tokenizer"},
    ]


def test_a_retry_hint_is_shown(residentctl: Residentctl, running: Running) -> None:
    """RetryInfo appears as a time for a person and as milliseconds for a program."""
    running.daemon.faults["ListVersions"] = as_status(errors.OverloadedError("full", retry_after_ms=1500))
    assert "full (try again in 1.5 s)" in residentctl("list").err
    assert residentctl("list", "--json").document["error"]["retry_after_ms"] == 1500


@pytest.mark.parametrize(
    ("status", "code", "said"),
    [
        (grpc.StatusCode.UNIMPLEMENTED, ExitCode.FAILED, "Upgrade it"),
        (grpc.StatusCode.UNAVAILABLE, ExitCode.UNREACHABLE, "see its journal"),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, ExitCode.MACHINE, "said"),
        (grpc.StatusCode.DEADLINE_EXCEEDED, ExitCode.FAILED, "--timeout"),
        (grpc.StatusCode.PERMISSION_DENIED, ExitCode.FAILED, "said"),
        (grpc.StatusCode.INVALID_ARGUMENT, ExitCode.USAGE, "said"),
    ],
)
def test_plain_statuses_say_what_to_do_next(
    residentctl: Residentctl, running: Running, status: grpc.StatusCode, code: ExitCode, said: str
) -> None:
    """A status without details, as a proxy or another version sends it, still ends well."""
    running.daemon.faults["ListVersions"] = status_pb2.Status(code=status.value[0], message="said so")
    result = residentctl("list")
    assert result.code == code
    assert said in result.err


def test_details_that_do_not_fit_are_left_out(residentctl: Residentctl, running: Running) -> None:
    """An unknown detail, or one that cannot be read, hides neither the message nor the exit code."""
    retry = any_pb2.Any()
    retry.Pack(error_details_pb2.RetryInfo(retry_delay=duration_pb2.Duration(seconds=2)))
    broken = any_pb2.Any(type_url=retry.type_url, value=b"\xff\xff\xff")
    stranger = any_pb2.Any(type_url="type.googleapis.com/some.Other", value=b"x")
    for details in ([stranger, retry], [broken]):
        running.daemon.faults["ListVersions"] = status_pb2.Status(
            code=code_pb2.RESOURCE_EXHAUSTED, message="no room", details=details
        )
        result = residentctl("list")
        assert "no room" in result.err
        assert result.code == (ExitCode.OVERLOADED if stranger in details else ExitCode.MACHINE)


def test_the_table_of_exit_codes_is_whole_and_in_the_help(lonely_residentctl: Residentctl) -> None:
    """Each code has its meaning, once, and `residentctl --help` shows them all."""
    assert set(EXIT_MEANINGS) == set(ExitCode)
    shown = lonely_residentctl("--help").out
    for line in exit_code_table().splitlines():
        assert line.strip() in shown


def test_control_characters_from_the_other_side_are_shown_not_obeyed(
    residentctl: Residentctl, running: Running
) -> None:
    """A file name in a finding can hold a terminal's escape sequences; the terminal must not get them."""
    hostile = errors.SourceError([errors.Finding("bad\x1b]0;owned\x07", "a\x1b[2Jb", "no\x9b1m")])
    running.daemon.faults["Load"] = as_status(hostile)
    err = residentctl("load", "toy").err
    assert "\x1b" not in err
    assert "\x07" not in err
    assert "\x9b" not in err
    assert "a␛[2Jb" in err


@pytest.mark.parametrize(
    ("text", "shown"),
    [("plain é 中 👩‍🚀\n\t.", "plain é 中 👩‍🚀\n\t."), ("\r\x00\x7f\x9b", "␍␀\\x7f\\x9b")],
)
def test_printable(text: str, shown: str) -> None:
    """Text of any script passes; C0 and C1 controls but newline and tab become visible."""
    assert printable(text) == shown


def test_a_failure_without_details_is_small_json() -> None:
    """Only what is known is in the object."""
    assert Failure("no").to_json() == {"message": "no", "exit_code": 1}
