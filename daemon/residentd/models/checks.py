"""One check of a version against what was recorded when it was built: parts, environment, verdict. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from residentd.models.environment import Change, Environment, changes_between

Occasion = Literal["install", "load", "verify"]

FILES = "files"
TOKENIZER = "tokenizer"
CHAT = "chat template"
TOKENS = "golden tokens"
STATISTICS = "logit statistics"
OUTPUTS = "golden outputs"  # of models that answer in one run
STATISTICS_RMS = "logit statistics, rms"


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of thing that was compared. `missed` above `missed_max`: the check fails.

    `worst` and `bound` are for what is measured rather than counted; `detail` says where it is wrong, or worst.
    """

    name: str
    checked: int
    missed: int
    missed_max: int = 0
    worst: float = 0.0
    bound: float = 0.0
    detail: str = ""

    @property
    def passed(self) -> bool:
        return self.missed <= self.missed_max

    def __str__(self) -> str:
        if self.bound:
            return f"{self.name}: worst difference {self.worst:.2g}, the bound is {self.bound:.2g} ({self.detail})"
        where = f" ({self.detail})" if self.detail else ""
        return f"{self.name}: {self.missed:,} of {self.checked:,} differ{where}"


class Speeds(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens a second of the steps of a loaded engine, without any request's overhead."""

    decode_one: float  # one sequence
    decode_many: float  # `rows` together
    rows: int
    prefill: float


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """What one check found. `message` is empty when all parts passed; else the numbers and what to do.

    `changes`: the environment against that of the last successful check before; `first`: there was none. `speeds` were
    measured by this check, or by the last one before that did; None: the version was never loaded.
    """

    occasion: Occasion
    checked: str  # ISO 8601, UTC
    parts: tuple[Part, ...]
    environment: dict[str, str]
    changes: tuple[Change, ...] = ()
    first: bool = False
    message: str = ""
    speeds: Speeds | None = None

    @property
    def passed(self) -> bool:
        return not self.message

    @property
    def since(self) -> str:
        """What changed before this check, in words; empty when nothing did."""
        if self.first:
            return "the first check that is recorded"
        return f"first check since {describe(self.changes)}" if self.changes else ""


def judge(
    occasion: Occasion,
    parts: Sequence[Part],
    environment: Environment,
    *,
    checked: str,
    last_good: Check | None,
) -> Check:
    """The check that `parts` make, against the environment of the last one that passed."""
    changes = () if last_good is None else changes_between(last_good.environment, environment)
    return Check(
        occasion=occasion,
        checked=checked,
        parts=tuple(parts),
        environment=dict(environment),
        changes=changes,
        first=last_good is None,
        message=failure_message(parts, changes),
    )


def failure_message(parts: Sequence[Part], changes: Sequence[Change]) -> str:
    """The numbers and the way out; empty when every part passed."""
    failed = [part for part in parts if not part.passed]
    if not failed:
        return ""
    if any(part.name == FILES for part in failed):
        remedy = "Restore the files from a backup, or install the model again"
    elif changes:
        remedy = f"Changed since its last good check: {describe(changes)}. Undo that, or install the model again here"
    else:
        remedy = "Install the model again on this machine"
    numbers = "; ".join(str(part) for part in failed)
    return f"it does not reproduce what was recorded when it was built. {numbers}. {remedy}"


def describe(changes: Sequence[Change]) -> str:
    return ", ".join(str(change) for change in changes)
