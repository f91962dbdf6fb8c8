"""The passes in their order: from an exporter's graph to the canonical one, then what makes that fast.

Each states in its file what it ensures.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType
from typing import TYPE_CHECKING

from residentd_build.passes import (
    attention,
    branches,
    experts,
    fold,
    independence,
    linears,
    norms,
    operators,
    positions,
    prune,
    rotary,
    rows,
    rowwise,
    tidy,
    widen,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from residentd_build.draft import Draft

Pass = Callable[["Draft"], str]
"""Rewrites the draft in place and returns one line for the manifest. Raises SourceError with every finding."""

CANONICALISE: Mapping[str, Pass] = MappingProxyType(
    {
        "branches": branches.run,
        "widen": widen.run,
        "rowwise": rowwise.run,
        "operators": operators.run,
        "experts": experts.run,
        "attention": attention.run,
        "positions": positions.run,
        "fold": fold.run,
        "rows": rows.run,
        "prune": prune.run,
        "independence": independence.run,
    }
)
FUSE: Mapping[str, Pass] = MappingProxyType(
    {"rotary": rotary.run, "norms": norms.run, "tidy": tidy.run, "linears": linears.run}
)
