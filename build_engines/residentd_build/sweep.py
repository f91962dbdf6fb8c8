"""`python -m residentd_build.sweep STATE`: remove what a build left in a state directory when it was killed."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

from residentd.errors import ResidentError
from residentd.models.registry import Registry
from residentd.models.store import Store


def main(state: Path) -> int:
    """0, or 1 where it cannot be done now; the next build tries again."""
    try:
        with contextlib.closing(Registry(state)) as registry:
            Store(state).sweep(registry.digests)
    except ResidentError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
