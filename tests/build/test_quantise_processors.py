"""8-bit products are exact on every x86 processor: where pairs of them saturate, the runtime is told so."""

from __future__ import annotations

from pathlib import Path

import pytest

from residentd.backend import onnxruntime as backend

KEY = "session.x64quantprecision"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("processor\t: 0\nflags\t\t: fpu avx2 avx512f avx512_vnni\n", True),
        ("processor\t: 0\nflags\t\t: fpu avx2 avx_vnni sha_ni\n", True),
        ("processor\t: 0\nflags\t\t: fpu avx2 fma\n", False),
        ("processor\t: 0\nflags\t\t: fpu avx2 avx512f avx512bw\n", False),
        ("processor\t: 0\nFeatures\t: asimd asimddp\n", False),
        ("", False),
    ],
)
def test_vnni_is_read_off_the_processors_flags(text: str, expected: bool, tmp_path: Path) -> None:  # noqa: FBT001
    """Either kind of VNNI counts; a processor that says nothing has none."""
    (tmp_path / "cpuinfo").write_text(text)
    assert backend.has_vnni(tmp_path / "cpuinfo") is expected


def test_only_processors_without_vnni_are_told_to_widen(monkeypatch: pytest.MonkeyPatch) -> None:
    """With VNNI the exact form takes twice as long and changes nothing."""
    monkeypatch.setattr(backend, "has_vnni", lambda: False)
    assert backend.session_options().get_session_config_entry(KEY) == "1"
    monkeypatch.setattr(backend, "has_vnni", lambda: True)
    with pytest.raises(RuntimeError, match=KEY):
        backend.session_options().get_session_config_entry(KEY)
