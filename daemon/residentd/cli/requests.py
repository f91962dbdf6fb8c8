"""From options to request messages. Pure; raises Failure (usage) before anything is sent."""

from __future__ import annotations

import math

from resident.v1.inference_pb2 import Chat, CountTokensRequest, GenerateRequest, Message, Sampling
from residentd.cli.exits import usage
from residentd.cli.options import SamplingOptions

UINT32_MAX = 2**32 - 1
_SCALARS = (
    "max_tokens",
    "min_tokens",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
    "seed",
    "logprobs",
)


def sampling_message(options: SamplingOptions) -> Sampling:
    """What was given, and nothing else: the rest is the model's own default. Raises Failure (usage)."""
    given = {name: getattr(options, name) for name in _SCALARS if getattr(options, name) is not None}
    bias = dict(_bias(text) for text in options.logit_bias or ())
    try:
        return Sampling(
            **given, logit_bias=bias, stop_token_ids=options.stop_token_id or (), ignore_eos=options.ignore_eos
        )
    except ValueError as error:  # protobuf: a number too large for its field
        raise usage(f"a sampling option is out of range: {error}. Give a smaller one") from error


def prompt_request(model: str, prompt: str, options: SamplingOptions) -> GenerateRequest:
    """A generation that goes on from plain text."""
    return GenerateRequest(
        model=model, prompt=checked(prompt), sampling=sampling_message(options), stop=_stops(options),
        return_token_ids=True,
    )  # fmt: skip


def chat_request(model: str, messages: list[Message], options: SamplingOptions) -> GenerateRequest:
    """A generation that answers a conversation."""
    return GenerateRequest(
        model=model, chat=Chat(messages=messages), sampling=sampling_message(options), stop=_stops(options),
        return_token_ids=True,
    )  # fmt: skip


def count_request(model: str, prompt: str, *, chat: bool) -> CountTokensRequest:
    text = checked(prompt)
    if chat:
        return CountTokensRequest(model=model, chat=Chat(messages=[message("user", text)]), return_token_ids=True)
    return CountTokensRequest(model=model, prompt=text, return_token_ids=True)


def message(role: str, content: str) -> Message:
    return Message(role=role, content=checked(content))


def checked(text: str) -> str:
    """`text`, which must be Unicode text: an argument that is not UTF-8 arrives with lone surrogates in it."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise usage(f"the text is not valid UTF-8 near character {error.start + 1:,}. Convert it first") from error
    return text


def _stops(options: SamplingOptions) -> list[str]:
    return [checked(stop) for stop in options.stop or ()]


def _bias(text: str) -> tuple[int, float]:
    token, _, bias = text.partition("=")
    try:
        pair = int(token), float(bias)
    except ValueError:
        pair = -1, math.nan
    if not 0 <= pair[0] <= UINT32_MAX or not math.isfinite(pair[1]):
        raise usage(f"--logit-bias {text!r} is not ID=BIAS with a token id and a finite number, as in 42=-5.5")
    return pair
