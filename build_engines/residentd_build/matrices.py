"""A constant matrix of the graph, and its numbers in fewer bits.

Every function that returns a tensor returns a lazy one: it is computed when the engine is written, from some rows of
the matrix at a time, so that only its result is ever held whole.
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

PART_ELEMENTS = 1 << 22  # 16 MiB of rows at a time
CHANNEL_LIMIT = 127


@dataclass(frozen=True, slots=True)
class Matrix:
    """`value` is constant; `is_turned`: it lies [inputs, outputs], else [outputs, inputs]."""

    value: ir.Value
    is_turned: bool

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

        def make() -> ir.Tensor[Any]:
            result = np.empty(dims, dtype.numpy())
            for place, rows in self.parts():
                result[place] = function(rows)
            return ir.Tensor(result)

        return ir.LazyTensor(make, dtype, ir.Shape(dims), name=self.name)


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

    def codes(self, matrix: Matrix) -> ir.LazyTensor:
        """uint8 [outputs, blocks, bytes of a block]; of two 4-bit codes the first is the lower half."""

        def of(rows: Floats) -> Bytes:
            blocks = self._blocks(rows)
            scales, zeros = self._grid(blocks)
            found = np.rint(blocks / scales[..., None]) + zeros[..., None]
            return self._packed(np.clip(found, 0, self._top).astype(np.uint8))

        return matrix.compute((matrix.outputs, self.count(matrix), self.size * self.bits // 8), ir.DataType.UINT8, of)

    def scales(self, matrix: Matrix) -> ir.LazyTensor:
        """float32 [outputs, blocks]."""
        dims = (matrix.outputs, self.count(matrix))
        return matrix.compute(dims, ir.DataType.FLOAT, lambda rows: self._grid(self._blocks(rows))[0])

    def zeros(self, matrix: Matrix) -> ir.LazyTensor:
        """uint8 [outputs, bytes of the codes of all blocks], packed as codes are."""
        count = self.count(matrix)

        def of(rows: Floats) -> Bytes:
            zeros = self._grid(self._blocks(rows))[1].astype(np.uint8)
            return self._packed(np.pad(zeros, ((0, 0), (0, -count % (8 // self.bits)))))

        return matrix.compute((matrix.outputs, -(-count * self.bits // 8)), ir.DataType.UINT8, of)

    def zero_column(self, matrix: Matrix) -> ir.LazyTensor:
        """uint8 [outputs, blocks, 1]: a byte each, as GatherBlockQuantized reads the zeros of an axis of length 1."""
        dims = (matrix.outputs, self.count(matrix), 1)
        return matrix.compute(dims, ir.DataType.UINT8, lambda rows: self._grid(self._blocks(rows))[1][..., None])

    @property
    def _top(self) -> int:
        return (1 << self.bits) - 1

    def _blocks(self, rows: Floats) -> Floats:
        filled = np.pad(rows, ((0, 0), (0, -rows.shape[1] % self.size)))
        return filled.reshape(len(rows), -1, self.size)

    def _grid(self, blocks: Floats) -> tuple[Floats, Floats]:
        """Scales and zeros, [outputs, blocks] each."""
        if self.symmetric:
            middle = 1 << (self.bits - 1)
            largest = np.abs(blocks).argmax(axis=-1, keepdims=True)
            scales = np.take_along_axis(blocks, largest, axis=-1)[..., 0] / np.float32(-middle)
            return _divisor(scales), np.full(scales.shape, middle, np.float32)
        low, high = np.minimum(blocks.min(-1), 0), np.maximum(blocks.max(-1), 0)
        scales = _divisor((high - low) / np.float32(self._top))
        return scales, np.clip(np.rint(-low / scales), 0, self._top)

    def _packed(self, codes: Bytes) -> Bytes:
        return codes if self.bits == 8 else np.bitwise_or(codes[..., 0::2], codes[..., 1::2] << 4, dtype=np.uint8)


def channel_codes(matrix: Matrix) -> ir.LazyTensor:
    """int8 [inputs, outputs], as MatMulIntegerToFloat takes them, -127 to 127."""
    dims = (matrix.outputs, matrix.inputs)
    lying = matrix.compute(dims, ir.DataType.INT8, _channel_codes)

    def turn() -> ir.Tensor[Any]:
        return ir.Tensor(np.ascontiguousarray(lying.numpy().T))

    return ir.LazyTensor(turn, ir.DataType.INT8, ir.Shape(dims[::-1]), name=matrix.name)


def channel_scales(matrix: Matrix) -> ir.LazyTensor:
    """float32 [outputs]."""
    return matrix.compute((matrix.outputs,), ir.DataType.FLOAT, _channel_scales)


def channel_sums(matrix: Matrix) -> ir.LazyTensor:
    """float32 [outputs]: of the numbers that codes and scales stand for, over the inputs."""

    def of(rows: Floats) -> Floats:
        sums: Floats = (_channel_codes(rows).sum(axis=1, dtype=np.int32) * _channel_scales(rows)).astype(np.float32)
        return sums

    return matrix.compute((matrix.outputs,), ir.DataType.FLOAT, of)


def _channel_codes(rows: Floats) -> npt.NDArray[np.int8]:
    codes: npt.NDArray[np.int8] = np.rint(rows / _channel_scales(rows)[:, None]).astype(np.int8)
    return codes


def _channel_scales(rows: Floats) -> Floats:
    return _divisor(np.abs(rows).max(axis=1) / np.float32(CHANNEL_LIMIT))


def _divisor(scales: Floats) -> Floats:
    """1 for the scale of zeros alone."""
    return np.where(scales == 0, np.float32(1), scales)
