"""`python -m residentd_build`: its events and exit codes, and what is left behind however it ends."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import psutil
import pytest
from lowering import EXPORTS

from residentd.errors import AccuracyError, OperatorError
from residentd.models.registry import Registry
from residentd.models.store import Store
from residentd_build import pipeline
from residentd_build.__main__ import main
from residentd_build.options import Options, OptionsError
from support.tensor_graphs import write

SOURCE = EXPORTS / "llama"
WAIT_S_MAX = 60


def command(state: Path, *more: str, source: Path = SOURCE) -> list[str]:
    base = [sys.executable, "-m", "residentd_build", str(source), "--state", str(state), "--name", "tiny"]
    return [*base, "--context", "64", "--slots", "2", "--step-tokens", "32", *more]


def run(state: Path, *more: str, source: Path = SOURCE) -> tuple[int, list[dict[str, Any]], str]:
    """Exit code, events and stderr of a build with --json."""
    done = subprocess.run(
        command(state, "--json", *more, source=source), capture_output=True, text=True, timeout=WAIT_S_MAX, check=False
    )
    return done.returncode, [json.loads(line) for line in done.stdout.splitlines()], done.stderr


def left_behind(state: Path) -> list[str]:
    """Stages and versions that are there."""
    return [path.name for folder in ("staging", "versions") for path in (state / folder).glob("*")]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """A state directory with one version, and the events of its build."""
    state = tmp_path_factory.mktemp("state")
    status, events, stderr = run(state)
    assert status == 0, stderr
    return state, events


def test_events_end_with_what_was_installed(installed: tuple[Path, list[dict[str, Any]]]) -> None:
    """Progress never goes back, and the last event describes the version."""
    _, events = installed
    *progress, last = events
    assert {event["event"] for event in progress} == {"progress"}
    fractions = [event["fraction"] for event in progress]
    assert fractions == sorted(fractions)
    assert 0 <= fractions[0] <= fractions[-1] <= 1
    stages = list(dict.fromkeys(event["stage"] for event in progress))
    assert stages == ["validate", "canonicalise", "lower", "verify", "measure", "publish"]
    assert all(event["message"] for event in progress)
    shown = {key: last[key] for key in ("event", "name", "version", "context", "slots", "mode", "active", "precision")}
    expected = {"event": "installed", "name": "tiny", "version": 1, "context": 64, "slots": 2}
    assert shown == expected | {"mode": "canonical", "active": True, "precision": "fp32"}
    assert last["agreement"]["greedy_equal"] == last["agreement"]["greedy_total"] > 0
    assert last["agreement"]["logit_diff_max"] <= last["agreement"]["logit_diff_bound"]


def test_the_version_is_whole_and_registered(installed: tuple[Path, list[dict[str, Any]]]) -> None:
    """The digest of the last event is the one version in the store, with every file as the manifest has it."""
    state, events = installed
    digest = events[-1]["digest"]
    store = Store(state)
    assert store.digests() == (digest,)
    store.verify_files(digest)
    manifest, directory = store.load(digest)
    assert sorted(manifest.content.files) == [
        "chat_template.jinja",
        "engine/model.onnx",
        "engine/weights.bin",
        "tokenizer.json",
    ]
    assert (directory / "tokenizer.json").read_bytes() == (SOURCE / "tokenizer.json").read_bytes()
    assert manifest.content.goldens
    assert manifest.content.text_goldens
    assert manifest.content.engine.limits.step_tokens_max == 32
    assert len(manifest.build.source_sha256) == 64
    assert {"onnxruntime", "onnx", "onnx-ir", "tokenizers", "residentd", "cpu"} <= manifest.build.tool_versions.keys()
    assert any(line.startswith("independence: proven") for line in manifest.build.passes)
    registry = Registry(state)
    try:
        assert registry.active("tiny").digest == digest
    finally:
        registry.close()
    assert left_behind(state) == [digest]


def test_the_same_source_gives_the_same_version(installed: tuple[Path, list[dict[str, Any]]]) -> None:
    """Building again on this machine gives the same digest and number: the engine is decided by its source."""
    state, events = installed
    status, again, _ = run(state)
    assert status == 0
    assert (again[-1]["digest"], again[-1]["version"]) == (events[-1]["digest"], 1)
    assert left_behind(state) == [events[-1]["digest"]]


def test_a_refused_source_exits_3_with_every_finding(tmp_path: Path) -> None:
    """The findings are in the last event, and nothing is left."""
    source = tmp_path / "source"
    shutil.copytree(SOURCE, source)
    (source / "tokenizer.json").unlink()
    (source / "config.json").write_text("{")
    status, events, _ = run(tmp_path / "state", source=source)
    assert status == 3
    assert (events[-1]["event"], events[-1]["kind"]) == ("failed", "source")
    assert {finding["where"] for finding in events[-1]["findings"]} == {"tokenizer.json", "config.json"}
    assert all(finding["what"] and finding["remedy"] for finding in events[-1]["findings"])
    assert left_behind(tmp_path / "state") == []


def test_a_name_in_the_graph_that_is_no_text_exits_3(tmp_path: Path) -> None:
    """What a pass or the writing of the graph trips over is the source's, said in one finding without a trace."""
    source = Path(shutil.copytree(SOURCE, tmp_path / "source"))
    model = onnx.load(source / "model.onnx")
    for node in model.graph.node:
        node.name = "QQQQQQQQ"
    (source / "model.onnx").write_bytes(model.SerializeToString().replace(b"QQQQQQQQ", b"\xff\xfeQQQQQQ"))
    status, events, stderr = run(tmp_path / "state", source=source)
    assert (status, stderr) == (3, "")
    (finding,) = events[-1]["findings"]
    assert "cannot be compiled" in finding["what"]
    assert left_behind(tmp_path / "state") == []


@pytest.mark.parametrize("more", [(), ("--json",)])
def test_a_path_that_is_no_text_is_reported_like_any_other(more: tuple[str, ...], tmp_path: Path) -> None:
    """A file name is bytes; the output is UTF-8 all the same."""
    source = tmp_path / os.fsdecode(b"\xff")
    done = subprocess.run(
        command(tmp_path / "state", *more, source=source), capture_output=True, timeout=WAIT_S_MAX, check=False
    )
    assert done.returncode == 3, done.stderr
    assert "not a readable directory" in (done.stdout + done.stderr).decode()


def test_more_than_the_machine_has_exits_5_before_anything_is_compiled(
    in_process: Callable[..., int],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    """A version that could never be loaded here is not built; the message has the sum and what would fit."""
    memory = psutil.virtual_memory()
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory._replace(total=512 << 20))
    asked = ("--slots", "256", "--step-tokens", "1025", "--context", "256")
    assert in_process(tmp_path, *asked) == 5
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {event["stage"] for event in events[:-1]} == {"validate"}
    message = events[-1]["message"]
    assert events[-1]["kind"] == "machine"
    assert "512 MiB" in message
    (slots,) = re.findall(r"--slots (\d+)", message)
    assert left_behind(tmp_path) == []
    assert in_process(tmp_path, *asked, "--slots", slots) == 0


@pytest.fixture
def in_process() -> Iterator[Callable[..., int]]:
    """main() in this process, whose signal handlers come back afterwards."""
    numbers = (signal.SIGTERM, signal.SIGINT)
    handlers = [signal.getsignal(number) for number in numbers]
    yield lambda state, *more: main(command(state, "--json", *more)[3:])
    for number, handler in zip(numbers, handlers, strict=True):
        signal.signal(number, handler)


def last_event(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    event: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return event


def test_an_inaccurate_engine_exits_4_and_is_not_published(
    in_process: Callable[..., int],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    """What verification refuses leaves no trace."""

    def refuse(*_arguments: object) -> None:
        raise AccuracyError("the logits differ by 9")

    monkeypatch.setattr(pipeline, "verify", refuse)
    assert in_process(tmp_path) == 4
    event = last_event(capsys)
    assert (event["kind"], event["message"]) == ("accuracy", "the logits differ by 9")
    assert left_behind(tmp_path) == []


def test_a_full_disk_exits_5_before_the_weights_are_written(
    in_process: Callable[..., int],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    """The room is counted before it is used."""
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage._replace(free=1 << 20))
    assert in_process(tmp_path) == 5
    event = last_event(capsys)
    assert event["kind"] == "machine"
    assert "1,048,576 free" in event["message"]
    assert left_behind(tmp_path) == []


def test_a_bug_of_ours_exits_1_with_a_last_event(
    in_process: Callable[..., int],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    """Whoever reads the events is told, and the trace is on stderr."""

    def fail(*_arguments: object) -> None:
        raise AssertionError("planted")

    monkeypatch.setattr(pipeline, "verify", fail)
    assert in_process(tmp_path) == 1
    captured = capsys.readouterr()
    assert json.loads(captured.out.splitlines()[-1])["kind"] == "internal"
    assert "planted" in captured.err
    assert left_behind(tmp_path) == []


def test_an_assertion_without_a_text_still_has_a_message(
    in_process: Callable[..., int],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    """The last event is never empty."""

    def fail(*_arguments: object) -> None:
        raise AssertionError

    monkeypatch.setattr(pipeline, "verify", fail)
    assert in_process(tmp_path) == 1
    assert "AssertionError" in last_event(capsys)["message"]


def test_keep_active_leaves_the_active_version(
    in_process: Callable[..., int], installed: tuple[Path, list[dict[str, Any]]], tmp_path: Path
) -> None:
    """With --keep-active the new version is there and the bare name means the old one."""
    state = tmp_path / "state"
    shutil.copytree(installed[0], state)
    assert in_process(state, "--keep-active", "--slots", "3") == 0
    registry = Registry(state)
    try:
        assert [version.active for version in registry.versions("tiny")] == [True, False]
    finally:
        registry.close()


def started(state: Path, stage: str) -> subprocess.Popen[str]:
    """A build that has reached `stage`."""
    process = subprocess.Popen(command(state, "--json"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        if json.loads(line)["stage"] == stage:
            return process
    raise AssertionError(f"the build ended before {stage}: {process.communicate()}")


@pytest.mark.parametrize("stage", ["canonicalise", "lower", "verify"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_cancelled_build_exits_130_and_leaves_nothing(stage: str, number: signal.Signals, tmp_path: Path) -> None:
    """Whatever it was doing, the stage is gone and no version is there."""
    process = started(tmp_path, stage)
    process.send_signal(number)
    out, _ = process.communicate(timeout=WAIT_S_MAX)
    assert process.returncode == 130
    event = json.loads(out.splitlines()[-1])
    assert (event["event"], event["kind"]) == ("failed", "cancelled")
    assert left_behind(tmp_path) == []


def test_what_a_killed_build_leaves_is_swept_by_the_next(tmp_path: Path) -> None:
    """kill -9 leaves a stage and no version; the next build removes it and succeeds."""
    process = started(tmp_path, "verify")
    process.kill()
    process.communicate(timeout=WAIT_S_MAX)
    (stale,) = left_behind(tmp_path)
    status, events, _ = run(tmp_path)
    assert status == 0
    assert left_behind(tmp_path) == [events[-1]["digest"]]
    assert stale != events[-1]["digest"]


def test_a_person_reads_stages_and_what_each_pass_did(tmp_path: Path) -> None:
    """Without --json the output is lines for a terminal, ending with the version."""
    done = subprocess.run(command(tmp_path), capture_output=True, text=True, timeout=WAIT_S_MAX, check=True)
    lines = done.stdout.splitlines()
    assert lines[0].split(maxsplit=1)[1].startswith("validate: reading")
    assert "attention: 2 layers of 4 heads over 2 of 16" in done.stdout
    assert lines[-1].startswith("100%  installed tiny@1, digest ")


OPTIONS = {
    "context at its least": ({"context": 8}, None),
    "context below": ({"context": 7}, "--context is 7; 8 to 1,048,576"),
    "context at its most": ({"context": 1 << 20}, None),
    "context above": ({"context": (1 << 20) + 1}, "--context is 1,048,577"),
    "one slot": ({"slots": 1}, None),
    "no slot": ({"slots": 0}, "--slots is 0; 1 to 1,024"),
    "slots at their most": ({"slots": 1024, "step_tokens": 1025}, None),
    "slots above": ({"slots": 1025, "step_tokens": 2000}, "--slots is 1,025"),
    "one token more than slots": ({"slots": 16, "step_tokens": 17}, None),
    "as many tokens as slots": ({"slots": 16, "step_tokens": 16}, "must be more than the 16 slots"),
    "step tokens at their most": ({"step_tokens": 1 << 16}, None),
    "step tokens above": ({"step_tokens": (1 << 16) + 1}, "at most 65,536"),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options_have_limits(name: str) -> None:
    """Each option works at its limit and is refused one beyond it, with the limit in the message."""
    values, refusal = OPTIONS[name]
    if refusal is None:
        assert Options("tiny", **values).name == "tiny"
        return
    with pytest.raises(OptionsError, match=refusal):
        Options("tiny", **values)


def test_a_name_must_be_a_name() -> None:
    """It becomes part of file names."""
    with pytest.raises(OperatorError, match="not allowed"):
        Options("../tiny")


@pytest.mark.parametrize(("asked", "longest", "expected"), [(None, 8192, 2048), (None, 256, 256), (512, 8192, 512)])
def test_the_context_is_what_was_asked_for_or_the_models_own(asked: int | None, longest: int, expected: int) -> None:
    """By default at most 2,048 tokens a slot."""
    assert Options("tiny", context=asked).context_for(longest) == expected


@pytest.mark.parametrize(
    ("more", "kind"), [(("--context", "4"), "usage"), (("--slots", "64"), "usage"), (("--name", "No Name"), "operator")]
)
def test_usage_errors_exit_2_before_anything_is_made(
    more: tuple[str, ...], kind: str, in_process: Callable[..., int], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A wrong option is refused at once; the state directory is not even created."""
    assert in_process(tmp_path / "state", *more) == 2
    assert last_event(capsys)["kind"] == kind
    assert not (tmp_path / "state").exists()


SMALL_MACHINE = """
import psutil, resource, sys
from residentd_build import __main__

memory = psutil.virtual_memory()._replace(available=int(sys.argv.pop(1)))
psutil.virtual_memory = lambda: memory
psutil.swap_memory = lambda: memory._replace(free=0)
__main__.take_only_what_is_free()
if len(sys.argv) > 1:
    sys.exit(__main__.main())
print(*resource.getrlimit(resource.RLIMIT_DATA))
"""


def on_a_small_machine(available: int, *words: str) -> subprocess.CompletedProcess[str]:
    """The compiler where so much memory is free."""
    command = [sys.executable, "-c", SMALL_MACHINE, str(available), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S_MAX, check=False)


def test_a_build_leaves_memory_to_what_is_served() -> None:
    """It takes seven eighths of what is free when it begins."""
    soft, _ = on_a_small_machine(8 << 30).stdout.split()
    assert int(soft) == 7 << 30


def test_a_graph_that_asks_for_too_much_memory_is_refused(tmp_path: Path) -> None:
    """300 bytes that ask for 4 GiB end as a finding, before the machine is short of memory."""
    nodes = [
        onnx.helper.make_node("ConstantOfShape", ["sizes"], ["large"]),
        onnx.helper.make_node("ReduceMean", ["large"], ["mean"], keepdims=0),
        onnx.helper.make_node("Add", ["x", "mean"], ["y"]),
    ]
    floats = [(name, onnx.TensorProto.FLOAT, ["n", 8]) for name in "xy"]
    source = write(
        tmp_path / "source" / "model.onnx", nodes, floats[:1], floats[1:], sizes=np.array([1 << 15, 1 << 15])
    )
    words = (str(source.parent), "--state", str(tmp_path / "state"), "--name", "bomb", "--json")
    done = on_a_small_machine(2 << 30, *words)
    assert done.returncode in {3, 5}, done.stderr
    assert "memory" in json.loads(done.stdout.splitlines()[-1])["message"]
    assert left_behind(tmp_path / "state") == []
