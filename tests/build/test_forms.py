"""Forms of attention, rotation, norm and position that the committed exports do not have."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from lowered_engine import Export, LoweredEngine
from lowering import lower_model
from tiny_decoder import HEADS, VOCAB, Decoder, Style

from residentd.errors import SourceError

CONTEXT = 96
TOLERANCE = 2e-4
"""Logits reach 10 here; 2e-5 of that is what 340 roundings of 2^-24 can add up to, as verify's floor has it."""


def compare(style: Style, directory: Path) -> tuple[float, list[str]]:
    """Worst |Δlogit| over ragged, mixed, chunked, slot-reusing steps to a full context, and the passes' lines."""
    export = Export(Decoder(style).save(directory))
    path, lines = lower_model(Decoder(style).model(), directory, CONTEXT)
    engine = LoweredEngine(path, slots=4, context=CONTEXT, slack=CONTEXT)
    history: dict[int, list[int]] = {slot: [] for slot in range(4)}
    rng = np.random.default_rng(3)
    worst = 0.0

    def step(work: Mapping[int, int]) -> None:
        nonlocal worst
        tokens = {slot: rng.integers(0, VOCAB, count).tolist() for slot, count in work.items()}
        found = engine.step(tokens)
        for row, slot in enumerate(work):
            history[slot] += tokens[slot]
            worst = max(worst, float(np.abs(found[row] - export.logits(history[slot])).max()))

    for work in ({2: 19}, {2: 1, 0: 30}, {3: 5, 0: 1, 2: 1}, {0: 7, 1: 40, 2: 1}):
        step(work)
    engine.free(0)
    history[0] = []
    for work in ({0: 12, 1: 1, 2: 3, 3: 1}, {1: CONTEXT - 42, 0: 1}, {0: 1, 1: 1, 2: 1}):
        step(work)
    assert engine.lengths[1] == CONTEXT
    return worst, lines


FORMS = {
    "decomposed": Style(),
    "decomposed, split scale": Style(scale_form="split"),
    "decomposed, divided by": Style(scale_form="divide"),
    "decomposed, unusual scale": Style(scale=0.11),
    "decomposed, softcap": Style(softcap=3.0),
    "decomposed, softcap and split scale": Style(softcap=3.0, scale_form="split"),
    "decomposed, window": Style(mask="window", window=9),
    "decomposed, window of one": Style(mask="window", window=1),
    "decomposed, window longer than the context": Style(mask="window", window=CONTEXT + 1),
    "standard, rows": Style(attention="standard3"),
    "standard, heads first": Style(attention="standard4"),
    "standard, is_causal": Style(attention="standard3", is_causal=True),
    "standard, heads first, is_causal": Style(attention="standard4", is_causal=True),
    "standard, scale": Style(attention="standard3", scale=0.5),
    "standard, window": Style(attention="standard3", mask="window", window=9),
    "interleaved rotation": Style(rotary="interleaved"),
    "rotation with a factor": Style(rotary="scaled"),
    "no rotation": Style(rotary="none"),
    "no rotation, counted positions": Style(rotary="none", positions="range"),
    "positions from the cache's length": Style(positions="range"),
    "positions from the mask": Style(positions="cumsum"),
    "standard norm": Style(norm="standard"),
    "squared norm": Style(norm="square"),
    "layer norm": Style(norm="layer"),
    "layer norm, written out": Style(norm="layer, written out"),
    "layer norm, written out, no bias": Style(norm="layer, written out, no bias"),
    "a quarter of a head rotated": Style(rotary_dim=4),
    "half of a head rotated, interleaved": Style(rotary="interleaved", rotary_dim=8),
    "three quarters of a head rotated": Style(rotary_dim=12, products="turns"),
    "q, k and v side by side": Style(products="side by side"),
    "q, k and v by turns": Style(products="turns"),
    "scores replaced instead of masked": Style(mask_form="where", mask="window", window=9),
    "epsilon that is no short decimal": Style(epsilon=1.5624999e-7),
    "sinks": Style(sinks="heads"),
    "sinks and a window": Style(sinks="heads", mask="window", window=9),
    "sinks and a softcap": Style(sinks="heads", softcap=3.0),
    "sinks and a split scale": Style(sinks="heads", scale_form="split"),
    "joined": Style(attention="joined"),
    "joined, window": Style(attention="joined", mask="window", window=9),
    "grouped": Style(attention="grouped"),
    "grouped, side by side": Style(attention="grouped, side by side", scale=0.4),
    "grouped, window": Style(attention="grouped", window=9),
    "grouped, softcap": Style(attention="grouped", softcap=3.0),
    "grouped, sinks": Style(attention="grouped", sinks="heads"),
    "grouped, rotating": Style(attention="grouped, side by side", rotary="none", rotates_within="half"),
    "grouped, rotating pairs": Style(attention="grouped", rotary="none", rotates_within="interleaved"),
    "grouped, counted positions": Style(attention="grouped", positions="cumsum"),
    "rotation by an operator, rows": Style(rotary="operator3"),
    "rotation by an operator, heads": Style(rotary="operator4"),
    "rotation by an operator, pairs": Style(rotary="operator3, interleaved"),
    "rotation by an operator, half of a head": Style(rotary="operator3", rotary_dim=8),
    "three layers": Style(layers=3, mask="window", window=20),
}


@pytest.mark.parametrize("name", FORMS)
def test_every_form_gives_the_exports_own_logits(name: str, tmp_path: Path) -> None:
    """A lowered decoder of each form agrees with its export in ragged mixed steps over poisoned caches."""
    worst, _ = compare(FORMS[name], tmp_path)
    assert worst < TOLERANCE


REFUSED = {
    "a score bias (ALiBi)": (Style(mask="alibi"), "adds a bias"),
    "a mask that shows the future": (Style(mask="future"), "neither causal nor a causal window"),
    "sinks that differ between tokens": (Style(sinks="tokens"), "not the same for every query"),
    "a grouped attention that looks at fewer keys": (Style(attention="grouped", lengths="cut"), "counts its keys"),
    "a grouped attention with a bias": (Style(attention="grouped", grouped_extra="attention_bias"), "attention_bias"),
    "a grouped attention with a smooth softmax": (
        Style(attention="grouped", grouped_extra="smooth_softmax"),
        "has the attribute smooth_softmax = 1",
    ),
    "rotary tables shorter than the context": (
        Style(attention="grouped", rotary="none", rotates_within="half", table_rows=CONTEXT - 1),
        f"use --context {CONTEXT - 1} or less",
    ),
    "tiled instead of repeated heads": (Style(repeat="tile"), "is off by"),
    "a head that looks at all tokens": (Style(head_mixes=True), "reduces the token axis"),
    "angles that depend on the longest position": (Style(rotary="dynamic"), "reduces the token axis"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_batched_is_refused_and_named(name: str, tmp_path: Path) -> None:
    """A decoder that the canonical form would compute wrongly is refused, with the reason."""
    style, reason = REFUSED[name]
    with pytest.raises(SourceError, match=reason) as caught:
        lower_model(Decoder(style).model(), tmp_path, CONTEXT)
    assert all(finding.where == "model.onnx" and finding.remedy for finding in caught.value.findings)


def test_every_layer_that_is_not_recognised_is_a_finding(tmp_path: Path) -> None:
    """Findings name each layer, not only the first."""
    with pytest.raises(SourceError) as caught:
        lower_model(Decoder(Style(mask="alibi", layers=3)).model(), tmp_path, CONTEXT)
    assert [f"layer {layer} " in finding.what for layer, finding in enumerate(caught.value.findings)] == [True] * 3


FIRES = {
    "half": (Style(), "rotary: in all 1 attention nodes"),
    "interleaved": (Style(rotary="interleaved"), "rotary: in all 1 attention nodes"),
    "with a factor": (Style(rotary="scaled"), "rotary: in all 1 attention nodes"),
    "absent": (
        Style(rotary="none"),
        "rotary: in 0 of 1 attention nodes; the export rotates nothing in 1",
    ),
    "norm, Pow and Reciprocal": (Style(norm="rsqrt"), "norms: 2 RmsNorm, 2 of them written out"),
    "norm, x·x and Div": (Style(norm="square"), "norms: 2 RmsNorm, 2 of them written out"),
    "norm, standard": (Style(norm="standard"), "norms: 2 RmsNorm, 0 of them written out"),
    "norm of another kind": (Style(norm="layer"), "norms: 0 RmsNorm and 2 LayerNorm, 0 of them written out"),
    "layer norm, written out": (
        Style(norm="layer, written out"),
        "norms: 0 RmsNorm and 2 LayerNorm, 2 of them written",
    ),
    "layer norm without a bias": (
        Style(norm="layer, written out, no bias"),
        "norms: 0 RmsNorm and 2 LayerNorm, 2 of them written",
    ),
    "norm, no short epsilon": (Style(epsilon=1.5624999e-7), "norms: 2 RmsNorm, 2 of them written out"),
    "scores replaced": (Style(mask_form="where", mask="window", window=9), "window 9"),
    "partial, halves": (Style(rotary_dim=4), "rotary: in all 1 attention nodes"),
    "partial, interleaved": (Style(rotary="interleaved", rotary_dim=8), "rotary: in all 1 attention nodes"),
    "one product for q, k and v": (Style(), "linears: queries, keys and values in one product in 1 of 1 layers"),
    "one product, side by side": (
        Style(products="side by side"),
        "linears: queries, keys and values in one product in 1 of 1 layers",
    ),
    "one product, by turns, in another order": (
        Style(products="turns", rotary_dim=12),
        "linears: queries, keys and values in one product in 1 of 1 layers",
    ),
    "sinks": (Style(sinks="heads"), "scale 0.25, sinks"),
    "sinks of a grouped attention": (Style(attention="grouped", sinks="heads"), "scale 0.25, sinks"),
    "window of a grouped attention": (Style(attention="grouped", window=9), "window 9"),
    "window of a grouped attention beyond the context": (
        Style(attention="grouped", window=CONTEXT),
        f"{HEADS} heads over 2 of 16, scale 0.25",
    ),
    "rotation within a grouped attention": (
        Style(attention="grouped", rotary="none", rotates_within="half"),
        "rotary: in all 1 attention nodes",
    ),
    "rotation by an operator": (Style(rotary="operator3"), "operators: wrote out 2 RotaryEmbedding"),
    "rotation by an operator, fused": (Style(rotary="operator4"), "rotary: in all 1 attention nodes"),
    "side by side in a grouped attention": (
        Style(attention="grouped, side by side", rotary="none", rotates_within="half", products="side by side"),
        "linears: queries, keys and values in one product in 1 of 1 layers",
    ),
    "positions counted": (Style(positions="range"), "now come from position_ids"),
    "window": (Style(mask="window", window=9), "window 9"),
    "softcap": (Style(softcap=3.0), "softcap 3"),
    "window beyond the context": (Style(mask="window", window=CONTEXT), f"{HEADS} heads over 2 of 16, scale 0.25"),
}


@pytest.mark.parametrize("name", FIRES)
def test_the_passes_say_what_they_did(name: str, tmp_path: Path) -> None:
    """Each recognition, and each one that did not happen, is in the lines for the manifest."""
    style, expected = FIRES[name]
    _, lines = lower_model(Decoder(style).model(), tmp_path, CONTEXT)
    assert any(expected in line for line in lines), lines


def test_a_window_beyond_the_context_is_no_window(tmp_path: Path) -> None:
    """A slot that is shorter than the window never needs it."""
    _, lines = lower_model(Decoder(Style(mask="window", window=CONTEXT)).model(), tmp_path, CONTEXT)
    assert not any("window" in line for line in lines)
