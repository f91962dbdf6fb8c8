"""A device without arithmetic: K/V of a position is a hash of everything before it, so that any mix-up shows.

What a row samples depends on the physical content of every position of its slot up to its end: a wrong start, a
neighbour's slot, a stale rest of an earlier request or a failed step's garbage each give another token.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from residentd.types import Limits, Request, RequestId, StepPlan

_MASK = (1 << 61) - 1
_POISON = 0xDEAD


def chain(state: int, token: int) -> int:
    """K/V of a position, from that of the position before it and its own token."""
    return (state * 6364136223846793005 + token * 1442695040888963407 + 1) & _MASK


def chosen(prefix: Seq[int], seed: int, index: int, vocab: int) -> int:
    """The token sampled after `prefix` (K/V of its positions): any prefix, seed or output index gives another draw."""
    return (chain(chain(hash(tuple(prefix)), seed), index) >> 23) % vocab


class FakeDevice:
    """K/V memory of [slots, capacity]. `run` computes a step; `wreck` is the same step going wrong."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._kv = [[_POISON] * limits.capacity for _ in range(limits.slots)]
        self.tokens_count = 0

    def run(self, plan: StepPlan) -> dict[RequestId, list[int]]:
        """K/V of the whole prefix of each row that samples."""
        self._check(plan)
        prefixes = {}
        for row in plan.rows:
            slot, end = self._kv[row.slot], row.start + len(row.tokens)
            state = slot[row.start - 1] if row.start else 1
            for position, token in enumerate(row.tokens, row.start):
                state = slot[position] = chain(state, token)
            if end < self._limits.capacity:
                slot[end] = _POISON  # positions at or beyond a row's end are undefined
            if row.samples:
                prefixes[row.id] = slot[:end]
        self.tokens_count += plan.tokens_count
        return prefixes

    def wreck(self, plan: StepPlan) -> None:
        """Scribble over everything that the failed step was allowed to write."""
        self._check(plan)
        for row in plan.rows:
            self._kv[row.slot][row.start :] = [_POISON] * (self._limits.capacity - row.start)

    def _check(self, plan: StepPlan) -> None:
        assert len({row.slot for row in plan.rows}) == len(plan.rows), "two rows write one slot"
        assert 0 < plan.tokens_count <= self._limits.step_tokens_max, "the step does not fit the engine"
        for row in plan.rows:
            assert 0 <= row.slot < self._limits.slots, "no such slot"
            assert 0 <= row.start < row.start + len(row.tokens) <= self._limits.capacity, "positions outside the slot"


def solo(request: Request, vocab: int) -> list[int]:
    """The oracle: every output token of `request` served alone, undisturbed."""
    params, output, prefix, state = request.params, list[int](), list[int](), 1
    for token in request.prompt:
        prefix.append(state := chain(state, token))
    while len(output) < params.tokens_max:
        token = chosen(prefix, params.seed, len(output), vocab)
        output.append(token)
        if token in params.stop_ids and len(output) > params.tokens_min:
            break
        prefix.append(state := chain(state, token))
    return output
