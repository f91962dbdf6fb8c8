"""One layer's attention as a recogniser found it, and the proof that it computes what it is taken for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from residentd_build.draft import ancestors
from residentd_build.facts import of_array
from residentd_build.trace import trace

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import onnx_ir as ir

    from residentd_build.draft import Cache, Draft
    from residentd_build.facts import Array
    from residentd_build.trace import Trace

PROOF_TOKENS = 5
PROOF_PAST = 3
PROOF_TOLERANCE = 1e-4
"""On values of magnitude 1 in float32 over 8 keys: rounding is some 1e-6, any wrong factor or head is above 1e-2."""
MASKED_BELOW = -1e4
"""Exporters mask with -inf, the dtype's minimum or -1e4; a score bias is never that low."""


class UnrecognisedError(Exception):
    """The form is known and something in it is not. The text is a clause that names the node."""


@dataclass(frozen=True, slots=True)
class Rotary:
    """Tables float32 [positions, rotated / 2] of what the core does to queries and keys before anything else."""

    cos: Array
    sin: Array
    is_interleaved: bool


@dataclass(frozen=True, slots=True)
class AttentionCore:
    """softmax(softcap(scale · q kᵀ) + mask) v, with the keys of the cache before the new ones.

    `sinks`, float32 [heads], are scores that take their share of the softmax and give no value (gpt-oss).
    Query and output are [1, heads, tokens, dim] if `is_heads_first`, else [1, tokens, heads · dim]; the same for keys
    and values. `masks` are additive or boolean; `is_causal` masks besides.
    `is_stated`: one operator whose specification says all of this, `window` and `rotary` included, so that there is
    nothing to evaluate.
    """

    cache: Cache
    query: ir.Value
    key: ir.Value
    value: ir.Value
    output: ir.Value
    present_key: ir.Value
    present_value: ir.Value
    heads: int
    scale: float
    softcap: float
    masks: tuple[ir.Value, ...]
    is_causal: bool
    is_heads_first: bool
    sinks: Array | None = None
    is_stated: bool = False
    window: int | None = None
    rotary: Rotary | None = None


@dataclass(frozen=True, slots=True)
class Probe:
    """A trace of the export at numbers: `tokens` new tokens after `past` cached ones."""

    tokens: int
    past: int
    trace: Trace


def scalar(value: ir.Value | None, probes: Sequence[Probe]) -> float | None:
    """The one number that `value` is at every probe, or None."""
    found: set[float] = set()
    for probe in probes:
        content = probe.trace.content(value)
        if content is None or content.size != 1:
            return None
        found.add(float(content.reshape(-1)[0]))
    return found.pop() if len(found) == 1 else None


def window_of(core: AttentionCore, probes: Sequence[Probe], context: int) -> int | None:
    """How many last keys a query sees, itself included; None if all within `context`.

    Raises UnrecognisedError unless the mask is exactly causal, or causal with one window, at every probe.
    """
    if core.is_stated:
        return None if core.window is None or core.window >= context else core.window
    last = max(probes, key=lambda probe: probe.past + probe.tokens)
    seen = int(_visible(core, last)[-1].sum())
    window = None if seen >= last.past + last.tokens else seen
    for probe in probes:
        if not np.array_equal(_visible(core, probe), causal_mask(probe.tokens, probe.past, window)):
            named = " with ".join(str(mask.name) for mask in core.masks)
            raise UnrecognisedError(
                f"the mask {named} is neither causal nor a causal window at {probe.tokens} tokens after {probe.past}, "
                f"of {context:,}"
            )
    return window


def causal_mask(tokens: int, past: int, window: int | None) -> Array:
    """Bool [tokens, past + tokens]: the query at position p sees keys p - window + 1 … p."""
    query, key = np.arange(past, past + tokens)[:, None], np.arange(past + tokens)[None]
    visible: Array = (key <= query) & (key > query - (past + tokens if window is None else window))
    return visible


def _visible(core: AttentionCore, probe: Probe) -> Array:
    """Bool [tokens, past + tokens]: which keys each query sees by the export's own mask."""
    total = probe.past + probe.tokens
    visible = np.ones((probe.tokens, total), bool)
    if core.is_causal:
        visible = causal_mask(probe.tokens, probe.past, None)
    for mask in core.masks:
        visible = visible & _shown_by(mask, probe)
    return visible


def _shown_by(value: ir.Value, probe: Probe) -> Array:
    """Bool [tokens, past + tokens]: which keys the mask `value` lets each query see."""
    content = probe.trace.content(value)
    if content is None:
        raise UnrecognisedError(f"the mask {value.name} depends on more than lengths and positions")
    shape = (1, 1, probe.tokens, probe.past + probe.tokens)
    mask = np.broadcast_to(content, np.broadcast_shapes(content.shape, shape))
    if mask.dtype != bool:
        if not np.isin(mask[mask > MASKED_BELOW], (0,)).all():
            raise UnrecognisedError(f"the mask {value.name} adds a bias to the scores")
        mask = mask > MASKED_BELOW
    if not (mask == mask[:1, :1]).all():
        raise UnrecognisedError(f"the mask {value.name} differs between heads")
    shown: Array = mask[0, 0]
    return shown


def prove(core: AttentionCore, draft: Draft, window: int | None) -> None:
    """Evaluate the export's nodes of this core on random numbers and compare. Raises UnrecognisedError."""
    if core.is_stated:
        return
    inputs = _random_inputs(core)
    given = draft.step_facts(PROOF_TOKENS, PROOF_PAST) | {value: of_array(array) for value, array in inputs.items()}
    needed = ancestors([core.output], inputs.__contains__)
    facts = trace((node for node in draft.graph if node in needed), given, draft.opset)
    found = facts.content(core.output)
    if found is None:
        unknown = [str(node.name) for node in draft.graph if node in needed and facts.content(node.outputs[0]) is None]
        raise UnrecognisedError(f"it cannot be evaluated from node {unknown[0] if unknown else '?'} on")
    expected = _expected(core, inputs, window)
    difference = float(np.abs(found.reshape(expected.shape) - expected).max())
    if not difference <= PROOF_TOLERANCE:
        raise UnrecognisedError(
            f"it is not softmax(scale · q kᵀ) v: the result at {core.output.name} is off by {difference:.3g}"
        )


def _random_inputs(core: AttentionCore) -> Mapping[ir.Value, Array]:
    generator = np.random.default_rng(core.cache.layer)

    def draw(heads: int) -> Array:
        four = generator.standard_normal((1, heads, PROOF_TOKENS, core.cache.dim), np.float32)
        return four if core.is_heads_first else four.swapaxes(1, 2).reshape(1, PROOF_TOKENS, -1)

    past = (1, core.cache.heads, PROOF_PAST, core.cache.dim)
    return {
        core.query: draw(core.heads) / np.float32(core.scale * core.cache.dim**0.5),
        core.key: draw(core.cache.heads),
        core.value: draw(core.cache.heads),
        core.cache.past_key: generator.standard_normal(past, np.float32),
        core.cache.past_value: generator.standard_normal(past, np.float32),
    }


def _expected(core: AttentionCore, inputs: Mapping[ir.Value, Array], window: int | None) -> Array:
    def heads_first(value: ir.Value, heads: int) -> Array:
        array = inputs[value].astype(np.float64)
        return array if core.is_heads_first else array.reshape(1, PROOF_TOKENS, heads, -1).swapaxes(1, 2)

    group = core.heads // core.cache.heads
    key = np.concatenate([inputs[core.cache.past_key], heads_first(core.key, core.cache.heads)], axis=2)
    value = np.concatenate([inputs[core.cache.past_value], heads_first(core.value, core.cache.heads)], axis=2)
    scores = core.scale * heads_first(core.query, core.heads) @ np.repeat(key, group, axis=1).swapaxes(2, 3)
    if core.softcap:
        scores = core.softcap * np.tanh(scores / core.softcap)
    scores = np.where(causal_mask(PROOF_TOKENS, PROOF_PAST, window), scores, -np.inf)
    highest = scores.max(-1, keepdims=True)
    weights = np.exp(scores - highest)
    total = weights.sum(-1, keepdims=True)
    if core.sinks is not None:
        total = total + np.exp(core.sinks[None, :, None, None].astype(np.float64) - highest)
    result: Array = weights / total @ np.repeat(value, group, axis=1)
    return result if core.is_heads_first else result.swapaxes(1, 2).reshape(1, PROOF_TOKENS, -1)
