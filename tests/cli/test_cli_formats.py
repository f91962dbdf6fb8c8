"""Numbers and times as a person reads them."""

from __future__ import annotations

import math
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from residentd.cli import formats

NOW = datetime(2026, 12, 1, 12, 0, 0, tzinfo=UTC)


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0 B"), (999, "999 B"), (1000, "1 kB"), (1536, "1.54 kB"), (538_000_000, "538 MB"), (99_960_000, "100 MB"),
        (999_600_000, "1 GB"), (14_483_000_000, "14.5 GB"), (2_500_000_000_000, "2.5 TB"), (5 * 10**15, "5,000 TB"),
    ],
)  # fmt: skip
def test_sizes(number: int, text: str) -> None:
    """Three significant digits, in powers of 1000."""
    assert formats.size(number) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0.00 ms"), (0.421, "0.42 ms"), (9.996, "10.0 ms"), (21.24, "21.2 ms"), (99.96, "100 ms"),
        (340.4, "340 ms"), (1250.0, "1.25 s"), (12_340.0, "12.3 s"), (math.nan, formats.NONE),
    ],
)  # fmt: skip
def test_milliseconds(value: float, text: str) -> None:
    """About three significant digits; seconds from 1,000 ms; a dash for what is not a number."""
    assert formats.milliseconds(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0.00"), (9.996, "10.0"), (13.0, "13.0"), (19.406, "19.4"), (99.94, "99.9"), (99.96, "100"),
        (2345.6, "2,346"), (999_499.0, "999,499"), (1.08e10, "1.1e+10"), (math.inf, formats.NONE),
    ],
)  # fmt: skip
def test_three_digits(value: float, text: str) -> None:
    """About three significant digits, trailing zeros among them; whole numbers from 100; powers from a million."""
    assert formats.three_digits(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0"), (4.9e-6, "0"), (5.1e-6, "5e-06"), (0.00063, "0.00063"), (0.0312, "0.031"), (1.44, "1.4")],
)
def test_divergences(value: float, text: str) -> None:
    """Two digits; what rounding alone explains is 0."""
    assert formats.divergence(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 s"), (-5.0, "0 s"), (59.9, "59 s"), (60.0, "1 min"), (61.0, "1 min 1 s"), (3600.0, "1 h"),
        (8000.0, "2 h 13 min"), (86_400.0, "1 d"), (90_000.0, "1 d 1 h"), (86_460.0, "1 d"),
    ],
)  # fmt: skip
def test_durations(seconds: float, text: str) -> None:
    """The two largest units; a second unit of zero is left out."""
    assert formats.duration(seconds) == text


@pytest.mark.parametrize(
    ("created", "text"),
    [
        ("2026-12-01T11:59:30+00:00", "30 s"), ("2026-12-01T09:47:00Z", "2 h"), ("2026-11-01T12:00:00", "30 d"),
        ("2026-12-01T14:00:00+02:00", "0 s"), ("2027-01-01T00:00:00Z", "0 s"), ("", formats.NONE),
        ("soon", formats.NONE),
    ],
)  # fmt: skip
def test_ages(created: str, text: str) -> None:
    """The largest unit since then; a time without a zone is UTC; a clock set back is not a negative age."""
    assert formats.age(created, NOW) == text


@given(st.integers(0, 10_000), st.integers(0, 10_000), st.integers(2, 40))
def test_a_bar_tells_some_from_none_and_from_all(used: int, total: int, width: int) -> None:
    """Empty only when nothing is used, full only when everything is, and always as wide as asked for."""
    bar = formats.bar(used, total, width=width)
    filled = bar.count("█")
    assert bar == "█" * filled + "░" * (width - filled)
    assert (filled == 0) == (used == 0 or total == 0)
    assert (filled == width) == (0 < total <= used)


@pytest.mark.parametrize(
    ("value", "text"), [(0.0, "0.0"), (33.14, "33.1"), (999.6, "1,000"), (1203.0, "1,203"), (math.nan, formats.NONE)]
)
def test_rates(value: float, text: str) -> None:
    """One decimal below a thousand."""
    assert formats.rate(value) == text


def test_a_digest_is_cut_after_its_algorithm() -> None:
    """The short form tells versions apart, so it starts after `sha256:`."""
    assert formats.short_digest("sha256:" + "0123456789abcdef" * 4) == "01234567"
    assert formats.short_digest("") == formats.NONE
