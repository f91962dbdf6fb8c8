"""What others' files may say and do: quoted in short, and turned into a finding where a library trips over it."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from residentd.backend.messages import plain_text
from residentd.errors import Finding, ResidentError, SourceError

if TYPE_CHECKING:
    from collections.abc import Iterator

QUOTED_CHARS_MAX = 100
WHAT_CHARS_MAX, WHERE_CHARS_MAX, REMEDY_CHARS_MAX = 500, 250, 300
TOKEN_ID_MAX = (1 << 32) - 1  # tokenizers keeps ids in 32 bits
REMEDY = "Export the model again; if it came from somebody else, do not trust it"


def cut(text: str, chars_max: int = QUOTED_CHARS_MAX) -> str:
    """At most `chars_max` characters, every one of which can be written as UTF-8."""
    short = text if len(text) <= chars_max else f"{text[: chars_max - 1]}…"
    if short.isascii():
        return short
    return short.encode("utf-8", "replace").decode()


def token_id_of(value: object) -> int | None:
    """`value` if it can be a token's id."""
    is_id = isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= TOKEN_ID_MAX
    return value if is_id and isinstance(value, int) else None


@contextlib.contextmanager
def refusing(deed: str) -> Iterator[None]:
    """What goes wrong inside is the source's: SourceError with short findings. "It cannot be `deed`", if unforeseen.

    Our own bugs (AssertionError), a lack of memory and faults of the disk pass.
    """
    try:
        yield
    except SourceError as error:
        raise SourceError([_short(finding) for finding in error.findings]) from error
    except (ResidentError, AssertionError, MemoryError, OSError):
        raise
    except Exception as error:
        if isinstance(error.__cause__, (MemoryError, OSError)):
            raise error.__cause__ from None
        lines = str(error).splitlines() or [""]
        said = cut(plain_text(lines[0]).rstrip("."), 2 * QUOTED_CHARS_MAX)
        what = f"it cannot be {deed}: {type(error).__name__}: {said}"
        raise SourceError([_short(Finding(what, "source", REMEDY))]) from error


def _short(finding: Finding) -> Finding:
    return Finding(
        cut(finding.what, WHAT_CHARS_MAX), cut(finding.where, WHERE_CHARS_MAX), cut(finding.remedy, REMEDY_CHARS_MAX)
    )
