"""GenerateRequest -> Request: defaults resolved, limits checked, every effective value known before admission."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from typing import Final, TypeAlias

from google.protobuf.message import Message

from resident.v1 import inference_pb2
from residentd.config import Limits
from residentd.errors import CallerError
from residentd.rpc.text_threads import TextThreads
from residentd.sampling import validate
from residentd.supervisor.engines import Loaded
from residentd.types import ChatMessage, SamplingParams

Prompting: TypeAlias = inference_pb2.GenerateRequest | inference_pb2.CountTokensRequest
"""The messages that carry a prompt or a conversation, in fields of the same names."""

SEED_BITS_DRAWN: Final = 63
INLINE_BYTES_MAX: Final = 16_384
"""A prompt up to this size is tokenized on the event loop, in a few milliseconds; a hop to a thread costs 0.1."""


def check_sizes(
    message: Message,
    metadata: Iterable[tuple[str, str | bytes]],
    limits: Limits,
) -> None:
    """Raises CallerError naming the limit that the call itself, message or headers, is over."""
    if message.ByteSize() > limits.message_bytes_max:
        raise CallerError(
            f"the request has {message.ByteSize():,} bytes; at most {limits.message_bytes_max:,} are accepted "
            "(limits.message_bytes_max). Shorten it",
            field="input",
        )
    size = sum(len(key) + len(value) for key, value in metadata)
    if size > limits.metadata_bytes_max:
        raise CallerError(
            f"the call's metadata has {size:,} bytes; at most {limits.metadata_bytes_max:,} are accepted "
            "(limits.metadata_bytes_max). Send less",
            field="metadata",
        )


async def prompt_ids_of(message: Prompting, loaded: Loaded, limits: Limits, threads: TextThreads) -> tuple[int, ...]:
    """`prompt_ids`, off the event loop where the prompt is long."""
    if message.ByteSize() > INLINE_BYTES_MAX:
        return await threads.run(lambda: prompt_ids(message, loaded, limits))
    return prompt_ids(message, loaded, limits)


def prompt_ids(message: Prompting, loaded: Loaded, limits: Limits) -> tuple[int, ...]:
    """The prompt of a request in token ids. Raises CallerError."""
    match message.WhichOneof("input"):
        case "prompt":
            _check_text_size(len(message.prompt.encode()), limits)
            context = loaded.manifest.content.engine.limits.context
            return loaded.text.from_completion(message.prompt, tokens_max=context)
        case "chat":
            return chat_ids(message.chat, loaded, limits)
        case "token_ids" if isinstance(message, inference_pb2.GenerateRequest):
            return _checked_ids(message.token_ids.ids, loaded)
        case _:
            raise CallerError("the request has no input. Set prompt, chat or token_ids", field="input")


def chat_ids(chat: inference_pb2.Chat, loaded: Loaded, limits: Limits) -> tuple[int, ...]:
    if not 1 <= len(chat.messages) <= limits.messages_max:
        raise CallerError(
            f"the conversation has {len(chat.messages):,} messages; 1 to {limits.messages_max:,} are accepted "
            "(limits.messages_max)",
            field="chat.messages",
        )
    _check_text_size(sum(len(entry.content.encode()) for entry in chat.messages), limits)
    messages = [ChatMessage(entry.role, entry.content) for entry in chat.messages]
    return loaded.text.from_chat(messages, tokens_max=loaded.manifest.content.engine.limits.context)


def sampling_params(
    message: inference_pb2.Sampling, loaded: Loaded, *, prompt_tokens: int, limits: Limits
) -> SamplingParams:
    """The effective parameters: what the caller said, else the model's defaults. Raises CallerError."""
    defaults = loaded.manifest.content.sampling
    vocab = loaded.manifest.content.engine.limits.vocab

    def given(name: str, default: float) -> float:
        return float(getattr(message, name)) if message.HasField(name) else default  # type: ignore[arg-type]

    text = loaded.manifest.content.text
    eos_ids = () if message.ignore_eos or text is None else text.eos_ids
    params = SamplingParams(
        tokens_max=_tokens_max(message, loaded, prompt_tokens, limits),
        tokens_min=message.min_tokens,
        temperature=given("temperature", defaults.temperature),
        top_k=int(given("top_k", defaults.top_k)),
        top_p=given("top_p", defaults.top_p),
        min_p=given("min_p", defaults.min_p),
        repetition_penalty=given("repetition_penalty", defaults.repetition_penalty),
        frequency_penalty=message.frequency_penalty,
        presence_penalty=message.presence_penalty,
        logit_bias=tuple(sorted(message.logit_bias.items())),
        seed=message.seed if message.HasField("seed") else secrets.randbits(SEED_BITS_DRAWN),
        stop_ids=frozenset(eos_ids) | frozenset(message.stop_token_ids),
        logprobs=message.logprobs if message.HasField("logprobs") else None,
    )
    validate(params, vocab)
    return params


def _tokens_max(message: inference_pb2.Sampling, loaded: Loaded, prompt_tokens: int, limits: Limits) -> int:
    """What the caller said, else the default cut to what the context leaves. Refuses a prompt that leaves nothing."""
    context = loaded.manifest.content.engine.limits.context
    if message.HasField("max_tokens"):
        asked = message.max_tokens
    else:
        asked = max(1, min(limits.output_tokens_default, context - prompt_tokens))
    if prompt_tokens + asked > context:
        raise CallerError(
            f"the prompt has {prompt_tokens:,} tokens and max_tokens is {asked:,}: {prompt_tokens + asked:,} together; "
            f"model {loaded.version.reference} accepts {context:,}. Shorten the prompt, lower max_tokens, or install a "
            "version built with a larger --context",
            field="sampling.max_tokens" if message.HasField("max_tokens") else "input",
        )
    return asked


def _checked_ids(ids: Sequence[int], loaded: Loaded) -> tuple[int, ...]:
    vocab = loaded.manifest.content.engine.limits.vocab
    context = loaded.manifest.content.engine.limits.context
    if len(ids) > context:
        raise CallerError(
            f"the prompt has {len(ids):,} tokens; model {loaded.version.reference} accepts {context:,} "
            "with its output. Shorten the prompt, or install a version built with a larger --context",
            field="token_ids.ids",
        )
    if not ids:
        raise CallerError("the prompt has no token. Give at least one id", field="token_ids.ids")
    if max(ids) >= vocab:
        raise CallerError(
            f"token id {max(ids):,} is outside the vocabulary of {vocab:,}. Use ids 0 to {vocab - 1:,}",
            field="token_ids.ids",
        )
    return tuple(ids)


def _check_text_size(size: int, limits: Limits) -> None:
    if size > limits.prompt_bytes_max:
        raise CallerError(
            f"the prompt has {size:,} bytes of text; at most {limits.prompt_bytes_max:,} are accepted "
            "(limits.prompt_bytes_max). Shorten it",
            field="input",
        )
