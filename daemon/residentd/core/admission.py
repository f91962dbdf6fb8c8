"""What can never be served is refused at once, with the arithmetic."""

from __future__ import annotations

from residentd.types import Limits, Request


def misfit_of(request: Request, limits: Limits) -> str | None:
    """Why this engine can never serve `request`: what, the value, the limit and the way out. None when it can.

    A slot must hold prompt + tokens_max. The last token's K/V is never read, so one more would fit physically; the rule
    that callers can check in their heads is worth more than that token.
    """
    return _context_misfit(request, limits) or _vocabulary_misfit(request, limits)


def _context_misfit(request: Request, limits: Limits) -> str | None:
    prompt_count, tokens_max = len(request.prompt), request.params.tokens_max
    total = prompt_count + tokens_max
    if prompt_count < 1:
        return "prompt has 0 tokens; at least 1 is needed. Send a prompt, or the model's BOS token"
    if tokens_max < 1:
        return f"max_tokens is {tokens_max:,}; at least 1 is needed. Raise max_tokens, or leave it out"
    if total > limits.capacity:
        return (
            f"prompt has {prompt_count:,} tokens and max_tokens is {tokens_max:,}: {total:,} of at most "
            f"{limits.capacity:,}. Shorten the prompt, lower max_tokens, or install a version built with "
            f"--context {total}"
        )
    return None


def _vocabulary_misfit(request: Request, limits: Limits) -> str | None:
    """An id outside the vocabulary would read outside the embedding table, or end the sampler: it never gets there."""
    biased = [token for token, _ in request.params.logit_bias]
    for name, ids in (("prompt", request.prompt), ("generated", request.generated), ("logit_bias", biased)):
        if ids and not (min(ids) >= 0 and max(ids) < limits.vocab):
            index = next(index for index, token in enumerate(ids) if not 0 <= token < limits.vocab)
            return (
                f"{name} has token id {ids[index]:,} at index {index:,}; this model has ids 0 to {limits.vocab - 1:,}. "
                "Use this model's tokenizer"
            )
    return None
