"""The fast subset of tools/matrix, and its judgement of what was lost."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from tools.matrix import AS_EXPORTED, BASELINE, EXPORTS, Cell, cells_of, regressions, run_cell

FAST = (
    ("llama", "fp32"),
    ("qwen3", "int8"),
    ("mistral", "int4"),
    ("dynamo24-llama", "int8"),
    ("genai-int4-llama", AS_EXPORTED),
)
CELL = Cell("llama", "optimum", "llama", "fp32", passed=True, mode="canonical")


@pytest.mark.parametrize(("export", "precision"), FAST)
def test_a_cell_of_the_baseline_passes(export: str, precision: str) -> None:
    """Built, verified, equal in flight and alone, and in no lesser mode than when the baseline was written."""
    (cell,) = (cell for cell in cells_of([export], [precision]))
    done = run_cell(cell)
    assert done.passed, done.trouble
    assert regressions([done], json.loads(BASELINE.read_text(encoding="utf-8"))) == []


def test_every_export_that_has_goldens_is_in_the_baseline() -> None:
    """An export that was added without a run of tools/matrix --update is noticed."""
    baseline = {key.split()[0] for key in json.loads(BASELINE.read_text(encoding="utf-8"))}
    assert {path.parent.name for path in EXPORTS.glob("*/goldens.json")} == baseline


@pytest.mark.parametrize(
    ("cell", "before", "said"),
    [
        (CELL, {}, []),
        (CELL, {"llama fp32": "canonical"}, []),
        (replace(CELL, passed=False, trouble="why"), {"llama fp32": "canonical"}, ["llama fp32 passed before: why"]),
        (
            replace(CELL, mode="compatibility"),
            {"llama fp32": "canonical"},
            ["llama fp32 was canonical and is in compatibility mode"],
        ),
        (replace(CELL, mode="compatibility"), {"llama fp32": "compatibility"}, []),
        (replace(CELL, passed=False), {"qwen3 fp32": "canonical"}, []),
    ],
)
def test_what_passed_before_and_does_not_now_is_named(cell: Cell, before: dict[str, str], said: list[str]) -> None:
    """A lost cell and a lost mode fail the run; a new cell that fails does not."""
    assert regressions([cell], before) == said


def test_a_cell_that_cannot_be_built_says_why() -> None:
    """A failure is a row of the table, not the end of the run."""
    done = run_cell(replace(CELL, export="README.md"))
    assert not done.passed
    assert "README.md" in done.trouble
