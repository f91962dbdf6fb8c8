"""Hostile and broken external data: refused before anything is mapped, whatever onnxruntime would do with it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper

from residentd_build.files import MissingError, RefusedError, SourceDirectory
from residentd_build.tensors import DataFiles, check_tensors, claim_of, model_from_proto

SECRET = np.full(16, 7, np.float32).tobytes()
PLAIN = np.arange(16, dtype=np.float32).tobytes()


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A model directory with an honest data file, and a secret beside it that it must not reach."""
    (tmp_path / "secret.bin").write_bytes(SECRET)
    directory = tmp_path / "m"
    (directory / "sub").mkdir(parents=True)
    (directory / "ok.bin").write_bytes(PLAIN)
    (directory / "sub" / "ok.bin").write_bytes(PLAIN)
    (directory / "empty.bin").write_bytes(b"")
    (directory / "symlink.bin").symlink_to("../secret.bin")
    (directory / "inner-symlink.bin").symlink_to("ok.bin")
    os.link(tmp_path / "secret.bin", directory / "hardlink.bin")
    (directory / "up").symlink_to("..")
    os.mkfifo(directory / "pipe.bin")
    return directory


def tensor(**entries: object) -> TensorProto:
    """float32 [16], stored outside as `entries` say."""
    proto = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[16], data_location=TensorProto.EXTERNAL)
    for key, value in entries.items():
        proto.external_data.add(key=key, value=str(value))
    return proto


def model_with(weight: TensorProto) -> onnx.ModelProto:
    output = helper.make_tensor_value_info("y", TensorProto.FLOAT, [16])
    graph = helper.make_graph([helper.make_node("Identity", ["w"], ["y"])], "g", [], [output], [weight])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)])


def findings(directory: Path, model: onnx.ModelProto) -> tuple[list[str], DataFiles]:
    with SourceDirectory(directory) as opened:
        files = DataFiles(opened)
        return [str(finding) for finding in check_tensors(model, files)], files


HOSTILE: Mapping[str, tuple[Callable[[Path], TensorProto], str]] = {
    "dot dot": (lambda _: tensor(location="../secret.bin"), "leaves the directory"),
    "dot dot inside": (lambda _: tensor(location="sub/../../secret.bin"), "leaves the directory"),
    "absolute": (lambda d: tensor(location=d.parent / "secret.bin"), "absolute path"),
    "symbolic link": (lambda _: tensor(location="symlink.bin"), "symbolic link"),
    "symbolic link to a neighbour": (lambda _: tensor(location="inner-symlink.bin"), "symbolic link"),
    "symbolic link on the way": (lambda _: tensor(location="up/secret.bin"), "symbolic link"),
    "hard link": (lambda _: tensor(location="hardlink.bin"), "hard links"),
    "device": (lambda _: tensor(location="/dev/zero"), "absolute path"),
    "pipe": (lambda _: tensor(location="pipe.bin"), "not a regular file"),
    "directory": (lambda _: tensor(location="sub"), "not a regular file"),
    "missing": (lambda _: tensor(location="none.bin"), "is missing"),
    "missing directory": (lambda _: tensor(location="none/ok.bin"), "is missing"),
    "empty file": (lambda _: tensor(location="empty.bin"), "is empty"),
    "empty name": (lambda _: tensor(location=""), "not a usable file name"),
    "null in the name": (lambda _: tensor(location="ok.bin\0x"), "not a usable file name"),
    "a name without end": (lambda _: tensor(location="a/" * 4096), "not a usable file name"),
    "offset past the end": (lambda _: tensor(location="ok.bin", offset=4096, length=64), "which has 64"),
    "end past the end": (lambda _: tensor(location="ok.bin", offset=4, length=64), "ends at byte 68"),
    "offset near 2^63": (lambda _: tensor(location="ok.bin", offset=2**63 - 1, length=64), "which has 64"),
    "huge length": (lambda _: tensor(location="ok.bin", offset=0, length=2**62), "need 64"),
    "short length": (lambda _: tensor(location="ok.bin", offset=0, length=60), "need 64"),
    "negative offset": (lambda _: tensor(location="ok.bin", offset=-8, length=64), "not a byte count"),
    "signed offset": (lambda _: tensor(location="ok.bin", offset="+8"), "not a byte count"),
    "offset in words": (lambda _: tensor(location="ok.bin", offset="zero"), "not a byte count"),
    "offset in hexadecimal": (lambda _: tensor(location="ok.bin", offset="0x10"), "not a byte count"),
    "offset in other digits": (lambda _: tensor(location="ok.bin", offset="٣"), "not a byte count"),
    "no location": (lambda _: tensor(offset=0), "one location is needed"),
    "unknown entry": (lambda _: tensor(location="ok.bin", basepath="/"), "one location is needed"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_external_data_is_refused(name: str, source: Path) -> None:
    """Each of the corpus is one finding that says what is wrong, and nothing of the secret is mapped."""
    make, reason = HOSTILE[name]
    found, files = findings(source, model_with(make(source)))
    assert len(found) == 1, found
    assert reason in found[0]
    assert SECRET not in [bytes(mapped) for mapped in files._mapped.values() if not isinstance(mapped, RefusedError)]


def test_two_locations_are_refused(source: Path) -> None:
    """A tensor that says two things is refused: readers disagree on which of them counts."""
    weight = tensor(location="ok.bin")
    weight.external_data.add(key="location", value="../secret.bin")
    assert "one location is needed" in findings(source, model_with(weight))[0][0]


@pytest.mark.parametrize("dims", [[-1], [2**40, 2**40], [16, 2**63 - 1], [-4, -4]])
def test_impossible_shapes_are_refused(dims: list[int], source: Path) -> None:
    """Negative and overflowing dimensions never become a length."""
    weight = tensor(location="ok.bin")
    del weight.dims[:]
    weight.dims.extend(dims)
    assert "impossible shape" in findings(source, model_with(weight))[0][0]


def hidden_in(place: str) -> onnx.ModelProto:
    """A model whose hostile tensor stands in `place` instead of among the initializers."""
    bad = tensor(location="../secret.bin")
    constant = helper.make_node("Constant", [], ["c"], value=bad)
    body = helper.make_graph([constant], "body", [], [helper.make_tensor_value_info("c", TensorProto.FLOAT, [16])])
    honest = model_with(tensor(location="ok.bin"))
    if place == "attribute":
        honest.graph.node.append(constant)
    elif place == "subgraph":
        honest.graph.node.append(helper.make_node("If", ["k"], ["c"], then_branch=body, else_branch=body))
    elif place == "function":
        honest.functions.append(helper.make_function("f", "F", [], ["c"], [constant], [helper.make_opsetid("", 18)]))
    elif place == "sparse":
        honest.graph.sparse_initializer.add(values=bad, dims=[16])
    elif place == "training":
        honest.training_info.add().initialization.initializer.append(bad)
    return honest


@pytest.mark.parametrize("place", ["attribute", "subgraph", "function", "sparse", "training"])
def test_hostile_tensors_are_found_wherever_they_stand(place: str, source: Path) -> None:
    """A tensor of an attribute, subgraph, function, sparse or training section is judged like an initializer."""
    assert any("leaves the directory" in found for found in findings(source, hidden_in(place))[0])


@pytest.mark.parametrize("entries", [{}, {"offset": 0}, {"offset": 0, "length": 64}, {"length": 64, "checksum": "x"}])
@pytest.mark.parametrize("location", ["ok.bin", "sub/ok.bin", "./ok.bin"])
def test_honest_external_data_is_mapped(location: str, entries: dict[str, object], source: Path) -> None:
    """What an exporter writes passes, and the tensor's numbers are the file's."""
    model = model_with(tensor(location=location, **entries))
    with SourceDirectory(source) as opened:
        files = DataFiles(opened)
        assert check_tensors(model, files) == []
        mapped = model_from_proto(model, files)
    array = mapped.graph.initializers["w"].const_value.numpy()
    assert array.tobytes() == PLAIN
    assert not array.flags.writeable


def test_what_was_judged_is_what_is_mapped(source: Path) -> None:
    """A file that is replaced by a link after the check is not followed: it is never opened by name again."""
    model = model_with(tensor(location="ok.bin"))
    with SourceDirectory(source) as opened:
        files = DataFiles(opened)
        assert check_tensors(model, files) == []
        (source / "ok.bin").unlink()
        (source / "ok.bin").symlink_to("../secret.bin")
        mapped = model_from_proto(model, files)
    assert mapped.graph.initializers["w"].const_value.numpy().tobytes() == PLAIN


def test_a_file_too_long_is_not_read(source: Path) -> None:
    """A read has a limit, at which it works and one above which it does not."""
    with SourceDirectory(source) as opened:
        assert opened.read("ok.bin", bytes_max=64) == PLAIN
        with pytest.raises(RefusedError, match="has 64 bytes; at most 63"):
            opened.read("ok.bin", bytes_max=63)
        with pytest.raises(MissingError):
            opened.read("none.bin", bytes_max=64)
        assert bytes(opened.map("ok.bin", bytes_max=64)) == PLAIN
        with pytest.raises(RefusedError, match="has 64 bytes; at most 63"):
            opened.map("ok.bin", bytes_max=63)


@given(
    st.lists(
        st.tuples(st.sampled_from(["location", "offset", "length", "checksum", "x"]), st.text(max_size=12)), max_size=5
    )
)
def test_any_entries_are_a_claim_or_a_refusal(entries: list[tuple[str, str]]) -> None:
    """No text in external_data raises anything but RefusedError, and a claim has no negative or oversized number."""
    proto = tensor()
    for key, value in entries:
        proto.external_data.add(key=key, value=value)
    try:
        claim = claim_of(proto)
    except RefusedError:
        return
    assert claim.length == 64
    assert 0 <= claim.offset < 10**19
