"""What can be known of a value without running the model: its dimensions, and its content where shapes decide it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import numpy.typing as npt

    Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Symbol:
    """A dimension that only a step knows. Arithmetic keeps it where it is an identity and forgets it elsewhere."""

    name: str

    def __mul__(self, other: Dim) -> Dim:
        return self if other == 1 else UNKNOWN_DIM

    def __add__(self, other: Dim) -> Dim:
        return self if other == 0 else UNKNOWN_DIM

    def __sub__(self, other: Dim) -> Dim:
        return self if other == 0 else UNKNOWN_DIM

    def __floordiv__(self, other: Dim) -> Dim:
        return self if other == 1 else UNKNOWN_DIM

    def __rsub__(self, _other: Dim) -> Dim:
        return UNKNOWN_DIM

    def __rfloordiv__(self, _other: Dim) -> Dim:
        return UNKNOWN_DIM

    __rmul__ = __mul__
    __radd__ = __add__
    __truediv__ = __floordiv__
    __rtruediv__ = __rfloordiv__


Dim = int | Symbol

UNKNOWN_DIM = Symbol("?")
TOKENS = Symbol("tokens")
"""The packed axis: every new token of every sequence of a step."""
ROWS = Symbol("rows")
"""The tokens of a step whose logits are wanted."""
TOKEN_AXES = frozenset({TOKENS, ROWS})


@dataclass(frozen=True, slots=True)
class Fact:
    """dims None: not even the rank is known. content has dtype object when a Symbol is in it."""

    dims: tuple[Dim, ...] | None = None
    content: Array | None = None

    @property
    def is_numeric(self) -> bool:
        return self.content is not None and self.content.dtype != object

    @property
    def is_symbolic(self) -> bool:
        """The content counts something that only a step knows."""
        return self.content is not None and self.content.dtype == object

    @property
    def token_axes(self) -> tuple[int, ...]:
        return tuple(axis for axis, dim in enumerate(self.dims or ()) if dim in TOKEN_AXES)

    @property
    def may_hold_tokens(self) -> bool:
        return self.dims is None or bool(self.token_axes) or UNKNOWN_DIM in self.dims


UNKNOWN = Fact()


def of_array(array: Array) -> Fact:
    return Fact(tuple(array.shape), array)


def of_dims(dims: Iterable[Dim]) -> Fact:
    return Fact(tuple(dims))


def shape_content(dims: Sequence[Dim]) -> Array:
    """The result of a Shape node: int64, or object when a dimension is symbolic."""
    if all(isinstance(dim, int) for dim in dims):
        return np.array(dims, np.int64)
    content = np.empty(len(dims), object)
    content[:] = dims
    return content


def narrow(content: Array) -> Array:
    """`content` as int64 once no Symbol is left in it."""
    if content.dtype == object and all(isinstance(item, int) for item in content.reshape(-1)):
        return content.astype(np.int64)
    return content


def elements(dims: Sequence[Dim]) -> int | None:
    """Number of elements, or None if a dimension is symbolic."""
    if all(isinstance(dim, int) for dim in dims):
        return math.prod(dim for dim in dims if isinstance(dim, int))
    return None


def product(dims: Sequence[Dim]) -> tuple[int, tuple[Symbol, ...]]:
    """The whole-number factor and the sorted symbols of a product of dimensions."""
    number = math.prod(dim for dim in dims if isinstance(dim, int))
    symbols = sorted((dim for dim in dims if isinstance(dim, Symbol)), key=lambda symbol: symbol.name)
    return number, tuple(symbols)
