"""What the operator may choose about a build, and the limits of each choice."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import get_args

from residentd.errors import OperatorError
from residentd.models.encoder import Kind
from residentd.models.manifest import check_name
from residentd_build.precision import PRECISIONS, Precision, PrecisionError, Scheme, scheme_for

CONTEXT_DEFAULT_MAX = 2048
CONTEXT_MIN, CONTEXT_MAX = 8, 1 << 20
SLOTS_DEFAULT, SLOTS_MAX = 16, 1024
STEP_TOKENS_DEFAULT, STEP_TOKENS_MAX = 512, 1 << 16
AUTO = "auto"
CANONICAL, COMPATIBILITY = "canonical", "compatibility"
MODES = (AUTO, CANONICAL, COMPATIBILITY)
AXIS_MAX = 1 << 20
KINDS = (AUTO, *get_args(Kind))
AUTO_SCHEMES = (
    scheme_for("fp32"),
    scheme_for("int8"),
    scheme_for("int8", block=32),
    scheme_for("int4"),
    scheme_for("int4", block=128),
)
"""What --precision auto measures, the exact one first; in blocks, what loses more comes after what loses less."""
KL_BOUNDS: Mapping[Precision, float] = MappingProxyType(
    {"fp32": 1e-3, "fp16": 0.01, "bf16": 0.02, "int8": 0.05, "int4": 0.5}
)
"""Nats, of the mean. int8 is a promise (issue 3); int4 is chosen for size and speed, and its loss is shown."""
AUTO_KL_BOUND = 0.05  # what nobody asked for by name must not lose more than int8 may
KL_MIN, KL_MAX = 1e-6, 20.0  # above: worse than the distribution of another place in the text


class OptionsError(OperatorError):
    """An option is outside its limits: a usage error."""


@dataclass(frozen=True, slots=True)
class Weights:
    """How the operator wants the weights kept; None: the best for the CPU, or as a quantised export has them."""

    precision: str | None = None  # one of PRECISIONS, or AUTO
    block: int | None = None
    symmetric: bool | None = None
    embedding: str | None = None
    head: str | None = None
    kl_max: float | None = None

    def __post_init__(self) -> None:
        """Raises OptionsError."""
        if self.kl_max is not None and not KL_MIN <= self.kl_max <= KL_MAX:
            raise OptionsError(
                f"--kl-max is {self.kl_max:g}; {KL_MIN:g} to {KL_MAX:g} nats are possible. Leave it out for the default"
            )
        if self.precision not in {None, AUTO, *PRECISIONS}:
            raise OptionsError(
                f"--precision is {self.precision!r}; {', '.join(PRECISIONS)} and {AUTO} are possible. Choose one"
            )
        if self.precision == AUTO and self.details:
            raise OptionsError(
                f"--precision auto chooses {self.details[0]} itself. Leave it out, or name a precision: "
                f"{', '.join(PRECISIONS)}"
            )
        try:
            self.schemes()
        except PrecisionError as error:
            raise OptionsError(str(error)) from error

    @property
    def details(self) -> tuple[str, ...]:
        """The options given that say more than a precision."""
        given = {
            "--block": self.block,
            "--symmetric or --asymmetric": self.symmetric,
            "--embedding": self.embedding,
            "--head": self.head,
        }
        return tuple(name for name, value in given.items() if value is not None)

    def schemes(self) -> tuple[Scheme, ...]:
        """What to build: one, or the candidates."""
        if self.precision == AUTO:
            return AUTO_SCHEMES
        chosen = scheme_for(
            self.precision or "fp32",
            block=self.block,
            symmetric=self.symmetric,
            embedding=self.embedding,
            head=self.head,
        )
        return (chosen,)

    def kl_bound(self, precision: Precision) -> float:
        """The mean KL divergence past which a build is not published whose coarsest part is in `precision`."""
        if self.kl_max is not None:
            return self.kl_max
        return AUTO_KL_BOUND if self.precision == AUTO else KL_BOUNDS[precision]


@dataclass(frozen=True, slots=True)
class Options:
    """`context` None: the model's own, at most 2,048 tokens a slot. Raises OptionsError or OperatorError when made."""

    name: str
    context: int | None = None
    slots: int = SLOTS_DEFAULT
    step_tokens: int = STEP_TOKENS_DEFAULT
    weights: Weights = Weights()
    mode: str = AUTO  # canonical: nothing else; compatibility: as it was exported; auto: the first if it can be
    variant: str | None = None  # which of several ONNX files; None: the least quantised
    kind: str = AUTO  # one of KINDS; auto: by what the directory shows
    shapes: tuple[str, ...] = ()  # INPUT=1x3x48x320 each, of a tensor model

    def __post_init__(self) -> None:
        check_name(self.name)
        if self.context is not None and not CONTEXT_MIN <= self.context <= CONTEXT_MAX:
            raise OptionsError(
                f"--context is {self.context:,}; {CONTEXT_MIN} to {CONTEXT_MAX:,} tokens are possible. Choose one"
            )
        if self.mode not in MODES:
            raise OptionsError(f"--mode is {self.mode!r}; {', '.join(MODES)} are possible. Choose one")
        _ = self.asked_shapes
        if self.kind not in KINDS:
            raise OptionsError(f"--kind is {self.kind!r}; {', '.join(KINDS)} are possible. Choose one")
        if not 1 <= self.slots <= SLOTS_MAX:
            raise OptionsError(f"--slots is {self.slots:,}; 1 to {SLOTS_MAX:,} are possible. Choose one of these")
        if not self.slots < self.step_tokens <= STEP_TOKENS_MAX:
            raise OptionsError(
                f"--step-tokens is {self.step_tokens:,}; it must be more than the {self.slots:,} slots, so that every "
                f"sequence can go on while another is read in, and at most {STEP_TOKENS_MAX:,}. Change one of the two"
            )

    @property
    def asked_shapes(self) -> dict[str, tuple[int, ...]]:
        """Sizes of inputs by name. Raises OptionsError."""
        found = {}
        for text in self.shapes:
            name, _, sizes = text.rpartition("=")
            axes = sizes.split("x") if sizes else []
            if not name or not all(axis.isascii() and axis.isdigit() and 0 < int(axis) <= AXIS_MAX for axis in axes):
                raise OptionsError(f"--shape is {text!r}; INPUT=1x3x48x320 is expected. Write it so")
            found[name] = tuple(map(int, axes))
        return found

    def context_for(self, context_max: int) -> int:
        return self.context if self.context is not None else min(context_max, CONTEXT_DEFAULT_MAX)
