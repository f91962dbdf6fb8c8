"""What is known of a value before a run: its axes as products of sizes, and which of them has the rows of the calls.

A call's inputs have their rows along the first axis; how many, only a run knows. A value either has them along one
axis, its part of each row computed from that row alone, or is the same whatever the rows hold and however many there
are.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import numpy.typing as npt

    Contents = npt.NDArray[Any]  # of dtype object: a Size each

NAME_CHARS_MAX = 80
CONTENT_ELEMENTS_MAX = 1024  # shapes, axes, sizes of windows; tables of positions are weights like any other


class UnprovenRowsError(Exception):
    """The node is not shown to compute each row by itself. The text is a clause without the node's name."""


class MixedRowsError(UnprovenRowsError):
    """It is shown to let rows meet."""


@dataclass(frozen=True, slots=True, order=True)
class Symbol:
    """A number that only a run knows. size: of an axis, so never negative; whole; real: anything."""

    name: str
    kind: Literal["size", "whole", "real"] = "size"
    counts_rows: bool = False


@dataclass(frozen=True, slots=True)
class Size:
    """A product: a whole number times symbols, in order."""

    number: int
    symbols: tuple[Symbol, ...] = ()

    @property
    def counts_rows(self) -> bool:
        return any(symbol.counts_rows for symbol in self.symbols)

    @property
    def is_number(self) -> bool:
        return not self.symbols

    @property
    def per_row(self) -> Size | None:
        """What the rows are multiplied by, itself the same for any number of them; None where it is nothing of that."""
        rest = divided(self, ROWS)
        return None if rest is None or rest.counts_rows else rest

    def __mul__(self, other: Size) -> Size:
        number = self.number * other.number
        return Size(number, tuple(sorted(self.symbols + other.symbols)) if number else ())

    def __str__(self) -> str:
        return "*".join([str(self.number), *(symbol.name for symbol in self.symbols)])


ONE = Size(1)
ROWS = Size(1, (Symbol("rows", counts_rows=True),))


def product(sizes: Iterable[Size]) -> Size:
    result = ONE
    for size in sizes:
        result = result * size
    return result


def divided(whole: Size, by: Size) -> Size | None:
    """The quotient where it is sure to be exact."""
    rest = Counter(whole.symbols)
    rest.subtract(by.symbols)
    if by.number == 0 or whole.number % by.number or any(count < 0 for count in rest.values()):
        return None
    return Size(whole.number // by.number, tuple(sorted(rest.elements())))


def opaque(operation: str, operands: Sequence[Size], kind: Literal["size", "whole", "real"]) -> Size:
    """What `operation` makes of `operands`: the same symbol for the same of both."""
    name = f"{operation}({','.join(map(str, operands))})"
    if len(name) > NAME_CHARS_MAX:
        name = f"{operation}({hashlib.sha256(name.encode()).hexdigest()})"
    return Size(1, (Symbol(name, kind, any(operand.counts_rows for operand in operands)),))


@dataclass(frozen=True, slots=True)
class Fact:
    """dims None: not even the rank is known; then it has no rows. content: its numbers, where shapes decide them.

    axis: where the rows are, None where there are none; along it lie `outer` blocks, in each the rows one by one.
    """

    dims: tuple[Size, ...] | None = None
    axis: int | None = None
    outer: Size = ONE
    content: Contents | None = None

    @property
    def has_rows(self) -> bool:
        return self.axis is not None

    @property
    def counts_rows(self) -> bool:
        return self.content is not None and any(size.counts_rows for size in self.content.reshape(-1))

    @property
    def rank(self) -> int:
        """Raises UnprovenRowsError where it is not known."""
        return len(self.sizes)

    @property
    def sizes(self) -> tuple[Size, ...]:
        """Raises UnprovenRowsError where they are not known."""
        if self.dims is None:
            raise UnprovenRowsError("takes a value of unknown rank")
        return self.dims


UNKNOWN = Fact()


def of_sizes(items: Sequence[Size]) -> Contents:
    content = np.empty(len(items), object)
    content[:] = items
    return content


def of_array(array: npt.NDArray[Any]) -> Fact:
    """A constant; its numbers only if they are few."""
    dims = tuple(Size(size) for size in array.shape)
    if array.size > CONTENT_ELEMENTS_MAX or array.dtype.kind not in "iubf":
        return Fact(dims)
    content = of_sizes([_constant(item) for item in array.reshape(-1).tolist()])
    return Fact(dims, content=content.reshape(array.shape))


def of_content(content: Contents | Size) -> Fact:
    content = np.asarray(content, object)
    return Fact(tuple(Size(size) for size in content.shape), content=content)


def _constant(item: float) -> Size:
    return Size(int(item)) if isinstance(item, int) else opaque(repr(item), (), "real")
