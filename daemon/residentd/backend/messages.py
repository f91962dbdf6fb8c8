"""What ONNX Runtime says, as it may stand in a message of ours."""

from __future__ import annotations

import re

MESSAGE_CHARS_MAX = 300
READ_CHARS_MAX = 4000  # a graph may have put names of megabytes into it

_CODE = re.compile(r"\[ONNXRuntimeError\] : \d+ : [A-Z_]+ : ")
_SOURCE = re.compile(
    r"""(?<![\w.+/-])(?:[\w.+-]*/)*[\w.+-]+\.(?:cc|cpp|h):\d+\ ?       # its file and line, and there the function:
    (?:(?:[\w:<>~*&,]+\ )*?[\w:<>~]+::~?\w+                              # a whole signature,
        \((?:[^()]|\([^()]*\))*\)(?:\ const)?\ ?
    |\w+\ (?=[A-Z])                                                      # or its name alone, before a sentence;
    )?(?:[^.]{1,200}\ was\ false\.\ (?=\S))?                             # what it asserted, where more is said of it
    """,
    re.VERBOSE,
)
_PATH = re.compile(r"(?<!\w)/(?:[\w.+-]+/)+[\w.+-]*")


OUT_OF_MEMORY_MARKS = ("bad_alloc", "bad allocation", "Failed to allocate memory")


def is_lack_of_memory(error: BaseException | None) -> bool:
    """Whether ONNX Runtime, or Python, says so."""
    return isinstance(error, MemoryError) or any(mark in str(error) for mark in OUT_OF_MEMORY_MARKS)


def plain(error: Exception) -> str:
    """One short line without ONNX Runtime's codes and places in its sources, and without paths of this machine."""
    text = plain_text(str(error)) or type(error).__name__
    return text if len(text) <= MESSAGE_CHARS_MAX else f"{text[: MESSAGE_CHARS_MAX - 1]}…"


def plain_text(text: str) -> str:
    """The same for what was said, of any length up to READ_CHARS_MAX."""
    line = " ".join(text[:READ_CHARS_MAX].split())
    return _PATH.sub("…", _SOURCE.sub("", _CODE.sub("", line))).strip()
