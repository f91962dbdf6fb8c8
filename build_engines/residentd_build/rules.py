"""How each operator carries facts from its inputs to its outputs.

A rule also guards the packed axis: it raises MixesError where an operator would let one token's numbers depend on
another's, or on how many there are. Operators without a rule are evaluated when everything is known, and otherwise
end the knowledge.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir

from residentd_build.facts import (
    TOKEN_AXES,
    UNKNOWN,
    UNKNOWN_DIM,
    Dim,
    Fact,
    Symbol,
    elements,
    narrow,
    of_array,
    of_dims,
    product,
    shape_content,
)

if TYPE_CHECKING:
    from residentd_build.facts import Array

Inputs = Sequence[Fact | None]
Rule = Callable[[ir.Node, Inputs], Sequence[Fact]]

CANONICAL_DOMAIN = "residentd"
ROW_INDEX_INPUT = "logits_index"
CONTENT_ELEMENTS_MAX = 1 << 25


class MixesError(Exception):
    """The node lets tokens of the packed axis influence each other. The text is a clause without the node's name."""


def check_counts(node: ir.Node, inputs: Inputs, outputs: Sequence[Fact]) -> None:
    """The number of tokens may decide shapes; whatever else is computed from it would differ with the neighbours."""
    is_counted = any(fact is not None and fact.is_symbolic for fact in inputs)
    if is_counted and node.op_type not in SHAPED_BY_CONTENT and any(fact.content is None for fact in outputs):
        raise MixesError("computes with the number of tokens")


def rule_for(node: ir.Node) -> Rule | None:
    if any(
        attribute.type in {ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS} for attribute in node.attributes.values()
    ):
        return None
    return RULES.get(node.op_type)


# ---- attributes and inputs -----------------------------------------------------------------------------------------


def attribute(node: ir.Node, name: str, default: Any = None) -> Any:
    found = node.attributes.get(name)
    return default if found is None else found.value


def _known(inputs: Inputs, index: int) -> Fact:
    fact = inputs[index] if index < len(inputs) else None
    return UNKNOWN if fact is None else fact


def _integers(node: ir.Node, inputs: Inputs, index: int, name: str) -> list[int] | None:
    """Axes and the like: an attribute before opset 13 or 18, an input since. None: absent or unknown."""
    if name in node.attributes:
        return [int(item) for item in node.attributes[name].value]
    fact = _known(inputs, index)
    return [int(item) for item in fact.content.reshape(-1)] if fact.content is not None and fact.is_numeric else None


def _has_input(node: ir.Node, index: int) -> bool:
    return index < len(node.inputs) and node.inputs[index] is not None


def _refuse_tokens(dim: Dim, what: str) -> None:
    if dim in TOKEN_AXES:
        raise MixesError(f"{what} the token axis")


def _checked(dims: Sequence[Dim]) -> Fact:
    if sum(1 for dim in dims if dim in TOKEN_AXES) > 1:
        raise MixesError("pairs every token with every other")
    return of_dims(dims)


# ---- elementwise ---------------------------------------------------------------------------------------------------


def _unary(_node: ir.Node, inputs: Inputs) -> Sequence[Fact]:
    return [of_dims(inputs[0].dims) if inputs[0] is not None and inputs[0].dims is not None else UNKNOWN]


def _identity(_node: ir.Node, inputs: Inputs) -> Sequence[Fact]:
    return [_known(inputs, 0)]


def _cast(node: ir.Node, inputs: Inputs) -> Sequence[Fact]:
    fact = _known(inputs, 0)
    if fact.content is None or not fact.is_symbolic:
        return _unary(node, inputs)
    is_integer = attribute(node, "to") in {ir.DataType.INT64, ir.DataType.INT32}
    # As a fraction it is no dimension any more, and still says how many tokens there are.
    return [fact if is_integer else of_array(np.full(fact.content.shape, UNKNOWN_DIM, object))]


def broadcast(shapes: Sequence[tuple[Dim, ...]]) -> tuple[Dim, ...]:
    rank = max(len(shape) for shape in shapes)
    padded = [(1,) * (rank - len(shape)) + shape for shape in shapes]
    return tuple(_common(column) for column in zip(*padded, strict=True))


def _common(dims: Sequence[Dim]) -> Dim:
    wide = {dim for dim in dims if dim != 1}
    if len(wide) > 1:
        wide.discard(UNKNOWN_DIM)
    if len(wide) > 1 and wide & TOKEN_AXES:
        raise MixesError("combines the token axis with an axis of another length")
    return min(wide, key=str) if wide else 1


def _broadcast(node: ir.Node, inputs: Inputs) -> Sequence[Fact]:
    facts = [fact for fact in inputs if fact is not None]
    if any(fact.is_symbolic for fact in facts):
        return [_symbolic_arithmetic(node, facts)]
    if any(fact.dims is None for fact in facts):
        return [UNKNOWN]
    return [_checked(broadcast([fact.dims for fact in facts if fact.dims is not None]))]


_ARITHMETIC: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        "Add": lambda a, b: a + b,
        "Sub": lambda a, b: a - b,
        "Mul": lambda a, b: a * b,
        "Div": lambda a, b: a // b,
        "Equal": lambda a, b: np.array(a == b, bool),
        "Where": lambda condition, a, b: np.where(condition.astype(bool), a, b),
    }
)


def _symbolic_arithmetic(node: ir.Node, facts: Sequence[Fact]) -> Fact:
    """Shape arithmetic. The number of tokens must not reach the numbers of a token, so all operands must be known."""
    contents = [fact.content for fact in facts if fact.content is not None]
    if len(contents) < len(facts):
        raise MixesError("computes with the number of tokens")
    operation = _ARITHMETIC.get(node.op_type)
    if operation is None:
        return of_dims(broadcast([tuple(content.shape) for content in contents]))
    exact = contents if node.op_type == "Where" else [content.astype(object) for content in contents]
    return of_array(narrow(np.asarray(operation(*exact))))


# ---- shapes --------------------------------------------------------------------------------------------------------


def _constant(node: ir.Node, _inputs: Inputs) -> Sequence[Fact]:
    tensor = ir.convenience.get_const_tensor(node.outputs[0])
    if tensor is None or tensor.dtype == ir.DataType.STRING:
        return [UNKNOWN]
    return [of_array(tensor.numpy())]


def _shape(node: ir.Node, inputs: Inputs) -> Sequence[Fact]:
    dims = _known(inputs, 0).dims
    if dims is None:
        return [UNKNOWN]
    start, end = attribute(node, "start", 0), attribute(node, "end", len(dims))
    content = shape_content(dims[start:end])
    return [Fact((len(content),), content)]


def _size(_node: ir.Node, inputs: Inputs) -> Sequence[Fact]:
    dims = _known(inputs, 0).dims
    count = None if dims is None else elements(dims)
    return [of_array(np.array(UNKNOWN_DIM, object) if count is None else np.array(count, np.int64))]


def _reshape(node: ir.Node, inputs: Inputs) -> Sequence[Fact]:
    source, target = _known(inputs, 0), _known(inputs, 1)
    if target.content is None:
        return [
            Fact(
                None if target.dims is None or not isinstance(target.dims[0], int) else (UNKNOWN_DIM,) * target.dims[0]
            )
        ]
    wanted: list[Dim] = list(target.content.tolist())
    if source.dims is None:
        return [of_dims(UNKNOWN_DIM if dim == -1 else dim for dim in wanted)]
    if not attribute(node, "allowzero", 0):
        wanted = [source.dims[axis] if dim == 0 else dim for axis, dim in enumerate(wanted)]
    dims = _infer(source.dims, wanted)
    _check_reshaped(source.dims, dims)
    if any(UNKNOWN_DIM in source.dims[:axis] for axis in source.token_axes):
        return [UNKNOWN]  # two lengths that are not known may differ, so what lies before the tokens may have changed
    return [_with_content(source, dims)]


def _infer(source: Sequence[Dim], wanted: Sequence[Dim]) -> tuple[Dim, ...]:
    """`wanted` with its -1 replaced by what is left of the elements."""
    if -1 not in wanted:
        return tuple(wanted)
    total, total_symbols = product(source)
    rest, rest_symbols = product([dim for dim in wanted if dim != -1])
    open_symbols = list(total_symbols)
    for symbol in rest_symbols:
        if symbol not in open_symbols or symbol == UNKNOWN_DIM:
            return tuple(UNKNOWN_DIM if dim == -1 else dim for dim in wanted)
        open_symbols.remove(symbol)
    missing: Dim = UNKNOWN_DIM
    if not open_symbols:
        missing = total // rest if rest else UNKNOWN_DIM
    elif len(open_symbols) == 1 and total == rest:
        missing = open_symbols[0]
    return tuple(missing if dim == -1 else dim for dim in wanted)


def _check_reshaped(before: Sequence[Dim], after: Sequence[Dim]) -> None:
    """A token's numbers stay together if as many elements lie before the token axis as did."""
    for axis, dim in enumerate(before):
        if dim not in TOKEN_AXES:
            continue
        if list(after).count(dim) != 1 or product(before[:axis]) != product(after[: list(after).index(dim)]):
            raise MixesError("cuts the token axis apart")


def _with_content(source: Fact, dims: tuple[Dim, ...]) -> Fact:
    sizes = [dim for dim in dims if isinstance(dim, int)]
    if source.content is not None and len(sizes) == len(dims) and math.prod(sizes) == source.content.size:
        return Fact(dims, source.content.reshape(sizes))
    return of_dims(dims)


def _unsqueeze(node: ir.Node, inputs: Inputs) -> Sequence[Fact]:
    source, axes = _known(inputs, 0), _integers(node, inputs, 1, "axes")
    if source.dims is None or axes is None:
        return [UNKNOWN]
    rank = len(source.dims) + len(axes)
    places = {axis % rank for axis in axes}
    rest = iter(source.dims)
    return [_with_content(source, tuple(1 if axis in places else next(rest) for axis in range(rank)))]


def _squeeze(node: ir.Node, inputs: Inputs) -> Sequence[Fact]:
    source, axes = _known(inputs, 0), _integers(node, inputs, 1, "axes")
    if source.dims is None or (axes is None and _has_input(node, 1)):
        return [UNKNOWN]
    if axes is None:
        if any(not isinstance(dim, int) for dim in source.dims):
            for dim in source.dims:
                _refuse_tokens(dim, "drops, where there is one token,")
            return [UNKNOWN]
        axes = [axis for axis, dim in enumerate(source.dims) if dim == 1]
    for axis in axes:
        _refuse_tokens(source.dims[axis], "drops")
    gone = {axis % len(source.dims) for axis in axes}
    return [_with_content(source, tuple(dim for axis, dim in enumerate(source.dims) if axis not in gone))]


def _flatten(node: ir.Node, inputs: Inputs) -> Sequence[Fact]:
    source, axis = _known(inputs, 0), attribute(node, "axis", 1)
    if source.dims is None:
        return [of_dims((UNKNOWN_DIM, UNKNOWN_DIM))]
    axis += len(source.dims) if axis < 0 else 0
    dims = _infer(source.dims, (-1, _infer(source.dims[axis:], (-1,))[0]))
    _check_reshaped(source.dims, dims)
    return [_with_content(source, dims)]


def _transpose(node: ir.Node, inputs: Inputs) -> Sequence[Fact]:
    dims = _known(inputs, 0).dims
    if dims is None:
        return [UNKNOWN]
    order = attribute(node, "perm", tuple(reversed(range(len(dims)))))
    return [of_dims(dims[axis] for axis in order)]


def _expand(_node: ir.Node, inputs: Inputs) -> Sequence[Fact]:
    source, target = _known(inputs, 0), _known(inputs, 1)
    if source.dims is None or target.content is None:
        return [UNKNOWN]
    return [_checked(broadcast([source.dims, tuple(target.content.tolist())]))]


def _concat(node: ir.Node, inputs: Inputs) -> Sequence[Fact]:
    facts = [UNKNOWN if fact is None else fact for fact in inputs]
    known = [fact.dims for fact in facts if fact.dims is not None]
    if len(known) < len(facts):
        return [UNKNOWN]
    axis = attribute(node, "axis") % len(known[0]) if known[0] else 0
    if len(facts) > 1:
        for dims in known:
            _refuse_tokens(dims[axis], "lengthens")
    contents = [fact.content for fact in facts if fact.content is not None]
    if len(contents) == len(facts) and any(fact.is_symbolic for fact in facts):
        return [of_array(narrow(np.concatenate([content.astype(object) for content in contents], axis)))]
    length: Dim = known[0][axis] if len(known) == 1 else _sum([dims[axis] for dims in known])
    rest = broadcast([(*dims[:axis], 1, *dims[axis + 1 :]) for dims in known])
    return [of_dims((*rest[:axis], length, *rest[axis + 1 :]))]


def _sum(dims: Sequence[Dim]) -> Dim:
    numbers = [dim for dim in dims if isinstance(dim, int)]
    return sum(numbers) if len(numbers) == len(dims) else UNKNOWN_DIM


def _slice(node: ir.Node, inputs: Inputs) -> Sequence[Fact]:
    source = _known(inputs, 0)
    starts, ends = _integers(node, inputs, 1, "starts"), _integers(node, inputs, 2, "ends")
    axes, steps = _integers(node, inputs, 3, "axes"), _integers(node, inputs, 4, "steps")
    if source.dims is None:
        return [UNKNOWN]
    if axes is None:
        if _has_input(node, 3) or starts is None:
            return [UNKNOWN]
        axes = list(range(len(starts)))
    if starts is None or ends is None or (steps is None and _has_input(node, 4)):
        return [_sliced_somehow(source.dims, axes)]
    window = [slice(None)] * len(source.dims)
    for axis, start, end, step in zip(axes, starts, ends, steps or [1] * len(axes), strict=True):
        # A negative step that runs to the front is written as an end below -dim.
        window[axis] = slice(start, None if step < 0 and end < -(1 << 31) else end, step)
    if source.content is not None:
        return [of_array(narrow(source.content[tuple(window)]))]
    return [of_dims(_cut(dim, part) for dim, part in zip(source.dims, window, strict=True))]


def _sliced_somehow(dims: tuple[Dim, ...], axes: Sequence[int]) -> Fact:
    places = {axis % len(dims) for axis in axes}
    for axis in places:
        _refuse_tokens(dims[axis], "cuts a step-dependent part out of")
    return of_dims(UNKNOWN_DIM if axis in places else dim for axis, dim in enumerate(dims))


def _cut(dim: Dim, part: slice) -> Dim:
    if isinstance(dim, int):
        return len(range(*part.indices(dim)))
    is_whole = part.start in {None, 0} and part.step in {None, 1} and (part.stop is None or part.stop >= 1 << 31)
    if is_whole:
        return dim
    _refuse_tokens(dim, "cuts")
    return UNKNOWN_DIM


def _tile(_node: ir.Node, inputs: Inputs) -> Sequence[Fact]:
    source, repeats = _known(inputs, 0), _known(inputs, 1)
    if source.dims is None or repeats.content is None:
        return [UNKNOWN]
    for dim, count in zip(source.dims, repeats.content.tolist(), strict=True):
        if count != 1:
            _refuse_tokens(dim, "repeats")
    return [_checked([dim * count for dim, count in zip(source.dims, repeats.content.tolist(), strict=True)])]


def _split(node: ir.Node, inputs: Inputs) -> Sequence[Fact]:
    source, count = _known(inputs, 0), len(node.outputs)
    if source.dims is None:
        return [UNKNOWN] * count
    axis = attribute(node, "axis", 0) % len(source.dims)
    _refuse_tokens(source.dims[axis], "splits")
    sizes: Sequence[Dim] | None = _integers(node, inputs, 1, "split")
    if sizes is None:
        whole = source.dims[axis]
        is_even = isinstance(whole, int) and whole % count == 0 and not _has_input(node, 1)
        sizes = [whole // count if is_even else UNKNOWN_DIM] * count
    return [of_dims((*source.dims[:axis], size, *source.dims[axis + 1 :])) for size in sizes]


def _gather(node: ir.Node, inputs: Inputs) -> Sequence[Fact]:
    data, indices = _known(inputs, 0), _known(inputs, 1)
    if data.dims is None or indices.dims is None:
        return [UNKNOWN]
    axis = attribute(node, "axis", 0) % len(data.dims)
    index_value = node.inputs[1]
    if index_value is None or index_value.name != ROW_INDEX_INPUT:
        _refuse_tokens(data.dims[axis], "looks up other places of")
    content = _lookup(node.inputs[0], data, indices, axis)
    if content is not None:
        return [of_array(content)]
    return [_checked((*data.dims[:axis], *indices.dims, *data.dims[axis + 1 :]))]


def _gather_nd(node: ir.Node, inputs: Inputs) -> Sequence[Fact]:
    """Single elements, or what stands after the axes that the places count; those must not be tokens."""
    data, places = _known(inputs, 0).dims, _known(inputs, 1).dims
    if data is None or not places or not isinstance(places[-1], int):
        return [UNKNOWN]
    first = attribute(node, "batch_dims", 0)
    for dim in data[first : first + places[-1]]:
        _refuse_tokens(dim, "looks up other places of")
    return [_checked((*places[:-1], *data[first + places[-1] :]))]


def _gather_elements(node: ir.Node, inputs: Inputs) -> Sequence[Fact]:
    """One element of `axis` for each place. Computed here: onnx 1.23's reference fails where the shapes differ."""
    data, places = _known(inputs, 0), _known(inputs, 1)
    if data.dims is None or places.dims is None:
        return [UNKNOWN]
    for dim in data.dims:
        _refuse_tokens(dim, "looks up other places of")
    if data.content is None or places.content is None or not data.is_numeric or not places.is_numeric:
        return [_checked(places.dims)]
    axis = attribute(node, "axis", 0) % len(data.dims)
    cut = tuple(slice(None) if index == axis else slice(size) for index, size in enumerate(places.content.shape))
    return [of_array(np.take_along_axis(data.content[cut], places.content.astype(np.int64), axis=axis))]


def _lookup(value: ir.Value | None, data: Fact, indices: Fact, axis: int) -> Array | None:
    """Rows of a known array or of a table among the weights (rotary caches)."""
    if indices.content is None or not indices.is_numeric:
        return None
    table = data.content
    if table is None and value is not None and value.const_value is not None:
        table = value.const_value.numpy()
    if table is None or indices.content.size * (table.size // max(table.shape[axis], 1)) > CONTENT_ELEMENTS_MAX:
        return None
    return narrow(np.asarray(np.take(table, indices.content.astype(np.int64), axis=axis)))


def _constant_of_shape(node: ir.Node, inputs: Inputs) -> Sequence[Fact]:
    target = _known(inputs, 0)
    if target.content is None:
        return [UNKNOWN]
    dims = tuple(target.content.tolist())
    count = elements(dims)
    if count is None or count > CONTENT_ELEMENTS_MAX:
        return [_checked(dims)]
    fill = node.attributes["value"].as_tensor().numpy().reshape(-1)[0] if "value" in node.attributes else np.float32(0)
    return [of_array(np.full(dims, fill))]


def _range(_node: ir.Node, inputs: Inputs) -> Sequence[Fact]:
    contents = [_known(inputs, index).content for index in range(3)]
    start, limit, step = (None if content is None else content.reshape(-1)[0] for content in contents)
    if start is None or limit is None or step is None or any(isinstance(item, Symbol) for item in (start, limit, step)):
        return [of_dims((UNKNOWN_DIM,))]
    count = max(int(np.ceil((limit - start) / step)), 0)
    return [of_array(start + step * np.arange(count)) if count <= CONTENT_ELEMENTS_MAX else of_dims((count,))]


# ---- linear algebra, reductions, composite operators ---------------------------------------------------------------


def _matmul(_node: ir.Node, inputs: Inputs) -> Sequence[Fact]:
    left, right = _known(inputs, 0).dims, _known(inputs, 1).dims
    if not left or not right:
        return [UNKNOWN]
    _refuse_tokens(left[-1], "sums over")
    _refuse_tokens(right[-2 if len(right) > 1 else -1], "sums over")
    batch = broadcast([left[:-2], right[:-2]]) if len(left) > 2 or len(right) > 2 else ()
    rows = left[-2:-1] if len(left) > 1 else ()
    columns = right[-1:] if len(right) > 1 else ()
    return [_checked((*batch, *rows, *columns))]


def _gemm(node: ir.Node, inputs: Inputs) -> Sequence[Fact]:
    left, right = _known(inputs, 0).dims, _known(inputs, 1).dims
    if left is None or right is None:
        return [UNKNOWN]
    left = left[::-1] if attribute(node, "transA", 0) else left
    right = right[::-1] if attribute(node, "transB", 0) else right
    _refuse_tokens(left[1], "sums over")
    _refuse_tokens(right[0], "sums over")
    added = _known(inputs, 2).dims if _has_input(node, 2) else ()
    return [UNKNOWN if added is None else _checked(broadcast([(left[0], right[1]), added]))]


def _fused_matmul(node: ir.Node, inputs: Inputs) -> Sequence[Fact]:
    """A product of matrices, each turned over first if its attribute says so."""
    if attribute(node, "transBatchA", 0) or attribute(node, "transBatchB", 0):
        return [UNKNOWN]
    names = ("transA", "transB")
    return _matmul(node, [_turned(_known(inputs, index), attribute(node, names[index], 0)) for index in (0, 1)])


def _turned(fact: Fact, is_turned: int) -> Fact:
    if not is_turned or fact.dims is None or len(fact.dims) < 2:
        return fact
    return of_dims((*fact.dims[:-2], fact.dims[-1], fact.dims[-2]))


def _reduce(node: ir.Node, inputs: Inputs) -> Sequence[Fact]:
    source, axes = _known(inputs, 0), _integers(node, inputs, 1, "axes")
    if source.is_symbolic:
        return [UNKNOWN]
    if source.dims is None or (axes is None and _has_input(node, 1)):
        return [UNKNOWN]
    if not axes and attribute(node, "noop_with_empty_axes", 0):
        return [of_dims(source.dims)]
    # No axis, or an input that holds none, means all of them.
    gone = {axis % len(source.dims) for axis in axes} if axes else set(range(len(source.dims)))
    for axis in gone:
        _refuse_tokens(source.dims[axis], "reduces")
    kept = [
        1 if axis in gone else dim
        for axis, dim in enumerate(source.dims)
        if axis not in gone or attribute(node, "keepdims", 1)
    ]
    return [of_dims(kept)]


def _along_axis(node: ir.Node, inputs: Inputs) -> Sequence[Fact]:
    """Softmax and its like: every place of `axis` influences every other, the rest is untouched."""
    dims = _known(inputs, 0).dims
    if dims is None:
        return [UNKNOWN]
    _refuse_tokens(dims[attribute(node, "axis", -1)], "normalises over")
    return [of_dims(dims)]


def _cumsum(_node: ir.Node, inputs: Inputs) -> Sequence[Fact]:
    """The axis is an input, not an attribute: every place of it reaches those after (or before) it."""
    dims, axis = _known(inputs, 0).dims, _known(inputs, 1).content
    if dims is None:
        return [UNKNOWN]
    if axis is None:
        for dim in dims:
            _refuse_tokens(dim, "may sum, its axis being unknown, over")
        return [of_dims(dims)]
    _refuse_tokens(dims[int(axis.reshape(-1)[0])], "sums along")
    return [of_dims(dims)]


def _layer_norm(node: ir.Node, inputs: Inputs) -> Sequence[Fact]:
    """Normalisation over `axis` and everything after it."""
    dims = _known(inputs, 0).dims
    if dims is None:
        return [UNKNOWN] * len(node.outputs)
    for dim in dims[attribute(node, "axis", -1) % len(dims) :]:
        _refuse_tokens(dim, "normalises over")
    return [of_dims(dims), *[UNKNOWN] * (len(node.outputs) - 1)]


def _skip_norm(node: ir.Node, inputs: Inputs) -> Sequence[Fact]:
    """Either norm over the last axis of a sum; the last output is the sum."""
    total = _broadcast(node, inputs[:2])[0]
    if total.dims is None:
        return [UNKNOWN] * len(node.outputs)
    _refuse_tokens(total.dims[-1], "normalises over")
    return [total, UNKNOWN, UNKNOWN, total][: len(node.outputs)]


def _rotary(_node: ir.Node, inputs: Inputs) -> Sequence[Fact]:
    """Turns pairs of the last axis; with heads in front of it or [batch, tokens, heads * dim]."""
    dims = _known(inputs, 0).dims
    if dims is None:
        return [UNKNOWN]
    _refuse_tokens(dims[-1], "turns pairs of")
    return [of_dims(dims)]


def _attention(node: ir.Node, inputs: Inputs) -> Sequence[Fact]:
    """Attention-23: the result has the layout of the query; the caches grow by the new keys."""
    query, key, value = (_known(inputs, index).dims for index in range(3))
    past_key, past_value = _known(inputs, 4).dims, _known(inputs, 5).dims
    if query is None or key is None or value is None:
        return [UNKNOWN] * len(node.outputs)
    for dims in (query, key, value):
        _refuse_tokens(dims[-2 if len(dims) == 4 else 1], "attends over")
    kv_heads = attribute(node, "kv_num_heads", key[1] if len(key) == 4 else None)
    width = value[-1] if len(value) == 4 else value[-1] // kv_heads
    output = (*query[:-1], width) if len(query) == 4 else (*query[:-1], width * attribute(node, "q_num_heads"))
    return [of_dims(output), *(_grown(dims, key) for dims in (past_key, past_value))][: len(node.outputs)]


def _grown(past: tuple[Dim, ...] | None, key: tuple[Dim, ...]) -> Fact:
    if past is None:
        return UNKNOWN
    return of_dims((*past[:2], _sum([past[2], key[-2] if len(key) == 4 else key[1]]), past[3]))


def _group_query_attention(node: ir.Node, inputs: Inputs) -> Sequence[Fact]:
    """[batch, tokens, heads · dim]; the caches grow by the new keys."""
    query, past_key, past_value = _known(inputs, 0).dims, _known(inputs, 3).dims, _known(inputs, 4).dims
    if query is None or past_key is None or past_value is None:
        return [UNKNOWN] * len(node.outputs)
    _refuse_tokens(query[1], "attends over")
    output = of_dims((*query[:2], _product(attribute(node, "num_heads"), past_key[3])))
    grown = [of_dims((*past[:2], _sum([past[2], query[1]]), past[3])) for past in (past_key, past_value)]
    return [output, *grown, UNKNOWN][: len(node.outputs)]


def _multi_head_attention(node: ir.Node, inputs: Inputs) -> Sequence[Fact]:
    """com.microsoft's, of queries [batch, tokens, heads · dim]; the caches grow by the new keys."""
    query, key, value = (_known(inputs, index).dims for index in range(3))
    past_key, past_value = _known(inputs, 6).dims, _known(inputs, 7).dims
    if query is None or key is None or value is None or len(query) != 3:
        return [UNKNOWN] * len(node.outputs)
    for dims in (query, key, value):
        _refuse_tokens(dims[-2 if len(dims) == 4 else 1], "attends over")
    width = _product(value[-1], attribute(node, "num_heads")) if len(value) == 4 else value[-1]
    grown = [_grown(past, key) for past in (past_key, past_value)]
    return [of_dims((*query[:2], width)), *grown, UNKNOWN][: len(node.outputs)]


def _product(left: Dim, right: Dim) -> Dim:
    return left * right if isinstance(left, int) and isinstance(right, int) else UNKNOWN_DIM


def _matmul_nbits(node: ir.Node, inputs: Inputs) -> Sequence[Fact]:
    """A product with a matrix [K, N] that is packed: the last axis becomes N."""
    dims = _known(inputs, 0).dims
    if not dims:
        return [UNKNOWN]
    _refuse_tokens(dims[-1], "sums over")
    return [of_dims((*dims[:-1], attribute(node, "N")))]


def _gather_block_quantized(node: ir.Node, inputs: Inputs) -> Sequence[Fact]:
    """Rows of a packed table; its type says whether two places of the last axis share a byte."""
    data, indices, value = _known(inputs, 0).dims, _known(inputs, 1).dims, node.inputs[0]
    axis = attribute(node, "gather_axis", 0)
    if data is None or indices is None or value is None or axis != 0:
        return [UNKNOWN]
    is_packed = value.dtype == ir.DataType.UINT8 and attribute(node, "bits", 4) == 4
    last = data[-1] * 2 if is_packed else data[-1]
    return [_checked((*indices, *data[1:-1], last))]


def _dynamic_quantize(_node: ir.Node, inputs: Inputs) -> Sequence[Fact]:
    """One scale for the whole tensor: every token's numbers depend on every other's."""
    dims = _known(inputs, 0).dims
    for dim in dims or ():
        _refuse_tokens(dim, "measures one scale over")
    return [UNKNOWN if dims is None else of_dims(dims), of_dims(()), of_dims(())]


def _top(node: ir.Node, inputs: Inputs) -> Sequence[Fact]:
    """TopK: the best of one axis, with their places."""
    dims, count = _known(inputs, 0).dims, _integers(node, inputs, 1, "k")
    if dims is None:
        return [UNKNOWN] * len(node.outputs)
    axis = attribute(node, "axis", -1) % len(dims)
    _refuse_tokens(dims[axis], "chooses from")
    kept: Dim = UNKNOWN_DIM if count is None else count[0]
    return [of_dims((*dims[:axis], kept, *dims[axis + 1 :]))] * len(node.outputs)


def _experts(_node: ir.Node, inputs: Inputs) -> Sequence[Fact]:
    """Our own node: each row of tokens by itself, through the experts that its scores choose."""
    dims = _known(inputs, 0).dims
    if dims is None:
        return [UNKNOWN]
    _refuse_tokens(dims[-1], "sums over")
    return [of_dims(dims)]


def _ragged_attention(node: ir.Node, inputs: Inputs) -> Sequence[Fact]:
    """Our own node: tokens meet here and nowhere else, each only with those of its own slot."""
    first = _known(inputs, 0).dims
    rows = UNKNOWN if first is None else of_dims((first[0], attribute(node, "heads") * attribute(node, "dim")))
    return [rows, *(_known(inputs, index) for index in (3, 4))]


_UNARY = (
    "Abs Neg Sqrt Reciprocal Exp Log Sigmoid Tanh Relu Erf Cos Sin Not IsNaN IsInf Floor Ceil Round Sign Softplus Gelu "
    "Clip LeakyRelu Elu Mish HardSigmoid HardSwish CastLike QuickGelu FastGelu BiasGelu Dropout"
)
_BROADCAST = "Add Sub Mul Div Pow Equal Greater GreaterOrEqual Less LessOrEqual And Or Xor Where Min Max Mod Sum PRelu"
_REDUCE = "ReduceMean ReduceSum ReduceMax ReduceMin ReduceProd ReduceL1 ReduceL2 ReduceSumSquare ReduceLogSumExp"

SHAPED_BY_CONTENT = frozenset({"Reshape", "Expand", "ConstantOfShape"})

RULES: Mapping[str, Rule] = MappingProxyType(
    {
        **dict.fromkeys(_UNARY.split(), _unary),
        **dict.fromkeys(_BROADCAST.split(), _broadcast),
        **dict.fromkeys(_REDUCE.split(), _reduce),
        **dict.fromkeys(("Softmax", "LogSoftmax"), _along_axis),
        **dict.fromkeys(("LayerNormalization", "RMSNormalization", "SimplifiedLayerNormalization"), _layer_norm),
        "Attention": _attention,
        "Cast": _cast,
        "Concat": _concat,
        "Constant": _constant,
        "ConstantOfShape": _constant_of_shape,
        "CumSum": _cumsum,
        "Expand": _expand,
        "Experts": _experts,
        "Flatten": _flatten,
        "FusedMatMul": _fused_matmul,
        "Gather": _gather,
        "GatherND": _gather_nd,
        "GatherElements": _gather_elements,
        "GatherBlockQuantized": _gather_block_quantized,
        "Gemm": _gemm,
        "GroupQueryAttention": _group_query_attention,
        "Identity": _identity,
        "DequantizeLinear": _unary,
        "DynamicQuantizeLinear": _dynamic_quantize,
        "MatMul": _matmul,
        "MatMulBnb4": _matmul_nbits,
        "MatMulInteger": _matmul,
        "MatMulNBits": _matmul_nbits,
        "MultiHeadAttention": _multi_head_attention,
        "QuantizeLinear": _unary,
        "RaggedAttention": _ragged_attention,
        "RmsNorm": _layer_norm,
        "LayerNorm": _layer_norm,
        "RotaryEmbedding": _rotary,
        **dict.fromkeys(("SkipSimplifiedLayerNormalization", "SkipLayerNormalization"), _skip_norm),
        "Range": _range,
        "Reshape": _reshape,
        "Shape": _shape,
        "Size": _size,
        "Slice": _slice,
        "Split": _split,
        "Squeeze": _squeeze,
        "Tile": _tile,
        "TopK": _top,
        "Transpose": _transpose,
        "Unsqueeze": _unsqueeze,
    }
)
