"""Move rotary position embeddings of queries and keys into RaggedAttention.

Ensures: where it fires, q and k enter attention unrotated and the node carries cos and sin tables [context, width / 2],
read off the export itself at every position of a slot, so that any scaling of frequencies is in them. The first `width`
places of a head are rotated, the rest are left (partial rotation). The kernel takes widths in steps of 16: a narrower
rotation is widened by pairs that do not turn, and where the halves of a head are the pairs, queries and keys come in
an order of places that puts its halves in theirs; their products do not depend on the order. Where a rotation is not
recognised it stays as the exporter wrote it, which is right and slower; the line says where.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir
from onnx_ir.tape import Tape

from residentd_build.draft import POSITION_INPUT, ancestors, descendants
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
DIM_MULTIPLE = 16
"""Of a head, "head_size shall be a multiple of 16", and of the part that turns, "cos_cache dimension 1 must be … a
multiple of 8": GroupQueryAttention with do_rotary, onnxruntime 1.32."""
BLOCK_TOKENS = 2048
SAMPLES = 8
NAMED_MAX = 3
PRODUCTS = frozenset({"MatMul", "Gemm", "MatMulNBits"})


@dataclass(frozen=True, slots=True)
class Rotation:
    """cos and sin [positions, width / 2]. Interleaved: pairs are neighbours; else the two halves of the width."""

    cos: Array
    sin: Array
    is_interleaved: bool

    @property
    def width(self) -> int:
        return 2 * int(self.cos.shape[1])

    def apply(self, numbers: Array, positions: Sequence[int]) -> Array:
        """`numbers` [tokens, heads, dim], each rotated by its position."""
        cos, sin = self.cos[positions][:, None], self.sin[positions][:, None]
        first, second = _pairs(numbers, self.width, is_interleaved=self.is_interleaved)
        result = numbers.copy()
        out_first, out_second = _pairs(result, self.width, is_interleaved=self.is_interleaved)
        out_first[...] = first * cos - second * sin
        out_second[...] = first * sin + second * cos
        return result


@dataclass(frozen=True, slots=True)
class _Form:
    """Which places of a head turn together."""

    width: int
    is_interleaved: bool


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
    apart = [node for node in nodes if not _fuse(node, around, known)]
    unturned = [node for node in apart if not _knows_positions(node, around)]
    left = [str(node.name) for node in apart if node not in unturned]
    prune(draft)
    if not apart:
        return f"rotary: in all {len(nodes)} attention nodes, with {len(known)} tables"
    line = f"rotary: in {len(nodes) - len(apart)} of {len(nodes)} attention nodes"
    line += f"; the export rotates nothing in {len(unturned)}" if unturned else ""
    return line + (f"; left as exported before {', '.join(left[:NAMED_MAX])}" if left else "")


def _knows_positions(node: ir.Node, around: Surroundings) -> bool:
    """Whether positions enter the query or the keys between their projections and attention."""
    positions = around.draft.input(POSITION_INPUT)
    placed = set() if positions is None else descendants(positions)
    projected = ancestors([value for value in node.inputs[:2] if value is not None], _is_product)
    used = {value for inner in projected for value in inner.inputs if value is not None}
    return any(value in placed and not around.depends_on_tokens(value) for value in used)


def _is_product(value: ir.Value) -> bool:
    node = value.producer()
    return node is not None and node.op_type in PRODUCTS


def _fuse(node: ir.Node, around: Surroundings, known: list[Rotation]) -> bool:
    """Both the query and the keys are rotated in the same way, or the node is left alone."""
    if len(node.inputs) > 5 and node.inputs[5] is not None:
        return True  # by its own operator, as the exporter wrote it
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
        form = _form(operand, candidate, around)
        sampled = None if form is None else _tables(operand, candidate, around, form)
        if form is None or sampled is None:
            continue  # cannot be evaluated, or not an angle anywhere: not rotated yet
        numbers = _random(operand, len(places))
        if _agrees(_evaluate(operand, candidate, numbers, around), sampled.apply(numbers, places)):
            return _read_all(operand, candidate, around, form)
    return None


def _form(operand: _Operand, candidate: ir.Value, around: Surroundings) -> _Form | None:
    """Where a 1 in the first place of each head goes, and up to which place a 1 in the first of all pairs goes."""
    numbers = np.zeros((len(around.positions), operand.heads, operand.dim), np.float32)
    numbers[..., 0] = 1
    result = _evaluate(operand, candidate, numbers, around)
    reached = [] if result is None else np.flatnonzero(result.any(axis=(0, 1)))[1:].tolist()
    if len(reached) != 1:
        return None
    if reached[0] > 1:
        return _Form(2 * reached[0], is_interleaved=False) if 2 * reached[0] <= operand.dim else None
    whole = _tables(operand, candidate, around, _Form(operand.dim, is_interleaved=True))
    turned = [] if whole is None else np.flatnonzero(whole.sin.any(axis=0)).tolist()
    return _Form(2 * (turned[-1] + 1), is_interleaved=True) if turned else None


def _read_all(operand: _Operand, candidate: ir.Value, around: Surroundings, form: _Form) -> Rotation | None:
    parts: list[Rotation] = []
    nodes = ancestors([operand.value], lambda value: value is candidate)
    context = around.draft.context
    for start in range(0, context, BLOCK_TOKENS):
        block = around.at(range(start, min(start + BLOCK_TOKENS, context)), nodes)
        part = _tables(operand, candidate, block, form)
        if part is None:
            return None
        parts.append(part)
    cos, sin = np.concatenate([part.cos for part in parts]), np.concatenate([part.sin for part in parts])
    return Rotation(cos, sin, form.is_interleaved)


def _tables(operand: _Operand, candidate: ir.Value, around: Surroundings, form: _Form) -> Rotation | None:
    """What a rotation makes of 1 in the first and 0 in the second place of each pair: cos and sin."""
    numbers = np.zeros((len(around.positions), operand.heads, operand.dim), np.float32)
    _pairs(numbers, form.width, is_interleaved=form.is_interleaved)[0][...] = 1
    result = _evaluate(operand, candidate, numbers, around)
    if result is None:
        return None
    cos, sin = _pairs(result[:, 0], form.width, is_interleaved=form.is_interleaved)
    return Rotation(cos.copy(), sin.copy(), form.is_interleaved)


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


def _pairs(numbers: Array, width: int, *, is_interleaved: bool) -> tuple[Array, Array]:
    """Views of the first and the second place of each rotated pair, in the first `width` places."""
    half = width // 2
    if is_interleaved:
        return numbers[..., 0:width:2], numbers[..., 1:width:2]
    return numbers[..., :half], numbers[..., half:width]


def _widened(rotation: Rotation) -> Rotation:
    """With pairs that do not turn, as many as the kernel needs."""
    missing = -rotation.width % DIM_MULTIPLE // 2
    cos = np.pad(rotation.cos, ((0, 0), (0, missing)), constant_values=1)
    return Rotation(cos, np.pad(rotation.sin, ((0, 0), (0, missing))), rotation.is_interleaved)


def _order(rotation: Rotation, dim: int) -> Array | None:
    """The places of a head in the order that the widened rotation needs; None: as they are."""
    half, wide = rotation.width // 2, _widened(rotation).width // 2
    if rotation.is_interleaved or half == wide:
        return None
    pairs = [*range(half), *range(rotation.width, rotation.width + wide - half)]
    pairs += [*range(half, rotation.width), *range(rotation.width + wide - half, 2 * wide)]
    return np.array([*pairs, *range(2 * wide, dim)], np.int64)


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
        order = _order(rotation, operand.dim)
        if order is not None:
            places = (operand.dim * np.arange(operand.heads)[:, None] + order).reshape(-1)
            columns = draft.constant(f"rotary.{table}.order.{operand.heads}", places)
            rows = tape.op("Gather", [rows, columns], {"axis": 1}, name=f"{name}.ordered")
        node.replace_input_with(index, rows)
    draft.graph.insert_before(node, tape.nodes)
    node.resize_inputs(max(7, len(node.inputs)))
    wide = _widened(rotation)
    node.replace_input_with(5, draft.constant(f"rotary.{table}.cos", wide.cos))
    node.replace_input_with(6, draft.constant(f"rotary.{table}.sin", wide.sin))
    node.attributes["interleaved"] = ir.AttrInt64("interleaved", int(rotation.is_interleaved))
    return True
