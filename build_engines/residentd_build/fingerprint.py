"""What a version was made from and with: the source's digest, the tools' versions, the machine."""

from __future__ import annotations

import hashlib
import mmap
import platform
from pathlib import Path
from typing import TYPE_CHECKING

from residentd.models.environment import library_versions, read_processor

if TYPE_CHECKING:
    from collections.abc import Mapping

TOOLS = ("residentd", "onnxruntime", "onnx", "onnx-ir", "tokenizers", "numpy")


class SourceDigest:
    """SHA-256 over the names and contents of the files that a build read, whatever the order of reading."""

    def __init__(self) -> None:
        self._files: dict[str, str] = {}

    def add(self, name: str, data: bytes | mmap.mmap) -> None:
        self._files[name] = hashlib.sha256(data).hexdigest()

    def hexdigest(self) -> str:
        lines = "".join(f"{digest}  {name}\n" for name, digest in sorted(self._files.items()))
        return hashlib.sha256(lines.encode()).hexdigest()


def tool_versions() -> dict[str, str]:
    """Versions of everything whose change could change the build; a tool that is not installed is left out."""
    return {"python": platform.python_version()} | library_versions(TOOLS)


def machine(cpuinfo: Path = Path("/proc/cpuinfo")) -> Mapping[str, str]:
    """The processor's name, and a digest of what it can do (proc(5)); empty strings where the kernel does not say."""
    read = read_processor(cpuinfo)
    flags = " ".join(sorted(read.flags))
    return {
        "cpu": platform.machine() if read.name is None else read.name,
        "cpu_flags_sha256": hashlib.sha256(flags.encode()).hexdigest() if flags else "",
    }
