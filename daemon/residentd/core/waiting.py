"""The sequences that have no slot yet, first come, first served."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from residentd.core.sequence import Sequence
from residentd.types import RequestId


class WaitingQueue:
    """Resumed sequences in the order of their submission, then new ones in theirs; removal by id in O(1).

    Bounds are the scheduler's: new sequences by its policy, resumed ones because they were admitted under it before.
    """

    def __init__(self) -> None:
        self._resumed: OrderedDict[RequestId, Sequence] = OrderedDict()
        self._new: OrderedDict[RequestId, Sequence] = OrderedDict()
        self._tokens_count = 0

    def __len__(self) -> int:
        return len(self._resumed) + len(self._new)

    def __iter__(self) -> Iterator[Sequence]:
        yield from self._resumed.values()
        yield from self._new.values()

    @property
    def tokens_count(self) -> int:
        """Tokens that must be computed before the waiting sequences sample: prompts, and output to resume."""
        return self._tokens_count

    def push(self, sequence: Sequence) -> None:
        lane = self._resumed if is_resumed(sequence) else self._new
        lane[sequence.request.id] = sequence
        self._tokens_count += len(sequence.tokens)

    def pop(self) -> Sequence:
        """Take the first sequence. There must be one."""
        lane = self._resumed or self._new
        return self._taken(lane.popitem(last=False)[1])

    def remove(self, request_id: RequestId) -> None:
        """Take `request_id` out, wherever it stands. It must be there."""
        lane = self._resumed if request_id in self._resumed else self._new
        self._taken(lane.pop(request_id))

    def _taken(self, sequence: Sequence) -> Sequence:
        self._tokens_count -= len(sequence.tokens)
        return sequence


def is_resumed(sequence: Sequence) -> bool:
    """Whether a lost worker had admitted it already. One that had sampled nothing yet is known by its count only."""
    return sequence.request.resumed > 0 or bool(sequence.request.generated)
