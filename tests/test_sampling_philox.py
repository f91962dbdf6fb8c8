from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from residentd.sampling.philox import philox2x64, uniform

WORD = st.integers(0, 2**64 - 1)

# Random123, tests/kat_vectors: "philox2x64 10", counter, key, result.
KNOWN_ANSWERS = (
    ((0x0000000000000000, 0x0000000000000000), 0x0000000000000000, (0xCA00A0459843D731, 0x66C24222C9A845B5)),
    ((0xFFFFFFFFFFFFFFFF, 0xFFFFFFFFFFFFFFFF), 0xFFFFFFFFFFFFFFFF, (0x65B021D60CD8310F, 0x4D02F3222F86DF20)),
    ((0x243F6A8885A308D3, 0x13198A2E03707344), 0xA4093822299F31D0, (0x0A5E742C2997341C, 0xB0F883D38000DE5D)),
)


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_philox_gives_the_published_answers(counter: tuple[int, int], key: int, expected: tuple[int, int]) -> None:
    """The generator is Philox2x64-10, bit for bit."""
    assert philox2x64(counter, key) == expected


def test_uniform_is_the_high_bits_of_the_block_at_the_position() -> None:
    """The number of (seed, position) never changes: a resumed answer on another machine draws the same."""
    assert uniform(0, 0) == ((0xCA00A0459843D731 >> 12) + 0.5) / 2**52
    assert uniform(2**64 - 1, 7) == ((philox2x64((7, 0), 2**64 - 1)[0] >> 12) + 0.5) / 2**52


@given(WORD, st.integers(0, 2**31))
def test_uniform_lies_strictly_between_0_and_1(seed: int, position: int) -> None:
    """Neither end is ever drawn."""
    assert 0.0 < uniform(seed, position) < 1.0


def test_the_extreme_words_stay_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    """All bits zero and all bits one map to the first and the last half step, not to 0 and 1."""
    monkeypatch.setattr("residentd.sampling.philox.philox2x64", lambda counter, _key: (counter[0], 0))
    assert uniform(0, 0) == 2.0**-53
    assert uniform(0, 2**64 - 1) == 1.0 - 2.0**-53


def test_neighbouring_seeds_and_positions_are_unrelated() -> None:
    """Over a 256 x 256 grid of seeds and positions each of 16 bins holds its share, and so does each diagonal pair.

    Chi-square with 15 degrees of freedom passes 50.5 with probability 1e-5; the grid is fixed.
    """
    grid = [[uniform(seed, position) for position in range(256)] for seed in range(256)]
    flat = [value for row in grid for value in row]
    assert len(set(flat)) == len(flat)
    assert chi_square([int(value * 16) for value in flat]) < 50.5
    steps = [
        (grid[seed + 1][position + 1] - grid[seed][position]) % 1.0 for seed in range(255) for position in range(255)
    ]
    assert chi_square([int(step * 16) for step in steps]) < 50.5


def chi_square(bins: list[int]) -> float:
    expected = len(bins) / 16
    return sum((bins.count(index) - expected) ** 2 / expected for index in range(16))
