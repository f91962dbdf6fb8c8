"""The simulator is worth what it finds: every planted bug must die within a few hundred seeds."""

from __future__ import annotations

from pathlib import Path

import pytest

import residentd.core
from sim.life import Core
from sim.mutants import MODULES, MUTANTS, SEEDS_MAX, Mutant, kill, mutated
from sim.simulate import simulate


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_simulator_kills(mutant: Mutant) -> None:
    """Some seed fails with this bug in the core."""
    assert kill(mutant) is not None, f"{mutant.name} survived {SEEDS_MAX} seeds"


def test_the_loader_itself_breaks_nothing() -> None:
    """A mutant that changes nothing lives exactly as the real core does."""
    unchanged = mutated(Mutant("nothing", "scheduler", "class Scheduler:", "class Scheduler:"))
    assert unchanged.scheduler is not Core().scheduler
    assert [simulate(seed, unchanged) for seed in range(20)] == [simulate(seed) for seed in range(20)]


def test_every_module_of_the_core_is_loaded_with_the_mutant() -> None:
    """A new module of the core joins the list, or mutants would run beside the real one. Two have their own tests."""
    files = {path.stem for path in Path(residentd.core.__path__[0]).glob("*.py")}
    assert files - {"__init__", "pacing", "batching"} == set(MODULES)


def test_a_pattern_that_is_not_there_is_an_error() -> None:
    """A mutant whose pattern rotted away must not count as killed."""
    with pytest.raises(AssertionError, match="found 0 times"):
        mutated(Mutant("rotten", "scheduler", "no such text", ""))
