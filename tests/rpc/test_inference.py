from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from grpc_status import rpc_status

from resident.v1 import inference_pb2, inference_pb2_grpc
from residentd.backend.reference import ReferenceModel, continuation
from support.daemon import Daemon, running, wait_for
from support.toy_version import make_toy_version

pb = inference_pb2
VOCAB, CONTEXT, SLOTS = 1024, 256, 4
MODEL = ReferenceModel(peaks=(8.0, 7.0, 6.0), step_ms=1.0)
CONFIG = """
[limits]
waiting_max = 6
waiting_tokens_max = 400
prompt_bytes_max = 1000
messages_max = 3
requests_max = 64
message_bytes_max = 100000
metadata_bytes_max = 2048
stop_strings_max = 2
"""


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    state = tmp_path_factory.mktemp("state")
    make_toy_version(state, vocab=VOCAB, slots=SLOTS, context=CONTEXT, model=MODEL, has_end=True)
    with running(state, config=CONFIG) as daemon:
        yield daemon


@pytest.fixture
def stub(daemon: Daemon) -> Iterator[inference_pb2_grpc.InferenceStub]:
    with daemon.channel() as channel:
        yield inference_pb2_grpc.InferenceStub(channel)


def greedy(prompt: str, tokens: int, **fields: object) -> inference_pb2.GenerateRequest:
    sampling = pb.Sampling(max_tokens=tokens, temperature=0, ignore_eos=True)
    return pb.GenerateRequest(prompt=prompt, sampling=sampling, return_token_ids=True, **fields)


def wait_idle(daemon: Daemon) -> None:
    wait_for(lambda: daemon.status().engines[0].slots_used == 0, "every slot to be free", 10)


def test_the_stream_is_the_models_own_continuation(stub: inference_pb2_grpc.InferenceStub) -> None:
    """Token ids are the oracle's, the text is their decoding, and the messages come in the promised order."""
    messages = list(stub.Generate(greedy("Hello", 40)))
    want = continuation(tuple(b"Hello"), 40, MODEL, VOCAB)
    assert tuple(token for message in messages for token in message.token_ids) == want
    assert messages[0].HasField("started")
    assert [message.HasField("finish") for message in messages] == [False] * (len(messages) - 1) + [True]
    usage = messages[-1].finish.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (5, 40)
    complete = stub.Complete(greedy("Hello", 40))
    assert complete.text == "".join(message.text for message in messages)
    assert tuple(complete.token_ids) == want


def test_started_echoes_the_effective_parameters(stub: inference_pb2_grpc.InferenceStub) -> None:
    """Defaults are the model's, the seed is drawn, the version is named; sent back, the echo gives the same answer."""
    first = stub.Complete(pb.GenerateRequest(prompt="a", sampling=pb.Sampling(temperature=1.0, max_tokens=30)))
    sampling = first.started.sampling
    assert first.started.model_version == "toy@1"
    assert len(first.started.model_digest) == 64
    assert (sampling.top_p, sampling.top_k, sampling.max_tokens, sampling.HasField("seed")) == (1.0, 0, 30, True)
    again = stub.Complete(pb.GenerateRequest(prompt="a", sampling=sampling))
    assert again.text == first.text


def test_max_tokens_defaults_to_what_the_context_leaves(stub: inference_pb2_grpc.InferenceStub) -> None:
    """Without max_tokens the default is used, cut to the context; a full context still ends with LENGTH."""
    reply = stub.Complete(pb.GenerateRequest(prompt="x" * 250, sampling=pb.Sampling(temperature=0, ignore_eos=True)))
    assert (reply.started.sampling.max_tokens, reply.finish.reason) == (6, pb.FINISH_REASON_LENGTH)


def test_stop_strings_never_leak(stub: inference_pb2_grpc.InferenceStub) -> None:
    """The text ends right before the first stop string, and the tokens past it are not counted."""
    whole = stub.Complete(greedy("Hello", 40)).text
    stop = whole.split()[10]
    messages = list(stub.Generate(greedy("Hello", 40, stop=[stop, "never there"])))
    text = "".join(message.text for message in messages)
    assert text == whole[: whole.index(stop)]
    finish = messages[-1].finish
    assert (finish.reason, finish.stop) == (pb.FINISH_REASON_STOP, stop)
    used = sum(len(message.token_ids) for message in messages)
    assert finish.usage.completion_tokens == used < 40
    assert stop in stub.Complete(greedy("Hello", used)).text
    assert stop not in stub.Complete(greedy("Hello", used - 1)).text


def test_an_end_token_ends_and_is_not_text(stub: inference_pb2_grpc.InferenceStub) -> None:
    """The model's end id gives STOP unless ignore_eos; min_tokens holds it off."""
    bias = {VOCAB - 1: 100.0}
    stopped = stub.Complete(pb.GenerateRequest(prompt="a", sampling=pb.Sampling(temperature=0, logit_bias=bias)))
    assert (stopped.finish.reason, stopped.text) == (pb.FINISH_REASON_STOP, "")
    held = pb.Sampling(temperature=0, logit_bias=bias, min_tokens=3)
    assert stub.Complete(pb.GenerateRequest(prompt="a", sampling=held)).finish.usage.completion_tokens == 4
    ignored = pb.Sampling(temperature=0, logit_bias=bias, ignore_eos=True, max_tokens=5)
    assert stub.Complete(pb.GenerateRequest(prompt="a", sampling=ignored)).finish.reason == pb.FINISH_REASON_LENGTH


def test_logprobs_come_one_a_token(stub: inference_pb2_grpc.InferenceStub) -> None:
    """As many entries as tokens, the chosen token's own value among the alternatives of a greedy run."""
    request = greedy("Hello", 10)
    request.sampling.logprobs = 2
    reply = stub.Complete(request)
    assert [entry.token_id for entry in reply.logprobs] == list(reply.token_ids)
    for entry in reply.logprobs:
        assert entry.top[0].token_id == entry.token_id
        assert entry.top[0].logprob == entry.logprob
        assert len(entry.top) == 2


def test_count_tokens_counts_what_generate_would_use(stub: inference_pb2_grpc.InferenceStub) -> None:
    """The count, the ids and the context are those of a generation with the same input."""
    chat = pb.Chat(messages=[pb.Message(role="user", content="Hi")])
    counted = stub.CountTokens(pb.CountTokensRequest(chat=chat, return_token_ids=True))
    used = stub.Complete(pb.GenerateRequest(chat=chat, sampling=pb.Sampling(max_tokens=1))).finish.usage.prompt_tokens
    assert counted.tokens == used == len(counted.token_ids)
    assert counted.context == CONTEXT


REFUSED = [
    (pb.GenerateRequest(), "input", "no input"),
    (pb.GenerateRequest(prompt=""), "prompt", "empty"),
    (pb.GenerateRequest(prompt="x" * 1001), "input", "1,001 bytes"),
    (pb.GenerateRequest(token_ids=pb.TokenIds()), "token_ids.ids", "no token"),
    (pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1024])), "token_ids.ids", "1,024 is outside"),
    (pb.GenerateRequest(chat=pb.Chat()), "chat.messages", "0 messages"),
    (
        pb.GenerateRequest(chat=pb.Chat(messages=[pb.Message(role="user", content="a")] * 4)),
        "chat.messages",
        "4 messages",
    ),
    (pb.GenerateRequest(prompt="x" * 256), "input", "257 together"),
    (pb.GenerateRequest(prompt="x" * 200, sampling=pb.Sampling(max_tokens=57)), "sampling.max_tokens", "257 together"),
    (pb.GenerateRequest(prompt="a", sampling=pb.Sampling(max_tokens=0)), None, "0"),
    (pb.GenerateRequest(prompt="a", sampling=pb.Sampling(temperature=-0.1)), None, "temperature"),
    (pb.GenerateRequest(prompt="a", sampling=pb.Sampling(temperature=float("nan"))), None, "temperature"),
    (pb.GenerateRequest(prompt="a", sampling=pb.Sampling(top_p=1.5)), None, "top_p"),
    (pb.GenerateRequest(prompt="a", sampling=pb.Sampling(logit_bias={VOCAB: 1.0})), None, "logit_bias"),
    (pb.GenerateRequest(prompt="a", sampling=pb.Sampling(logprobs=21)), None, "logprobs"),
    (pb.GenerateRequest(prompt="a", sampling=pb.Sampling(stop_token_ids=[VOCAB])), None, "stop"),
    (pb.GenerateRequest(prompt="a", sampling=pb.Sampling(min_tokens=9, max_tokens=8)), None, "min"),
    (pb.GenerateRequest(prompt="a", stop=["a", "b", "c"]), "stop", "3 stop strings"),
    (pb.GenerateRequest(prompt="a", stop=[""]), None, "stop"),
]


@pytest.mark.parametrize(("request_", "field", "message"), REFUSED, ids=[row[2] for row in REFUSED])
def test_bad_input_is_refused_by_name(
    stub: inference_pb2_grpc.InferenceStub, request_: inference_pb2.GenerateRequest, field: str | None, message: str
) -> None:
    """INVALID_ARGUMENT, with the field in the details and the value in the text; unary and streaming alike."""
    for call in (stub.Complete, lambda request: list(stub.Generate(request))):
        with pytest.raises(grpc.RpcError) as refusal:
            call(request_)
        assert refusal.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert message in refusal.value.details()
        status = rpc_status.from_call(refusal.value)
        details = error_details_pb2.BadRequest()
        assert any(detail.Unpack(details) for detail in status.details)
        assert field is None or details.field_violations[0].field == field


@pytest.mark.parametrize(
    ("model", "code", "hint"),
    [
        ("toi", grpc.StatusCode.NOT_FOUND, "toy"),
        ("toy@9", grpc.StatusCode.NOT_FOUND, "toy@1"),
        ("toy@x", grpc.StatusCode.NOT_FOUND, "@"),
        ("../../etc/passwd", grpc.StatusCode.NOT_FOUND, "toy"),
    ],
)
def test_an_unknown_model_is_not_found(
    stub: inference_pb2_grpc.InferenceStub, model: str, code: grpc.StatusCode, hint: str
) -> None:
    """NOT_FOUND says what there is instead."""
    with pytest.raises(grpc.RpcError) as refusal:
        stub.Complete(pb.GenerateRequest(model=model, prompt="a"))
    assert refusal.value.code() is code
    assert hint in refusal.value.details()


def test_a_version_can_be_named(stub: inference_pb2_grpc.InferenceStub) -> None:
    """NAME, NAME@N and, with one model, nothing at all mean the same version."""
    texts = set()
    for model in ("", "toy", "toy@1"):
        texts.add(stub.Complete(greedy("Hello", 8, model=model)).text)
    assert len(texts) == 1


def test_an_oversized_message_is_refused(stub: inference_pb2_grpc.InferenceStub) -> None:
    """Past message_bytes_max the error names the key; past twice that gRPC refuses it unparsed, with the numbers."""
    with pytest.raises(grpc.RpcError) as refusal:
        stub.Complete(pb.GenerateRequest(prompt="x" * 150_000))
    assert refusal.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "limits.message_bytes_max" in refusal.value.details()
    with pytest.raises(grpc.RpcError) as refusal:
        stub.CountTokens(pb.CountTokensRequest(prompt="x" * 300_000))
    assert refusal.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "200000" in refusal.value.details()


def test_oversized_metadata_is_refused(stub: inference_pb2_grpc.InferenceStub) -> None:
    """Past metadata_bytes_max the error names the key; far past it gRPC refuses; the next call works either way."""
    with pytest.raises(grpc.RpcError) as refusal:
        stub.Complete(greedy("a", 1), metadata=(("x-large", "y" * 3_000),))
    assert refusal.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "limits.metadata_bytes_max" in refusal.value.details()
    with pytest.raises(grpc.RpcError):
        stub.Complete(greedy("a", 1), metadata=(("x-large", "y" * 10_000),))
    assert stub.Complete(greedy("a", 1)).finish.usage.completion_tokens == 1


def test_a_full_queue_refuses_at_once_with_a_retry_hint(daemon: Daemon) -> None:
    """Past waiting_max requests are refused with RESOURCE_EXHAUSTED and RetryInfo; the accepted ones all end whole."""

    async def one(stub: inference_pb2_grpc.InferenceAsyncStub) -> grpc.aio.AioRpcError | int:
        started = False
        try:
            async for message in stub.Generate(greedy("a", 120), timeout=60):
                started |= message.HasField("started")
                count = message.finish.usage.completion_tokens
        except grpc.aio.AioRpcError as error:
            assert not started, "told that it was accepted, then refused"
            return error
        return count

    async def crowd() -> list[grpc.aio.AioRpcError | int]:
        async with grpc.aio.insecure_channel(daemon.address) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            return list(await asyncio.gather(*(one(stub) for _ in range(40))))

    results = asyncio.run(crowd())
    refused = [result for result in results if not isinstance(result, int)]
    assert refused
    assert results.count(120) == len(results) - len(refused) >= SLOTS + 6
    for error in refused:
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        status = rpc_status.from_call(error)  # type: ignore[arg-type]
        assert any(detail.Is(error_details_pb2.RetryInfo.DESCRIPTOR) for detail in status.details)
    wait_idle(daemon)


def test_a_deadline_frees_the_slot(daemon: Daemon, stub: inference_pb2_grpc.InferenceStub) -> None:
    """A call past its deadline ends with DEADLINE_EXCEEDED and its slot is free again at once."""
    before = daemon.status().engines[0]
    with pytest.raises(grpc.RpcError) as failure:
        stub.Complete(greedy("a", 250), timeout=0.05)
    assert failure.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    wait_idle(daemon)
    after = daemon.status().engines[0]
    assert after.steps - before.steps < 200


def test_a_disconnect_frees_the_slot(daemon: Daemon) -> None:
    """A client that cancels its stream frees the slot; the request is counted as cancelled, the neighbours go on."""
    with daemon.channel() as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        neighbour = stub.Complete.future(greedy("Hello", 200))
        call = stub.Generate(greedy("b", 250))
        next(call)
        call.cancel()
        assert tuple(neighbour.result().token_ids) == continuation(tuple(b"Hello"), 200, MODEL, VOCAB)
    wait_idle(daemon)
    assert daemon.status().engines[0].finished["cancelled"] >= 1


def test_random_cancels_leave_every_slot_free(daemon: Daemon) -> None:
    """A thousand streams cancelled at random moments, some before their first token: nothing is left behind."""

    async def one(stub: inference_pb2_grpc.InferenceAsyncStub, rng: random.Random, gate: asyncio.Semaphore) -> None:
        async with gate:
            call = stub.Generate(greedy("abc", 100), timeout=60)
            for _ in range(rng.randint(0, 6)):
                if await call.read() is grpc.aio.EOF:
                    break
            call.cancel()

    async def storm() -> None:
        rng, gate = random.Random(3), asyncio.Semaphore(8)
        async with grpc.aio.insecure_channel(daemon.address) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            await asyncio.gather(*(one(stub, rng, gate) for _ in range(1000)), return_exceptions=True)

    asyncio.run(storm())
    wait_idle(daemon)
    assert daemon.status().engines[0].waiting == 0
    assert daemon.status().engines[0].kv_tokens_used == 0


def test_messages_are_coalesced_for_a_slow_reader(daemon: Daemon) -> None:
    """A client that reads late gets the waiting tokens in few messages, every token once."""

    async def late() -> tuple[int, int]:
        async with grpc.aio.insecure_channel(daemon.address) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            messages = tokens = 0
            async for message in stub.Generate(greedy("Hello", 200)):
                messages += 1
                tokens += len(message.token_ids)
            return messages, tokens

    async def crowd() -> list[tuple[int, int]]:
        return list(await asyncio.gather(*(late() for _ in range(4))))

    assert all(tokens == 200 for _, tokens in asyncio.run(crowd()))


def test_health_and_reflection_are_served(daemon: Daemon) -> None:
    """Standard tools find the services and their state without our protos."""
    with daemon.channel() as channel:
        health = health_pb2_grpc.HealthStub(channel)
        for service in ("", "resident.v1.Inference", "toy", "toy@1"):
            status = health.Check(health_pb2.HealthCheckRequest(service=service)).status
            assert status == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(grpc.RpcError) as unknown:
            health.Check(health_pb2.HealthCheckRequest(service="nothing"))
        assert unknown.value.code() is grpc.StatusCode.NOT_FOUND
        services = set(ProtoReflectionDescriptorDatabase(channel).get_services())
        assert {"resident.v1.Inference", "grpc.health.v1.Health"} <= services
        assert "resident.v1.Admin" not in services


def test_the_admin_service_is_not_on_tcp(daemon: Daemon) -> None:
    """Admin calls on the Inference port are UNIMPLEMENTED; the unix socket has mode 0660."""
    from resident.v1 import admin_pb2, admin_pb2_grpc

    with daemon.channel() as channel, pytest.raises(grpc.RpcError) as refusal:
        admin_pb2_grpc.AdminStub(channel).Status(admin_pb2.StatusRequest())
    assert refusal.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert (daemon.state / "admin.sock").stat().st_mode & 0o777 == 0o660


def test_errors_carry_no_path_and_no_prompt(daemon: Daemon, stub: inference_pb2_grpc.InferenceStub) -> None:
    """Neither the refusal nor the log holds the state directory's path or the prompt's text."""
    canary = "canary-Zq7"
    with pytest.raises(grpc.RpcError) as refusal:
        stub.Complete(pb.GenerateRequest(prompt=canary * 30))
    assert str(daemon.state) not in refusal.value.details()
    assert canary not in refusal.value.details()
    stub.Complete(greedy(canary, 3))
    assert canary not in daemon.log.read_text()


def test_sigterm_drains_running_streams(tmp_path: Path) -> None:
    """On SIGTERM a running stream ends whole, new calls are refused, the exit status is 0."""
    make_toy_version(tmp_path, vocab=VOCAB, slots=SLOTS, context=CONTEXT, model=ReferenceModel(step_ms=5.0))
    with running(tmp_path) as daemon, daemon.channel() as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        stream = stub.Generate(greedy("Hello", 200))
        next(stream)
        daemon.process.terminate()
        wait_for(lambda: refuses(stub), "new calls to be refused", 5)
        assert sum(len(message.token_ids) for message in stream) == 200
        assert daemon.process.wait(20) == 0


def refuses(stub: inference_pb2_grpc.InferenceStub) -> bool:
    try:
        stub.Complete(greedy("a", 1), timeout=5)
    except grpc.RpcError as error:
        return error.code() is grpc.StatusCode.UNAVAILABLE
    return False


def test_a_drain_past_its_limit_ends_what_is_left(tmp_path: Path) -> None:
    """When the drain limit is reached, the rest is ended with UNAVAILABLE and the daemon still exits with 0."""
    make_toy_version(tmp_path, vocab=VOCAB, slots=SLOTS, context=CONTEXT, model=ReferenceModel(step_ms=50.0))
    with running(tmp_path, config="[engine]\ndrain_s = 0.3\n") as daemon, daemon.channel() as channel:
        stream = inference_pb2_grpc.InferenceStub(channel).Generate(greedy("Hello", 200))
        next(stream)
        started = time.monotonic()
        daemon.process.terminate()
        with pytest.raises(grpc.RpcError) as ended:
            list(stream)
        assert ended.value.code() is grpc.StatusCode.UNAVAILABLE
        assert daemon.process.wait(20) == 0
        assert time.monotonic() - started < 8


def test_a_second_daemon_on_the_same_state_is_refused(daemon: Daemon) -> None:
    """Two daemons never share a state directory: the second exits with 2 and says why, the first is untouched."""
    import subprocess
    import sys

    command = [sys.executable, "-m", "residentd", "--config", str(daemon.state / "test.toml")]
    second = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert second.returncode == 2
    assert "another residentd runs" in second.stderr
    assert daemon.status().engines[0].state == "ready"
