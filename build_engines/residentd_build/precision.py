"""In which formats a build keeps its weights: what may be chosen, and what the CPU does best.

Matrices other than the embedding and the head:

    fp32             as exported
    fp16, bf16       stored in 16 bits, computed in fp32: half the file, the same memory and speed as fp32
    int8, block 0    "row8": 8-bit weights with one scale an output channel by 8-bit activations with one scale a token
    int8, block n    8-bit weights with one scale for each n inputs of a channel (MatMulNBits)
    int4, block n    likewise with 4 bits

`embedding` and `head` each choose fp32, int8 or int4, or "same": the precision of the other matrices. A build is as
coarse as its coarsest part: fp32 with a head in int8 is a quantised build, whatever the other matrices are.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

from residentd.errors import OperatorError

if TYPE_CHECKING:
    from collections.abc import Mapping

Precision = Literal["fp32", "fp16", "bf16", "int8", "int4"]
Choice = Literal["fp32", "int8", "int4", "same"]
Activations = Literal["float", "dynamic"]

PRECISIONS: tuple[Precision, ...] = ("fp32", "fp16", "bf16", "int8", "int4")
"""From the finest to the coarsest."""
CHOICES: tuple[Choice, ...] = ("same", "fp32", "int8", "int4")
BLOCKS: Mapping[str, tuple[int, ...]] = MappingProxyType({"int8": (0, 32, 128), "int4": (32, 128)})
"""Inputs of a channel that share a scale, 0: all of them. The first is the default."""


class PrecisionError(OperatorError):
    """A combination of precision options that does not exist: a usage error."""


@dataclass(frozen=True, slots=True)
class Scheme:
    """Made by `scheme_for`. `symmetric` is about weights; block and symmetric mean nothing for floating point."""

    precision: Precision
    block: int = 0
    symmetric: bool = True
    activations: Activations = "float"
    embedding: Choice = "same"
    head: Choice = "same"

    @property
    def embedding_precision(self) -> Precision:
        return self.precision if self.embedding == "same" else self.embedding

    @property
    def head_precision(self) -> Precision:
        return self.precision if self.head == "same" else self.head

    @property
    def coarsest(self) -> Precision:
        """Of the three parts."""
        return max(self._parts, key=PRECISIONS.index)

    @property
    def is_exact(self) -> bool:
        """Every weight stays as it was exported."""
        return self.coarsest == "fp32"

    def loses_more_than(self, other: Scheme) -> bool:
        """Whether that needs no measuring: both keep blocks, and no part has more bits here or smaller blocks.

        Of "row8" nothing is known beforehand: what it loses is mostly in the activations.
        """
        if self == other or not (self.block and other.block):
            return False
        pairs = zip(self._parts, other._parts, strict=True)
        return self.block >= other.block and all(
            PRECISIONS.index(mine) >= PRECISIONS.index(theirs) for mine, theirs in pairs
        )

    @property
    def _parts(self) -> tuple[Precision, Precision, Precision]:
        return self.precision, self.embedding_precision, self.head_precision


DEFAULTS: Mapping[Precision, Scheme] = MappingProxyType(
    {
        "fp32": Scheme("fp32"),
        "fp16": Scheme("fp16"),
        "bf16": Scheme("bf16"),
        "int8": Scheme("int8", block=0, activations="dynamic"),
        "int4": Scheme("int4", block=32, embedding="int8", head="int8"),
    }
)


def scheme_for(
    precision: str,
    *,
    block: int | None = None,
    symmetric: bool | None = None,
    embedding: str | None = None,
    head: str | None = None,
) -> Scheme:
    """The best scheme for the CPU with what was chosen; None: unchosen. Raises PrecisionError."""
    base = next((scheme for name, scheme in DEFAULTS.items() if name == precision), None)
    if base is None:
        raise PrecisionError(f"--precision is {precision!r}; {', '.join(PRECISIONS)} are possible. Choose one")
    if block is not None:
        _check_block(base.precision, block)
        base = replace(base, block=block, activations="dynamic" if block == 0 else "float")
    if symmetric is not None:
        _check_symmetric(base, symmetric=symmetric)
        base = replace(base, symmetric=symmetric)
    return replace(
        base, embedding=_choice("embedding", embedding, base.embedding), head=_choice("head", head, base.head)
    )


def _check_block(precision: Precision, block: int) -> None:
    possible = BLOCKS.get(precision, ())
    if not possible:
        raise PrecisionError(f"--block {block} was given and {precision} has no blocks. Leave --block out, or use int4")
    if block not in possible:
        listed = ", ".join(map(str, possible))
        raise PrecisionError(f"--block is {block}; {precision} has blocks of {listed} weights. Choose one of these")


def _check_symmetric(scheme: Scheme, *, symmetric: bool) -> None:
    if symmetric:
        return
    if scheme.precision not in BLOCKS:
        raise PrecisionError(
            f"asymmetric weights were asked for and {scheme.precision} has no zero point. Leave the option out"
        )
    if scheme.block == 0:
        raise PrecisionError("asymmetric weights were asked for and --block 0 has none. Add --block 32 or --block 128")


def _choice(name: str, chosen: str | None, default: Choice) -> Choice:
    if chosen is None:
        return default
    found = next((choice for choice in CHOICES if choice == chosen), None)
    if found is None:
        raise PrecisionError(f"--{name} is {chosen!r}; {', '.join(CHOICES)} are possible. Choose one")
    return found
