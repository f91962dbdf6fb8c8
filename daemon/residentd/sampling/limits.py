"""What sampling parameters a caller may ask for: checked at the edge, and again before the engine keeps any state.

Messages and `CallerError.field` name the fields as the caller knows them, those of resident.v1.Sampling.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from residentd.errors import CallerError
from residentd.types import SamplingParams

LOGIT_BIAS_ENTRIES_MAX = 300
LOGIT_BIAS_MAX = 100.0
STOP_IDS_MAX = 64
LOGPROBS_MAX = 20
SEED_MAX = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class _Range:
    """The values one field may have, and what to tell a caller who left them."""

    attribute: str
    least: float
    most: float
    remedy: str
    least_excluded: bool = False
    most_excluded: bool = False
    name: str = ""  # the caller's, where it is another

    def holds(self, value: float) -> bool:
        """False for NaN, whatever the ends."""
        above = self.least < value if self.least_excluded else self.least <= value
        return above and (value < self.most if self.most_excluded else value <= self.most)

    def __str__(self) -> str:
        least = f"{'more than' if self.least_excluded else 'at least'} {self.least:,}"
        return f"{least} and {'less than' if self.most_excluded else 'at most'} {self.most:,}"


_RANGES = (
    _Range("temperature", 0.0, 100.0, "0 is greedy; most models are tuned for 0.6 to 1"),
    _Range("top_p", 0.0, 1.0, "1 turns it off", least_excluded=True),
    _Range("min_p", 0.0, 1.0, "0 turns it off", most_excluded=True),
    _Range("repetition_penalty", 0.1, 10.0, "1 turns it off"),
    _Range("frequency_penalty", -2.0, 2.0, "0 turns it off"),
    _Range("presence_penalty", -2.0, 2.0, "0 turns it off"),
    _Range("top_k", 0, (1 << 31) - 1, "0 turns it off"),
    _Range("seed", 0, SEED_MAX, "Leave it out for a seed of the server's choosing"),
    _Range("tokens_max", 1, (1 << 31) - 1, "Ask for at least one token", name="max_tokens"),
)


def validate(params: SamplingParams, vocab: int) -> None:
    """Pass if every value is one the sampler is right for, else raise CallerError with `field` and the way out."""
    for limits in _RANGES:
        value = getattr(params, limits.attribute)
        if not limits.holds(value):
            name = limits.name or limits.attribute
            raise _refusal(name, f"is {value}; it must be {limits}. {limits.remedy}.")
    _validate_tokens_min(params)
    _validate_logprobs(params.logprobs)
    _validate_stop_ids(params.stop_ids, vocab)
    _validate_logit_bias(params.logit_bias, vocab)


def _refusal(name: str, complaint: str) -> CallerError:
    return CallerError(f"{name} {complaint}", field=f"sampling.{name}")


def _validate_tokens_min(params: SamplingParams) -> None:
    if not 0 <= params.tokens_min <= params.tokens_max:
        limits = f"at least 0 and at most max_tokens, {params.tokens_max:,}"
        raise _refusal("min_tokens", f"is {params.tokens_min:,}; it must be {limits}. Lower it, or raise max_tokens.")


def _validate_logprobs(logprobs: int | None) -> None:
    if logprobs is not None and not 0 <= logprobs <= LOGPROBS_MAX:
        remedy = "0 gives the chosen token's alone; leave it out for none."
        raise _refusal("logprobs", f"is {logprobs:,}; it must be at least 0 and at most {LOGPROBS_MAX}. {remedy}")


def _validate_stop_ids(stop_ids: frozenset[int], vocab: int) -> None:
    if len(stop_ids) > STOP_IDS_MAX:
        found = f"has {len(stop_ids):,} entries, the model's own included"
        raise _refusal("stop_token_ids", f"{found}; at most {STOP_IDS_MAX} are accepted. Use fewer, or stop strings.")
    _validate_ids(sorted(stop_ids), vocab, "stop_token_ids")


def _validate_logit_bias(logit_bias: tuple[tuple[int, float], ...], vocab: int) -> None:
    if len(logit_bias) > LOGIT_BIAS_ENTRIES_MAX:
        limits = f"at most {LOGIT_BIAS_ENTRIES_MAX} are accepted"
        raise _refusal("logit_bias", f"has {len(logit_bias):,} entries; {limits}. Keep the ones that matter most.")
    _validate_ids((token for token, _ in logit_bias), vocab, "logit_bias")
    if len({token for token, _ in logit_bias}) < len(logit_bias):
        raise _refusal("logit_bias", "names a token more than once. Give each token one bias.")
    for token, bias in logit_bias:
        if not math.isfinite(bias) or abs(bias) > LOGIT_BIAS_MAX:
            limits = f"at least -{LOGIT_BIAS_MAX:g} and at most {LOGIT_BIAS_MAX:g}"
            remedy = "The first all but forbids a token, the last all but forces it."
            raise _refusal("logit_bias", f"for token {token} is {bias}; it must be {limits}. {remedy}")


def _validate_ids(ids: Iterable[int], vocab: int, name: str) -> None:
    for token in ids:
        if not 0 <= token < vocab:
            limits = f"this model's ids are 0 to {vocab - 1:,}"
            raise _refusal(name, f"names token {token}; {limits}. Take the ids from this model's tokenizer.")
