"""Move rotary position embeddings of queries and keys into RaggedAttention.

Ensures: where it fires, q and k enter attention unrotated and the node carries cos and sin tables [context, dim / 2],
read off the export itself at every position of a slot, so that any scaling of frequencies is in them. Where a rotation
is not recognised it stays as the exporter wrote it, which is right and slower; the line says where.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir
from onnx_ir.tape import Tape

from residentd_build.draft import ancestors
from residentd_build.facts import TOKENS
from residentd_build.passes.attention import RAGGED_ATTENTION
from residentd_build.passes.layout import rows_of
from residentd_build.passes.prune import prune
from residentd_build.recognise.function import Surroundings, bottlenecks, surroundings
from residentd_build.rules import attribute

if TYPE_CHECKING:
    from collections.abc import Sequence

    from residentd_build.draft import Draft
    from residentd_build.facts import Array, Dim

TOLERANCE = 1e-5
"""Rotated values are of magnitude 1, so float32 rounds at 1e-7; a wrong angle at one sampled position is above 1e-3."""
DIM_MULTIPLE = 16  # "head_size shall be a multiple of 16": GroupQueryAttention with do_rotary, onnxruntime 1.32
BLOCK_TOKENS = 2048
SAMPLES = 8
NAMED_MAX = 3


@dataclass(frozen=True, slots=True)
class Rotation:
    """cos and sin [positions, dim / 2]. Interleaved: pairs are neighbours; else the two halves of a head."""

    cos: Array
    sin: Array
    is_interleaved: bool

    def apply(self, numbers: Array, positions: Sequence[int]) -> Array:
        """`numbers` [tokens, heads, dim], each rotated by its position."""
        cos, sin = self.cos[positions][:, None], self.sin[positions][:, None]
        first, second = _pairs(numbers, is_interleaved=self.is_interleaved)
        result = np.empty_like(numbers)
        out_first, out_second = _pairs(result, is_interleaved=self.is_interleaved)
        out_first[...] = first * cos - second * sin
        out_second[...] = first * sin + second * cos
        return result


@dataclass(frozen=True, slots=True)
class _Operand:
    """The query or the keys of one attention node: [tokens, heads · dim]."""

    value: ir.Value
    heads: int
    dim: int


def run(draft: Draft) -> str:
    nodes = [node for node in draft.graph if node.op_type == RAGGED_ATTENTION]
    samples = sorted({0, 1, *np.linspace(0, draft.context - 1, SAMPLES, dtype=int).tolist()})
    around = surroundings(draft, samples)
    known: list[Rotation] = []
    left = [str(node.name) for node in nodes if not _fuse(node, around, known)]
    prune(draft)
    if left:
        named = ", ".join(left[:NAMED_MAX])
        return f"rotary: in {len(nodes) - len(left)} of {len(nodes)} attention nodes; left as exported before {named}"
    return f"rotary: in all {len(nodes)} attention nodes, with {len(known)} tables"


def _fuse(node: ir.Node, around: Surroundings, known: list[Rotation]) -> bool:
    """Both the query and the keys are rotated in the same way, or the node is left alone."""
    if attribute(node, "dim") % DIM_MULTIPLE:
        return False
    operands = [_operand(node, 0, "heads"), _operand(node, 1, "kv_heads")]
    for table, rotation in enumerate(known):
        if _unrotate(node, operands, rotation, around, table):
            return True
    fresh = _read(operands[1], around)
    if fresh is None or not _unrotate(node, operands, fresh, around, len(known)):
        return False
    known.append(fresh)
    return True


def _operand(node: ir.Node, index: int, heads: str) -> _Operand:
    value = node.inputs[index]
    assert value is not None
    return _Operand(value, attribute(node, heads), attribute(node, "dim"))


def _source(operand: _Operand, rotation: Rotation, around: Surroundings) -> ir.Value | None:
    """The furthest value that the operand is a rotation of, if there is one."""
    found = None
    numbers = _random(operand, len(around.positions))
    expected = rotation.apply(numbers, around.positions)
    for candidate in bottlenecks(operand.value, around):
        if _agrees(_evaluate(operand, candidate, numbers, around), expected):
            found = candidate
        elif found is not None:
            break
    return found


def _read(operand: _Operand, around: Surroundings) -> Rotation | None:
    """The rotation between the operand and something before it, at every position of a slot."""
    places = range(len(around.positions))
    for candidate in bottlenecks(operand.value, around):
        for is_interleaved in (False, True):
            sampled = _tables(operand, candidate, around, is_interleaved=is_interleaved)
            if sampled is None or not sampled.sin.any():
                continue  # cannot be evaluated, or not an angle anywhere: not rotated yet
            numbers = _random(operand, len(places))
            if _agrees(_evaluate(operand, candidate, numbers, around), sampled.apply(numbers, places)):
                return _read_all(operand, candidate, around, is_interleaved=is_interleaved)
    return None


def _read_all(operand: _Operand, candidate: ir.Value, around: Surroundings, *, is_interleaved: bool) -> Rotation | None:
    parts: list[Rotation] = []
    nodes = ancestors([operand.value], lambda value: value is candidate)
    context = around.draft.context
    for start in range(0, context, BLOCK_TOKENS):
        block = around.at(range(start, min(start + BLOCK_TOKENS, context)), nodes)
        part = _tables(operand, candidate, block, is_interleaved=is_interleaved)
        if part is None:
            return None
        parts.append(part)
    cos, sin = np.concatenate([part.cos for part in parts]), np.concatenate([part.sin for part in parts])
    return Rotation(cos, sin, is_interleaved)


def _tables(operand: _Operand, candidate: ir.Value, around: Surroundings, *, is_interleaved: bool) -> Rotation | None:
    """What a rotation makes of 1 in the first and 0 in the second place of each pair: cos and sin."""
    numbers = np.zeros((len(around.positions), operand.heads, operand.dim), np.float32)
    _pairs(numbers, is_interleaved=is_interleaved)[0][...] = 1
    result = _evaluate(operand, candidate, numbers, around)
    if result is None:
        return None
    cos, sin = _pairs(result[:, 0], is_interleaved=is_interleaved)
    return Rotation(cos.copy(), sin.copy(), is_interleaved)


def _evaluate(operand: _Operand, candidate: ir.Value, numbers: Array, around: Surroundings) -> Array | None:
    """[tokens, heads, dim] of the operand when `candidate` holds `numbers`, whatever its layout."""
    dims = around.dims(candidate)
    arranged = None if dims is None else _arrange(numbers, dims)
    result = None if arranged is None else around.evaluate(operand.value, candidate, arranged)
    return None if result is None or result.size != numbers.size else result.reshape(numbers.shape)


def _arrange(numbers: Array, dims: Sequence[Dim]) -> Array | None:
    """`numbers` [tokens, heads, dim] in a layout of one leading 1 at most and one token axis."""
    tokens, heads, dim = numbers.shape
    rows: Array = numbers.reshape(tokens, heads * dim)
    layouts: dict[tuple[Dim, ...], Array] = {
        (TOKENS, heads * dim): rows,
        (1, TOKENS, heads * dim): rows[None],
        (1, TOKENS, heads, dim): numbers[None],
        (1, heads, TOKENS, dim): numbers.swapaxes(0, 1)[None],
    }
    return layouts.get(tuple(dims))


def _pairs(numbers: Array, *, is_interleaved: bool) -> tuple[Array, Array]:
    """Views of the first and the second place of each rotated pair."""
    half = numbers.shape[-1] // 2
    if is_interleaved:
        return numbers[..., 0::2], numbers[..., 1::2]
    return numbers[..., :half], numbers[..., half:]


def _random(operand: _Operand, tokens: int) -> Array:
    return np.random.default_rng(operand.dim).standard_normal((tokens, operand.heads, operand.dim), np.float32)


def _agrees(result: Array | None, expected: Array) -> bool:
    return result is not None and np.allclose(result, expected, atol=TOLERANCE, rtol=TOLERANCE)


def _unrotate(
    node: ir.Node, operands: Sequence[_Operand], rotation: Rotation, around: Surroundings, table: int
) -> bool:
    """Feed the node from before the rotation. False, and nothing changed, where an operand is not rotated so."""
    sources = [_source(operand, rotation, around) for operand in operands]
    if None in sources:
        return False
    draft, tape = around.draft, Tape()
    for index, (operand, source) in enumerate(zip(operands, sources, strict=True)):
        assert source is not None
        dims = around.dims(source)
        is_heads_first = dims is not None and len(dims) == 4 and dims[2] == TOKENS
        width, name = operand.heads * operand.dim, f"{node.name}.{'qk'[index]}.unrotated"
        rows = rows_of(tape, draft, source, width=width, is_heads_first=is_heads_first, name=name)
        node.replace_input_with(index, rows)
    draft.graph.insert_before(node, tape.nodes)
    node.resize_inputs(7)
    node.replace_input_with(5, draft.constant(f"rotary.{table}.cos", rotation.cos))
    node.replace_input_with(6, draft.constant(f"rotary.{table}.sin", rotation.sin))
    node.attributes["interleaved"] = ir.AttrInt64("interleaved", int(rotation.is_interleaved))
    return True
