from __future__ import annotations

import asyncio
import random
import time
from pathlib import Path

import grpc
import pytest

from resident.v1 import inference_pb2, inference_pb2_grpc
from residentd.backend.reference import PlannedFault, ReferenceModel
from support.daemon import Daemon, running, wait_for
from support.installed import EXPORTS, install
from support.toy_version import make_toy_version

STREAMS = 64
OUTPUT_TOKENS = 150
CONFIG = "[engine]\nload_attempts_max = 100000\nrestarts_max = 100000\nrestart_backoff_s = 0.0\nresumes_max = 100000\n"
SPREAD = ReferenceModel(peaks=(6.0, 5.5, 5.0, 4.5), step_ms=2.0)
POISON_TOKEN = 777
TIMEOUT_S = 120


def request(number: int) -> inference_pb2.GenerateRequest:
    """Half of the requests are greedy with logprobs, half are sampled; every prompt and seed is its own."""
    rng = random.Random(number)
    sampling = inference_pb2.Sampling(max_tokens=OUTPUT_TOKENS, seed=number, ignore_eos=True)
    if number % 2:
        sampling.temperature, sampling.top_p, sampling.repetition_penalty = 1.2, 0.98, 1.05
    else:
        sampling.temperature, sampling.logprobs = 0, 2
    ids = [rng.randrange(300) for _ in range(rng.randint(1, 60))]
    return inference_pb2.GenerateRequest(
        token_ids=inference_pb2.TokenIds(ids=ids), sampling=sampling, return_token_ids=True
    )


async def answer(stub: inference_pb2_grpc.InferenceAsyncStub, number: int) -> tuple[list[int], str, int, list[float]]:
    """Token ids, text, how often it was resumed, logprobs: everything of one stream that a client can see."""
    ids: list[int] = []
    text, resumed, logprobs = "", 0, []
    async for message in stub.Generate(request(number), timeout=TIMEOUT_S):
        ids.extend(message.token_ids)
        logprobs.extend(entry.logprob for entry in message.logprobs)
        text += message.text
        if message.HasField("finish"):
            resumed = message.finish.timing.resumed_count
            assert message.finish.usage.completion_tokens == len(ids) == OUTPUT_TOKENS
    return ids, text, resumed, logprobs


async def undisturbed(daemon: Daemon) -> list[tuple[list[int], str, int, list[float]]]:
    async with grpc.aio.insecure_channel(daemon.address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        return list(await asyncio.gather(*(answer(stub, number) for number in range(STREAMS))))


async def under_kills(daemon: Daemon, kills: int, wanted: list[tuple[list[int], str, int, list[float]]]) -> int:
    """Run 64 streams over and over while workers are killed at random moments. Returns how many were resumed."""
    rng, done = random.Random(1), 0
    over = asyncio.Event()

    async def client(stub: inference_pb2_grpc.InferenceAsyncStub, number: int) -> int:
        resumed_here = 0
        while not over.is_set():
            ids, text, resumed, logprobs = await answer(stub, number)
            want = wanted[number]
            assert (ids, text, logprobs) == (want[0], want[1], want[3]), (
                f"stream {number} differs after {resumed} resumes"
            )
            resumed_here += resumed
        return resumed_here

    async with grpc.aio.insecure_channel(daemon.address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        clients = [asyncio.create_task(client(stub, number)) for number in range(STREAMS)]
        while done < kills and not any(task.done() for task in clients):
            await asyncio.sleep(rng.uniform(0.0, 0.9))
            done += daemon.kill_worker()
        over.set()
        return sum(await asyncio.gather(*clients))


def check_kills(state: Path, kills: int) -> None:
    with running(state, config=CONFIG) as daemon:
        wanted = asyncio.run(undisturbed(daemon))
        assert len({tuple(ids) for ids, *_ in wanted}) == STREAMS, "the streams are distinct"
        resumed = asyncio.run(under_kills(daemon, kills, wanted))
        wait_for(lambda: daemon.status().engines[0].worker_restarts >= kills, "the last restart")
        status = daemon.status().engines[0]
        assert resumed > kills, "kills met running streams"
        assert status.slots_used == status.waiting == 0
        assert daemon.stop() == 0


def test_streams_survive_worker_kills(tmp_path: Path) -> None:
    """Under random SIGKILLs of the worker 64 streams get the very answers of an undisturbed run, every token once."""
    make_toy_version(tmp_path, slots=16, context=256, model=SPREAD)
    check_kills(tmp_path, kills=12)


def test_streams_of_a_compiled_engine_survive_worker_kills(tmp_path: Path) -> None:
    """The same for a real fp32 engine: a resumed answer is computed in other steps and must not round differently."""
    install(EXPORTS / "smollm2", tmp_path, "tiny", "--slots", "16", "--step-tokens", "64")
    check_kills(tmp_path, kills=8)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kind", ["toy", "compiled"])
def test_streams_survive_a_hundred_worker_kills(tmp_path: Path, kind: str) -> None:
    """The same for 100 kills."""
    if kind == "toy":
        make_toy_version(tmp_path, slots=16, context=256, model=SPREAD)
    else:
        install(EXPORTS / "smollm2", tmp_path, "tiny", "--slots", "16", "--step-tokens", "64")
    check_kills(tmp_path, kills=100)


@pytest.mark.parametrize("kind", ["lost", "error", "retryable", "crash"])
def test_every_kind_of_step_failure_is_survived(tmp_path: Path, kind: str) -> None:
    """A step that fails in any way, once in each worker's life, costs no request anything but time."""
    fault = PlannedFault(kind=kind, step=40)  # type: ignore[arg-type]
    calm = make_toy_version(tmp_path, "calm", slots=8, model=ReferenceModel(peaks=SPREAD.peaks))
    faulty = make_toy_version(tmp_path, "faulty", slots=8, model=ReferenceModel(peaks=SPREAD.peaks, faults=(fault,)))
    assert calm != faulty
    with running(tmp_path, config=CONFIG, models=2) as daemon:

        async def both(number: int) -> None:
            async with grpc.aio.insecure_channel(daemon.address) as channel:
                stub = inference_pb2_grpc.InferenceStub(channel)
                results = []
                for model in ("calm", "faulty"):
                    message = request(number)
                    message.model = model
                    reply = await stub.Complete(message, timeout=TIMEOUT_S)
                    results.append((list(reply.token_ids), reply.text))
                assert results[0] == results[1]

        async def all_of_them() -> None:
            await asyncio.gather(*(both(number) for number in range(12)))

        asyncio.run(all_of_them())
        restarts = {engine.model_version: engine.worker_restarts for engine in daemon.status().engines}
        assert restarts["calm@1"] == 0
        assert (restarts["faulty@1"] == 0) == (kind == "retryable")


def test_a_hung_step_is_ended_and_its_requests_go_on(tmp_path: Path) -> None:
    """A step past step_timeout_s: health says NOT_SERVING meanwhile, the worker is replaced, the answer is whole."""
    hang = ReferenceModel(peaks=SPREAD.peaks, faults=(PlannedFault(kind="hang", step=60),))
    make_toy_version(tmp_path, model=hang)
    with (
        running(tmp_path, config=CONFIG + "stall_s = 0.3\nstep_timeout_s = 1.5\n") as daemon,
        daemon.channel() as channel,
    ):
        seen = watch_health(daemon)
        stub = inference_pb2_grpc.InferenceStub(channel)
        reply = stub.Complete(request(2), timeout=TIMEOUT_S)
        assert reply.finish.usage.completion_tokens == OUTPUT_TOKENS
        assert reply.finish.timing.resumed_count >= 1
        wait_for(lambda: seen[-1] == "SERVING", "health to recover")
        assert "NOT_SERVING" in seen


def watch_health(daemon: Daemon) -> list[str]:
    """The overall health as it changes, appended in the background."""
    import threading

    from grpc_health.v1 import health_pb2, health_pb2_grpc

    seen: list[str] = []

    def watch() -> None:
        with daemon.channel() as channel:
            try:
                updates = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=""))
                name_of = health_pb2.HealthCheckResponse.ServingStatus.Name
                seen.extend(name_of(update.status) for update in updates)
            except grpc.RpcError:
                pass

    threading.Thread(target=watch, daemon=True).start()
    wait_for(lambda: bool(seen), "the first health status")
    return seen


def test_a_request_that_ends_every_worker_is_failed_alone(tmp_path: Path) -> None:
    """One poisonous request is found and failed with INTERNAL; the requests beside it get their whole answers."""
    poison = ReferenceModel(peaks=SPREAD.peaks, faults=(PlannedFault(kind="crash", token=POISON_TOKEN),))
    clean = ReferenceModel(peaks=SPREAD.peaks)
    make_toy_version(tmp_path, "clean", vocab=POISON_TOKEN, slots=4, model=clean)
    make_toy_version(tmp_path, "poisoned", slots=4, model=poison, vocab=1024)
    config = "[engine]\nrestarts_max = 20\nrestart_backoff_s = 0.0\nresumes_max = 2\n"
    with running(tmp_path, config=config, models=2) as daemon:

        async def scenario() -> tuple[grpc.StatusCode, int]:
            async with grpc.aio.insecure_channel(daemon.address) as channel:
                stub = inference_pb2_grpc.InferenceStub(channel)
                bad = inference_pb2.GenerateRequest(
                    model="poisoned", token_ids=inference_pb2.TokenIds(ids=[1, POISON_TOKEN])
                )
                others = [asyncio.create_task(complete(stub, number)) for number in range(8)]
                await asyncio.sleep(0.05)
                try:
                    await stub.Complete(bad, timeout=TIMEOUT_S)
                except grpc.aio.AioRpcError as error:
                    code = error.code()
                counts = await asyncio.gather(*others)
                return code, min(counts)

        async def complete(stub: inference_pb2_grpc.InferenceAsyncStub, number: int) -> int:
            message = request(number)
            message.model = "poisoned"
            message.sampling.logit_bias[POISON_TOKEN] = -100
            message.sampling.temperature = 0
            reply = await stub.Complete(message, timeout=TIMEOUT_S)
            return reply.finish.usage.completion_tokens

        assert asyncio.run(scenario()) == (grpc.StatusCode.INTERNAL, OUTPUT_TOKENS)


def test_a_model_whose_worker_cannot_live_fails_and_says_why(tmp_path: Path) -> None:
    """Past the restart budget the model is FAILED: its requests end with INTERNAL, new ones are refused."""
    doomed = ReferenceModel(peaks=SPREAD.peaks, faults=(PlannedFault(kind="crash", step=20),), step_ms=1.0)
    make_toy_version(tmp_path, "doomed", model=doomed)
    make_toy_version(tmp_path, "fine")
    config = "[engine]\nrestarts_max = 1\nrestart_backoff_s = 0.0\n"
    with running(tmp_path, config=config, models=2) as daemon, daemon.channel() as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        message = request(2)
        message.model = "doomed"
        started = time.monotonic()
        with pytest.raises(grpc.RpcError) as failure:
            stub.Complete(message, timeout=TIMEOUT_S)
        assert failure.value.code() is grpc.StatusCode.INTERNAL
        assert time.monotonic() - started < TIMEOUT_S / 2
        with pytest.raises(grpc.RpcError) as refusal:
            stub.Complete(message, timeout=TIMEOUT_S)
        assert refusal.value.code() is grpc.StatusCode.UNAVAILABLE
        message.model = "fine"
        assert stub.Complete(message, timeout=TIMEOUT_S).finish.usage.completion_tokens == OUTPUT_TOKENS
