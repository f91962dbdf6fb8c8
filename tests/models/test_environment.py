"""What engines are computed with, and how a change of it is named."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import pytest

from residentd.models.environment import (
    CPU,
    CPU_FLAGS,
    TEXT_LIBRARIES,
    Change,
    changes_between,
    engine_environment,
    library_versions,
    processor,
)

X86 = (
    "processor\t: 0\nmodel name\t: Some CPU @ 3 GHz\nflags\t\t: fpu avx2 sse4_1 avx512_vnni\n\nmodel name\t: Another\n"
)
ARM = "processor\t: 0\nFeatures\t: fp asimd asimddp crc32\n"


def test_libraries_are_those_installed() -> None:
    """Versions come from the packages' own metadata; what is not installed is left out."""
    assert library_versions((*TEXT_LIBRARIES, "no-such-package")) == {
        name: version(name) for name in ("tokenizers", "jinja2")
    }
    assert engine_environment()["numpy"] == version("numpy")


@pytest.mark.parametrize(
    ("text", "name", "flags"),
    [(X86, "Some CPU @ 3 GHz", "avx2 avx512_vnni sse4_1"), (ARM, None, "asimd asimddp")],
)
def test_the_processor_is_the_first(tmp_path: Path, text: str, name: str | None, flags: str) -> None:
    """Its name where the kernel gives one, and only the features by which kernels are chosen."""
    path = tmp_path / "cpuinfo"
    path.write_text(text)
    found = processor(path)
    assert found[CPU_FLAGS] == flags
    assert name in {None, found[CPU]}


def test_a_machine_without_cpuinfo_still_has_an_environment(tmp_path: Path) -> None:
    """The architecture stands for the name; no features are claimed."""
    found = processor(tmp_path / "missing")
    assert found[CPU]
    assert CPU_FLAGS not in found


def test_changes_name_both_sides() -> None:
    """Raised, removed and new entries, in the order of their names; equal ones are left out."""
    before = {"onnxruntime": "1.31.1", "numpy": "2.1", "old": "1", "same": "x"}
    after = {"onnxruntime": "1.32.0", "numpy": "2.1", "new": "2", "same": "x"}
    changes = changes_between(before, after)
    assert [str(change) for change in changes] == ["new none → 2", "old 1 → none", "onnxruntime 1.31.1 → 1.32.0"]
    assert changes_between(after, after) == ()


def test_processor_features_are_told_by_difference() -> None:
    """Dozens of names are not repeated for the one that went."""
    change = Change(name=CPU_FLAGS, before="avx2 avx512_vnni fma", after="amx_int8 avx2 fma")
    assert str(change) == "processor features without avx512_vnni with amx_int8"
