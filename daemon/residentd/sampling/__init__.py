"""Logits in, tokens out: what one request's parameters do to its row, and to no other row.

For each row, in this order (that of transformers' logits processors, which vLLM shares up to top-p):

1. `logit_bias` is added.
2. `repetition_penalty` on every id of prompt and output: logit / penalty if positive, else logit * penalty.
3. `frequency_penalty` * (times in the output) + `presence_penalty` (if in the output) is subtracted.
4. `stop_ids` are masked while fewer than `tokens_min` tokens are made.
5. Greedy: the largest logit, the smallest id among equals. Otherwise:
6. `temperature` divides.
7. `top_k` keeps every logit at least as large as the k-th largest: equals of the k-th stay, so more than k may.
8. `top_p` keeps the shortest run of the likeliest tokens that holds top_p of what top_k left; the token that crosses
   the line stays. Among equals the smaller id goes first.
9. `min_p` drops what is less likely than min_p times the likeliest. (vLLM does this before top_k; here, as in
   transformers, the nucleus of top_p does not depend on it.)
10. One uniform number, a function of (seed, output position) alone, picks from what is left by inverse CDF, likeliest
    first, smaller id first among equals.

Every filter keeps a prefix of one order (logit descending, id ascending), so each is a length, and the shortest wins.

Logprobs describe the row before step 1. A row is computed in a buffer of its own, by operations that see nothing but
that row, so a token and its logprobs are the same bits alone and in any batch.

If steps 1 to 4 leave no token possible, that token is chosen as if they were off: an answer goes on rather than ends in
an error that the caller could not have foreseen. Logits that no token can be chosen from (NaN, +inf, all -inf) are
never sampled: BackendLostError.
"""

from residentd.sampling.limits import validate
from residentd.sampling.sampler import Sampler

__all__ = ["Sampler", "validate"]
