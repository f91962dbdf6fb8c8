"""resident.v1.Inference: from a request message to tokens and back to messages."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from resident.v1 import inference_pb2, inference_pb2_grpc
from residentd.config import Config
from residentd.errors import (
    CallerError,
    DeadlineError,
    EngineFailedError,
    OverloadedError,
    ResidentError,
    UnavailableError,
)
from residentd.rpc import convert, parameters
from residentd.rpc.calls import Calls
from residentd.rpc.tensors import spec_message
from residentd.rpc.text_threads import TextThreads
from residentd.supervisor.engines import Engines, Loaded
from residentd.supervisor.generation import Generation
from residentd.supervisor.host import State
from residentd.text.model import TextStream
from residentd.types import Finish, Finished, Refusal, Request, RequestId, Sampled

FINISH_REASONS: Final = {
    Finish.STOP: inference_pb2.FINISH_REASON_STOP,
    Finish.LENGTH: inference_pb2.FINISH_REASON_LENGTH,
}


@dataclass(frozen=True, slots=True)
class Admitted:
    """One accepted request: its engine, its tokens to come and how they become text."""

    loaded: Loaded
    generation: Generation
    text: TextStream
    started: inference_pb2.Started
    return_token_ids: bool


class InferenceServicer(inference_pb2_grpc.InferenceServicer):
    def __init__(self, engines: Engines, config: Config) -> None:
        self._engines = engines
        self._config = config
        self._ids = itertools.count(1)
        self._threads = TextThreads()
        self._calls = Calls(engines, config, self._ids, self._place, self._threads)
        self._preparing = 0  # requests whose prompt is being tokenized

    async def Generate(
        self, request: inference_pb2.GenerateRequest, context: convert.Context
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        async with convert.reporting(context):
            admitted = await self._admit(request, context)
            try:
                yield inference_pb2.GenerateResponse(started=admitted.started)
                async for response in _responses(admitted):
                    yield response
            finally:
                # Reached on every way out: the end, an error, the caller's cancel, deadline or disconnect.
                admitted.loaded.host.cancel(admitted.generation, Finish.CANCELLED)

    async def Complete(
        self, request: inference_pb2.GenerateRequest, context: convert.Context
    ) -> inference_pb2.CompleteResponse:
        async with convert.reporting(context):
            admitted = await self._admit(request, context)
            answer = inference_pb2.CompleteResponse(started=admitted.started)
            texts = []
            try:
                async for response in _responses(admitted):
                    texts.append(response.text)
                    answer.token_ids.extend(response.token_ids)
                    answer.logprobs.extend(response.logprobs)
                    if response.HasField("finish"):
                        answer.finish.CopyFrom(response.finish)
            finally:
                admitted.loaded.host.cancel(admitted.generation, Finish.CANCELLED)
            answer.text = "".join(texts)
            return answer
        raise AssertionError("reporting() does not swallow")

    async def CountTokens(
        self, request: inference_pb2.CountTokensRequest, context: convert.Context
    ) -> inference_pb2.CountTokensResponse:
        async with convert.reporting(context):
            limits = self._config.limits
            parameters.check_sizes(request, context.invocation_metadata() or (), limits)
            loaded = self._engines.resolve(request.model, ("generate",))
            ids = await parameters.prompt_ids_of(request, loaded, limits, self._threads)
            return inference_pb2.CountTokensResponse(
                tokens=len(ids),
                context=loaded.manifest.content.engine.limits.context,
                token_ids=ids if request.return_token_ids else (),
            )
        raise AssertionError("reporting() does not swallow")

    async def Embed(self, request: inference_pb2.EmbedRequest, context: convert.Context) -> inference_pb2.EmbedResponse:
        async with convert.reporting(context):
            return await self._calls.embed(request, context)
        raise AssertionError("reporting() does not swallow")

    async def Classify(
        self, request: inference_pb2.ClassifyRequest, context: convert.Context
    ) -> inference_pb2.ClassifyResponse:
        async with convert.reporting(context):
            return await self._calls.classify(request, context)
        raise AssertionError("reporting() does not swallow")

    async def Rerank(
        self, request: inference_pb2.RerankRequest, context: convert.Context
    ) -> inference_pb2.RerankResponse:
        async with convert.reporting(context):
            return await self._calls.rerank(request, context)
        raise AssertionError("reporting() does not swallow")

    async def Infer(self, request: inference_pb2.InferRequest, context: convert.Context) -> inference_pb2.InferResponse:
        async with convert.reporting(context):
            return await self._calls.infer(request, context)
        raise AssertionError("reporting() does not swallow")

    async def ListModels(
        self, _request: inference_pb2.ListModelsRequest, context: convert.Context
    ) -> inference_pb2.ListModelsResponse:
        async with convert.reporting(context):
            return inference_pb2.ListModelsResponse(models=[_model_message(loaded) for loaded in self._engines.loaded])
        raise AssertionError("reporting() does not swallow")

    @contextlib.contextmanager
    def _place(self) -> Iterator[None]:
        """A place among `limits.requests_max` while a prompt is tokenized; the generation takes it over."""
        requests_max = self._config.limits.requests_max
        if self._engines.live_count + self._preparing >= requests_max:
            raise OverloadedError(
                f"{requests_max:,} generations are in progress, the most this server takes (limits.requests_max). "
                "Retry later"
            )
        self._preparing += 1
        try:
            yield
        finally:
            self._preparing -= 1

    async def _admit(self, message: inference_pb2.GenerateRequest, context: convert.Context) -> Admitted:
        """Validate the whole request, then hand it to its engine. Raises ResidentError; then nothing has happened."""
        arrived_ns = time.monotonic_ns()
        limits = self._config.limits
        parameters.check_sizes(message, context.invocation_metadata() or (), limits)
        loaded = self._engines.resolve(message.model, ("generate",))
        with self._place():
            ids = await parameters.prompt_ids_of(message, loaded, limits, self._threads)
        params = parameters.sampling_params(message.sampling, loaded, prompt_tokens=len(ids), limits=limits)
        if len(message.stop) > limits.stop_strings_max:
            raise CallerError(
                f"{len(message.stop)} stop strings; at most {limits.stop_strings_max} are accepted "
                "(limits.stop_strings_max)",
                field="stop",
            )
        text = loaded.text.stream(message.stop)
        request = Request(
            id=RequestId(next(self._ids)),
            prompt=ids,
            params=params,
            deadline_ms=_deadline_ms(context.time_remaining()),
        )
        generation = Generation(request, now_ns=arrived_ns, unread_max=limits.stream_tokens_max)
        started = inference_pb2.Started(
            request_id=str(request.id),
            model_version=loaded.version.reference,
            model_digest=loaded.version.digest,
            sampling=convert.sampling_message(params, ignore_eos=message.sampling.ignore_eos),
            prompt_tokens=len(ids),
        )
        loaded.host.submit(generation)
        return Admitted(loaded, generation, text, started, message.return_token_ids)


async def _responses(admitted: Admitted) -> AsyncIterator[inference_pb2.GenerateResponse]:
    """One message for each batch of waiting tokens, then the finish. Raises ResidentError when it ended badly."""
    generation, text = admitted.generation, admitted.text
    emitted = 0
    async for batch in generation.batches():
        delta = text.push([sampled.token for sampled in batch])
        used = batch[: delta.tokens_used]
        emitted += len(used)
        if delta.text or admitted.return_token_ids or used[0].logprobs is not None or delta.stopped is not None:
            yield _tokens_message(admitted, used, delta.text)
        if delta.stopped is not None:
            admitted.loaded.host.cancel(generation, Finish.STOP)
            yield _finish_message(admitted, Finish.STOP, emitted, text="", stop=delta.stopped)
            return
    finished = generation.finished
    assert finished is not None, "batches() ends with the end of the generation"
    if finished.reason not in FINISH_REASONS:
        raise _error_of(finished, admitted.loaded)
    delta = text.finish()
    reason = finished.reason if delta.stopped is None else Finish.STOP
    yield _finish_message(admitted, reason, emitted, text=delta.text, stop=delta.stopped or "")


def _tokens_message(admitted: Admitted, used: Sequence[Sampled], text: str) -> inference_pb2.GenerateResponse:
    message = inference_pb2.GenerateResponse(text=text)
    if admitted.return_token_ids:
        message.token_ids.extend(sampled.token for sampled in used)
    for sampled in used:
        if sampled.logprobs is not None:
            message.logprobs.append(convert.logprobs_message(sampled.token, sampled.logprobs))
    return message


def _finish_message(
    admitted: Admitted, reason: Finish, completion_tokens: int, *, text: str, stop: str
) -> inference_pb2.GenerateResponse:
    usage = inference_pb2.Usage(
        prompt_tokens=len(admitted.generation.request.prompt), completion_tokens=completion_tokens
    )
    finish = inference_pb2.Finish(
        reason=FINISH_REASONS[reason], stop=stop, usage=usage, timing=_timing(admitted.generation, completion_tokens)
    )
    return inference_pb2.GenerateResponse(text=text, finish=finish)


def _timing(generation: Generation, completion_tokens: int) -> inference_pb2.Timing:
    times = generation.times
    decode_s = (times.last_token_ns - times.first_token_ns) / 1e9
    return inference_pb2.Timing(
        queue_ms=max(0, times.scheduled_ns - times.arrived_ns) / 1e6 if times.scheduled_ns else 0.0,
        ttft_ms=(times.first_token_ns - times.arrived_ns) / 1e6 if times.first_token_ns else 0.0,
        decode_tokens_per_s=(completion_tokens - 1) / decode_s if decode_s > 0 and completion_tokens > 1 else 0.0,
        total_ms=(time.monotonic_ns() - times.arrived_ns) / 1e6,
        resumed_count=generation.resumed_count,
    )


def _error_of(finished: Finished, loaded: Loaded) -> ResidentError:
    """The error that a bad end is to its caller."""
    match finished.reason:
        case Finish.REJECTED if finished.refusal is Refusal.INVALID:
            return CallerError(finished.detail, field="input")
        case Finish.REJECTED:
            return OverloadedError(f"{finished.detail} (limits.waiting_max, limits.waiting_tokens_max)")
        case Finish.SLOW_CONSUMER:
            return OverloadedError(
                "the stream was read too slowly and its waiting tokens reached the limit (limits.stream_tokens_max). "
                "Read faster, or ask for fewer tokens"
            )
        case Finish.DEADLINE:
            return DeadlineError("the deadline passed before the generation ended. Allow more time, or fewer tokens")
        case Finish.CANCELLED:
            return UnavailableError(f"model {loaded.version.reference} is being unloaded. Retry: its successor answers")
        case _:
            return EngineFailedError(finished.detail or "the engine failed under this request. Retry")


def _deadline_ms(remaining_s: float | None) -> int | None:
    """The call's deadline on the monotonic clock, which the worker shares; grpc gives a huge number for none."""
    if remaining_s is None or remaining_s > 86_400 * 365:
        return None
    return time.monotonic_ns() // 1_000_000 + int(remaining_s * 1000)


def _model_message(loaded: Loaded) -> inference_pb2.Model:
    content = loaded.manifest.content
    encoder, tensors = content.encoder, content.tensors
    return inference_pb2.Model(
        name=loaded.version.name,
        version=loaded.version.reference,
        digest=loaded.version.digest,
        architecture=content.architecture,
        precision=content.engine.precision,
        context=content.engine.limits.context,
        slots=content.engine.limits.slots,
        vocabulary=content.engine.limits.vocab,
        ready=loaded.host.state is State.READY,
        chat=content.text is not None and content.text.chat_template is not None,
        kind=content.kind,
        dimensions=encoder.width if encoder is not None and content.kind == "embed" else 0,
        labels=encoder.labels if encoder is not None else (),
        prompts=sorted(encoder.prompts) if encoder is not None else (),
        inputs=map(spec_message, tensors.inputs) if tensors is not None else (),
        outputs=map(spec_message, tensors.outputs) if tensors is not None else (),
    )
