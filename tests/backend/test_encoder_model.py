"""Pooling, padding and the toy graph; and the distances that goldens are judged by."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from residentd.backend.encoder import EncoderModel
from residentd.backend.graph import GraphError
from residentd.backend.pooling import normalised, pool
from residentd.backend.reference_graph import ReferenceEncoder, ReferenceGraph
from residentd.backend.samples import SAMPLES_MAX, distance, sample_distance, sample_of, scale_of
from residentd.calls import TextRow
from residentd.models.encoder import Encoder
from support.toy_encoder import WIDTH, toy_embedding

NAN = float("nan")
TOKENS = np.array([[1.0, -4.0], [3.0, 2.0], [5.0, 0.0]])


@pytest.mark.parametrize(
    ("mode", "vector"),
    [
        ("cls", [1, -4]),
        ("last", [5, 0]),
        ("max", [5, 2]),
        ("mean", [3, -2 / 3]),
        ("mean_sqrt_len", [9 / np.sqrt(3), -2 / np.sqrt(3)]),
        ("weighted_mean", [(1 + 6 + 15) / 6, (-4 + 4) / 6]),
    ],
)
def test_each_pooling_is_its_definition_whatever_stands_in_the_padding(mode: str, vector: list[float]) -> None:
    """Three tokens, then padding of NaN and of large numbers; beside a longer row."""
    for padding in (NAN, 1e9):
        hidden = np.full((2, 5, 2), padding, np.float32)
        hidden[0, :3] = TOKENS
        hidden[1] = 7.0
        found = pool(hidden, [3, 5], [mode])  # type: ignore[list-item]
        assert found[0] == pytest.approx(vector, rel=1e-6)


def test_poolings_stand_side_by_side_in_their_order() -> None:
    """Two modes make a vector of twice the width."""
    hidden = TOKENS[None].astype(np.float32)
    assert pool(hidden, [3], ["cls", "max"]).tolist() == [[1, -4, 5, 2]]


def test_length_one_and_the_zero_vector() -> None:
    """A vector keeps its direction; zeros stay zeros, and are no NaN."""
    assert normalised(np.array([[3, 4], [0, 0]], np.float32)) == pytest.approx(np.array([[0.6, 0.8], [0, 0]]))


def toy() -> EncoderModel:
    encoder = Encoder(
        inputs=("input_ids", "attention_mask"),
        output="last_hidden_state",
        width=WIDTH,
        pad_id=9,
        pooling=("mean",),
        normalise=True,
        tolerance=0.0,
        goldens=(),
        texts=(),
    )
    return EncoderModel(encoder, ReferenceGraph(ReferenceEncoder(width=WIDTH)))


@given(st.lists(st.lists(st.integers(0, 500), min_size=1, max_size=20), min_size=1, max_size=9))
def test_company_and_padding_change_no_bit(rows: list[list[int]]) -> None:
    """Every row of a ragged run is the oracle's vector of its own ids."""
    found = toy().vectors([TextRow(tuple(ids)) for ids in rows])
    for ids, vector in zip(rows, found, strict=True):
        assert vector.tolist() == toy_embedding(ids).tolist()


def test_another_width_than_the_manifests_is_an_error_of_the_run() -> None:
    """An engine file that is not the manifest's is not believed."""
    model = toy()
    model = EncoderModel(msgspec.structs.replace(model.encoder, width=WIDTH + 1), model.graph)
    with pytest.raises(GraphError, match="13 numbers"):
        model.vectors([TextRow((1, 2))])


@pytest.mark.parametrize(
    ("found", "wanted", "gap"),
    [
        ([1.0, 2.0], [1.0, 2.5], 0.5),
        ([NAN, 1.0], [NAN, 1.0], 0.0),
        ([NAN], [1.0], float("inf")),
        ([float("inf")], [float("inf")], 0.0),
        ([float("inf")], [1.0], float("inf")),
        ([True, False], [True, True], 1.0),
        ([1.0], [1.0, 2.0], float("inf")),
        ([2.0, -1.01e9], [2.0, -1e9], 0.02),  # a hundredth of what a mask wrote, as of the 2
        ([2.5, -1e9], [2.0, -1e9], 0.5),
        ([2.0, -3.0], [2.0, -1e9], 2.0),
        ([2.0, float("inf")], [2.0, -1e9], float("inf")),
        ([1.01e6, 0.0], [1e6, 0.0], 100.0),  # nothing else: of the first that is large
    ],
)
def test_distances(found: list[float], wanted: list[float], gap: float) -> None:
    """NaN equals NaN and nothing else; another shape is infinitely far."""
    assert distance(np.array(found), np.array(wanted)) == pytest.approx(gap)


@pytest.mark.parametrize(
    ("numbers", "scale"),
    [
        ([1.0, -3.0], 3.0),
        ([1.0, -3.0, -1e9], 3.0),
        ([1.0, float(np.finfo(np.float32).min), float("-inf"), float("nan")], 1.0),
        ([5e5, 0.0], 1e4),
        ([0.0], 0.0),
    ],
)
def test_what_masks_write_does_not_lift_the_scale(numbers: list[float], scale: float) -> None:
    """Of the ordinary numbers alone; of a number without axes too."""
    assert scale_of(np.array(numbers, np.float32)) == scale
    assert scale_of(np.array(numbers[0], np.float32)) == min(abs(numbers[0]), 1e4)


def test_a_sample_keeps_the_shape_and_a_bounded_number_of_elements() -> None:
    """Of 5,000 numbers every fifth; a change of one that is kept is seen, another shape too."""
    array = np.arange(5000, dtype=np.float32).reshape(50, 100)
    sample = sample_of(array)
    assert sample.shape == (50, 100)
    assert len(sample.values) // 8 == 1000 <= SAMPLES_MAX
    changed = array.copy()
    changed[0, 5] += 3
    assert sample_distance(sample_of(changed), sample) == 3
    assert sample_distance(sample_of(array.reshape(100, 50)), sample) == float("inf")
