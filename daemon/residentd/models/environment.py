"""What an engine and its texts were computed with: libraries and processor. A change of it calls for a check."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

import msgspec

ENGINE_LIBRARIES: Final = ("onnxruntime", "onnxruntime-gpu", "numpy")
TEXT_LIBRARIES: Final = ("tokenizers", "jinja2")
CPU: Final = "processor"
CPU_FLAGS: Final = "processor features"
FLAGS_THAT_MATTER: Final = frozenset(
    {
        "sse4_1",
        "avx",
        "f16c",
        "fma",
        "avx2",
        "avx512f",
        "avx512bw",
        "avx512vl",
        "avx512_vnni",
        "avx512_bf16",
        "avx512_fp16",
        "avx_vnni",
        "avx_vnni_int8",
        "amx_tile",
        "amx_int8",
        "amx_bf16",
        "asimd",
        "asimdhp",
        "asimddp",
        "sve",
        "sve2",
        "i8mm",
        "bf16",
        "svei8mm",
        "svebf16",
    }
)
"""Those by which math libraries choose their kernels (proc(5); MLAS platform.cpp, onnxruntime 1.32)."""

Environment = Mapping[str, str]
"""By library or device: its version or description."""


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of two environments that differs; empty where it is missing."""

    name: str
    before: str
    after: str

    def __str__(self) -> str:
        if self.name == CPU_FLAGS:
            before, after = set(self.before.split()), set(self.after.split())
            lost, gained = " ".join(sorted(before - after)), " ".join(sorted(after - before))
            return f"{self.name}" + (f" without {lost}" if lost else "") + (f" with {gained}" if gained else "")
        return f"{self.name} {self.before or 'none'} → {self.after or 'none'}"


def engine_environment(cpuinfo: Path = Path("/proc/cpuinfo")) -> dict[str, str]:
    """What computes logits in a process that starts now."""
    return library_versions(ENGINE_LIBRARIES) | processor(cpuinfo)


def library_versions(names: Iterable[str]) -> dict[str, str]:
    """Versions as they are on disk: what a process that has not imported them yet will get."""
    found = {}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def processor(cpuinfo: Path = Path("/proc/cpuinfo")) -> dict[str, str]:
    """Name and features of the first processor; what the kernel does not say is left out."""
    read = read_processor(cpuinfo)
    found = {CPU: read.name or platform.machine(), CPU_FLAGS: " ".join(sorted(read.flags & FLAGS_THAT_MATTER))}
    return {name: value for name, value in found.items() if value}


@dataclass(frozen=True, slots=True)
class Processor:
    """`name` None: the kernel does not say. `flags`: all that it can do."""

    name: str | None
    flags: frozenset[str]


def read_processor(cpuinfo: Path = Path("/proc/cpuinfo")) -> Processor:
    """The first processor (proc(5)); nothing where the kernel does not say."""
    fields: dict[str, str] = {}
    try:
        text = cpuinfo.read_text(errors="replace")
    except OSError:
        text = ""
    for line in text.splitlines():
        key, _, value = line.partition(":")
        fields.setdefault(key.strip(), value.strip())
    flags = fields.get("flags") or fields.get("Features") or ""
    return Processor(fields.get("model name"), frozenset(flags.split()))


def changes_between(before: Environment, after: Environment) -> tuple[Change, ...]:
    """What differs, by name."""
    return tuple(
        Change(name=name, before=before.get(name, ""), after=after.get(name, ""))
        for name in sorted(before.keys() | after.keys())
        if before.get(name, "") != after.get(name, "")
    )
