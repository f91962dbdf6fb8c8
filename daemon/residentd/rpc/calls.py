"""Embed, Classify, Rerank and Infer: from a request message to a call of an engine and back."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import numpy as np

from resident.v1 import inference_pb2
from residentd.calls import Call, TextRow, Value
from residentd.config import Config, Limits
from residentd.engine.link import FRAME_BYTES_MAX
from residentd.errors import (
    CallerError,
    DeadlineError,
    EngineFailedError,
    OverloadedError,
    ResidentError,
    UnavailableError,
)
from residentd.models.encoder import Activation, Kind
from residentd.rpc import convert, parameters, tensors
from residentd.rpc.text_threads import TextThreads
from residentd.supervisor.asked import Asked
from residentd.supervisor.engines import Engines, Loaded, wrong_kind
from residentd.text.encoder_text import Encoded
from residentd.types import Finish, Finished, Refusal, RequestId

T = TypeVar("T")

FAR_S: Final = 86_400 * 365  # grpc gives a huge number of seconds for a call without a deadline
INLINE_BYTES_MAX: Final = 8192
"""Texts up to this size together are tokenized on the event loop, in a few milliseconds; a hop costs 0.1."""
CALL_TOKENS_MAX: Final = FRAME_BYTES_MAX // 8
"""Of one request, which travels to the worker in one frame: at most five bytes an id and one a type."""
CALL_BYTES_MAX: Final = FRAME_BYTES_MAX * 3 // 4
"""Of the tensors of one request, likewise."""


@dataclass(frozen=True, slots=True)
class Texts:
    """What a text call asks for. `field` is the request's, a plural, for what is wrong with it."""

    texts: Sequence[str]
    pairs: Sequence[str] | None
    prompt_name: str
    truncate: bool
    field: str


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back: a row of numbers for each text, or nothing for tensors, whose outputs are `values`."""

    loaded: Loaded
    asked: Asked
    encoded: Sequence[Encoded]
    values: Sequence[Value]

    @property
    def rows(self) -> np.ndarray[Any, np.dtype[np.float32]]:
        """float32 [texts, width]."""
        return np.stack([np.frombuffer(value, "<f4") for value in self.values if isinstance(value, bytes)])

    def message(self) -> inference_pb2.Answered:
        times = self.asked.times
        return inference_pb2.Answered(
            model_version=self.loaded.version.reference,
            model_digest=self.loaded.version.digest,
            tokens=sum(len(entry.row.ids) for entry in self.encoded),
            queue_ms=max(0, times.scheduled_ns - times.arrived_ns) / 1e6 if times.scheduled_ns else 0.0,
            total_ms=(time.monotonic_ns() - times.arrived_ns) / 1e6,
            resumed_count=self.asked.resumed_count,
        )


class Calls:
    """The calls of models that answer in one run: a part of the Inference servicer, which owns the ids."""

    def __init__(
        self,
        engines: Engines,
        config: Config,
        ids: Iterator[int],
        place: Callable[[], AbstractContextManager[None]],
        threads: TextThreads,
    ) -> None:
        self._threads = threads
        self._engines = engines
        self._config = config
        self._ids = ids
        self._place = place  # among limits.requests_max, while a request is prepared

    async def embed(self, request: inference_pb2.EmbedRequest, context: convert.Context) -> inference_pb2.EmbedResponse:
        loaded = self._resolve(request.model, ("embed",), "embeds text")
        _check_dimensions(request.dimensions, loaded.encoder.encoder.width)
        texts = Texts(request.texts, None, request.prompt_name, request.truncate, "texts")
        answer = await self._texts(loaded, request, texts, context)
        rows = _shortened(answer, request.dimensions)
        return inference_pb2.EmbedResponse(
            answered=answer.message(),
            embeddings=[
                inference_pb2.Embedding(values=row, tokens=len(entry.row.ids), truncated=entry.truncated)
                for row, entry in zip(rows.tolist(), answer.encoded, strict=True)
            ],
        )

    async def classify(
        self, request: inference_pb2.ClassifyRequest, context: convert.Context
    ) -> inference_pb2.ClassifyResponse:
        loaded = self._resolve(request.model, ("classify", "rerank"), "classifies or ranks text")
        answer = await self._texts(loaded, request, _items(request), context)
        encoder = loaded.encoder.encoder
        scores = activated(answer.rows, encoder.activation)
        return inference_pb2.ClassifyResponse(
            answered=answer.message(),
            labels=encoder.labels,
            classifications=[
                inference_pb2.Classification(
                    scores=score, logits=logit, tokens=len(entry.row.ids), truncated=entry.truncated
                )
                for score, logit, entry in zip(scores.tolist(), answer.rows.tolist(), answer.encoded, strict=True)
            ],
        )

    async def rerank(
        self, request: inference_pb2.RerankRequest, context: convert.Context
    ) -> inference_pb2.RerankResponse:
        loaded = self._resolve(request.model, ("rerank",), "ranks documents")
        documents = request.documents
        texts = Texts([request.query] * len(documents), documents, "", request.truncate, "documents")
        answer = await self._texts(loaded, request, texts, context)
        logits = answer.rows[:, 0]
        scores = activated(answer.rows, loaded.encoder.encoder.activation)[:, 0]
        order = np.argsort(-logits, kind="stable")[: request.top_n or None]
        return inference_pb2.RerankResponse(
            answered=answer.message(),
            ranked=[
                inference_pb2.Ranked(
                    index=index,
                    score=float(scores[index]),
                    logit=float(logits[index]),
                    tokens=len(answer.encoded[index].row.ids),
                    truncated=answer.encoded[index].truncated,
                )
                for index in order.tolist()
            ],
        )

    async def infer(self, request: inference_pb2.InferRequest, context: convert.Context) -> inference_pb2.InferResponse:
        loaded = self._resolve(request.model, ("tensor",), "takes tensors")
        parameters.check_sizes(request, context.invocation_metadata() or (), self._config.limits)
        arrived_ns = time.monotonic_ns()
        with self._place():
            given, wanted = tensors.checked(request, loaded)
            call = Call(
                id=RequestId(next(self._ids)),
                places=(0,),
                tensors=given,
                outputs=wanted,
                deadline_ms=_deadline_ms(context.time_remaining()),
            )
        weight = sum(len(tensor.data) for tensor in given)
        check_travels(weight, CALL_BYTES_MAX, "bytes", "inputs")
        answer = await self._ask(loaded, Asked(call, weight=weight, now_ns=arrived_ns), (), "inputs")
        outputs = answer.values[0]
        assert isinstance(outputs, tuple)
        return inference_pb2.InferResponse(answered=answer.message(), outputs=map(tensors.message_of, outputs))

    # ---- inside ----------------------------------------------------------------------------------------------------

    def _resolve(self, model: str, kinds: Sequence[Kind], deed: str) -> Loaded:
        loaded = self._engines.resolve(model, kinds)
        if loaded.kind not in kinds:
            raise wrong_kind(loaded, deed)
        return loaded

    async def _texts(self, loaded: Loaded, message: Any, texts: Texts, context: convert.Context) -> Answer:
        """Tokenize, and ask the engine for all of them. Raises ResidentError."""
        arrived_ns = time.monotonic_ns()
        limits = self._config.limits
        parameters.check_sizes(message, context.invocation_metadata() or (), limits)
        size = _check_texts(texts, limits)
        with self._place():
            if size > INLINE_BYTES_MAX:
                encoded = await self._threads.run(lambda: _encoded(loaded, texts))
            else:
                encoded = _encoded(loaded, texts)
        rows: tuple[TextRow, ...] = tuple(entry.row for entry in encoded)
        weight = sum(len(row.ids) for row in rows)
        check_travels(weight, CALL_TOKENS_MAX, "tokens", texts.field)
        call = Call(
            id=RequestId(next(self._ids)),
            places=tuple(range(len(rows))),
            rows=rows,
            deadline_ms=_deadline_ms(context.time_remaining()),
        )
        return await self._ask(loaded, Asked(call, weight=weight, now_ns=arrived_ns), encoded, texts.field)

    async def _ask(self, loaded: Loaded, asked: Asked, encoded: Sequence[Encoded], field: str) -> Answer:
        loaded.host.submit(asked)
        try:
            values = await asked.whole()
        finally:
            # Reached on every way out: the end, the caller's cancel, deadline or disconnect.
            loaded.host.cancel(asked, Finish.CANCELLED)
        assert asked.finished is not None, "whole() waits for the end"
        if asked.finished.reason is not Finish.STOP:
            raise error_of(asked.finished, loaded, field)
        return Answer(loaded, asked, encoded, values)


def activated(logits: np.ndarray[Any, np.dtype[np.float32]], activation: Activation) -> np.ndarray[Any, Any]:
    """Scores of logits [texts, labels], as the model was trained."""
    if activation == "identity":
        return logits
    wide = logits.astype(np.float64)
    if activation == "sigmoid":
        # 1 / (1 + exp(-x)) on the side where exp does not overflow.
        small = np.exp(-np.abs(wide))
        halves: np.ndarray[Any, Any] = np.where(wide >= 0, 1 / (1 + small), small / (1 + small))
        return halves
    powers = np.exp(wide - wide.max(axis=1, keepdims=True))
    shares: np.ndarray[Any, Any] = powers / powers.sum(axis=1, keepdims=True)
    return shares


def error_of(finished: Finished, loaded: Loaded, field: str) -> ResidentError:
    """The error that a bad end is to its caller, who is at fault with `field` if at all."""
    match finished.reason:
        case Finish.REJECTED if finished.refusal is Refusal.INVALID:
            return CallerError(finished.detail, field=field)
        case Finish.REJECTED:
            return OverloadedError(f"{finished.detail} (limits.waiting_max, {loaded.host.queue_limit.key})")
        case Finish.DEADLINE:
            return DeadlineError("the deadline passed before the answer was there. Allow more time, or send less")
        case Finish.CANCELLED:
            return UnavailableError(f"model {loaded.version.reference} is being unloaded. Retry: its successor answers")
        case _:
            return EngineFailedError(finished.detail or "the engine failed under this request. Retry")


def _items(request: inference_pb2.ClassifyRequest) -> Texts:
    paired = [item.HasField("pair") for item in request.items]
    if any(paired) and not all(paired):
        raise CallerError("some items have a pair and some have none. Send them in two requests", field="items")
    pairs = [item.pair for item in request.items] if any(paired) else None
    return Texts([item.text for item in request.items], pairs, "", request.truncate, "items")


def _check_texts(texts: Texts, limits: Limits) -> int:
    """How many bytes there are. Raises CallerError naming the limit that the texts are over."""
    count = len(texts.texts)
    if not 1 <= count <= limits.texts_max:
        raise CallerError(
            f"the request has {count:,} {texts.field}; 1 to {limits.texts_max:,} are accepted (limits.texts_max)",
            field=texts.field,
        )
    # Each counts as often as the model reads it: a query that was sent once, with every document.
    written = (*texts.texts, *(texts.pairs or ()))
    sizes = {text: len(text.encode()) for text in set(written)}
    size = sum(sizes[text] for text in written)
    if size > limits.prompt_bytes_max:
        query = ", each with the query," if texts.field == "documents" else ""
        raise CallerError(
            f"the {texts.field}{query} have {size:,} bytes of text; at most {limits.prompt_bytes_max:,} are accepted "
            "(limits.prompt_bytes_max). Send fewer at once",
            field=texts.field,
        )
    return size


def check_travels(weight: int, most: int, unit: str, field: str) -> None:
    """Raises CallerError for a request that no frame to the worker could hold."""
    if weight > most:
        raise CallerError(
            f"the {field} have {weight:,} {unit}; at most {most:,} travel in one request. Send fewer at once",
            field=field,
        )


def _encoded(loaded: Loaded, texts: Texts) -> list[Encoded]:
    text = loaded.encoder
    prompt = text.prompt(texts.prompt_name) if loaded.kind == "embed" else ""
    return text.encode(texts.texts, texts.pairs, prompt=prompt, truncate=texts.truncate, field=texts.field)


def _check_dimensions(dimensions: int, width: int) -> None:
    if dimensions > width:
        raise CallerError(
            f"dimensions is {dimensions:,}; the model gives {width:,}. Ask for at most so many, or 0 for all",
            field="dimensions",
        )


def _shortened(answer: Answer, dimensions: int) -> np.ndarray[Any, Any]:
    encoder = answer.loaded.encoder.encoder
    if not dimensions or dimensions == encoder.width:
        return answer.rows
    rows: np.ndarray[Any, Any] = answer.rows[:, :dimensions].astype(np.float64)
    norms = np.sqrt(np.square(rows).sum(axis=1, keepdims=True))
    return rows / np.maximum(norms, 1e-12) if encoder.normalise else rows


def _deadline_ms(remaining_s: float | None) -> int | None:
    """The call's deadline on the monotonic clock, which the worker shares."""
    if remaining_s is None or remaining_s > FAR_S or math.isinf(remaining_s):
        return None
    return time.monotonic_ns() // 1_000_000 + int(remaining_s * 1000)
