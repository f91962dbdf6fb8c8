"""What kind a source is, by what it shows; and the look at a model file that tells."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper

from residentd.errors import Finding
from residentd_build.encoders.interface import Interface, InterfaceError, Port, read_interface
from residentd_build.encoders.kind import Evidence, Guess, may_generate, misfit, recognise
from support import tensor_graphs
from support.installed import EXPORTS

ENCODERS = EXPORTS.parent / "encoders"
CAUSAL, MASKED, SEQUENCE = "LlamaForCausalLM", "BertForMaskedLM", "BertForSequenceClassification"


def ports(*names: str, rank: int = 2, width: int | str = "w") -> tuple[Port, ...]:
    return tuple(Port(name, TensorProto.FLOAT, ("n",) * (rank - 1) + (width,)) for name in names)


def evidence(
    inputs: tuple[str, ...],
    outputs: tuple[Port, ...],
    *,
    architecture: str = "",
    modules: tuple[str, ...] | None = None,
    **config: Any,
) -> Evidence:
    config |= {"architectures": [architecture]} if architecture else {}
    return Evidence(Interface(ports(*inputs), outputs), config, modules)


TEXT = ("input_ids", "attention_mask")
PAST = (*TEXT, "past_key_values.0.key", "past_key_values.0.value")
HIDDEN = ports("last_hidden_state", rank=3)
POOLING = ("Transformer", "Pooling")


@pytest.mark.parametrize(
    ("shown", "kind"),
    [
        (evidence(PAST, ports("logits", rank=3), architecture=CAUSAL), "generate"),
        (evidence(PAST, HIDDEN, modules=POOLING), "generate"),
        (evidence(TEXT, ports("logits", rank=3), architecture=CAUSAL), "generate"),
        (evidence(TEXT, ports("logits", rank=3), architecture="GPT2LMHeadModel"), "generate"),
        (evidence(TEXT, HIDDEN, modules=POOLING), "embed"),
        (evidence(TEXT, HIDDEN, architecture="BertModel"), "embed"),
        (evidence(TEXT, ports("token_embeddings", rank=3) + ports("sentence_embedding")), "embed"),
        (evidence(TEXT, ports("logits"), architecture=SEQUENCE, id2label={"0": "a", "1": "b"}), "classify"),
        (evidence(TEXT, ports("logits", width=3), architecture=SEQUENCE), "classify"),
        (evidence(TEXT, ports("logits", width=1), architecture=SEQUENCE), "rerank"),
        (evidence(TEXT, ports("logits"), architecture=SEQUENCE, id2label={"0": "LABEL_0"}), "rerank"),
        (evidence(TEXT, ports("logits", width=2)), "classify"),
        (evidence(("pixel_values",), ports("logits", width=1000)), "tensor"),
        (evidence(("input", "state", "sr"), ports("output", "stateN")), "tensor"),
        (evidence((*TEXT, "pixel_values"), ports("logits_per_image")), "tensor"),
    ],
)
def test_the_kind_follows_from_what_is_shown(shown: Evidence, kind: str) -> None:
    """Caches generate, no token ids is a tensor model, modules and outputs tell the others."""
    guess = recognise(shown)
    assert isinstance(guess, Guess)
    assert guess.kind == kind
    assert misfit(guess.kind, shown) is None, "no guess is refused as one"


def test_a_model_that_nothing_serves_is_refused_with_the_ways_out() -> None:
    """A masked language model: what it is, and both things that can be done with it."""
    found = recognise(evidence(TEXT, ports("logits", rank=3), architecture=MASKED))
    assert isinstance(found, Finding)
    assert "BertForMaskedLM" in found.what
    assert "feature-extraction" in found.remedy
    assert "--kind tensor" in found.remedy


@pytest.mark.parametrize(
    ("kind", "shown", "says"),
    [
        ("embed", evidence(TEXT, ports("logits"), architecture=SEQUENCE), "it has logits"),
        ("classify", evidence(TEXT, HIDDEN), "it has last_hidden_state"),
        ("rerank", evidence(("x",), ports("y")), "it takes x and no input_ids"),
        ("embed", evidence(PAST, ports("logits", rank=3)), "past_key_values"),
    ],
)
def test_a_wrong_kind_is_refused_whoever_said_it(kind: Any, shown: Evidence, says: str) -> None:
    """What it needs, and what there is instead."""
    found = misfit(kind, shown)
    assert found is not None
    assert says in found.what


@pytest.mark.parametrize(
    ("architecture", "named", "possible"),
    [
        (CAUSAL, None, True),
        ("GPT2LMHeadModel", None, True),
        ("Gemma3ForConditionalGeneration", None, True),
        ("", None, True),
        ("BertModel", None, False),
        (MASKED, None, False),
        (SEQUENCE, None, False),
        (CAUSAL, POOLING, False),
        ("", (), False),
    ],
)
def test_what_may_generate_is_told_without_its_graph(
    architecture: str, named: tuple[str, ...] | None, *, possible: bool
) -> None:
    """By config.json's class and modules.json: of a graph that cannot be read, the right findings are shown."""
    config = {"architectures": [architecture]} if architecture else {}
    assert may_generate(config, named) is possible


FILES = sorted({*EXPORTS.glob("*/model.onnx"), *ENCODERS.glob("*/model.onnx")})


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.parent.name)
def test_the_look_sees_what_a_parser_sees(path: Path) -> None:
    """Names and sizes of every input and output, without its nodes and weights."""
    found = read_interface(memoryview(path.read_bytes()))
    graph = onnx.load(path, load_external_data=False).graph
    assert [port.name for port in found.inputs] == [value.name for value in graph.input]
    assert [port.name for port in found.outputs] == [value.name for value in graph.output]
    for port, value in zip(found.outputs, graph.output, strict=True):
        sizes = [axis.dim_param or axis.dim_value for axis in value.type.tensor_type.shape.dim]
        assert list(port.shape or ()) == sizes


@given(st.data())
def test_the_look_never_fails_otherwise_than_by_saying_so(data: st.DataObject) -> None:
    """Cut anywhere, or with any byte changed, a file gives an interface or InterfaceError."""
    whole = bytearray((ENCODERS / "embed-bert" / "model.onnx").read_bytes()[:4000])
    for _ in range(data.draw(st.integers(0, 4))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    cut = whole[: data.draw(st.integers(0, len(whole)))]
    with contextlib.suppress(InterfaceError):
        assert isinstance(read_interface(memoryview(bytes(cut))), Interface)


@pytest.mark.parametrize("axis", ["?", "-1", "", 0, -1])
def test_an_axis_without_a_name_is_free(axis: Any, tmp_path: Path) -> None:
    """Exporters write a free axis in five ways."""
    path = tensor_graphs.write(
        tmp_path / "m.onnx",
        [helper.make_node("Relu", ["x"], ["y"])],
        [("x", TensorProto.FLOAT, [axis, 3])],
        [("y", TensorProto.FLOAT, [axis, 3])],
    )
    (port,) = read_interface(memoryview(path.read_bytes())).inputs
    assert port.shape == ("?", 3)
