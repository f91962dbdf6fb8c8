"""Which file of a directory is the model, and what it is called when there are several."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from residentd.errors import SourceError
from residentd_build.files import MissingError, RefusedError, SourceDirectory
from residentd_build.genai import config_of, generation_of, head_size_of
from residentd_build.model_file import ModelFile, find_model, split_source
from residentd_build.validate import validate
from support.installed import EXPORTS

GENAI = {"model": {"decoder": {"filename": "decoder.onnx"}}}
TRANSFORMERS_JS = ("onnx/model_bnb4.onnx", "onnx/model_q4.onnx", "onnx/model_fp16.onnx", "onnx/model_quantized.onnx")


def find(directory: Path, files: tuple[str, ...], wanted: str | None = None, genai: dict | None = None) -> ModelFile:
    for name in files:
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"")
    with SourceDirectory(directory) as opened:
        return find_model(opened, genai or {}, wanted)


CHOSEN = {
    "optimum": (("model.onnx",), "model.onnx"),
    "optimum, merged beside its parts": (
        ("decoder_model.onnx", "decoder_model_merged.onnx", "decoder_with_past_model.onnx"),
        "decoder_model_merged.onnx",
    ),
    "any name, if it is the only one": (("weights.onnx",), "weights.onnx"),
    "transformers.js: fp16 before what is quantised": (TRANSFORMERS_JS, "onnx/model_fp16.onnx"),
    "transformers.js: fp32 before all": ((*TRANSFORMERS_JS, "onnx/model.onnx"), "onnx/model.onnx"),
    "transformers.js: int8 before int4": (TRANSFORMERS_JS[:2] + TRANSFORMERS_JS[3:], "onnx/model_quantized.onnx"),
    "transformers.js before 3": (
        ("onnx/decoder_model_merged.onnx", "onnx/decoder_model_merged_quantized.onnx", "onnx/decoder_model.onnx"),
        "onnx/decoder_model_merged.onnx",
    ),
    "the directory before its folder": (("model.onnx", "onnx/model.onnx"), "model.onnx"),
    "a folder of another name is not looked into": (("model.onnx", "other/model_fp32.onnx"), "model.onnx"),
}


@pytest.mark.parametrize("name", CHOSEN)
def test_the_least_quantised_of_an_exporters_names_is_chosen(name: str, tmp_path: Path) -> None:
    """By folder, stem and suffix; a line says what else there was."""
    files, expected = CHOSEN[name]
    found = find(tmp_path, files)
    assert found.path == expected
    if found.line:
        assert found.line.startswith(f"source: {expected}, of {len(files)} files; --variant chooses another (")


WANTED = {
    "a path": ("onnx/model_q4.onnx", "onnx/model_q4.onnx"),
    "a file's name": ("model_q4.onnx", "onnx/model_q4.onnx"),
    "a file's name without its suffix": ("model_bnb4", "onnx/model_bnb4.onnx"),
    "a variant": ("quantized", "onnx/model_quantized.onnx"),
}


@pytest.mark.parametrize("name", WANTED)
def test_the_operator_chooses(name: str, tmp_path: Path) -> None:
    """A path, a name or a variant; nothing is said of a choice that was not ours."""
    wanted, expected = WANTED[name]
    assert find(tmp_path, TRANSFORMERS_JS, wanted) == ModelFile(expected)


def test_a_variant_that_is_not_there_is_refused_with_those_that_are(tmp_path: Path) -> None:
    """The message lists what can be named."""
    with pytest.raises(RefusedError, match=r"'q8', and there is onnx/model_bnb4.onnx, onnx/model_fp16.onnx, "):
        find(tmp_path, TRANSFORMERS_JS, "q8")


def test_files_of_no_exporters_names_are_refused_with_all_of_them(tmp_path: Path) -> None:
    """Two unknown files: the operator says which."""
    with pytest.raises(RefusedError, match=r"any of one.onnx, two.onnx") as caught:
        find(tmp_path, ("one.onnx", "two.onnx"))
    assert "--variant" in caught.value.remedy


def test_a_directory_without_a_model_says_so(tmp_path: Path) -> None:
    """Nothing that ends in .onnx."""
    with pytest.raises(MissingError):
        find(tmp_path, ("model.safetensors",))


def test_genai_names_its_file(tmp_path: Path) -> None:
    """genai_config.json decides, and the operator above it."""
    files = ("model.onnx", "decoder.onnx")
    assert find(tmp_path, files, genai=GENAI).path == "decoder.onnx"
    assert find(tmp_path, files, "model.onnx", GENAI).path == "model.onnx"


def test_genai_cannot_name_a_file_outside(tmp_path: Path) -> None:
    """A path that leaves the directory is refused when it is opened, whoever names it."""
    source = Path(shutil.copytree(EXPORTS / "genai-llama", tmp_path / "genai"))
    shutil.copy(source / "model.onnx", tmp_path / "outside.onnx")
    config = (source / "genai_config.json").read_text()
    (source / "genai_config.json").write_text(config.replace('"model.onnx"', '"../outside.onnx"'))
    with pytest.raises(SourceError, match=r"leaves the directory"):
        validate(source)


@pytest.mark.parametrize("content", [{}, {"model": 3}, {"model": {"decoder": []}}, {"search": "x", "model": None}])
def test_a_strange_genai_config_says_nothing(content: dict) -> None:
    """Whatever a file holds, only what is understood is taken from it."""
    assert (config_of(content), generation_of(content), head_size_of(content)) == ({}, {}, None)


def test_genai_speaks_the_words_of_the_other_files() -> None:
    """Vocabulary, context, end tokens and sampling, under transformers' names."""
    model = {"type": "llama", "vocab_size": 9, "context_length": 8, "eos_token_id": [1, 2], "pad_token_id": 0}
    found = {"model": model | {"decoder": {"head_size": 16}}, "search": {"top_k": 5, "max_length": 8}}
    assert config_of(found) == {
        "model_type": "llama",
        "vocab_size": 9,
        "max_position_embeddings": 8,
        "eos_token_id": [1, 2],
    }
    assert generation_of(found) == {"top_k": 5}
    assert head_size_of(found) == 16


def test_a_source_may_be_the_file_itself(tmp_path: Path) -> None:
    """In the directory, or in the folder that transformers.js puts models into."""
    find(tmp_path, ("onnx/model_q4.onnx", "model.onnx", "config.json"))
    assert split_source(tmp_path, "q4") == (tmp_path, "q4")
    assert split_source(tmp_path / "model.onnx", None) == (tmp_path, "model.onnx")
    assert split_source(tmp_path / "onnx" / "model_q4.onnx", None) == (tmp_path, "onnx/model_q4.onnx")
    assert split_source(tmp_path / "none.onnx", None) == (tmp_path / "none.onnx", None)


def test_a_model_in_a_folder_has_its_data_files_beside_it(tmp_path: Path) -> None:
    """Locations begin at the model's own folder; the digest names what was read."""
    source = Path(shutil.copytree(EXPORTS / "llama-external", tmp_path / "js"))
    (source / "onnx").mkdir()
    for name in ("model.onnx", "model.onnx_data"):
        (source / name).rename(source / "onnx" / name)
    found = validate(source)
    assert found.model_path == source / "onnx" / "model.onnx"
    (source / "onnx" / "model.onnx_data").rename(source / "model.onnx_data")
    with pytest.raises(SourceError, match=r"onnx/model.onnx, data file 'model.onnx_data': the data file is missing"):
        validate(source)
