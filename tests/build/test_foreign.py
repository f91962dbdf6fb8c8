"""What others' files may say: how it is quoted, and whose fault an error is."""

from __future__ import annotations

import pytest

from residentd.errors import AccuracyError, Finding, MachineError, SourceError
from residentd_build.foreign import QUOTED_CHARS_MAX, REMEDY_CHARS_MAX, cut, refusing, token_id_of


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", ""),
        ("x" * QUOTED_CHARS_MAX, "x" * QUOTED_CHARS_MAX),
        ("x" * (QUOTED_CHARS_MAX + 1), "x" * (QUOTED_CHARS_MAX - 1) + "…"),
        ("Ünïcödé 😀", "Ünïcödé 😀"),
        ("half \ud800", "half ?"),
    ],
)
def test_a_quotation_is_short_and_is_text(text: str, expected: str) -> None:
    """Unchanged up to the limit, then cut; what UTF-8 cannot write is replaced."""
    assert cut(text) == expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [(0, 0), ((1 << 32) - 1, (1 << 32) - 1), (1 << 32, None), (-1, None), (True, None), (1.0, None), ("1", None)],
)
def test_a_token_id_is_a_whole_number_of_32_bits(value: object, expected: int | None) -> None:
    """Anything else would be refused, or wrapped around, by the tokenizer's library."""
    assert token_id_of(value) == expected


@pytest.mark.parametrize(
    "error", [AssertionError("ours"), MemoryError(), OSError(28, "full"), MachineError("small"), AccuracyError("off")]
)
def test_what_is_not_the_sources_fault_passes(error: Exception) -> None:
    """Our bugs, the machine's troubles and what was judged already come out as they went in."""
    with pytest.raises(type(error)) as caught, refusing("read"):
        raise error
    assert caught.value is error


def test_a_full_disk_wrapped_by_a_library_is_still_a_full_disk() -> None:
    """The store explains it by its number."""
    full = OSError(28, "full")
    with pytest.raises(OSError) as caught, refusing("compiled"):
        raise ValueError("cannot write") from full
    assert caught.value is full


def test_whatever_else_goes_wrong_is_one_finding() -> None:
    """With the type of the error and the first line of its text, in short."""
    with pytest.raises(SourceError) as caught, refusing("compiled"):
        raise KeyError("first " + "x" * 9999 + "\nsecond")
    (finding,) = caught.value.findings
    assert finding.what.startswith("it cannot be compiled: KeyError: ")
    assert len(finding.what) < 300


def test_what_onnx_runtime_says_is_said_without_its_own_sources() -> None:
    """A finding names neither a library's file nor a path of the machine."""
    said = "[ONNXRuntimeError] : 1 : FAIL : /src/op_kernel.cc:87 virtual OrtValue* onnxruntime::Op::Out(int) too large"
    with pytest.raises(SourceError) as caught, refusing("compiled"):
        raise ValueError(said)
    assert caught.value.findings[0].what == "it cannot be compiled: ValueError: too large"


def test_findings_are_cut_on_their_way_out() -> None:
    """However a pass made them."""
    with pytest.raises(SourceError) as caught, refusing("compiled"):
        raise SourceError([Finding("x" * 9999, "y" * 9999, "z" * 9999)])
    assert len(caught.value.findings[0].remedy) == REMEDY_CHARS_MAX
    assert len(str(caught.value)) < 1100
