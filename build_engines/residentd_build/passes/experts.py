"""Replace each mixture of experts by one Experts node.

Ensures: where it fires, one `residentd::Experts` node takes every token by itself through the experts that its scores
choose, as the export was proven to do. What is left as exported is named; if it moves tokens about, the independence
pass refuses it.

    Experts(x [tokens, hidden], scores [tokens, experts], gate_up [experts, 2 · inner, hidden], down [experts, hidden,
      inner], gate_up_bias?, down_bias?) -> [tokens, hidden]
    Rows of gate_up are gate and up by turns. attributes: chosen, normalised, alpha, beta, limit (0: none)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir
from onnx_ir.tape import Tape

from residentd_build.passes.layout import reshape
from residentd_build.passes.prune import prune
from residentd_build.recognise.experts import Experts, find
from residentd_build.rules import CANONICAL_DOMAIN

if TYPE_CHECKING:
    from collections.abc import Callable

    from residentd_build.draft import Draft
    from residentd_build.facts import Array

EXPERTS = "Experts"


def run(draft: Draft) -> str:
    left: list[str] = []
    described: list[str] = []
    for found in find(draft):
        if isinstance(found, str):
            left.append(found)
        else:
            _replace(draft, found, len(described))
            described.append(_describe(found))
    prune(draft)
    kinds = [f"{described.count(kind)} layers of {kind}" for kind in dict.fromkeys(described)]
    return f"experts: {'; '.join([*kinds, *left]) or 'none'}"


def _replace(draft: Draft, found: Experts, layer: int) -> None:
    name = f"residentd/experts.{layer}"
    tape = Tape()
    source = reshape(tape, draft, found.source, [-1, found.hidden], f"{name}.x")
    scores = reshape(tape, draft, found.scores, [-1, found.count], f"{name}.scores")
    rows = tape.op(
        EXPERTS,
        [source, scores, *_weights(draft, found, name)],
        {
            "chosen": found.chosen,
            "normalised": int(found.is_normalised),
            "alpha": found.activation.alpha,
            "beta": found.activation.beta,
            "limit": found.activation.limit,
        },
        domain=CANONICAL_DOMAIN,
        name=name,
    )
    shape = [-1, found.hidden] if found.result_rank == 2 else [1, -1, found.hidden]
    result = reshape(tape, draft, rows, shape, f"{name}.result")
    node = found.result.producer()
    assert node is not None
    draft.graph.insert_before(node, tape.nodes)
    ir.convenience.replace_all_uses_with(found.result, result)


def _weights(draft: Draft, found: Experts, name: str) -> list[ir.Value]:
    first = found.layout(0)
    inner, hidden, count = len(first.gate), found.hidden, found.count

    def rows_by_turns(gate: Array, up: Array) -> Array:
        joined: Array = np.stack([gate, up], axis=1).reshape(2 * len(gate), *gate.shape[1:])
        return joined

    def gate_up(index: int) -> Array:
        expert = found.layout(index)
        return rows_by_turns(expert.gate, expert.up)

    def biases(index: int) -> tuple[Array, Array]:
        expert = found.layout(index)
        assert expert.biases is not None
        return rows_by_turns(*expert.biases[:2]), expert.biases[2]

    weights = [
        _stacked(draft, f"{name}.gate_up", (count, 2 * inner, hidden), gate_up),
        _stacked(draft, f"{name}.down", (count, hidden, inner), lambda index: found.layout(index).down),
    ]
    if first.biases is not None:
        weights += [
            _stacked(draft, f"{name}.gate_up_bias", (count, 2 * inner), lambda index: biases(index)[0]),
            _stacked(draft, f"{name}.down_bias", (count, hidden), lambda index: biases(index)[1]),
        ]
    return weights


def _stacked(draft: Draft, name: str, dims: tuple[int, ...], part: Callable[[int], Array]) -> ir.Value:
    """An initializer that is put together when it is written, never held."""

    def join() -> ir.Tensor[Any]:
        whole = np.empty(dims, np.float32)
        for index in range(dims[0]):
            whole[index] = part(index)
        return ir.Tensor(whole, name=name)

    lazy = ir.LazyTensor(join, ir.DataType.FLOAT, ir.Shape(dims), name=name)
    value = ir.Value(name=name, shape=ir.Shape(dims), type=ir.TensorType(ir.DataType.FLOAT), const_value=lazy)
    draft.graph.register_initializer(value)
    return value


def _describe(found: Experts) -> str:
    weights = "their softmax" if found.is_normalised else "the softmax of all"
    return f"{found.chosen} of {found.count} experts by {weights}"
