"""Numbers and times as a person reads them. Pure."""

from __future__ import annotations

import math
from datetime import UTC, datetime

NONE = "–"  # noqa: RUF001 - a dash for a value that is not there
DIGEST_CHARACTERS = 8


def count(value: float) -> str:
    return f"{value:,.0f}"


def plural(number: int, noun: str) -> str:
    """`1 finding`, `2 findings`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def size(number_bytes: int) -> str:
    """Three significant digits in the units of storage (powers of 1000)."""
    value = float(number_bytes)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 999.5:
            return f"{value:.0f} {unit}" if unit == "B" or value >= 99.95 else f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} TB" if value < 999.5 else f"{value:,.0f} TB"


def three_digits(value: float) -> str:
    """`9.80`, `19.4`, `2,345`, `1.1e+10`."""
    if not math.isfinite(value):
        return NONE
    if value >= 999_500:
        return f"{value:.1e}"
    return f"{value:,.0f}" if value >= 99.95 else f"{value:#.3g}"


def divergence(value: float) -> str:
    """Nats, to two digits: `0.031`, `1.4`; `0` where no more than rounding is left."""
    return "0" if value < 5e-6 else f"{value:.2g}" if value >= 1e-4 else f"{value:.0e}"


def milliseconds(value: float) -> str:
    """`0.42 ms`, `21 ms`, `1.25 s`."""
    if not math.isfinite(value):
        return NONE
    if value >= 1000:
        return f"{value / 1000:.2f} s" if value < 9_995 else f"{value / 1000:,.1f} s"
    return f"{value:.2f} ms" if value < 9.995 else f"{value:.1f} ms" if value < 99.95 else f"{value:.0f} ms"


def rate(value: float) -> str:
    """Tokens a second."""
    if not math.isfinite(value):
        return NONE
    return f"{value:,.0f}" if value >= 999.5 else f"{value:.1f}"


def duration(seconds: float) -> str:
    """The two largest units: `3 d 4 h`, `2 h 13 min`, `12 s`."""
    whole = max(0, int(seconds))
    days, rest = divmod(whole, 86_400)
    hours, rest = divmod(rest, 3600)
    minutes, secs = divmod(rest, 60)
    parts = [(days, "d"), (hours, "h"), (minutes, "min"), (secs, "s")]
    while len(parts) > 1 and parts[0][0] == 0:
        parts.pop(0)
    return " ".join(f"{value} {unit}" for value, unit in parts[:2] if value or unit == parts[0][1])


def age(created: str, now: datetime) -> str:
    """How long ago the ISO 8601 time `created` was, in its largest unit; NONE where it cannot be read."""
    try:
        then = datetime.fromisoformat(created)
    except ValueError:
        return NONE
    then = then if then.tzinfo else then.replace(tzinfo=UTC)
    return " ".join(duration((now - then).total_seconds()).split(" ")[:2])


def share(part: float, whole: float) -> str:
    """`part` of `whole` in percent; NONE of nothing."""
    return f"{100 * part / whole:.0f} %" if whole else NONE


def bar(part: float, whole: float, *, width: int) -> str:
    """A bar of `width` characters; something used never looks empty, something free never looks full."""
    if whole <= 0:
        return "░" * width
    filled = round(width * part / whole)
    if 0 < part < whole:
        filled = min(max(filled, 1), width - 1)
    filled = min(max(filled, 0), width)
    return "█" * filled + "░" * (width - filled)


def short_digest(digest: str) -> str:
    """Enough of a digest to tell versions apart, without its algorithm's name."""
    return digest.rpartition(":")[2][:DIGEST_CHARACTERS] or NONE
