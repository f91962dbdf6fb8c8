"""What the operator may choose about a build, and the limits of each choice."""

from __future__ import annotations

from dataclasses import dataclass

from residentd.errors import OperatorError
from residentd.models.manifest import check_name

CONTEXT_DEFAULT_MAX = 2048
CONTEXT_MIN, CONTEXT_MAX = 8, 1 << 20
SLOTS_DEFAULT, SLOTS_MAX = 16, 1024
STEP_TOKENS_DEFAULT, STEP_TOKENS_MAX = 512, 1 << 16


class OptionsError(OperatorError):
    """An option is outside its limits: a usage error."""


@dataclass(frozen=True, slots=True)
class Options:
    """`context` None: the model's own, at most 2,048 tokens a slot. Raises OptionsError or OperatorError when made."""

    name: str
    context: int | None = None
    slots: int = SLOTS_DEFAULT
    step_tokens: int = STEP_TOKENS_DEFAULT

    def __post_init__(self) -> None:
        check_name(self.name)
        if self.context is not None and not CONTEXT_MIN <= self.context <= CONTEXT_MAX:
            raise OptionsError(
                f"--context is {self.context:,}; {CONTEXT_MIN} to {CONTEXT_MAX:,} tokens are possible. Choose one"
            )
        if not 1 <= self.slots <= SLOTS_MAX:
            raise OptionsError(f"--slots is {self.slots:,}; 1 to {SLOTS_MAX:,} are possible. Choose one of these")
        if not self.slots < self.step_tokens <= STEP_TOKENS_MAX:
            raise OptionsError(
                f"--step-tokens is {self.step_tokens:,}; it must be more than the {self.slots:,} slots, so that every "
                f"sequence can go on while another is read in, and at most {STEP_TOKENS_MAX:,}. Change one of the two"
            )

    def context_for(self, context_max: int) -> int:
        return self.context if self.context is not None else min(context_max, CONTEXT_DEFAULT_MAX)
