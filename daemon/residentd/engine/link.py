"""The link between the daemon and one engine worker: typed frames over a socketpair.

A frame is a 4-byte little-endian length and that many bytes of msgpack. Both ends are ours, so a bad frame is our
bug: it raises LinkError and ends the worker, never the daemon.
"""

from __future__ import annotations

import socket
import struct
from typing import Final, Literal

import msgspec

from residentd.calls import Call, RunRecord, Value
from residentd.errors import LinkError
from residentd.models.checks import Part, Speeds
from residentd.types import Finish, Finished, Limits, Request, RequestId, StepRecord, TokenLogprobs

FRAME_BYTES_MAX: Final = 64 << 20
"""A Submit of a prompt of a million tokens has about 5 MB."""

_LENGTH = struct.Struct("<I")


class Start(msgspec.Struct, frozen=True, tag=True):
    """Daemon to worker, first and once: what to load, and how to run it."""

    version_dir: str
    threads: int
    spin_us: int
    scheduling: str
    prefill_tokens_max: int
    waiting_max: int
    waiting_tokens_max: int
    retries_max: int
    measures: bool  # its own speed, once it has reproduced its goldens
    waiting_bytes_max: int
    purpose: Literal["serve", "check"]  # check: load with little memory, report Checked, and leave


class Submit(msgspec.Struct, frozen=True, tag=True):
    request: Request


class Ask(msgspec.Struct, frozen=True, tag=True):
    """A request to a model that answers in one run."""

    call: Call


class Cancel(msgspec.Struct, frozen=True, tag=True):
    id: RequestId
    reason: Finish


class Ping(msgspec.Struct, frozen=True, tag=True):
    """Asks for proof of life: answered from the step loop, after a canary step where it is idle."""

    number: int


class Stop(msgspec.Struct, frozen=True, tag=True):
    """Leave now; whatever runs is abandoned (the daemon drains first)."""


class Checked(msgspec.Struct, frozen=True, tag=True):
    """Worker to daemon, once, before Ready: what replaying the goldens gave, and what they were computed with."""

    parts: tuple[Part, ...]
    environment: dict[str, str]
    speeds: Speeds | None = None  # None: nobody asked, or a part failed


class Ready(msgspec.Struct, frozen=True, tag=True):
    """Worker to daemon, once: the engine is loaded and has reproduced its goldens."""

    limits: Limits
    load_ms: int


class Loading(msgspec.Struct, frozen=True, tag=True):
    """Worker to daemon while it loads."""

    stage: str


class Events(msgspec.Struct, frozen=True, tag=True):
    """Worker to daemon, one a step: what became visible. One list entry a token; `logprobs` is empty or full."""

    record: StepRecord | None
    ids: list[RequestId]
    indexes: list[int]
    tokens: list[int]
    logprobs: list[TokenLogprobs | None]
    finished: list[Finished]


class Results(msgspec.Struct, frozen=True, tag=True):
    """Worker to daemon, one or more a run: values by request and place, and the requests that ended."""

    record: RunRecord | None
    ids: list[RequestId]
    places: list[int]
    values: list[Value]
    finished: list[Finished]


class Pong(msgspec.Struct, frozen=True, tag=True):
    number: int


class Failed(msgspec.Struct, frozen=True, tag=True):
    """Worker to daemon, last: why it ends. `permanent` means another start would fail the same way."""

    message: str
    permanent: bool


ToWorker = Start | Submit | Ask | Cancel | Ping | Stop
FromWorker = Loading | Checked | Ready | Events | Results | Pong | Failed

_encoder: Final = msgspec.msgpack.Encoder()
to_worker_decoder: Final = msgspec.msgpack.Decoder(ToWorker)
from_worker_decoder: Final = msgspec.msgpack.Decoder(FromWorker)


def encode(frame: ToWorker | FromWorker) -> bytes:
    """`frame` with its length before it."""
    body = _encoder.encode(frame)
    if len(body) > FRAME_BYTES_MAX:
        raise LinkError(f"a {type(frame).__name__} frame has {len(body):,} bytes; at most {FRAME_BYTES_MAX:,} are sent")
    return _LENGTH.pack(len(body)) + body


class FrameReader:
    """Cuts a byte stream into frame bodies. Holds at most one frame and one chunk."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, chunk: bytes) -> list[bytes]:
        """The bodies completed by `chunk`. Raises LinkError for a frame that claims to be too large."""
        self._buffer += chunk
        bodies = []
        start = 0
        while len(self._buffer) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer, start)
            if length > FRAME_BYTES_MAX:
                raise LinkError(f"a frame claims {length:,} bytes; at most {FRAME_BYTES_MAX:,} are read")
            end = start + _LENGTH.size + length
            if len(self._buffer) < end:
                break
            bodies.append(bytes(self._buffer[start + _LENGTH.size : end]))
            start = end
        del self._buffer[:start]
        return bodies


def decode_to_worker(body: bytes) -> ToWorker:
    try:
        return to_worker_decoder.decode(body)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise LinkError(f"a frame from the daemon is malformed: {error}") from error


def decode_from_worker(body: bytes) -> FromWorker:
    try:
        return from_worker_decoder.decode(body)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise LinkError(f"a frame from the worker is malformed: {error}") from error


def send(connection: socket.socket, frame: FromWorker) -> None:
    """Blocking send from the worker. Raises OSError when the daemon is gone."""
    connection.sendall(encode(frame))
