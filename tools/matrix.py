"""Compile every export at every precision and print exporter by architecture by precision.

A cell passes when its build verifies and, over the greedy answers that transformers recorded:
- alone, each next token is transformers' own (fp32; a quantised build's agreement is shown);
- in ragged batches and chunks the logits are those it gives alone: "equal" is to the bit, else fp32 stays within the
  bound that rounding explains (kernels of experts and of compatibility mode), quantised builds within IN_FLIGHT_KL.
Cells that passed when the baseline was written must pass, and in no lesser mode.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
from rich.console import Console
from rich.table import Table

from residentd.backend.base import Backend
from residentd.backend.modes import open_engine
from residentd.backend.onnxruntime import RuntimeOptions
from residentd.backend.replay import Cut, replay
from residentd.errors import OperatorError, ResidentError
from residentd.models.manifest import Golden, Manifest
from residentd_build.arrived import arrived
from residentd_build.options import Options, Weights
from residentd_build.pipeline import build
from residentd_build.precision import PRECISIONS
from residentd_build.quality import divergences

EXPORTS = Path(__file__).parent.parent / "tests" / "fixtures" / "exports"
BASELINE = EXPORTS.parent / "matrix.json"
AS_EXPORTED = "exported"
DEFAULT_PRECISIONS = ("fp32", "int8", "int4")
SLOTS, STEP_TOKENS = 4, 64
RAGGED = Cut(rows_max=SLOTS, chunk_tokens=7)
ALONE = Cut(rows_max=1)
IN_FLIGHT_KL = 0.02  # nats, of any one position: kernels of few and of many rows round a quantised product differently
PROMPTS_MAX = 8
KL_MAX = {"int8": 0.2, "int4": 10.0}  # tiny random weights lose far more than trained ones; what they lose is shown

Logits = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Cell:
    """One export at one precision, and what came of it."""

    export: str
    exporter: str
    architecture: str
    precision: str
    passed: bool = False
    mode: str = ""
    logit_diff: float = 0.0
    greedy_equal: int = 0
    greedy_total: int = 0
    in_flight: float = 0.0  # fp32: |Δlogit|; others: nats
    kl: float | None = None
    kib: int = 0
    seconds: float = 0.0
    trouble: str = ""

    @property
    def key(self) -> str:
        return f"{self.export} {self.precision}"


def describe(export: Path) -> tuple[str, str]:
    goldens = json.loads((export / "goldens.json").read_text(encoding="utf-8"))
    return goldens["exporter"], goldens["architecture"]


def run_cell(cell: Cell) -> Cell:
    """Build, verify and replay one cell. Never raises for what is wrong with it."""
    started = time.monotonic()
    try:
        with tempfile.TemporaryDirectory() as stage:
            found = _run(cell, EXPORTS / cell.export, Path(stage))
    except ResidentError as error:
        mode = "refused" if type(error) is OperatorError else ""  # not SourceError or AccuracyError: those are failures
        found = asdict(cell) | {"passed": False, "mode": mode, "trouble": " ".join(str(error).split())}
    return Cell(**found | {"seconds": round(time.monotonic() - started, 1)})


def _run(cell: Cell, export: Path, stage: Path) -> dict[str, Any]:
    precision = None if cell.precision == AS_EXPORTED else cell.precision
    weights = Weights(precision, kl_max=KL_MAX.get(cell.precision))
    options = Options("matrix", slots=SLOTS, step_tokens=STEP_TOKENS, weights=weights)
    manifest = build(export, stage, options, _unwatched, _roomy)
    backend = open_engine(stage, manifest.content.engine, options=RuntimeOptions(threads=1))
    try:
        equal, total, spread = _replay(backend, export, manifest)
    finally:
        backend.close()
    engine, agreement = manifest.content.engine, manifest.agreement
    is_exact = engine.precision == "fp32"
    trouble = "" if not is_exact or equal == total else f"{total - equal} tokens are not transformers' own"
    if spread > (agreement.logit_diff_bound if is_exact else IN_FLIGHT_KL):
        trouble = f"in flight differs from alone by {spread:.2g}"
    return asdict(cell) | {
        "passed": not trouble,
        "mode": engine.mode,
        "logit_diff": agreement.logit_diff_max,
        "greedy_equal": equal,
        "greedy_total": total,
        "in_flight": spread,
        "kl": None if manifest.quality is None else manifest.quality.kl_mean,
        "kib": sum(file.bytes for name, file in manifest.content.files.items() if name.startswith("engine/")) >> 10,
        "trouble": trouble,
    }


def _unwatched(stage: str, fraction: float, message: str) -> None:
    """Nobody watches the progress of a cell."""


def _roomy(needed_bytes: int) -> None:
    """Tiny engines fit."""


def _replay(backend: Backend, export: Path, manifest: Manifest) -> tuple[int, int, float]:
    """Equal and all tokens alone, and the largest difference in flight."""
    recorded = json.loads((export / "goldens.json").read_text(encoding="utf-8"))["prompts"][:PROMPTS_MAX]
    context = manifest.content.engine.limits.context
    goldens = [
        Golden(prompt=tuple(one["prompt_ids"]), output=tuple(one["greedy_ids"]))
        for one in recorded
        if len(one["prompt_ids"]) + len(one["greedy_ids"]) <= context
    ]
    alone = {(a.golden, a.output): a.logits.copy() for a in replay(backend, goldens, ALONE)}
    equal = sum(int(logits.argmax()) == goldens[g].output[output] for (g, output), logits in alone.items())
    differ = _largest_difference if manifest.content.engine.precision == "fp32" else _divergence
    spread = max(differ(a.logits, alone[a.golden, a.output]) for a in replay(backend, goldens, RAGGED))
    return equal, len(alone), spread


def _largest_difference(found: Logits, expected: Logits) -> float:
    return float(np.abs(found - expected).max())


def _divergence(found: Logits, expected: Logits) -> float:
    return float(divergences(expected[None], found[None])[0])


def arrives_quantised(export: Path) -> bool:
    """Whether every model file of the export is quantised already: then it stays as it is."""
    return all(arrived(ir.load(path)) for path in export.rglob("*.onnx"))


def cells_of(names: Sequence[str], precisions: Sequence[str]) -> Iterator[Cell]:
    for export in sorted(EXPORTS.iterdir()):
        if (names and export.name not in names) or not (export / "goldens.json").exists():
            continue
        exporter, architecture = describe(export)
        for precision in (AS_EXPORTED,) if arrives_quantised(export) else precisions:
            yield Cell(export.name, exporter, architecture, precision)


def run_all(cells: Sequence[Cell], jobs: int, console: Console) -> list[Cell]:
    done: list[Cell] = []
    context = multiprocessing.get_context("forkserver")
    with contextlib.closing(context.Pool(jobs)) as pool:
        for cell in pool.imap(run_cell, cells):
            done.append(cell)
            verdict = cell.mode if cell.passed else f"{cell.mode or 'FAILED'}: {cell.trouble[:300]}"
            console.print(f"[{len(done)}/{len(cells)}] {cell.key}: {verdict} ({cell.seconds} s)", markup=False)
    return done


def table_of(cells: Sequence[Cell]) -> Table:
    table = Table(title="exporter, architecture, precision")
    for column in ("exporter", "architecture", "export", "precision", "mode"):
        table.add_column(column)
    for column in ("|Δlogit|", "greedy", "in flight", "KL", "KiB", "s"):
        table.add_column(column, justify="right")
    for cell in sorted(cells, key=lambda cell: (cell.exporter, cell.architecture, cell.export)):
        figures = (
            f"{cell.logit_diff:.1e}",
            f"{cell.greedy_equal}/{cell.greedy_total}",
            f"{cell.in_flight:.1e}" if cell.in_flight else "equal",
            "" if cell.kl is None else f"{cell.kl:.1e}",
            f"{cell.kib:,}",
        )
        shown = figures if cell.greedy_total else ("",) * len(figures)
        mode = cell.mode if cell.passed or cell.mode == "refused" else "FAILED"
        table.add_row(cell.exporter, cell.architecture, cell.export, cell.precision, mode, *shown, f"{cell.seconds}")
    return table


def regressions(cells: Sequence[Cell], baseline: dict[str, str]) -> list[str]:
    """What passed when the baseline was written and does not now, or only in a lesser mode."""
    found = []
    for cell in cells:
        before = baseline.get(cell.key)
        if before and not cell.passed:
            found.append(f"{cell.key} passed before: {cell.trouble}")
        elif before == "canonical" != cell.mode:
            found.append(f"{cell.key} was canonical and is in {cell.mode} mode")
    return found


def summary(cells: Sequence[Cell]) -> str:
    passed = [cell for cell in cells if cell.passed]
    canonical = sum(cell.mode == "canonical" for cell in passed)
    return (
        f"{len(passed)} of {len(cells)} cells pass: {canonical} canonical, {len(passed) - canonical} in compatibility"
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="tools/matrix", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="exports in tests/fixtures/exports; all by default")
    parser.add_argument("--precision", action="append", choices=PRECISIONS, help="repeatable; fp32, int8 and int4")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--update", action="store_true", help="write what passes now as the baseline")
    arguments = parser.parse_args()
    if unknown := sorted(name for name in arguments.names if not (EXPORTS / name).is_dir()):
        parser.error(f"no such export: {', '.join(unknown)}")
    console = Console(highlight=False, width=160)
    cells = run_all(list(cells_of(arguments.names, arguments.precision or DEFAULT_PRECISIONS)), arguments.jobs, console)
    console.print(table_of(cells))
    console.print(summary(cells))
    baseline = json.loads(BASELINE.read_text(encoding="utf-8")) if BASELINE.exists() else {}
    lost = regressions(cells, baseline)
    for line in lost:
        console.print(f"LOST {line}", markup=False)
    if arguments.update and not lost:
        ran = {cell.export for cell in cells}
        baseline = {key: mode for key, mode in baseline.items() if key.split()[0] not in ran}
        baseline |= {cell.key: cell.mode for cell in cells if cell.passed}
        BASELINE.write_text(json.dumps(baseline, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())
