"""Options that change nothing about a kind of model are refused, and those that do are heeded."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from residentd_build.encoders.choices import refuse_unheeded
from residentd_build.kinds import build
from residentd_build.options import Options, OptionsError, Weights
from support import tensor_graphs
from support.installed import EXPORTS

ENCODERS = EXPORTS.parent / "encoders"
OTHERS = ("embed", "classify", "rerank", "tensor")
WEIGHTS: dict[str, Weights] = {
    "--precision int8": Weights("int8", block=32),
    "--precision int4": Weights("int4", head="fp32"),
    "--precision bf16": Weights("bf16"),
    "--symmetric": Weights(symmetric=True),
    "--embedding fp32": Weights(embedding="fp32"),
    "--head int8": Weights(head="int8"),
    "--kl-max 0.1": Weights(kl_max=0.1),
}


@pytest.mark.parametrize("kind", OTHERS)
@pytest.mark.parametrize("option", WEIGHTS)
def test_what_is_asked_of_weights_is_refused_where_they_stay_as_exported(option: str, kind: Any) -> None:
    """By the option as it was written, the kind, and what to do; a model that generates takes them all."""
    with pytest.raises(OptionsError, match=rf"^{option} was given for an? .*\. Leave it out"):
        refuse_unheeded(Options("m", weights=WEIGHTS[option]), kind)
    refuse_unheeded(Options("m", weights=WEIGHTS[option]), "generate")


OTHER: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "--mode compatibility": ({"mode": "compatibility"}, OTHERS),
    "--context 64": ({"context": 64}, ("tensor",)),
    "--shape x=1x3": ({"shapes": ("x=1x3", "y=2")}, ("generate", "embed", "classify", "rerank")),
}


@pytest.mark.parametrize("option", OTHER)
def test_other_options_are_refused_for_the_kinds_that_have_no_use_for_them(option: str) -> None:
    """And for no other kind."""
    values, kinds = OTHER[option]
    for kind in ("generate", *OTHERS):
        if kind in kinds:
            with pytest.raises(OptionsError, match=rf"^{option} was given for an? "):
                refuse_unheeded(Options("m", **values), kind)  # type: ignore[arg-type]
        else:
            refuse_unheeded(Options("m", **values), kind)  # type: ignore[arg-type]


@pytest.mark.parametrize("weights", [Weights(), Weights("auto"), Weights("fp32")])
@pytest.mark.parametrize("kind", OTHERS)
def test_what_is_done_anyway_may_be_asked_for(weights: Weights, kind: Any) -> None:
    """fp32 and auto are what an fp32 export gets."""
    refuse_unheeded(Options("m", weights=weights, mode="canonical"), kind)


def built(source: Path, stage: Path, **options: Any) -> str:
    """The precision of the version."""
    stage.mkdir()
    manifest = build(source, stage, Options("m", **options), lambda *_: None, lambda _bytes: None)
    return manifest.content.engine.precision


def half(path: Path) -> Path:
    """y [n, 3] = x [n, 4] @ w, all in fp16."""
    weights = tensor_graphs.WEIGHTS.astype(np.float16)
    inputs, outputs = [("x", TensorProto.FLOAT16, ["n", 4])], [("y", TensorProto.FLOAT16, ["n", 3])]
    return tensor_graphs.write(path, [helper.make_node("MatMul", ["x", "w"], ["y"])], inputs, outputs, w=weights)


def test_fp32_is_refused_where_the_export_is_something_else(tmp_path: Path) -> None:
    """Its weights stay fp16, so the operator is not told that they are fp32."""
    path = half(tmp_path / "x" / "m.onnx")
    with pytest.raises(OptionsError, match=r"--precision fp32 was given for a tensor model whose export is fp16"):
        built(path, tmp_path / "refused", weights=Weights("fp32"))
    assert built(path, tmp_path / "auto", weights=Weights("auto")) == "fp16"
    assert built(tensor_graphs.linear(tmp_path / "y" / "m.onnx"), tmp_path / "fp32", weights=Weights("fp32")) == "fp32"


def test_fp32_is_refused_for_an_encoder_in_fp16(tmp_path: Path) -> None:
    """The same for what embeds."""
    source = Path(shutil.copytree(ENCODERS / "embed-bert", tmp_path / "embed-bert"))
    model = onnx.load(source / "model.onnx")
    casts = []
    for tensor in model.graph.initializer:
        if tensor.data_type == TensorProto.FLOAT:
            values = onnx.numpy_helper.to_array(tensor).astype(np.float16)
            name = tensor.name
            tensor.CopyFrom(onnx.numpy_helper.from_array(values, f"{name}.half"))
            casts.append(helper.make_node("Cast", [tensor.name], [name], to=TensorProto.FLOAT))
    nodes = [*casts, *model.graph.node]
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    onnx.save(model, source / "model.onnx")
    with pytest.raises(OptionsError, match="for an embedding model whose export is fp16"):
        built(source, tmp_path / "refused", weights=Weights("fp32"))
    assert built(source, tmp_path / "stage") == "fp16"


@pytest.mark.parametrize(
    ("source", "given", "says"),
    [
        (ENCODERS / "embed-bert", ("--head", "int8"), "--head int8 was given for an embedding model"),
        (ENCODERS / "rerank-bert", ("--precision", "int8"), "--precision int8 was given for a reranker"),
        (EXPORTS / "llama", ("--shape", "x=1x3"), "--shape x=1x3 was given for a model that generates"),
        (
            EXPORTS / "llama",
            ("--kind", "generate", "--shape", "x=1"),
            "--shape x=1 was given for a model that generates",
        ),
    ],
)
def test_an_option_without_effect_exits_2_and_leaves_nothing(
    source: Path, given: tuple[str, ...], says: str, tmp_path: Path
) -> None:
    """As any other wrong option."""
    command = [sys.executable, "-m", "residentd_build", str(source), "--state", str(tmp_path), "--name", "m", "--json"]
    done = subprocess.run([*command, *given], capture_output=True, text=True, check=False)
    event = json.loads(done.stdout.splitlines()[-1])
    assert (done.returncode, event["kind"]) == (2, "usage")
    assert says in event["message"]
    assert not list((tmp_path / "versions").glob("*"))
