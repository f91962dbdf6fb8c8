"""A constant matrix of the graph, and its numbers in fewer bits.

Every function that returns a tensor returns a lazy one: it is computed when the engine is written, from some rows of
the matrix at a time, so that only its result is ever held whole, and the grid of one matrix in blocks (`Grids`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]
Grid = tuple[Floats, Floats]

PART_ELEMENTS = 1 << 22  # 16 MiB of rows at a time
CHANNEL_LIMIT = 127
SEARCHED_BITS_MAX = 4
NARROWER = (0.94, 0.88, 0.82, 0.76, 0.7)
"""Shares of a block's range that are tried: what lies outside is cut, what lies inside is met more closely."""
REFITS = 3


@dataclass(frozen=True, slots=True, eq=False)
class Matrix:
    """`value` is constant; `is_turned`: it lies [inputs, outputs], else [outputs, inputs].

    `importance` [inputs]: the mean square of what each input is multiplied with, if that is known.
    """

    value: ir.Value
    is_turned: bool
    importance: Floats | None = None

    @property
    def name(self) -> str:
        return str(self.value.name)

    @property
    def tensor(self) -> ir.TensorProtocol:
        assert self.value.const_value is not None
        return self.value.const_value

    @property
    def outputs(self) -> int:
        return self._dims[1 if self.is_turned else 0]

    @property
    def inputs(self) -> int:
        return self._dims[0 if self.is_turned else 1]

    @property
    def _dims(self) -> tuple[int, ...]:
        return tuple(int(dim) for dim in self.tensor.shape.numpy())

    def parts(self) -> Iterator[tuple[slice, Floats]]:
        """Which outputs, and their numbers [outputs, inputs]."""
        lying = self.tensor.numpy()
        count = max(1, PART_ELEMENTS // max(self.inputs, 1))
        for start in range(0, self.outputs, count):
            place = slice(start, start + count)
            rows = lying[:, place].T if self.is_turned else lying[place]
            yield place, np.ascontiguousarray(rows, dtype=np.float32)

    def compute(
        self, dims: tuple[int, ...], dtype: ir.DataType, function: Callable[[Floats], npt.NDArray[Any]]
    ) -> ir.LazyTensor:
        """A tensor of `dims`, [outputs, …], of what `function` gives for rows [some outputs, inputs]."""

        def make() -> npt.NDArray[Any]:
            result = np.empty(dims, dtype.numpy())
            for place, rows in self.parts():
                result[place] = function(rows)
            return result

        return _lazy(self, dims, dtype, make)

    def is_same(self, other: Matrix) -> bool:
        """Whether the numbers and what they matter are the very same ones."""
        return self.value is other.value and self.is_turned == other.is_turned and self.importance is other.importance


@dataclass(frozen=True, slots=True)
class Blocks:
    """As MatMulNBits and GatherBlockQuantized keep a matrix: `size` inputs of an output share a scale and a zero.

    A number is (code - zero) · scale. Symmetric: zero is half the range, and each block's largest number is met. The
    last block of an output is filled up with zeros.
    """

    bits: int
    size: int
    symmetric: bool

    def __str__(self) -> str:
        return f"int{self.bits} in {'' if self.symmetric else 'asymmetric '}blocks of {self.size}"

    def count(self, matrix: Matrix) -> int:
        """Blocks of an output."""
        return -(-matrix.inputs // self.size)

    def codes(self, matrix: Matrix, grids: Grids) -> ir.LazyTensor:
        """uint8 [outputs, blocks, bytes of a block]; of two 4-bit codes the first is the lower half."""

        def make(dims: tuple[int, ...]) -> Bytes:
            scales, zeros = grids.of(self, matrix)
            result = np.empty(dims, np.uint8)
            for place, rows in matrix.parts():
                nearest = self._nearest(self._blocks(rows), (scales[place], zeros[place]))
                result[place] = self._packed(nearest.astype(np.uint8))
            return result

        dims = (matrix.outputs, self.count(matrix), self.size * self.bits // 8)
        return _lazy(matrix, dims, ir.DataType.UINT8, lambda: make(dims))

    def scales(self, matrix: Matrix, grids: Grids) -> ir.LazyTensor:
        """float32 [outputs, blocks]."""
        dims = (matrix.outputs, self.count(matrix))
        return _lazy(matrix, dims, ir.DataType.FLOAT, lambda: grids.of(self, matrix)[0])

    def zeros(self, matrix: Matrix, grids: Grids) -> ir.LazyTensor:
        """uint8 [outputs, bytes of the codes of all blocks], packed as codes are."""
        count = self.count(matrix)

        def make() -> Bytes:
            zeros = grids.of(self, matrix)[1].astype(np.uint8)
            return self._packed(np.pad(zeros, ((0, 0), (0, -count % (8 // self.bits)))))

        return _lazy(matrix, (matrix.outputs, -(-count * self.bits // 8)), ir.DataType.UINT8, make)

    def zero_column(self, matrix: Matrix, grids: Grids) -> ir.LazyTensor:
        """uint8 [outputs, blocks, 1]: a byte each, as GatherBlockQuantized reads the zeros of an axis of length 1."""
        dims = (matrix.outputs, self.count(matrix), 1)
        return _lazy(matrix, dims, ir.DataType.UINT8, lambda: grids.of(self, matrix)[1].astype(np.uint8)[..., None])

    def grid(self, matrix: Matrix) -> Grid:
        """Scales and zeros of the whole matrix, float32 [outputs, blocks] each; not to be written to."""
        dims = (matrix.outputs, self.count(matrix))
        scales, zeros = np.empty(dims, np.float32), np.empty(dims, np.float32)
        for place, rows in matrix.parts():
            scales[place], zeros[place] = self._grid(self._blocks(rows), matrix)
        scales.flags.writeable = zeros.flags.writeable = False
        return scales, zeros

    @property
    def _top(self) -> int:
        return (1 << self.bits) - 1

    def _blocks(self, rows: Floats) -> Floats:
        filled = np.pad(rows, ((0, 0), (0, -rows.shape[1] % self.size)))
        return filled.reshape(len(rows), -1, self.size)

    def _grid(self, blocks: Floats, matrix: Matrix) -> Grid:
        """Scales and zeros, [outputs, blocks] each: of those that are tried, what loses least where it matters."""
        if matrix.importance is None or self.bits > SEARCHED_BITS_MAX:
            return self._candidate(blocks, 1.0)
        weights = np.pad(matrix.importance, (0, -matrix.inputs % self.size)).reshape(-1, self.size)
        best = self._candidate(blocks, 1.0)
        lost = self._loss(blocks, best, weights)
        for factor in self._factors:
            best, lost = self._better(blocks, weights, (best, lost), self._candidate(blocks, factor))
        for _ in range(REFITS):
            best, lost = self._better(blocks, weights, (best, lost), self._refitted(blocks, best, weights))
        return best

    def _better(self, blocks: Floats, weights: Floats, best: tuple[Grid, Floats], other: Grid) -> tuple[Grid, Floats]:
        """Block by block, the grid that loses less, and what it loses."""
        (scales, zeros), lost = best
        found = self._loss(blocks, other, weights)
        is_better = found < lost
        return (
            (np.where(is_better, other[0], scales), np.where(is_better, other[1], zeros)),
            np.minimum(found, lost),
        )

    def _loss(self, blocks: Floats, grid: Grid, weights: Floats) -> Floats:
        scales, zeros = grid
        missed = (self._nearest(blocks, grid) - zeros[..., None]) * scales[..., None] - blocks
        lost: Floats = np.einsum("obs,obs,bs->ob", missed, missed, weights)
        return lost

    def _refitted(self, blocks: Floats, grid: Grid, weights: Floats) -> Grid:
        """The scales that suit the codes best, by least squares; the zeros as they are."""
        scales, zeros = grid
        codes = self._nearest(blocks, grid) - zeros[..., None]
        squares = np.einsum("obs,obs,bs->ob", codes, codes, weights)
        products = np.einsum("obs,obs,bs->ob", codes, blocks, weights)
        refitted = np.divide(products, squares, out=scales.copy(), where=squares > 0)
        return _divisor(refitted), zeros

    @property
    def _factors(self) -> tuple[float, ...]:
        """A negative one puts the longer side of symmetric codes on the other side."""
        turned = -(1 + 1 / self._middle)
        return (*NARROWER, turned, turned * NARROWER[0]) if self.symmetric else NARROWER

    @property
    def _middle(self) -> int:
        return 1 << (self.bits - 1)

    def _candidate(self, blocks: Floats, factor: float) -> Grid:
        """The grid over the range of each block times `factor`."""
        if self.symmetric:
            largest = np.abs(blocks).argmax(axis=-1, keepdims=True)
            ends = np.take_along_axis(blocks, largest, axis=-1)[..., 0]
            scales = _divisor(ends * np.float32(factor / -self._middle))
            return scales, np.full(scales.shape, self._middle, np.float32)
        low, high = np.minimum(blocks.min(-1), 0), np.maximum(blocks.max(-1), 0)
        scales = _divisor((high - low) * np.float32(factor / self._top))
        return scales, np.clip(np.rint(-low * np.float32(factor) / scales), 0, self._top)

    def _nearest(self, blocks: Floats, grid: Grid) -> Floats:
        scales, zeros = grid
        codes: Floats = np.clip(np.rint(blocks / scales[..., None]) + zeros[..., None], 0, self._top)
        return codes

    def _packed(self, codes: Bytes) -> Bytes:
        return codes if self.bits == 8 else np.bitwise_or(codes[..., 0::2], codes[..., 1::2] << 4, dtype=np.uint8)


class Grids:
    """Remembers the grid of the matrix that was asked for last, and of no other.

    Codes, scales and zeros of a matrix are written one after the other, and the search for its grid takes longer than
    all the rest of writing it.
    """

    def __init__(self) -> None:
        self._last: tuple[Blocks, Matrix, Grid] | None = None

    def of(self, form: Blocks, matrix: Matrix) -> Grid:
        """`form.grid(matrix)`."""
        if self._last is None or self._last[0] != form or not self._last[1].is_same(matrix):
            self._last = None  # before the next is made
            self._last = (form, matrix, form.grid(matrix))
        return self._last[2]


def channel_codes(matrix: Matrix) -> ir.LazyTensor:
    """int8 [inputs, outputs], as MatMulIntegerToFloat takes them, -127 to 127."""
    dims = (matrix.outputs, matrix.inputs)
    lying = matrix.compute(dims, ir.DataType.INT8, _channel_codes)

    return _lazy(matrix, dims[::-1], ir.DataType.INT8, lambda: np.ascontiguousarray(lying.numpy().T))


def channel_scales(matrix: Matrix) -> ir.LazyTensor:
    """float32 [outputs]."""
    return matrix.compute((matrix.outputs,), ir.DataType.FLOAT, _channel_scales)


def channel_sums(matrix: Matrix) -> ir.LazyTensor:
    """float32 [outputs]: of the numbers that codes and scales stand for, over the inputs."""

    def of(rows: Floats) -> Floats:
        sums: Floats = (_channel_codes(rows).sum(axis=1, dtype=np.int32) * _channel_scales(rows)).astype(np.float32)
        return sums

    return matrix.compute((matrix.outputs,), ir.DataType.FLOAT, of)


def _lazy(
    matrix: Matrix, dims: tuple[int, ...], dtype: ir.DataType, make: Callable[[], npt.NDArray[Any]]
) -> ir.LazyTensor:
    return ir.LazyTensor(lambda: ir.Tensor(make()), dtype, ir.Shape(dims), name=matrix.name)


def _channel_codes(rows: Floats) -> npt.NDArray[np.int8]:
    codes: npt.NDArray[np.int8] = np.rint(rows / _channel_scales(rows)[:, None]).astype(np.int8)
    return codes


def _channel_scales(rows: Floats) -> Floats:
    return _divisor(np.abs(rows).max(axis=1) / np.float32(CHANNEL_LIMIT))


def _divisor(scales: Floats) -> Floats:
    """1 for the scale of zeros alone."""
    return np.where(scales == 0, np.float32(1), scales)
