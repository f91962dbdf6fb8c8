"""Bugs planted in the core, one at a time, by substitution in its source: the simulator must find every one.

PYTHONPATH=daemon:tests python -m sim.mutants        which seed kills which mutant, and by which oracle
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Final

import residentd.core
from sim.life import Core
from sim.simulate import simulate

SEEDS_MAX: Final = 300
MODULES: Final = ("sequence", "slots", "waiting", "deadlines", "admission", "scheduler", "invariants")  # as they import


@dataclass(frozen=True, slots=True)
class Mutant:
    """`old` occurs once in the source of `module`, and becomes `new`."""

    name: str
    module: str
    old: str
    new: str


@dataclass(frozen=True, slots=True)
class Kill:
    seed: int
    reason: str


MUTANTS: Final = (
    # cancel and deadlines
    Mutant(
        "cancel releases a row in flight at once",
        "scheduler",
        "if request_id in self._in_flight_ids:",
        "if False:",
    ),
    Mutant(
        "cancel of an unknown id answers",
        "scheduler",
        "            return []\n        if request_id in",
        "            return [Finished(request_id, reason)]\n        if request_id in",
    ),
    Mutant(
        "the last cancel wins",
        "scheduler",
        "self._doomed.setdefault(request_id, reason)",
        "self._doomed[request_id] = reason",
    ),
    Mutant(
        "cancel of a row in flight is forgotten", "scheduler", "self._doomed.setdefault(request_id, reason)", "pass"
    ),
    Mutant("a token after cancel", "scheduler", "if reason is None and row.samples:", "if row.samples:"),
    Mutant(
        "cancel is lost when the step fails",
        "scheduler",
        "if (reason := self._doomed.pop(row.id, None)) is not None:",
        "if (reason := self._doomed.pop(row.id, None)) is None and False:",
    ),
    Mutant(
        "every cancel is called CANCELLED",
        "scheduler",
        "return [self._release(sequence, reason)]",
        "return [self._release(sequence, Finish.CANCELLED)]",
    ),
    Mutant("cancel leaves the request in the queue", "scheduler", "self._waiting.remove(request_id)", "pass"),
    Mutant("deadlines are ignored", "scheduler", "if request.deadline_ms is not None:", "if False:"),
    Mutant("the deadline is kept one millisecond late", "deadlines", "if due_ms <= now_ms]", "if due_ms < now_ms]"),
    Mutant(
        "a later deadline hides an earlier one",
        "deadlines",
        "if self._earliest_ms is None or due_ms < self._earliest_ms:",
        "if True:",
    ),
    Mutant(
        "deadlines after the first are forgotten",
        "deadlines",
        "self._earliest_ms = min(self._due_ms.values(), default=None)",
        "self._earliest_ms = None",
    ),
    Mutant("a deadline outlives its request", "scheduler", "        self._deadlines.discard(request_id)\n", ""),
    # slots
    Mutant("the slot leaks at the end", "scheduler", "            self._slots.give(sequence.slot)\n", ""),
    Mutant("a slot is given twice", "slots", "return heapq.heappop(self._free)", "return self._free[0]"),
    Mutant(
        "the highest free slot is taken",
        "slots",
        "return heapq.heappop(self._free)",
        "return self._free.pop(self._free.index(max(self._free)))",
    ),
    Mutant("freed slots lose their order", "slots", "heapq.heappush(self._free, slot)", "self._free.append(slot)"),
    # the step transaction
    Mutant(
        "abort forgets the plan",
        "scheduler",
        "sequence.retries += 1",
        "sequence.computed += len(row.tokens) - row.samples; sequence.retries += 1",
    ),
    Mutant(
        "abort starts the sequence over",
        "scheduler",
        "sequence.retries += 1",
        "sequence.computed = 0; sequence.retries += 1",
    ),
    Mutant("retries have no end", "scheduler", "elif sequence.retries > self.policy.retries_max:", "elif False:"),
    Mutant(
        "one retry too few",
        "scheduler",
        "elif sequence.retries > self.policy.retries_max:",
        "elif sequence.retries >= self.policy.retries_max:",
    ),
    Mutant("retries are never reset", "scheduler", "            sequence.retries = 0\n", ""),
    Mutant(
        "a fatal failure forgets the waiting",
        "scheduler",
        "for sequence in list(self._live.values())]",
        "for sequence in list(self._running.values())]",
    ),
    Mutant(
        "commit leaves the step in flight",
        "scheduler",
        "        self._in_flight_ids = frozenset()\n\n    def _release",
        "\n    def _release",
    ),
    Mutant(
        "computed stands one short",
        "scheduler",
        "sequence.computed += len(row.tokens)",
        "sequence.computed += len(row.tokens) - 1",
    ),
    # the plan
    Mutant(
        "the oldest decode is skipped",
        "scheduler",
        "rows = [sequence.row(1) for sequence in self._running.values() if sequence.pending == 1]",
        "rows = [sequence.row(1) for sequence in self._running.values() if sequence.pending == 1][1:]",
    ),
    Mutant(
        "the prefill budget is ignored",
        "scheduler",
        "budget = room if prefill_tokens_max is None else min(room, max(prefill_tokens_max, 1))",
        "budget = room",
    ),
    Mutant(
        "step_tokens_max is ignored",
        "scheduler",
        "else min(room, max(prefill_tokens_max, 1))",
        "else max(prefill_tokens_max, 1)",
    ),
    Mutant(
        "decodes do not count towards the step",
        "scheduler",
        "room = self.limits.step_tokens_max - len(rows)",
        "room = self.limits.step_tokens_max",
    ),
    Mutant(
        "a budget of 0 starves prefill",
        "scheduler",
        "min(room, max(prefill_tokens_max, 1))",
        "min(room, max(prefill_tokens_max, 0))",
    ),
    Mutant(
        "decodes starve prefill",
        "scheduler",
        "rows += self._prefill_rows(budget)",
        "rows += self._prefill_rows(budget) if not rows else []",
    ),
    Mutant(
        "prefill is charged once",
        "scheduler",
        "                rows.append(sequence.row(budget))\n                budget -= len(rows[-1].tokens)",
        "                rows.append(sequence.row(budget))",
    ),
    Mutant(
        "new prefill is not charged",
        "scheduler",
        "            rows.append(self._seat().row(budget))\n            budget -= len(rows[-1].tokens)",
        "            rows.append(self._seat().row(budget))",
    ),
    Mutant(
        "the youngest prefill goes first",
        "scheduler",
        "for sequence in self._running.values():\n            if not budget",
        "for sequence in reversed(self._running.values()):\n            if not budget",
    ),
    Mutant(
        "one request is seated a step",
        "scheduler",
        "while budget and self._waiting and self._slots.free_count:",
        "if budget and self._waiting and self._slots.free_count:",
    ),
    Mutant(
        "seating waits for an empty engine",
        "scheduler",
        "while budget and self._waiting and self._slots.free_count:",
        "while budget and self._waiting and self._slots.free_count and len(self._running) == len(rows):",
    ),
    Mutant(
        "a row samples in the middle of its prompt", "sequence", "tokens, end == len(self.tokens))", "tokens, True)"
    ),
    Mutant(
        "a chunk starts one late",
        "sequence",
        "tokens = tuple(self.tokens[self.computed : end])",
        "tokens = tuple(self.tokens[self.computed : end])[-1:]",
    ),
    # output
    Mutant("one token too many", "sequence", "if index + 1 >= params.tokens_max:", "if index >= params.tokens_max:"),
    Mutant("one token too few", "sequence", "if index + 1 >= params.tokens_max:", "if index + 2 >= params.tokens_max:"),
    Mutant(
        "stop ids are ignored", "sequence", "if token in params.stop_ids and index >= params.tokens_min:", "if False:"
    ),
    Mutant(
        "tokens_min is ignored",
        "sequence",
        "if token in params.stop_ids and index >= params.tokens_min:",
        "if token in params.stop_ids:",
    ),
    Mutant("tokens_min is one too large", "sequence", "index >= params.tokens_min:", "index > params.tokens_min:"),
    Mutant(
        "the index is counted after the token",
        "scheduler",
        "Token(row.id, sequence.output_count, token)",
        "Token(row.id, sequence.output_count + 1, token)",
    ),
    # resumption
    Mutant("delivered tokens are made again", "sequence", "[*request.prompt, *request.generated]", "[*request.prompt]"),
    Mutant(
        "delivered tokens do not count",
        "sequence",
        "return len(self.tokens) - len(self.request.prompt)",
        "return len(self.tokens) - len(self.request.prompt) - len(self.request.generated)",
    ),
    Mutant(
        "a complete request is resumed",
        "scheduler",
        "if reason := ending_of(request):",
        "if (reason := ending_of(request)) and False:",
    ),
    Mutant(
        "a resumed request is refused by a full queue",
        "scheduler",
        "if not is_resumed(sequence) and (lack := self._lack_of_room(sequence)):",
        "if lack := self._lack_of_room(sequence):",
    ),
    Mutant(
        "only a request with output counts as resumed",
        "waiting",
        "return sequence.request.resumed > 0 or bool(sequence.request.generated)",
        "return bool(sequence.request.generated)",
    ),
    Mutant(
        "resumed requests go to the back",
        "waiting",
        "lane = self._resumed if is_resumed(sequence) else self._new",
        "lane = self._new",
    ),
    Mutant(
        "resumed requests go last in, first out",
        "waiting",
        "return self._taken(lane.popitem(last=False)[1])",
        "return self._taken(lane.popitem(last=lane is self._resumed)[1])",
    ),
    # admission
    Mutant("the queue is not bounded by requests", "scheduler", "if queued_count >= policy.waiting_max:", "if False:"),
    Mutant(
        "the queue holds one request too many",
        "scheduler",
        "if queued_count >= policy.waiting_max:",
        "if queued_count > policy.waiting_max:",
    ),
    Mutant("the queue is not bounded by tokens", "scheduler", "if total > policy.waiting_tokens_max:", "if False:"),
    Mutant("the queue forgets tokens that left", "waiting", "        self._tokens_count -= len(sequence.tokens)\n", ""),
    Mutant(
        "a full queue is the caller's fault",
        "scheduler",
        "Finish.REJECTED, lack, Refusal.FULL",
        "Finish.REJECTED, lack, Refusal.INVALID",
    ),
    Mutant("what can never fit is admitted", "admission", "if total > limits.capacity:", "if False:"),
    Mutant(
        "the largest request that fits is refused",
        "admission",
        "if total > limits.capacity:",
        "if total >= limits.capacity:",
    ),
    Mutant("an empty prompt is admitted", "admission", "if prompt_count < 1:", "if False:"),
    Mutant(
        "ids outside the vocabulary are admitted",
        "admission",
        "return _context_misfit(request, limits) or _vocabulary_misfit(request, limits)",
        "return _context_misfit(request, limits)",
    ),
)


def mutated(mutant: Mutant) -> Core:
    """The core with `mutant` in it, loaded beside the real one."""
    folder = Path(residentd.core.__path__[0])
    names = {name: f"residentd.core.{name}" for name in MODULES}
    saved = {full: sys.modules[full] for full in names.values() if full in sys.modules}
    try:
        for name, full in names.items():
            source = (folder / f"{name}.py").read_text()
            if name == mutant.module:
                assert source.count(mutant.old) == 1, f"{mutant.name}: found {source.count(mutant.old)} times"
                source = source.replace(mutant.old, mutant.new)
            module = sys.modules[full] = ModuleType(full)
            exec(compile(source, f"{name}.py", "exec"), module.__dict__)
        return Core(sys.modules[names["scheduler"]].Scheduler, sys.modules[names["invariants"]].check)
    finally:
        for full in names.values():
            sys.modules.pop(full, None)
        sys.modules.update(saved)


def kill(mutant: Mutant, seeds_max: int = SEEDS_MAX) -> Kill | None:
    """The first seed that finds the mutant, and how; None when it survives `seeds_max` seeds."""
    core = mutated(mutant)
    for seed in range(seeds_max):
        try:
            simulate(seed, core)
        except Exception as error:  # noqa: BLE001  (whatever a broken core raises kills it)
            return Kill(seed, f"{type(error).__name__}: {error}")
    return None


def main() -> int:
    started, survivors = time.perf_counter(), 0
    for mutant in MUTANTS:
        death = kill(mutant)
        survivors += death is None
        print(f"{mutant.name:48} {'SURVIVED' if death is None else f'seed {death.seed:3}: {death.reason[:100]}'}")
    print(f"{len(MUTANTS)} mutants, {survivors} survived, {time.perf_counter() - started:.1f} s")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
