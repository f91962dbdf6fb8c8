"""Exports that run as they are, served: killed workers, cancelled streams, chunked prompts, slots used again."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator

import grpc
import pytest

from resident.v1 import admin_pb2, inference_pb2, inference_pb2_grpc
from support.daemon import Daemon, running, wait_for
from support.installed import EXPORTS, install

MODELS = ("mpt", "llama")  # not recognised, and recognised but asked for as it is
CONFIG = (
    "[engine]\nthreads = 1\nprefill_tokens_max = 24\nload_attempts_max = 1000\nrestarts_max = 1000\n"
    "restart_backoff_s = 0.0\nresumes_max = 1000\n"
)
SLOTS = 4
KILLS = 6
KILL_WAIT_S_MAX = 0.5
TIMEOUT_S = 120

Golden = tuple[str, tuple[int, ...], tuple[int, ...]]  # model, prompt, output


def goldens() -> list[Golden]:
    found = []
    for model in MODELS:
        prompts = json.loads((EXPORTS / model / "goldens.json").read_text())["prompts"]
        found += [(model, tuple(entry["prompt_ids"]), tuple(entry["greedy_ids"])) for entry in prompts]
    return found


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    state = tmp_path_factory.mktemp("compatibility")
    options = ("--slots", str(SLOTS), "--step-tokens", "32")
    install(EXPORTS / "mpt", state, "mpt", *options)
    install(EXPORTS / "llama", state, "llama", *options, "--mode", "compatibility")
    with running(state, config=CONFIG, models=len(MODELS)) as daemon:
        yield daemon


def request_of(golden: Golden) -> inference_pb2.GenerateRequest:
    model, prompt, output = golden
    return inference_pb2.GenerateRequest(
        model=model,
        token_ids=inference_pb2.TokenIds(ids=prompt),
        sampling=inference_pb2.Sampling(max_tokens=len(output), temperature=0, ignore_eos=True),
        return_token_ids=True,
    )


async def answer(stub: inference_pb2_grpc.InferenceAsyncStub, golden: Golden) -> int:
    """Check the answer against transformers' own; how often it was resumed."""
    reply = await stub.Complete(request_of(golden), timeout=TIMEOUT_S)
    assert tuple(reply.token_ids) == golden[2], f"{golden[0]}, a prompt of {len(golden[1])} tokens"
    return reply.finish.timing.resumed_count


def slots_used(daemon: Daemon) -> int:
    return sum(engine.slots_used + engine.waiting for engine in daemon.status().engines)


def test_the_listing_says_why(daemon: Daemon) -> None:
    """Mode and reason of both versions, with the node that was not understood."""
    with daemon.admin() as stub:
        versions = {version.name: version for version in stub.ListVersions(admin_pb2.ListVersionsRequest()).versions}
    assert {version.mode for version in versions.values()} == {"compatibility"}
    assert "attention of layer 0 is not recognised: node /transformer/blocks.0" in versions["mpt"].mode_reason
    assert "--mode compatibility" in versions["llama"].mode_reason
    assert [engine.mode for engine in daemon.status().engines] == ["compatibility"] * len(MODELS)


def test_every_golden_survives_worker_kills(daemon: Daemon) -> None:
    """Under random SIGKILLs of the workers every greedy answer is transformers', and no token is lost or repeated."""

    async def until(over: asyncio.Event, stub: inference_pb2_grpc.InferenceAsyncStub, seed: int) -> int:
        rng, resumed = random.Random(seed), 0
        while not over.is_set():
            resumed += await answer(stub, rng.choice(goldens()))
        return resumed

    async def scenario() -> int:
        rng, over, killed = random.Random(1), asyncio.Event(), 0
        async with grpc.aio.insecure_channel(daemon.address) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            clients = [asyncio.create_task(until(over, stub, seed)) for seed in range(3 * SLOTS)]
            while killed < KILLS and not any(client.done() for client in clients):
                await asyncio.sleep(rng.uniform(0, KILL_WAIT_S_MAX))
                killed += await asyncio.to_thread(daemon.kill_worker)
            over.set()
            return sum(await asyncio.gather(*clients))

    assert asyncio.run(scenario()) > 0, "kills met running answers"
    wait_for(lambda: slots_used(daemon) == 0, "every slot to be free")


def test_cancelled_streams_leave_nothing_in_their_slots(daemon: Daemon) -> None:
    """Streams cancelled in the prompt, at the first token and later; every answer that follows is whole."""

    async def cancelled(stub: inference_pb2_grpc.InferenceAsyncStub, golden: Golden, after: int) -> None:
        call = stub.Generate(request_of(golden), timeout=TIMEOUT_S)
        seen = 0
        while seen < after:
            message = await call.read()
            assert message is not grpc.aio.EOF
            seen += len(message.token_ids)
        call.cancel()

    async def scenario() -> None:
        rng = random.Random(2)
        async with grpc.aio.insecure_channel(daemon.address) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            for _ in range(3):
                chosen = rng.sample(goldens(), 2 * SLOTS)
                await asyncio.gather(*(cancelled(stub, golden, rng.choice((0, 0, 1, 5))) for golden in chosen))
                await asyncio.gather(*(answer(stub, golden) for golden in rng.sample(goldens(), 2 * SLOTS)))

    asyncio.run(scenario())
    wait_for(lambda: slots_used(daemon) == 0, "every slot to be free")
    assert sum(engine.finished["cancelled"] for engine in daemon.status().engines) > 0
