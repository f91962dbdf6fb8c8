from __future__ import annotations

import multiprocessing
import signal
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from residentd.backend.reference import (
    PlannedFault,
    ReferenceBackend,
    ReferenceModel,
    continuation,
    load,
    next_token,
)
from residentd.errors import BackendLostError, StepRetryableError, StoreError
from residentd.models.registry import Registry
from residentd.models.store import Store
from residentd.types import Limits, RequestId, Row, StepPlan
from support.toy_version import make_toy_version, toy_tokenizer

VOCAB, SLOTS, CAPACITY = 101, 3, 40
LIMITS = Limits(SLOTS, CAPACITY, 64, VOCAB)
PROMPTS = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=20).map(tuple)


def row(slot: int, start: int, *tokens: int, samples: bool = True) -> Row:
    return Row(RequestId(slot), slot, start, tokens, samples)


def plan(*rows: Row) -> StepPlan:
    return StepPlan(1, rows)


def test_the_oracle_is_pinned() -> None:
    """Everything else leans on these numbers, so a change of the hash is a decision, not an accident."""
    assert continuation((1, 2, 3), 5, ReferenceModel(), 1000) == (199, 391, 99, 504, 311)
    assert continuation((1, 2, 3), 5, ReferenceModel(seed=7, first=256), 1000) == (610, 808, 433, 590, 573)


@given(prompts=st.lists(PROMPTS, min_size=1, max_size=SLOTS), cuts=st.lists(st.integers(1, 7), min_size=1, max_size=8))
def test_chunks_and_neighbours_do_not_change_the_answer(prompts: list[tuple[int, ...]], cuts: list[int]) -> None:
    """Any cut of the prompts into steps, any neighbours, over dirty slots: the oracle's next token for each."""
    backend = ReferenceBackend(ReferenceModel(), LIMITS)
    backend.step(plan(*(row(slot, 0, *range(20), samples=False) for slot in range(SLOTS))))
    done = [0] * len(prompts)
    turn = 0
    while any(count < len(prompt) for count, prompt in zip(done, prompts, strict=True)):
        rows = []
        for slot, prompt in enumerate(prompts):
            chunk = prompt[done[slot] : done[slot] + cuts[(turn + slot) % len(cuts)]]
            if chunk:
                rows.append(row(slot, done[slot], *chunk, samples=done[slot] + len(chunk) == len(prompt)))
                done[slot] += len(chunk)
        logits = backend.step(plan(*reversed(rows)))
        sampling = [entry.slot for entry in reversed(rows) if entry.samples]
        assert logits.shape == (len(sampling), VOCAB)
        assert [int(line.argmax()) for line in logits] == [
            next_token(prompts[slot], ReferenceModel(), VOCAB) for slot in sampling
        ]
        turn += 1


@given(prompt=st.lists(st.integers(0, VOCAB - 1), min_size=2, max_size=20), data=st.data())
def test_one_foreign_cache_entry_changes_the_answer(prompt: list[int], data: st.DataObject) -> None:
    """A write into another sequence's slot, at any earlier position, changes the sum that its next token comes from."""
    model = ReferenceModel()
    limits = Limits(1, CAPACITY, 64, 1 << 40)
    place = data.draw(st.integers(0, len(prompt) - 2))
    other = data.draw(st.integers(0, VOCAB - 1).filter(lambda token: token != prompt[place]))
    changed = [*prompt[:place], other, *prompt[place + 1 :]]
    assert next_token(prompt, model, limits.vocab) != next_token(changed, model, limits.vocab)


def test_contamination_shows_in_the_slot() -> None:
    """The same, physically: overwriting position 2 of a live slot turns its next token."""
    backend = ReferenceBackend(ReferenceModel(), LIMITS)
    backend.step(plan(row(0, 0, 1, 2, 3, 4, 5)))
    clean = int(backend.step(plan(row(0, 5, 6))).argmax())
    backend.step(plan(row(0, 2, 99, samples=False)))
    assert clean == next_token((1, 2, 3, 4, 5, 6), ReferenceModel(), VOCAB)
    assert int(backend.step(plan(row(0, 5, 6))).argmax()) == next_token((1, 2, 99, 4, 5, 6), ReferenceModel(), VOCAB)
    assert next_token((1, 2, 99, 4, 5, 6), ReferenceModel(), VOCAB) != clean


def test_a_slot_may_be_filled_to_the_last_position() -> None:
    """CAPACITY tokens fit; one more is our own bug."""
    backend = ReferenceBackend(ReferenceModel(), LIMITS)
    tokens = tuple(range(CAPACITY))
    logits = backend.step(plan(row(SLOTS - 1, 0, *tokens)))
    assert int(logits.argmax()) == next_token(tokens, ReferenceModel(), VOCAB)
    with pytest.raises(AssertionError, match="capacity"):
        backend.step(plan(row(SLOTS - 1, CAPACITY, 1)))


def test_logits_hold_the_peaks_and_nothing_from_before() -> None:
    """peaks[i] stands at the next token + i, wrapping within [first, vocab); the buffer's old entries are gone."""
    model = ReferenceModel(peaks=(5.0, 4.0, 3.0), first=10)
    backend = ReferenceBackend(model, LIMITS)
    for token in range(30):
        logits = backend.step(plan(row(0, 0, token), row(2, 0, token + 1)))
        for line, prefix in zip(logits, ((token,), (token + 1,)), strict=True):
            best = next_token(prefix, model, VOCAB)
            expected = np.zeros(VOCAB, np.float32)
            expected[[10 + (best - 10 + offset) % (VOCAB - 10) for offset in range(3)]] = (5, 4, 3)
            np.testing.assert_array_equal(line, expected)


def test_a_step_without_sampling_rows_yields_no_logits() -> None:
    """A mid-prefill chunk alone: zero rows, and the buffer is clean afterwards."""
    backend = ReferenceBackend(ReferenceModel(), LIMITS)
    assert backend.step(plan(row(0, 0, 1, samples=False))).shape == (0, VOCAB)
    assert np.count_nonzero(backend.step(plan(row(0, 1, 2)))) == 1


@pytest.mark.parametrize(
    ("kind", "error"), [("lost", BackendLostError), ("retryable", StepRetryableError), ("error", RuntimeError)]
)
def test_planned_faults_raise_at_their_step_or_token(kind: str, error: type[Exception]) -> None:
    """A fault happens in the step it names, or in every step that reads its token, and in no other."""
    model = ReferenceModel(faults=(PlannedFault(kind=kind, step=2), PlannedFault(kind=kind, token=77)))  # type: ignore[arg-type]
    backend = ReferenceBackend(model, LIMITS)
    backend.step(plan(row(0, 0, 1)))
    with pytest.raises(error):
        backend.step(plan(row(0, 1, 2)))
    backend.step(plan(row(0, 1, 2)))
    with pytest.raises(error):
        backend.step(plan(row(0, 2, 3), row(1, 0, 77)))
    backend.step(plan(row(0, 2, 3)))


def test_the_fault_hook_sees_every_plan_first() -> None:
    """The hook of the constructor runs before anything is written, so its exception leaves the slot as it was."""
    seen: list[StepPlan] = []

    def fault(step: StepPlan) -> None:
        seen.append(step)
        if len(seen) == 2:
            raise StepRetryableError("again")

    backend = ReferenceBackend(ReferenceModel(), LIMITS, fault=fault)
    backend.step(plan(row(0, 0, 1)))
    with pytest.raises(StepRetryableError):
        backend.step(plan(row(0, 0, 50)))
    assert int(backend.step(plan(row(0, 1, 2))).argmax()) == next_token((1, 2), ReferenceModel(), VOCAB)
    assert len(seen) == 3


def _run(model: ReferenceModel) -> None:
    ReferenceBackend(model, LIMITS).step(plan(row(0, 0, 1)))


def test_a_planned_crash_is_a_kill() -> None:
    """The process ends by SIGKILL: no handler, no cleanup, like the out-of-memory killer."""
    model = ReferenceModel(faults=(PlannedFault(kind="crash", step=1),))
    child = multiprocessing.get_context("fork").Process(target=_run, args=(model,))
    child.start()
    child.join()
    assert child.exitcode == -signal.SIGKILL


def test_a_planned_hang_does_not_return() -> None:
    """The step neither returns nor raises until the process is killed from outside."""
    model = ReferenceModel(faults=(PlannedFault(kind="hang", step=1),))
    child = multiprocessing.get_context("fork").Process(target=_run, args=(model,))
    child.start()
    child.join(timeout=0.5)
    assert child.exitcode is None
    child.kill()
    child.join()


@settings(max_examples=20)
@given(text=st.text(max_size=40))
def test_the_toy_tokenizer_is_bytes(text: str) -> None:
    """Any text encodes to its UTF-8 bytes and back."""
    tokenizer = Tokenizer.from_str(toy_tokenizer(300, has_end=True))
    ids = tokenizer.encode(text).ids
    assert ids == list(text.encode())
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode([298]) == " w298"
    assert tokenizer.get_vocab_size() == 300


def test_a_toy_version_loads_from_the_store(tmp_path: Path) -> None:
    """What make_toy_version publishes is whole, active, and reproduces its own goldens."""
    digest = make_toy_version(tmp_path, vocab=300, has_end=True)
    assert Registry(tmp_path).resolve("toy").digest == digest
    manifest = Store(tmp_path).verify_files(digest)
    _, directory = Store(tmp_path).load(digest)
    backend = load(directory, manifest.content.engine)
    for golden in manifest.content.goldens:
        tokens = list(golden.prompt)
        start = 0
        for expected in golden.output:
            assert int(backend.step(plan(row(0, start, *tokens[start:]))).argmax()) == expected
            start = len(tokens)
            tokens.append(expected)
    assert manifest.content.text.eos_ids == (299,)
    (directory / "engine.json").write_text("{}x")
    with pytest.raises(StoreError, match="cannot be read"):
        load(directory, manifest.content.engine)
