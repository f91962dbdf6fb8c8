"""Exports as they are, on ONNX Runtime's CPU provider: for what cannot be brought into the canonical form.

Inputs, of which a graph has those that it needs (batch 1, S new tokens after P of the same slot):
    input_ids, position_ids [1, S]     attention_mask [1, P + S], all ones     cache_position [S]
    num_logits_to_keep, logits_to_keep []: 1     use_cache_branch [1]: whether P > 0
    and the engine's states: what the run before gave; empty, or zeros where the shape is fixed, when P is 0
Outputs logits [1, S or 1, vocab], and the states.

Rows are run one after the other, so that no padding and no mask of ours is in the way: a row computes what the exporter
tested. What it costs is that rows of a step share no work.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from residentd.backend.base import Logits
from residentd.backend.onnxruntime import (
    CACHE_DTYPES,
    LOGITS_OUTPUT,
    WORKSPACE_BYTES,
    MemoryNeed,
    RuntimeOptions,
    check_memory,
    memory_available_bytes,
    open_session,
    step_error,
    weights_need,
)
from residentd.errors import BackendLostError, StoreError
from residentd.models.manifest import Engine, State
from residentd.types import Limits, Row, StepPlan

RUN_TOKENS_MAX = 128
"""An export gives logits, and mostly scores, for every token of a run: longer chunks are run in parts."""
SCORES_FACTOR = 24  # up to 8 query heads a KV head, and three copies of their scores alive at once
HELD_FACTOR = 1.25  # of the states: each run leaves slightly longer ones, and the allocator keeps some gaps

TOKEN_INPUT = "input_ids"  # noqa: S105 - the name of a graph input
STEP_INPUTS = frozenset(
    {
        TOKEN_INPUT,
        "position_ids",
        "attention_mask",
        "cache_position",
        "num_logits_to_keep",
        "logits_to_keep",
        "use_cache_branch",
    }
)
INPUT_DTYPES: Mapping[str, type[np.generic]] = MappingProxyType(
    {"tensor(int64)": np.int64, "tensor(int32)": np.int32, "tensor(bool)": np.bool_, "tensor(float)": np.float32}
)

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class _Held:
    """What a slot holds: the tokens that were read, and the states after them, in the engine's order."""

    tokens: tuple[int, ...]
    states: tuple[Any, ...]  # OrtValue


class CompatibilityBackend:
    """One loaded export, and the states of its slots. Used by one thread; implements backend.base.Backend."""

    def __init__(self, directory: Path, engine: Engine, *, options: RuntimeOptions | None = None) -> None:
        """Load `engine` from the version's `directory`. Raises MachineError or StoreError before anything is held."""
        limits = engine.limits
        options = options or RuntimeOptions()
        check_memory(engine, memory_need(directory, engine, options), memory_available_bytes())
        self._limits = Limits(limits.slots, limits.context, limits.step_tokens_max, limits.vocab)
        self._session = open_session(directory / engine.path, options, keeps_memory=False)
        self._dtypes = _step_inputs(self._session, engine)
        self._states = engine.states
        self._outputs = [state.output for state in engine.states]
        self._without_logits = ort.RunOptions()
        self._without_logits.only_execute_path_to_fetches = True
        self._slots: dict[int, _Held] = {}
        self._logits = np.zeros((limits.slots, limits.vocab), np.float32)

    @property
    def limits(self) -> Limits:
        return self._limits

    @property
    def caches(self) -> tuple[Array, ...]:
        """The memory of all that the slots hold now: for verification, which poisons it."""
        return tuple(state.numpy() for held in self._slots.values() for state in held.states)

    def step(self, plan: StepPlan) -> Logits:
        """Rows that were run before one that fails stay run: asked again, they are wound back to their start."""
        logits = self._logits[: sum(row.samples for row in plan.rows)]
        filled = 0
        try:
            for row in plan.rows:
                found = self._run_row(row)
                if row.samples:
                    logits[filled] = found
                    filled += 1
        except (AssertionError, BackendLostError):
            raise
        except Exception as error:
            raise step_error(plan, error) from error
        return logits

    def close(self) -> None:
        """Release the memory. The backend cannot be used afterwards."""
        self._slots.clear()
        del self._session

    def _run_row(self, row: Row) -> Logits | None:
        """Logits [vocab] after the row's last token if it samples. The slot holds the row once all of it was read."""
        assert 0 <= row.slot < self._limits.slots, "a slot beyond the engine's"
        assert row.start + len(row.tokens) <= self._limits.capacity, "a row past its slot's capacity"
        if row.start == 0:
            self._slots.pop(row.slot, None)  # before the new sequence takes memory
        held = self._slots.get(row.slot) or self._begin()
        assert row.start <= len(held.tokens), "a row that begins after what its slot holds"
        if row.start == len(held.tokens):
            held, logits = self._extend(held, row.tokens, samples=row.samples)
        elif self._can_cut(held):
            held, logits = self._extend(self._cut(held, row.start), row.tokens, samples=row.samples)
        else:
            again = held.tokens[: row.start] + row.tokens
            held, logits = self._extend(self._begin(), again, samples=row.samples)
        self._slots[row.slot] = held
        return logits

    def _begin(self) -> _Held:
        return _Held((), tuple(_begin(state) for state in self._states))

    def _extend(self, held: _Held, tokens: Sequence[int], *, samples: bool) -> tuple[_Held, Logits | None]:
        """What is held after `tokens` too, and the logits [vocab] after the last of them if they are wanted."""
        logits = None
        for first in range(0, len(tokens), RUN_TOKENS_MAX):
            part = tuple(tokens[first : first + RUN_TOKENS_MAX])
            is_last = first + RUN_TOKENS_MAX >= len(tokens)
            held, logits = self._run(held, part, samples=samples and is_last)
        return held, logits

    def _run(self, held: _Held, tokens: tuple[int, ...], *, samples: bool) -> tuple[_Held, Logits | None]:
        feeds = step_feeds(self._dtypes, tokens, len(held.tokens))
        values = {name: ort.OrtValue.ortvalue_from_numpy(array) for name, array in feeds.items()}
        values.update(zip((state.input for state in self._states), held.states, strict=True))
        if not samples:
            states = self._session.run_with_ort_values(self._outputs, values, self._without_logits)
            return _Held(held.tokens + tokens, tuple(states)), None
        logits, *states = self._session.run_with_ort_values([LOGITS_OUTPUT, *self._outputs], values)
        last: Logits = logits.numpy().reshape(-1, self._limits.vocab)[-1]
        return _Held(held.tokens + tokens, tuple(states)), last

    def _can_cut(self, held: _Held) -> bool:
        """Every state has a place for each token; a window's, or a recurrent one's, cannot be wound back."""
        return all(
            state.axis is not None and value.shape()[state.axis] == len(held.tokens)
            for state, value in zip(self._states, held.states, strict=True)
        )

    def _cut(self, held: _Held, length: int) -> _Held:
        return _Held(
            held.tokens[:length],
            tuple(
                ort.OrtValue.ortvalue_from_numpy(_first(value.numpy(), state, length))
                for state, value in zip(self._states, held.states, strict=True)
            ),
        )


def step_feeds(
    dtypes: Mapping[str, type[np.generic]], tokens: Sequence[int], past: int, *, logits: int = 1
) -> dict[str, Array]:
    """What a run that reads `tokens` after `past` others feeds, states apart, of the inputs named in `dtypes`."""
    end = past + len(tokens)
    feeds: dict[str, Any] = {
        TOKEN_INPUT: [tokens],
        "position_ids": [range(past, end)],
        "attention_mask": np.ones((1, end)),
        "cache_position": range(past, end),
        "num_logits_to_keep": logits,
        "logits_to_keep": logits,
        "use_cache_branch": [past > 0],
    }
    return {name: np.array(feeds[name], dtype) for name, dtype in dtypes.items()}


def memory_need(directory: Path, engine: Engine, options: RuntimeOptions | None = None) -> MemoryNeed:
    """What loading `engine`, and filling every slot, takes, from the sizes of its files and its limits."""
    limits = engine.limits
    slot = sum(_state_bytes(state, limits.context) for state in engine.states)
    heads = max((state.shape[1] for state in engine.states if state.axis == 2), default=1)
    run = min(RUN_TOKENS_MAX, limits.context)
    return MemoryNeed(
        weights=weights_need(directory, engine, options),
        caches=int((limits.slots + 1) * slot * HELD_FACTOR),  # a run writes its states beside those that it read
        logits=(limits.slots + 2 * run) * limits.vocab * 4,
        workspace=WORKSPACE_BYTES + heads * SCORES_FACTOR * run * limits.context * 4,
    )


def _state_bytes(state: State, context: int) -> int:
    dims = [context if axis == state.axis else dim for axis, dim in enumerate(state.shape)]
    return math.prod(dims) * CACHE_DTYPES[state.dtype]().itemsize


def _begin(state: State) -> Any:
    """The state before a sequence's first token."""
    return ort.OrtValue.ortvalue_from_numpy(np.zeros(state.shape, CACHE_DTYPES[state.dtype]))


def _first(array: Array, state: State, length: int) -> Array:
    """A copy of the first `length` places along the axis that counts tokens."""
    assert state.axis is not None
    return np.take(array, range(length), axis=state.axis)


def _step_inputs(session: Any, engine: Engine) -> dict[str, type[np.generic]]:
    """The step inputs that the graph has, with their types. Raises StoreError when they are not the manifest's."""
    types = {value.name: value.type for value in session.get_inputs()}
    states = {state.input for state in engine.states}
    wrong = (states - types.keys()) | (types.keys() - states - STEP_INPUTS)
    wrong |= {LOGITS_OUTPUT, *(state.output for state in engine.states)} - {v.name for v in session.get_outputs()}
    wrong |= {name for name in types.keys() & STEP_INPUTS if types[name] not in INPUT_DTYPES}
    if wrong or TOKEN_INPUT not in types:
        raise StoreError(
            f"the engine's inputs and outputs are not those of its manifest ({', '.join(sorted(wrong)[:8])}). "
            "Install the version again"
        )
    return {name: INPUT_DTYPES[types[name]] for name in STEP_INPUTS & types.keys()}
