"""The numbers of a matrix in 8 and 4 bits, decoded as the operators' documentation says."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from residentd_build import matrices
from residentd_build.matrices import Blocks, Grids, Matrix, channel_codes, channel_scales, channel_sums

Floats = npt.NDArray[np.float32]
FORMS = [Blocks(bits, size, symmetric) for bits in (4, 8) for size in (32, 128) for symmetric in (True, False)]


def matrix_of(rows: Floats, *, is_turned: bool = False) -> Matrix:
    lying = np.ascontiguousarray(rows.T if is_turned else rows)
    return Matrix(ir.Value(name="matrix", const_value=ir.tensor(lying)), is_turned)


def decoded(form: Blocks, matrix: Matrix) -> Floats:
    """By the text of MatMulNBits: (code - zero) · scale, the first of two codes in the lower half of a byte."""
    codes, scales = form.codes(matrix, Grids()).numpy(), form.scales(matrix, Grids()).numpy()
    if form.symmetric:
        zeros = np.full(scales.shape, 1 << (form.bits - 1))
    else:
        zeros = unpacked(form.zeros(matrix, Grids()).numpy(), form.bits)[:, : scales.shape[1]]
    numbers = (unpacked(codes, form.bits).astype(np.float32) - zeros[..., None]) * scales[..., None]
    return numbers.reshape(matrix.outputs, -1)[:, : matrix.inputs].astype(np.float32)


def unpacked(codes: npt.NDArray[np.uint8], bits: int) -> npt.NDArray[np.uint8]:
    if bits == 8:
        return codes
    return np.stack([codes & 15, codes >> 4], axis=-1).reshape(*codes.shape[:-1], -1)


@st.composite
def rows(draw: st.DrawFn) -> Floats:
    """Normal numbers of some magnitude; now and then an output of zeros, of one sign, or with one large number."""
    generator = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    outputs, inputs = draw(st.integers(1, 9)), draw(st.integers(1, 300))
    found = generator.standard_normal((outputs, inputs)) * 10.0 ** draw(st.integers(-6, 4))
    found[0] *= draw(st.sampled_from([0, 1]))
    found[-1] = draw(st.sampled_from([found[-1], np.abs(found[-1]), -np.abs(found[-1])]))
    found[outputs // 2, inputs // 2] *= draw(st.sampled_from([1, 1000]))
    return found.astype(np.float32)


def grid(form: Blocks, matrix: Matrix) -> Floats:
    """Every number that each place could stand for, [2 ** bits, outputs, inputs]."""
    scales = form.scales(matrix, Grids()).numpy()
    zeros = np.full(scales.shape, 1 << (form.bits - 1), np.float32)
    if not form.symmetric:
        zeros = form.zero_column(matrix, Grids()).numpy()[..., 0].astype(np.float32)
    codes = np.arange(1 << form.bits, dtype=np.float32)[:, None, None]
    return ((codes - zeros) * scales).repeat(form.size, axis=2)[..., : matrix.inputs]


@pytest.mark.parametrize("form", FORMS, ids=str)
@given(numbers=rows())
@settings(max_examples=30, deadline=None)
def test_a_decoded_number_is_the_nearest_of_its_grid_and_less_than_a_step_away(form: Blocks, numbers: Floats) -> None:
    """Half a step but at the ends, where a symmetric code range and a rounded zero leave up to another half."""
    matrix = matrix_of(numbers)
    rounding = np.abs(numbers) * 2**-21  # a quotient and a product in float32, and the half of a tie
    found = np.abs(decoded(form, matrix) - numbers)
    assert (found <= np.abs(grid(form, matrix) - numbers).min(axis=0) + rounding).all()
    steps = np.abs(form.scales(matrix, Grids()).numpy()).repeat(form.size, axis=1)[:, : matrix.inputs]
    assert (found <= steps + rounding).all()


@pytest.mark.parametrize("form", FORMS, ids=str)
@given(numbers=rows())
@settings(max_examples=20, deadline=None)
def test_zero_is_met_exactly(form: Blocks, numbers: Floats) -> None:
    """A weight of zero stays zero, whatever lies beside it."""
    numbers[:, ::3] = 0
    assert (decoded(form, matrix_of(numbers))[:, ::3] == 0).all()


@pytest.mark.parametrize("bits", [4, 8])
@given(numbers=rows())
@settings(max_examples=20, deadline=None)
def test_the_largest_number_of_a_symmetric_block_is_met(bits: int, numbers: Floats) -> None:
    """It is the end of the range, so nothing is cut on its side."""
    form = Blocks(bits, 32, symmetric=True)
    filled = np.pad(numbers, ((0, 0), (0, -numbers.shape[1] % 32))).reshape(len(numbers), -1, 32)
    found = np.pad(decoded(form, matrix_of(numbers)), ((0, 0), (0, -numbers.shape[1] % 32))).reshape(filled.shape)
    largest = np.abs(filled).argmax(axis=-1)[..., None]
    assert np.allclose(
        np.take_along_axis(found, largest, -1), np.take_along_axis(filled, largest, -1), rtol=2**-21, atol=0
    )


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_sizes_are_those_that_the_kernel_wants(form: Blocks) -> None:
    """[N, blocks, bytes], [N, blocks] and packed zeros, for inputs that fill no whole block."""
    matrix = matrix_of(np.ones((3, 200), np.float32))
    blocks = {32: 7, 128: 2}[form.size]
    assert form.codes(matrix, Grids()).shape == (3, blocks, form.size * form.bits // 8)
    assert form.scales(matrix, Grids()).shape == (3, blocks)
    assert form.zeros(matrix, Grids()).shape == (3, (blocks * form.bits + 7) // 8)
    for tensor in (
        form.codes(matrix, Grids()),
        form.scales(matrix, Grids()),
        form.zeros(matrix, Grids()),
        form.zero_column(matrix, Grids()),
    ):
        assert tensor.numpy().shape == tuple(tensor.shape.numpy())
        assert tensor.numpy().dtype == tensor.dtype.numpy()


@given(numbers=rows())
@settings(max_examples=40, deadline=None)
def test_a_channel_code_is_the_nearest_of_its_scale(numbers: Floats) -> None:
    """int8 [inputs, outputs] within -127 and 127; the sum over the inputs is that of the decoded numbers."""
    matrix = matrix_of(numbers)
    codes, scales = channel_codes(matrix).numpy(), channel_scales(matrix).numpy()
    assert codes.shape == (matrix.inputs, matrix.outputs)
    assert np.abs(codes.astype(np.int64)).max() <= 127
    exact = codes.T.astype(np.float64) * scales[:, None]
    assert (np.abs(exact - numbers) <= scales[:, None] * 0.5 + np.abs(numbers) * 2**-22).all()
    rounding = np.abs(exact).sum(axis=1) * 2**-23
    assert (np.abs(channel_sums(matrix).numpy() - exact.sum(axis=1)) <= rounding).all()


@given(numbers=rows(), part=st.integers(1, 2000))
@settings(max_examples=40, deadline=None)
def test_neither_parts_nor_the_way_it_lies_change_a_matrix(numbers: Floats, part: int) -> None:
    """Whole, in parts of any size, straight or turned: the same bytes."""
    form = Blocks(4, 32, symmetric=False)
    expected = [tensor.numpy() for tensor in everything(form, matrix_of(numbers))]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(matrices, "PART_ELEMENTS", part)
        for is_turned in (False, True):
            found = [tensor.numpy() for tensor in everything(form, matrix_of(numbers, is_turned=is_turned))]
            assert all(np.array_equal(one, other) for one, other in zip(found, expected, strict=True))


def everything(form: Blocks, matrix: Matrix) -> list[ir.LazyTensor]:
    blocks = [
        form.codes(matrix, Grids()),
        form.scales(matrix, Grids()),
        form.zeros(matrix, Grids()),
        form.zero_column(matrix, Grids()),
    ]
    return [*blocks, channel_codes(matrix), channel_scales(matrix), channel_sums(matrix)]
