"""How far a build is: of the whole, or of one stage."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Told how far the whole build is, 0 to 1, and in which stage."""

    def __call__(self, stage: str, fraction: float, message: str) -> None: ...


class StageProgress(Protocol):
    """Told how far one stage is, 0 to 1."""

    def __call__(self, fraction: float, message: str) -> None: ...


def part_of(progress: Progress, begin: float, end: float) -> Progress:
    """What is reported as 0 to 1 stands between `begin` and `end` of `progress`."""

    def report(stage: str, fraction: float, message: str) -> None:
        progress(stage, begin + min(max(fraction, 0.0), 1.0) * (end - begin), message)

    return report


def stage_of(progress: Progress, stage: str, begin: float = 0.0, end: float = 1.0) -> StageProgress:
    """One stage, between `begin` and `end` of `progress`."""

    def report(fraction: float, message: str) -> None:
        progress(stage, begin + min(max(fraction, 0.0), 1.0) * (end - begin), message)

    return report
