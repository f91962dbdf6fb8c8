from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import psutil
import pytest

from resident.v1 import inference_pb2, inference_pb2_grpc
from residentd.backend.reference import ReferenceModel
from support.daemon import Daemon, running, wait_for
from support.toy_version import make_toy_version

WARM_STREAMS = 3_000
STREAMS = 10_000
MEMORY_GROWTH_BYTES_MAX = 12 << 20
"""Over 7,000 streams: under 1.8 kB a stream, less than one Generation with its tokens. Noise was 1-3 MiB."""

OVERHEAD_STREAMS = 64
OVERHEAD_TOKENS = 1_000
TOKENS_PER_CPU_SECOND_MIN = 20_000


@dataclass(frozen=True, slots=True)
class Footprint:
    descriptors: int
    threads: int
    memory_bytes: int


def footprint(pid: int) -> Footprint:
    process = psutil.Process(pid)
    return Footprint(process.num_fds(), process.num_threads(), process.memory_info().rss)


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    make_toy_version(tmp_path, slots=64, context=2048, step_tokens_max=512, model=ReferenceModel(peaks=(8.0, 7.0)))
    with running(tmp_path) as daemon:
        yield daemon


async def many_streams(daemon: Daemon, count: int) -> int:
    """Short streams, 64 at a time; every seventh is cancelled half way. Returns how many ended whole."""
    whole = 0
    numbers = iter(range(count))

    async def client(stub: inference_pb2_grpc.InferenceAsyncStub) -> None:
        nonlocal whole
        for number in numbers:
            sampling = inference_pb2.Sampling(max_tokens=4, temperature=number % 2, ignore_eos=True)
            call = stub.Generate(inference_pb2.GenerateRequest(prompt=f"stream {number}", sampling=sampling))
            if number % 7 == 0:
                await call.read()
                call.cancel()
                continue
            async for message in call:
                whole += message.finish.usage.completion_tokens == 4

    async with grpc.aio.insecure_channel(daemon.address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        await asyncio.gather(*(client(stub) for _ in range(64)))
    return whole


def wait_until_counted(daemon: Daemon, streams: int) -> None:
    """A cancelled or closed call ends at the server a moment after its client, and so does a closed connection."""
    wait_for(lambda: sum(daemon.status().engines[0].finished.values()) == streams, "every stream to be counted", 10)
    wait_for(lambda: connections_count(daemon) == 0, "the clients' connections to be closed", 10)


def connections_count(daemon: Daemon) -> int:
    """What clients hold: accepted connections on the TCP port, and on the admin socket beside its listener."""
    process, port = psutil.Process(daemon.process.pid), int(daemon.address.rpartition(":")[2])
    tcp = sum(bool(entry.raddr) and entry.laddr.port == port for entry in process.net_connections("tcp"))
    admin = str(daemon.state / "admin.sock")
    return tcp + sum(entry.laddr == admin for entry in process.net_connections("unix")) - 1


def test_ten_thousand_streams_leave_nothing_behind(daemon: Daemon) -> None:
    """Daemon and worker have as many descriptors and threads after 10,000 streams as after 3,000; memory is flat."""
    pids = [daemon.process.pid, *daemon.worker_pids()]
    whole = asyncio.run(many_streams(daemon, WARM_STREAMS))
    wait_until_counted(daemon, WARM_STREAMS)
    before = [footprint(pid) for pid in pids]
    whole += asyncio.run(many_streams(daemon, STREAMS - WARM_STREAMS))
    wait_until_counted(daemon, STREAMS)
    after = [footprint(pid) for pid in pids]
    assert whole >= STREAMS * 6 // 7 - 2
    for old, new in zip(before, after, strict=True):
        assert (new.descriptors, new.threads) == (old.descriptors, old.threads)
        assert new.memory_bytes - old.memory_bytes < MEMORY_GROWTH_BYTES_MAX
    engine = daemon.status().engines[0]
    assert sum(engine.finished.values()) == STREAMS
    assert engine.slots_used == engine.waiting == engine.kv_tokens_used == 0


def test_one_daemon_core_carries_twenty_thousand_tokens_a_second(daemon: Daemon) -> None:
    """64 greedy streams: at least 20,000 tokens for each CPU second of the daemon, coalesced."""

    async def one(stub: inference_pb2_grpc.InferenceAsyncStub, number: int) -> tuple[int, int]:
        sampling = inference_pb2.Sampling(max_tokens=OVERHEAD_TOKENS, temperature=0, ignore_eos=True)
        request = inference_pb2.GenerateRequest(prompt=f"stream {number}", sampling=sampling)
        messages = [message async for message in stub.Generate(request)]
        return len(messages), messages[-1].finish.usage.completion_tokens

    async def all_of_them() -> list[tuple[int, int]]:
        async with grpc.aio.insecure_channel(daemon.address) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            return list(await asyncio.gather(*(one(stub, number) for number in range(OVERHEAD_STREAMS))))

    process = psutil.Process(daemon.process.pid)
    started = process.cpu_times()
    results = asyncio.run(all_of_them())
    ended = process.cpu_times()
    cpu_s = ended.user + ended.system - started.user - started.system
    tokens = sum(count for _, count in results)
    messages = sum(count for count, _ in results)
    assert tokens == OVERHEAD_STREAMS * OVERHEAD_TOKENS
    assert messages < tokens
    assert tokens / cpu_s >= TOKENS_PER_CPU_SECOND_MIN, (
        f"{tokens / cpu_s:,.0f} tokens a CPU second, {messages:,} messages"
    )


def test_a_reader_that_does_not_read_is_ended(tmp_path: Path) -> None:
    """A stream that is not read ends with RESOURCE_EXHAUSTED naming the limit; its neighbours go on."""
    make_toy_version(tmp_path, slots=4, context=300_000, step_tokens_max=512)
    with running(tmp_path, config="[limits]\nstream_tokens_max = 200\noutput_tokens_default = 256\n") as daemon:

        async def scenario() -> tuple[grpc.StatusCode, str, int]:
            # A window of 64 kB and large messages: flow control stops the server's writes soon.
            options = [("grpc.http2.lookahead_bytes", 65_535), ("grpc.http2.bdp_probe", 0)]
            async with grpc.aio.insecure_channel(daemon.address, options=options) as channel:
                stub = inference_pb2_grpc.InferenceStub(channel)
                sampling = inference_pb2.Sampling(max_tokens=250_000, temperature=0, ignore_eos=True, logprobs=20)
                slow = stub.Generate(inference_pb2.GenerateRequest(prompt="slow", sampling=sampling))
                await slow.read()
                quick = stub.Complete(
                    inference_pb2.GenerateRequest(
                        prompt="quick", sampling=inference_pb2.Sampling(max_tokens=250, temperature=0, ignore_eos=True)
                    )
                )
                count = (await quick).finish.usage.completion_tokens
                while daemon.status().engines[0].finished.get("slow_consumer", 0) == 0:
                    await asyncio.sleep(0.05)
                try:
                    while await slow.read() is not grpc.aio.EOF:
                        pass
                except grpc.aio.AioRpcError as error:
                    return error.code(), error.details() or "", count
                return grpc.StatusCode.OK, "", count

        code, details, count = asyncio.run(scenario())
        assert (code, count) == (grpc.StatusCode.RESOURCE_EXHAUSTED, 250)
        assert "stream_tokens_max" in details
