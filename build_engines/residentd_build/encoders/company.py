"""Rows of calls beside hostile rows of others, in runs of the engine: each must get what it gets alone.

That rows keep apart is proven before (rows.py); this tries whether the runtime, with what it fuses, does as was proven.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import cycle, islice
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

import numpy as np

from residentd.backend.graph import GraphError
from residentd.backend.samples import gaps_of
from residentd.errors import MachineError, StepRetryableError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from residentd.backend.graph import Array, Graph
    from residentd_build.encoders.margins import Margins

    Feeds = Mapping[str, Array]
    Progress = Callable[[float, str], None]

SIZES_MAX: Final = 16
"""Runs of every number of rows up to this are tried, and one of as many as there may be."""
BYTES_MAX: Final = 64 << 20
"""Inputs of one run; the daemon puts no more together (engine.batch_backend.RUN_BYTES_MAX)."""
TRIAL_S_MAX: Final = 120.0
"""Of all runs together, those of 2 and 3 rows and of as many as may be first: a model whose rows take seconds has its
proof as well, and is not tried for an hour."""
ROUNDINGS: Final = 168
"""Of the type that is computed in, of which a kernel for several rows may make others than that for one: as many as
margins.FP32's floor. A step of a quantised activation is none of them."""


def rounded(feeds: Feeds, rounding: float) -> dict[str, Array]:
    """The inputs, each of their fractions one rounding larger: what that does to an output, other kernels may do."""
    return {
        name: np.asarray(array * (1 + rounding), array.dtype) if array.dtype.kind == "f" else array
        for name, array in feeds.items()
    }


@dataclass(frozen=True, slots=True)
class Neighbour:
    """What stands beside a call: its fractions changed; its whole numbers 0 or the largest, else as they are."""

    change: Callable[[Array], Array]
    whole: int | None = None  # times the largest


def _filled(number: float) -> Callable[[Array], Array]:
    return lambda array: np.full_like(array, min(number, float(np.finfo(array.dtype).max)))


def _times(factor: float) -> Callable[[Array], Array]:
    return lambda array: np.asarray(array * array.dtype.type(factor), array.dtype)


HOSTILE: Final[Mapping[str, Neighbour]] = MappingProxyType(
    {
        "NaN (of whole numbers 0)": Neighbour(lambda array: np.full_like(array, np.nan), whole=0),
        "1e30 (of whole numbers the largest)": Neighbour(_filled(1e30), whole=1),
        "1,000 times as large": Neighbour(_times(1e3)),
        "1,000 times as small": Neighbour(_times(1e-3)),
        "of a call like it": Neighbour(lambda array: array),
    }
)


@dataclass(frozen=True, slots=True)
class Alone:
    """A call of one row, what it gives alone, and how far each number of that may be off in company."""

    feeds: Feeds
    outputs: Sequence[Array]
    allowed: Sequence[Array]


@dataclass(frozen=True, slots=True)
class Company:
    """An engine that is tried in runs of up to `rows_max` rows. `whole_max`: the largest whole number it is fed."""

    graph: Graph
    names: Sequence[str]
    rows_max: int
    margins: Margins
    whole_max: int

    def reason(self, feeds: Sequence[Feeds], progress: Progress = lambda _share, _message: None) -> str:
        """Why calls like `feeds`, of one row each, may not share a run; empty where nothing speaks against it.

        Raises GraphError where one alone cannot be run, MachineError for lack of memory.
        """
        calls = [self._alone(feed) for feed in feeds]
        row_bytes = max(1, sum(array.nbytes for array in feeds[0].values()))
        # A call that the model refuses fails whom it meets; all of them are then tried again, each alone.
        kinds = [kind for kind in HOSTILE if all(self._is_run(self._beside(call.feeds, kind)) for call in calls)]
        plan = _plan(min(self.rows_max, BYTES_MAX // row_bytes), kinds)
        deadline = time.monotonic() + TRIAL_S_MAX
        for number, (count, kind) in enumerate(plan):
            if time.monotonic() > deadline:
                break
            progress(number / len(plan), f"{count} calls in one run")
            wrong = self._wrong(list(islice(cycle(calls), count)), kind)
            if wrong:
                return f"{wrong}; every second row of it was {kind}"
        return ""

    def _wrong(self, calls: Sequence[Alone], kind: str) -> str:
        """One run in which every second call is a hostile row instead: what is wrong with the answers of the others."""
        count = len(calls)
        is_own = [(place + count) % 2 == 0 for place in range(count)]
        rows = [call.feeds if own else self._beside(call.feeds, kind) for call, own in zip(calls, is_own, strict=True)]
        try:
            together = self._run({name: np.concatenate([row[name] for row in rows]) for name in rows[0]})
        except GraphError as error:
            return f"{count} calls in one run fail ({error})"
        for index, (name, found) in enumerate(zip(self.names, together, strict=True)):
            if found.shape != (count, *calls[0].outputs[index].shape[1:]):
                return f"output {name} of {count} calls in one run has not a row for each"
            for row, call, own in zip(found, calls, is_own, strict=True):
                if own and not (gaps_of(row, call.outputs[index][0]) <= call.allowed[index][0]).all():
                    return f"output {name} of {count} calls in one run is not what each gives alone"
        return ""

    def _alone(self, feeds: Feeds) -> Alone:
        outputs = self._run(feeds)
        noisy = self._run(rounded(feeds, self.margins.rounding))
        share = min(self.margins.floor, ROUNDINGS * self.margins.rounding)
        allowed = [_allowed(output, other, share) for output, other in zip(outputs, noisy, strict=True)]
        return Alone(feeds, outputs, allowed)

    def _beside(self, feeds: Feeds, kind: str) -> dict[str, Array]:
        neighbour = HOSTILE[kind]
        return {name: self._changed(array, neighbour) for name, array in feeds.items()}

    def _changed(self, array: Array, neighbour: Neighbour) -> Array:
        if array.dtype.kind == "f":
            with np.errstate(over="ignore"):
                return neighbour.change(array)
        if neighbour.whole is None:
            return array
        largest = 1 if array.dtype.kind == "b" else int(np.iinfo(array.dtype).max)
        return np.full_like(array, neighbour.whole * min(self.whole_max, largest))

    def _is_run(self, feeds: Feeds) -> bool:
        try:
            self._run(feeds)
        except GraphError:
            return False
        return True

    def _run(self, feeds: Feeds) -> list[Array]:
        try:
            return self.graph.run(feeds, self.names)
        except StepRetryableError as error:
            count = len(next(iter(feeds.values())))
            raise MachineError(
                f"verification needs runs of {count} calls, and one took more memory than this machine has free: "
                f"{error}. Free some, or use fewer --slots"
            ) from error


def _plan(rows_max: int, kinds: Sequence[str]) -> list[tuple[int, str]]:
    """Runs by their rows and the kind of every second: all kinds at 2, 3 and `rows_max`, one at each size between."""
    whole = sorted({size for size in (2, 3, rows_max) if 1 < size <= rows_max})
    between = [size for size in range(4, min(rows_max, SIZES_MAX + 1)) if size not in whole]
    return [(size, kind) for size in whole for kind in kinds] + list(zip(between, cycle(kinds), strict=False))


def _allowed(output: Array, noisy: Array, share: float) -> Array:
    """Roundings, of each number's own size or of the median's, and what one rounding of the inputs does to it.

    Nothing for whole numbers, of which one more is another index or class.

    Number by number, so that an output which jumps hides nothing beside it; the median, because a number near 0 may be
    the difference of ordinary ones, and what masks write must not lift it.
    """
    if output.dtype.kind != "f":
        return np.zeros(output.shape)
    sizes = np.abs(output.astype(np.float64))
    counted = sizes[np.isfinite(sizes) & (sizes > 0)]
    typical = float(np.median(counted)) if counted.size else 0.0
    noise = np.zeros(output.shape) if noisy.shape != output.shape else gaps_of(noisy, output)
    own = np.where(np.isfinite(sizes), sizes, 0.0)
    allowed: Array = share * np.maximum(typical, own) + np.where(np.isfinite(noise), noise, 0.0)
    return allowed
