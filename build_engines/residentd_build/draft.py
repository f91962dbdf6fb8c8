"""The model while passes rewrite it: the graph, its caches, and what a step feeds."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from residentd_build.facts import ROWS, UNKNOWN_DIM, Dim, Fact, of_array, of_dims
from residentd_build.rules import ROW_INDEX_INPUT
from residentd_build.trace import Trace, trace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from residentd_build.facts import Array

TOKEN_INPUT = "input_ids"  # noqa: S105 - the name of a graph input
POSITION_INPUT = "position_ids"
MASK_INPUT = "attention_mask"
LOGITS_OUTPUT = "logits"
BRANCH_INPUT = "use_cache_branch"
"""Of merged decoders: whether there is a past. A past of no tokens is one."""
KEPT_INPUT = "num_logits_to_keep"
"""Of some exports for transformers.js: how many of the last tokens get logits; 0: all."""
PAST_PATTERN = re.compile(r"past_key_values\.(\d+)\.(key|value)")


@dataclass(frozen=True, slots=True)
class Cache:
    """One layer's K and V, [batch, heads, past, dim] each, as graph inputs."""

    layer: int
    past_key: ir.Value
    past_value: ir.Value
    heads: int
    dim: int

    @property
    def present_key_name(self) -> str:
        return f"present.{self.layer}.key"

    @property
    def present_value_name(self) -> str:
        return f"present.{self.layer}.value"


@dataclass(frozen=True, slots=True)
class Draft:
    """A slot holds `context` tokens, a step brings at most `step_tokens`. The model belongs to the pass that runs."""

    model: ir.Model
    caches: tuple[Cache, ...]
    context: int
    step_tokens: int

    @property
    def graph(self) -> ir.Graph:
        return self.model.graph

    @property
    def opset(self) -> int:
        return self.model.opset_imports[""]

    def input(self, name: str) -> ir.Value | None:
        return next((value for value in self.graph.inputs if value.name == name), None)

    def follow(self, tokens: Dim, past: Dim) -> Trace:
        """Facts of a step that brings `tokens` tokens of one sequence after `past` cached ones."""
        return trace(self.graph, self.step_facts(tokens, past), self.opset)

    def step_facts(self, tokens: Dim, past: Dim) -> dict[ir.Value, Fact]:
        """What is known of the graph's inputs: their contents too, token ids apart, where both lengths are numbers."""
        return {value: _input_fact(value, tokens, past) for value in self.graph.inputs}

    def constant(self, name: str, array: Array) -> ir.Value:
        """An initializer of ours; the one that is there if there is one of this name."""
        name = f"residentd/{name}"
        if name in self.graph.initializers:
            return self.graph.initializers[name]
        value = ir.Value(
            name=name,
            shape=ir.Shape(array.shape),
            type=ir.TensorType(ir.DataType.from_numpy(array.dtype)),
            const_value=ir.tensor(array, name=name),
        )
        self.graph.register_initializer(value)
        return value

    def integers(self, numbers: Sequence[int]) -> ir.Value:
        """A constant int64 [n] of ours: a shape, axes, places."""
        return self.constant(f"shape.{list(numbers)}", np.array(numbers, np.int64))

    def replace(self, node: ir.Node, nodes: Sequence[ir.Node], outputs: Sequence[ir.Value | None]) -> None:
        """Put `nodes` in the place of `node` and `outputs` in that of its own; None: of one that nothing uses.

        Graph outputs keep name, type and shape.
        """
        self.graph.insert_before(node, nodes)
        for old, new in zip(node.outputs, outputs, strict=True):
            if new is None:
                continue
            if old.is_graph_output():
                place = next(index for index, value in enumerate(self.graph.outputs) if value is old)
                name, old.name = old.name, None
                new.type, new.shape, new.name = old.type, old.shape, name
                self.graph.outputs[place] = new
            ir.convenience.replace_all_uses_with(old, new)
        self.graph.remove(node, safe=True)


def draft_from_model(model: ir.Model, *, context: int, step_tokens: int) -> Draft:
    """The caches are read off the graph inputs; the source was validated, so both halves of each are there."""
    found = {value.name: value for value in model.graph.inputs if value.name and PAST_PATTERN.fullmatch(value.name)}
    layers = sorted({int(name.split(".")[1]) for name in found})
    caches = []
    for layer in layers:
        key, value = found[f"past_key_values.{layer}.key"], found[f"past_key_values.{layer}.value"]
        assert key.shape is not None
        heads, dim = key.shape[1], key.shape[3]
        assert isinstance(heads, int)
        assert isinstance(dim, int)
        caches.append(Cache(layer, key, value, heads, dim))
    return Draft(model, tuple(caches), context, step_tokens)


def _input_fact(value: ir.Value, tokens: Dim, past: Dim) -> Fact:
    counted = np.arange(past, past + tokens)[None] if isinstance(tokens, int) and isinstance(past, int) else None
    if value.name == TOKEN_INPUT:
        return of_dims((1, tokens))
    if value.name == POSITION_INPUT:
        return Fact((1, tokens), counted)
    if value.name == ROW_INDEX_INPUT:
        return of_dims((ROWS,))
    if value.name == MASK_INPUT:
        total = None if counted is None else int(counted[0, -1]) + 1
        return of_dims((1, UNKNOWN_DIM)) if total is None else of_array(np.ones((1, total), np.int64))
    if value.shape is None:
        return Fact()
    if value.name in {BRANCH_INPUT, KEPT_INPUT}:
        constant = np.array(value.name == BRANCH_INPUT)
        return of_array(
            np.broadcast_to(
                constant.astype(np.bool_ if value.name == BRANCH_INPUT else np.int64), [1] * len(value.shape)
            )
        )
    dims: list[Dim] = [dim if isinstance(dim, int) else UNKNOWN_DIM for dim in value.shape]
    if value.name is not None and PAST_PATTERN.fullmatch(value.name):
        dims[0], dims[2] = 1, past
    return of_dims(dims)


def ancestors(values: Iterable[ir.Value], is_given: Callable[[ir.Value], bool] = lambda _value: False) -> set[ir.Node]:
    """Every node that `values` depend on, not looking past values that are given."""
    seen: set[ir.Node] = set()
    open_values = [value for value in values if not is_given(value)]
    while open_values:
        node = open_values.pop().producer()
        if node is None or node in seen:
            continue
        seen.add(node)
        open_values += [value for value in node.inputs if value is not None and not is_given(value)]
    return seen


def descendants(value: ir.Value, fences: frozenset[str] = frozenset()) -> set[ir.Value]:
    """Every value computed from `value`, itself included, not looking past nodes whose operator is in `fences`."""
    seen = {value}
    open_values = [value]
    while open_values:
        for user in open_values.pop().consumers():
            if user.op_type in fences:
                continue
            fresh = [output for output in user.outputs if output not in seen]
            seen.update(fresh)
            open_values += fresh
    return seen
