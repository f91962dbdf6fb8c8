"""What ends a build that native code holds: while it loads, while it runs, and when its parent is gone."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import psutil
import pytest
from onnx import TensorProto, helper, numpy_helper

from residentd.errors import SourceError
from residentd_build import watchdog

WAIT_S_MAX = 30.0
SHORT_S = 0.05
ROWS = 4


def save(path: Path, nodes: list[onnx.NodeProto], **constants: np.ndarray) -> Path:
    """A graph of x [ROWS, 8] to y."""
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in "xy"]
    values[0] = helper.make_tensor_value_info("x", TensorProto.FLOAT, [ROWS, 8])
    initializers = [numpy_helper.from_array(array, name) for name, array in constants.items()]
    graph = helper.make_graph(nodes, "small", values[:1], values[1:], initializers)
    path.parent.mkdir(parents=True, exist_ok=True)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9), path)
    return path


def endless_constants(path: Path) -> Path:
    """400 products of matrices that ONNX Runtime computes, minutes long, when it loads the graph."""
    tiny = numpy_helper.from_array(np.array([1e-4], np.float32))
    nodes = [helper.make_node("ConstantOfShape", ["sizes"], ["c0"], value=tiny)]
    nodes += [helper.make_node("MatMul", [f"c{index}", "c0"], [f"c{index + 1}"]) for index in range(400)]
    nodes += [
        helper.make_node("ReduceMean", ["c400"], ["mean"], keepdims=0),
        helper.make_node("Add", ["x", "mean"], ["y"]),
    ]
    return save(path, nodes, sizes=np.array([2048, 2048], np.int64))


def endless_loop(path: Path) -> Path:
    """2^62 turns of one addition."""
    shapes: dict[str, tuple[int, list[int] | None]] = {
        "turn": (TensorProto.INT64, []),
        "go": (TensorProto.BOOL, []),
        "value": (TensorProto.FLOAT, None),
    }
    inputs = [helper.make_tensor_value_info(name, *shape) for name, shape in shapes.items()]
    outputs = [
        helper.make_tensor_value_info("go_on", TensorProto.BOOL, []),
        helper.make_tensor_value_info("more", TensorProto.FLOAT, None),
    ]
    body = [helper.make_node("Identity", ["go"], ["go_on"]), helper.make_node("Add", ["value", "one"], ["more"])]
    loop = helper.make_node("Loop", ["turns", "", "x"], ["y"], body=helper.make_graph(body, "body", inputs, outputs))
    return save(path, [loop], turns=np.array(1 << 62), one=np.ones((), np.float32))


def one_large_node(path: Path) -> Path:
    """A product of matrices of seconds, in which no run can be told to stop."""
    nodes = [
        helper.make_node("Expand", ["one", "sizes"], ["wide"]),
        helper.make_node("Add", ["wide", "first"], ["large"]),
        helper.make_node("MatMul", ["large", "large"], ["product"]),
        helper.make_node("ReduceMean", ["product"], ["mean"], keepdims=0),
        helper.make_node("Add", ["x", "mean"], ["y"]),
    ]
    # The input takes part, so that nothing is computed while it is loaded.
    nodes.insert(0, helper.make_node("ReduceMean", ["x"], ["first"], keepdims=0))
    return save(path, nodes, one=np.ones((), np.float32), sizes=np.array([3072, 3072]))


def session(path: Path) -> ort.InferenceSession:
    settings = ort.SessionOptions()
    settings.log_severity_level = 4
    return ort.InferenceSession(path, settings, providers=["CPUExecutionProvider"])


def feeds() -> dict[str, np.ndarray]:
    return {"x": np.zeros((ROWS, 8), np.float32)}


class GivenUp(threading.Event):
    """Stands for the end of the process."""

    why = ""

    def __call__(self, error: SourceError) -> None:
        self.why = str(error)
        self.set()


def ignore(stage: str, fraction: float, message: str) -> None:
    """No progress to show."""
    del stage, fraction, message


@pytest.fixture
def given_up() -> GivenUp:
    return GivenUp()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "SILENCE_S_MAX", SHORT_S)
    monkeypatch.setattr(watchdog, "LOAD_S_MAX", SHORT_S)


@pytest.mark.usefixtures("impatient")
def test_a_build_that_says_nothing_is_given_up(given_up: GivenUp, tmp_path: Path) -> None:
    """With what it was doing."""
    with watchdog.watching(ignore, tmp_path, given_up) as progress:
        progress("lower", 0.1, "writing the weights")
        assert given_up.wait(WAIT_S_MAX)
    assert "did not get on within 0 s (lower: writing the weights)" in given_up.why


@pytest.mark.usefixtures("impatient")
def test_a_reader_may_take_his_time(given_up: GivenUp, tmp_path: Path) -> None:
    """While a report waits to be read, the build is not silent."""

    def read_slowly(stage: str, fraction: float, message: str) -> None:
        del stage, fraction, message
        given_up.wait(10 * SHORT_S)

    with watchdog.watching(read_slowly, tmp_path, given_up) as progress:
        progress("lower", 0.1, "writing the weights")
    assert not given_up.is_set()


@pytest.mark.usefixtures("impatient")
def test_what_has_ended_is_not_given_up(given_up: GivenUp, tmp_path: Path) -> None:
    """Neither for its silence nor for a graph that was loaded."""
    with watchdog.watching(ignore, tmp_path, given_up), watchdog.loading(tmp_path / "model.onnx", "model.onnx"):
        pass
    assert not given_up.wait(10 * SHORT_S)


@pytest.mark.parametrize(("size", "expected"), [(0, 300.0), (1_000_000_000, 1300.0), (1 << 40, watchdog.SILENCE_S_CAP)])
def test_silence_may_be_as_long_as_the_files_are_large(size: int, expected: float, tmp_path: Path) -> None:
    """Those beside the ONNX file, in whichever way it was named; a size that a file only claims counts to the cap."""
    (tmp_path / "onnx").mkdir()
    with (tmp_path / "onnx" / "model.onnx").open("wb") as file:
        file.truncate(size)
    assert watchdog.silence_s_max(tmp_path) == pytest.approx(expected)
    assert watchdog.silence_s_max(tmp_path / "onnx" / "model.onnx") == pytest.approx(expected)


@pytest.mark.parametrize("limit", ["SILENCE_S_MAX", "LOAD_S_MAX"])
def test_constants_without_end_end_the_process(limit: str, tmp_path: Path) -> None:
    """ONNX Runtime hears nothing while it loads a graph; the last event comes all the same, and no stage is left."""
    bomb = endless_constants(tmp_path / "source" / "model.onnx")
    script = f"""
import sys
import onnxruntime
from residentd_build import __main__, kinds, watchdog

def build(source, stage, options, progress, check_room):
    (stage / "half").write_text("done")
    progress("verify", 0.5, "loading the export")
    with watchdog.loading(source / "model.onnx", "model.onnx"):
        onnxruntime.InferenceSession({str(bomb)!r}, providers=["CPUExecutionProvider"])

kinds.build = build
watchdog.{limit} = 0.5
sys.exit(__main__.main())
"""
    state = tmp_path / "state"
    words = [sys.executable, "-c", script, str(bomb.parent), "--state", str(state), "--name", "bomb", "--json"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=WAIT_S_MAX, check=False)
    assert done.returncode == 3, done.stderr
    event = json.loads(done.stdout.splitlines()[-1])
    assert (event["event"], event["kind"]) == ("failed", "source")
    (finding,) = event["findings"]
    assert ("had not loaded it within 1 s" if limit == "LOAD_S_MAX" else "did not get on") in finding["what"]
    assert list((state / "staging").iterdir()) == []


def test_a_run_without_end_is_a_finding(tmp_path: Path) -> None:
    """Between two turns of a loop, ONNX Runtime hears that it is to stop."""
    loop = session(endless_loop(tmp_path / "model.onnx"))
    with (
        pytest.raises(SourceError, match="did not end within 0 s") as caught,
        watchdog.running(0.2, "a.onnx") as options,
    ):
        loop.run(None, feeds(), options)
    assert caught.value.findings[0].where == "a.onnx"


def test_a_run_that_fails_in_time_fails_as_it_did(tmp_path: Path) -> None:
    """Its own error passes."""
    loop = session(endless_loop(tmp_path / "model.onnx"))
    with pytest.raises(ValueError, match="x"), watchdog.running(WAIT_S_MAX, "a.onnx") as options:
        loop.run(None, {}, options)


def test_a_node_without_end_ends_the_process(
    given_up: GivenUp, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Inside a node a run hears nothing."""
    monkeypatch.setattr(watchdog, "GRACE_S", 0.0)
    large = session(one_large_node(tmp_path / "model.onnx"))
    with (
        watchdog.watching(ignore, tmp_path, given_up),
        pytest.raises(SourceError),
        watchdog.running(SHORT_S, "a.onnx") as options,
    ):
        large.run(None, feeds(), options)
    assert "a run of the export did not end" in given_up.why


CHILD = """
import os, sys
from residentd_build.watchdog import end_with

end_with(int(sys.argv[1]))
print(os.getpid(), flush=True)
sys.stdin.read()
"""
PARENT = "import os, subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1], str(os.getpid())])"


@pytest.fixture
def parent() -> Iterator[Callable[[], tuple[subprocess.Popen[str], psutil.Process]]]:
    """Starts a process and a child of it that is to end with it."""
    started = []

    def start() -> tuple[subprocess.Popen[str], psutil.Process]:
        words = [sys.executable, "-c", PARENT, CHILD]
        process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout is not None
        return process, psutil.Process(int(process.stdout.readline()))

    yield start
    for process in started:
        process.kill()
        process.communicate(timeout=WAIT_S_MAX)


def test_a_build_ends_with_whoever_started_it(
    parent: Callable[[], tuple[subprocess.Popen[str], psutil.Process]],
) -> None:
    """Killed as hard as can be."""
    process, child = parent()
    process.kill()
    psutil.wait_procs([child], timeout=WAIT_S_MAX)
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


def test_a_build_whose_parent_has_gone_already_does_not_begin(tmp_path: Path) -> None:
    """The kernel speaks of the parent of the moment; the one meant is another."""
    words = [sys.executable, "-m", "residentd_build", str(tmp_path), "--state", str(tmp_path / "state"), "--name", "x"]
    done = subprocess.run([*words, f"--parent={os.getppid()}"], timeout=WAIT_S_MAX, check=False)
    assert done.returncode == -signal.SIGKILL
    assert not (tmp_path / "state").exists()
