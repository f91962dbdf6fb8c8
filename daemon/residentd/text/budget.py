"""What one rendering of a chat template may use, and the refusal of what would go past it in a single step."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from string import Formatter
from typing import Any, Final

from residentd.text.limits import (
    RENDER_CHARS_MAX,
    RENDER_INTEGER_BITS_MAX,
    RENDER_SECONDS_MAX,
    RENDER_STEPS_MAX,
    RENDER_WIDTH_MAX,
)

PERCENT_WIDTH = re.compile(r"%(?:\([^)]*\))?[#0\- +]*(\*|\d+)?(?:\.(\*|\d+))?")
OBJECT_CHARS: Final = 64  # what an object weighs beside its characters: about what it costs in memory and time


class BudgetError(Exception):
    """The rendering was stopped at one of its limits, which the message names."""


@dataclass(slots=True)
class Budget:
    """What one rendering may still use. Owned by that rendering."""

    clock: Callable[[], float]
    deadline: float
    steps_left: int = RENDER_STEPS_MAX
    chars_left: int = RENDER_CHARS_MAX

    @classmethod
    def start(cls, clock: Callable[[], float]) -> Budget:
        return cls(clock, clock() + RENDER_SECONDS_MAX)

    def spend(self, steps: int) -> None:
        self.steps_left -= steps
        if self.steps_left < 0:
            raise BudgetError(f"more than {RENDER_STEPS_MAX:,} steps")
        if self.clock() > self.deadline:
            raise BudgetError(f"more than {RENDER_SECONDS_MAX:g} seconds")

    def make(self, chars: int) -> None:
        """Ask before `chars` characters (or list items) are made."""
        self.chars_left -= chars
        if self.chars_left < 0:
            raise BudgetError(f"more than {RENDER_CHARS_MAX:,} characters of text")

    def make_objects(self, count: int) -> None:
        """Ask before `count` pieces of text are made."""
        self.make(count * OBJECT_CHARS)


def weigh(value: Any, budget: Budget) -> None:
    """Charge for looking into `value` or turning it into text: shared parts count as often as they are written."""
    waiting = [value]
    while waiting:
        value = waiting.pop()
        budget.make(len(value) + 1 if isinstance(value, str) else OBJECT_CHARS)
        if isinstance(value, Mapping):
            waiting += (*value.keys(), *value.values())
        elif isinstance(value, list | tuple | set | frozenset):
            waiting += value


def check_percent(budget: Budget, template: str, texts: Iterable[str]) -> None:
    """Ask before `template % values` is made, of which `texts` are the strings."""
    for match in PERCENT_WIDTH.finditer(template):
        for width in filter(None, match.groups()):
            check_width(RENDER_WIDTH_MAX + 1 if width == "*" else int(width[:9]))
    budget.make(template.count("%") * max(map(len, texts), default=0))


def check_braces(budget: Budget, template: str, texts: Iterable[str]) -> None:
    """Ask before `template.format(values)` is made, of which `texts` are the strings."""
    for _, _, specification, _ in Formatter().parse(template):
        for width in re.findall(r"\{|\d+", specification or ""):
            check_width(RENDER_WIDTH_MAX + 1 if width == "{" else int(width[:9]))
    budget.make(template.count("{") * max(map(len, texts), default=0))


def check_width(width: int) -> None:
    """Refuse a width that would make a short text a huge one."""
    if abs(width) > RENDER_WIDTH_MAX:
        raise BudgetError(f"a width that is computed or above {RENDER_WIDTH_MAX:,}")


def check_integers(operator: str, left: Any, right: Any) -> None:
    """Refuse a product or power that would be a huge integer."""
    if operator not in {"*", "**"} or not (isinstance(left, int) and isinstance(right, int)):
        return
    bits = left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
    if bits > RENDER_INTEGER_BITS_MAX:
        raise BudgetError(f"an integer of more than {RENDER_INTEGER_BITS_MAX} bits")
