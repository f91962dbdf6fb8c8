"""What the passes do not understand is installed as it was exported, marked and with the reason, or refused."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import tiny_decoder
from lowering import EXPORTS
from onnx import TensorProto, helper, numpy_helper
from tiny_decoder import Decoder, Style

from residentd.errors import AccuracyError, Finding, OperatorError, SourceError
from residentd.models.manifest import Manifest, State
from residentd_build.compatibility import REASON_CHARS_MAX, precision_of, reason_of
from residentd_build.options import Options, OptionsError, Weights
from residentd_build.pipeline import Compiled, build, compile_source
from residentd_build.states import Port, StateError, states_of
from residentd_build.validate import validate

FLOAT, INT = "tensor(float)", "tensor(int64)"


def ignore(*_arguments: object) -> None:
    """Progress, and room on the disk, that nobody looks at."""


def options(mode: str = "auto", **weights: object) -> Options:
    return Options("tiny", 64, 3, 32, Weights(**weights), mode=mode)  # type: ignore[arg-type]


def built(directory: Path, stage: Path, mode: str = "auto") -> Manifest:
    stage.mkdir()
    return build(directory, stage, options(mode), ignore, ignore)


def compiled(directory: Path, stage: Path, chosen: Options | None = None) -> Compiled:
    stage.mkdir()
    return compile_source(validate(directory), stage, chosen or options(), ignore)


def export_of(style: Style, directory: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A decoder of `style` with the texts of the llama export."""
    shutil.copytree(EXPORTS / "llama", directory)
    monkeypatch.setattr(tiny_decoder, "VOCAB", 480)
    Decoder(style).save(directory)
    return directory


def edited(directory: Path, change: Callable[[onnx.ModelProto], None]) -> Path:
    """The llama export with its graph changed."""
    shutil.copytree(EXPORTS / "llama", directory)
    model = onnx.load(directory / "model.onnx")
    change(model)
    onnx.save(model, directory / "model.onnx")
    return directory


def rename(model: onnx.ModelProto, old: str, new: str) -> None:
    for value in (*model.graph.input, *model.graph.output):
        value.name = value.name.replace(old, new)
    for node in model.graph.node:
        node.input[:] = [name.replace(old, new) for name in node.input]
        node.output[:] = [name.replace(old, new) for name in node.output]


def add_counter(model: onnx.ModelProto) -> None:
    """A recurrent state of fixed shape: the sum of all ids so far, which every logit feels."""
    graph = model.graph
    rename(model, "logits", "plain_logits")
    graph.initializer.extend(
        [
            numpy_helper.from_array(np.array(1, np.int64), "counter.axis"),
            numpy_helper.from_array(np.array([-1], np.int64), "counter.last"),
            numpy_helper.from_array(np.array([1 << 40], np.int64), "counter.end"),
            numpy_helper.from_array(np.array([1], np.int64), "counter.axes"),
            numpy_helper.from_array(np.array(2.0**-12, np.float32), "counter.scale"),
        ]
    )
    graph.node.extend(
        [
            helper.make_node("Cast", ["input_ids"], ["counter.ids"], to=TensorProto.FLOAT),
            helper.make_node("CumSum", ["counter.ids", "counter.axis"], ["counter.new"]),
            helper.make_node("Add", ["counter.new", "past_conv.0"], ["counter.all"]),
            helper.make_node(
                "Slice", ["counter.all", "counter.last", "counter.end", "counter.axes"], ["present_conv.0"]
            ),
            helper.make_node("Unsqueeze", ["counter.all", "counter.last"], ["counter.wide"]),
            helper.make_node("Mul", ["counter.wide", "counter.scale"], ["counter.scaled"]),
            helper.make_node("Add", ["plain_logits", "counter.scaled"], ["logits"]),
        ]
    )
    graph.input.append(helper.make_tensor_value_info("past_conv.0", TensorProto.FLOAT, ["batch_size", 1]))
    graph.output[0].name = "logits"
    graph.output.append(helper.make_tensor_value_info("present_conv.0", TensorProto.FLOAT, ["batch_size", 1]))


def sixteen_bit_caches(model: onnx.ModelProto) -> None:
    """The caches of layer 1 are kept as float16; the graph computes in float32."""
    for value in model.graph.input:
        if value.name.startswith("past_key_values.1."):
            value.type.tensor_type.elem_type = TensorProto.FLOAT16
            for user in model.graph.node:
                user.input[:] = [f"wide.{name}" if name == value.name else name for name in user.input]
            model.graph.node.insert(
                0, helper.make_node("Cast", [value.name], [f"wide.{value.name}"], to=TensorProto.FLOAT)
            )
    for value in model.graph.output:
        if value.name.startswith("present.1."):
            value.type.tensor_type.elem_type = TensorProto.FLOAT16
            for node in model.graph.node:
                for names in (node.input, node.output):
                    names[:] = [f"wide.{name}" if name == value.name else name for name in names]
            model.graph.node.append(
                helper.make_node("Cast", [f"wide.{value.name}"], [value.name], to=TensorProto.FLOAT16)
            )


# ---- installed -----------------------------------------------------------------------------------------------------


def test_a_real_export_with_a_bias_in_its_scores_is_installed_as_it_is(tmp_path: Path) -> None:
    """MPT as optimum writes it: the reason names a node, every weight is the exporter's, all greedy tokens agree."""
    manifest = built(EXPORTS / "mpt", tmp_path / "stage")
    engine = manifest.content.engine
    assert (engine.mode, engine.precision, engine.caches) == ("compatibility", "fp32", ())
    assert "attention of layer 0 is not recognised: node /transformer/blocks.0/" in engine.mode_reason
    assert engine.mode_reason.endswith("1 more finding")
    assert engine.states[0] == State(
        input="past_key_values.0.key", output="present.0.key", dtype="float32", shape=(1, 4, 0, 12), axis=2
    )
    assert manifest.agreement.greedy_equal == manifest.agreement.greedy_total > 400
    assert manifest.quality is not None
    assert manifest.quality.top1 == 1.0
    assert any(line.startswith("compatibility: ") for line in manifest.build.passes)
    theirs, ours = ir.load(EXPORTS / "mpt" / "model.onnx"), ir.load(tmp_path / "stage" / engine.path)
    assert ours.graph.initializers.keys() == theirs.graph.initializers.keys()
    for name, value in theirs.graph.initializers.items():
        mine = ours.graph.initializers[name].const_value
        assert value.const_value is not None
        assert mine is not None
        assert np.array_equal(mine.numpy(), value.const_value.numpy()), name


@pytest.mark.parametrize(
    ("style", "reason"),
    [
        (Style(mask="alibi", rotary="none", layers=2), "adds a bias to the scores; 1 more finding"),
        (Style(repeat="tile"), "off by"),
    ],
    ids=["alibi", "heads repeated in another order"],
)
def test_attention_that_is_not_recognised_is_installed_with_the_reason(
    style: Style, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever recognition or its proof says against it."""
    manifest = built(export_of(style, tmp_path / "export", monkeypatch), tmp_path / "stage")
    assert manifest.content.engine.mode == "compatibility"
    assert reason in manifest.content.engine.mode_reason
    assert manifest.agreement.greedy_equal == manifest.agreement.greedy_total


@pytest.mark.parametrize("rotary", ["half", "operator3"])
def test_com_microsofts_multi_head_attention_is_installed_as_it_is(
    rotary: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its mask and cache are not read; the reason names the attention node, also where other operators follow it."""
    monkeypatch.setattr(tiny_decoder, "KV_HEADS", tiny_decoder.HEADS)
    style = Style(attention="multi-head", rotary=rotary, layers=2)
    manifest = built(export_of(style, tmp_path / "export", monkeypatch), tmp_path / "stage")
    assert manifest.content.engine.mode == "compatibility"
    assert "the attention of layer 0 is not recognised: no known form" in manifest.content.engine.mode_reason
    assert "(MultiHeadAttention)" in manifest.content.engine.mode_reason
    assert manifest.agreement.greedy_equal == manifest.agreement.greedy_total


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda model: rename(model, "past_key_values.1", "past.1"), "past.1.key, past.1.value"),
        (add_counter, "past_conv.0"),
    ],
    ids=["caches of other names", "a recurrent state"],
)
def test_interfaces_that_are_not_canonical(
    change: Callable[[onnx.ModelProto], None], reason: str, tmp_path: Path
) -> None:
    """States under other names and of other shapes than K and V are carried all the same."""
    manifest = built(edited(tmp_path / "export", change), tmp_path / "stage")
    assert manifest.content.engine.mode == "compatibility"
    assert reason in manifest.content.engine.mode_reason


def test_a_recognised_export_can_be_had_as_it_is(tmp_path: Path) -> None:
    """With --mode compatibility, which the reason then says."""
    manifest = built(EXPORTS / "llama", tmp_path / "stage", "compatibility")
    assert manifest.content.engine.mode_reason == "it was asked for with --mode compatibility"
    assert manifest.agreement.greedy_equal == manifest.agreement.greedy_total


def test_caches_of_sixteen_bits_are_kept_as_they_are(tmp_path: Path) -> None:
    """The states keep the exporter's element type."""
    directory = edited(tmp_path / "export", sixteen_bit_caches)
    manifest = built(directory, tmp_path / "stage", "compatibility")
    assert [state.dtype for state in manifest.content.engine.states] == ["float32"] * 2 + ["float16"] * 2


def test_shared_scales_are_taken_apart(tmp_path: Path) -> None:
    """One scale for all tokens of a run would make an answer depend on how its prompt is cut."""
    directory = EXPORTS / "transformersjs-merged-llama"
    manifest = built(directory, tmp_path / "stage", "compatibility")
    assert any("each with a scale a token" in line for line in manifest.build.passes)
    assert any("reference: the engine, 0 from the export" in line for line in manifest.build.passes)


def test_the_canonical_form_is_taken_where_it_can_be(tmp_path: Path) -> None:
    """And the passes leave the source's own graph alone."""
    source = validate(EXPORTS / "llama")
    before = [node.name for node in source.model.graph]
    (tmp_path / "stage").mkdir()
    engine = compile_source(source, tmp_path / "stage", options(), ignore).engine
    assert (engine.mode, engine.mode_reason, engine.states) == ("canonical", "", ())
    assert [node.name for node in source.model.graph] == before


# ---- refused -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "style", [Style(mask="future"), Style(head_mixes=True)], ids=["a mask that sees ahead", "a head that mixes tokens"]
)
def test_answers_that_depend_on_how_a_prompt_is_cut_are_refused(
    style: Style, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no right answer to reproduce: in no mode can it be served."""
    with pytest.raises(AccuracyError, match="when a prompt is read in parts"):
        built(export_of(style, tmp_path / "export", monkeypatch), tmp_path / "stage")


def test_compatibility_can_be_refused(tmp_path: Path) -> None:
    """With --mode canonical every finding of the passes comes out as it would have before."""
    with pytest.raises(SourceError) as caught:
        compiled(EXPORTS / "mpt", tmp_path / "stage", options("canonical"))
    assert [finding.what.split(" is not")[0] for finding in caught.value.findings] == [
        "the attention of layer 0",
        "the attention of layer 1",
    ]


def test_no_other_mode_is_known() -> None:
    """A usage error that lists them."""
    with pytest.raises(OptionsError, match="auto, canonical, compatibility"):
        options("fast")


@pytest.mark.parametrize("weights", [{"precision": "int8"}, {"head": "int8"}], ids=str)
def test_weights_are_not_touched(weights: dict[str, object], tmp_path: Path) -> None:
    """Another precision needs the canonical form, and the message says why there is none."""
    with pytest.raises(OperatorError, match=r"needs the canonical form.*attention of layer 0 is not recognised"):
        compiled(EXPORTS / "mpt", tmp_path / "stage", options(**weights))


def test_auto_precision_takes_it_as_it_is(tmp_path: Path) -> None:
    """The best of what can be had is all that can be had."""
    assert compiled(EXPORTS / "mpt", tmp_path / "stage", options(precision="auto")).engine.precision == "fp32"


def without_past(model: onnx.ModelProto) -> None:
    """As `--task text-generation` writes it: the caches are empty constants."""
    pasts = [value for value in model.graph.input if value.name.startswith("past_key_values.")]
    for value in pasts:
        model.graph.input.remove(value)
        model.graph.initializer.append(numpy_helper.from_array(np.zeros((1, 2, 0, 16), np.float32), value.name))


def test_an_export_without_a_past_is_refused(tmp_path: Path) -> None:
    """It would have to read everything again for every token."""
    with pytest.raises(SourceError, match="cannot continue a sequence") as caught:
        validate(edited(tmp_path / "export", without_past))
    assert "text-generation-with-past" in caught.value.findings[0].remedy


# ---- parts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "output"),
    [
        ("past_key_values.3.key", "present.3.key"),
        ("past_key_values.3.key", "present_key_values.3.key"),
        ("past.0", "present.0"),
        ("past_conv.7", "present_conv.7"),
    ],
)
def test_outputs_are_found_by_name(name: str, output: str) -> None:
    """As exporters pair them."""
    (state,) = states_of([Port(name, FLOAT, (None, 4, None, 8))], {output, "logits"})
    assert state == State(input=name, output=output, dtype="float32", shape=(1, 4, 0, 8), axis=2)


@pytest.mark.parametrize(
    ("port", "why"),
    [
        (Port("pixel_values", FLOAT, (1, 3, 8, 8)), "pixel_values whose meaning is not known"),
        (Port("past.1", FLOAT, (None, 4, None, 8)), "no output renews"),
        (Port("past.0", "tensor(int8)", (None, 4, None, 8)), "kept as float32 or float16"),
        (Port("past.0", "tensor(bfloat16)", (None, 4, None, 8)), "kept as float32 or float16"),
        (Port("past.0", FLOAT, (None, None, None, 8)), r"\[\?, \?, \?, 8\]"),
        (Port("past.0", FLOAT, (2, 4, None, 8)), r"\[2, 4, \?, 8\]"),
        (Port("past.0", FLOAT, (None,)), r"\[\?\]"),
        (Port("past.0", FLOAT, (None, 1 << 40, None)), "one batch axis and one that grows"),
        (Port("past.0", FLOAT, (None, 0, None)), "one batch axis and one that grows"),
        (Port("attention_mask", "tensor(double)", (None, None)), "tensor(double), which is not fed"),
    ],
)
def test_inputs_that_no_run_could_be_given(port: Port, why: str) -> None:
    """Named, with what is wrong with them."""
    with pytest.raises(StateError, match=why.replace("(", r"\(").replace(")", r"\)")):
        states_of([Port("input_ids", INT, (None, None)), port], {"logits", "present.0"})


def test_reasons_fit_a_line_of_the_listing() -> None:
    """The first finding, cut where it is long, and how many more there are."""
    findings = [Finding("a" * 1000, "model.onnx", "none"), Finding("b", "model.onnx", "none")]
    assert reason_of(findings[1:]) == "b"
    assert reason_of(findings) == f"{'a' * (REASON_CHARS_MAX - 1)}…; 1 more finding"
    assert reason_of(findings * 2).endswith("…; 3 more findings")


@pytest.mark.parametrize(("name", "expected"), [("mpt", "fp32"), ("fp16-llama", "fp16"), ("genai-int4-llama", "int4")])
def test_the_precision_is_the_exporters(name: str, expected: str) -> None:
    """By what most of the weights are."""
    assert precision_of(validate(EXPORTS / name).model) == expected
