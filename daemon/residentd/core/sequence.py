"""One request while it lives in the scheduler."""

from __future__ import annotations

from dataclasses import dataclass

from residentd.types import Finish, Request, Row, Sampled, SamplingParams


@dataclass(slots=True)
class Sequence:
    """Tokens, and how many of them have their K/V committed. Mutable, owned by the scheduler only.

    There are no phases: a step lets `computed` catch up with `len(tokens)`, and the step that reaches the last token
    samples the next. Prefill, chunked prefill, decode and resumption differ only in how many tokens are pending.
    """

    request: Request
    tokens: list[int]  # prompt, then output; output starts with what was delivered before a worker was lost
    computed: int = 0  # tokens[:computed] have their K/V committed in `slot`
    slot: int | None = None  # None while it waits
    retries: int = 0  # failed steps in a row

    @property
    def pending(self) -> int:
        """Tokens still to compute; at least 1 as long as the sequence lives."""
        return len(self.tokens) - self.computed

    @property
    def output_count(self) -> int:
        return len(self.tokens) - len(self.request.prompt)

    def row(self, tokens_max: int) -> Row:
        """The next step's part: the pending tokens, at most `tokens_max` of them."""
        assert self.slot is not None, "a row needs a slot"
        end = min(self.computed + tokens_max, len(self.tokens))
        tokens = tuple(self.tokens[self.computed : end])
        return Row(self.request.id, self.slot, self.computed, tokens, end == len(self.tokens))

    def accept(self, sampled: Sampled) -> Finish | None:
        """Append a sampled token; why the request ends with it, or None when it goes on."""
        index = self.output_count
        self.tokens.append(sampled.token)
        return _ending(self.request.params, index, sampled.token)


def sequence_from(request: Request) -> Sequence:
    return Sequence(request, [*request.prompt, *request.generated])


def ending_of(request: Request) -> Finish | None:
    """Why a resumed request is already complete: its worker was lost between the last token and the end."""
    if not request.generated:
        return None
    return _ending(request.params, len(request.generated) - 1, request.generated[-1])


def _ending(params: SamplingParams, index: int, token: int) -> Finish | None:
    """`index` counts output tokens from 0. A stop id ends nothing below tokens_min (the sampler masks it there)."""
    if token in params.stop_ids and index >= params.tokens_min:
        return Finish.STOP
    if index + 1 >= params.tokens_max:
        return Finish.LENGTH
    return None
