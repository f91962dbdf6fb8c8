"""bench: the requests it makes, the concurrency it keeps, and the figures it prints."""

from __future__ import annotations

import dataclasses
import signal

import pytest
from cli_fake_daemon import VOCABULARY, Running, version
from cli_support import Residentctl
from cli_terminal import WAIT_S_MAX, piped
from google.rpc import code_pb2, status_pb2
from test_cli_commands import drawn

from resident.v1 import inference_pb2
from residentd.cli.bench import STREAMS_PER_CHANNEL, Plan, Span, request_messages, span
from residentd.cli.bench_view import CLIENT_CORES_NOTABLE, report_view
from residentd.cli.exits import ExitCode, Failure
from residentd.cli.statistics import Arrival, Trace, report
from residentd.config import Config

PLAN = Plan(
    model=inference_pb2.Model(name="toy", version="toy@1", vocabulary=VOCABULARY, context=2048),
    concurrency=4,
    requests=50,
    warmup=2,
    prompt_tokens=Span(3, 9),
    output_tokens=Span(5, 7),
    seed=11,
    temperature=0.0,
    timeout_s=60.0,
)


def test_requests_are_decided_by_the_seed() -> None:
    """Exact lengths within the ranges, ids within the vocabulary, no two prompts alike; another seed, other prompts."""
    messages = list(request_messages(PLAN))
    assert len(messages) == PLAN.requests + PLAN.warmup
    assert {len(message.token_ids.ids) for message in messages} == set(range(3, 10))
    assert {message.sampling.max_tokens for message in messages} == {5, 6, 7}
    assert max(max(message.token_ids.ids) for message in messages) < VOCABULARY
    assert len({tuple(message.token_ids.ids) for message in messages}) == len(messages)
    assert all(message.sampling.ignore_eos and message.return_token_ids for message in messages)
    assert list(request_messages(PLAN)) == messages
    assert list(request_messages(dataclasses.replace(PLAN, seed=12))) != messages


def test_a_connection_never_queues_streams() -> None:
    """Below the daemon's limit of streams on a connection: what waits must wait in the scheduler."""
    assert Config().limits.streams_max > STREAMS_PER_CHANNEL


@pytest.mark.parametrize(
    ("text", "expected"), [("32:256", Span(32, 256)), ("64", Span(64, 64)), ("1:1", Span(1, 1)), ("7:", Span(7, 7))]
)
def test_spans(text: str, expected: Span) -> None:
    """MIN:MAX, or one number for both."""
    assert span(text, "--prompt-tokens") == expected


@pytest.mark.parametrize("text", ["", ":", "a:b", "0", "0:5", "9:3", "-1:4", "1:2:3", "1.5"])
def test_spans_that_are_none(text: str) -> None:
    """A usage error that names the option and what was given."""
    with pytest.raises(Failure, match="--prompt-tokens") as caught:
        span(text, "--prompt-tokens")
    assert caught.value.code == ExitCode.USAGE


def test_bench_keeps_so_many_streams_busy(residentctl: Residentctl, running: Running) -> None:
    """Never more than --concurrency at a time, and that many at some time; every request reaches the daemon once."""
    running.daemon.token_delay_s = 0.002
    result = residentctl("bench", "-c", "6", "-n", "18", "--prompt-tokens", "4:8", "--output-tokens", "5")
    assert result.code == ExitCode.OK
    assert running.daemon.streams_max == 6
    assert len(running.daemon.requests) == 18 + 1
    sent = [list(request.token_ids.ids) for request in running.daemon.requests]
    assert all(4 <= len(ids) <= 8 for ids in sent)
    for part in ("18 requests, 6 at a time", "TTFT", "ITL per token", "message gap", "at most 6 rows in one step"):
        assert part in result.out


def test_bench_json_has_every_figure(residentctl: Residentctl, running: Running) -> None:
    """The plan, percentiles of each latency, rates, and the batch that was reached; tokens are counted exactly."""
    running.daemon.tokens_per_message = 4
    running.daemon.token_delay_s = 0.002
    document = residentctl(
        "bench", "--json", "-c", "2", "-n", "6", "--prompt-tokens", "4:8", "--output-tokens", "10", "--warmup", "0"
    ).document  # fmt: skip
    assert (document["model"], document["concurrency"], document["requests"]) == ("toy@1", 2, 6)
    assert (document["output_tokens"], document["messages"]) == (60, 18)
    assert document["prompt_tokens"] == sum(len(request.token_ids.ids) for request in running.daemon.requests)
    assert document["itl_ms"]["count"] == 6 * 9
    assert document["message_gap_ms"]["count"] == 6 * 2
    # A stream's messages are at least 2 ms of sleep apart; a gap is measured later by the same clock's reading only.
    assert document["message_gap_ms"]["p50"] >= 1.0
    assert document["ttft_ms"]["count"] == 6
    assert document["output_tokens_per_s"] == pytest.approx(60 / document["wall_s"])
    assert document["batch_rows_max"] == running.daemon.streams_max
    assert document["failures"] == []


def test_bench_counts_failures_and_fails(residentctl: Residentctl, running: Running) -> None:
    """A run with failures is not a result: they are shown, and the exit code says so."""
    running.daemon.faults["Generate"] = status_pb2.Status(code=code_pb2.RESOURCE_EXHAUSTED, message="no room")
    result = residentctl("bench", "-n", "4", "--prompt-tokens", "4", "--output-tokens", "5")
    assert result.code == ExitCode.FAILED
    assert "4 failed: no room" in result.out
    assert "4 of 4 requests failed" in result.err


def test_ctrl_c_cancels_every_stream(running: Running) -> None:
    """SIGINT ends the run with 130 and one line, and the daemon's streams with it."""
    running.daemon.hold_after = 1
    process = piped("--state", str(running.state), "bench", "-c", "3", "--warmup", "0", "--output-tokens", "5")
    assert running.daemon.holding.wait(WAIT_S_MAX)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=WAIT_S_MAX)
    assert running.daemon.cancelled.wait(WAIT_S_MAX)
    assert (process.returncode, out, err) == (ExitCode.INTERRUPTED, b"", b"residentctl: interrupted\n")


def test_bench_does_without_the_admin_service(residentctl: Residentctl, running: Running) -> None:
    """The batch is left out where the admin socket is not there, or knows no engine of this digest."""
    arguments = ("bench", "-n", "2", "--prompt-tokens", "4", "--output-tokens", "5", "--json")
    remote = residentctl(*arguments, "--address", running.address, "--admin-socket", "/nonexistent/admin.sock")
    assert (remote.code, remote.document["batch_rows_max"]) == (ExitCode.OK, None)
    running.daemon.faults["Status"] = status_pb2.Status(code=code_pb2.PERMISSION_DENIED, message="no")
    assert residentctl(*arguments).document["batch_rows_max"] is None


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("--model", "other"), ExitCode.FAILED, "model other is not served. Served: toy@1, toy@2"),
        ((), ExitCode.USAGE, "Name one with --model"),
        (("-m", "toy@2", "--prompt-tokens", "2000", "--output-tokens", "49"), ExitCode.USAGE, "make 2,049"),
    ],
)
def test_bench_refuses_what_cannot_run(
    residentctl: Residentctl, running: Running, arguments: tuple[str, ...], code: ExitCode, said: str
) -> None:
    """An unknown or ambiguous model, or lengths beyond its context: said before any request is made."""
    running.daemon.versions.append(version(2, state="ready"))
    result = residentctl("bench", *arguments)
    assert result.code == code
    assert said in result.err
    assert not running.daemon.requests


@pytest.mark.parametrize("columns", [80, 120])
def test_the_report_fits_the_terminal(columns: int) -> None:
    """Large figures at both widths; a client that was itself busy says so."""
    trace = Trace(prompt_tokens=1_000_000, sent_s=0.0, ended_s=99.0, arrivals=(Arrival(12.5, 1), Arrival(99.0, 40_000)))
    for cores in (CLIENT_CORES_NOTABLE - 0.01, CLIENT_CORES_NOTABLE + 0.01):
        view = report_view(report([trace] * 3), title="toy@1", client_cores=cores, rows=128)
        lines = drawn(view, columns)
        assert max(len(line) for line in lines) <= columns
        assert any("may itself be the limit" in line for line in lines) == (cores > CLIENT_CORES_NOTABLE)
