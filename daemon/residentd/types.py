"""Values that travel between the packages. Frozen, plain, no behaviour beyond derived quantities."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import NewType

RequestId = NewType("RequestId", int)
"""Unique within one daemon process; never reused."""


class Refusal(enum.StrEnum):
    """Why admission refused a request: whether asking again later can help."""

    INVALID = "invalid"  # it can never fit: INVALID_ARGUMENT
    FULL = "full"  # the queue has no room now: RESOURCE_EXHAUSTED with a retry hint


class Finish(enum.StrEnum):
    """Why a request ended. Exactly one per request, and nothing after it."""

    STOP = "stop"  # an end-of-sequence id, a stop id or a stop string
    LENGTH = "length"  # tokens_max reached
    CANCELLED = "cancelled"  # by the client: cancel or disconnect
    DEADLINE = "deadline"  # the caller's deadline passed
    REJECTED = "rejected"  # refused at admission
    SLOW_CONSUMER = "slow_consumer"  # the client did not read its stream
    ENGINE_FAILED = "engine_failed"  # retries and restarts are used up


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request's next token is chosen. Already resolved: no defaults are applied downstream.

    temperature 0 means greedy (top_k, top_p, min_p and seed are then without effect).
    top_k 0, top_p 1 and min_p 0 each mean off. Penalties: repetition 1, frequency 0 and presence 0 mean off;
    repetition looks at prompt and output, frequency and presence at the output only (vLLM, OpenAI).
    """

    tokens_max: int
    tokens_min: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int = 0
    stop_ids: frozenset[int] = frozenset()  # the model's end-of-sequence ids are in here unless ignore_eos was asked
    logprobs: int | None = None  # None: none; N: the chosen token's logprob and the N likeliest alternatives


@dataclass(frozen=True, slots=True)
class Request:
    """One generation, as the engine sees it.

    `generated` holds tokens already delivered before a worker was lost: they count towards tokens_max, penalties
    and sampling positions exactly as if this engine had produced them, and are never emitted again.
    `deadline_ms` is on the clock that is passed to `Scheduler.expire`.
    """

    id: RequestId
    prompt: tuple[int, ...]
    params: SamplingParams
    generated: tuple[int, ...] = ()
    deadline_ms: int | None = None
    resumed: int = 0  # times a worker was lost under it; admitted once, so from then on never refused for a full queue


@dataclass(frozen=True, slots=True)
class Limits:
    """What one engine was built for: `capacity` is the context in tokens of each of `slots` slots."""

    slots: int
    capacity: int
    step_tokens_max: int
    vocab: int


@dataclass(frozen=True, slots=True)
class Row:
    """One sequence's part of a step: `tokens` go to positions start, start+1, … of `slot`."""

    id: RequestId
    slot: int
    start: int
    tokens: tuple[int, ...]
    samples: bool  # the last position's logits yield a token


@dataclass(frozen=True, slots=True)
class StepPlan:
    step: int
    rows: tuple[Row, ...]

    @property
    def tokens_count(self) -> int:
        return sum(len(row.tokens) for row in self.rows)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural-log probabilities of the distribution before temperature, bias and penalties (OpenAI's convention)."""

    chosen: float
    top: tuple[tuple[int, float], ...]  # the likeliest ids, best first


@dataclass(frozen=True, slots=True)
class Sampled:
    token: int
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True)
class Token:
    """Event: `id` produced a token; `index` counts its output tokens from 0, resumed ones included."""

    id: RequestId
    index: int
    sampled: Sampled


@dataclass(frozen=True, slots=True)
class Finished:
    """Event: `id` has ended. The last event of that id."""

    id: RequestId
    reason: Finish
    detail: str = ""  # for REJECTED and ENGINE_FAILED: what, the value, the limit and what to do next
    refusal: Refusal | None = None  # for REJECTED only


Event = Token | Finished


@dataclass(frozen=True, slots=True)
class ChatMessage:
    role: str
    content: str


@dataclass(frozen=True, slots=True)
class StepRecord:
    """What one step did, for pacing, metrics and tests: proof by counts, not by wall time."""

    step: int
    decode_rows: int
    prefill_rows: int
    prefill_tokens: int
    elapsed_us: int
    waiting: int
    running: int
    ids: tuple[RequestId, ...] = field(default=())
