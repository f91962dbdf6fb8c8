"""The memory that an install takes, stage by stage. usage: install_memory.py EXPORT --state DIR [-- OPTION ...]

Runs the compiler and samples its process. Anonymous memory is what an install costs the machine; pages of mapped files
are the page cache's, and go when somebody needs the room.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import onnx_ir as ir
from rich.console import Console
from rich.table import Table

SAMPLE_S = 0.02
FLOOR_MIB = 300  # the interpreter, the libraries and the graph
LARGEST_FACTOR = 1.5
MIB = 1 << 20


@dataclass(slots=True)
class Peaks:
    """MiB by stage, and when each stage began (seconds)."""

    anonymous: dict[str, float] = field(default_factory=dict)
    mapped: dict[str, float] = field(default_factory=dict)
    began: dict[str, float] = field(default_factory=dict)
    messages: dict[str, int] = field(default_factory=dict)


def status_mib(pid: int) -> tuple[float, float]:
    """Anonymous and file-backed resident MiB of a process; zeros once it is gone."""
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0.0, 0.0
    sizes = {name: int(kib) / 1024 for name, kib in re.findall(r"^Rss(Anon|File):\s+(\d+) kB", text, re.MULTILINE)}
    return sizes.get("Anon", 0.0), sizes.get("File", 0.0)


def watch(command: list[str]) -> tuple[Peaks, int]:
    """Run the compiler to its end."""
    peaks, stage, started = Peaks(), "start", time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    done = threading.Event()

    def sample() -> None:
        while not done.wait(SAMPLE_S):
            anonymous, mapped = status_mib(process.pid)
            peaks.anonymous[stage] = max(peaks.anonymous.get(stage, 0.0), anonymous)
            peaks.mapped[stage] = max(peaks.mapped.get(stage, 0.0), mapped)

    sampler = threading.Thread(target=sample)
    sampler.start()
    assert process.stdout is not None
    for line in process.stdout:
        event = json.loads(line)
        stage = str(event.get("stage", stage))
        peaks.began.setdefault(stage, time.monotonic() - started)
        peaks.messages[stage] = peaks.messages.get(stage, 0) + 1
    code = process.wait()
    peaks.began["end"] = time.monotonic() - started
    done.set()
    sampler.join()
    return peaks, code


def largest_tensor_bytes(export: Path) -> int:
    model = ir.load(export / "model.onnx")
    tensors = (value.const_value for value in model.graph.initializers.values())
    return max(tensor.nbytes for tensor in tensors if tensor is not None)


def main() -> int:
    parser = argparse.ArgumentParser(prog="install_memory.py", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("export", type=Path)
    parser.add_argument("--state", type=Path, required=True)
    parser.add_argument("options", nargs="*", help="of the compiler, after --")
    arguments = parser.parse_args()
    largest = largest_tensor_bytes(arguments.export) / MIB
    bound = LARGEST_FACTOR * largest + FLOOR_MIB
    command = [
        sys.executable,
        "-m",
        "residentd_build",
        str(arguments.export),
        "--state",
        str(arguments.state),
        "--json",
    ]
    peaks, code = watch([*command, "--name", "memory", *arguments.options])
    table = Table(title=f"{arguments.export.name}: MiB at most; the largest tensor has {largest:,.0f}")
    for column in ("stage", "from s", "messages", "anonymous", "mapped files"):
        table.add_column(column, justify="left" if column == "stage" else "right")
    for stage, anonymous in peaks.anonymous.items():
        cells = (f"{peaks.began.get(stage, 0):.1f}", str(peaks.messages.get(stage, 0)), f"{anonymous:,.0f}")
        table.add_row(stage, *cells, f"{peaks.mapped[stage]:,.0f}")
    console = Console(highlight=False, width=100)
    console.print(table)
    peak = max(peaks.anonymous.values())
    console.print(f"peak {peak:,.0f} MiB, bound {bound:,.0f} MiB, {peaks.began['end']:.0f} s, exit code {code}")
    return code or int(peak > bound)


if __name__ == "__main__":
    sys.exit(main())
