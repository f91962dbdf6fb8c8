"""list, load, unload, status, models, count-tokens and generate: for a person and for a program."""

from __future__ import annotations

import io
from datetime import UTC, datetime

import pytest
from cli_fake_daemon import CONTEXT, Running, version
from cli_support import Residentctl
from google.protobuf.descriptor import FieldDescriptor
from rich.console import Console, RenderableType

from resident.v1 import admin_pb2, inference_pb2
from residentd.cli.exits import ExitCode
from residentd.cli.formats import NONE
from residentd.cli.output import fields_of
from residentd.cli.tables import models_table, status_view, versions_table

NOW = datetime(2026, 12, 1, 1, 0, 0, tzinfo=UTC)
LONG = version(
    3,
    name="mistral-7b-instruct-v0.3",
    bytes=14_483_000_000,
    context=32768,
    slots=256,
    precision="int8",
    state="failed",
    state_reason="the worker died 5 times in 60 s",
)


def drawn(view: RenderableType, columns: int) -> list[str]:
    """The lines of `view` in a terminal of that width."""
    file = io.StringIO()
    Console(file=file, width=columns, color_system=None, highlight=False).print(view)
    return [line.rstrip() for line in file.getvalue().splitlines()]


def table(columns: int, *versions: admin_pb2.Version) -> list[str]:
    return drawn(versions_table(versions, now=NOW, columns=columns), columns)


def test_list_at_160_columns_has_a_line_for_each_version() -> None:
    """Name, state, engine, limits, size, agreement, quality, speed, digest and age; the active one is marked."""
    header, first, second = table(160, version(1), version(2, active=True, state="ready"))
    assert " ".join(header.split()) == (
        "MODEL STATE ENGINE CONTEXT SIZE AGREEMENT KL TOP-1 PERPLEXITY TOKENS/S DIGEST AGE"
    )
    assert " ".join(first.split()) == (
        "toy@1 available fp32 onnxruntime-cpu 2,048 × 8 538 MB 60/60 Δ 7e-05 0.031 90.1 % 20.1 (19.4) "  # noqa: RUF001
        "41.2 at 1, 110 at 8 11111111 13 h"
    )
    assert second.split()[:3] == ["●", "toy@2", "ready"]


@pytest.mark.parametrize("columns", [80, 100, 120, 160])
def test_list_fits_its_terminal_and_loses_nothing(columns: int) -> None:
    """At every width every figure of a version with long values is there, and no line is broken by the terminal."""
    lines = table(columns, LONG)
    assert max(len(line) for line in lines) <= columns
    whole = " ".join(" ".join(lines).split())
    for part in (
        "mistral-7b-instruct-v0.3@3", "failed", "int8 onnxruntime-cpu", "32,768", "256", "14.5 GB", "60/60 Δ 7e-05",
        "0.031", "90.1 %", "20.1 (19.4)", "41.2 at 1", "110 at 8", "33333333", "13 h",
        "failed: the worker died 5 times in 60 s",
    ):  # fmt: skip
        assert part in whole


def test_list_shows_an_older_build_without_what_was_not_measured() -> None:
    """A version of an older compiler has dashes, at every width, and no made-up zeros."""
    old = version(1)
    old.ClearField("quality")
    old.ClearField("cost")
    old.ClearField("speeds")
    for columns in (80, 160):
        lines = table(columns, old)
        assert "KL 0" not in "".join(lines)
        assert NONE in lines[1]


def test_list_says_why_a_version_is_in_compatibility_mode() -> None:
    """The mode with its reason, below the table; canonical versions need no note."""
    odd = version(1, mode="compatibility", mode_reason="the attention of layer 0 is not recognised")
    assert table(160, odd)[-1].strip() == (
        "toy@1 runs in compatibility mode: the attention of layer 0 is not recognised"
    )
    assert len(table(160, version(1))) == 2


def test_list_of_nothing_says_what_to_do(residentctl: Residentctl, running: Running) -> None:
    """An empty machine gets the install command, and an empty list for a program."""
    running.daemon.versions.clear()
    assert "residentctl install DIR" in residentctl("list").out
    assert residentctl("list", "--json").document == {"versions": []}


def test_list_takes_a_name(residentctl: Residentctl, running: Running) -> None:
    """Only that model's versions; through a pipe nothing is cut or coloured."""
    running.daemon.versions.append(LONG)
    result = residentctl("list", LONG.name)
    assert f"{LONG.name}@3" in result.out
    assert "toy@1" not in result.out
    assert "\x1b" not in result.out
    assert result.code == ExitCode.OK


def test_list_json_has_every_field_of_the_message(residentctl: Residentctl, running: Running) -> None:
    """--json is the contract's own fields, numbers as numbers; before and after the subcommand."""
    (entry,) = residentctl("list", "--json").document["versions"]
    always = {field.name for field in admin_pb2.Version.DESCRIPTOR.fields if not field.has_presence}
    assert (
        always | {"quality", "cost", "speeds"}
        <= set(entry)
        <= {field.name for field in admin_pb2.Version.DESCRIPTOR.fields}
    )
    assert (entry["quality"]["kl_mean"], entry["speeds"]["decode_many"]) == (0.0312, 110.4)
    assert (entry["bytes"], entry["active"], entry["logit_diff_max"]) == (538_000_000, True, 7.2e-5)
    assert residentctl("--json", "list").document == residentctl("list", "--json").document


def test_load_and_unload(residentctl: Residentctl, running: Running) -> None:
    """Each says what is so now; a name that is not installed is an error with exit code 1."""
    running.daemon.versions.append(version(1, name="other"))
    assert residentctl("load", "other").out == "other@1 is ready (11111111)\n"
    assert running.daemon.versions[1].state == "ready"
    assert residentctl("unload", "other@1").out == "other@1 is unloaded\n"
    assert running.daemon.versions[1].state == "available"
    assert residentctl("load", "other", "--json").document["version"]["state"] == "ready"
    assert residentctl("unload", "other", "--json").document == {"unloaded": "other"}
    missing = residentctl("load", "third")
    assert (missing.code, missing.out) == (ExitCode.FAILED, "")
    assert "third is not installed" in missing.err


def test_status_shows_what_the_engines_do(residentctl: Residentctl) -> None:
    """Slots, cache, queue, rates, percentiles, restarts and endings, each figure as the daemon reported it."""
    out = residentctl("status").out
    for part in (
        "residentd 0.1.0 · up 2 h 13 min", "toy@1  ready", "5 of 8 used, 3 waiting", "19 %, 3,120 of 16,384 tokens",
        "214.3 output, 1,203 prompt", "12,931", "pid 4711, 612 MB, 1 restart", "stop 120 · length 8 · cancelled 3",
    ):  # fmt: skip
        assert part in out
    rows = {line.split()[0]: " ".join(line.split()[1:]) for line in out.splitlines() if line.strip()}
    assert rows["TTFT"] == "82.1 ms 210 ms 1.34 s 128"
    assert rows["ITL"] == "21.2 ms 48.0 ms 60.0 ms 9,214"


def test_status_json_is_the_message(residentctl: Residentctl) -> None:
    """64-bit numbers stay numbers, maps become objects."""
    document = residentctl("status", "--json").document
    (engine,) = document["engines"]
    assert engine["kv_tokens_used"] == 3120
    assert engine["finished"] == {"cancelled": 3, "length": 8, "stop": 120}
    assert engine["itl_ms"] == {"p50": 21.2, "p95": 48.0, "p99": 60.0, "count": 9214}


def test_status_of_an_idle_engine_shows_no_percentiles() -> None:
    """No samples is a dash, not 0 ms; no engine at all says how to get one."""
    idle = admin_pb2.StatusResponse(engines=[admin_pb2.EngineStatus(model_version="toy@1", slots=8, state="ready")])
    lines = drawn(status_view(idle), 80)
    assert next(line for line in lines if "TTFT" in line).split() == ["TTFT", "–", "–", "–", "0"]  # noqa: RUF001
    assert max(len(line) for line in lines) <= 80
    assert "residentctl load NAME" in drawn(status_view(admin_pb2.StatusResponse()), 80)[-1]


@pytest.mark.parametrize(("mode", "is_shown"), [("compatibility", True), ("canonical", False), ("", False)])
def test_status_says_where_an_engine_is_in_compatibility_mode(mode: str, *, is_shown: bool) -> None:
    """It is slower than the machine could be, and `list` says why; the usual mode is no news."""
    engine = admin_pb2.EngineStatus(model_version="toy@1", slots=8, state="ready", mode=mode)
    lines = drawn(status_view(admin_pb2.StatusResponse(engines=[engine])), 80)
    shown = [" ".join(line.split()) for line in lines if line.split()[:1] == ["mode"]]
    assert shown == (["mode compatibility; residentctl list has the reason"] if is_shown else [])


@pytest.mark.parametrize("columns", [80, 120])
def test_models_fit_the_terminal(columns: int) -> None:
    """The version's name, limits and vocabulary at both widths."""
    model = inference_pb2.Model(
        name="toy", version="toy@1", architecture="LlamaForCausalLM", precision="fp32", context=CONTEXT, slots=8,
        vocabulary=49_152, ready=True, chat=True,
    )  # fmt: skip
    lines = drawn(models_table([model], columns=columns), columns)
    assert max(len(line) for line in lines) <= columns
    assert {"toy@1", "ready", "fp32", "2,048", "8", "49,152", "yes"} <= set(lines[1].split())


def test_models(residentctl: Residentctl, running: Running) -> None:
    """The Inference service's own list, for a caller who may not open the admin socket."""
    assert "toy@1" in residentctl("models", "--address", running.address).out
    assert [model["name"] for model in residentctl("models", "--json").document["models"]] == ["toy"]


@pytest.mark.parametrize("chat", [(), ("--chat",)], ids=["text", "chat"])
def test_count_tokens(residentctl: Residentctl, chat: tuple[str, ...]) -> None:
    """The count beside the context; --json lists the ids."""
    assert residentctl("count-tokens", "one two three", *chat).out == "3 tokens of 2,048\n"
    document = residentctl("count-tokens", "one two three", "--json", *chat).document
    assert document == {"tokens": 3, "context": CONTEXT, "token_ids": [0, 1, 2]}


def test_generate_writes_the_answer_and_nothing_else(residentctl: Residentctl, running: Running) -> None:
    """Through a pipe stdout is the answer to the byte: no newline added, no statistics."""
    result = residentctl("generate", "one two three")
    assert (result.code, result.out, result.err) == (ExitCode.OK, " w0 w1 w2", "")
    (request,) = running.daemon.requests
    assert request.prompt == "one two three"
    assert not request.sampling.HasField("temperature")


def test_generate_sends_every_option(residentctl: Residentctl, running: Running) -> None:
    """Each option arrives in its field, and only in its field."""
    residentctl(
        "generate", "hello", "--model", "toy@1", "--max-tokens", "5", "--min-tokens", "2", "--temperature", "0.5",
        "--top-k", "40", "--top-p", "0.75", "--min-p", "0.125", "--repetition-penalty", "1.5",
        "--frequency-penalty", "0.25", "--presence-penalty=-0.5", "--logit-bias", "7=-2.5", "--logit-bias", "8=1",
        "--seed", str(2**64 - 1), "--stop", "END", "--stop", "\n\n", "--stop-token-id", "3", "--ignore-eos",
        "--logprobs", "2",
    )  # fmt: skip
    (request,) = running.daemon.requests
    assert request == inference_pb2.GenerateRequest(
        model="toy@1",
        prompt="hello",
        stop=["END", "\n\n"],
        return_token_ids=True,
        sampling=inference_pb2.Sampling(
            max_tokens=5, min_tokens=2, temperature=0.5, top_k=40, top_p=0.75, min_p=0.125, repetition_penalty=1.5,
            frequency_penalty=0.25, presence_penalty=-0.5, logit_bias={7: -2.5, 8: 1.0}, seed=2**64 - 1,
            stop_token_ids=[3], ignore_eos=True, logprobs=2,
        ),
    )  # fmt: skip
    settable = {field.name for field in inference_pb2.Sampling.DESCRIPTOR.fields}
    assert {field.name for field, _ in request.sampling.ListFields()} == settable


def test_generate_through_the_chat_template(residentctl: Residentctl, running: Running) -> None:
    """--chat asks as a user's message; --system implies it and comes first."""
    residentctl("generate", "hello", "--chat")
    residentctl("generate", "hello", "--system", "Be brief.")
    first, second = ([(entry.role, entry.content) for entry in r.chat.messages] for r in running.daemon.requests)
    assert first == [("user", "hello")]
    assert second == [("system", "Be brief."), ("user", "hello")]


def test_generate_json_is_a_line_for_each_message(residentctl: Residentctl, running: Running) -> None:
    """started, deltas with ids and logprobs, finished with its reason: in the order of the stream."""
    running.daemon.tokens_per_message = 2
    events = residentctl("generate", "one two three", "--json", "--logprobs", "1", "--temperature", "0.7").events
    assert [event["event"] for event in events] == ["started", "delta", "delta", "finished"]
    assert events[0]["sampling"]["temperature"] == 0.7  # a float32 on the wire, printed as the number that was meant
    assert [event["token_ids"] for event in events[1:3]] == [[0, 1], [2]]
    assert "".join(event["text"] for event in events[1:3]) == " w0 w1 w2"
    assert events[1]["logprobs"][1] == {"token_id": 1, "logprob": -0.5, "top": [{"token_id": 1, "logprob": -0.5}]}
    assert (events[3]["reason"], events[3]["usage"]) == ("length", {"prompt_tokens": 3, "completion_tokens": 3})


def test_generate_reports_figures_on_request(residentctl: Residentctl) -> None:
    """--stats goes to stderr, --logprobs below the answer."""
    result = residentctl("generate", "one two", "--stats", "--logprobs", "1")
    assert "toy@1 · 2 tokens · first after 82.0 ms · 33.1 tokens/s · length" in result.err
    assert "LOGPROB" in result.out


def test_generate_reads_stdin(residentctl: Residentctl, running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """`-` is stdin as UTF-8, its last newline included; what is not UTF-8 is refused before anything is sent."""
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO("ein Käse\n".encode())))
    assert residentctl("generate", "-").out == " w0 w1"
    assert running.daemon.requests[0].prompt == "ein Käse\n"
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"ok \xff")))
    refused = residentctl("generate", "-")
    assert refused.code == ExitCode.USAGE
    assert "not UTF-8 (byte 3)" in refused.err
    assert len(running.daemon.requests) == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ("--logit-bias", "7"), ("--logit-bias", "seven=1"), ("--logit-bias", "7=nan"), ("--logit-bias", "-1=1"),
        ("--seed", str(2**64)), ("--max-tokens", str(2**32)), ("--stop", "\udcff"), ("--top-k", str(2**32)),
    ],
    ids=repr,
)  # fmt: skip
def test_generate_refuses_what_no_field_can_hold(
    residentctl: Residentctl, running: Running, arguments: tuple[str, ...]
) -> None:
    """Out of range, malformed or not Unicode: usage, one line, and nothing is sent."""
    result = residentctl("generate", "hello", *arguments)
    assert result.code == ExitCode.USAGE
    assert len(result.err.splitlines()) == 1
    assert not running.daemon.requests


def test_generate_can_be_asked_over_the_admin_socket(residentctl: Residentctl, running: Running) -> None:
    """Where listen.grpc is empty, the admin socket carries Inference as well."""
    config = running.state / "off.toml"
    config.write_text(f'state = "{running.state}"\n[listen]\ngrpc = ""\n')
    (running.state / "run" / "address").unlink()
    result = residentctl("generate", "one two", "--config", str(config))
    assert result.out == " w0 w1"


def test_a_stream_that_ends_without_its_end_is_an_error(residentctl: Residentctl, running: Running) -> None:
    """What arrived is kept, and the exit code is not 0."""
    running.daemon.hold_after = 1
    running.daemon.cancelled.set()  # the fake closes its stream at once, as if it had been cut
    result = residentctl("generate", "one two three")
    assert (result.code, result.out) == (ExitCode.FAILED, " w0")
    assert "stopped in the middle" in result.err


def test_version(lonely_residentctl: Residentctl) -> None:
    """--version needs no daemon and no configuration."""
    result = lonely_residentctl("--version")
    assert (result.code, result.out) == (0, "residentctl 0.1.0\n")


@pytest.mark.parametrize("message", [admin_pb2.StatusResponse, inference_pb2.GenerateResponse, admin_pb2.Version])
def test_fields_of_a_message_that_is_empty(message: type[admin_pb2.Version]) -> None:
    """Scalars have their defaults, repeated fields are empty lists, unset messages are left out."""
    plain = fields_of(message())
    for field in message.DESCRIPTOR.fields:
        if field.is_repeated:
            assert plain[field.name] == []
        else:
            assert (field.name in plain) == (field.type != FieldDescriptor.TYPE_MESSAGE)
