"""Counters and a one-minute window over one engine, for `residentctl status` and health."""

from __future__ import annotations

import math
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Final

WINDOW_NS: Final = 60_000_000_000
SAMPLES_MAX: Final = 16_384
"""Latency samples kept at most; past that the window is shorter than a minute."""


@dataclass(frozen=True, slots=True)
class Percentiles:
    p50: float
    p95: float
    p99: float
    count: int


class Window:
    """The (time, value) pairs of the last minute, at most SAMPLES_MAX of them."""

    def __init__(self) -> None:
        self._samples: deque[tuple[int, float]] = deque(maxlen=SAMPLES_MAX)

    def add(self, now_ns: int, value: float) -> None:
        self._samples.append((now_ns, value))

    def values(self, now_ns: int) -> list[float]:
        while self._samples and self._samples[0][0] < now_ns - WINDOW_NS:
            self._samples.popleft()
        return [value for _, value in self._samples]

    def rate_per_s(self, now_ns: int, since_ns: int) -> float:
        """Sum of the values per second, over the window or what of it has passed and was kept."""
        values = self.values(now_ns)
        span_ns = min(WINDOW_NS, now_ns - since_ns)
        if len(values) == SAMPLES_MAX:
            span_ns = min(span_ns, now_ns - self._samples[0][0])
        return sum(values) * 1e9 / span_ns if span_ns > 0 else 0.0

    def percentiles(self, now_ns: int) -> Percentiles:
        """Nearest-rank percentiles; zeros where there is no sample."""
        ordered = sorted(self.values(now_ns))
        if not ordered:
            return Percentiles(0.0, 0.0, 0.0, 0)
        p50, p95, p99 = (ordered[math.ceil(len(ordered) * share) - 1] for share in (0.50, 0.95, 0.99))
        return Percentiles(p50, p95, p99, len(ordered))


@dataclass(slots=True)
class EngineStats:
    started_ns: int
    steps: int = 0
    waiting: int = 0
    running: int = 0
    batch_rows_max: int = 0
    finished: Counter[str] = field(default_factory=Counter)
    prompt_tokens: Window = field(default_factory=Window)
    output_tokens: Window = field(default_factory=Window)
    ttft_ms: Window = field(default_factory=Window)
    itl_ms: Window = field(default_factory=Window)
