from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from residentd.engine import link
from residentd.errors import LinkError
from residentd.types import Finish, Finished, Limits, Request, RequestId, SamplingParams, StepRecord, TokenLogprobs

PARAMS = SamplingParams(tokens_max=7, logit_bias=((3, -1.5),), stop_ids=frozenset({1, 2}), logprobs=2, seed=2**64 - 1)
REQUEST = Request(RequestId(5), (1, 2, 3), PARAMS, generated=(9,), deadline_ms=12, resumed=1)
TO_WORKER: list[link.ToWorker] = [
    link.Start(
        "versions/x", 2, 50, "throughput", 256, 10, 1000, 3, measures=True, waiting_bytes_max=1 << 20, purpose="check"
    ),
    link.Submit(REQUEST),
    link.Cancel(RequestId(5), Finish.SLOW_CONSUMER),
    link.Ping(3),
    link.Stop(),
]
FROM_WORKER: list[link.FromWorker] = [
    link.Loading("loading"),
    link.Ready(Limits(4, 128, 64, 99), 12),
    link.Events(
        StepRecord(1, 2, 1, 30, 400, 0, 3, (RequestId(5),)),
        [RequestId(5)],
        [0],
        [17],
        [TokenLogprobs(-0.5, ((17, -0.5),))],
        [Finished(RequestId(4), Finish.STOP)],
    ),
    link.Pong(3),
    link.Failed("gone", permanent=False),
]


@pytest.mark.parametrize("frame", TO_WORKER, ids=lambda frame: type(frame).__name__)
def test_frames_to_the_worker_survive_the_link(frame: link.ToWorker) -> None:
    """Every frame to the worker arrives as it was sent, types included."""
    (body,) = link.FrameReader().feed(link.encode(frame))
    assert link.decode_to_worker(body) == frame


@pytest.mark.parametrize("frame", FROM_WORKER, ids=lambda frame: type(frame).__name__)
def test_frames_from_the_worker_survive_the_link(frame: link.FromWorker) -> None:
    """Every frame from the worker arrives as it was sent, types included."""
    (body,) = link.FrameReader().feed(link.encode(frame))
    assert link.decode_from_worker(body) == frame


@given(st.lists(st.integers(0, 99), max_size=8), st.lists(st.integers(1, 40), min_size=1))
def test_frames_are_found_however_the_stream_is_cut(numbers: list[int], sizes: list[int]) -> None:
    """The same frames come out in the same order for every cut of the byte stream."""
    stream = b"".join(link.encode(link.Ping(number)) for number in numbers)
    reader, found, at, turn = link.FrameReader(), [], 0, 0
    while at < len(stream):
        size = sizes[turn % len(sizes)]
        found += [link.decode_to_worker(body) for body in reader.feed(stream[at : at + size])]
        at, turn = at + size, turn + 1
    assert found == [link.Ping(number) for number in numbers]


def test_a_frame_at_the_limit_is_waited_for_and_one_above_is_refused() -> None:
    """A claimed length of FRAME_BYTES_MAX is accepted; one more byte raises LinkError before anything is buffered."""
    assert link.FrameReader().feed(struct.pack("<I", link.FRAME_BYTES_MAX)) == []
    with pytest.raises(LinkError, match="67,108,865"):
        link.FrameReader().feed(struct.pack("<I", link.FRAME_BYTES_MAX + 1))


@pytest.mark.parametrize("body", [b"", b"\xc1", b"\x81\xa4type\xa3Nix", link.encode(link.Pong(1))[4:]])
def test_a_malformed_frame_is_a_link_error(body: bytes) -> None:
    """Bytes that are no frame of that direction raise LinkError, not the decoder's own error."""
    with pytest.raises(LinkError, match="malformed"):
        link.decode_to_worker(body)
