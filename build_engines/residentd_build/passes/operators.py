"""Write other exporters' fused operators as the plain ones that recognition and the canonical form are made of.

Ensures: no node is com.microsoft::SkipSimplifiedLayerNormalization, SkipLayerNormalization, RotaryEmbedding or
FusedMatMul, and no GroupQueryAttention takes queries, keys and values side by side. No norm of each head sees tokens
and heads as one axis. The lowering fuses again what its target has.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir
from onnx_ir.tape import Tape

from residentd.errors import Finding, SourceError
from residentd_build.passes.prune import prune
from residentd_build.rules import attribute

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from residentd_build.draft import Draft
    from residentd_build.trace import Trace

MICROSOFT = "com.microsoft"
SIMPLIFIED = "SimplifiedLayerNormalization"
NORMS = frozenset({SIMPLIFIED, "RMSNormalization", "LayerNormalization"})
PROBE = (7, 5)
"""Tokens and past. Numbers, as an operator that is yet to be written out may end what is known of a token axis."""
REMEDY = "Report the exporter and its version, or export the model with optimum or torch"


def run(draft: Draft) -> str:
    """Raises SourceError for a form of these operators that is not known."""
    facts = draft.follow(*PROBE)
    counts: Counter[str] = Counter()
    findings: list[Finding] = []
    for node in list(draft.graph):
        rewrite = REWRITES.get(node.op_type) if node.domain == MICROSOFT else None
        if rewrite is None or (rewrite is _grouped and node.inputs[1] is not None):
            continue
        why = rewrite(draft, node, facts)
        if why:
            findings.append(Finding(f"node {node.name} ({node.op_type}) {why}", "model.onnx", REMEDY))
        counts[node.op_type] += 1
    counts["norm of heads"] += sum(_head_norm(draft, node, facts) for node in draft.graph if node.op_type in NORMS)
    if findings:
        raise SourceError(findings)
    if not counts.total():
        return "operators: all plain"
    prune(draft)
    named = ", ".join(f"{count} {name}" for name, count in sorted(counts.items()) if count)
    return f"operators: wrote out {named}"


def _replace(draft: Draft, node: ir.Node, tape: Tape, facts: Trace, *outputs: ir.Value | None) -> None:
    """`facts` then know of the new values what they knew of the old: the next rewrite asks about its inputs."""
    for old, new in zip(node.outputs, outputs, strict=True):
        if new is not None:
            new.type, new.shape = old.type, old.shape
            facts.facts[new] = facts[old]
    draft.replace(node, tape.nodes, outputs)


def _used(node: ir.Node, indices: range) -> bool:
    return any(output.uses() or output.is_graph_output() for output in node.outputs[indices.start : indices.stop])


def _skip_norm(draft: Draft, node: ir.Node, facts: Trace) -> str:
    """(x, skip, weight, bias?) -> norm(x + skip + bias), …, the sum. SkipLayerNormalization has a shift before bias."""
    if _used(node, range(1, 3)):
        return "gives its mean or deviation to other nodes, which no language model does"
    is_simplified = node.op_type == "SkipSimplifiedLayerNormalization"
    inputs = [*node.inputs, None, None][:5]
    left, right, weight = inputs[:3]
    shift, bias = (None, inputs[3]) if is_simplified else (inputs[3], inputs[4])
    tape = Tape()
    total = tape.op("Add", [left, right], name=f"{node.name}.sum")
    if bias is not None:
        total = tape.op("Add", [total, bias], name=f"{node.name}.biased")
    attributes = {"axis": -1, "epsilon": attribute(node, "epsilon", 1e-12), "stash_type": 1}
    operator = SIMPLIFIED if is_simplified else "LayerNormalization"
    operands = [total, weight] if shift is None else [total, weight, shift]
    normed = tape.op(operator, operands, attributes, name=f"{node.name}.norm")
    _replace(draft, node, tape, facts, *(normed, None, None, total)[: len(node.outputs)])
    return ""


def _rotary(draft: Draft, node: ir.Node, facts: Trace) -> str:
    """(x, position_ids, cos, sin): pairs of each head turned by the angle of the position."""
    source, positions, cos, sin = node.inputs[:4]
    dims = facts[source].dims
    if attribute(node, "is_packed_batching", 0) or attribute(node, "scale", 1.0) != 1.0:
        return "rotates packed batches or scales, which is not supported"
    if dims is None or cos is None or cos.const_value is None or not isinstance(dims[-1], int):
        return "has tables or a width that are not constant"
    if facts[positions].dims is None or len(facts[positions].dims or ()) != 2:
        return "counts positions by itself from an offset, which is not supported"
    half = int(cos.const_value.shape.numpy()[1])
    rotated = 2 * half
    heads = attribute(node, "num_heads", 0)
    is_heads_first = len(dims) == 4
    dim = dims[-1] if is_heads_first else (dims[-1] // heads if heads else rotated)
    tape = Tape()
    tables = [
        tape.op("Unsqueeze", [tape.op("Gather", [table, positions]), draft.integers([1 if is_heads_first else 2])])
        for table in (cos, sin)
    ]
    heads_last = source
    if not is_heads_first:
        heads_last = tape.op("Reshape", [source, draft.integers([0, 0, -1, dim])])
    turned = _turned(draft, tape, heads_last, tables, half, is_interleaved=bool(attribute(node, "interleaved", 0)))
    if rotated < dim:
        rest = tape.op("Slice", [heads_last, draft.integers([rotated]), draft.integers([dim]), draft.integers([-1])])
        turned = tape.op("Concat", [turned, rest], {"axis": -1})
    if not is_heads_first:
        turned = tape.op("Reshape", [turned, draft.integers([0, 0, dims[-1]])])
    _replace(draft, node, tape, facts, turned)
    return ""


def _turned(
    draft: Draft, tape: Tape, heads: ir.Value | None, tables: list[ir.Value], half: int, *, is_interleaved: bool
) -> ir.Value:
    """The first 2 · half of the last axis, rotated."""
    cos, sin = tables
    step = 2 if is_interleaved else 1
    ends = [2 * half, 2 * half] if is_interleaved else [half, 2 * half]
    starts = [0, 1] if is_interleaved else [0, half]
    first, second = (
        tape.op(
            "Slice",
            [heads, draft.integers([start]), draft.integers([end]), draft.integers([-1]), draft.integers([step])],
        )
        for start, end in zip(starts, ends, strict=True)
    )
    left = tape.op("Sub", [tape.op("Mul", [first, cos]), tape.op("Mul", [second, sin])])
    right = tape.op("Add", [tape.op("Mul", [first, sin]), tape.op("Mul", [second, cos])])
    if not is_interleaved:
        return tape.op("Concat", [left, right], {"axis": -1})
    parts = [tape.op("Unsqueeze", [part, draft.integers([-1])]) for part in (left, right)]
    return tape.op("Reshape", [tape.op("Concat", parts, {"axis": -1}), draft.integers([0, 0, 0, 2 * half])])


def _fused_product(draft: Draft, node: ir.Node, facts: Trace) -> str:
    """A product times alpha, each side turned over in its last two axes if its attribute says so."""
    if attribute(node, "transBatchA", 0) or attribute(node, "transBatchB", 0):
        return "turns batch axes, which is not supported"
    tape = Tape()
    operands: list[ir.Value | None] = []
    for value, name in zip(node.inputs, ("transA", "transB"), strict=True):
        dims = facts[value].dims
        if not attribute(node, name, 0):
            operands.append(value)
        elif dims is None or len(dims) < 2:
            return "turns over what has no two known axes"
        else:
            order = (*range(len(dims) - 2), len(dims) - 1, len(dims) - 2)
            operands.append(tape.op("Transpose", [value], {"perm": order}, name=f"{node.name}.{name}"))
    result = tape.op("MatMul", operands, name=f"{node.name}.product")
    alpha = attribute(node, "alpha", 1.0)
    if alpha != 1.0:
        factor = draft.constant(f"number.{alpha}", np.array(alpha, np.float32))
        result = tape.op("Mul", [result, factor], name=f"{node.name}.scaled")
    _replace(draft, node, tape, facts, result)
    return ""


def _grouped(draft: Draft, node: ir.Node, _facts: Trace) -> str:
    """Queries, keys and values side by side are split."""
    heads, kv_heads = attribute(node, "num_heads"), attribute(node, "kv_num_heads")
    cache = node.inputs[3] if len(node.inputs) > 3 else None
    dim = None if cache is None or cache.shape is None else cache.shape[3]
    if not isinstance(dim, int):
        return "has no cache of a fixed head size"
    sizes = draft.integers([heads * dim, kv_heads * dim, kv_heads * dim])
    tape = Tape()
    outputs = [ir.Value(name=f"{node.name}.{part}") for part in "qkv"]
    parts = tape.op_multi_out("Split", [node.inputs[0], sizes], {"axis": -1}, outputs=outputs, name=f"{node.name}.qkv")
    draft.graph.insert_before(node, tape.nodes)
    for index, part in enumerate(parts):
        node.replace_input_with(index, part)
    return ""


def _head_norm(draft: Draft, node: ir.Node, facts: Trace) -> bool:
    """[1, tokens, heads · dim] seen as [1, tokens · heads, dim] by a norm keeps its two axes apart."""
    source, result = node.inputs[0], node.outputs[0]
    if source is None:
        return False
    before = source.producer()
    users = list(result.consumers())
    if before is None or before.op_type != "Reshape" or len(users) != 1 or users[0].op_type != "Reshape":
        return False
    wide, after = facts[before.inputs[0]].dims, facts[users[0].outputs[0]].dims
    first, second = facts.content(before.inputs[1]), facts.content(users[0].inputs[1])
    if first is None or second is None or wide is None or len(wide) != 3 or not isinstance(wide[2], int):
        return False
    dim = int(first[-1])
    is_joined = first.tolist() in ([0, -1, dim], [1, -1, dim]) and 0 < dim < wide[2] and wide[2] % dim == 0
    is_undone = second.tolist() in ([0, -1, wide[2]], [1, -1, wide[2]]) or after == wide
    if not is_joined or not is_undone or attribute(node, "axis", -1) not in {-1, 2} or len(list(source.uses())) != 1:
        return False
    before.replace_input_with(1, draft.integers([0, 0, -1, dim]))
    node.attributes["axis"] = ir.AttrInt64("axis", -1)
    users[0].replace_input_with(1, draft.integers([0, 0, wide[2]]))
    before.attributes.pop("allowzero", None)
    users[0].attributes.pop("allowzero", None)
    source.shape = result.shape = None
    return True


REWRITES: Mapping[str, Callable[[Draft, ir.Node, Trace], str]] = {
    "SkipSimplifiedLayerNormalization": _skip_norm,
    "SkipLayerNormalization": _skip_norm,
    "RotaryEmbedding": _rotary,
    "GroupQueryAttention": _grouped,
    "FusedMatMul": _fused_product,
}
"""Each returns why it cannot, or an empty string."""
