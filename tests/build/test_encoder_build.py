"""Encoders and tensor models: what a build accepts, what it refuses and how, and what its verification catches."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import onnx
import psutil
import pytest
from onnx import TensorProto, helper, numpy_helper

from residentd.backend.encoder import EncoderModel
from residentd.backend.onnxruntime_graph import OnnxRuntimeGraph
from residentd.backend.tensor_model import golden_feeds
from residentd.calls import TextRow
from residentd.errors import AccuracyError, MachineError, SourceError, StepRetryableError
from residentd.models.manifest import Engine, EngineLimits, Manifest
from residentd_build.encoders import build as encoder_build
from residentd_build.encoders import verify
from residentd_build.encoders.export import ExportGraph
from residentd_build.kinds import build
from residentd_build.options import Options, OptionsError
from support import tensor_graphs
from support.installed import EXPORTS

ENCODERS = EXPORTS.parent / "encoders"
Change = Callable[[Path], None]


def built(source: Path, stage: Path, **options: Any) -> Manifest:
    stage.mkdir(parents=True, exist_ok=True)
    given = Options("m", **options)
    return build(source, stage, given, lambda _stage, _fraction, _message: None, lambda _bytes: None)


def copied(name: str, tmp_path: Path) -> Path:
    return Path(shutil.copytree(ENCODERS / name, tmp_path / name))


def findings(source: Path, tmp_path: Path, **options: Any) -> list[str]:
    with pytest.raises(SourceError) as caught:
        built(source, tmp_path / "stage", **options)
    return [str(finding) for finding in caught.value.findings]


def changed(name: str, **values: Any) -> Change:
    """Set keys of a JSON file; None removes one."""

    def change(source: Path) -> None:
        document = json.loads((source / name).read_text())
        document |= values
        (source / name).write_text(json.dumps({key: value for key, value in document.items() if value is not None}))

    return change


def replaced(name: str, text: str) -> Change:
    return lambda source: (source / name).write_text(text) and None


def removed(name: str) -> Change:
    return lambda source: (source / name).unlink()


def edited(change: Callable[[onnx.ModelProto], None]) -> Change:
    def edit(source: Path) -> None:
        model = onnx.load(source / "model.onnx")
        change(model)
        onnx.save(model, source / "model.onnx")

    return edit


def modules(*names: str) -> Change:
    """The file modules.json: sentence-transformers' own classes where no package is said."""
    types = [name if "." in name else f"sentence_transformers.models.{name}" for name in names]
    entries = [
        {"idx": index, "name": str(index), "path": "1_Pooling" if kind.endswith("Pooling") else "", "type": kind}
        for index, kind in enumerate(types)
    ]
    return lambda source: (source / "modules.json").write_text(json.dumps(entries)) and None


IN_THE_GRAPH = ("modules.json: its modules are Transformer", "--library sentence_transformers")

# ---- what is built -------------------------------------------------------------------------------------------------


def test_the_manifest_says_how_texts_become_vectors(tmp_path: Path) -> None:
    """Length, pooling, normalisation and prompts from sentence-transformers' files; goldens and their bound."""
    manifest = built(ENCODERS / "embed-bert", tmp_path)
    content = manifest.content
    encoder = content.encoder
    assert encoder is not None
    assert (content.kind, content.engine.limits.context, encoder.width) == ("embed", 48, 32)
    assert (encoder.pooling, encoder.normalise, encoder.alone) == (("mean",), True, "")
    assert dict(encoder.prompts) == {"query": "where is ", "document": ""}
    assert encoder.inputs == ("input_ids", "attention_mask", "token_type_ids")
    assert manifest.agreement.logit_diff_max <= manifest.agreement.logit_diff_bound == encoder.tolerance
    assert len(encoder.goldens) == verify.GOLDENS
    assert set(content.files) == {"tokenizer.json", "engine/model.onnx", "engine/weights.bin"}
    assert built(ENCODERS / "embed-bert", tmp_path / "again").digest == manifest.digest, "a build is repeatable"


def test_positions_that_begin_after_the_padding_id_shorten_a_text(tmp_path: Path) -> None:
    """RoBERTa's 50 positions hold 48 tokens; one more is refused at install, by the export's own limit."""
    manifest = built(ENCODERS / "embed-roberta", tmp_path)
    assert manifest.content.engine.limits.context == 48
    assert manifest.content.encoder is not None
    assert manifest.content.encoder.pad_id == 1
    assert manifest.content.encoder.pooling == ("cls", "max")
    (text,) = findings(ENCODERS / "embed-roberta", tmp_path / "long", context=49)
    assert "made for 48" in text


def test_the_operator_may_name_the_kind(tmp_path: Path) -> None:
    """A reranker as a classifier, an embedding model as a tensor model."""
    assert built(ENCODERS / "rerank-bert", tmp_path / "a", kind="classify").content.kind == "classify"
    manifest = built(ENCODERS / "embed-bert", tmp_path / "b", kind="tensor")
    assert manifest.content.text is None
    assert manifest.content.tensors is not None
    assert manifest.content.tensors.inputs[0].name == "input_ids"


# ---- what is refused -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        ("embed-bert", removed("tokenizer.json"), ["tokenizer.json: the file is missing"]),
        ("embed-bert", removed("modules.json"), ["there is no modules.json", "1_Pooling"]),
        ("embed-bert", removed("1_Pooling/config.json"), ["1_Pooling/config.json: the file is missing"]),
        ("embed-bert", replaced("1_Pooling/config.json", "{}x"), ["1_Pooling/config.json: it is not valid JSON"]),
        ("embed-bert", changed("1_Pooling/config.json", pooling_mode_mean_tokens=False), ["names no pooling"]),
        ("embed-bert", changed("1_Pooling/config.json", include_prompt=False), ["leaves the prompt out"]),
        ("embed-bert", replaced("modules.json", '[{"type": 3}]'), ["type and path are needed"]),
        ("embed-bert", replaced("modules.json", "[]"), ["its modules are none"]),
        ("embed-bert", modules("Transformer", "Pooling", "Dense"), [*IN_THE_GRAPH, "nothing here computes Dense;"]),
        ("embed-bert", modules("Transformer", "Dense", "Normalize"), [*IN_THE_GRAPH, "nothing here computes Dense;"]),
        ("embed-bert", modules("Transformer", "WordWeights", "Pooling", "LSTM"), [*IN_THE_GRAPH, "WordWeights, LSTM;"]),
        ("embed-bert", modules("Transformer", "Normalize", "Pooling"), [*IN_THE_GRAPH, "in this order"]),
        ("embed-bert", modules("Transformer"), [*IN_THE_GRAPH, "its modules are Transformer;"]),
        ("embed-bert", modules("Transformer", "Pooling", "own.code.Normalize"), ["computes own.code.Normalize;"]),
        ("embed-bert", modules("Transformer", *["Normalize"] * 16), ["it has 17 modules; at most 16 are read"]),
        ("rerank-bert", modules("Transformer", "LogitScore"), ["the modules LogitScore", "gives logits"]),
        ("classify-distilbert", modules("Transformer", "Dense"), ["the modules Dense", "gives logits"]),
        ("embed-bert", replaced("1_Pooling/config.json", "{}"), ["names no pooling"]),
        ("embed-bert", changed("sentence_bert_config.json", max_seq_length="many"), ["max_seq_length"]),
        ("embed-bert", changed("config_sentence_transformers.json", prompts=["a"]), ["prompts must be"]),
        ("embed-bert", changed("config_sentence_transformers.json", default_prompt_name="x"), ["which is no prompt"]),
        ("embed-bert", changed("config_sentence_transformers.json", similarity_fn_name="l0"), ["similarity_fn_name"]),
        ("embed-bert", changed("config.json", vocab_size=10), ["knows ids up to 241"]),
        ("classify-distilbert", changed("config.json", id2label={"0": "a"}), ["1 labels", "3 logits"]),
        ("classify-distilbert", changed("config.json", problem_type="guess"), ["problem_type"]),
        ("rerank-bert", changed("config.json", sentence_transformers={"activation_fn": "x.Tanh"}), ["x.Tanh"]),
        ("embed-bert", replaced("tokenizer.json", '{"model": {"type": "BPE"}}'), ["tokenizer.json"]),
        (
            "embed-bert",
            edited(lambda model: model.graph.input.append(_input("pixel_values", TensorProto.FLOAT, ["n", 3]))),
            ["pixel_values", "--kind tensor"],
        ),
        (
            "embed-bert",
            edited(lambda model: setattr(model.graph.input[0].type.tensor_type, "elem_type", TensorProto.INT32)),
            ["input_ids is INT32"],
        ),
        ("embed-bert", lambda source: (source / "model.onnx").write_bytes(b"\x3a\x05abc"), ["not an ONNX file"]),
    ],
)
def test_a_source_is_refused_with_a_finding_to_act_on(
    name: str, change: Change, says: list[str], tmp_path: Path
) -> None:
    """Each says the file, what is wrong, and what to do."""
    source = copied(name, tmp_path)
    change(source)
    text = "\n".join(findings(source, tmp_path))
    for part in says:
        assert part in text


def _input(name: str, dtype: int, shape: list[Any]) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, dtype, shape)


def test_every_finding_comes_at_once(tmp_path: Path) -> None:
    """Tokenizer, pooling and length together."""
    source = copied("embed-bert", tmp_path)
    removed("tokenizer.json")(source)
    changed("1_Pooling/config.json", pooling_mode_mean_tokens=False)(source)
    changed("sentence_bert_config.json", max_seq_length=-1)(source)
    assert len(findings(source, tmp_path)) == 3


SPOILED: dict[str, tuple[str, Change, str]] = {
    "no model": ("embed-bert", removed("model.onnx"), "model.onnx: the file is missing"),
    "half a model": ("embed-bert", lambda d: os.truncate(d / "model.onnx", 5000), "model.onnx: it is not an ONNX file"),
    "no model of a classifier": (
        "classify-distilbert",
        lambda d: (changed("config.json", architectures=["XForSequenceClassification"])(d), removed("model.onnx")(d))[
            1
        ],
        "model.onnx: the file is missing",
    ),
    "broken modules": ("embed-bert", replaced("modules.json", "["), "modules.json: it is not valid JSON"),
    "modules that are an object": (
        "embed-bert",
        replaced("modules.json", "{}"),
        "modules.json: it is not a JSON array",
    ),
    "modules without a type": ("embed-bert", replaced("modules.json", '[{"type": 3}]'), "type and path are needed"),
    "broken pooling": ("embed-bert", replaced("1_Pooling/config.json", "{"), "1_Pooling/config.json: it is not valid"),
    "imports of nobody": (
        "embed-bert",
        edited(lambda model: model.graph.node.append(helper.make_node("Magic", ["input_ids"], ["m"], domain="x.y"))),
        "it uses operators of x.y",
    ),
}


@pytest.mark.parametrize("name", SPOILED)
def test_one_fault_is_one_finding(name: str, tmp_path: Path) -> None:
    """No finding about what a language model would need, and none about what only follows from the fault."""
    model, change, says = SPOILED[name]
    source = copied(model, tmp_path)
    change(source)
    (text,) = findings(source, tmp_path)
    assert says in text


@pytest.mark.parametrize("content", [b"", b"\x3a\x05abc"])
def test_a_lone_file_that_is_no_graph_is_one_finding(content: bytes, tmp_path: Path) -> None:
    """Nothing beside it speaks of text, so no tokenizer and no configuration is missed."""
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "m.onnx").write_bytes(content)
    (text,) = findings(tmp_path / "x", tmp_path)
    assert "m.onnx: " in text


def test_the_kind_that_the_operator_named_is_kept_for_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    """An input whose description is too long to be looked at does not make a tensor model a language model."""
    source = copied("embed-bert", tmp_path)
    edited(lambda model: model.graph.input.append(_input("x" * 70_000, TensorProto.FLOAT, [1])))(source)
    (text,) = findings(source, tmp_path, kind="tensor")
    assert "described in 70,0" in text


def test_imports_that_nothing_uses_are_no_fault(tmp_path: Path) -> None:
    """Tools that optimise a graph list every operator set that they know."""
    source = copied("embed-bert", tmp_path)
    edited(lambda model: model.opset_import.append(helper.make_opsetid("com.example", 1)))(source)
    assert built(source, tmp_path / "stage").content.kind == "embed"


def test_the_length_is_the_transformers_own(tmp_path: Path) -> None:
    """Older versions of sentence-transformers keep it in the folder of the transformer."""
    source = copied("embed-bert", tmp_path)
    (source / "0_Transformer").mkdir()
    (source / "sentence_bert_config.json").rename(source / "0_Transformer" / "sentence_bert_config.json")
    path = source / "modules.json"
    path.write_text(path.read_text().replace('"path": ""', '"path": "0_Transformer"'))
    assert built(source, tmp_path / "stage").content.engine.limits.context == 48


def test_a_tokenizer_that_gives_a_text_no_token_is_refused(tmp_path: Path) -> None:
    """It would refuse what callers send; it is the source's fault, not ours."""
    source = copied("embed-bert", tmp_path)
    nothing = {"type": "Replace", "pattern": {"Regex": "a"}, "content": ""}
    changed("tokenizer.json", normalizer=nothing, post_processor=None)(source)
    (text,) = findings(source, tmp_path)
    assert "tokenizer.json: text 0 has no token" in text


def test_a_wrong_kind_is_refused(tmp_path: Path) -> None:
    """A classifier is no embedding model, whoever says so; an unknown kind is a usage error."""
    (text,) = findings(ENCODERS / "classify-distilbert", tmp_path, kind="embed")
    assert "it has logits" in text
    with pytest.raises(OptionsError, match="--kind"):
        Options("m", kind="vision")


# ---- what verification catches -------------------------------------------------------------------------------------


def _weights(model: onnx.ModelProto) -> list[onnx.TensorProto]:
    return [entry for entry in model.graph.initializer if entry.data_type == TensorProto.FLOAT and len(entry.dims) == 2]


@pytest.mark.parametrize("fault", ["pooling", "normalise", "engine", "length"])
def test_a_planted_fault_is_an_accuracy_error(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pooling over padding, a forgotten normalisation, a changed weight, a row too short: nothing is published."""
    from residentd.backend import encoder as served

    if fault == "pooling":
        monkeypatch.setattr(served, "pool", lambda hidden, _lengths, _modes: hidden.mean(axis=1))
    elif fault == "normalise":
        monkeypatch.setattr(served, "normalised", lambda vectors: vectors)
    elif fault == "length":
        real = served.pool
        monkeypatch.setattr(served, "pool", lambda h, lengths, modes: real(h, [max(1, n - 1) for n in lengths], modes))
    else:
        real_write = encoder_build.write_engine

        def spoiled(model: Any, output: str, stage: Path, report: Any) -> str:
            line = real_write(model, output, stage, report)
            path = stage / "engine" / "weights.bin"
            data = np.fromfile(path, np.float32)
            data[np.abs(data).argmax()] *= 1.5
            data.tofile(path)
            return line

        monkeypatch.setattr(encoder_build, "write_engine", spoiled)
    with pytest.raises(AccuracyError, match="differs from its export's"):
        built(ENCODERS / "embed-bert", tmp_path)


def test_an_export_whose_texts_depend_on_their_company_runs_them_alone(tmp_path: Path) -> None:
    """The mean over the batch is taken off every text's hidden state: alone all is well, together it is not."""
    source = copied("embed-bert", tmp_path)

    def couple(model: onnx.ModelProto) -> None:
        (output,) = model.graph.output
        for node in model.graph.node:
            for index, name in enumerate(node.output):
                if name == output.name:
                    node.output[index] = "before"
        add = [
            helper.make_node("ReduceMean", ["before", "first_axis"], ["mean"], keepdims=1),
            helper.make_node("Mul", ["mean", "tenth"], ["part"]),
            helper.make_node("Sub", ["before", "part"], [output.name]),
        ]
        model.graph.node.extend(add)
        model.graph.initializer.append(numpy_helper.from_array(np.array(0.1, np.float32), "tenth"))
        model.graph.initializer.append(numpy_helper.from_array(np.array([0], np.int64), "first_axis"))

    edited(couple)(source)
    manifest = built(source, tmp_path / "stage")
    encoder = manifest.content.encoder
    assert encoder is not None
    assert encoder.alone == "its ReduceMean mean reduces over the rows"
    assert any("one text each" in line for line in manifest.build.passes)


@pytest.mark.parametrize("shown_by", ["graph", "numbers"])
def test_a_label_that_a_mask_rules_out_hides_no_company(
    shown_by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One logit of -1e9 is no scale for the others, which differ in company by a tenth: numbers alone show it too."""
    source = copied("classify-distilbert", tmp_path)

    def couple(model: onnx.ModelProto) -> None:
        (output,) = model.graph.output
        (last,) = (node for node in model.graph.node if output.name in node.output)
        last.output[0] = "before"
        model.graph.node.extend(
            [
                helper.make_node("ReduceMean", ["before", "first_axis"], ["mean"], keepdims=1),
                helper.make_node("Mul", ["mean", "tenth"], ["part"]),
                helper.make_node("Add", ["before", "part"], ["coupled"]),
                helper.make_node("Add", ["coupled", "mask"], [output.name]),
            ]
        )
        arrays = {
            "first_axis": np.array([0], np.int64),
            "tenth": np.array(0.1, np.float32),
            "mask": np.array([0, 0, -1e9], np.float32),
        }
        model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in arrays.items())

    edited(couple)(source)
    if shown_by == "numbers":
        monkeypatch.setattr(verify, "_mixing_reason", lambda _source: "")
    manifest = built(source, tmp_path / "stage")
    assert manifest.content.encoder is not None
    reasons = {"graph": "its ReduceMean mean reduces", "numbers": "another answer in company"}
    assert reasons[shown_by] in manifest.content.encoder.alone
    assert manifest.agreement.logit_diff_bound < 0.1, "of logits of a few, not of a billion"


@pytest.mark.parametrize("pooled", ["first", "mean"])
def test_a_graph_that_pools_by_itself_is_taken_as_it_is(pooled: str, tmp_path: Path) -> None:
    """sentence_embedding needs no modules, or has them in it: Dense, too. One that averages over the padding is caught,
    and runs text by text."""
    source = copied("embed-bert", tmp_path)
    (removed("modules.json") if pooled == "first" else modules("Transformer", "Pooling", "Dense", "Normalize"))(source)

    def pool(model: onnx.ModelProto) -> None:
        name = model.graph.output[0].name
        node = (
            helper.make_node("Gather", [name, "zero"], ["sentence_embedding"], axis=1)
            if pooled == "first"
            else helper.make_node("ReduceMean", [name, "one"], ["sentence_embedding"], keepdims=0)
        )
        model.graph.node.append(node)
        model.graph.output.append(_input("sentence_embedding", TensorProto.FLOAT, ["n", 32]))
        model.graph.initializer.append(numpy_helper.from_array(np.array(0, np.int64), "zero"))
        model.graph.initializer.append(numpy_helper.from_array(np.array([1], np.int64), "one"))

    edited(pool)(source)
    manifest = built(source, tmp_path / "stage")
    encoder = manifest.content.encoder
    assert encoder is not None
    assert (encoder.output, encoder.pooling, encoder.normalise) == ("sentence_embedding", (), False)
    assert bool(encoder.alone) == (pooled == "mean")


def test_goldens_are_the_exports_own_answers(tmp_path: Path) -> None:
    """Each recorded vector is what ONNX Runtime without optimisations gives for the text alone."""
    manifest = built(ENCODERS / "embed-bert", tmp_path)
    encoder = manifest.content.encoder
    assert encoder is not None
    model = EncoderModel(encoder, OnnxRuntimeGraph(ENCODERS / "embed-bert" / "model.onnx", optimised=False))
    for golden in encoder.goldens:
        (found,) = model.vectors([TextRow(golden.ids, golden.types)])
        assert found == pytest.approx(np.frombuffer(golden.output, "<f4"), abs=1e-6)


def test_no_run_is_larger_than_the_daemons(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows times the longest of them, in the export's runs and the engine's; and texts do share runs."""
    sizes: list[tuple[int, int]] = []
    for kind in (OnnxRuntimeGraph, ExportGraph):
        real = kind.run

        def run(graph: Any, feeds: Any, outputs: Any, real: Any = real) -> Any:
            sizes.append(feeds["input_ids"].shape)
            return real(graph, feeds, outputs)

        monkeypatch.setattr(kind, "run", run)
    manifest = built(ENCODERS / "embed-bert", tmp_path, step_tokens=96, slots=4)
    assert manifest.content.engine.limits.step_tokens_max == 96
    assert {rows for rows, _ in sizes} >= {1, 2, 4}
    assert max(rows * longest for rows, longest in sizes) <= 96


def test_long_texts_are_counted_with_every_pair_of_their_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores of 8,192 tokens by 8,192 take 7 GB of which no number of tokens tells."""

    def engine(context: int) -> Engine:
        limits = EngineLimits(slots=8, context=context, step_tokens_max=8192, vocab=300)
        return Engine(target="onnxruntime-cpu", mode="canonical", precision="fp32", path="m", limits=limits, caches=())

    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=6 << 30))
    encoder_build.check_memory(engine(512), 100 << 20)
    with pytest.raises(MachineError, match="texts of up to 8,192"):
        encoder_build.check_memory(engine(8192), 100 << 20)


@pytest.mark.parametrize("rows", [1, 2])
def test_a_run_that_the_memory_does_not_hold_is_the_machines_fault(
    rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one text or of several: neither the export's fault nor a reason to run its texts alone."""
    real = ExportGraph.run

    def run(graph: Any, feeds: Any, outputs: Any) -> Any:
        if len(feeds["input_ids"]) >= rows:
            raise StepRetryableError("a run of the export ran out of memory (bad_alloc)")
        return real(graph, feeds, outputs)

    monkeypatch.setattr(ExportGraph, "run", run)
    with pytest.raises(MachineError, match="fewer --step-tokens or a shorter --context") as caught:
        built(ENCODERS / "embed-bert", tmp_path)
    assert not isinstance(caught.value, StepRetryableError)


def test_a_constant_of_bytes_does_not_make_an_encoder_quantised(tmp_path: Path) -> None:
    """A byte that multiplies what fp32 weights give: the bound is that of roundings in fp32."""
    source = copied("embed-bert", tmp_path)

    def add(model: onnx.ModelProto) -> None:
        (output,) = model.graph.output
        (last,) = (node for node in model.graph.node if output.name in node.output)
        last.output[0] = "before"
        model.graph.initializer.append(numpy_helper.from_array(np.ones(1, np.uint8), "byte"))
        model.graph.node.extend(
            [
                helper.make_node("Cast", ["byte"], ["factor"], to=TensorProto.FLOAT),
                helper.make_node("Mul", ["before", "factor"], [output.name]),
            ]
        )

    edited(add)(source)
    manifest = built(source, tmp_path / "stage")
    assert manifest.content.engine.precision == "fp32"
    assert manifest.agreement.logit_diff_bound < 1e-3  # of vectors of length 1


# ---- tensor models -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "alone"),
    [
        ("linear", ""),
        ("lookup", ""),
        ("centred", "its ReduceMean m reduces over the rows"),
        ("counter", "step is a single number"),
    ],
)
def test_calls_share_runs_only_where_that_is_proven(name: str, alone: str, tmp_path: Path) -> None:
    """By shape, and by computing: rows that depend on their company, or have no free first axis, run alone."""
    manifest = built(getattr(tensor_graphs, name)(tmp_path / "x" / f"{name}.onnx"), tmp_path / "stage")
    tensors = manifest.content.tensors
    assert tensors is not None
    assert (manifest.content.kind, manifest.content.text) == ("tensor", None)
    assert alone in tensors.alone
    assert bool(alone) == bool(tensors.alone)


def test_sizes_that_cannot_be_guessed_are_asked_for(tmp_path: Path) -> None:
    """Without --shape the finding says what was tried for and how to name it; with it the model installs."""
    path = tensor_graphs.reshaped(tmp_path / "x" / "m.onnx")
    (text,) = findings(path, tmp_path)
    assert "x['n', 's']" in text
    assert "--shape" in text
    manifest = built(path, tmp_path / "stage", shapes=("x=1x30",))
    assert manifest.content.tensors is not None
    assert manifest.content.tensors.goldens[0].shapes == {"x": (1, 30)}
    (text,) = findings(path, tmp_path, shapes=("x=1x30x2",))
    assert "does not fit" in text
    with pytest.raises(OptionsError, match="--shape"):
        Options("m", shapes=("x=1xy",))


def test_several_files_are_told_apart_by_name(tmp_path: Path) -> None:
    """A directory with two graphs asks which; a path to one of them says so."""
    tensor_graphs.linear(tmp_path / "x" / "a.onnx")
    tensor_graphs.counter(tmp_path / "x" / "b.onnx")
    (text,) = findings(tmp_path / "x", tmp_path)
    assert "a.onnx, b.onnx" in text
    by_path = built(tmp_path / "x" / "b.onnx", tmp_path / "s1")
    by_name = built(tmp_path / "x", tmp_path / "s2", variant="b.onnx")
    assert by_path.digest == by_name.digest


def test_inputs_of_text_are_refused(tmp_path: Path) -> None:
    """A graph that takes strings is no model that can be called with numbers."""
    path = tensor_graphs.write(
        tmp_path / "x" / "m.onnx",
        [helper.make_node("Identity", ["x"], ["y"])],
        [("x", TensorProto.STRING, ["n"])],
        [("y", TensorProto.STRING, ["n"])],
    )
    assert all("STRING" in text for text in findings(path, tmp_path))


def test_a_spoiled_tensor_engine_is_an_accuracy_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One weight changed by a hundredth of its range is seen."""
    from residentd_build.encoders import tensor_build

    real = tensor_build.write_engine

    def spoiled(model: Any, output: Any, stage: Path, report: Any) -> str:
        line = real(model, output, stage, report)
        graph = onnx.load(stage / "engine" / "model.onnx")
        array = numpy_helper.to_array(graph.graph.initializer[0]).copy()
        array[0, 0] += 0.02
        graph.graph.initializer[0].CopyFrom(numpy_helper.from_array(array, graph.graph.initializer[0].name))
        onnx.save(graph, stage / "engine" / "model.onnx")
        return line

    monkeypatch.setattr(tensor_build, "write_engine", spoiled)
    with pytest.raises(AccuracyError, match="differs from its export's"):
        built(tensor_graphs.linear(tmp_path / "x" / "m.onnx"), tmp_path / "stage")


@pytest.mark.parametrize(("dtype", "bound"), [(np.float32, 4e-5), (np.float16, 4e-3)])
def test_the_bound_of_a_tensor_model_is_that_of_its_weights(dtype: Any, bound: float, tmp_path: Path) -> None:
    """Roundings of 2^-24 or of 2^-11, as for an encoder; of outputs up to 1."""
    path = tensor_graphs.linear(tmp_path / "x" / "m.onnx")
    model = onnx.load(path)
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.elem_type = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    weight = numpy_helper.to_array(model.graph.initializer[0]).astype(dtype)
    model.graph.initializer[0].CopyFrom(numpy_helper.from_array(weight, "w"))
    onnx.save(model, path)
    manifest = built(path, tmp_path / "stage")
    assert manifest.content.tensors is not None
    assert bound / 4 < manifest.content.tensors.tolerances["y"] < bound


def test_a_tensor_model_that_the_memory_does_not_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine's fault, not the export's."""
    real, seen = ExportGraph.run, []

    def run(graph: Any, feeds: Any, outputs: Any) -> Any:
        seen.append(feeds)
        if len(seen) > 1:
            raise StepRetryableError("a run of the export ran out of memory (bad_alloc)")
        return real(graph, feeds, outputs)

    monkeypatch.setattr(ExportGraph, "run", run)
    with pytest.raises(MachineError, match="ran out of memory"):
        built(tensor_graphs.linear(tmp_path / "x" / "m.onnx"), tmp_path / "stage")


def test_made_up_inputs_never_change(tmp_path: Path) -> None:
    """The contents of golden inputs are integer arithmetic: these numbers hold on every machine and library."""
    manifest = built(tensor_graphs.lookup(tmp_path / "x" / "m.onnx"), tmp_path / "stage")
    assert manifest.content.tensors is not None
    noise = [((1 << 20) + 1 + place) * 2654435761 % 2**32 for place in range(4)]
    feeds = golden_feeds(manifest.content.tensors.inputs, {"ids": (2, 2)}, 1, 255)
    assert feeds["ids"].reshape(-1).tolist() == [(number >> 8) % 256 for number in noise]
    spec = msgspec.structs.replace(manifest.content.tensors.inputs[0], dtype="float64")
    floats = golden_feeds([spec], {"ids": (2, 2)}, 1, 255)["ids"]
    assert floats.reshape(-1).tolist() == [number / 2**31 - 1 for number in noise]
