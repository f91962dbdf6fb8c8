"""Calls as pieces of work: what may run together, and one run of it over a model that is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np

from residentd.backend.encoder import EncoderModel
from residentd.backend.graph import Array, GraphError
from residentd.backend.tensor_model import TensorModel, array_of, golden_feeds
from residentd.calls import Call, Tensor, TextRow, Value
from residentd.core.batching import Group, Piece, bucket_of
from residentd.errors import BackendLostError, CallerError
from residentd.models.manifest import EngineLimits

RUN_BYTES_MAX: Final = 64 << 20
"""Inputs of one run that several calls share."""
OUTPUT_BYTES_MAX: Final = 48 << 20
"""Outputs of one call: they travel to the daemon in one frame."""


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """What one run takes: rows, and their weight together in tokens or bytes, padding included."""

    rows_max: int
    weight_max: int


class BatchBackend(Protocol):
    """Computes pieces of calls together. Used by one thread.

    `pieces` cuts a call into what may run together with others, by their index among what it asks for. `run` takes
    pieces of one group, each with its call, and returns a value for each. Raises CallerError when the model cannot run
    this input, StepRetryableError or BackendLostError. `canary` computes something small: proof that it still works.
    """

    @property
    def limits(self) -> BatchLimits: ...

    def pieces(self, call: Call) -> tuple[Piece, ...]: ...

    def run(self, work: Sequence[tuple[Call, Piece]]) -> list[Value]: ...

    def canary(self) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class EncoderBackend:
    """Each text is a piece; texts of like length share a run."""

    model: EncoderModel
    engine_limits: EngineLimits

    @property
    def limits(self) -> BatchLimits:
        limits = self.engine_limits
        return BatchLimits(rows_max=1 if self.model.encoder.alone else limits.slots, weight_max=limits.step_tokens_max)

    def pieces(self, call: Call) -> tuple[Piece, ...]:
        context = self.engine_limits.context
        return tuple(Piece(i, Group(min(bucket_of(len(row.ids)), context))) for i, row in enumerate(call.rows))

    def run(self, work: Sequence[tuple[Call, Piece]]) -> list[Value]:
        try:
            vectors = self.model.vectors([call.rows[piece.index] for call, piece in work])
        except GraphError as error:
            # Ids and lengths were checked, so it is not the caller's fault.
            raise BackendLostError(f"the encoder failed in a run of {len(work)} texts: {error}") from error
        return [vector.astype("<f4", copy=False).tobytes() for vector in vectors]

    def canary(self) -> None:
        encoder = self.model.encoder
        self.model.vectors([TextRow(encoder.goldens[0].ids if encoder.goldens else (encoder.pad_id,))])

    def close(self) -> None:
        self.model.graph.close()


@dataclass(frozen=True, slots=True)
class TensorBackend:
    """Each call is a piece. Calls of like shape share a run along their first axis, where the build has shown it."""

    model: TensorModel
    engine_limits: EngineLimits

    @property
    def limits(self) -> BatchLimits:
        alone = self.model.tensors.alone
        return BatchLimits(rows_max=1 if alone else self.engine_limits.slots, weight_max=RUN_BYTES_MAX)

    def pieces(self, call: Call) -> tuple[Piece, ...]:
        size = max(1, sum(len(tensor.data) for tensor in call.tensors))
        lengths = {tensor.shape[0] if tensor.shape else 0 for tensor in call.tensors}
        rows = max(lengths, default=0)
        if self.model.tensors.alone or len(lengths) > 1 or not rows:  # rows of other numbers would be dealt out wrongly
            return (Piece(0, Group(size, f"alone {call.id}")),)
        shapes = ", ".join(f"{tensor.name}{list(tensor.shape[1:])}" for tensor in call.tensors)
        return (Piece(0, Group(-(-size // rows), f"{shapes} -> {','.join(call.outputs)}"), rows),)

    def run(self, work: Sequence[tuple[Call, Piece]]) -> list[Value]:
        calls = [call for call, _ in work]
        names = calls[0].outputs or tuple(spec.name for spec in self.model.tensors.outputs)
        columns = zip(*(call.tensors for call in calls), strict=True)
        feeds = {column[0].name: _joined([array_of(tensor) for tensor in column]) for column in columns}
        try:
            arrays = self.model.outputs(feeds, names)
        except GraphError as error:
            raise CallerError(f"the model cannot run these inputs: {error}. Change their shapes or contents") from error
        rows = [piece.rows for _, piece in work]
        if len(calls) > 1 and any(array.shape[:1] != (sum(rows),) for array in arrays):
            raise CallerError("the outputs of a shared run cannot be told apart")  # each is then tried alone
        return [_value(names, part) for part in (_parted(arrays, rows) if len(calls) > 1 else [arrays])]

    def canary(self) -> None:
        golden = self.model.tensors.goldens[0]
        self.model.outputs(golden_feeds(self.model.tensors.inputs, golden.shapes, golden.seed, golden.whole_max))

    def close(self) -> None:
        self.model.graph.close()


def _joined(arrays: Sequence[Array]) -> Array:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def _parted(arrays: Sequence[Array], rows: Sequence[int]) -> list[list[Array]]:
    ends = np.cumsum(rows)[:-1]
    return [list(part) for part in zip(*(np.split(array, ends) for array in arrays), strict=True)]


def _value(names: Sequence[str], arrays: Sequence[Array]) -> Value:
    size = sum(array.nbytes for array in arrays)
    if size > OUTPUT_BYTES_MAX:
        raise CallerError(
            f"the outputs have {size:,} bytes; at most {OUTPUT_BYTES_MAX:,} are sent. Name fewer outputs, or send "
            "smaller inputs"
        )
    return tuple(_tensor(name, array) for name, array in zip(names, arrays, strict=True))


def _tensor(name: str, array: Array) -> Tensor:
    data = np.ascontiguousarray(array).astype(array.dtype.newbyteorder("<"), copy=False).tobytes()
    return Tensor(name=name, dtype=array.dtype.name, shape=tuple(array.shape), data=data)
