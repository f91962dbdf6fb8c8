# mypy: disable-error-code="import-not-found, import-untyped, no-untyped-call, no-any-return, misc"
"""Make the fixtures of tests/fixtures/exports that show how one model looks as written by different exporters.

Not part of the product: see make_export_fixtures.py for the environment, and add to it

    fixtures-venv/bin/pip install onnxscript==0.7.2 onnx_ir==1.1.0
    fixtures-venv/bin/pip install --no-deps onnxruntime-genai==0.12.2     # the last one for transformers 4.57
    fixtures-venv/bin/pip install --no-deps --target newer onnxruntime-genai==0.18.0 transformers==5.* \
        huggingface_hub==1.* tokenizers httpx2 typer     # and what else these ask for: the builder of today
    export ORT_DISABLE_TELEMETRY=1 NEWER=$PWD/newer
    fixtures-venv/bin/python -W ignore tools/make_exporter_fixtures.py [NAME …]

One tiny Llama and one tiny Qwen3 (QK-norm, tied head). Their matrices lie on a grid that 4 bits with a scale of a power
of two for each block of 32 hold exactly, and so do fp16 and bf16: whatever the exporter makes of the weights, they are
the same numbers, and the same goldens from transformers hold for all of these directories.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import onnx
import torch
import transformers
from onnxruntime.quantization import QuantType, quantize_dynamic
from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer
from onnxruntime.transformers.float16 import convert_float_to_float16
from optimum.exporters.onnx import onnx_export_from_model
from optimum.exporters.onnx.convert import export as export_graph
from optimum.exporters.onnx.model_configs import LlamaOnnxConfig
from optimum.onnx import merge_decoders
from torch.export import Dim

import make_export_fixtures as base

GRID_BLOCK = 32
GRID_LARGEST = 8  # 4 bits: -8 to 7
QUANTISED_GAP_MIN = 1.0
"""A quantised export rounds its activations too: answers are recorded up to the first choice that is less clear."""


def model_of(name: str) -> base.Fixture:
    """The fixture of make_export_fixtures of this name, smaller."""
    fixture = next(item for item in base.FIXTURES if item.name == name)
    config = fixture.config | {"hidden_size": 32, "intermediate_size": 64}
    return replace(fixture, config=config, has_text_goldens=False)


MODELS = {name: model_of(name) for name in ("llama", "qwen3")}


# ---- weights on a grid ---------------------------------------------------------------------------------------------


def randomise_on_grid(model: transformers.PreTrainedModel, seed: int, eos: set[int], *gains: Any, **named: Any) -> None:
    """As base.randomise, then every matrix to q · 2^n with q from -8 to 7, and a -8 in each block of 32 inputs."""
    RANDOMISE(model, seed, eos, *gains, **named)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, parameter in sorted(model.named_parameters()):
            if parameter.dim() == 2:
                parameter.copy_(_on_grid(parameter, generator))
            else:
                parameter.copy_(parameter.to(torch.bfloat16).to(torch.float32))


RANDOMISE = base.randomise


def _on_grid(matrix: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    scale = 2.0 ** torch.round(torch.log2(matrix.std() / 3))
    blocks = torch.clamp(torch.round(matrix / scale), 1 - GRID_LARGEST, GRID_LARGEST - 1)
    blocks = blocks.reshape(matrix.shape[0], -1, GRID_BLOCK)
    place = torch.randint(0, GRID_BLOCK, (*blocks.shape[:2], 1), generator=generator)
    return scale * blocks.scatter(2, place, float(-GRID_LARGEST)).reshape(matrix.shape)


# ---- exporters -----------------------------------------------------------------------------------------------------


def optimum(source: Path, output: Path, *, opset: int) -> None:
    """What `optimum-cli export onnx --task text-generation-with-past --opset …` writes."""
    model = transformers.AutoModelForCausalLM.from_pretrained(source, attn_implementation="sdpa")
    onnx_export_from_model(model, output, task="text-generation-with-past", opset=opset, do_validation=False)


class NoPositions(LlamaOnnxConfig):
    """Positions counted by the graph itself, as exporters did before `position_ids` was an input."""

    @property
    def inputs(self) -> dict[str, dict[int, str]]:
        return {name: axes for name, axes in super().inputs.items() if name != "position_ids"}


def optimum_without_positions(source: Path, output: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(source, attn_implementation="eager")
    output.mkdir()
    config = NoPositions(model.config, task="text-generation", use_past=True, use_past_in_inputs=True)
    export_graph(model, config, output / "model.onnx", opset=17)
    copy_text(source, output)


def optimum_merged(source: Path, output: Path) -> None:
    """The two graphs of optimum's older layout under one If, as its post-processing merges them."""
    model = transformers.AutoModelForCausalLM.from_pretrained(source, attn_implementation="sdpa")
    output.mkdir()
    with tempfile.TemporaryDirectory() as scratch:
        paths = [Path(scratch, "decoder_model.onnx"), Path(scratch, "decoder_with_past_model.onnx")]
        for path, has_past in zip(paths, (False, True), strict=True):
            config = NoPositions(model.config, task="text-generation", use_past=True, use_past_in_inputs=has_past)
            export_graph(model, config, path, opset=14)
        merge_decoders(*paths, save_path=output / "decoder_model_merged.onnx")
    copy_text(source, output)


def dynamo(source: Path, output: Path, *, opset: int, dtype: torch.dtype = torch.float32) -> None:
    """torch.onnx.export of transformers' own model with its cache as inputs and outputs."""
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=dtype, attn_implementation="sdpa").eval()
    config = model.config
    layers, heads, dim = config.num_hidden_layers, config.num_key_value_heads, config.head_dim
    batch, tokens, past = 2, 3, 5
    caches = [torch.randn(batch, heads, past, dim, dtype=dtype) for _ in range(2 * layers)]
    positions = torch.arange(past, past + tokens)[None].repeat(batch, 1)
    ids, mask = torch.ones(batch, tokens, dtype=torch.int64), torch.ones(batch, past + tokens, dtype=torch.int64)
    axes = {name: Dim(name) for name in ("batch", "tokens", "past")}
    step = {0: axes["batch"], 1: axes["tokens"]}
    cached = [{0: axes["batch"], 2: axes["past"]} for _ in caches]
    names = [f"{layer}.{part}" for layer in range(layers) for part in ("key", "value")]
    with torch.no_grad():
        program = torch.onnx.export(
            WithCache(model),
            (ids, mask, positions, caches),
            dynamo=True,
            dynamic_shapes=(step, {0: axes["batch"], 1: Dim.DYNAMIC}, step, cached),
            input_names=["input_ids", "attention_mask", "position_ids", *(f"past_key_values.{name}" for name in names)],
            output_names=["logits", *(f"present.{name}" for name in names)],
            opset_version=opset,
            verbose=False,
        )
    output.mkdir()
    program.save(output / "model.onnx", external_data=False)
    forget_origin(output / "model.onnx")
    copy_text(source, output)


class WithCache(torch.nn.Module):
    def __init__(self, model: transformers.PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, ids: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor, past: list[torch.Tensor]
    ) -> tuple[torch.Tensor, ...]:
        cache = transformers.DynamicCache()
        for layer in range(len(past) // 2):
            cache.update(past[2 * layer], past[2 * layer + 1], layer)
        result = self.model(
            input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True
        )
        return (
            result.logits,
            *(part for layer in result.past_key_values.layers for part in (layer.keys, layer.values)),
        )


def forget_origin(path: Path) -> None:
    """Take the stack traces out, which name this machine's directories and are half the file."""
    model = onnx.load(path)
    for item in (*model.graph.node, *model.graph.initializer, *model.graph.value_info, *model.graph.input):
        item.ClearField("metadata_props")
        item.ClearField("doc_string")
    for item in (model, model.graph, *model.graph.output):
        item.ClearField("metadata_props")
    onnx.save(model, path)


def genai(
    source: Path, output: Path, *, precision: str, provider: str = "cpu", is_newer: bool = False, **extra: str
) -> None:
    """What `python -m onnxruntime_genai.models.builder` writes. It has no config.json."""
    environment = {"ORT_DISABLE_TELEMETRY": "1"} | ({"PYTHONPATH": os.environ["NEWER"]} if is_newer else {})
    command = [sys.executable, "-W", "ignore", "-m", "onnxruntime_genai.models.builder", "-i", source, "-o", output]
    options = [f"{key}={value}" for key, value in extra.items()]
    with tempfile.TemporaryDirectory() as cache:
        subprocess.run(
            [
                *command,
                "-p",
                precision,
                "-e",
                provider,
                "-c",
                cache,
                *(["--extra_options", *options] if options else []),
            ],
            check=True,
            capture_output=True,
            env=os.environ | environment,
        )


TRANSFORMERS_JS_INT8: Mapping[str, Any] = {
    "weight_type": QuantType.QInt8,
    "per_channel": True,
    "reduce_range": True,
    "extra_options": {"EnableSubgraph": True, "MatMulConstBOnly": True},
}
"""As the conversion script of transformers.js calls it."""


def transformers_js(source: Path, output: Path) -> None:
    """The layout of onnx-community: configs above, and in onnx/ one file for each precision."""
    with tempfile.TemporaryDirectory() as scratch:
        made = Path(scratch, "made")
        optimum(source, made, opset=18)
        (output / "onnx").mkdir(parents=True)
        copy_text(source, output)
        plain = made / "model.onnx"
        half = convert_float_to_float16(onnx.load(plain), keep_io_types=["logits"], disable_shape_infer=True)
        onnx.save(half, output / "onnx" / "model_fp16.onnx")
        for model, name in ((onnx.load(plain), "model_q4"), (half, "model_q4f16")):
            quantizer = MatMulNBitsQuantizer(model, block_size=GRID_BLOCK, is_symmetric=True)
            quantizer.process()
            onnx.save(quantizer.model.model, output / "onnx" / f"{name}.onnx")
        quantize_dynamic(
            plain,
            output / "onnx" / "model_quantized.onnx",
            **TRANSFORMERS_JS_INT8,
        )


def transformers_js_merged(source: Path, output: Path) -> None:
    """The older layout: the merged decoder in onnx/, quantised."""
    with tempfile.TemporaryDirectory() as scratch:
        made = Path(scratch, "made")
        optimum_merged(source, made)
        (output / "onnx").mkdir(parents=True)
        copy_text(source, output)
        quantize_dynamic(
            made / "decoder_model_merged.onnx",
            output / "onnx" / "decoder_model_merged_quantized.onnx",
            **TRANSFORMERS_JS_INT8,
        )


def copy_text(source: Path, output: Path) -> None:
    for path in source.iterdir():
        if path.suffix != ".safetensors":
            shutil.copy(path, output)


# ---- what is made --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Exported:
    """One directory. `write(source, output)` makes it from a directory saved by transformers."""

    name: str
    exporter: str
    model: str
    write: Callable[[Path, Path], None]
    is_quantised: bool = False


def _exported(
    name: str, exporter: str, write: Callable[..., None], *, is_quantised: bool = False, **how: Any
) -> Exported:
    model = next(model for model in MODELS if model in name.split("-"))
    return Exported(name, exporter, model, lambda source, output: write(source, output, **how), is_quantised)


EXPORTED = (
    _exported("optimum14-llama", "optimum, opset 14", optimum, opset=14),
    _exported("optimum16-qwen3", "optimum, opset 16", optimum, opset=16),
    _exported("nopositions-llama", "optimum, opset 17, no position_ids", optimum_without_positions),
    _exported("merged-llama", "optimum, opset 14, merged", optimum_merged),
    _exported("dynamo18-llama", "torch dynamo, opset 18", dynamo, opset=18),
    _exported("dynamo20-qwen3", "torch dynamo, opset 20", dynamo, opset=20),
    _exported("dynamo23-llama", "torch dynamo, opset 23", dynamo, opset=23),
    _exported("dynamo23-qwen3", "torch dynamo, opset 23", dynamo, opset=23),
    _exported("dynamo24-llama", "torch dynamo, opset 24", dynamo, opset=24),
    _exported("fp16-llama", "torch dynamo, opset 18, fp16", dynamo, opset=18, dtype=torch.float16),
    # Llama: its attention scale, 1 / 4 as 1 / 2 twice, is a number of bfloat16; Qwen3's would be another model's.
    _exported("bf16-llama", "torch dynamo, opset 20, bf16", dynamo, opset=20, dtype=torch.bfloat16),
    _exported("genai-llama", "onnxruntime-genai, fp32", genai, precision="fp32"),
    _exported("genai-qwen3", "onnxruntime-genai, fp32", genai, precision="fp32"),
    _exported("genai-fp16-llama", "onnxruntime-genai, fp16", genai, precision="fp16", provider="cuda"),
    _exported("genai-int4-llama", "onnxruntime-genai, int4", genai, precision="int4", is_quantised=True),
    _exported("genai18-llama", "onnxruntime-genai 0.18, fp32", genai, precision="fp32", is_newer=True),
    _exported(
        "genai18-int4-qwen3",
        "onnxruntime-genai 0.18, int4",
        genai,
        precision="int4",
        is_newer=True,
        is_quantised=True,
    ),
    _exported("transformersjs-llama", "transformers.js", transformers_js),
    _exported("transformersjs-merged-llama", "transformers.js, merged", transformers_js_merged, is_quantised=True),
)


def clear_prefix(model: transformers.PreTrainedModel, prompt: list[int], answer: base.Greedy) -> base.Greedy:
    """`answer` up to the first choice that a quantised export might make otherwise."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt + answer.ids[:-1]])).logits[0, len(prompt) - 1 :]
    best = torch.topk(logits, 2).values
    gaps = (best[:, 0] - best[:, 1]).tolist()
    clear = list(itertools.takewhile(lambda gap: gap >= QUANTISED_GAP_MIN, gaps))
    return replace(answer, ids=answer.ids[: len(clear)], gap_min=min(clear, default=0.0))


@dataclass(frozen=True, slots=True)
class Searched:
    fixture: base.Fixture
    tokenizer: transformers.PreTrainedTokenizerFast
    seed: int
    model: transformers.PreTrainedModel
    prompts: list[list[int]]
    answers: list[base.Greedy]


def searched(name: str) -> Searched:
    fixture = MODELS[name]
    tokenizer = base.tokenizer_for(fixture)
    with mock.patch.object(base, "randomise", randomise_on_grid):
        return Searched(fixture, tokenizer, *base.search(fixture, tokenizer))


def goldens_of(exported: Exported, found: Searched) -> dict[str, Any]:
    fixture = replace(found.fixture, exporter=exported.exporter)
    goldens = base.goldens_for(fixture, found.tokenizer, found.seed, found.prompts, found.answers)
    if not exported.is_quantised:
        return goldens
    pairs = zip(found.prompts, found.answers, strict=True)
    answers = [(prompt, clear_prefix(found.model, prompt, answer)) for prompt, answer in pairs]
    kept = [
        {"prompt_ids": prompt, "greedy_ids": answer.ids, "gap_min": round(answer.gap_min, 5)}
        for prompt, answer in answers
        if answer.ids
    ]
    return {key: value for key, value in goldens.items() if key != "logits"} | {"prompts": kept}


def make(exported: Exported, found: Searched) -> None:
    """Write one fixture directory anew."""
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as scratch:
        source, fresh = Path(scratch, "source"), Path(scratch, exported.name)
        found.model.save_pretrained(source)
        found.tokenizer.save_pretrained(source)
        exported.write(source, fresh)
        goldens = goldens_of(exported, found) | ends_of(fresh)
        base.write_goldens(fresh / "goldens.json", goldens)
        check_clean(fresh)
        output = base.EXPORTS / exported.name
        shutil.rmtree(output, ignore_errors=True)
        shutil.copytree(fresh, output)
    size = sum(path.stat().st_size for path in output.rglob("*") if path.is_file())
    lengths = [len(golden["greedy_ids"]) for golden in goldens["prompts"]]
    print(f"{exported.name}: {size:,} bytes, answers of {lengths} tokens")


def ends_of(output: Path) -> dict[str, Any]:
    """The end tokens of an export without config.json: its builder keeps those of generation_config.json alone."""
    path = output / "genai_config.json"
    if not path.is_file():
        return {}
    found = json.loads(path.read_text())["model"]["eos_token_id"]
    return {"eos_token_ids": sorted(found) if isinstance(found, list) else [found]}


def check_clean(output: Path) -> None:
    for directory in (output, *(path for path in output.iterdir() if path.is_dir())):
        with tempfile.TemporaryDirectory() as flat:
            for path in directory.iterdir():
                if path.is_file():
                    shutil.copy(path, flat)
            base.check_clean(Path(flat))


def main(arguments: list[str]) -> int:
    """Make the named fixtures, or all of them."""
    parser = argparse.ArgumentParser(description="Make the fixtures that show what different exporters write.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(item.name for item in EXPORTED))
    options = parser.parse_args(arguments)
    by_name: Mapping[str, Exported] = {item.name: item for item in EXPORTED}
    if unknown := sorted(set(options.names) - set(by_name)):
        parser.error(f"no such fixture: {', '.join(unknown)}")
    torch.set_num_threads(1)  # one order of additions
    chosen = [by_name[name] for name in options.names] or list(EXPORTED)
    found = {name: searched(name) for name in sorted({item.model for item in chosen})}
    for item in chosen:
        make(item, found[item.model])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
