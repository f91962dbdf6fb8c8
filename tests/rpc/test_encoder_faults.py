"""A model that answers in one run, under lost workers, poison, deadlines, cancels and floods. On the toy encoder."""

from __future__ import annotations

import asyncio
import contextlib
import random
from pathlib import Path

import grpc
import numpy as np
import pytest

from resident.v1 import inference_pb2, inference_pb2_grpc
from residentd.backend.reference import PlannedFault
from residentd.backend.reference_graph import ReferenceEncoder
from support.daemon import Daemon, running, wait_for
from support.toy_encoder import WIDTH, make_toy_encoder, toy_embedding

pb = inference_pb2
TIMEOUT_S = 120
CONFIG = "[engine]\nload_attempts_max = 100000\nrestarts_max = 100000\nrestart_backoff_s = 0.0\nresumes_max = 100000\n"
CALLERS = 64
TEXTS_EACH = 5
KILLS = 10


def texts_of(number: int) -> list[str]:
    rng = random.Random(number)
    return ["".join(rng.choices("abcdefgh ", k=rng.randint(1, 60))) for _ in range(TEXTS_EACH)]


def expected(text: str) -> tuple[float, ...]:
    return tuple(toy_embedding(tuple(text.encode())).tolist())


def engine(daemon: Daemon) -> object:
    return daemon.status().engines[0]


def test_every_answer_survives_worker_kills(tmp_path: Path) -> None:
    """Under random SIGKILLs of the worker 64 callers get the oracle's vectors to the bit; nothing is left behind."""
    make_toy_encoder(tmp_path, model=ReferenceEncoder(width=WIDTH, run_ms=3.0))

    async def scenario(daemon: Daemon) -> int:
        rng, resumed, done, over = random.Random(2), 0, 0, asyncio.Event()

        async def caller(stub: inference_pb2_grpc.InferenceAsyncStub, number: int) -> None:
            nonlocal resumed
            texts = texts_of(number)
            want = [expected(text) for text in texts]
            while not over.is_set():
                reply = await stub.Embed(pb.EmbedRequest(texts=texts), timeout=TIMEOUT_S)
                assert [tuple(found.values) for found in reply.embeddings] == want
                resumed += reply.answered.resumed_count

        async with grpc.aio.insecure_channel(daemon.address) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            callers = [asyncio.create_task(caller(stub, number)) for number in range(CALLERS)]
            while done < KILLS and not any(task.done() for task in callers):
                await asyncio.sleep(rng.uniform(0.0, 0.6))
                done += daemon.kill_worker()
            over.set()
            await asyncio.gather(*callers)
        return resumed

    with running(tmp_path, config=CONFIG) as daemon:
        assert asyncio.run(scenario(daemon)) > KILLS, "kills met waiting requests"
        status = engine(daemon)
        assert status.worker_restarts >= KILLS
        assert (status.waiting, status.slots_used) == (0, 0)
        assert status.batch_rows_max > 1
        assert daemon.stop() == 0


@pytest.mark.parametrize("kind", ["lost", "error", "retryable", "crash"])
def test_every_kind_of_failed_run_is_survived(tmp_path: Path, kind: str) -> None:
    """A run that fails in any way, once in each worker's life, costs no request anything but time."""
    fault = PlannedFault(kind=kind, step=9)  # type: ignore[arg-type]
    make_toy_encoder(tmp_path, model=ReferenceEncoder(width=WIDTH, faults=(fault,)))

    async def scenario(daemon: Daemon) -> None:
        async with grpc.aio.insecure_channel(daemon.address) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            calls = [stub.Embed(pb.EmbedRequest(texts=texts_of(n)), timeout=TIMEOUT_S) for n in range(20)]
            for number, reply in enumerate(await asyncio.gather(*calls)):
                assert [tuple(found.values) for found in reply.embeddings] == [expected(t) for t in texts_of(number)]

    with running(tmp_path, config=CONFIG) as daemon:
        asyncio.run(scenario(daemon))


def test_a_poisonous_text_fails_alone(tmp_path: Path) -> None:
    """A text that ends every worker it meets fails its own request with INTERNAL; all others are answered."""
    poison = PlannedFault(kind="crash", token=ord("Z"))
    make_toy_encoder(tmp_path, model=ReferenceEncoder(width=WIDTH, faults=(poison,)))
    config = CONFIG.replace("resumes_max = 100000", "resumes_max = 2")

    async def scenario(daemon: Daemon) -> None:
        async with grpc.aio.insecure_channel(daemon.address) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            requests = [pb.EmbedRequest(texts=texts_of(number)) for number in range(12)]
            requests[5].texts[2] = "aZb"
            calls = [stub.Embed(request, timeout=TIMEOUT_S) for request in requests]
            replies = await asyncio.gather(*calls, return_exceptions=True)
        bad = replies.pop(5)
        assert isinstance(bad, grpc.aio.AioRpcError)
        assert bad.code() is grpc.StatusCode.INTERNAL
        for number, reply in zip((n for n in range(12) if n != 5), replies, strict=True):
            assert [tuple(found.values) for found in reply.embeddings] == [expected(t) for t in texts_of(number)]

    with running(tmp_path, config=config) as daemon:
        asyncio.run(scenario(daemon))


def test_deadlines_and_cancels_leave_nothing_waiting(tmp_path: Path) -> None:
    """Late requests get DEADLINE_EXCEEDED, cancelled ones nothing; what waited of them is never computed."""
    make_toy_encoder(tmp_path, model=ReferenceEncoder(width=WIDTH, run_ms=40.0), rows=1)

    async def scenario(daemon: Daemon) -> None:
        async with grpc.aio.insecure_channel(daemon.address) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            late = [stub.Embed(pb.EmbedRequest(texts=texts_of(n)), timeout=0.15) for n in range(10)]
            gone = [stub.Embed(pb.EmbedRequest(texts=texts_of(n)), timeout=TIMEOUT_S) for n in range(10)]
            replies = await asyncio.gather(*late, return_exceptions=True)
            codes = [reply.code() for reply in replies if isinstance(reply, grpc.aio.AioRpcError)]
            assert set(codes) == {grpc.StatusCode.DEADLINE_EXCEEDED}
            assert len(codes) >= 9
            for call in gone:
                call.cancel()
            for call in gone:
                with contextlib.suppress(asyncio.CancelledError, grpc.aio.AioRpcError):
                    await call

    with running(tmp_path, config=CONFIG) as daemon:
        asyncio.run(scenario(daemon))
        wait_for(lambda: engine(daemon).waiting == engine(daemon).slots_used == 0, "an empty queue", 10)
        assert engine(daemon).steps < 100, "100 texts were asked for; the dropped ones were not computed"


def test_a_full_queue_refuses_with_a_hint(tmp_path: Path) -> None:
    """Past limits.waiting_max, and past limits.waiting_tokens_max, RESOURCE_EXHAUSTED; the accepted are answered."""
    make_toy_encoder(tmp_path, model=ReferenceEncoder(width=WIDTH, run_ms=30.0), rows=1, run_tokens=64)
    config = CONFIG + "[limits]\nwaiting_max = 6\nwaiting_tokens_max = 600\n"

    async def scenario(daemon: Daemon, texts: list[str], calls_count: int) -> list[object]:
        async with grpc.aio.insecure_channel(daemon.address) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            calls = [stub.Embed(pb.EmbedRequest(texts=texts), timeout=TIMEOUT_S) for _ in range(calls_count)]
            return await asyncio.gather(*calls, return_exceptions=True)

    with running(tmp_path, config=config) as daemon:
        replies = asyncio.run(scenario(daemon, ["a"], 20))
        refused = [reply for reply in replies if isinstance(reply, grpc.aio.AioRpcError)]
        assert {reply.code() for reply in refused} == {grpc.StatusCode.RESOURCE_EXHAUSTED}
        assert len(refused) == 20 - 7, "one slot and six that wait"
        replies = asyncio.run(scenario(daemon, ["a" * 60] * 8, 3))
        refused = [reply for reply in replies if isinstance(reply, grpc.aio.AioRpcError)]
        assert len(refused) == 2
        assert "limits.waiting_tokens_max" in refused[0].details()


def test_short_texts_overtake_long_ones(tmp_path: Path) -> None:
    """While 60 long texts wait, a short one is answered after at most the run that was under way and its own."""
    make_toy_encoder(tmp_path, model=ReferenceEncoder(width=WIDTH, run_ms=20.0), rows=1, run_tokens=64)

    async def scenario(daemon: Daemon) -> tuple[int, int]:
        async with grpc.aio.insecure_channel(daemon.address) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            long = asyncio.ensure_future(stub.Embed(pb.EmbedRequest(texts=["x" * 60] * 60), timeout=TIMEOUT_S))
            while engine(daemon).steps < 3:
                await asyncio.sleep(0.005)
            before = engine(daemon).steps
            await stub.Embed(pb.EmbedRequest(texts=["hi"]), timeout=TIMEOUT_S)
            after = engine(daemon).steps
            assert not long.done()
            await long
            return before, after

    with running(tmp_path, config=CONFIG) as daemon:
        before, after = asyncio.run(scenario(daemon))
        # One run under way, its own, and those that ran while the two looks travelled.
        assert after - before <= 6
        assert np.isfinite(engine(daemon).ttft_ms.p50)
