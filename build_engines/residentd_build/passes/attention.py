"""Replace each layer's attention core by one RaggedAttention node.

Ensures: every cache input is used by exactly one node, `residentd::RaggedAttention`, whose outputs are the present
caches; each replaced core was proven to compute softmax(softcap(scale · q kᵀ) + causal or window mask) v.

    RaggedAttention(q [tokens, heads · dim], k, v [tokens, kv_heads · dim], past_key, past_value, cos?, sin?, sinks?)
      -> (out [tokens, heads · dim], present_key, present_value)
    attributes: heads, kv_heads, dim, scale, softcap (0: none), window (0: none), interleaved (of cos and sin)
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import onnx_ir as ir
from onnx_ir.tape import Tape

from residentd.errors import Finding, SourceError
from residentd_build.passes.layout import heads_of, reshape, rows_of
from residentd_build.passes.prune import prune
from residentd_build.recognise import decomposed, gqa, standard
from residentd_build.recognise.core import AttentionCore, Probe, UnrecognisedError, prove, window_of
from residentd_build.rules import CANONICAL_DOMAIN

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from residentd_build.draft import Cache, Draft

RAGGED_ATTENTION = "RaggedAttention"
RECOGNISERS: tuple[Callable[[Cache, Sequence[Probe]], AttentionCore | None], ...] = (
    gqa.recognise,
    standard.recognise,
    decomposed.recognise,
)
PROBE_TOKENS = 16
FINDINGS_MAX = 8
USERS_MAX = 3  # named of a cache
REMEDY = (
    "Export it with `optimum-cli export onnx --task text-generation-with-past`, or report the exporter and its version"
)


def run(draft: Draft) -> str:
    """Raises SourceError with one finding per layer that is not recognised."""
    probes = _probes(draft)
    findings: list[Finding] = []
    described: list[str] = []
    for cache in draft.caches:
        try:
            core = _recognise(cache, probes)
            window = window_of(core, probes, draft.context)
            prove(core, draft, window)
        except UnrecognisedError as error:
            findings.append(
                Finding(f"the attention of layer {cache.layer} is not recognised: {error}", "model.onnx", REMEDY)
            )
            continue
        _replace(draft, core, window)
        described.append(_describe(core, window))
    if findings:
        raise SourceError(_summary(findings))
    prune(draft)
    kinds = "; ".join(f"{described.count(kind)} layers of {kind}" for kind in dict.fromkeys(described))
    return f"attention: {kinds}"


def _summary(findings: list[Finding]) -> list[Finding]:
    hidden = len(findings) - FINDINGS_MAX
    what = f"the attention of {hidden} more layers is not recognised"
    return findings[:FINDINGS_MAX] + ([Finding(what, "model.onnx", REMEDY)] if hidden > 0 else [])


def _probes(draft: Draft) -> tuple[Probe, ...]:
    """The first prompt, the middle and the last tokens of a full slot: enough to tell any window below the capacity."""
    tokens = min(PROBE_TOKENS, draft.context)
    starts = sorted({0, max(draft.context // 2 - tokens, 0), draft.context - tokens})
    return tuple(Probe(tokens, past, draft.follow(tokens, past)) for past in starts)


def _recognise(cache: Cache, probes: Sequence[Probe]) -> AttentionCore:
    for recognise in RECOGNISERS:
        core = recognise(cache, probes)
        if core is not None:
            if core.heads % cache.heads:
                raise UnrecognisedError(f"{core.heads} query heads do not divide over {cache.heads} key heads")
            width = None if cache.past_value.shape is None else cache.past_value.shape[3]
            if width != cache.dim:
                raise UnrecognisedError(f"its keys have {cache.dim} places a head and its values {width}")
            return core
    users = ", ".join(f"{node.name} ({node.op_type})" for node in list(cache.past_key.consumers())[:USERS_MAX])
    raise UnrecognisedError(f"no known form uses the cache input {cache.past_key.name}; used by: {users or 'nothing'}")


def _replace(draft: Draft, core: AttentionCore, window: int | None) -> None:
    cache, name = core.cache, f"residentd/attention.{core.cache.layer}"
    tape = Tape()
    operands = ((core.query, core.heads, "q"), (core.key, cache.heads, "k"), (core.value, cache.heads, "v"))
    rows = [
        rows_of(tape, draft, value, width=heads * cache.dim, is_heads_first=core.is_heads_first, name=f"{name}.{part}")
        for value, heads, part in operands
    ]
    extra = _rotary(draft, core)
    extra += [] if core.sinks is None else [draft.constant(f"attention.{cache.layer}.sinks", core.sinks)]
    while extra and extra[-1] is None:
        extra.pop()
    out, key, value = tape.op_multi_out(
        RAGGED_ATTENTION,
        [*rows, cache.past_key, cache.past_value, *extra],
        _attributes(core, window),
        domain=CANONICAL_DOMAIN,
        name=name,
        outputs=[ir.Value(name=f"{name}.out"), ir.Value(), ir.Value()],
    )
    if core.is_heads_first:
        result = heads_of(tape, draft, out, heads=core.heads, dim=cache.dim, name=f"{name}.out")
    else:
        result = reshape(tape, draft, out, [1, -1, core.heads * cache.dim], f"{name}.out.batched")
    _insert(draft, core, tape, result)
    _take_over(draft, key, cache.present_key_name)
    _take_over(draft, value, cache.present_value_name)


def _rotary(draft: Draft, core: AttentionCore) -> list[ir.Value | None]:
    """The tables that the core rotates by itself; layers that share them share the constants."""
    if core.rotary is None:
        return [None, None]
    tables = (core.rotary.cos, core.rotary.sin)
    digests = [hashlib.sha256(table.tobytes()).hexdigest()[:16] for table in tables]
    return [draft.constant(f"rotary.{digest}", table) for digest, table in zip(digests, tables, strict=True)]


def _attributes(core: AttentionCore, window: int | None) -> dict[str, int | float]:
    return {
        "heads": core.heads,
        "kv_heads": core.cache.heads,
        "dim": core.cache.dim,
        "scale": core.scale,
        "softcap": core.softcap,
        "window": window or 0,
        "interleaved": int(core.rotary is not None and core.rotary.is_interleaved),
    }


def _insert(draft: Draft, core: AttentionCore, tape: Tape, result: ir.Value) -> None:
    node = core.output.producer()
    assert node is not None
    ir.convenience.replace_all_uses_with(core.output, result)
    draft.graph.insert_before(node, tape.nodes)


def _take_over(draft: Draft, new: ir.Value, name: str) -> None:
    """Make `new` the graph output of this name."""
    index = next(i for i, value in enumerate(draft.graph.outputs) if value.name == name)
    exported = draft.graph.outputs[index]
    new.shape, new.type = exported.shape, exported.type
    draft.graph.outputs[index] = new
    exported.name = f"{name}.exported"
    new.name = name


def _describe(core: AttentionCore, window: int | None) -> str:
    grouped = f"{core.heads} heads over {core.cache.heads} of {core.cache.dim}"
    extras = [f"scale {core.scale:.6g}"]
    extras += [f"window {window}"] if window else []
    extras += [f"softcap {core.softcap:g}"] if core.softcap else []
    extras += ["sinks"] if core.sinks is not None else []
    return f"{grouped}, {', '.join(extras)}"
