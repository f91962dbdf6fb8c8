"""What a build says about its machine, tools and source."""

from __future__ import annotations

from pathlib import Path

import pytest

from residentd_build.fingerprint import SourceDigest, machine, tool_versions

CPUINFO = "processor\t: 0\nmodel name\t: Fast CPU 9000\nflags\t\t: {flags}\n\nprocessor\t: 1\nmodel name\t: Other\n"


def cpu(tmp_path: Path, flags: str) -> dict[str, str]:
    path = tmp_path / "cpuinfo"
    path.write_text(CPUINFO.format(flags=flags))
    return dict(machine(path))


def test_a_machine_is_its_processor_and_what_that_can_do(tmp_path: Path) -> None:
    """The order of flags does not matter; one flag more does."""
    found = cpu(tmp_path, "avx2 sse fma")
    assert found["cpu"] == "Fast CPU 9000"
    assert cpu(tmp_path, "fma avx2 sse") == found
    assert cpu(tmp_path, "fma avx2 sse avx512f")["cpu_flags_sha256"] != found["cpu_flags_sha256"]


def test_a_kernel_that_says_nothing_is_no_error(tmp_path: Path) -> None:
    """Containers may hide /proc/cpuinfo."""
    assert machine(tmp_path / "none")["cpu_flags_sha256"] == ""


def test_the_source_digest_does_not_depend_on_the_order_of_reading() -> None:
    """It depends on names and contents only."""
    first, second = SourceDigest(), SourceDigest()
    for digest, names in ((first, ("a", "b")), (second, ("b", "a"))):
        for name in names:
            digest.add(name, name.encode() * 3)
    assert first.hexdigest() == second.hexdigest()


@pytest.mark.parametrize(
    "files", [{"a": b"1"}, {"a": b"12", "b": b""}, {"b": b"1", "a": b"2"}, {"a\n": b"1", "b": b"2"}]
)
def test_another_source_has_another_digest(files: dict[str, bytes]) -> None:
    """Content, names and their pairing all count."""
    base, other = SourceDigest(), SourceDigest()
    for name, data in {"a": b"1", "b": b"2"}.items():
        base.add(name, data)
    for name, data in files.items():
        other.add(name, data)
    assert base.hexdigest() != other.hexdigest()


def test_tools_that_are_not_installed_are_left_out() -> None:
    """The versions are of what is there."""
    versions = tool_versions()
    assert {"python", "onnx", "onnx-ir", "tokenizers"} <= versions.keys()
    assert all(versions.values())
