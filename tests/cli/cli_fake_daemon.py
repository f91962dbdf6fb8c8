"""A daemon for the tests of residentctl: both services, with their state, over real sockets on this machine."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import grpc
from google.rpc import status_pb2
from grpc_status import rpc_status

from resident.v1 import admin_pb2, admin_pb2_grpc, inference_pb2, inference_pb2_grpc

CONTEXT = 2048
VOCABULARY = 1000
WAIT_S_MAX = 20.0


def version(number: int, **fields: object) -> admin_pb2.Version:
    defaults: dict[str, object] = {
        "name": "toy",
        "number": number,
        "digest": f"{number:x}" * 64,
        "architecture": "LlamaForCausalLM",
        "target": "onnxruntime-cpu",
        "precision": "fp32",
        "mode": "canonical",
        "context": CONTEXT,
        "slots": 8,
        "bytes": 538_000_000,
        "created": "2026-11-30T12:00:00+00:00",
        "state": "available",
        "logit_diff_max": 7.2e-5,
        "logit_diff_bound": 1e-3,
        "greedy_equal": 60,
        "greedy_total": 60,
        "quality": admin_pb2.Quality(
            kl_mean=0.0312, kl_p99=0.21, kl_bound=0.05, perplexity=20.13, perplexity_export=19.41, top1=0.901,
            positions=2040,
        ),
        "cost": admin_pb2.Cost(file_bytes=530_000_000, memory_bytes=1_900_000_000),
        "speeds": admin_pb2.Speeds(decode_one=41.2, decode_many=110.4, rows=8, prefill=309),
    }  # fmt: skip
    return admin_pb2.Version(**{**defaults, **fields})


@dataclass(slots=True)
class FakeDaemon:
    """What the two services answer, and what they have seen. The test owns it and may change it between calls."""

    versions: list[admin_pb2.Version] = field(default_factory=lambda: [version(1, active=True, state="ready")])
    findings: status_pb2.Status | None = None  # every Install ends so
    faults: dict[str, status_pb2.Status] = field(default_factory=dict)  # method -> how its calls end
    install_stages: tuple[tuple[str, float, str], ...] = (
        ("read", 0.02, "model.onnx, 538 MB"),
        ("canonicalise", 0.3, "30 attention cores"),
        ("verify", 0.5, "batch 1 of 2"),
        ("verify", 0.55, "batch 2 of 2"),
        ("publish", 0.88, ""),
    )
    tokens_per_message: int = 1
    token_delay_s: float = 0.0
    hold_after: int | None = None  # a stream stops after that many tokens until it is cancelled
    requests: list[inference_pb2.GenerateRequest] = field(default_factory=list)
    installs: list[admin_pb2.InstallRequest] = field(default_factory=list)
    holding: threading.Event = field(default_factory=threading.Event)
    cancelled: threading.Event = field(default_factory=threading.Event)
    streams_max: int = 0
    streams: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def check(self, method: str, context: grpc.ServicerContext) -> None:
        if method in self.faults:
            context.abort_with_status(rpc_status.to_status(self.faults[method]))

    def hold(self, context: grpc.ServicerContext) -> None:
        """Keep a call open until its client cancels it."""
        context.add_callback(self.cancelled.set)
        self.holding.set()
        assert self.cancelled.wait(WAIT_S_MAX)


@dataclass(frozen=True, slots=True)
class Running:
    """A FakeDaemon that listens: on a port of loopback, and on the admin socket of its state directory."""

    daemon: FakeDaemon
    state: Path
    address: str


class Admin(admin_pb2_grpc.AdminServicer):
    def __init__(self, daemon: FakeDaemon) -> None:
        self._daemon = daemon

    def Install(
        self, request: admin_pb2.InstallRequest, context: grpc.ServicerContext
    ) -> Iterator[admin_pb2.InstallProgress]:
        daemon = self._daemon
        daemon.installs.append(request)
        for position, (stage, fraction, message) in enumerate(daemon.install_stages):
            yield admin_pb2.InstallProgress(stage=stage, fraction=fraction, message=message)
            if daemon.hold_after == position:
                daemon.hold(context)
                return
        daemon.check("Install", context)
        number = max((known.number for known in daemon.versions if known.name == request.name), default=0) + 1
        installed = version(number, name=request.name, active=not request.keep_active, state="ready")
        daemon.versions.append(installed)
        yield admin_pb2.InstallProgress(stage="done", fraction=1.0, installed=installed)

    def ListVersions(
        self, request: admin_pb2.ListVersionsRequest, context: grpc.ServicerContext
    ) -> admin_pb2.ListVersionsResponse:
        self._daemon.check("ListVersions", context)
        named = [known for known in self._daemon.versions if request.name in {"", known.name}]
        return admin_pb2.ListVersionsResponse(versions=named)

    def Status(self, _request: admin_pb2.StatusRequest, context: grpc.ServicerContext) -> admin_pb2.StatusResponse:
        daemon = self._daemon
        daemon.check("Status", context)
        ready = [known for known in daemon.versions if known.state == "ready"]
        return admin_pb2.StatusResponse(
            residentd_version="0.1.0",
            uptime_s=8000.0,
            state="/var/lib/residentd",
            engines=[_engine(known, daemon) for known in ready],
        )

    def Load(self, request: admin_pb2.LoadRequest, context: grpc.ServicerContext) -> admin_pb2.LoadResponse:
        self._daemon.check("Load", context)
        loaded = self._named(request.model, context)
        loaded.state = "ready"
        return admin_pb2.LoadResponse(version=loaded)

    def Unload(self, request: admin_pb2.UnloadRequest, context: grpc.ServicerContext) -> admin_pb2.UnloadResponse:
        self._daemon.check("Unload", context)
        self._named(request.model, context).state = "available"
        return admin_pb2.UnloadResponse()

    def Verify(self, request: admin_pb2.VerifyRequest, context: grpc.ServicerContext) -> admin_pb2.VerifyResponse:
        self._daemon.check("Verify", context)
        checked = self._named(request.model, context)
        return admin_pb2.VerifyResponse(version=checked, serving="toy@1", seconds=4.25)

    def _named(self, reference: str, context: grpc.ServicerContext) -> admin_pb2.Version:
        for known in self._daemon.versions:
            if reference in {known.name, f"{known.name}@{known.number}"}:
                return known
        context.abort(grpc.StatusCode.NOT_FOUND, f"model {reference} is not installed. See residentctl list")
        raise AssertionError("abort raises")


def _engine(known: admin_pb2.Version, daemon: FakeDaemon) -> admin_pb2.EngineStatus:
    return admin_pb2.EngineStatus(
        model_version=f"{known.name}@{known.number}",
        digest=known.digest,
        state="ready",
        worker_pid=4711,
        worker_restarts=1,
        slots=8,
        slots_used=5,
        waiting=3,
        kv_tokens_used=3120,
        kv_tokens_total=16384,
        steps=12_931,
        prompt_tokens_per_s=1203.0,
        output_tokens_per_s=214.3,
        ttft_ms=admin_pb2.Percentiles(p50=82.1, p95=210.0, p99=1340.0, count=128),
        itl_ms=admin_pb2.Percentiles(p50=21.2, p95=48.0, p99=60.0, count=9214),
        finished={"stop": 120, "length": 8, "cancelled": 3},
        worker_memory_bytes=612_000_000,
        scheduling="throughput",
        batch_rows_max=daemon.streams_max,
    )


class Inference(inference_pb2_grpc.InferenceServicer):
    """Answers a prompt of n words with the words w0 w1 … of the tokens 0 1 …, as many as max_tokens says, else n."""

    def __init__(self, daemon: FakeDaemon) -> None:
        self._daemon = daemon

    def Generate(
        self, request: inference_pb2.GenerateRequest, context: grpc.ServicerContext
    ) -> Iterator[inference_pb2.GenerateResponse]:
        daemon = self._daemon
        with daemon.lock:
            daemon.requests.append(request)
            daemon.streams += 1
            daemon.streams_max = max(daemon.streams_max, daemon.streams)
        try:
            daemon.check("Generate", context)
            yield from self._tokens(request, context)
        finally:
            with daemon.lock:
                daemon.streams -= 1

    def _tokens(
        self, request: inference_pb2.GenerateRequest, context: grpc.ServicerContext
    ) -> Iterator[inference_pb2.GenerateResponse]:
        daemon = self._daemon
        prompt = _prompt_tokens(request)
        count = request.sampling.max_tokens or prompt
        started = inference_pb2.Started(
            request_id="1",
            model_version="toy@1",
            model_digest="1" * 64,
            prompt_tokens=prompt,
            sampling=request.sampling,
        )
        yield inference_pb2.GenerateResponse(started=started)
        for first in range(0, count, daemon.tokens_per_message):
            if daemon.hold_after is not None and first >= daemon.hold_after:
                daemon.hold(context)
                return
            time.sleep(daemon.token_delay_s)
            yield _delta(request, range(first, min(first + daemon.tokens_per_message, count)))
        yield inference_pb2.GenerateResponse(finish=_finish(request, prompt, count))

    def CountTokens(
        self, request: inference_pb2.CountTokensRequest, context: grpc.ServicerContext
    ) -> inference_pb2.CountTokensResponse:
        self._daemon.check("CountTokens", context)
        words = request.prompt.split() or [w for entry in request.chat.messages for w in entry.content.split()]
        ids = range(len(words)) if request.return_token_ids else ()
        return inference_pb2.CountTokensResponse(tokens=len(words), context=CONTEXT, token_ids=ids)

    def ListModels(
        self, _request: inference_pb2.ListModelsRequest, context: grpc.ServicerContext
    ) -> inference_pb2.ListModelsResponse:
        self._daemon.check("ListModels", context)
        return inference_pb2.ListModelsResponse(models=[_model(known) for known in self._daemon.versions])


def _prompt_tokens(request: inference_pb2.GenerateRequest) -> int:
    match request.WhichOneof("input"):
        case "prompt":
            return len(request.prompt.split())
        case "chat":
            return sum(len(message.content.split()) for message in request.chat.messages)
        case _:
            return len(request.token_ids.ids)


def _delta(request: inference_pb2.GenerateRequest, tokens: range) -> inference_pb2.GenerateResponse:
    alternative = inference_pb2.TokenLogprobs.Alternative
    asked = request.sampling.HasField("logprobs")
    return inference_pb2.GenerateResponse(
        text="".join(f" w{token}" for token in tokens),
        token_ids=tokens if request.return_token_ids else (),
        logprobs=[
            inference_pb2.TokenLogprobs(token_id=token, logprob=-0.5, top=[alternative(token_id=token, logprob=-0.5)])
            for token in tokens
            if asked
        ],
    )


def _finish(request: inference_pb2.GenerateRequest, prompt: int, count: int) -> inference_pb2.Finish:
    return inference_pb2.Finish(
        reason=inference_pb2.FINISH_REASON_LENGTH,
        usage=inference_pb2.Usage(prompt_tokens=prompt, completion_tokens=count),
        timing=inference_pb2.Timing(queue_ms=1.0, ttft_ms=82.0, decode_tokens_per_s=33.1, total_ms=1300.0),
    )


def _model(known: admin_pb2.Version) -> inference_pb2.Model:
    return inference_pb2.Model(
        name=known.name,
        version=f"{known.name}@{known.number}",
        digest=known.digest,
        architecture=known.architecture,
        precision=known.precision,
        context=known.context,
        slots=known.slots,
        vocabulary=VOCABULARY,
        ready=known.state == "ready",
        chat=True,
    )


def start(state: Path, daemon: FakeDaemon) -> tuple[Running, grpc.Server]:
    """Listen under `state`, as the real daemon does; the caller stops the server."""
    server = grpc.server(ThreadPoolExecutor(max_workers=64))
    admin_pb2_grpc.add_AdminServicer_to_server(Admin(daemon), server)
    inference_pb2_grpc.add_InferenceServicer_to_server(Inference(daemon), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.add_insecure_port(f"unix:{state}/admin.sock")
    server.start()
    (state / "run").mkdir()
    (state / "run" / "address").write_text(f"127.0.0.1:{port}\n")
    return Running(daemon, state, f"127.0.0.1:{port}"), server
