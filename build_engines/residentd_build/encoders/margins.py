"""How far an engine may be from its export, by what the export's weights are."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from residentd_build.precision import Precision


@dataclass(frozen=True, slots=True)
class Margins:
    """`floor`, `ceiling` and `company` are shares of the largest number of an output.

    floor: what roundings alone explain. ceiling: what no encoder's engine may be over. company: an export whose texts
    differ more than this with their company has no answer that a run of several could reproduce, so they run one by
    one. rounding: of one number in the type that is computed in, relative; roundings: how many of it in the inputs a
    tensor model's engine may be off by, where that is more than the floor.
    """

    floor: float
    ceiling: float
    company: float
    rounding: float = 2.0**-23
    roundings: int = 16


FP32 = Margins(floor=2e-5, ceiling=1e-3, company=1e-3)
"""340 roundings of 2^-24. Seen on MiniLM-L6: 7e-7; on real tensor models at most 3e-6. Other kernels round at other
places, and an output that a sigmoid has made small (1e-4) keeps the error of the large numbers before it: seen up to
1.2 times what one rounding of the inputs does to it."""
HALF = Margins(floor=2e-3, ceiling=1e-2, company=1e-2, rounding=2.0**-10, roundings=2)
"""4 roundings of 2^-11, since sums are kept in fp32. Seen on MiniLM-L6 in fp16: 2e-4, in company 3e-4."""
QUANTISED = Margins(floor=0.1, ceiling=0.1, company=1e-2)
"""A fused kernel may round an activation to the next of 255 steps, 0.4 % of its range, in each of dozens of matrices.
Seen on MiniLM-L6 with dynamic activations: 0.05 alone; in company 0.13, for the whole run shares one scale."""

MARGINS: Mapping[Precision, Margins] = MappingProxyType(
    {"fp32": FP32, "fp16": HALF, "bf16": HALF, "int8": QUANTISED, "int4": QUANTISED}
)
