"""Stop strings in a stream: nothing of a match, or past it, ever leaves."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from residentd.errors import CallerError
from residentd.text.limits import STOP_CHARS_MAX, STOPS_CEILING


@dataclass(frozen=True, slots=True)
class StopSet:
    """The stop strings of one request.

    `beginnings` are their proper prefixes, `lengths` those of the prefixes that end in a character, longest first;
    `openings` matches their first characters.
    """

    stops: tuple[str, ...]
    beginnings: frozenset[str]
    lengths: dict[str, tuple[int, ...]]
    openings: re.Pattern[str]


def stop_set(stops: Sequence[str]) -> StopSet:
    """Raise CallerError if there are too many, or one is empty or too long."""
    if len(stops) > STOPS_CEILING:
        raise CallerError(
            f"there are {len(stops)} stop strings; at most {STOPS_CEILING} are accepted. Drop some", field="stop"
        )
    for index, stop in enumerate(stops):
        if not 0 < len(stop) <= STOP_CHARS_MAX:
            raise CallerError(
                f"stop string {index} has {len(stop):,} characters; 1 to {STOP_CHARS_MAX} are accepted. "
                "Shorten it, or leave it out",
                field="stop",
            )
    unique = tuple(dict.fromkeys(stops))
    beginnings = frozenset(stop[:length] for stop in unique for length in range(1, len(stop)))
    lengths: dict[str, set[int]] = {}
    for beginning in beginnings:
        lengths.setdefault(beginning[-1], set()).add(len(beginning))
    openings = re.compile("|".join(re.escape(char) for char in sorted({stop[0] for stop in unique})) or "(?!)")
    descending = {last: tuple(sorted(found, reverse=True)) for last, found in lengths.items()}
    return StopSet(unique, beginnings, descending, openings)


class StopMatcher:
    """Finds the match that is complete first; of those complete at the same character, the longest.

    This rule does not depend on how the text is cut into deltas. Text that may be the beginning of a stop string is
    held back, the longest such text that there is.
    """

    __slots__ = ("_held", "_opening", "_set")

    def __init__(self, stops: StopSet) -> None:
        self._set = stops
        self._held = ""
        self._opening = stops.openings.search

    def push(self, delta: str) -> tuple[str, str | None]:
        """Take `delta`; return the text that may leave, and the stop string if one is complete now."""
        if not self._held and self._opening(delta) is None:
            return delta, None
        text = self._held + delta
        if (match := self._first(text)) is not None:
            end, stop = match
            self._held = ""
            return text[: end - len(stop)], stop
        kept = self._beginning(text)
        self._held = text[len(text) - kept :]
        return text[: len(text) - kept], None

    def would_match(self, text: str) -> bool:
        """Whether `text`, if it were pushed now, would complete a stop string."""
        return self._first(self._held + text) is not None

    def flush(self) -> str:
        """The text is over: what was held back leaves."""
        text, self._held = self._held, ""
        return text

    def _first(self, text: str) -> tuple[int, str] | None:
        """End and stop string of the first complete match."""
        found = [(place + len(stop), -len(stop), stop) for stop in self._set.stops if (place := text.find(stop)) >= 0]
        if not found:
            return None
        end, _, stop = min(found)
        return end, stop

    def _beginning(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        for length in self._set.lengths.get(text[-1:], ()):
            if length <= len(text) and text[-length:] in self._set.beginnings:
                return length
        return 0
