"""Faults planted into the passes: whatever a pass might get wrong, verification refuses to publish."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import pytest

from residentd.errors import AccuracyError
from residentd_build import pipeline
from residentd_build.draft import Draft
from residentd_build.matrices import Blocks
from residentd_build.options import Options, Weights
from residentd_build.passes import quantise
from residentd_build.passes.attention import RAGGED_ATTENTION
from residentd_build.passes.norms import LAYER_NORM, RMS_NORM
from residentd_build.pipeline import build
from support.installed import EXPORTS

Edit = Callable[[Draft], None]
Numbers = npt.NDArray[np.generic]
CONTEXT, SLOTS, STEP_TOKENS = 96, 3, 24


@dataclass(frozen=True, slots=True)
class Mutant:
    """What goes wrong at the end of `after`, on the export that shows it."""

    name: str
    export: str
    after: str
    edit: Edit


# ---- finding what to spoil -----------------------------------------------------------------------------------------


def nodes_of(draft: Draft, *kinds: str) -> list[ir.Node]:
    found = [node for node in draft.graph if node.op_type in kinds]
    assert found, f"no {kinds} in the graph: the mutant would change nothing"
    return found


def spoil(value: ir.Value | None, change: Callable[[Numbers], Numbers]) -> None:
    """Put other numbers into a constant."""
    assert value is not None
    assert value.const_value is not None
    before = value.const_value.numpy()
    after = np.ascontiguousarray(change(before)).astype(before.dtype)
    assert after.shape == before.shape
    assert not np.array_equal(after, before), "the mutant changes nothing"
    value.const_value = ir.Tensor(after, name=value.name)


def constants_of(node: ir.Node, rank: int) -> list[ir.Value]:
    values = (value for value in node.inputs if value is not None and value.const_value is not None)
    return [value for value in values if value.const_value is not None and value.const_value.shape.rank() == rank]


def number(name: str, value: float) -> ir.Attr:
    return ir.AttrFloat32(name, value) if isinstance(value, float) else ir.AttrInt64(name, value)


def after_all(value: ir.Value, draft: Draft, node: ir.Node) -> None:
    """Everything that used `value` uses what `node`, made of it, gives."""
    producer = value.producer()
    draft.graph.insert_after(producer, [node]) if producer is not None else draft.graph.insert_before(
        draft.graph[0], [node]
    )
    for user, place in list(value.uses()):
        if user is not node:
            user.replace_input_with(place, node.outputs[0])


# ---- faults --------------------------------------------------------------------------------------------------------


def attention(name: str, change: Callable[[float], float | int]) -> Edit:
    """Another attribute on every attention core that has one."""

    def edit(draft: Draft) -> None:
        changed = 0
        for node in nodes_of(draft, RAGGED_ATTENTION):
            attribute = node.attributes[name]
            before = attribute.as_float() if attribute.type == ir.AttributeType.FLOAT else attribute.as_int()
            if before:
                node.attributes[name] = number(name, change(before))
                changed += 1
        assert changed, f"no attention core has a {name}"

    return edit


def swapped(first: int, second: int) -> Edit:
    """Two inputs of the last attention core in each other's place."""

    def edit(draft: Draft) -> None:
        node = nodes_of(draft, RAGGED_ATTENTION)[-1]
        one, other = node.inputs[first], node.inputs[second]
        node.replace_input_with(first, other)
        node.replace_input_with(second, one)

    return edit


def without_sinks(draft: Draft) -> None:
    for node in nodes_of(draft, RAGGED_ATTENTION):
        spoil(node.inputs[7], lambda sinks: sinks - 10)


def rotary_late(draft: Draft) -> None:
    """From position 16 on, angles of the position before: both tables, so that only distances across 16 are wrong."""
    tables = {value for node in nodes_of(draft, RAGGED_ATTENTION) for value in node.inputs[5:7] if value is not None}
    assert tables
    for table in tables:
        spoil(table, lambda rows: np.concatenate([rows[:16], rows[15:-1]]))


def rotary_slower(draft: Draft) -> None:
    """Every angle a hundredth smaller, as a wrong base or scaling would make it."""
    pairs = {node.inputs[5:7] for node in nodes_of(draft, RAGGED_ATTENTION)}
    for cos, sin in pairs:
        assert cos is not None
        assert cos.const_value is not None
        count = len(cos.const_value.numpy())
        rows = np.rint(np.arange(count) * 0.9).astype(int)
        spoil(cos, lambda table, rows=rows: table[rows])
        spoil(sin, lambda table, rows=rows: table[rows])


def rotary_interleaved(draft: Draft) -> None:
    for node in nodes_of(draft, RAGGED_ATTENTION):
        node.attributes["interleaved"] = ir.AttrInt64("interleaved", 1 - node.attributes["interleaved"].as_int())


def norm_weight(kind: str) -> Edit:
    return lambda draft: spoil(constants_of(nodes_of(draft, kind)[-1], 1)[0], lambda weight: weight * 1.02)


def norm_epsilon(draft: Draft) -> None:
    for node in nodes_of(draft, RMS_NORM):
        node.attributes["epsilon"] = ir.AttrFloat32("epsilon", node.attributes["epsilon"].as_float() * 1000)


def norm_without_bias(draft: Draft) -> None:
    spoil(constants_of(nodes_of(draft, LAYER_NORM)[0], 1)[1], lambda bias: bias * 0)


def missing_bias(draft: Draft) -> None:
    """The biases of one merged product are lost."""
    biases = [value for node in nodes_of(draft, "Add") for value in constants_of(node, 1) if "qkv" in str(value.name)]
    assert biases
    spoil(biases[0], lambda bias: bias * 0)


def keys_and_values_swapped(draft: Draft) -> None:
    """The columns of keys and values of the first merged matrix in each other's place."""
    node = nodes_of(draft, RAGGED_ATTENTION)[0]
    width = node.attributes["kv_heads"].as_int() * node.attributes["dim"].as_int()
    merged = [value for one in nodes_of(draft, "MatMul") for value in constants_of(one, 2) if "qkv" in str(value.name)]
    assert merged

    def swap(matrix: Numbers) -> Numbers:
        parts = (matrix[:, : -2 * width], matrix[:, -width:], matrix[:, -2 * width : -width])
        return np.concatenate(parts, axis=1)

    spoil(merged[0], swap)


def transposed_head(draft: Draft) -> None:
    """The head's matrix read the other way: its numbers, laid out as its transpose."""
    node = next(value for value in draft.graph.outputs if value.name == "logits").producer()
    while node is not None and not constants_of(node, 2):
        before = node.inputs[0]
        node = None if before is None else before.producer()
    assert node is not None
    spoil(constants_of(node, 2)[0], lambda matrix: matrix.T.reshape(matrix.shape))


def dropped_last_layer(draft: Draft) -> None:
    """What the final norm reads is what the last layer read."""
    sums = [
        node
        for node in nodes_of(draft, "Add")
        if all(value is not None and value.const_value is None for value in node.inputs)
    ]
    before = next(value for value in sums[-2].inputs if value is not None and value.producer() is not None)
    streams = {node.outputs[0] for node in sums[:-2]}
    for value in sums[-2].inputs:
        source = value.producer() if value is not None else None
        gathered = source.inputs[0] if source is not None and source.op_type == "Gather" else value
        if gathered in streams:
            before = value
    assert before is not None
    ir.convenience.replace_all_uses_with(sums[-1].outputs[0], before)


def wrong_rows(draft: Draft) -> None:
    """The residual stream is gathered at the first packed token, the attention at the right one."""
    index = draft.input("logits_index")
    assert index is not None
    gathers = [node for node in nodes_of(draft, "Gather") if node.inputs[1] is index]
    assert len(gathers) > 1
    zero = ir.node("Mul", [index, draft.constant("mutant.zero", np.array([0], np.int64))])
    draft.graph.insert_before(gathers[-1], [zero])
    gathers[-1].replace_input_with(1, zero.outputs[0])


def late_positions(draft: Draft) -> None:
    positions = draft.input("position_ids")
    assert positions is not None
    late = ir.node("Add", [positions, draft.constant("mutant.one", np.array(1, np.int64))])
    after_all(positions, draft, late)


def experts_swapped(draft: Draft) -> None:
    stacked = [value for node in draft.graph for value in constants_of(node, 3)]
    assert stacked
    spoil(stacked[0], lambda weights: np.roll(weights, 1, axis=0))


def one_number(draft: Draft) -> None:
    """One number of one matrix, as a damaged copy would have it."""
    matrix = constants_of(nodes_of(draft, "MatMul")[0], 2)[0]

    def change(numbers: Numbers) -> Numbers:
        changed = numbers.copy()
        changed[0, 0] += 1
        return changed

    spoil(matrix, change)


MUTANTS = (
    Mutant("scale of 1.02", "llama", "attention", attention("scale", lambda scale: scale * 1.02)),
    Mutant(
        "scale of 1.02 under GroupQueryAttention", "genai-llama", "attention", attention("scale", lambda s: s * 1.02)
    ),
    Mutant("window one longer", "mistral", "attention", attention("window", lambda window: int(window) + 1)),
    Mutant("window one shorter", "mistral", "attention", attention("window", lambda window: int(window) - 1)),
    Mutant("windows lost", "gemma3", "attention", attention("window", lambda _window: 0)),
    Mutant("softcap lost", "gemma2", "attention", attention("softcap", lambda _cap: 0.0)),
    Mutant("softcap doubled", "gemma2", "attention", attention("softcap", lambda cap: 2 * cap)),
    Mutant("keys for values", "llama", "attention", swapped(1, 2)),
    Mutant("one layer's cache for another's", "llama", "attention", swapped(3, 4)),
    Mutant("sinks lost", "gpt-oss", "attention", without_sinks),
    Mutant("positions one late", "gpt2", "positions", late_positions),
    Mutant("residual of another token", "llama", "independence", wrong_rows),
    Mutant("last layer dropped", "llama", "rows", dropped_last_layer),
    Mutant("last layer dropped, dynamo", "dynamo24-llama", "rows", dropped_last_layer),
    Mutant("rotary one late from 16 on", "llama", "rotary", rotary_late),
    Mutant("rotary of another base", "qwen2", "rotary", rotary_slower),
    Mutant("rotary of neighbours", "llama", "rotary", rotary_interleaved),
    Mutant("partial rotary one late", "stablelm", "rotary", rotary_late),
    Mutant("norm weight of 1.02", "llama", "norms", norm_weight(RMS_NORM)),
    Mutant("layer norm weight of 1.02", "gpt2", "norms", norm_weight(LAYER_NORM)),
    Mutant("epsilon a thousand times larger", "llama", "norms", norm_epsilon),
    Mutant("layer norm without bias", "stablelm", "norms", norm_without_bias),
    Mutant("merged bias lost", "qwen2", "linears", missing_bias),
    Mutant("merged keys and values swapped", "llama", "linears", keys_and_values_swapped),
    Mutant("head transposed", "llama", "linears", transposed_head),
    Mutant("one damaged number", "qwen3", "tidy", one_number),
    Mutant("experts in another order", "qwen3-moe", "experts", experts_swapped),
)


def sabotaged(mutant: Mutant) -> MappingProxyType[str, Callable[[Draft], str]]:
    """The passes, one of them followed by the fault."""
    canonicalise, fuse = dict(pipeline.CANONICALISE), dict(pipeline.FUSE)
    group = canonicalise if mutant.after in canonicalise else fuse
    honest = group[mutant.after]

    def run(draft: Draft) -> str:
        line = honest(draft)
        mutant.edit(draft)
        return line

    group[mutant.after] = run
    return MappingProxyType(group)


@pytest.mark.parametrize("mutant", MUTANTS, ids=[mutant.name for mutant in MUTANTS])
def test_a_fault_of_a_pass_is_never_published(mutant: Mutant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every planted fault is refused by the comparison with the export."""
    group = "CANONICALISE" if mutant.after in pipeline.CANONICALISE else "FUSE"
    monkeypatch.setattr(pipeline, group, sabotaged(mutant))
    options = Options("mutant", CONTEXT, SLOTS, STEP_TOKENS, mode="canonical")
    with pytest.raises(AccuracyError, match=r"differ|NaN"):
        build(EXPORTS / mutant.export, tmp_path, options, lambda *_: None, lambda _: None)


def scales_off(found: Numbers) -> Numbers:
    return found * 1.1


def halves_swapped(found: Numbers) -> Numbers:
    return found << 4 | found >> 4


def neighbours_rolled(found: Numbers) -> Numbers:
    return np.roll(found, 1, axis=0)


@dataclass(frozen=True, slots=True)
class Misstored:
    """What goes wrong with the numbers that `function` gives."""

    precision: str
    block: int | None
    function: str
    change: Callable[[Numbers], Numbers]


MISSTORED = (
    Misstored("int8", None, "channel_scales", scales_off),
    Misstored("int8", None, "channel_scales", neighbours_rolled),
    Misstored("int8", None, "channel_codes", neighbours_rolled),
    Misstored("int8", 32, "scales", scales_off),
    Misstored("int4", 32, "scales", neighbours_rolled),
    Misstored("int4", 32, "codes", halves_swapped),
)
KL_OF_RANDOM_WEIGHTS = {"int8": 0.05, "int4": 2.0}  # nats: untrained weights lose 1.4 in 4 bits


@pytest.mark.parametrize("fault", MISSTORED)
def test_a_fault_of_quantising_is_never_published(
    fault: Misstored, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Numbers that are stored wrongly cost more than the bound on the divergence allows."""
    place = quantise if hasattr(quantise, fault.function) else Blocks
    honest = getattr(place, fault.function)

    def spoiled(*arguments: object) -> ir.LazyTensor:
        tensor = honest(*arguments)
        return ir.LazyTensor(
            lambda: ir.Tensor(np.ascontiguousarray(fault.change(tensor.numpy())).astype(tensor.numpy().dtype)),
            tensor.dtype,
            tensor.shape,
            name=tensor.name,
        )

    monkeypatch.setattr(place, fault.function, spoiled)
    weights = Weights(fault.precision, block=fault.block, kl_max=KL_OF_RANDOM_WEIGHTS[fault.precision])
    options = Options("mutant", CONTEXT, SLOTS, STEP_TOKENS, weights=weights)
    with pytest.raises(AccuracyError, match=r"loses too much|differ|NaN"):
        build(EXPORTS / "llama", tmp_path, options, lambda *_: None, lambda _: None)


@pytest.mark.parametrize("precision", KL_OF_RANDOM_WEIGHTS)
def test_without_a_fault_the_same_build_is_published(precision: str, tmp_path: Path) -> None:
    """What refuses the mutants above is the fault, not the precision."""
    weights = Weights(precision, kl_max=KL_OF_RANDOM_WEIGHTS[precision])
    options = Options("honest", CONTEXT, SLOTS, STEP_TOKENS, weights=weights)
    manifest = build(EXPORTS / "llama", tmp_path, options, lambda *_: None, lambda _: None)
    assert manifest.content.engine.precision == precision
