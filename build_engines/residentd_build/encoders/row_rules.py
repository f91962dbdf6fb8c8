"""How each operator carries rows from its inputs to its outputs, or an error where it may let them meet.

Only what is sure is carried: an operator, an attribute or a shape that is not understood ends the proof, and the calls
of such a model run one by one.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import onnx_ir as ir

from residentd_build.encoders.row_facts import (
    CONTENT_ELEMENTS_MAX,
    ONE,
    UNKNOWN,
    Fact,
    MixedRowsError,
    Size,
    Symbol,
    UnprovenRowsError,
    divided,
    of_array,
    of_content,
    of_sizes,
    opaque,
    product,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from residentd_build.encoders.row_facts import Contents

MICROSOFT, LEARNED = "com.microsoft", "ai.onnx.ml"
TO_THE_END = 1_000_000_000
"""No axis is as long; exporters write 2^31 - 1, 2^63 - 1 or, from JAX, this for all that there is."""
STEADY = frozenset({"half_pixel", "pytorch_half_pixel", "align_corners", "asymmetric"})
"""How Resize may count places: where an axis keeps its length, these leave each where it is."""
WHOLE_TYPES = frozenset({ir.DataType.INT64, ir.DataType.INT32})


@dataclass(frozen=True, slots=True)
class Step:
    """One node with what is known of its inputs. `place` tells it from every other node."""

    node: ir.Node
    inputs: Sequence[Fact | None]
    opset: int
    place: str
    _fresh: Iterator[int] = field(default_factory=itertools.count)

    def fact(self, index: int) -> Fact:
        return (self.inputs[index] if self.has(index) else None) or UNKNOWN

    def has(self, index: int) -> bool:
        return index < len(self.inputs) and self.inputs[index] is not None

    def attribute(self, name: str, default: Any = None) -> Any:
        found = self.node.attributes.get(name)
        return default if found is None else found.value

    def numbers(self, index: int, name: str) -> list[int] | None:
        """Axes and the like: an attribute in older operator sets, an input since. None: absent, or not known."""
        if name in self.node.attributes:
            return [int(item) for item in self.node.attributes[name].value]
        items = self.sizes(index)
        return [item.number for item in items] if items is not None and all(item.is_number for item in items) else None

    def sizes(self, index: int) -> list[Size] | None:
        content = self.fact(index).content
        return None if content is None else list(content.reshape(-1))

    def fresh(self) -> Size:
        """The size of an axis that is the same for any number of rows."""
        return Size(1, (Symbol(f"{self.place}.{next(self._fresh)}"),))

    def is_used(self, index: int) -> bool:
        if index >= len(self.node.outputs):
            return False
        output = self.node.outputs[index]
        return bool(output.uses()) or output.is_graph_output()

    def without_rows(self, *indexes: int) -> None:
        for index in indexes:
            if self.fact(index).has_rows:
                raise UnprovenRowsError(f"takes the rows as its input {index + 1}")


Rule = Callable[[Step], Sequence[Fact]]


def _settled(dims: Sequence[Size], outer: Size = ONE) -> Fact:
    """Dimensions of a result, of which at most one has the rows, each once."""
    places = [place for place, size in enumerate(dims) if size.counts_rows]
    if not places:
        return Fact(tuple(dims))
    per_row = dims[places[0]].per_row
    if len(places) > 1 or per_row is None or divided(per_row, outer) is None:
        raise UnprovenRowsError("makes an axis of which the rows are not simply a part")
    return Fact(tuple(dims), places[0], outer)


def _refuse(fact: Fact, axis: int, what: str) -> None:
    if fact.axis is not None and fact.axis == axis % fact.rank:
        raise MixedRowsError(f"{what} the rows")


def _first_axis(fact: Fact, rank_min: int = 1) -> None:
    if fact.axis is not None and (fact.axis != 0 or fact.rank < rank_min):
        raise UnprovenRowsError("takes the rows along another axis than the first")


# ---- elementwise ---------------------------------------------------------------------------------------------------


def _same(step: Step) -> Sequence[Fact]:
    """As many numbers, each from its own place; other inputs are constants."""
    step.without_rows(*range(1, len(step.inputs)))
    fact = step.fact(0)
    contents = [given.content for given in step.inputs if given is not None and given.content is not None]
    if contents and len(contents) == sum(given is not None for given in step.inputs):
        return [_elementwise(step, contents)]
    return [Fact(fact.dims, fact.axis, fact.outer)]


def _identity(step: Step) -> Sequence[Fact]:
    return [step.fact(0)]


def _dropout(step: Step) -> Sequence[Fact]:
    """As it is when a model is used: one in training is refused when its file is read."""
    fact = step.fact(0)
    return [fact, Fact(fact.dims, fact.axis, fact.outer)]


def _like(step: Step) -> Sequence[Fact]:
    """Of the second input only the type counts."""
    fact = step.fact(0)
    return [Fact(fact.dims, fact.axis, fact.outer)]


def _cast(step: Step) -> Sequence[Fact]:
    fact = step.fact(0)
    if fact.content is None:
        return [fact]
    kind = step.attribute("to")
    if kind not in WHOLE_TYPES:
        return [_mapped(fact.content, lambda size: opaque(f"real{kind}", [size], "real"))]
    return [_mapped(fact.content, lambda size: size if _is_whole(size) else opaque("whole", [size], "whole"))]


def _is_whole(size: Size) -> bool:
    return all(symbol.kind != "real" for symbol in size.symbols)


def _mapped(content: Contents, change: Callable[[Size], Size]) -> Fact:
    return of_content(of_sizes([change(size) for size in content.reshape(-1)]).reshape(content.shape))


def _aligned(facts: Sequence[Fact], step: Step) -> Fact:
    """Dimensions of a result whose operands are stretched to each other, the rows of all on one axis."""
    rank = max(fact.rank for fact in facts)
    rows = {fact.axis + rank - fact.rank for fact in facts if fact.axis is not None}
    if len(rows) > 1 or len({fact.outer for fact in facts if fact.has_rows}) > 1:
        raise MixedRowsError("pairs every row with every other")
    padded = [(ONE,) * (rank - fact.rank) + fact.sizes for fact in facts]
    outer = next((fact.outer for fact in facts if fact.has_rows), ONE)
    return _settled([_common(column, step) for column in zip(*padded, strict=True)], outer)


def _common(column: Sequence[Size], step: Step) -> Size:
    wide = {size for size in column if size != ONE}
    if any(size.counts_rows for size in wide) and len(wide) > 1:
        raise UnprovenRowsError("combines the rows with an axis of another length")
    numbers = [size for size in wide if size.is_number]
    if len(wide) <= 1:
        return next(iter(wide), ONE)
    return numbers[0] if numbers else step.fresh()


def _broadcast(step: Step) -> Sequence[Fact]:
    facts = [fact for fact in step.inputs if fact is not None]
    contents = [fact.content for fact in facts if fact.content is not None]
    if len(contents) == len(facts):
        return [_elementwise(step, contents)]
    return [_aligned(facts, step)]


def _elementwise(step: Step, contents: Sequence[Contents]) -> Fact:
    shape = np.broadcast_shapes(*(content.shape for content in contents))
    if math.prod(shape) > CONTENT_ELEMENTS_MAX:
        raise UnprovenRowsError("computes with a large table of sizes")
    columns = zip(*(np.broadcast_to(content, shape).reshape(-1) for content in contents), strict=True)
    extra = ",".join(f"{name}={step.attribute(name)}" for name in sorted(step.node.attributes))
    found = [_arithmetic(step.node.op_type, extra, column) for column in columns]
    return of_content(of_sizes(found).reshape(shape))


def _arithmetic(operation: str, extra: str, items: tuple[Size, ...]) -> Size:
    """Exact where it is an identity of products, else a symbol of its own; fractions are rounded, so they have none."""
    if operation == "Where" and items[0].is_number:
        return items[1] if items[0].number else items[2]
    kind: Literal["whole", "real"] = "whole" if all(map(_is_whole, items)) else "real"
    match operation if kind == "whole" else "", items:
        case "Add", (one, other) if one.number == 0 or other.number == 0:
            return other if one.number == 0 else one
        case "Add", (one, other) if one.is_number and other.is_number:
            return Size(one.number + other.number)
        case "Sub", (one, other) if one == other:
            return Size(0)
        case "Sub", (one, other) if one.is_number and other.is_number:
            return Size(one.number - other.number)
        case "Sub", (one, other) if other.number == 0:
            return one
        case "Mul", (one, other):
            return one * other
        case "Div", (one, other) if (quotient := divided(one, other)) is not None:
            return quotient
        case "Equal", (one, other) if (equal := _equal(one, other)) is not None:
            return Size(int(equal))
    return opaque(operation + extra, items, kind)


def _equal(one: Size, other: Size) -> bool | None:
    """None where only a run knows. No axis is shorter than nothing: exporters ask whether a size is -1."""
    if one == other:
        return True
    if one.is_number and other.is_number:
        return False
    known, open_size = (one, other) if one.is_number else (other, one)
    is_size = open_size.number > 0 and all(symbol.kind == "size" for symbol in open_size.symbols)
    return False if known.is_number and known.number < 0 and is_size else None


# ---- shapes --------------------------------------------------------------------------------------------------------


def _constant(step: Step) -> Sequence[Fact]:
    tensor = ir.convenience.get_const_tensor(step.node.outputs[0])
    if tensor is None or tensor.dtype == ir.DataType.STRING or tensor.dtype.bitwidth < 8:
        return [UNKNOWN]
    return [of_array(tensor.numpy())]


def _shape(step: Step) -> Sequence[Fact]:
    dims = step.fact(0).sizes
    start, end = step.attribute("start", 0), step.attribute("end", len(dims))
    return [of_content(of_sizes(dims[start:end]))]


def _size(step: Step) -> Sequence[Fact]:
    return [of_content(of_sizes([product(step.fact(0).sizes)]).reshape(()))]


def _reshape(step: Step) -> Sequence[Fact]:
    source, items = step.fact(0), step.sizes(1)
    if "shape" in step.node.attributes:
        items = [Size(int(item)) for item in step.attribute("shape")]
    if items is None:
        raise UnprovenRowsError("takes a shape that is not known")
    zero_copies = not step.attribute("allowzero", 0)
    wanted = [source.sizes[place] if item == Size(0) and zero_copies else item for place, item in enumerate(items)]
    return [_reshaped(source, [_length(item, step) for item in wanted], step)]


def _length(item: Size, step: Step) -> Size:
    """A length that was computed may turn out to be 0 or -1, which say something else, so it stands for nothing."""
    is_sure = item.counts_rows or all(symbol.kind == "size" for symbol in item.symbols)
    return item if is_sure else step.fresh()


def _flatten(step: Step) -> Sequence[Fact]:
    source, axis = step.fact(0), step.attribute("axis", 1)
    axis += source.rank if axis < 0 else 0
    return [_reshaped(source, [product(source.sizes[:axis]), product(source.sizes[axis:])], step)]


def _reshaped(source: Fact, wanted: Sequence[Size], step: Step) -> Fact:
    """Numbers stay in their order, so rows stay apart where as many numbers lie before each of them as did."""
    dims = _inferred(source, wanted, step)
    if source.content is not None:
        return of_content(source.content.reshape([size.number if size.is_number else -2 for size in dims]))
    if source.axis is None:
        if any(size.counts_rows for size in dims):
            raise UnprovenRowsError("makes an axis of which the rows are not simply a part")
        return Fact(tuple(dims))
    before = product(source.sizes[: source.axis]) * source.outer
    place = next((place for place, size in enumerate(dims) if size.counts_rows), None)
    outer = None if place is None else divided(before, product(dims[:place]))
    if outer is None:
        raise UnprovenRowsError("may cut the rows apart")
    return _settled(dims, outer)


def _inferred(source: Fact, wanted: Sequence[Size], step: Step) -> list[Size]:
    """`wanted` with its -1 replaced by what is left of the numbers."""
    minus = Size(-1)
    if minus not in wanted:
        return list(wanted)
    total, rest = product(source.sizes), product(size for size in wanted if size != minus)
    missing = divided(total, rest)
    if missing is None:
        if total.counts_rows and not rest.counts_rows:
            raise UnprovenRowsError("may cut the rows apart")
        missing = step.fresh()
    return [missing if size == minus else size for size in wanted]


def _unsqueeze(step: Step) -> Sequence[Fact]:
    source, axes = step.fact(0), step.numbers(1, "axes")
    if axes is None:
        raise UnprovenRowsError("adds axes that are not known")
    rank = source.rank + len(axes)
    places = {axis % rank for axis in axes}
    rest = iter(range(source.rank))
    return [_moved(source, [None if axis in places else next(rest) for axis in range(rank)])]


def _squeeze(step: Step) -> Sequence[Fact]:
    source, axes = step.fact(0), step.numbers(1, "axes")
    if axes is None and (step.has(1) or not all(size.is_number for size in source.sizes)):
        raise UnprovenRowsError("drops axes that are not known")
    gone = [axis for axis, size in enumerate(source.sizes) if size == ONE] if axes is None else axes
    for axis in gone:
        _refuse(source, axis, "drops, where it is one, the axis of")
    places = {axis % source.rank for axis in gone}
    return [_moved(source, [axis for axis in range(source.rank) if axis not in places])]


def _transpose(step: Step) -> Sequence[Fact]:
    source = step.fact(0)
    return [_moved(source, step.attribute("perm", range(source.rank)[::-1]))]


def _moved(source: Fact, order: Sequence[int | None]) -> Fact:
    """The axes of `source` in another order; None for a new one of length 1, what is left out has that length."""
    dims = [ONE if axis is None else source.sizes[axis] for axis in order]
    if source.content is None:
        return _settled(dims, source.outer)
    kept = [axis for axis in order if axis is not None]
    dropped = [axis for axis in range(source.rank) if axis not in kept]
    content = source.content.transpose([*dropped, *kept])
    return of_content(content.reshape([size.number for size in dims]))


def _expand(step: Step) -> Sequence[Fact]:
    source, wanted = step.fact(0), step.sizes(1)
    if wanted is None:
        raise UnprovenRowsError("takes a shape that is not known")
    if source.content is not None and all(size.is_number for size in wanted):
        shape = np.broadcast_shapes(source.content.shape, [size.number for size in wanted])
        if math.prod(shape) <= CONTENT_ELEMENTS_MAX:
            return [of_content(np.broadcast_to(source.content, shape))]
    target = _settled(wanted, source.outer if source.has_rows else ONE)
    return [_aligned([Fact(source.dims, source.axis, source.outer), target], step)]


def _tile(step: Step) -> Sequence[Fact]:
    source, repeats = step.fact(0), step.sizes(1)
    if repeats is None:
        raise UnprovenRowsError("repeats, how often is not known,")
    for axis, count in enumerate(repeats):
        if count != ONE:
            _refuse(source, axis, "repeats")
    dims = [size * count for size, count in zip(source.sizes, repeats, strict=True)]
    return [_settled(dims, source.outer)]


def _constant_of_shape(step: Step) -> Sequence[Fact]:
    wanted = step.sizes(0)
    if wanted is None:
        raise UnprovenRowsError("takes a shape that is not known")
    fill = step.node.attributes["value"].as_tensor().numpy() if "value" in step.node.attributes else np.zeros(1, "f4")
    count = product(wanted)
    if count.is_number and 0 <= count.number <= CONTENT_ELEMENTS_MAX:
        return [of_array(np.full([size.number for size in wanted], fill.reshape(-1)[0]))]
    return [_settled(wanted)]


def _range(step: Step) -> Sequence[Fact]:
    items = [step.sizes(index) for index in range(3)]
    if any(fact is not None and fact.has_rows for fact in step.inputs):
        raise UnprovenRowsError("counts as far as the rows say")
    if not all(item and item[0].is_number for item in items):
        return [Fact((step.fresh(),))]
    start, limit, step_ = (item[0].number for item in items if item)
    numbers = range(start, limit, step_)
    return [of_array(np.array(numbers))] if len(numbers) <= CONTENT_ELEMENTS_MAX else [Fact((Size(len(numbers)),))]


# ---- parts of axes -------------------------------------------------------------------------------------------------


def _concat(step: Step) -> Sequence[Fact]:
    facts = [step.fact(index) for index in range(len(step.inputs))]
    contents = [fact.content for fact in facts if fact.content is not None]
    axis = step.attribute("axis") % facts[0].rank
    if len(contents) == len(facts):
        return [of_content(np.concatenate(contents, axis))]
    if len({(fact.axis, fact.outer) for fact in facts}) > 1:
        raise UnprovenRowsError("puts rows beside what has none")
    for fact in facts:
        _refuse(fact, axis, "puts something before or behind")
    rest = [tuple(size for place, size in enumerate(fact.sizes) if place != axis) for fact in facts]
    if facts[0].axis is not None and len({fact.sizes[facts[0].axis] for fact in facts}) > 1:
        raise UnprovenRowsError("combines the rows with an axis of another length")
    lengths = [fact.sizes[axis] for fact in facts]
    whole = Size(sum(size.number for size in lengths)) if all(size.is_number for size in lengths) else step.fresh()
    return [_settled((*rest[0][:axis], whole, *rest[0][axis:]), facts[0].outer)]


def _split(step: Step) -> Sequence[Fact]:
    source, count = step.fact(0), len(step.node.outputs)
    axis = step.attribute("axis", 0) % source.rank
    step.without_rows(1)
    _refuse(source, axis, "splits")
    sizes: Sequence[Size] | None = step.sizes(1)
    if "split" in step.node.attributes:
        sizes = [Size(int(size)) for size in step.attribute("split")]
    if sizes is None or len(sizes) != count:
        even = None if step.has(1) else divided(source.sizes[axis], Size(count))
        sizes = [even or step.fresh() for _ in range(count)]
    if any(size.counts_rows for size in sizes):
        raise UnprovenRowsError("computes with the number of rows")
    return [_settled((*source.sizes[:axis], size, *source.sizes[axis + 1 :]), source.outer) for size in sizes]


def _slice(step: Step) -> Sequence[Fact]:
    source = step.fact(0)
    step.without_rows(*range(1, len(step.inputs)))
    starts, ends, axes, steps = (_window(step, *entry) for entry in enumerate(("starts", "ends", "axes", "steps"), 1))
    if axes is None:
        if step.has(3) or starts is None:
            raise UnprovenRowsError("cuts axes that are not known")
        axes = [Size(axis) for axis in range(len(starts))]
    places = [axis.number % source.rank for axis in axes]
    counts = (None if step.has(4) else [ONE] * len(places)) if steps is None else steps
    if source.content is not None and _all_numbers(starts, ends, counts):
        return [_sliced_content(source.content, places, (starts, ends, counts))]  # type: ignore[arg-type]
    dims = list(source.sizes)
    for place, axis in enumerate(places):
        window = [None if part is None else part[place] for part in (starts, ends, counts)]
        if axis == source.axis:
            _check_whole(dims[axis], *window)
        elif any(size is not None and size.counts_rows for size in window):
            raise UnprovenRowsError("cuts as many places as there are rows from another axis")
        elif not _is_whole_window(dims[axis], *window):
            dims[axis] = _cut(dims[axis], step, *window)
    return [_settled(dims, source.outer)]


def _all_numbers(*parts: list[Size] | None) -> bool:
    return all(part is not None and all(size.is_number for size in part) for part in parts)


def _window(step: Step, index: int, name: str) -> list[Size] | None:
    if name in step.node.attributes:
        return [Size(int(item)) for item in step.attribute(name)]
    return step.sizes(index)


def _is_whole_window(size: Size, start: Size | None, end: Size | None, count: Size | None) -> bool:
    reaches = end is not None and (end == size or (end.is_number and end.number >= TO_THE_END))
    return start == Size(0) and count == ONE and reaches


def _check_whole(size: Size, start: Size | None, end: Size | None, count: Size | None) -> None:
    if not _is_whole_window(size, start, end, count):
        raise UnprovenRowsError("cuts some of the rows out")


def _cut(size: Size, step: Step, start: Size | None, end: Size | None, count: Size | None) -> Size:
    numbers = [part.number for part in (size, start, end, count) if part is not None and part.is_number]
    if len(numbers) < 4:
        return step.fresh()
    length, first, last, by = numbers
    return Size(len(range(length)[_python_slice(first, last, by)]))


def _python_slice(start: int, end: int, count: int) -> slice:
    # With a negative step an end below -size means the first element too, which Python writes as None.
    return slice(start, None if count < 0 and end < -TO_THE_END else end, count)


def _sliced_content(content: Contents, places: Sequence[int], window: Sequence[Sequence[Size]]) -> Fact:
    cuts = [slice(None)] * content.ndim
    for axis, start, end, count in zip(places, *window, strict=True):
        cuts[axis] = _python_slice(start.number, end.number, count.number)
    return of_content(content[tuple(cuts)])


def _gather(step: Step) -> Sequence[Fact]:
    data, places = step.fact(0), step.fact(1)
    axis = step.attribute("axis", 0) % data.rank
    _refuse(data, axis, "looks up other places of")
    if data.has_rows and places.has_rows:
        raise MixedRowsError("pairs every row with every other")
    if data.content is not None and places.content is not None:
        if not all(size.is_number for size in places.content.reshape(-1)):
            raise UnprovenRowsError("looks up places that are not known")
        indexes = np.array([size.number for size in places.content.reshape(-1)], np.int64)
        return [of_content(np.take(data.content, indexes.reshape(places.content.shape), axis))]
    dims = (*data.sizes[:axis], *places.sizes, *data.sizes[axis + 1 :])
    return [_settled(dims, data.outer if data.has_rows else places.outer)]


def _gather_elements(step: Step) -> Sequence[Fact]:
    """A number of `axis` for each place, and at every other axis the same place."""
    data, places = step.fact(0), step.fact(1)
    axis = step.attribute("axis", 0) % data.rank
    _refuse(data, axis, "looks up other places of")
    _alike(data, places)
    return [_settled(places.sizes, places.outer)]


def _scatter_elements(step: Step) -> Sequence[Fact]:
    data, axis = step.fact(0), step.attribute("axis", 0) % step.fact(0).rank
    _refuse(data, axis, "puts numbers at other places of")
    for index in (1, 2):
        _alike(data, step.fact(index))
    return [_settled(data.sizes, data.outer)]


def _alike(one: Fact, other: Fact) -> None:
    """Both have the rows along the same axis, in the same way."""
    if (one.axis, one.outer) != (other.axis, other.outer):
        raise UnprovenRowsError("takes the rows of its inputs along different axes")
    if one.axis is not None and one.sizes[one.axis] != other.sizes[one.axis]:
        raise UnprovenRowsError("combines the rows with an axis of another length")


def _gather_nd(step: Step) -> Sequence[Fact]:
    data, places, shared = step.fact(0), step.fact(1), step.attribute("batch_dims", 0)
    if not places.sizes[-1].is_number:
        raise UnprovenRowsError("looks up places that are not known")
    end = shared + places.sizes[-1].number
    if data.axis is not None and data.axis < end:
        if data.axis >= shared:
            raise UnprovenRowsError("looks up other places of the rows")
        _alike(data, places)
    elif data.has_rows and places.has_rows:
        raise MixedRowsError("pairs every row with every other")
    _refuse(places, -1, "counts places along")
    holder = data if data.has_rows else places
    return [_settled((*places.sizes[:-1], *data.sizes[end:]), holder.outer)]


def _compress(step: Step) -> Sequence[Fact]:
    source, axis = step.fact(0), step.attribute("axis")
    step.without_rows(1)
    if axis is None:
        raise MixedRowsError("chooses from all the rows")
    _refuse(source, axis, "chooses from")
    dims = list(source.sizes)
    dims[axis] = step.fresh()
    return [_settled(dims, source.outer)]


def _pad(step: Step) -> Sequence[Fact]:
    source, pads = step.fact(0), step.numbers(1, "pads")
    axes = step.numbers(3, "axes") if step.has(3) else list(range(source.rank))
    step.without_rows(1, 2)
    if pads is None or axes is None:
        raise UnprovenRowsError("lengthens axes, how far is not known,")
    dims = list(source.sizes)
    for place, axis in enumerate(axes):
        more = pads[place] + pads[place + len(axes)]
        if pads[place] or pads[place + len(axes)]:
            _refuse(source, axis, "puts something before or behind")
            dims[axis] = Size(dims[axis].number + more) if dims[axis].is_number else step.fresh()
    return [_settled(dims, source.outer)]


# ---- along axes ----------------------------------------------------------------------------------------------------


def _reduce(step: Step) -> Sequence[Fact]:
    source, axes = step.fact(0), step.numbers(1, "axes")
    if axes is None and step.has(1):
        raise UnprovenRowsError("reduces over axes that are not known")
    if not axes and step.attribute("noop_with_empty_axes", 0):
        return [_settled(source.sizes, source.outer)]
    # No axis, or an input that holds none, means all of them.
    return [_without(source, axes or range(source.rank), step)]


def _arg(step: Step) -> Sequence[Fact]:
    return [_without(step.fact(0), [step.attribute("axis", 0)], step)]


def _without(source: Fact, axes: Sequence[int], step: Step) -> Fact:
    for axis in axes:
        _refuse(source, axis, "reduces over")
    gone = {axis % source.rank for axis in axes}
    keeps = step.attribute("keepdims", 1)
    dims = [ONE if axis in gone else size for axis, size in enumerate(source.sizes) if axis not in gone or keeps]
    return _settled(dims, source.outer)


def _normalise(step: Step) -> Sequence[Fact]:
    """Softmax and its like: over one axis, and before opset 13 over all from there on."""
    source, since = step.fact(0), step.opset >= 13
    axis = step.attribute("axis", -1 if since else 1) % source.rank
    for place in [axis] if since else range(axis, source.rank):
        _refuse(source, place, "normalises over")
    return [_settled(source.sizes, source.outer)]


def _lp_norm(step: Step) -> Sequence[Fact]:
    source = step.fact(0)
    _refuse(source, step.attribute("axis", -1), "normalises over")
    return [_settled(source.sizes, source.outer)]


def _mean_variance(step: Step) -> Sequence[Fact]:
    source = step.fact(0)
    for axis in step.attribute("axes", (0, 2, 3)):
        _refuse(source, axis, "normalises over")
    return [_settled(source.sizes, source.outer)]


def _layer_norm(step: Step) -> Sequence[Fact]:
    """Over `axis` and all after it."""
    source = step.fact(0)
    step.without_rows(*range(1, len(step.inputs)))
    axis = step.attribute("axis", -1) % source.rank
    for place in range(axis, source.rank):
        _refuse(source, place, "normalises over")
    moments = _settled((*source.sizes[:axis], *[ONE] * (source.rank - axis)), source.outer)
    return [_settled(source.sizes, source.outer), moments, moments]


def _skip_norm(step: Step) -> Sequence[Fact]:
    """Over the last axis of a sum, which is the last output."""
    step.without_rows(*range(2, len(step.inputs)))
    total = _aligned([step.fact(0), step.fact(1)], step)
    _refuse(total, -1, "normalises over")
    return [total, UNKNOWN, UNKNOWN, total]


def _batch_norm(step: Step) -> Sequence[Fact]:
    """With the mean and variance of the training; in training mode with those of the run."""
    source = step.fact(0)
    says_training = step.opset < 14 and sum(bool(output.name) for output in step.node.outputs) > 1
    if step.attribute("training_mode", 0) or says_training:
        raise MixedRowsError("normalises over the rows, as in training")
    step.without_rows(*range(1, 5))
    _first_axis(source, 2)
    return [_settled(source.sizes, source.outer)]


def _per_picture(step: Step) -> Sequence[Fact]:
    """Normalisation of each of the first axis by itself."""
    source = step.fact(0)
    step.without_rows(*range(1, len(step.inputs)))
    _first_axis(source, 2)
    return [_settled(source.sizes, source.outer)]


def _cumsum(step: Step) -> Sequence[Fact]:
    source, axis = step.fact(0), step.numbers(1, "axis")
    if axis is None:
        raise UnprovenRowsError("sums along an axis that is not known")
    _refuse(source, axis[0], "sums along")
    return [_settled(source.sizes, source.outer)]


def _top(step: Step) -> Sequence[Fact]:
    source, count = step.fact(0), step.sizes(1)
    step.without_rows(1)
    axis = step.attribute("axis", -1) % source.rank
    _refuse(source, axis, "chooses from")
    kept = step.fresh() if count is None else count[0]
    return [_settled((*source.sizes[:axis], kept, *source.sizes[axis + 1 :]), source.outer)] * 2


def _one_hot(step: Step) -> Sequence[Fact]:
    source, depth = step.fact(0), step.sizes(1)
    step.without_rows(1, 2)
    axis = step.attribute("axis", -1) % (source.rank + 1)
    width = step.fresh() if depth is None else depth[0]
    return [_settled((*source.sizes[:axis], width, *source.sizes[axis:]), source.outer)]


def _trilu(step: Step) -> Sequence[Fact]:
    source = step.fact(0)
    step.without_rows(1)
    for axis in (-1, -2):
        _refuse(source, axis, "cuts a triangle out of")
    return [_settled(source.sizes, source.outer)]


# ---- linear algebra ------------------------------------------------------------------------------------------------


def _matmul(step: Step) -> Sequence[Fact]:
    return [_product_of(step.fact(0), step.fact(1), step)]


def _product_of(left: Fact, right: Fact, step: Step) -> Fact:
    _refuse(left, -1, "sums over")
    _refuse(right, -2 if right.rank > 1 else -1, "sums over")
    columns = right.sizes[-1:] if right.rank > 1 else (ONE,)
    rows = left.sizes[:-1] if left.rank > 1 else (ONE,)
    one = _settled((*rows, ONE), left.outer)
    other = _settled((*right.sizes[:-2], ONE, *columns), right.outer)
    found = _aligned([one, other], step)
    order = [place for place in range(found.rank) if left.rank > 1 or place != found.rank - 2]
    return _moved(found, order if right.rank > 1 else order[:-1])


def _gemm(step: Step) -> Sequence[Fact]:
    left, right = (
        _moved(step.fact(index), (1, 0)) if step.attribute(name, 0) else step.fact(index)
        for index, name in enumerate(("transA", "transB"))
    )
    found = _product_of(left, right, step)
    return [_aligned([found, step.fact(2)], step) if step.has(2) else found]


def _fused_matmul(step: Step) -> Sequence[Fact]:
    if step.attribute("transBatchA", 0) or step.attribute("transBatchB", 0):
        raise UnprovenRowsError("turns the rows in a way that is not followed")
    left, right = (
        _moved(fact, (*range(fact.rank - 2), fact.rank - 1, fact.rank - 2)) if step.attribute(name, 0) else fact
        for fact, name in ((step.fact(0), "transA"), (step.fact(1), "transB"))
    )
    return [_product_of(left, right, step)]


def _integer_matmul(step: Step) -> Sequence[Fact]:
    step.without_rows(*range(2, len(step.inputs)))
    return _matmul(step)


def _quantised_matmul(step: Step) -> Sequence[Fact]:
    """QLinearMatMul: of inputs 1 and 4, scaled by constants."""
    step.without_rows(1, 2, 4, 5, 6, 7)
    return [_product_of(step.fact(0), step.fact(3), step)]


def _quantised_pair(step: Step) -> Sequence[Fact]:
    """QLinearAdd and its like: of inputs 1 and 4, scaled by constants."""
    step.without_rows(1, 2, 4, 5, 6, 7)
    return [_aligned([step.fact(0), step.fact(3)], step)]


def _packed_matmul(step: Step) -> Sequence[Fact]:
    """A product with a matrix [K, N] that is packed: the last axis becomes N."""
    source = step.fact(0)
    step.without_rows(*range(1, len(step.inputs)))
    _refuse(source, -1, "sums over")
    return [_settled((*source.sizes[:-1], Size(step.attribute("N"))), source.outer)]


def _scaled(step: Step) -> Sequence[Fact]:
    """QuantizeLinear and DequantizeLinear, with scales that are constants."""
    source = step.fact(0)
    step.without_rows(1, 2)
    if source.has_rows and step.fact(1).rank and step.fact(1).sizes != (ONE,):
        _refuse(source, step.attribute("axis", 1), "scales, each in its own way,")
    return [_settled(source.sizes, source.outer)] if source.dims is not None else [UNKNOWN]


def _measured(_step: Step) -> Sequence[Fact]:
    raise MixedRowsError("measures one scale over all the rows of a run")


def _einsum(step: Step) -> Sequence[Fact]:
    terms, arrow, result = step.attribute("equation").replace(" ", "").partition("->")
    if not arrow or "." in terms:
        raise UnprovenRowsError("is written in a way that is not followed")
    lengths: dict[str, Size] = {}
    rows: set[str] = set()
    for term, index in zip(terms.split(","), range(len(step.inputs)), strict=True):
        fact = step.fact(index)
        if fact.outer != ONE or len(term) != fact.rank or len(set(term)) < len(term):
            raise UnprovenRowsError("is written in a way that is not followed")
        rows |= {term[fact.axis]} if fact.axis is not None else set()
        for letter, size in zip(term, fact.sizes, strict=True):
            if lengths.setdefault(letter, size) != size and (size.counts_rows or lengths[letter].counts_rows):
                raise UnprovenRowsError("combines the rows with an axis of another length")
    if len(rows) > 1 or not rows <= set(result):
        raise MixedRowsError("sums over the rows")
    return [_settled([lengths[letter] for letter in result])]


# ---- pictures and sound --------------------------------------------------------------------------------------------


def _convolution(step: Step, weight: int = 1) -> Sequence[Fact]:
    """[batch, channels, …] with weights [filters, channels of a group, …]."""
    source = step.fact(0)
    step.without_rows(*range(1, len(step.inputs)))
    _first_axis(source, 3)
    filters = step.fact(weight).dims
    kernel = step.attribute("kernel_shape") or ([] if filters is None else [size.number for size in filters[2:]])
    space = [_slid(step, place, size, kernel) for place, size in enumerate(source.sizes[2:])]
    return [_settled((source.sizes[0], step.fresh() if filters is None else filters[0], *space), source.outer)]


def _quantised_convolution(step: Step) -> Sequence[Fact]:
    return _convolution(step, weight=3)


def _slid(step: Step, place: int, size: Size, kernel: Sequence[int]) -> Size:
    """The length of an axis that a window slides along; known where everything about it is."""
    if not size.is_number or place >= len(kernel) or step.attribute("auto_pad", "NOTSET") != "NOTSET":
        return step.fresh()
    axes = len(kernel)
    pads = step.attribute("pads", [0] * (2 * axes))
    stride, spread = (step.attribute(name, [1] * axes)[place] for name in ("strides", "dilations"))
    room = size.number + pads[place] + pads[place + axes] - spread * (kernel[place] - 1) - 1
    if step.attribute("ceil_mode", 0) and room % stride:
        return step.fresh()
    return Size(room // stride + 1)


def _deconvolution(step: Step) -> Sequence[Fact]:
    source, filters = step.fact(0), step.fact(1).dims
    step.without_rows(*range(1, len(step.inputs)))
    _first_axis(source, 3)
    channels = step.fresh() if filters is None else filters[1] * Size(step.attribute("group", 1))
    return [_settled((source.sizes[0], channels, *(step.fresh() for _ in source.sizes[2:])), source.outer)]


def _pool(step: Step) -> Sequence[Fact]:
    source = step.fact(0)
    if step.is_used(1):  # indices of MaxPool count through the whole batch
        raise MixedRowsError("numbers places through all the rows")
    if step.attribute("channels_last", 0):
        raise UnprovenRowsError("is written in a way that is not followed")
    step.without_rows(*range(1, len(step.inputs)))
    _first_axis(source, 3)
    kernel = step.attribute("kernel_shape", ())
    space = [_slid(step, place, size, kernel) for place, size in enumerate(source.sizes[2:])]
    return [_settled((*source.sizes[:2], *space), source.outer)]


def _global_pool(step: Step) -> Sequence[Fact]:
    source = step.fact(0)
    step.without_rows(*range(1, len(step.inputs)))
    if step.attribute("channels_last", 0):
        raise UnprovenRowsError("is written in a way that is not followed")
    _first_axis(source, 3)
    return [_settled((*source.sizes[:2], *[ONE] * (source.rank - 2)), source.outer)]


def _resize(step: Step) -> Sequence[Fact]:
    """To sizes, or by scales; the rows must stay as many."""
    source = step.fact(0)
    step.without_rows(*range(1, len(step.inputs)))
    modes = step.attribute("coordinate_transformation_mode", "half_pixel")
    if modes not in STEADY or step.attribute("keep_aspect_ratio_policy", "stretch") != "stretch":
        raise UnprovenRowsError("resizes in a way that is not followed")
    axes = [axis % source.rank for axis in step.attribute("axes", range(source.rank))]
    wanted = step.sizes(3) if step.has(3) else None
    scales = step.sizes(1 if step.opset < 11 or step.node.op_type == "Upsample" else 2)
    if "scales" in step.node.attributes:
        scales = [_scale(scale) for scale in step.attribute("scales")]
    dims = list(source.sizes)
    for place, axis in enumerate(axes):
        size = None if not wanted else wanted[place]
        if axis == source.axis:
            if size != dims[axis] and (wanted or not scales or scales[place] != _scale(1.0)):
                raise UnprovenRowsError("may resize the axis of the rows")
        elif size is not None and size.counts_rows:
            raise UnprovenRowsError("resizes another axis to as many places as there are rows")
        else:
            dims[axis] = size or step.fresh()
    return [_settled(dims, source.outer)]


def _scale(number: float) -> Size:
    """As a constant holds it."""
    return opaque(repr(number), (), "real")


def _blocks(step: Step) -> Sequence[Fact]:
    """DepthToSpace and back: within each picture."""
    source = step.fact(0)
    _first_axis(source, 4)
    return [_settled((source.sizes[0], *(step.fresh() for _ in source.sizes[1:])), source.outer)]


def _grid_sample(step: Step) -> Sequence[Fact]:
    source, grid = step.fact(0), step.fact(1)
    _first_axis(source, 3)
    _alike(source, grid)
    return [_settled((*source.sizes[:2], *grid.sizes[1:-1]), source.outer)]


def _recurrent(step: Step) -> Sequence[Fact]:
    """[steps, batch, inputs], or with layout 1 [batch, steps, inputs]; its states begin with the directions."""
    source, batch_first = step.fact(0), step.attribute("layout", 0)
    step.without_rows(1, 2, 3, 7)
    if source.axis is None or source.axis != (0 if batch_first else 1) or source.rank != 3:
        raise UnprovenRowsError("takes the rows along another axis than its batch")
    for index, axis in ((4, 0), (5, 0 if batch_first else 1), (6, 0 if batch_first else 1)):
        fact = step.fact(index)
        if step.has(index) and (fact.axis != axis or fact.outer != source.outer):
            raise UnprovenRowsError("takes something beside its batch that has no rows, or has them along another axis")
    rows, steps = source.sizes[source.axis], source.sizes[1 if batch_first else 0]
    width = Size(step.attribute("hidden_size"))
    ways = Size(2 if step.attribute("direction", "forward") == "bidirectional" else 1)
    whole = (rows, steps, ways, width) if batch_first else (steps, ways, rows, width)
    last = (rows, ways, width) if batch_first else (ways, rows, width)
    return [_settled(dims, source.outer) for dims in (whole, last, last)]


# ---- attention -----------------------------------------------------------------------------------------------------


def _attention(step: Step) -> Sequence[Fact]:
    """Attention of the standard: queries, keys, values, mask; no cache."""
    if any(step.has(index) for index in range(4, len(step.inputs))):
        raise UnprovenRowsError("keeps a cache, which is not followed")
    query, key, value = (step.fact(index) for index in range(3))
    _all_rows_first(query, key, value)
    if step.has(3):
        _mask(step.fact(3), 4)
    if value.rank == 4:
        return [_settled((*query.sizes[:-1], value.sizes[-1]))]
    return [_settled((*query.sizes[:-1], step.fresh()))]


def _multi_head_attention(step: Step) -> Sequence[Fact]:
    """com.microsoft's: queries, keys, values, bias, padding mask [batch, keys], bias of scores; no cache."""
    if any(step.has(index) for index in range(6, len(step.inputs))):
        raise UnprovenRowsError("keeps a cache, which is not followed")
    query, key, value = (step.fact(index) for index in range(3))
    step.without_rows(3)
    _all_rows_first(query, key, value)
    if query.rank != 3:
        raise UnprovenRowsError("takes queries that are not followed")
    if step.has(4):
        _all_rows_first(step.fact(4))
    if step.has(5):
        _mask(step.fact(5), 4)
    return [_settled((*query.sizes[:2], value.sizes[-1] if value.rank == 3 else step.fresh()))]


def _fused_attention(step: Step) -> Sequence[Fact]:
    """com.microsoft's Attention: one input, packed weights, a mask of rank 2 to 4, bias of scores; no cache."""
    source = step.fact(0)
    if step.has(4):
        raise UnprovenRowsError("keeps a cache, which is not followed")
    step.without_rows(1, 2)
    _all_rows_first(source)
    if step.has(3):
        if step.fact(3).rank < 2:
            raise UnprovenRowsError("takes a mask that is not followed")
        _all_rows_first(step.fact(3))
    if step.has(5):
        _mask(step.fact(5), 4)
    return [_settled((*source.sizes[:2], step.fresh()))]


def _all_rows_first(*facts: Fact) -> None:
    if any(fact.axis != 0 or fact.sizes[0].per_row != ONE for fact in facts):
        raise UnprovenRowsError("takes the rows along another axis than the first")


def _mask(mask: Fact, rank: int) -> None:
    """Of scores [batch, heads, queries, keys]: with the rows along the first axis, or the same for all of them."""
    if mask.axis is not None:
        if mask.rank != rank:
            raise UnprovenRowsError("takes the rows along another axis than the first")
        _all_rows_first(mask)
    elif mask.rank == rank and mask.sizes[0] != ONE:
        raise UnprovenRowsError("combines the rows with an axis of another length")


def _rotary(step: Step) -> Sequence[Fact]:
    source = step.fact(0)
    _first_axis(source, 3)
    for index in range(1, len(step.inputs)):
        fact = step.fact(index)
        if fact.has_rows:
            _all_rows_first(fact)
        elif step.has(index) and (index == 3 or fact.rank == 3) and fact.sizes[0] != ONE:
            raise UnprovenRowsError("combines the rows with an axis of another length")
    return [_settled(source.sizes, source.outer)]


# ---- learned without layers ----------------------------------------------------------------------------------------


def _table(step: Step) -> Sequence[Fact]:
    """A scaler of columns [rows, columns]."""
    source = step.fact(0)
    _first_axis(source, 2)
    return [_settled(source.sizes, source.outer)]


def _judged(step: Step) -> Sequence[Fact]:
    """A regression or classes of [rows, columns]: what is last has the numbers, what is before it labels."""
    source = step.fact(0)
    _first_axis(source, 2)
    if source.rank != 2:
        raise UnprovenRowsError("takes what is no table")
    labels, numbers = _settled(source.sizes[:1], source.outer), (source.sizes[0], step.fresh())
    classes = step.node.op_type.endswith("Classifier")
    return [labels, _settled(numbers, source.outer)] if classes else [_settled(numbers, source.outer)]


def _columns(step: Step) -> Sequence[Fact]:
    """ArrayFeatureExtractor: some of the last axis."""
    source = step.fact(0)
    step.without_rows(1)
    _first_axis(source, 2)
    return [_settled((*source.sizes[:-1], step.fresh()), source.outer)]


_SAME = (
    "Abs Acos Acosh Asin Asinh Atan Atanh BitwiseNot Ceil Celu Clip Cos Cosh Elu Erf Exp Floor Gelu HardSigmoid "
    "HardSwish IsInf IsNaN LeakyRelu Log Mish Neg Not Reciprocal Relu Round Selu Shrink Sigmoid Sign Sin Sinh Softplus "
    "Softsign Sqrt Swish Tan Tanh ThresholdedRelu"
)
_BROADCAST = (
    "Add And BitShift BitwiseAnd BitwiseOr BitwiseXor Div Equal Greater GreaterOrEqual Less LessOrEqual Max Mean Min "
    "Mod Mul Or PRelu Pow Sub Sum Where Xor"
)
_REDUCE = (
    "ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceMax ReduceMean ReduceMin ReduceProd ReduceSum ReduceSumSquare"
)
_STANDARD: Mapping[str, Rule] = MappingProxyType(
    {
        **dict.fromkeys(_SAME.split(), _same),
        **dict.fromkeys(_BROADCAST.split(), _broadcast),
        **dict.fromkeys(_REDUCE.split(), _reduce),
        **dict.fromkeys(("ArgMax", "ArgMin"), _arg),
        **dict.fromkeys(("Softmax", "LogSoftmax", "Hardmax"), _normalise),
        **dict.fromkeys(("LayerNormalization", "RMSNormalization", "SimplifiedLayerNormalization"), _layer_norm),
        **dict.fromkeys(("InstanceNormalization", "GroupNormalization", "LRN"), _per_picture),
        **dict.fromkeys(("MaxPool", "AveragePool", "LpPool"), _pool),
        **dict.fromkeys(("GlobalAveragePool", "GlobalMaxPool", "GlobalLpPool"), _global_pool),
        **dict.fromkeys(("DepthToSpace", "SpaceToDepth"), _blocks),
        **dict.fromkeys(("Resize", "Upsample"), _resize),
        **dict.fromkeys(("LSTM", "GRU", "RNN"), _recurrent),
        **dict.fromkeys(("QuantizeLinear", "DequantizeLinear"), _scaled),
        **dict.fromkeys(("Conv", "ConvInteger"), _convolution),
        "Attention": _attention,
        "BatchNormalization": _batch_norm,
        "Cast": _cast,
        "CastLike": _like,
        "Compress": _compress,
        "Concat": _concat,
        "Constant": _constant,
        "ConstantOfShape": _constant_of_shape,
        "ConvTranspose": _deconvolution,
        "CumSum": _cumsum,
        "Dropout": _dropout,
        "DynamicQuantizeLinear": _measured,
        "Einsum": _einsum,
        "Expand": _expand,
        "Flatten": _flatten,
        "Gather": _gather,
        "GatherElements": _gather_elements,
        "GatherND": _gather_nd,
        "Gemm": _gemm,
        "GridSample": _grid_sample,
        "Identity": _identity,
        "LpNormalization": _lp_norm,
        "MatMul": _matmul,
        "MatMulInteger": _integer_matmul,
        "MeanVarianceNormalization": _mean_variance,
        "OneHot": _one_hot,
        "Pad": _pad,
        "QLinearConv": _quantised_convolution,
        "QLinearMatMul": _quantised_matmul,
        "Range": _range,
        "Reshape": _reshape,
        "RotaryEmbedding": _rotary,
        "ScatterElements": _scatter_elements,
        "Shape": _shape,
        "Size": _size,
        "Slice": _slice,
        "Split": _split,
        "Squeeze": _squeeze,
        "Tile": _tile,
        "TopK": _top,
        "Transpose": _transpose,
        "Trilu": _trilu,
        "Unsqueeze": _unsqueeze,
    }
)
_OF_MICROSOFT: Mapping[str, Rule] = MappingProxyType(
    {
        **dict.fromkeys(("Gelu", "QuickGelu", "QLinearSigmoid", "QLinearLeakyRelu"), _same),
        **dict.fromkeys(("BiasGelu", "FastGelu"), _broadcast),
        **dict.fromkeys(("SkipLayerNormalization", "SkipSimplifiedLayerNormalization"), _skip_norm),
        **dict.fromkeys(("QLinearAdd", "QLinearMul"), _quantised_pair),
        **dict.fromkeys(("QuantizeLinear", "DequantizeLinear"), _scaled),
        **dict.fromkeys(("MatMulNBits", "MatMulBnb4"), _packed_matmul),
        **dict.fromkeys(("DynamicQuantizeMatMul", "DynamicQuantizeLSTM"), _measured),
        "Attention": _fused_attention,
        "FusedConv": _convolution,
        "FusedMatMul": _fused_matmul,
        "MatMulIntegerToFloat": _integer_matmul,
        "MultiHeadAttention": _multi_head_attention,
        "QLinearAveragePool": _pool,
        "QLinearGlobalAveragePool": _global_pool,
    }
)
_LEARNED: Mapping[str, Rule] = MappingProxyType(
    {
        **dict.fromkeys(("Binarizer", "Imputer", "LabelEncoder", "Normalizer", "Scaler"), _table),
        **dict.fromkeys(
            (
                "LinearClassifier",
                "LinearRegressor",
                "SVMClassifier",
                "SVMRegressor",
                "TreeEnsembleClassifier",
                "TreeEnsembleRegressor",
            ),
            _judged,
        ),
        "ArrayFeatureExtractor": _columns,
    }
)
RULES: Mapping[tuple[str, str], Rule] = MappingProxyType(
    {
        (domain, name): rule
        for domain, rules in (("", _STANDARD), (MICROSOFT, _OF_MICROSOFT), (LEARNED, _LEARNED))
        for name, rule in rules.items()
    }
)
MEASURING = frozenset(name for (_, name), rule in RULES.items() if rule is _measured)
COUNTED_INPUTS: Mapping[str, frozenset[int]] = MappingProxyType(
    {
        "ConstantOfShape": frozenset({0}),
        "Expand": frozenset({1}),
        "Reshape": frozenset({1}),
        "Resize": frozenset({3}),
        "Slice": frozenset({1, 2}),
        "Tile": frozenset({1}),
    }
)
"""Where the number of rows may come in, since it decides no more than a shape there."""
