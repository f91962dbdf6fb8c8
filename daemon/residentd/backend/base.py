"""The contract between the step loop and whatever computes logits."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from residentd.types import Limits, StepPlan

Logits = npt.NDArray[np.float32]
"""float32 [rows that sample, vocab], in the order of the plan's rows. Owned by the backend until its next step."""


class Backend(Protocol):
    """Computes one step at a time over `limits.slots` KV slots.

    `step` writes K/V for every row's tokens at positions start … of its slot and returns the logits of each sampling
    row's last token. Slots keep their content between steps; positions at or beyond a row's end are undefined.
    Raises StepRetryableError (nothing visible was written) or BackendLostError (this object is unusable).
    """

    @property
    def limits(self) -> Limits: ...

    def step(self, plan: StepPlan) -> Logits: ...

    def close(self) -> None: ...
