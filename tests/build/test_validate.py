"""What a source directory must have, and that everything wrong with it is said at once."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import onnx
import pytest
from lowering import EXPORTS
from onnx import TensorProto, helper

from residentd.errors import Finding, SourceError
from residentd.sampling.limits import STOP_IDS_MAX
from residentd.text.limits import TEMPLATE_BYTES_MAX, TOKENIZER_BYTES_MAX
from residentd_build import validate as validate_module
from residentd_build.report import FINDINGS_MAX
from residentd_build.validate import validate


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A private copy of an export."""
    return Path(shutil.copytree(EXPORTS / "llama", tmp_path / "llama"))


def findings(directory: Path, **options: int) -> tuple[Finding, ...]:
    with pytest.raises(SourceError) as caught:
        validate(directory, **options)
    return caught.value.findings


def edit(directory: Path, name: str, **changes: Any) -> None:
    """Set or, with None, remove keys of a JSON file."""
    path = directory / name
    content = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


def edit_in_model(directory: Path, **changes: Any) -> None:
    """Set keys of the tokenizer's model."""
    edit(directory, "tokenizer.json", model=json.loads((directory / "tokenizer.json").read_text())["model"] | changes)


def edit_model(directory: Path, change: Callable[[onnx.ModelProto], None]) -> None:
    model = onnx.load(directory / "model.onnx")
    change(model)
    onnx.save(model, directory / "model.onnx")


@pytest.mark.parametrize("name", sorted(path.name for path in EXPORTS.iterdir() if path.is_dir()))
def test_every_committed_export_is_accepted(name: str) -> None:
    """What an exporter wrote passes, with the end tokens that transformers knows."""
    source = validate(EXPORTS / name)
    goldens = json.loads((EXPORTS / name / "goldens.json").read_text())
    if (EXPORTS / name / "config.json").is_file():
        vocab = json.loads((EXPORTS / name / "config.json").read_text())["vocab_size"]
    else:
        vocab = json.loads((EXPORTS / name / "genai_config.json").read_text())["model"]["vocab_size"]
    assert list(source.text.eos_ids) == goldens["eos_token_ids"]
    assert (source.architecture, source.vocab) == (goldens["architecture"], vocab)
    assert source.context_max == goldens["context_tokens_max"]


def with_text_goldens() -> list[str]:
    """The exports whose tokenizer no other export has."""
    return [path.parent.name for path in sorted(EXPORTS.glob("*/goldens.json")) if '"encode"' in path.read_text()]


@pytest.mark.parametrize("name", with_text_goldens())
def test_adds_bos_is_what_the_tokenizer_does(name: str) -> None:
    """A plain text starts with BOS exactly where transformers' own encoding does."""
    text = validate(EXPORTS / name).text
    goldens = json.loads((EXPORTS / name / "goldens.json").read_text())["encode"]
    starts = {golden["ids"][:1] == [text.bos_id] for golden in goldens if golden["text"]}
    assert starts == {text.adds_bos}


def test_a_digest_names_the_source(source: Path) -> None:
    """The same files give the same digest wherever they lie; any change of one gives another."""
    before = validate(source).sha256
    assert validate(EXPORTS / "llama").sha256 == before
    edit(source, "generation_config.json", temperature=0.5)
    assert validate(source).sha256 != before
    assert validate(EXPORTS / "llama-external").sha256 not in {before, validate(EXPORTS / "llama-eager").sha256}


def no_tokens(model: onnx.ModelProto) -> None:
    model.graph.input[0].name = "tokens"
    for node in model.graph.node:
        node.input[:] = ["tokens" if name == "input_ids" else name for name in node.input]


def no_cache(model: onnx.ModelProto) -> None:
    """The cache of layer 1 is there under another name only."""
    for value in model.graph.input:
        value.name = value.name.replace("past_key_values.1", "memory.1")
    for node in model.graph.node:
        node.input[:] = [name.replace("past_key_values.1", "memory.1") for name in node.input]


def half_cache(model: onnx.ModelProto) -> None:
    for value in model.graph.input:
        value.name = value.name.replace("past_key_values.1.value", "past_key_values.1.other")
    for node in model.graph.node:
        node.input[:] = [name.replace("past_key_values.1.value", "past_key_values.1.other") for name in node.input]


def eight_bit_cache(model: onnx.ModelProto) -> None:
    node = model.graph.input[3]
    node.type.tensor_type.elem_type = TensorProto.INT8
    cast = helper.make_node("Cast", [node.name], ["cast_past"], to=TensorProto.FLOAT)
    for user in model.graph.node:
        user.input[:] = ["cast_past" if name == node.name else name for name in user.input]
    model.graph.node.insert(0, cast)


def extra_input(model: onnx.ModelProto) -> None:
    model.graph.input.append(helper.make_tensor_value_info("pixel_values", TensorProto.FLOAT, [1, 3, 8, 8]))


def old_opset(model: onnx.ModelProto) -> None:
    model.opset_import[0].version = 9


def custom_operator(model: onnx.ModelProto) -> None:
    model.graph.node.append(helper.make_node("Magic", ["input_ids"], ["magic"], domain="com.example"))
    model.opset_import.append(helper.make_opsetid("com.example", 1))


def undefined_value(model: onnx.ModelProto) -> None:
    model.graph.node[-1].input[0] = "from_nowhere"


def cut_weights(model: onnx.ModelProto) -> None:
    weight = next(tensor for tensor in model.graph.initializer if len(tensor.raw_data) > 64)
    weight.raw_data = weight.raw_data[:-4]


def endless_number(model: onnx.ModelProto) -> None:
    """A layer whose number has more digits than Python turns into an int."""
    name = f"past_key_values.{'1' * 5000}.key"
    model.graph.input.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 2, 8, 8]))


def wide_logits(model: onnx.ModelProto) -> None:
    model.graph.output[0].type.tensor_type.shape.dim[2].dim_value = 500


def model_change(change: Callable[[onnx.ModelProto], None]) -> Callable[[Path], None]:
    return lambda directory: edit_model(directory, change)


def only_ids(directory: Path) -> None:
    """Nothing but the ids of config.json and generation_config.json names BOS and EOS."""
    edit(directory, "tokenizer_config.json", bos_token=None, eos_token=None)
    (directory / "special_tokens_map.json").unlink()


def set_ids(name: str, **ids: object) -> Callable[[Path], None]:
    return lambda directory: (only_ids(directory), edit(directory, name, **ids))[-1]


WRONG: Mapping[str, tuple[Callable[[Path], object], str, str]] = {
    "no model": (lambda d: (d / "model.onnx").unlink(), "model.onnx", "is missing"),
    "no configuration": (lambda d: (d / "config.json").unlink(), "config.json", "is missing"),
    "no tokenizer": (lambda d: (d / "tokenizer.json").unlink(), "tokenizer.json", "is missing"),
    "model is a link": (
        lambda d: ((d / "model.onnx").rename(d / "blob"), (d / "model.onnx").symlink_to("blob")),
        "model.onnx",
        "symbolic link",
    ),
    "configuration is a pipe": (
        lambda d: ((d / "config.json").unlink(), os.mkfifo(d / "config.json")),
        "config.json",
        "not a regular file",
    ),
    "model is not ONNX": (lambda d: (d / "model.onnx").write_bytes(b"\xff" * 99), "model.onnx", "is not an ONNX file"),
    "model is empty": (lambda d: (d / "model.onnx").write_bytes(b""), "model.onnx", "is empty"),
    "model has a second name": (lambda d: os.link(d / "model.onnx", d / "again"), "model.onnx", "hard links"),
    "configuration is not JSON": (lambda d: (d / "config.json").write_text("{"), "config.json", "not valid JSON"),
    "configuration is a list": (lambda d: (d / "config.json").write_text("[]"), "config.json", "not a JSON object"),
    "configuration nests without end": (
        lambda d: (d / "config.json").write_text("[" * 200_000),
        "config.json",
        "not valid JSON",
    ),
    "tokenizer is not one": (lambda d: (d / "tokenizer.json").write_text("{}"), "tokenizer.json", "cannot be read"),
    "template is not UTF-8": (
        lambda d: (d / "chat_template.jinja").write_bytes(b"\xff\xfe"),
        "chat_template.jinja",
        "not UTF-8",
    ),
    "tokenizer without a model's parts": (
        lambda d: edit(d, "tokenizer.json", model={"type": "BPE", "vocab": {}, "merges": []}, added_tokens=[{}]),
        "tokenizer.json",
        "cannot be read",
    ),
    "tokenizer that would end the process": (
        lambda d: edit_in_model(d, continuing_subword_prefix="#####"),
        "tokenizer.json",
        "does not begin with its prefix",
    ),
    "tokenizer above the daemon's limit": (
        lambda d: os.truncate(d / "tokenizer.json", TOKENIZER_BYTES_MAX + 1),
        "tokenizer.json",
        f"at most {TOKENIZER_BYTES_MAX:,} are read",
    ),
    "template that does not compile": (
        lambda d: (d / "chat_template.jinja").write_text("{% for message in messages %}"),
        "chat_template.jinja",
        "cannot be compiled",
    ),
    "template in the configuration that does not compile": (
        lambda d: ((d / "chat_template.jinja").unlink(), edit(d, "tokenizer_config.json", chat_template="{{ a b }}")),
        "tokenizer_config.json",
        "cannot be compiled",
    ),
    "template in the configuration above the daemon's limit": (
        lambda d: (
            (d / "chat_template.jinja").unlink(),
            edit(d, "tokenizer_config.json", chat_template="x" * (TEMPLATE_BYTES_MAX + 1)),
        ),
        "tokenizer_config.json",
        f"at most {TEMPLATE_BYTES_MAX:,} are read",
    ),
    "template without end": (
        lambda d: (d / "chat_template.jinja").write_text(
            "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}"
        ),
        "chat_template.jinja",
        "steps for one short message",
    ),
    "no context": (lambda d: edit(d, "config.json", max_position_embeddings=None), "config.json", "max_position_emb"),
    "context in words": (lambda d: edit(d, "config.json", max_position_embeddings="2k"), "config.json", "'2k'"),
    "tokenizer of another model": (
        lambda d: shutil.copy(EXPORTS / "tinyllama" / "tokenizer.json", d / "tokenizer.json"),
        "tokenizer.json",
        "ids up to 511 and the model gives 480 logits",
    ),
    "vocabulary of another model": (lambda d: edit(d, "config.json", vocab_size=481), "config.json", "481"),
    "logits of another width": (model_change(wide_logits), "config.json", "480 and the model gives 500"),
    "EOS beyond the vocabulary": (
        lambda d: edit(d, "generation_config.json", eos_token_id=[2, 480]),
        "generation_config.json",
        "id 480 is beyond",
    ),
    "EOS in words": (
        lambda d: edit(d, "generation_config.json", eos_token_id="</s>"),
        "generation_config.json",
        '"</s>"',
    ),
    "BOS that the tokenizer lacks": (
        lambda d: edit(d, "tokenizer_config.json", bos_token="<|bos|>"),
        "tokenizer_config.json",
        "'<|bos|>' is not in the tokenizer's vocabulary",
    ),
    "BOS id below zero": (set_ids("config.json", bos_token_id=-1), "config.json", "bos_token_id is -1"),
    "BOS id above 32 bits": (set_ids("config.json", bos_token_id=1 << 40), "config.json", "bos_token_id is 1099511"),
    "BOS id in words": (set_ids("config.json", bos_token_id="<s>"), "config.json", 'bos_token_id is "<s>"'),
    "EOS id below zero": (set_ids("config.json", eos_token_id=-1), "config.json", "eos_token_id holds -1"),
    "EOS id above 32 bits": (
        set_ids("generation_config.json", eos_token_id=1 << 40),
        "generation_config.json",
        "eos_token_id holds 1099511627776",
    ),
    "BOS text that is no text": (
        lambda d: edit(d, "tokenizer_config.json", bos_token="\ud800"),
        "tokenizer_config.json",
        "half a surrogate pair",
    ),
    "template that is no text": (
        lambda d: edit(d, "tokenizer_config.json", chat_template="hello \udfff"),
        "tokenizer_config.json",
        "half a surrogate pair",
    ),
    "architecture that is no text": (
        lambda d: edit(d, "config.json", model_type="llama\ud800"),
        "config.json",
        "half a surrogate pair",
    ),
    "architecture that is no name": (lambda d: edit(d, "config.json", model_type=["llama"]), "config.json", "model_ty"),
    "architecture without end": (lambda d: edit(d, "config.json", model_type="l" * 1000), "config.json", "model_type"),
    "tokenizer is empty": (lambda d: (d / "tokenizer.json").write_bytes(b""), "tokenizer.json", "is empty"),
    "configuration is empty": (lambda d: (d / "config.json").write_bytes(b""), "config.json", "is empty"),
    "cache numbered without end": (model_change(endless_number), "source", "cannot be read: ValueError"),
    "tokenizer that encodes at random": (
        lambda d: edit_in_model(d, dropout=0.1),
        "tokenizer.json",
        "dropout is 0.1",
    ),
    "temperature without end": (
        lambda d: edit(d, "generation_config.json", temperature=1e9, do_sample=False),
        "generation_config.json",
        "temperature is 1000000000",
    ),
    "temperature beyond a float": (
        lambda d: edit(d, "generation_config.json", temperature=10**400),
        "generation_config.json",
        "temperature is 1000",
    ),
    "temperature that is no number": (
        lambda d: edit(d, "generation_config.json", temperature=float("nan")),
        "generation_config.json",
        "temperature is ",
    ),
    "repetition penalty above what a request may have": (
        lambda d: edit(d, "generation_config.json", repetition_penalty=20),
        "generation_config.json",
        "repetition_penalty is 20",
    ),
    "repetition penalty below what a request may have": (
        lambda d: edit(d, "generation_config.json", repetition_penalty=0.01),
        "generation_config.json",
        "repetition_penalty is 0.01",
    ),
    "min_p that leaves no token": (
        lambda d: edit(d, "generation_config.json", min_p=1.0),
        "generation_config.json",
        "min_p is 1",
    ),
    "more end tokens than a request may have": (
        lambda d: edit(d, "generation_config.json", eos_token_id=list(range(STOP_IDS_MAX + 1))),
        "generation_config.json",
        f"at most {STOP_IDS_MAX}",
    ),
    "temperature below zero": (
        lambda d: edit(d, "generation_config.json", temperature=-1),
        "generation_config.json",
        "temperature is -1",
    ),
    "top_p in words": (lambda d: edit(d, "generation_config.json", top_p="all"), "generation_config.json", "top_p"),
    "top_k as a fraction": (lambda d: edit(d, "generation_config.json", top_k=1.5), "generation_config.json", "whole"),
    "no token input": (model_change(no_tokens), "model.onnx", "no input input_ids"),
    "cache under another name": (model_change(no_cache), "model.onnx", "memory.1.key, memory.1.value"),
    "half a cache": (model_change(half_cache), "model.onnx", "past_key_values.1.value"),
    "8-bit cache": (
        model_change(eight_bit_cache),
        "model.onnx",
        "past_key_values.0.key (1 such) is not a floating-point",
    ),
    "an image input": (model_change(extra_input), "model.onnx", "pixel_values"),
    "opset 9": (model_change(old_opset), "model.onnx", "opset 9; 13 to 25 are supported"),
    "custom operators": (model_change(custom_operator), "model.onnx", "operators of com.example"),
    "a value from nowhere": (model_change(undefined_value), "model.onnx", "not a well-formed ONNX model"),
    "weights cut short": (model_change(cut_weights), "tensor", "its shape and type need"),
}


@pytest.mark.parametrize("name", WRONG)
def test_each_fault_is_a_finding_with_place_and_remedy(name: str, source: Path) -> None:
    """What is wrong, where, and the way out."""
    spoil, where, what = WRONG[name]
    spoil(source)
    found = [finding for finding in findings(source) if where in finding.where and what in finding.what]
    assert len(found) == 1, findings(source)
    assert found[0].remedy


def test_all_findings_come_together(source: Path) -> None:
    """Five unrelated faults are reported in one go."""
    (source / "chat_template.jinja").write_bytes(b"\xff")
    edit(source, "config.json", max_position_embeddings=None)
    edit(source, "generation_config.json", top_p=7, eos_token_id=[-1])
    edit_model(source, extra_input)
    found = findings(source)
    places = [finding.where for finding in found]
    expected = ["chat_template.jinja", "config.json", "generation_config.json", "generation_config.json", "model.onnx"]
    assert sorted(places) == expected


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("generation_config.json", "eos_token_id", "x" * (2 << 20)),
        ("generation_config.json", "temperature", "x" * (2 << 20)),
        ("tokenizer_config.json", "bos_token", "x" * (2 << 20)),
        ("config.json", "vocab_size", "x" * (2 << 20)),
        ("config.json", "max_position_embeddings", {"x" * (2 << 20): "x" * (2 << 20)}),
        ("config.json", "model_type", "x" * (2 << 20)),
    ],
)
def test_what_a_file_says_is_quoted_in_short(name: str, key: str, value: object, source: Path) -> None:
    """Two megabytes in one value do not come out again in a finding."""
    if key == "vocab_size":
        edit_model(source, lambda model: model.graph.output[0].type.tensor_type.shape.dim[2].Clear())
    edit(source, name, **{key: value})
    assert [key for finding in findings(source) if key in finding.what]
    assert max(len(str(finding)) for finding in findings(source)) < 1000


def test_names_of_a_graph_are_quoted_in_short(source: Path) -> None:
    """Nor do a thousand inputs with long names."""

    def spoil(model: onnx.ModelProto) -> None:
        for index in range(1000):
            name = f"{'x' * 1000}{index}"
            model.graph.input.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]))

    edit_model(source, spoil)
    assert max(len(str(finding)) for finding in findings(source)) < 1000


def test_a_bug_of_ours_is_no_finding(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed assertion blames nobody's files, and a full disk or memory is what it is."""
    for error in (AssertionError("planted"), MemoryError(), OSError(28, "planted")):

        def fail(*_arguments: object, error: Exception = error, **_options: object) -> None:
            raise error

        with monkeypatch.context() as patch:
            patch.setattr(validate_module, "_check_context", fail)
            with pytest.raises(type(error)):
                validate(source)


def test_the_most_that_a_default_may_be_is_accepted(source: Path) -> None:
    """The limits are those of a request, to the end."""
    most = {"temperature": 100, "min_p": 0.99, "repetition_penalty": 10, "top_k": 1 << 24, "top_p": 1e-9}
    edit(source, "generation_config.json", **most, eos_token_id=list(range(STOP_IDS_MAX)))
    validated = validate(source)
    assert {name: getattr(validated.sampling, name) for name in most} == most
    assert len(validated.text.eos_ids) == STOP_IDS_MAX


@pytest.mark.parametrize("dropout", [None, 0.0])
def test_a_tokenizer_without_dropout_is_accepted(dropout: float | None, source: Path) -> None:
    """Off is off, however it is written."""
    model = json.loads((source / "tokenizer.json").read_text())["model"]
    edit(source, "tokenizer.json", model=model | {"dropout": dropout})
    assert validate(source).text.bos_id == 1


def test_an_empty_directory_names_all_that_is_missing(tmp_path: Path) -> None:
    """The three files without which there is nothing to build."""
    assert {finding.where for finding in findings(tmp_path)} == {"model.onnx", "config.json", "tokenizer.json"}


@pytest.mark.parametrize("path", ["no/such/directory", "config.json"])
def test_what_is_no_directory_is_a_finding(path: str) -> None:
    """A wrong path is reported like anything else."""
    (found,) = findings(EXPORTS / "llama" / path)
    assert "not a readable directory" in found.what


def test_the_context_asked_for_is_checked_at_its_limit(source: Path) -> None:
    """The model's own context is possible; one token more is a finding with the number to use."""
    assert validate(source, context=256).context_max == 256
    (found,) = findings(source, context=257)
    assert "257 tokens was asked for and the model was made for 256" in found.what
    assert "--context 256" in found.remedy


CONTEXTS: Mapping[str, tuple[dict[str, Any], int]] = {
    "as GPT-2 names it": ({"max_position_embeddings": None, "n_positions": 96}, 96),
    "as MPT names it": ({"max_position_embeddings": None, "max_seq_len": 96}, 96),
    "frequencies of the short lengths only": (
        {"original_max_position_embeddings": 64, "rope_scaling": {"type": "longrope"}},
        64,
    ),
    "frequencies of every length": (
        {"original_max_position_embeddings": 64, "rope_scaling": {"rope_type": "yarn"}},
        256,
    ),
}


@pytest.mark.parametrize("name", CONTEXTS)
def test_the_longest_context_is_what_the_export_holds(name: str, source: Path) -> None:
    """Under whatever name config.json has it; a longrope export has the factors of the original length alone."""
    changes, expected = CONTEXTS[name]
    edit(source, "config.json", **changes)
    assert validate(source).context_max == expected


def test_the_number_of_findings_is_bounded(source: Path) -> None:
    """A thousand bad tensors do not make a thousand findings."""

    def spoil(model: onnx.ModelProto) -> None:
        for index in range(1000):
            bad = TensorProto(name=f"bad{index}", data_type=1, dims=[4], data_location=TensorProto.EXTERNAL)
            bad.external_data.add(key="location", value=f"../{index}")
            model.graph.initializer.append(bad)

    edit_model(source, spoil)
    found = findings(source)
    assert len(found) == FINDINGS_MAX + 1
    assert "950 more findings" in found[-1].what


EOS = {
    "one of each": ({"eos_token_id": 5}, {"eos_token_id": 7}, "</s>", (2, 5, 7)),
    "lists": ({"eos_token_id": [5, 6]}, {"eos_token_id": [7, 5]}, "</s>", (2, 5, 6, 7)),
    "generation only": ({"eos_token_id": None}, {"eos_token_id": [7]}, None, (7,)),
    "tokenizer only": ({"eos_token_id": None}, {"eos_token_id": None}, {"content": "</s>"}, (2,)),
}


@pytest.mark.parametrize("name", EOS)
def test_end_tokens_are_the_union_of_every_file(name: str, source: Path) -> None:
    """Numbers, lists and the tokenizer's own token all end an answer."""
    config, generation, token, expected = EOS[name]
    edit(source, "config.json", **config)
    edit(source, "generation_config.json", **generation)
    edit(source, "tokenizer_config.json", eos_token=token)
    (source / "special_tokens_map.json").unlink()
    assert validate(source).text.eos_ids == expected


def test_no_end_token_anywhere_is_a_finding(source: Path) -> None:
    """Without one no answer would end by itself."""
    edit(source, "config.json", eos_token_id=None)
    edit(source, "generation_config.json", eos_token_id=None)
    edit(source, "tokenizer_config.json", eos_token=None)
    (source / "special_tokens_map.json").unlink()
    assert "end-of-sequence" in findings(source)[0].what


@pytest.mark.parametrize(
    ("generation", "expected"),
    [
        ({}, (1.0, 0, 1.0, 0.0, 1.0)),
        ({"do_sample": False, "temperature": 0.6}, (0.0, 0, 1.0, 0.0, 1.0)),
        (
            {
                "do_sample": True,
                "temperature": 0.6,
                "top_k": 20,
                "top_p": 0.95,
                "min_p": 0.1,
                "repetition_penalty": 1.1,
            },
            (0.6, 20, 0.95, 0.1, 1.1),
        ),
        ({"temperature": 1, "top_k": -1}, (1.0, 0, 1.0, 0.0, 1.0)),
    ],
)
def test_sampling_defaults(generation: dict[str, Any], expected: tuple[float, ...], source: Path) -> None:
    """generation_config.json as it is; what it leaves out is off, and do_sample false is greedy."""
    edit(source, "generation_config.json", **generation)
    sampling = validate(source).sampling
    found = (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p, sampling.repetition_penalty)
    assert found == expected


TEMPLATES = {
    "file before configuration": ("from the file", "from the configuration", "from the file"),
    "configuration": (None, "from the configuration", "from the configuration"),
    "named": (None, [{"name": "rag", "template": "r"}, {"name": "default", "template": "d"}], "d"),
    "none": (None, None, None),
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_chat_templates(name: str, source: Path) -> None:
    """The file wins, then the configuration's string, then its template named default."""
    file, configured, expected = TEMPLATES[name]
    (source / "chat_template.jinja").unlink()
    if file is not None:
        (source / "chat_template.jinja").write_text(file)
    edit(source, "tokenizer_config.json", chat_template=configured)
    assert validate(source).text.chat_template == expected


def test_named_templates_without_a_default_are_a_finding(source: Path) -> None:
    """Which of them would be the chat's is not ours to guess."""
    (source / "chat_template.jinja").unlink()
    edit(source, "tokenizer_config.json", chat_template=[{"name": "rag", "template": "r"}])
    assert "no template named default (it has rag)" in findings(source)[0].what


@pytest.mark.parametrize(
    ("tokenizer_class", "flag", "expected"),
    [
        ("LlamaTokenizerFast", False, False),
        ("LlamaTokenizer", True, True),
        ("PreTrainedTokenizerFast", False, True),
        ("LlamaTokenizerFast", None, True),
    ],
)
def test_add_bos_token_counts_where_transformers_heeds_it(
    tokenizer_class: str, flag: object, expected: object, source: Path
) -> None:
    """Llama's class rebuilds its post-processor from the flag; others follow tokenizer.json."""
    edit(source, "tokenizer_config.json", tokenizer_class=tokenizer_class, add_bos_token=flag)
    assert validate(source).text.adds_bos is expected


def test_optional_files_may_be_absent(source: Path) -> None:
    """A model without generation, tokenizer or special-token configuration is served by what config.json says."""
    for name in ("generation_config.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"):
        (source / name).unlink()
    text = validate(source).text
    assert (text.bos_id, text.bos_token, text.eos_ids, text.eos_token) == (1, "<s>", (2,), "</s>")
    assert text.chat_template is None


def test_a_template_may_refuse_a_conversation(source: Path) -> None:
    """One that takes no assistant, or nothing at all, is the model's own business."""
    template = "{% for m in messages %}{% if m.role != 'user' %}{{ raise_exception('no') }}{% endif %}{% endfor %}"
    (source / "chat_template.jinja").write_text(template)
    assert validate(source).text.chat_template == template


def test_a_tokenizer_without_added_tokens_is_accepted(source: Path) -> None:
    """The key may be absent, as the library allows; then no text is a control token."""
    edit(source, "tokenizer.json", added_tokens=None)
    assert validate(source).text.bos_id == 1
