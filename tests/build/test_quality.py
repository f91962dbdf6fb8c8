"""What a build lost against its export: the arithmetic, the caps, the bound, and the text itself."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lowering import EXPORTS

from residentd.errors import AccuracyError
from residentd.types import Limits, StepPlan
from residentd_build import quality as module
from residentd_build.quality import Measured, Reference, divergences, judge, measure, passages_of, record_export
from residentd_build.validate import validate

ROOT = Path(__file__).resolve().parent.parent.parent
VOCAB = 7
PASSAGES = ((1, 2, 3, 4, 5, 6), (2, 2, 4, 1), (6, 5, 4, 3, 2, 1, 0))


def quiet(_fraction: float, _message: str) -> None:
    """Progress that nobody follows."""


def logits_after(tokens: Sequence[int]) -> np.ndarray:
    """float32 [vocab], decided by the whole history."""
    return np.random.default_rng(list(tokens)).standard_normal(VOCAB).astype(np.float32) * 3


class Ticking:
    """A clock on which so many seconds pass between two looks."""

    def __init__(self, seconds: float) -> None:
        self._now, self._seconds = 0.0, seconds

    def __call__(self) -> float:
        self._now += self._seconds
        return self._now


class FakeExport:
    """Reads as an export does."""

    def __init__(self) -> None:
        self.history: list[int] = []
        self.reads: list[int] = []

    def forget(self) -> None:
        self.history = []

    def read(self, tokens: Sequence[int]) -> np.ndarray:
        self.reads.append(len(tokens))
        self.history += tokens
        ends = range(len(self.history) - len(tokens) + 1, len(self.history) + 1)
        return np.stack([logits_after(self.history[:end]) for end in ends])


class FakeBuild:
    """A backend that answers as FakeExport does, plus `change` of the logits."""

    def __init__(self, change: float = 0.0) -> None:
        self.limits = Limits(module.PASSAGES_MAX, 16, 32, VOCAB)
        self.rows: list[int] = []
        self._slots: dict[int, list[int]] = {}
        self._change = change

    def step(self, plan: StepPlan) -> np.ndarray:
        self.rows.append(len(plan.rows))
        answers = []
        for row in plan.rows:
            history = [*self._slots.get(row.slot, [])[: row.start], *row.tokens]
            self._slots[row.slot] = history
            answers.append(logits_after(history) + self._change * np.arange(VOCAB, dtype=np.float32))
        return np.stack(answers)

    def close(self) -> None:
        """Nothing is held."""


def recorded(tmp_path: Path) -> Reference:
    return record_export(FakeExport(), PASSAGES, tmp_path / "export.f32", quiet)


# ---- arithmetic ----------------------------------------------------------------------------------------------------

ROWS = st.integers(2, 40).flatmap(
    lambda size: st.tuples(*(st.lists(st.floats(-30, 30, width=32), min_size=size, max_size=size) for _ in range(2)))
)


@given(ROWS)
def test_divergence_is_the_definition(rows: tuple[list[float], list[float]]) -> None:
    """Σ p·(log p - log q) in float64, within what its own cancellation of terms up to 60 leaves; never negative."""
    first, second = (np.array([row], np.float32) for row in rows)
    wide = [row[0].astype(np.float64) - np.logaddexp.reduce(row[0].astype(np.float64)) for row in (first, second)]
    expected = float((np.exp(wide[0]) * (wide[0] - wide[1])).sum())
    (found,) = divergences(first, second)
    assert found >= 0
    assert found == pytest.approx(expected, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("shift", [0.0, 5.0, -300.0])
def test_a_shift_of_all_logits_is_no_divergence(shift: float) -> None:
    """softmax does not see it, whatever its size."""
    row = np.array([[1.0, -2.0, 0.5, 8.0]], np.float32)
    assert divergences(row, row + np.float32(shift))[0] == pytest.approx(0, abs=1e-12)


def test_small_divergences_are_seen() -> None:
    """Half the variance of the difference: 1e-4 of one logit of two equal ones is 1.25e-9 nats, not rounding."""
    row = np.zeros((1, 2), np.float32)
    changed = np.array([[1e-4, 0.0]], np.float32)
    assert divergences(row, changed)[0] == pytest.approx(1e-8 / 8, rel=1e-3)


def test_logits_far_apart_do_not_overflow() -> None:
    """A build that is certain of what the export excludes: nats as many as the logits are apart."""
    one, other = np.array([[0.0, -900.0]], np.float32), np.array([[-900.0, 0.0]], np.float32)
    assert divergences(one, other)[0] == pytest.approx(900)


# ---- measuring -----------------------------------------------------------------------------------------------------


def test_an_equal_build_loses_nothing(tmp_path: Path) -> None:
    """Zero divergence, the export's own perplexity, every first choice, every position that has a token after it."""
    measured = measure(FakeBuild(), recorded(tmp_path), quiet)
    assert measured.positions == sum(len(passage) - 1 for passage in PASSAGES)
    assert measured.kl_mean == pytest.approx(0, abs=1e-12)
    assert measured.top1 == 1.0
    losses = [
        np.logaddexp.reduce(row := logits_after(passage[:end]).astype(np.float64)) - row[passage[end]]
        for passage in PASSAGES
        for end in range(1, len(passage))
    ]
    assert measured.perplexity == pytest.approx(math.exp(np.mean(losses)), rel=1e-6)
    assert measured.perplexity_export == pytest.approx(measured.perplexity, rel=1e-9)


def test_a_changed_build_is_measured_position_by_position(tmp_path: Path) -> None:
    """Mean, the worst of a hundred and top-1 are those of the rows, computed apart."""
    change = 0.3
    rows = [logits_after(passage[:end]) for passage in PASSAGES for end in range(1, len(passage))]
    changed = [row + change * np.arange(VOCAB, dtype=np.float32) for row in rows]
    each = [divergences(row[None], other[None])[0] for row, other in zip(rows, changed, strict=True)]
    measured = measure(FakeBuild(change), recorded(tmp_path), quiet)
    assert measured.kl_mean == pytest.approx(np.mean(each))
    assert measured.kl_p99 == pytest.approx(np.percentile(each, 99))
    same = [row.argmax() == other.argmax() for row, other in zip(rows, changed, strict=True)]
    assert measured.top1 == np.mean(same) < 1


def test_nan_of_the_build_is_refused(tmp_path: Path) -> None:
    """It is not averaged away."""
    with pytest.raises(AccuracyError, match="NaN or infinity"):
        measure(FakeBuild(math.nan), recorded(tmp_path), quiet)


def test_the_export_reads_in_bounded_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut anywhere, the record is the same: [positions, vocab], in the passages' order."""
    monkeypatch.setattr(module, "EXPORT_CHUNK", 2)
    export = FakeExport()
    reference = record_export(export, PASSAGES, tmp_path / "export.f32", quiet)
    assert max(export.reads) == 2
    for passage, logits in zip(reference.passages, reference.logits(), strict=True):
        expected = [logits_after(passage[:end]) for end in range(1, len(passage))]
        np.testing.assert_array_equal(logits, np.stack(expected))


def test_a_slow_export_reads_fewer_passages(tmp_path: Path) -> None:
    """No passage begins after EXPORT_S_MAX, one is always read, and what was read is what counts."""
    slow = record_export(FakeExport(), PASSAGES, tmp_path / "a", quiet, clock=Ticking(module.EXPORT_S_MAX + 1))
    assert slow.passages == PASSAGES[:1]
    assert measure(FakeBuild(), slow, quiet).positions == len(PASSAGES[0]) - 1
    in_time = record_export(FakeExport(), PASSAGES, tmp_path / "b", quiet, clock=Ticking(module.EXPORT_S_MAX * 0.6))
    assert in_time.passages == PASSAGES[:2]


def test_a_slow_build_stops_early_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Past BUILD_S_MAX only STEPS_MIN steps are measured, and positions counts them."""
    monkeypatch.setattr(module, "STEPS_MIN", 2)
    measured = measure(FakeBuild(), recorded(tmp_path), quiet, clock=Ticking(module.BUILD_S_MAX + 1))
    assert measured.positions == 2 * len(PASSAGES)


# ---- the bound -----------------------------------------------------------------------------------------------------


def measured_with(kl_mean: float) -> Measured:
    return Measured(kl_mean, 0.4, 20.5, 19.4, 0.871, 2040)


def test_the_bound_is_met_exactly() -> None:
    """A mean of the bound passes, the next float above does not."""
    assert judge(measured_with(0.05), 0.05, "int8 row8").kl_bound == 0.05
    with pytest.raises(AccuracyError):
        judge(measured_with(math.nextafter(0.05, 1)), 0.05, "int8 row8")


@pytest.mark.parametrize(
    ("name", "way_out"),
    [
        ("int8 row8", "--precision int8 --block 32"),
        ("int8 block 32", "--precision fp32"),
        ("int4 block 32", "--precision int8"),
        ("bf16", "--precision fp32"),
    ],
)
def test_a_refusal_has_the_numbers_and_the_way_out(name: str, way_out: str) -> None:
    """What, the value, the bound, and a finer format or the bound that would let it pass."""
    with pytest.raises(AccuracyError) as refusal:
        judge(measured_with(0.0521), 0.05, name)
    message = str(refusal.value)
    for part in (name, "0.0521", "2,040 positions", "0.05;", "20.5 against 19.4", "87.1%", way_out, "--kl-max 0.053"):
        assert part in message


# ---- the text ------------------------------------------------------------------------------------------------------


def test_the_text_fills_every_passage() -> None:
    """Eight passages, each of more than enough characters for 256 tokens of a tokenizer of four characters a token."""
    parts = (Path(module.__file__).parent / module.TEXT_FILE).read_text(encoding="utf-8").split(module.TEXT_SEPARATOR)
    assert len(parts) == module.PASSAGES_MAX
    assert all(len(part.encode()) > 4 * 256 for part in parts)
    assert any(ord(character) > 0x3000 for part in parts for character in part)


def test_the_wheel_carries_the_text() -> None:
    """An installed compiler finds it beside its code."""
    wheel = pytest.importorskip("hatchling.builders.wheel")
    included = {file.distribution_path for file in wheel.WheelBuilder(str(ROOT)).recurse_included_files()}
    assert f"residentd_build/{module.TEXT_FILE}" in included


@pytest.mark.parametrize("context", [8, 100, 2048])
def test_passages_fit_a_slot(context: int) -> None:
    """Cut to the context and to the cap; a model whose prompts begin with BOS reads BOS first."""
    source = validate(EXPORTS / "llama")
    passages = passages_of(source, context)
    assert len(passages) == module.PASSAGES_MAX
    assert {len(passage) for passage in passages} == {min(context, module.PASSAGE_TOKENS_MAX)}
    assert source.text.adds_bos
    assert {passage[0] for passage in passages} == {source.text.bos_id}


def test_a_large_vocabulary_shortens_the_passages(monkeypatch: pytest.MonkeyPatch) -> None:
    """The record stays within RECORD_BYTES_MAX, and the room asked for is what may be written."""
    source = validate(EXPORTS / "llama")
    limit = 8 * 40 * source.vocab * 4
    monkeypatch.setattr(module, "RECORD_BYTES_MAX", limit)
    passages = passages_of(source, 2048)
    written = sum(len(passage) - 1 for passage in passages) * source.vocab * 4
    assert written == limit
    assert written <= module.record_bytes(source, 2048)
