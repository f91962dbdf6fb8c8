from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from residentd.backend.steps import StepArranger, queries_count, runs_that_fit
from residentd.types import Limits, RequestId, Row

LIMITS = Limits(slots=5, capacity=32, step_tokens_max=24, vocab=100)


@st.composite
def steps(draw: st.DrawFn) -> tuple[Row, ...]:
    """Any rows that the limits allow, in any order of slots."""
    slots = draw(st.permutations(range(LIMITS.slots)))[: draw(st.integers(1, LIMITS.slots))]
    left = LIMITS.step_tokens_max
    rows = []
    for index, slot in enumerate(slots):
        length = draw(st.integers(1, left - (len(slots) - index - 1)))
        left -= length
        start = draw(st.integers(0, LIMITS.capacity - length))
        tokens = tuple(draw(st.integers(0, 99)) for _ in range(length))
        rows.append(Row(RequestId(slot), slot, start, tokens, draw(st.booleans())))
    return tuple(rows)


def by_the_contract(rows: tuple[Row, ...], *, exact: bool) -> dict[str, np.ndarray]:
    """Every array spelled out element by element, as the engine's contract words it."""
    queries = {row.slot: len(row.tokens) + (exact and len(row.tokens) in {1, 9, 17}) for row in rows}
    width, used = max(queries.values()), max(queries) + 1
    arrays = {
        "input_ids": [token for row in rows for token in row.tokens],
        "position_ids": [row.start + index for row in rows for index in range(len(row.tokens))],
        "unpack_index": [row.slot * width + index for row in rows for index in range(len(row.tokens))],
        "pack_index": np.zeros((used, width), np.int64),
        "query_lengths": np.zeros(used, np.int32),
        "seqlens_k": np.zeros(used, np.int32),
        "logits_index": [],
    }
    packed = 0
    for row in rows:
        for index in range(queries[row.slot]):
            arrays["pack_index"][row.slot, index] = packed + min(index, len(row.tokens) - 1)
        packed += len(row.tokens)
        arrays["query_lengths"][row.slot] = queries[row.slot]
        arrays["seqlens_k"][row.slot] = row.start + queries[row.slot] - 1
        if row.samples:
            arrays["logits_index"].append(packed - 1)
    arrays["input_ids"] = np.array([arrays["input_ids"]])
    arrays["position_ids"] = np.array([arrays["position_ids"]])
    return {name: np.asarray(array) for name, array in arrays.items()}


@pytest.mark.parametrize("exact", [False, True])
@given(plans=st.lists(steps(), min_size=1, max_size=4))
def test_arrays_are_those_of_the_contract(plans: list[tuple[Row, ...]], exact: bool) -> None:  # noqa: FBT001
    """For any rows, and whatever was arranged in the same buffers before."""
    arranger = StepArranger(LIMITS, exact=exact)
    for rows in plans:
        arrays = arranger.arrange(rows)
        expected = by_the_contract(rows, exact=exact)
        for field in fields(arrays):
            found = getattr(arrays, field.name)
            np.testing.assert_array_equal(found, expected[field.name], err_msg=field.name)
            assert found.flags.c_contiguous, field.name
            assert found.dtype == (np.int32 if field.name in {"query_lengths", "seqlens_k"} else np.int64)
        assert arrays.slots_used == expected["query_lengths"].size


def test_the_limits_themselves_are_allowed() -> None:
    """All slots, step_tokens_max tokens and a slot filled to its last position are one step."""
    arranger = StepArranger(LIMITS, exact=True)
    full = Row(RequestId(0), 0, LIMITS.capacity - 20, tuple(range(20)), samples=True)
    others = [Row(RequestId(slot), slot, 0, (1,), samples=True) for slot in range(1, LIMITS.slots)]
    arrays = arranger.arrange([full, *others])
    assert arrays.input_ids.shape == (1, LIMITS.step_tokens_max)
    assert arrays.seqlens_k[0] == LIMITS.capacity - 1


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([(0, 0, 1), (0, 5, 1)], "one row"),
        ([(5, 0, 1)], "beyond"),
        ([(-1, 0, 1)], "counted from 0"),
        ([(0, 31, 2)], "capacity"),
        ([(0, -1, 1)], "before the sequence"),
        ([(0, 0, 20), (1, 0, 5)], "step_tokens_max"),
        ([(0, 0, 0)], "without tokens"),
    ],
)
def test_rows_outside_the_limits_are_our_own_bug(rows: list[tuple[int, int, int]], message: str) -> None:
    """One past each limit ends the worker instead of writing into a neighbour's memory."""
    made = [Row(RequestId(0), slot, start, (1,) * length, samples=True) for slot, start, length in rows]
    with pytest.raises(AssertionError, match=message):
        StepArranger(LIMITS).arrange(made)


@pytest.mark.parametrize("exact", [False, True])
@given(rows=steps())
def test_runs_fit_and_hold_every_row_once(rows: tuple[Row, ...], exact: bool) -> None:  # noqa: FBT001
    """In every run each row's start plus the run's width is within the memory; no row is lost, doubled or changed."""
    capacity = LIMITS.capacity + exact
    runs = runs_that_fit(rows, capacity, exact=exact)
    for run in runs:
        width = max(queries_count(len(row.tokens), exact=exact) for row in run)
        assert all(row.start + width <= capacity for row in run)
    assert sorted(row.slot for run in runs for row in run) == sorted(row.slot for row in rows)
    assert {row for run in runs for row in run} == set(rows)


def test_a_plan_that_fits_is_one_run() -> None:
    """Nothing is split without need: the padding may end exactly at the capacity, and not one further."""
    wide = Row(RequestId(0), 0, 0, (1,) * 8, samples=True)

    def decode(start: int) -> Row:
        return Row(RequestId(1), 1, start, (1,), samples=True)

    assert runs_that_fit([decode(25), wide], 33, exact=True) == ((decode(25), wide),)
    assert runs_that_fit([decode(26), wide], 33, exact=True) == ((wide,), (decode(26),))
