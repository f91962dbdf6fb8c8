"""Faults planted into the passes that normalise exporters' forms: each build is refused by its numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from residentd.errors import AccuracyError, SourceError
from residentd_build.options import Options
from residentd_build.passes import branches, operators, rowwise, widen
from residentd_build.pipeline import build
from residentd_build.recognise import gqa
from support.installed import EXPORTS

Plant = Callable[[pytest.MonkeyPatch], None]


def louder_weights(patch: pytest.MonkeyPatch) -> None:
    right = widen.widened

    def wrong(tensor: ir.TensorProtocol) -> ir.LazyTensor:
        lazy = right(tensor)
        return ir.LazyTensor(lambda: ir.Tensor(lazy.numpy() * np.float32(1.1)), ir.DataType.FLOAT, lazy.shape)

    patch.setattr(widen, "widened", wrong)


def no_zero_points(patch: pytest.MonkeyPatch) -> None:
    right = rowwise._columns

    def wrong(draft: Any, product: ir.Node) -> ir.Value:
        value = right(draft, product)
        value.const_value = ir.tensor(np.zeros(value.const_value.shape.numpy(), np.int32), name=value.name)
        return value

    patch.setattr(rowwise, "_columns", wrong)


def signed_codes(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(rowwise, "CODE_MAX", 127.0)


def one_position_late(patch: pytest.MonkeyPatch) -> None:
    right = gqa._rotary

    def wrong(*given: Any) -> Any:
        rotary = right(*given)
        return replace(rotary, cos=np.roll(rotary.cos, 1, 0), sin=np.roll(rotary.sin, 1, 0))

    patch.setattr(gqa, "_rotary", wrong)


def wrong_pairs(patch: pytest.MonkeyPatch) -> None:
    right = gqa._rotary
    patch.setattr(gqa, "_rotary", lambda *given: replace(right(*given), is_interleaved=True))


def wrong_scale(patch: pytest.MonkeyPatch) -> None:
    right = gqa.recognise

    def wrong(*given: Any) -> Any:
        core = right(*given)
        return None if core is None else replace(core, scale=core.scale * 1.02)

    patch.setattr("residentd_build.passes.attention.RECOGNISERS", (wrong,))


def keys_for_values(patch: pytest.MonkeyPatch) -> None:
    right = operators._grouped

    def wrong(draft: Any, node: ir.Node, facts: Any) -> str:
        why = right(draft, node, facts)
        key, value = node.inputs[1:3]
        node.replace_input_with(1, value)
        node.replace_input_with(2, key)
        return why

    patch.setattr(operators, "_grouped", wrong)
    patch.setattr(operators, "REWRITES", operators.REWRITES | {"GroupQueryAttention": wrong})


def sum_without_what_is_skipped(patch: pytest.MonkeyPatch) -> None:
    right = operators._skip_norm

    def wrong(draft: Any, node: ir.Node, facts: Any) -> str:
        half = ir.node("Mul", [node.inputs[1], draft.constant("half", np.array(0.5, np.float32))])
        draft.graph.insert_before(node, [half])
        node.replace_input_with(1, half.outputs[0])
        return right(draft, node, facts)

    patch.setattr(operators, "REWRITES", operators.REWRITES | {"SkipSimplifiedLayerNormalization": wrong})


def wrong_epsilon(patch: pytest.MonkeyPatch) -> None:
    right = operators.attribute
    patch.setattr(operators, "attribute", lambda node, name, *d: 1e-2 if name == "epsilon" else right(node, name, *d))


MUTANTS: Mapping[str, tuple[str, Plant]] = {
    "weights a tenth too large": ("fp16-llama", louder_weights),
    "zero points left out": ("transformersjs-llama:quantized", no_zero_points),
    "codes of seven bits": ("transformersjs-llama:quantized", signed_codes),
    "rotation one position late": ("genai-llama", one_position_late),
    "rotation of neighbours": ("genai-qwen3", wrong_pairs),
    "a scale of 1.02": ("genai-llama", wrong_scale),
    "keys for values": ("genai-llama", keys_for_values),
    "half of a branch": ("genai-llama", sum_without_what_is_skipped),
    "another epsilon": ("genai-llama", wrong_epsilon),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_wrong_pass_is_an_install_error(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison with the export sees it, whatever the pass says it did."""
    form, plant = MUTANTS[name]
    source, _, variant = form.partition(":")
    plant(monkeypatch)
    options = Options("mutant", slots=4, step_tokens=48, variant=variant or None)
    with pytest.raises(AccuracyError, match=r"(?i)nothing was published"):
        build(EXPORTS / source, tmp_path, options, lambda *_: None, lambda _: None)


def test_the_branch_without_a_past_is_no_decoder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other branch of a merged decoder forgets what was read: it is not taken for canonical."""
    right = branches._branches
    monkeypatch.setattr(branches, "_branches", lambda *given: right(*given)[::-1])
    options = Options("mutant", mode="canonical")
    with pytest.raises(SourceError, match="the attention of layer 0 is not recognised"):
        build(EXPORTS / "merged-llama", tmp_path, options, lambda *_: None, lambda _: None)
