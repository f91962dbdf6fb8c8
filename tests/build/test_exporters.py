"""One model as every exporter writes it: the same answers, in flight, whatever the form."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import pytest
from lowered_engine import LoweredEngine
from lowering import lower_model
from onnx import TensorProto, helper

from residentd.models.manifest import Manifest
from residentd_build.options import Options
from residentd_build.pipeline import build
from residentd_build.validate import validate
from support.installed import EXPORTS

CONTEXT = 256
SLOTS = 5
EXACT = (
    "optimum14-llama",
    "optimum16-qwen3",
    "nopositions-llama",
    "merged-llama",
    "dynamo18-llama",
    "dynamo20-qwen3",
    "dynamo23-llama",
    "dynamo23-qwen3",
    "dynamo24-llama",
    "fp16-llama",
    "bf16-llama",
    "genai-llama",
    "genai-qwen3",
    "genai-fp16-llama",
    "genai18-llama",
    "transformersjs-llama:fp16",
    "transformersjs-llama:q4",
    "transformersjs-llama:q4f16",
)
"""The weights are on a grid that all of these hold exactly, and they compute in float32: the goldens hold for all."""
QUANTISED = ("genai-int4-llama", "genai18-int4-qwen3", "transformersjs-merged-llama")
"""Activations of 8 bits: the goldens are transformers', as far as no rounding can turn them."""


def lowered(form: str, stage: Path) -> tuple[LoweredEngine, list[str]]:
    name, _, variant = form.partition(":")
    path, lines = lower_model(validate(EXPORTS / name, variant=variant or None).model, stage, CONTEXT)
    return LoweredEngine(path, slots=SLOTS, context=CONTEXT, slack=CONTEXT), lines


def goldens(form: str) -> list[Mapping[str, Any]]:
    prompts: list[Mapping[str, Any]] = json.loads((EXPORTS / form.partition(":")[0] / "goldens.json").read_text())[
        "prompts"
    ]
    return prompts


def answers(engine: LoweredEngine, prompts: Sequence[Mapping[str, Any]], chunk: int) -> list[list[int]]:
    """Greedy answers; one prompt joins at each step, in chunks, while there are slots."""
    waiting, free = list(range(len(prompts))), list(range(SLOTS))
    outputs: list[list[int]] = [[] for _ in prompts]
    unread = [list(prompt["prompt_ids"]) for prompt in prompts]
    running: dict[int, int] = {}
    while waiting or running:
        if waiting and free:
            slot = free.pop()
            engine.free(slot)
            running[slot] = waiting.pop(0)
        work = {slot: unread[index][:chunk] for slot, index in running.items()}
        logits = engine.step(work)
        for row, (slot, tokens) in zip(logits, work.items(), strict=True):
            index = running[slot]
            unread[index] = unread[index][len(tokens) :]
            if unread[index]:
                continue
            outputs[index].append(int(row.argmax()))
            unread[index] = outputs[index][-1:]
            if len(outputs[index]) == len(prompts[index]["greedy_ids"]):
                del running[slot]
                free.append(slot)
    return outputs


@pytest.mark.parametrize("form", [*EXACT, *QUANTISED])
def test_answers_in_flight_are_transformers_own(form: str, tmp_path: Path) -> None:
    """Every golden of every form, staggered and in chunks over slots that are used again."""
    engine, _ = lowered(form, tmp_path)
    prompts = goldens(form)
    assert answers(engine, prompts, chunk=29) == [prompt["greedy_ids"] for prompt in prompts]


LINES = {
    "merged-llama": "branches: 1 If nodes, each replaced by the branch that every step takes",
    "nopositions-llama": "positions: 2 values that counted from the cache's length now come from position_ids",
    "fp16-llama": "widen: 24 weights and all that is computed from float16 to float32",
    "bf16-llama": "widen: 24 weights and all that is computed from bfloat16 to float32",
    "genai18-int4-qwen3": "operators: wrote out 4 SkipSimplifiedLayerNormalization, 4 norm of heads",
    "genai-llama": "operators: wrote out 2 GroupQueryAttention, 4 SkipSimplifiedLayerNormalization",
    "transformersjs-llama:quantized": "rowwise: 9 quantised activations, each with a scale a token",
    "dynamo24-llama": "linears: queries, keys and values in one product in 2 of 2 layers",
    "dynamo23-qwen3": "rotary: in all 2 attention nodes, with 1 tables",
}


@pytest.mark.parametrize("form", LINES)
def test_the_passes_say_what_they_found(form: str, tmp_path: Path) -> None:
    """What is particular to a form is named in the manifest."""
    _, lines = lowered(form, tmp_path)
    assert LINES[form] in lines


def quiet(_stage: str, _fraction: float, _message: str) -> None:
    """Progress that nobody watches."""


def no_limit(_needed_bytes: int) -> None:
    """A disk with room for all."""


def compiled(form: str, stage: Path) -> Manifest:
    name, _, variant = form.partition(":")
    options = Options("model", slots=4, step_tokens=48, variant=variant or None)
    return build(EXPORTS / name, stage, options, quiet, no_limit)


@pytest.mark.parametrize("form", ["merged-llama", "bf16-llama", "genai18-llama"])
def test_an_exact_form_is_verified_within_rounding(form: str, tmp_path: Path) -> None:
    """Against the export, or its copy in float32: a tenth of the bound of fp32, and every greedy choice."""
    agreement = compiled(form, tmp_path).agreement
    assert agreement.greedy_equal == agreement.greedy_total > 400
    assert agreement.logit_diff_bound < 1e-3
    assert agreement.logit_diff_max < agreement.logit_diff_bound / 10


@pytest.mark.parametrize("form", ["genai18-int4-qwen3", "transformersjs-llama:quantized"])
def test_a_quantised_form_is_verified_against_itself(form: str, tmp_path: Path) -> None:
    """It stays as it is, and is compared with the export as far as its roundings allow."""
    manifest = compiled(form, tmp_path)
    assert manifest.content.engine.mode == "canonical"
    assert manifest.content.engine.precision == ("int4" if "int4" in form else "int8")
    assert manifest.agreement.greedy_equal == manifest.agreement.greedy_total > 400


def test_the_copy_to_compare_with_is_not_published(tmp_path: Path) -> None:
    """A 16-bit export's float32 copy is gone with the build, and the manifest says how far apart the two were."""
    manifest = compiled("fp16-llama", tmp_path)
    assert not (tmp_path / "reference").exists()
    assert not any("reference" in name for name in manifest.content.files)
    (line,) = (line for line in manifest.build.passes if line.startswith("reference: "))
    assert line.startswith("reference: the export with float32, 0.0")
    assert line.endswith(" from the export as it is")


def test_weights_in_a_file_each_are_the_same_weights(tmp_path: Path) -> None:
    """As torch writes an export above 2 GiB: hundreds of files, named like the tensors."""
    source = Path(shutil.copytree(EXPORTS / "optimum14-llama", tmp_path / "source"))
    model = onnx.load(source / "model.onnx")
    (source / "model.onnx").unlink()
    onnx.save(model, source / "model.onnx", save_as_external_data=True, all_tensors_to_one_file=False, size_threshold=0)
    assert len(list(source.iterdir())) > 20
    path, _ = lower_model(validate(source).model, tmp_path / "stage", CONTEXT)
    engine = LoweredEngine(path, slots=SLOTS, context=CONTEXT, slack=CONTEXT)
    prompts = goldens("optimum14-llama")[:3]
    assert answers(engine, prompts, chunk=29) == [prompt["greedy_ids"] for prompt in prompts]


def optimised(source: Path, target: Path) -> Path:
    """`source` as ONNX Runtime saves it after its own fusions, which operators of com.microsoft then stand for."""
    shutil.copytree(source, target)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    options.optimized_model_filepath = str(target / "model.onnx")
    onnxruntime.InferenceSession(str(source / "model.onnx"), options, providers=["CPUExecutionProvider"])
    return target


@pytest.mark.parametrize("form", ["optimum14-llama", "dynamo18-llama"])
def test_what_onnxruntime_optimised_is_the_same_model(form: str, tmp_path: Path) -> None:
    """Its FusedMatMul, with the keys untransposed and the scale inside, is the product of attention all the same."""
    source = optimised(EXPORTS / form, tmp_path / "source")
    assert "FusedMatMul" in {node.op_type for node in onnx.load(source / "model.onnx").graph.node}
    path, lines = lower_model(validate(source).model, tmp_path / "stage", CONTEXT)
    assert "operators: wrote out 2 FusedMatMul" in lines
    engine = LoweredEngine(path, slots=SLOTS, context=CONTEXT, slack=CONTEXT)
    prompts = goldens(form)
    assert answers(engine, prompts, chunk=29) == [prompt["greedy_ids"] for prompt in prompts]


def test_an_export_that_asks_how_many_logits_gives_all_that_are_wanted(tmp_path: Path) -> None:
    """Some exports for transformers.js cut the hidden numbers to the last `num_logits_to_keep` tokens; 0 means all."""
    source = Path(shutil.copytree(EXPORTS / "dynamo24-llama", tmp_path / "source"))
    model = onnx.load(source / "model.onnx")
    head = next(node for node in model.graph.node if "logits" in node.output)
    constants = {"axes": [1], "end": [1 << 40], "place": [0]}
    model.graph.initializer.extend(
        helper.make_tensor(f"kept.{name}", TensorProto.INT64, [1], value) for name, value in constants.items()
    )
    model.graph.input.append(helper.make_tensor_value_info("num_logits_to_keep", TensorProto.INT64, []))
    cut = [
        helper.make_node("Neg", ["num_logits_to_keep"], ["kept.negative"]),
        helper.make_node("Unsqueeze", ["kept.negative", "kept.place"], ["kept.start"]),
        helper.make_node("Slice", [head.input[0], "kept.start", "kept.end", "kept.axes"], ["kept.hidden"]),
    ]
    place = list(model.graph.node).index(head)
    nodes = [*model.graph.node[:place], *cut, *model.graph.node[place:]]
    head.input[0] = "kept.hidden"
    nodes[place + len(cut)].CopyFrom(head)
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    onnx.save(model, source / "model.onnx")
    (tmp_path / "stage").mkdir()
    manifest = build(source, tmp_path / "stage", Options("model", slots=4, step_tokens=48), quiet, no_limit)
    agreement = manifest.agreement
    assert manifest.content.engine.mode == "canonical"
    assert agreement.greedy_equal == agreement.greedy_total > 400
