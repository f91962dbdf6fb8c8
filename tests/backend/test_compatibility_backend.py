"""Exports run as they are, each slot with its own past: the same answers as alone, however rows are cut and retried."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from residentd.backend import compatibility as module
from residentd.backend.compatibility import RUN_TOKENS_MAX, CompatibilityBackend, memory_need, step_feeds
from residentd.errors import BackendLostError, MachineError, StepRetryableError, StoreError
from residentd.models.manifest import Engine, EngineLimits, State
from residentd.types import RequestId, Row, StepPlan
from support.installed import EXPORTS

LLAMA = EXPORTS / "llama"
GOLDENS = json.loads((LLAMA / "goldens.json").read_text())["prompts"]
SLOTS, CONTEXT, VOCAB = 3, 256, 480
CACHES = tuple(
    State(
        input=f"past_key_values.{layer}.{part}",
        output=f"present.{layer}.{part}",
        dtype="float32",
        shape=(1, 2, 0, 16),
        axis=2,
    )
    for layer in range(2)
    for part in ("key", "value")
)
TOLERANCE = 1e-3
"""Of logits of magnitude 10 over cuts of one prompt: roundings are some 1e-5, a wrong past is above 1e-1."""


def engine_of(states: tuple[State, ...] = CACHES, *, slots: int = SLOTS, vocab: int = VOCAB) -> Engine:
    return Engine(
        target="onnxruntime-cpu",
        mode="compatibility",
        mode_reason="a test asked",
        precision="fp32",
        path="model.onnx",
        limits=EngineLimits(slots=slots, context=CONTEXT, step_tokens_max=CONTEXT, vocab=vocab),
        caches=(),
        states=states,
    )


@pytest.fixture
def backend() -> Iterator[CompatibilityBackend]:
    opened = CompatibilityBackend(LLAMA, engine_of())
    yield opened
    opened.close()


def row(slot: int, start: int, tokens: list[int], *, samples: bool = True) -> Row:
    return Row(RequestId(slot), slot, start, tuple(tokens), samples)


def run(backend: CompatibilityBackend, *rows: Row) -> np.ndarray:
    return backend.step(StepPlan(1, rows)).copy()


def test_every_golden_is_answered_as_transformers_did_in_ragged_steps(backend: CompatibilityBackend) -> None:
    """All prompts through three slots: staggered, prefill beside decode, each slot used again and again."""
    waiting, free = list(range(len(GOLDENS))), list(range(SLOTS))
    running: dict[int, tuple[int, int]] = {}
    answers: dict[int, list[int]] = {index: [] for index in waiting}
    while waiting or running:
        while waiting and free:
            running[waiting.pop(0)] = (free.pop(), 0)
        rows, fed = [], []
        for index, (slot, start) in running.items():
            known = GOLDENS[index]["prompt_ids"] + answers[index]
            tokens = known[start : start + 40]
            rows.append(row(slot, start, tokens, samples=start + len(tokens) == len(known)))
            fed.append(index)
        logits = iter(run(backend, *rows))
        for index, done in zip(fed, rows, strict=True):
            running[index] = (done.slot, done.start + len(done.tokens))
            if done.samples:
                answers[index].append(int(next(logits).argmax()))
            if len(answers[index]) == len(GOLDENS[index]["greedy_ids"]):
                free.append(running.pop(index)[0])
    for index, golden in enumerate(GOLDENS):
        assert answers[index] == golden["greedy_ids"], f"a prompt of {len(golden['prompt_ids'])} tokens"


@pytest.mark.parametrize("cuts", [(1, 2, 3), (150,), (RUN_TOKENS_MAX - 1,), (RUN_TOKENS_MAX,), (RUN_TOKENS_MAX + 1,)])
def test_a_prompt_may_be_cut_anywhere(backend: CompatibilityBackend, cuts: tuple[int, ...]) -> None:
    """Chunks below, at and above what one run takes give the logits of the whole prompt."""
    tokens = GOLDENS[-1]["prompt_ids"]
    whole = run(backend, row(0, 0, tokens))
    edges = [0, *cuts, len(tokens)]
    for start, end in itertools.pairwise(edges[:-1]):
        assert run(backend, row(1, start, tokens[start:end], samples=False)).shape == (0, VOCAB)
    assert np.abs(run(backend, row(1, edges[-2], tokens[edges[-2] :])) - whole).max() < TOLERANCE


@pytest.mark.parametrize("start", [1, 20, 23])
def test_a_row_may_begin_before_what_its_slot_holds(backend: CompatibilityBackend, start: int) -> None:
    """A step that is tried again, or goes on otherwise, finds the past of its start and nothing of later tokens."""
    first, other = GOLDENS[4]["prompt_ids"], GOLDENS[6]["prompt_ids"][:9]
    expected = run(backend, row(1, 0, first[:start] + other))
    run(backend, row(0, 0, first))
    for _ in range(2):
        found = run(backend, row(0, start, other))
        assert np.abs(found - expected).max() < TOLERANCE


def test_a_slot_that_begins_anew_forgets_everything(backend: CompatibilityBackend) -> None:
    """Over NaN in all that the slot held, a new sequence is what it is in a fresh one."""
    tokens = GOLDENS[5]["prompt_ids"]
    expected = run(backend, row(2, 0, tokens))
    run(backend, row(0, 0, GOLDENS[8]["prompt_ids"]))
    for cache in backend.caches:
        cache.fill(np.nan)
    assert np.isnan(run(backend, row(2, len(tokens), [5]))).any(), "the poison reaches what goes on"
    assert np.array_equal(run(backend, row(0, 0, tokens)), expected)


def test_a_row_before_one_that_fails_can_be_asked_again(
    backend: CompatibilityBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Out of memory in the second row is retryable: the same plan then gives what it would have given."""
    prompt, other = GOLDENS[4]["prompt_ids"], GOLDENS[5]["prompt_ids"]
    run(backend, row(0, 0, prompt[:-1], samples=False), row(1, 0, other[:-1], samples=False))
    plan = (row(0, len(prompt) - 1, prompt[-1:]), row(1, len(other) - 1, other[-1:]))
    inner, calls = backend._run, []

    def failing(*arguments: object, samples: bool) -> object:
        calls.append(samples)
        if len(calls) == 2:
            raise MemoryError
        return inner(*arguments, samples=samples)  # type: ignore[arg-type]

    monkeypatch.setattr(backend, "_run", failing)
    with pytest.raises(StepRetryableError, match="ran out of memory"):
        run(backend, *plan)
    again = run(backend, *plan)
    assert np.abs(again[0] - run(backend, row(2, 0, prompt))[0]).max() < TOLERANCE
    assert np.abs(again[1] - run(backend, row(2, 0, other))[0]).max() < TOLERANCE


def test_what_onnxruntime_refuses_ends_the_backend(backend: CompatibilityBackend) -> None:
    """An id past the embedding is our own fault and not one that another try would mend."""
    with pytest.raises(BackendLostError, match="step 1"):
        run(backend, row(0, 0, [VOCAB + 5]))


@pytest.mark.parametrize(
    "wrong",
    [row(SLOTS, 0, [1]), row(0, CONTEXT, [1]), row(0, 3, [1])],
    ids=["a slot too many", "past the capacity", "after what is held"],
)
def test_rows_outside_the_limits_are_our_own_bug(backend: CompatibilityBackend, wrong: Row) -> None:
    """They never reach the runtime."""
    with pytest.raises(AssertionError):
        run(backend, wrong)


# ---- states of other kinds -----------------------------------------------------------------------------------------

FIXED = State(input="past_conv.0", output="present_conv.0", dtype="float32", shape=(1, 4))


def write_recurrent(directory: Path) -> tuple[State, ...]:
    """state' = state / 2 + the sum of the new tokens' rows; logits are of the state after all tokens of the run."""
    rng = np.random.default_rng(1)
    weights = [numpy_helper.from_array(rng.standard_normal((8, 4)).astype(np.float32), "table")]
    weights += [numpy_helper.from_array(np.array([1], np.int64), "axes")]
    weights += [numpy_helper.from_array(np.array([[[2.0**-30]]], np.float32), "none")]
    nodes = [
        helper.make_node("Gather", ["table", "input_ids"], ["rows"]),
        helper.make_node("ReduceSum", ["rows", "axes"], ["total"], keepdims=0),
        helper.make_node("Add", ["past_conv.0", "total"], ["present_conv.0"]),
        helper.make_node("Mul", ["rows", "none"], ["quiet"]),
        helper.make_node("Unsqueeze", ["present_conv.0", "axes"], ["wide"]),
        helper.make_node("Add", ["wide", "quiet"], ["logits"]),
    ]
    graph = helper.make_graph(
        nodes,
        "recurrent",
        [
            helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["batch", "tokens"]),
            helper.make_tensor_value_info("past_conv.0", TensorProto.FLOAT, ["batch", 4]),
        ],
        [
            helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", "tokens", 4]),
            helper.make_tensor_value_info("present_conv.0", TensorProto.FLOAT, ["batch", 4]),
        ],
        initializer=weights,
    )
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10), directory / "model.onnx"
    )
    return (FIXED,)


def test_a_recurrent_state_starts_at_zero_and_is_read_again_when_a_row_goes_back(tmp_path: Path) -> None:
    """A state of fixed shape cannot be cut: the tokens before the row's start are read once more."""
    backend = CompatibilityBackend(tmp_path, engine_of(write_recurrent(tmp_path), vocab=4))
    expected = {count: run(backend, row(1, 0, [1, 2, 3, 4, 5][:count])) for count in range(1, 6)}
    run(backend, row(0, 0, [1, 2]), row(1, 0, [7, 7, 7]))
    run(backend, row(0, 2, [3, 4]))
    assert np.allclose(run(backend, row(0, 4, [5])), expected[5], atol=1e-5)
    assert np.allclose(run(backend, row(0, 2, [3])), expected[3], atol=1e-5)
    assert np.allclose(run(backend, row(0, 3, [4, 5])), expected[5], atol=1e-5)


# ---- loading -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "states",
    [
        CACHES[:-1],
        (*CACHES, FIXED),
        (*CACHES[:-1], msgspec.structs.replace(CACHES[-1], output="present.9.value")),
    ],
    ids=["an input that is no state", "a state that is no input", "an output that is not there"],
)
def test_a_graph_that_is_not_the_manifests_is_refused(states: tuple[State, ...]) -> None:
    """A damaged version is a StoreError at load, not a failure of somebody's request."""
    with pytest.raises(StoreError, match="not those of its manifest"):
        CompatibilityBackend(LLAMA, engine_of(states))


def test_too_little_memory_is_said_before_anything_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """With what it would take for how many slots."""
    monkeypatch.setattr(module, "memory_available_bytes", lambda: 100 << 20)
    with pytest.raises(MachineError, match=r"KV caches \d+ for 3 slots of 256 tokens"):
        CompatibilityBackend(LLAMA, engine_of())


def test_the_need_grows_with_slots_and_context_and_covers_full_slots() -> None:
    """Every slot filled to its last token, and one more set for the run that writes beside what it reads."""
    engine = engine_of()
    need = memory_need(LLAMA, engine)
    position_bytes = 4 * 2 * 16 * 4  # of four caches of two heads, float32
    assert need.caches >= (SLOTS + 1) * CONTEXT * position_bytes
    longer = msgspec.structs.replace(engine, limits=msgspec.structs.replace(engine.limits, context=2 * CONTEXT))
    assert memory_need(LLAMA, longer).caches == 2 * need.caches
    assert memory_need(LLAMA, longer).workspace > need.workspace


@pytest.mark.parametrize(
    ("name", "dtype", "expected"),
    [
        ("input_ids", np.int64, [[7, 8]]),
        ("position_ids", np.int32, [[5, 6]]),
        ("attention_mask", np.float32, [[1, 1, 1, 1, 1, 1, 1]]),
        ("cache_position", np.int64, [5, 6]),
        ("num_logits_to_keep", np.int64, 1),
        ("logits_to_keep", np.int64, 1),
        ("use_cache_branch", np.bool_, [True]),
    ],
)
def test_step_inputs(name: str, dtype: type, expected: object) -> None:
    """Two tokens after five: each input in the type that the graph wants, and no other input."""
    feeds = step_feeds({name: dtype}, [7, 8], 5)
    assert list(feeds) == [name]
    assert feeds[name].dtype == dtype
    assert np.array_equal(feeds[name], np.array(expected))


def test_the_cache_branch_is_taken_from_the_second_run_on() -> None:
    """A merged decoder's branch without a past is for the first tokens only."""
    assert not step_feeds({"use_cache_branch": np.bool_}, [7], 0)["use_cache_branch"][0]
