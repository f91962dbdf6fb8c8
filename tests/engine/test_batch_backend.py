"""Which calls with tensors share a run, and that each gets its own rows of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from residentd.backend.tensor_model import TensorModel, array_of
from residentd.calls import Call, Tensor
from residentd.engine.batch_backend import RUN_BYTES_MAX, TensorBackend
from residentd.errors import CallerError
from residentd.models.encoder import Tensors, TensorSpec
from residentd.models.manifest import EngineLimits
from residentd_build.encoders.company import BYTES_MAX


class Doubling:
    """y = 2 a, of a [n, 2]; an input b [m, 2] is added where it has as many rows."""

    def __init__(self, rows_lost: int = 0) -> None:
        self._rows_lost = rows_lost

    def run(self, feeds: Mapping[str, Any], _outputs: Sequence[str]) -> list[Any]:
        total = 2 * feeds["a"] + feeds.get("b", 0)
        return [total[: len(total) - self._rows_lost]]

    def close(self) -> None:
        """Nothing is held."""


def backend(graph: Doubling, *, alone: str = "") -> TensorBackend:
    specs = [TensorSpec(name=name, dtype="float32", shape=("n", 2)) for name in ("a", "y")]
    tensors = Tensors(inputs=specs[:1], outputs=specs[1:], alone=alone, tolerances={"y": 1e-5}, goldens=())
    return TensorBackend(TensorModel(tensors, graph), EngineLimits(slots=16, context=0, step_tokens_max=0, vocab=0))


def call(place: int, **arrays: Any) -> Call:
    tensors = tuple(
        Tensor(name=name, dtype="float32", shape=array.shape, data=array.astype("<f4").tobytes())
        for name, array in arrays.items()
    )
    return Call(id=f"c{place}", places=(0,), tensors=tensors, outputs=("y",))


def test_calls_of_several_rows_each_get_their_own() -> None:
    """One, three and two rows in one run."""
    served = backend(Doubling())
    calls = [call(rows, a=np.full((rows, 2), rows, np.float32)) for rows in (1, 3, 2)]
    work = [(entry, served.pieces(entry)[0]) for entry in calls]
    assert len({piece.group for _, piece in work}) == 1
    for rows, value in zip((1, 3, 2), served.run(work), strict=True):
        assert array_of(value[0]).tolist() == [[2.0 * rows] * 2] * rows


@pytest.mark.parametrize("rows", [(3, 1), (1, 3), (0, 0)])
def test_inputs_of_other_numbers_of_rows_run_alone(rows: tuple[int, int]) -> None:
    """One row that is stretched to three is the caller's right, and nobody else's rows could be told from it."""
    served = backend(Doubling())
    calls = [
        call(place, a=np.full((rows[0], 2), place, np.float32), b=np.full((rows[1], 2), place, np.float32))
        for place in range(2)
    ]
    pieces = [served.pieces(entry)[0] for entry in calls]
    assert pieces[0].group != pieces[1].group
    assert backend(Doubling(), alone="why").pieces(call(0, a=np.ones((2, 2), np.float32)))[0].rows == 1


def test_a_run_that_gives_other_rows_than_it_took_is_dealt_out_to_nobody() -> None:
    """Its calls are then tried alone."""
    served = backend(Doubling(rows_lost=1))
    calls = [call(place, a=np.ones((2, 2), np.float32)) for place in range(2)]
    with pytest.raises(CallerError, match="told apart"):
        served.run([(entry, served.pieces(entry)[0]) for entry in calls])


def test_a_build_tries_runs_as_large_as_the_daemons() -> None:
    """The compiler may not import the engine, so the limit stands twice."""
    assert RUN_BYTES_MAX == BYTES_MAX
