"""Broken and hostile directories, through the compiler as it is run: refused with a way out, in little time and memory.

What each part of a directory may be is tested where it is read; here every kind of trap is sprung once for each kind of
model, in a process whose processor time and memory are measured.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import psutil
import pytest
from lowering import EXPORTS
from onnx import TensorProto, helper, numpy_helper

from support import tensor_graphs

CPU_S_MAX = 30.0  # of processor time; a build of the honest directory takes 4
WALL_S_MAX = 150.0
PEAK_BYTES_MAX = 600 << 20  # the interpreter with its libraries takes 130; two million parsed nodes take 290
SAMPLE_S = 0.02
MARGIN_BYTES = 8 << 30  # what other processes may give back meanwhile
SPARSE_BYTES = 1 << 40

ENCODERS = EXPORTS.parent / "encoders"
MODELS = {
    "embedder": "embed-bert",
    "bytes": "embed-roberta",
    "classifier": "classify-distilbert",
    "reranker": "rerank-bert",
}
EXTERNAL = "-external"  # ends the name of an export whose weights lie in model.onnx_data

Spoil = Callable[[Path], None]


@dataclass(frozen=True, slots=True)
class Trap:
    """How a directory is spoiled, and what its findings must say and where. `kind`: source, or machine for its size.

    `export` is the name of one of EXPORTS, or of MODELS, or "tensor".
    """

    spoil: Spoil
    what: str
    where: str = ""
    kind: str = "source"
    export: str = "llama"


def graph(change: Callable[[onnx.ModelProto], None]) -> Spoil:
    """A change of the graph; data files are left alone."""

    def spoil(directory: Path) -> None:
        model = onnx.load(directory / "model.onnx", load_external_data=False)
        change(model)
        (directory / "model.onnx").write_bytes(model.SerializeToString())

    return spoil


def keys(name: str, **changes: Any) -> Spoil:
    def spoil(directory: Path) -> None:
        path = directory / name
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return spoil


def text(name: str, content: str) -> Spoil:
    return lambda directory: (directory / name).write_text(content) and None


def removed(name: str) -> Spoil:
    return lambda directory: (directory / name).unlink()


def truncated(name: str, share: float) -> Spoil:
    def spoil(directory: Path) -> None:
        data = (directory / name).read_bytes()
        (directory / name).write_bytes(data[: int(len(data) * share)])

    return spoil


def linked(link: Callable[[Path, Path], None], name: str) -> Spoil:
    """The file becomes a name of one outside the directory."""

    def spoil(directory: Path) -> None:
        outside = directory.parent / "outside"
        (directory / name).rename(outside)
        link(outside, directory / name)

    return spoil


def pipe(directory: Path) -> None:
    (directory / "model.onnx").unlink()
    os.mkfifo(directory / "model.onnx")


def sparse_data(directory: Path) -> None:
    """A terabyte that takes no room on the disk, of which the model uses half a megabyte."""
    os.truncate(directory / "model.onnx_data", SPARSE_BYTES)


def sparse_weight(directory: Path) -> None:
    """A terabyte that the model claims to use."""
    sparse_data(directory)

    def claim(model: onnx.ModelProto) -> None:
        tensor = next(tensor for tensor in model.graph.initializer if len(tensor.dims) == 2)
        tensor.dims[:] = [1 << 18, 1 << 20]
        for entry in tensor.external_data:
            entry.value = {"offset": "0", "length": str(SPARSE_BYTES)}.get(entry.key, entry.value)

    graph(claim)(directory)


def weight(model: onnx.ModelProto) -> onnx.TensorProto:
    """The head's matrix."""
    name = [node for node in model.graph.node if node.op_type == "MatMul"][-1].input[1]
    return next(tensor for tensor in model.graph.initializer if tensor.name == name)


def with_nan(model: onnx.ModelProto) -> None:
    tensor = weight(model)
    values = numpy_helper.to_array(tensor).copy()
    values.reshape(-1)[7] = np.nan
    tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))


def with_infinity(model: onnx.ModelProto) -> None:
    tensor = weight(model)
    values = np.full_like(numpy_helper.to_array(tensor), 3e38)
    tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))


def other_shape(model: onnx.ModelProto) -> None:
    """The weight of the head is a row short: every number is there, and the product is impossible."""
    tensor = weight(model)
    values = numpy_helper.to_array(tensor)[:-1]
    tensor.CopyFrom(numpy_helper.from_array(values.copy(), tensor.name))


def cycle(model: onnx.ModelProto) -> None:
    first, last = model.graph.node[0], model.graph.node[-1]
    first.input.append(last.output[0])


def self_loop(model: onnx.ModelProto) -> None:
    node = model.graph.node[-1]
    node.input[0] = node.output[0]


def nested(model: onnx.ModelProto, levels: int = 13) -> None:
    """Branches in branches, twice as many at each level; protobuf itself allows some 20 levels."""
    inner = None
    for level in range(levels):
        node = helper.make_node("Identity", [model.graph.input[0].name], [f"level.{level}"])
        if inner is not None:
            node = helper.make_node("If", ["yes"], [f"level.{level}"], then_branch=inner, else_branch=inner)
        name = f"level.{level}"
        inner = helper.make_graph([node], name, [], [helper.make_tensor_value_info(name, TensorProto.INT64, None)])
    model.graph.node.append(node)


def empty_nodes(model: onnx.ModelProto) -> None:
    model.graph.node.extend([onnx.NodeProto()] * 2_000_000)


def many_nodes(model: onnx.ModelProto) -> None:
    """Each of them right, and nobody wants what they compute."""
    source = model.graph.input[0].name
    model.graph.node.extend(helper.make_node("Identity", [source], [f"copy.{index}"]) for index in range(300_000))


def hidden_domain(model: onnx.ModelProto) -> None:
    """An operator that nobody knows, in a branch of a branch."""
    node = helper.make_node("Magic", [model.graph.input[0].name], ["magic"], domain="com.example")
    for level in range(2):
        name = node.output[0]
        branch = helper.make_graph([node], name, [], [helper.make_tensor_value_info(name, TensorProto.FLOAT, None)])
        node = helper.make_node("If", ["yes"], [f"level.{level}"], then_branch=branch, else_branch=branch)
    model.graph.initializer.append(numpy_helper.from_array(np.array(True), "yes"))
    model.graph.node.append(node)
    model.opset_import.append(helper.make_opsetid("com.example", 1))


def functions(model: onnx.ModelProto) -> None:
    body = [helper.make_node("Identity", ["x"], ["y"])]
    model.functions.append(helper.make_function("local", "Copy", ["x"], ["y"], body, model.opset_import[:1]))


def sparse(model: onnx.ModelProto) -> None:
    """Weights of which the file holds the few that are not zero: a kilobyte may claim a terabyte."""
    values = numpy_helper.from_array(np.ones(1, np.float32), "sparse")
    indices = numpy_helper.from_array(np.zeros(1, np.int64), "sparse_indices")
    model.graph.sparse_initializer.append(helper.make_sparse_tensor(values, indices, [1 << 38]))


def add_to_output(model: onnx.ModelProto, nodes: list[onnx.NodeProto], constants: Mapping[str, np.ndarray]) -> None:
    """`nodes` make a value "extra", of which the output feels nothing but that it must be computed."""
    output = model.graph.output[0].name
    for value in model.graph.node:
        value.output[:] = ["plain" if name == output else name for name in value.output]
    zero = {"zero": np.array(0, np.float32)}
    model.graph.initializer.extend(
        numpy_helper.from_array(array, name) for name, array in (zero | dict(constants)).items()
    )
    model.graph.node.extend(
        [
            *nodes,
            helper.make_node("ReduceMax", ["extra"], ["largest"], keepdims=0),
            helper.make_node("Mul", ["largest", "zero"], ["nothing"]),
            helper.make_node("Add", ["plain", "nothing"], [output]),
        ]
    )


def endless(model: onnx.ModelProto) -> None:
    """A loop of 2^62 turns."""
    turn = helper.make_graph(
        [
            helper.make_node("Identity", ["go"], ["go_on"]),
            helper.make_node("Identity", ["before"], ["after"]),
        ],
        "turn",
        [
            helper.make_tensor_value_info("turn", TensorProto.INT64, []),
            helper.make_tensor_value_info("go", TensorProto.BOOL, []),
            helper.make_tensor_value_info("before", TensorProto.FLOAT, None),
        ],
        [
            helper.make_tensor_value_info("go_on", TensorProto.BOOL, []),
            helper.make_tensor_value_info("after", TensorProto.FLOAT, None),
        ],
    )
    constants = {"turns": np.array(1 << 62, np.int64), "yes": np.array(True)}
    add_to_output(model, [helper.make_node("Loop", ["turns", "yes", "plain"], ["extra"], body=turn)], constants)


def huge_value(model: onnx.ModelProto, asked: int = 512 << 30) -> None:
    """A node that asks for half a terabyte, of a length that only a step knows."""
    side = np.array([asked // 4], np.int64)
    nodes = [
        helper.make_node("Shape", [model.graph.input[0].name], ["ids_shape"]),
        helper.make_node("Gather", ["ids_shape", "batch_axis"], ["batch"]),
        helper.make_node("Mul", ["batch", "side"], ["elements"]),
        helper.make_node("ConstantOfShape", ["elements"], ["extra"]),
    ]
    add_to_output(model, nodes, {"side": side, "batch_axis": np.array([0], np.int64)})


def greedy_value(model: onnx.ModelProto) -> None:
    """More than is free, which the kernel would promise and then take from others."""
    huge_value(model, psutil.virtual_memory().available + psutil.swap_memory().free + MARGIN_BYTES)


def long_name(model: onnx.ModelProto) -> None:
    model.graph.input.append(helper.make_tensor_value_info("x" * 3_000_000, TensorProto.FLOAT, [1]))


def big_heads(model: onnx.ModelProto) -> None:
    """Caches that no memory holds, rightly declared."""
    for value in (*model.graph.input, *model.graph.output):
        if "key" in value.name or "value" in value.name:
            value.type.tensor_type.shape.dim[1].dim_value = 1 << 16


def claimed(**entries: str) -> Spoil:
    """External data entries of the first weight; those not given are dropped."""

    def change(model: onnx.ModelProto) -> None:
        tensor = next(tensor for tensor in model.graph.initializer if tensor.external_data)
        del tensor.external_data[:]
        for key, value in ({"location": "model.onnx_data"} | entries).items():
            tensor.external_data.add(key=key, value=value)

    return graph(change)


def greedy_pattern(directory: Path) -> None:
    """A pattern whose search takes time exponential in the length of a text."""
    path = directory / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    split = {"type": "Split", "pattern": {"Regex": r"(\p{L}+\p{L}*)+\p{N}$"}, "behavior": "Isolated", "invert": False}
    path.write_text(json.dumps(tokenizer | {"pre_tokenizer": split}))


def growing_text(directory: Path) -> None:
    """Replacements of replacements: a letter becomes ten to the twelve."""
    path = directory / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    steps = [
        {"type": "Replace", "pattern": {"String": letter}, "content": following * 10}
        for letter, following in zip("abcdefghijkl", "bcdefghijklm", strict=True)
    ]
    path.write_text(json.dumps(tokenizer | {"normalizer": {"type": "Sequence", "normalizers": steps}}))


def at_random(directory: Path) -> None:
    """A tokenizer that leaves out merges as dice say."""
    path = directory / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    path.write_text(json.dumps(tokenizer | {"model": tokenizer["model"] | {"dropout": 0.1}}))


def dense(directory: Path) -> None:
    path = directory / "modules.json"
    module = {"idx": 3, "name": "3", "path": "3_Dense", "type": "sentence_transformers.models.Dense"}
    path.write_text(json.dumps([*json.loads(path.read_text()), module]))


def pooling_above(directory: Path) -> None:
    (directory / "1_Pooling").rename(directory.parent / "outside")
    path = directory / "modules.json"
    path.write_text(path.read_text().replace("1_Pooling", "../outside"))


TRAPS: Mapping[str, Trap] = {
    # what is missing or cut
    "no model": Trap(removed("model.onnx"), "is missing", "model.onnx"),
    "no tokenizer": Trap(removed("tokenizer.json"), "is missing", "tokenizer.json"),
    "no configuration": Trap(removed("config.json"), "is missing", "config.json"),
    "no data file": Trap(removed("model.onnx_data"), "is missing", "model.onnx_data", export="llama-external"),
    "half a model": Trap(truncated("model.onnx", 0.5), "not an ONNX file", "model.onnx"),
    "half a data file": Trap(truncated("model.onnx_data", 0.5), "ends at byte", "tensor", export="llama-external"),
    "half a tokenizer": Trap(truncated("tokenizer.json", 0.5), "", "tokenizer.json"),
    "half a configuration": Trap(truncated("config.json", 0.5), "not valid JSON", "config.json"),
    "an empty model": Trap(truncated("model.onnx", 0), "is empty", "model.onnx"),
    "an empty tokenizer": Trap(truncated("tokenizer.json", 0), "is empty", "tokenizer.json"),
    # what lies elsewhere
    "a model with another name": Trap(linked(os.link, "model.onnx"), "hard links", "model.onnx"),
    "data with another name": Trap(
        linked(os.link, "model.onnx_data"), "hard links", "model.onnx_data", export="llama-external"
    ),
    "a model behind a link": Trap(linked(lambda to, at: at.symlink_to(to), "model.onnx"), "symbolic link"),
    "a tokenizer behind a link": Trap(linked(lambda to, at: at.symlink_to(to), "tokenizer.json"), "symbolic link"),
    "a model that is a pipe": Trap(pipe, "not a regular file", "model.onnx"),
    "data above the directory": Trap(claimed(location="../outside"), "leaves the directory", export="llama-external"),
    "data of the machine": Trap(claimed(location="/etc/passwd"), "absolute path", export="llama-external"),
    # what claims to be huge
    "a huge length": Trap(
        claimed(length=str(1 << 62)), "claims 4,611,686,018,427,387,904 bytes", export="llama-external"
    ),
    "a huge offset": Trap(claimed(offset=str(1 << 62)), "ends at byte", export="llama-external"),
    "an offset before the file": Trap(claimed(offset="-8"), "not a byte count", export="llama-external"),
    "a terabyte nobody uses": Trap(sparse_data, "1,099,511,627,776 bytes", "model.onnx_data", export="llama-external"),
    "a terabyte of weights": Trap(sparse_weight, "memory", kind="machine", export="llama-external"),
    "impossible dimensions": Trap(
        graph(lambda model: weight(model).dims.__setitem__(0, 1 << 60)), "impossible shape", "tensor"
    ),
    "caches beyond any memory": Trap(graph(big_heads), "would take", kind="machine"),
    "a vocabulary beyond any": Trap(keys("config.json", vocab_size=1 << 62), "vocab_size", "config.json"),
    "a context beyond any": Trap(keys("config.json", max_position_embeddings=3), "max_position_embeddings"),
    "a name of megabytes": Trap(graph(long_name), "inputs that a text model does not have"),
    # graphs that are none
    "a cycle": Trap(graph(cycle), "not a well-formed ONNX model", "model.onnx"),
    "a node that reads itself": Trap(graph(self_loop), "not a well-formed ONNX model", "model.onnx"),
    "branches in branches": Trap(graph(nested), "not a well-formed ONNX model", "model.onnx"),
    "millions of empty nodes": Trap(graph(empty_nodes), "nodes", "model.onnx"),
    "nodes without number": Trap(graph(many_nodes), "nodes", "model.onnx"),
    "functions of its own": Trap(graph(functions), "model-local functions", "model.onnx"),
    "sparse weights": Trap(graph(sparse), "sparse weights", "model.onnx"),
    "operators of nobody": Trap(graph(hidden_domain), "operators of com.example", "model.onnx"),
    "a matrix a row short": Trap(graph(other_shape), "cannot run the export", "model.onnx"),
    # what computes, and should not
    "a loop without end": Trap(graph(endless), "did not end within", "model.onnx"),
    "a value of half a terabyte": Trap(graph(huge_value), "memory", kind="machine"),
    "a value of more than is free": Trap(graph(greedy_value), "memory", kind="machine"),
    "a weight that is no number": Trap(graph(with_nan), "holds NaN", "tensor"),
    "weights that overflow": Trap(graph(with_infinity), "NaN or infinity", kind="accuracy"),
    # texts
    "a template that loops": Trap(
        text("chat_template.jinja", "{% for a in range(10**18) %}x{% endfor %}"), "template", "chat_template.jinja"
    ),
    "a template that loops in loops": Trap(
        text("chat_template.jinja", "{% for a in range(9999) %}" * 6 + "x" + "{% endfor %}" * 6),
        "",
        "chat_template.jinja",
    ),
    "a template that grows": Trap(
        text(
            "chat_template.jinja",
            "{% set n = namespace(s='x') %}{% for a in range(99) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
        ),
        "",
        "chat_template.jinja",
    ),
    "a tokenizer that does not end": Trap(greedy_pattern, "gives up on this text", "tokenizer.json"),
    "a tokenizer that grows": Trap(growing_text, "more than 256 characters of one", "tokenizer.json"),
    "JSON that nests": Trap(text("config.json", "[" * 200_000), "not valid JSON", "config.json"),
    "half a surrogate pair": Trap(text("config.json", '{"model_type": "\\ud800"}'), "half a surrogate", "config.json"),
    "text that is no UTF-8": Trap(
        lambda directory: (directory / "chat_template.jinja").write_bytes(b"\xff\xfe") and None, "UTF-8"
    ),
}


OF_ANY_MODEL = (
    "half a model",
    "an empty model",
    "no data file",
    "half a data file",
    "a model with another name",
    "data with another name",
    "a model behind a link",
    "a model that is a pipe",
    "data above the directory",
    "data of the machine",
    "a huge length",
    "a huge offset",
    "an offset before the file",
    "a terabyte nobody uses",
    "a terabyte of weights",
    "impossible dimensions",
    "a cycle",
    "a node that reads itself",
    "branches in branches",
    "millions of empty nodes",
    "nodes without number",
    "functions of its own",
    "sparse weights",
    "operators of nobody",
    "a loop without end",
    "a weight that is no number",
    "JSON that nests",
    "half a surrogate pair",
)
OF_ANY_TOKENIZER = (
    "no model",
    "no tokenizer",
    "half a tokenizer",
    "an empty tokenizer",
    "a tokenizer behind a link",
    "half a configuration",
    "a tokenizer that does not end",
    "a tokenizer that grows",
    "a value of half a terabyte",
    "a value of more than is free",
    "weights that overflow",
)
OF_ANY_HEAD = ("no tokenizer", "half a configuration", "a cycle", "a weight that is no number")
"""Of the other encoders: what is read before their kinds part is tried with one of them."""


def of(export: str, *names: str) -> Mapping[str, Trap]:
    """The same traps for another export."""
    traps = {name: TRAPS[name] for name in names}
    return {
        f"{export}: {name}": replace(trap, export=f"{export}{EXTERNAL if trap.export.endswith(EXTERNAL) else ''}")
        for name, trap in traps.items()
    }


ANY = {
    **TRAPS,
    **of("embedder", *OF_ANY_MODEL, *OF_ANY_TOKENIZER),
    **of("classifier", *OF_ANY_HEAD),
    **of("reranker", *OF_ANY_HEAD),
    **of("tensor", *OF_ANY_MODEL),
    "embedder: a matrix a row short": Trap(
        graph(other_shape), "cannot run the export", "model.onnx", export="embedder"
    ),
    "tensor: a matrix a row short": Trap(graph(other_shape), "cannot run the export", "model.onnx", export="tensor"),
    "tensor: a value of half a terabyte": Trap(graph(huge_value), "ran out of memory", kind="machine", export="tensor"),
    "embedder: a name of megabytes": Trap(graph(long_name), "described in 3,0", "model.onnx", export="embedder"),
    "tensor: a name of megabytes": Trap(graph(long_name), "described in 3,0", "model.onnx", export="tensor"),
    "bytes: a tokenizer that encodes at random": Trap(at_random, "dropout is 0.1", "tokenizer.json", export="bytes"),
    "embedder: half the modules": Trap(
        truncated("modules.json", 0.5), "not valid JSON", "modules.json", export="embedder"
    ),
    "embedder: half of how to pool": Trap(
        truncated("1_Pooling/config.json", 0.5), "not valid JSON", "1_Pooling/config.json", export="embedder"
    ),
    "embedder: a module that nothing computes": Trap(
        dense, "nothing here computes Dense", "modules.json", export="embedder"
    ),
    "embedder: a module above the directory": Trap(
        pooling_above, "leaves the directory", "../outside/config.json", export="embedder"
    ),
    "embedder: no room for a text": Trap(
        keys("config.json", max_position_embeddings=1), "max_position_embeddings", "config.json", export="embedder"
    ),
    "embedder: a prompt that is no text": Trap(
        text("config_sentence_transformers.json", '{"prompts": {"a": "\\udfff"}}'),
        "half a surrogate",
        "config_sentence_transformers.json",
        export="embedder",
    ),
}


def export_of(name: str, directory: Path) -> Path:
    """A private, honest copy."""
    model = name.removesuffix(EXTERNAL)
    if model == "tensor":
        tensor_graphs.linear(directory / "model.onnx")
    elif model in MODELS:
        shutil.copytree(ENCODERS / MODELS[model], directory)
    else:
        return Path(shutil.copytree(EXPORTS / name, directory))
    if name.endswith(EXTERNAL):
        options = {"save_as_external_data": True, "location": "model.onnx_data", "size_threshold": 0}
        onnx.save(onnx.load(directory / "model.onnx"), directory / "model.onnx", **options)
    return directory


@dataclass(frozen=True, slots=True)
class Run:
    """What the compiler said last, and what it took."""

    status: int
    event: dict[str, Any]
    cpu_s: float
    peak_bytes: int


def compiler(source: Path, state: Path) -> Run:
    command = [sys.executable, "-m", "residentd_build", str(source), "--state", str(state), "--name", "trap"]
    command += ["--slots", "2", "--step-tokens", "32", "--json"]
    with (state.parent / "events").open("w+") as events:
        process = subprocess.Popen(command, stdout=events)
        watchdog = threading.Timer(WALL_S_MAX, process.kill)
        watchdog.start()
        peak_bytes, usage = _followed(process)
        watchdog.cancel()
        events.seek(0)
        lines = events.read().splitlines()
    assert process.returncode != -signal.SIGKILL, f"the compiler still ran after {WALL_S_MAX:.0f} s: {lines[-1:]}"
    return Run(process.returncode, json.loads(lines[-1]), usage.ru_utime + usage.ru_stime, peak_bytes)


def _followed(process: subprocess.Popen[bytes]) -> tuple[int, resource.struct_rusage]:
    """Its highest resident memory and its usage, when it has ended. rusage's own peak counts this process's too."""
    peak_bytes = 0
    while True:
        pid, status, usage = os.wait4(process.pid, os.WNOHANG)
        if pid:
            process.returncode = os.waitstatus_to_exitcode(status)
            return peak_bytes, usage
        fields = Path(f"/proc/{process.pid}/status").read_text().split()
        if "VmHWM:" in fields:
            peak_bytes = int(fields[fields.index("VmHWM:") + 1]) << 10
        time.sleep(SAMPLE_S)


@pytest.mark.parametrize("name", ANY)
def test_a_trap_is_refused_with_a_way_out(name: str, tmp_path: Path) -> None:
    """By a finding that names place and remedy; nothing is left behind, and little was spent on it."""
    trap = ANY[name]
    directory = export_of(trap.export, tmp_path / "export")
    trap.spoil(directory)
    run = compiler(directory, tmp_path / "state")
    assert (run.event["event"], run.event["kind"]) == ("failed", trap.kind), run.event
    said = [f"{finding['where']}: {finding['what']}" for finding in run.event["findings"]]
    said = said or [run.event["message"]]
    assert any(trap.what in line and trap.where in line for line in said), run.event
    assert all(finding["remedy"] for finding in run.event["findings"])
    assert not list((tmp_path / "state" / "versions").glob("*"))
    assert not list((tmp_path / "state" / "staging").glob("*"))
    assert run.cpu_s < CPU_S_MAX
    assert run.peak_bytes < PEAK_BYTES_MAX
