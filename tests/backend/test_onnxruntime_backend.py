from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from residentd.backend import onnxruntime as module
from residentd.backend.onnxruntime import (
    MIB,
    PADDED_FACTOR,
    THREADS_MAX,
    WORKSPACE_BYTES,
    MemoryNeed,
    OnnxRuntimeBackend,
    RuntimeOptions,
    memory_available_bytes,
    memory_need,
    physical_cores,
)
from residentd.errors import BackendLostError, MachineError, StepRetryableError, StoreError
from residentd.models.manifest import Engine, EngineLimits
from residentd.types import Limits, RequestId, Row, StepPlan
from support.tiny_engine import (
    CONTEXT,
    DIM,
    FILE_NAME,
    KV_HEADS,
    LAYERS,
    VOCAB,
    tiny_engine,
    tiny_logits,
    write_tiny_engine,
)

SLOTS = 4
TOLERANCE = 2e-4
"""|logit| stays below 50; 4 matrix products deep, of 64 terms each: 50 · 256 · 2^-24 = 8e-4 at the worst, 2e-5 seen."""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("engine")
    write_tiny_engine(path)
    return path


@pytest.fixture(scope="module")
def backend(directory: Path) -> OnnxRuntimeBackend:
    return OnnxRuntimeBackend(directory, tiny_engine())


def row(slot: int, start: int, tokens: tuple[int, ...], *, samples: bool = True) -> Row:
    return Row(RequestId(slot), slot, start, tokens, samples)


def poison(backend: OnnxRuntimeBackend) -> None:
    for cache in backend.caches:
        cache.fill(np.nan)


def solo(backend: OnnxRuntimeBackend, tokens: tuple[int, ...], slot: int = 0) -> np.ndarray:
    """Logits after `tokens` with nothing else in the step, in chunks of at most step_tokens_max."""
    size = backend.limits.step_tokens_max
    for start in range(0, len(tokens), size):
        logits = backend.step(StepPlan(0, (row(slot, start, tokens[start : start + size]),)))
    return logits[0].copy()


Schedule = tuple[list[tuple[int, ...]], list[tuple[Row, ...]]]


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    """The sequence of each slot, and steps that bring all of them in: ragged, mixed, in any order, cut anywhere."""
    numbers = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    lengths = draw(st.lists(st.integers(0, CONTEXT), min_size=SLOTS, max_size=SLOTS).filter(any))
    sequences = [tuple(int(token) for token in numbers.integers(0, VOCAB, length)) for length in lengths]
    done = [0] * SLOTS
    plans = []
    while any(count < length for count, length in zip(done, lengths, strict=True)):
        rows = []
        for slot in draw(st.permutations(range(SLOTS))):
            chunk = sequences[slot][done[slot] : done[slot] + draw(st.sampled_from([8, 2, 1, 1, 0]))]
            if chunk:
                is_last = done[slot] + len(chunk) == lengths[slot]
                rows.append(row(slot, done[slot], chunk, samples=is_last or bool(numbers.integers(2))))
                done[slot] += len(chunk)
        if rows:
            plans.append(tuple(rows))
    return sequences, plans


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=schedules())
def test_any_schedule_agrees_with_numpy(backend: OnnxRuntimeBackend, case: Schedule) -> None:
    """Ragged, mixed, chunked steps in any slots over a cache of NaN: each sampling row's logits are the whole-sequence
    float64 model's, in the plan's order.
    """
    sequences, plans = case
    poison(backend)
    for rows in plans:
        logits = backend.step(StepPlan(0, rows))
        sampling = [entry for entry in rows if entry.samples]
        assert logits.shape == (len(sampling), VOCAB)
        for entry, found in zip(sampling, logits, strict=True):
            history = sequences[entry.slot][: entry.start + len(entry.tokens)]
            np.testing.assert_allclose(found, tiny_logits(history), rtol=0, atol=TOLERANCE)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=schedules())
def test_exact_answers_depend_on_the_history_alone(backend: OnnxRuntimeBackend, case: Schedule) -> None:
    """Bit for bit, the logits of any schedule are those of the sequence alone: neighbours, slots, cuts and splits of a
    step do not show. This is what lets a resumed answer go on exactly.
    """
    sequences, plans = case
    expected = {slot: solo(backend, tokens) for slot, tokens in enumerate(sequences) if tokens}
    poison(backend)
    found = {}
    for rows in plans:
        logits = backend.step(StepPlan(0, rows))
        for entry, line in zip((entry for entry in rows if entry.samples), logits, strict=True):
            if entry.start + len(entry.tokens) == len(sequences[entry.slot]):
                found[entry.slot] = line.copy()
    assert found.keys() == expected.keys()
    for slot, logits in expected.items():
        np.testing.assert_array_equal(found[slot], logits)


def test_without_exact_decoding_rounds_differently(directory: Path) -> None:
    """The planted bug of the test above: one query is another kernel than several, so the bits do differ."""
    backend = OnnxRuntimeBackend(directory, tiny_engine(), options=RuntimeOptions(exact=False))
    tokens = tuple(index % VOCAB for index in range(0, 7 * CONTEXT, 7))
    whole = solo(backend, tokens)
    for start, token in enumerate(tokens):
        decoded = backend.step(StepPlan(0, (row(0, start, (token,)),)))[0].copy()
    assert 0 < np.abs(decoded - whole).max() < TOLERANCE


def test_the_last_position_of_a_slot_is_used_beside_a_wide_chunk(backend: OnnxRuntimeBackend) -> None:
    """A row at its context's end beside a chunk whose padding cannot fit behind it: two runs, answered in order."""
    tokens = tuple((index * 5 + 1) % VOCAB for index in range(CONTEXT))
    chunk = tuple(range(20))
    expected = {slot: solo(backend, sequence, slot) for slot, sequence in ((0, tokens), (1, chunk), (2, tokens))}
    poison(backend)
    for slot in (0, 2):
        solo(backend, tokens[:-1], slot)
    last = CONTEXT - 1
    plan = StepPlan(0, (row(2, last, tokens[last:]), row(1, 0, chunk), row(0, last, tokens[last:])))
    logits = backend.step(plan)
    for line, slot in zip(logits, (2, 1, 0), strict=True):
        np.testing.assert_array_equal(line, expected[slot])


def test_other_slots_and_later_positions_are_left_alone(backend: OnnxRuntimeBackend) -> None:
    """A step writes its rows' positions, one repeated query behind a single token, and nothing else."""
    for cache in backend.caches:
        cache.fill(7.5)
    backend.step(StepPlan(0, (row(1, 3, (5, 6, 7)), row(3, 9, (8,)))))
    for cache in backend.caches:
        written = np.argwhere((cache != 7.5).any(axis=(1, 3)))
        assert {tuple(map(int, place)) for place in written} == {(1, 3), (1, 4), (1, 5), (3, 9), (3, 10)}


def test_a_step_without_sampling_rows_yields_no_logits(backend: OnnxRuntimeBackend) -> None:
    """A mid-prefill chunk alone costs no head, and its K/V count all the same."""
    expected = solo(backend, (1, 2, 3, 4))
    poison(backend)
    assert backend.step(StepPlan(0, (row(2, 0, (1, 2, 3), samples=False),))).shape == (0, VOCAB)
    np.testing.assert_array_equal(backend.step(StepPlan(0, (row(2, 3, (4,)),)))[0], expected)


def test_steady_decoding_binds_nothing_again(backend: OnnxRuntimeBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of one shape reuse every binding, and still read the new step's numbers."""
    first = backend.step(StepPlan(0, (row(0, 0, (1,)), row(1, 0, (2,))))).copy()
    bound: list[str] = []
    real = module._bind_input
    monkeypatch.setattr(module, "_bind_input", lambda io, name, array: (bound.append(name), real(io, name, array)))
    second = backend.step(StepPlan(1, (row(0, 0, (2,)), row(1, 0, (1,)))))
    assert bound == []
    np.testing.assert_array_equal(second, first[::-1])
    backend.step(StepPlan(2, (row(0, 1, (1, 2, 3)), row(1, 1, (2,)))))
    assert set(bound) == {"input_ids", "position_ids", "pack_index", "unpack_index"}


def test_an_engine_may_do_without_positions(tmp_path: Path) -> None:
    """position_ids is fed only to a graph that has it."""
    engine = write_tiny_engine(tmp_path, has_positions=False)
    backend = OnnxRuntimeBackend(tmp_path, engine)
    tokens = (5, 4, 3, 2)
    np.testing.assert_allclose(solo(backend, tokens), tiny_logits(tokens, has_positions=False), rtol=0, atol=TOLERANCE)


def test_limits_are_those_of_the_manifest(backend: OnnxRuntimeBackend) -> None:
    """The loop plans by what the backend says."""
    assert backend.limits == Limits(slots=SLOTS, capacity=CONTEXT, step_tokens_max=32, vocab=VOCAB)


def test_a_foreign_graph_is_refused_with_its_names(tmp_path: Path) -> None:
    """A graph whose inputs are not the contract's is a StoreError before any memory is taken."""
    write_tiny_engine(tmp_path)
    model = onnx.load(tmp_path / FILE_NAME)
    model.graph.input.append(onnx.helper.make_tensor_value_info("attention_mask", onnx.TensorProto.INT64, [1]))
    onnx.save(model, tmp_path / FILE_NAME)
    with pytest.raises(StoreError, match="not those of its manifest \\(attention_mask\\)"):
        OnnxRuntimeBackend(tmp_path, tiny_engine())
    missing = tiny_engine()
    with pytest.raises(StoreError, match=r"past_key_values\.0\.key"):
        OnnxRuntimeBackend(tmp_path, msgspec.structs.replace(missing, caches=missing.caches[1:]))


def test_a_damaged_graph_is_explained(tmp_path: Path) -> None:
    """Bytes that are no model name the runtime, its version and the way out."""
    (tmp_path / FILE_NAME).write_bytes(b"not a model")
    with pytest.raises(
        MachineError, match=r"ONNX Runtime 1\.\d+.* cannot load the engine: .*Install the version again"
    ):
        OnnxRuntimeBackend(tmp_path, tiny_engine())


def test_an_old_runtime_is_refused_by_both_versions(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without query_seqlens in the kernel's schema nothing is loaded; the message names what is there and needed."""
    without = [schema for schema in module.get_all_operator_schema() if schema.name != "GroupQueryAttention"]
    monkeypatch.setattr(module, "get_all_operator_schema", lambda: without)
    with pytest.raises(MachineError, match=r"needs ONNX Runtime 1\.32 or newer .*; 1\.\d+\.\d+ is installed"):
        OnnxRuntimeBackend(directory, tiny_engine())


def test_a_missing_runtime_is_explained() -> None:
    """Without the onnxruntime package the module says what to install, as an error of the tree."""
    program = (
        "import sys; sys.modules['onnxruntime'] = None\n"
        "from residentd.errors import MachineError\n"
        "try:\n    import residentd.backend.onnxruntime\n"
        "except MachineError as error:\n    print(error)\n"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.startswith("this version runs on ONNX Runtime, which is not installed. Install")


def test_compatibility_mode_is_refused(directory: Path) -> None:
    """What this backend cannot run is said at load, not at the first step."""
    engine = msgspec.structs.replace(tiny_engine(), mode="compatibility")
    with pytest.raises(MachineError, match="compatibility mode"):
        OnnxRuntimeBackend(directory, engine)


@pytest.mark.parametrize(
    ("threads", "is_allowed"), [(-1, False), (1, True), (THREADS_MAX, True), (THREADS_MAX + 1, False)]
)
def test_threads_are_limited(directory: Path, threads: int, *, is_allowed: bool) -> None:
    """0 to THREADS_MAX; more is a setting gone wrong."""
    options = RuntimeOptions(threads=threads)
    if is_allowed:
        OnnxRuntimeBackend(directory, tiny_engine(), options=options).close()
    else:
        with pytest.raises(MachineError, match=f"threads is {threads}"):
            OnnxRuntimeBackend(directory, tiny_engine(), options=options)


class FailingSession:
    """A session whose next run fails, once the real one has been loaded."""

    def __init__(self, real: Any, error: Exception) -> None:
        self.real, self.error = real, error

    def io_binding(self) -> Any:
        return self.real.io_binding()

    def run_with_iobinding(self, _binding: Any) -> None:
        raise self.error


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RuntimeError("Non-zero status code\nat a path"), BackendLostError),
        (ValueError("input"), BackendLostError),
        (RuntimeError("std::bad_alloc"), StepRetryableError),
        (RuntimeError("bfc_arena: Failed to allocate memory for requested buffer of size 99"), StepRetryableError),
        (MemoryError(), StepRetryableError),
    ],
)
def test_errors_of_the_runtime_are_classed(directory: Path, error: Exception, expected: type[Exception]) -> None:
    """Out of memory may pass and can be tried again; everything else ends the backend. One line of text each."""
    backend = OnnxRuntimeBackend(directory, tiny_engine())
    backend._session = FailingSession(backend._session, error)
    with pytest.raises(expected) as caught:
        backend.step(StepPlan(17, (row(0, 0, (1,)),)))
    assert "step 17" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.__cause__ is error


def test_a_refusal_of_the_real_runtime_is_a_lost_backend(directory: Path) -> None:
    """A token outside the vocabulary reaches the runtime's own checks; its message comes back in ours."""
    backend = OnnxRuntimeBackend(directory, tiny_engine())
    with pytest.raises(BackendLostError, match=r"step 3 .*Gather"):
        backend.step(StepPlan(3, (row(0, 0, (VOCAB,)),)))


def test_memory_need_is_the_sum_of_its_parts(tmp_path: Path) -> None:
    """Caches: slots · (context + 1) · heads · dim · bytes for each of K and V of each layer; logits: slots · vocab."""
    (tmp_path / FILE_NAME).write_bytes(b"x" * 1000)
    need = memory_need(tmp_path, tiny_engine())
    assert need.caches == SLOTS * (CONTEXT + 1) * KV_HEADS * DIM * 4 * 2 * LAYERS
    assert need.logits == SLOTS * VOCAB * 4
    assert need.weights == 1300
    assert need.workspace == WORKSPACE_BYTES + SLOTS * 32 * KV_HEADS * DIM * PADDED_FACTOR * 4
    assert need.total == need.caches + need.logits + need.weights + need.workspace


@pytest.mark.parametrize(("precision", "weights"), [("fp32", 1300), ("int8", 1300), ("fp16", 2600), ("bf16", 2600)])
def test_weights_in_16_bits_are_reckoned_as_they_are_widened(tmp_path: Path, precision: str, weights: int) -> None:
    """ONNX Runtime turns them into float32 at load, beside the file that it reads."""
    (tmp_path / FILE_NAME).write_bytes(b"x" * 1000)
    assert memory_need(tmp_path, msgspec.structs.replace(tiny_engine(), precision=precision)).weights == weights


def test_caches_take_what_was_reckoned(backend: OnnxRuntimeBackend, directory: Path) -> None:
    """The estimate and the allocation are the same number."""
    assert sum(cache.nbytes for cache in backend.caches) == memory_need(directory, tiny_engine()).caches


def test_too_little_memory_is_refused_with_arithmetic() -> None:
    """Exactly enough loads; one byte less says every part, the shortfall and a context that would fit."""
    engine = msgspec.structs.replace(
        tiny_engine(), limits=EngineLimits(slots=16, context=2048, step_tokens_max=512, vocab=VOCAB)
    )
    need = MemoryNeed(weights=100 * MIB, caches=1024 * MIB, logits=3 * MIB, workspace=256 * MIB)
    module.check_memory(engine, need, need.total)
    with pytest.raises(MachineError) as caught:
        module.check_memory(engine, need, 1000 * MIB)
    assert str(caught.value) == (
        "loading needs 1,383 MiB (weights 100, KV caches 1,024 for 16 slots of 2,048 tokens, logits 3, working space "
        "256); 1,000 MiB are available, 384 MiB too few. Unload another model, install it with --context 1280 or fewer "
        "--slots, or add memory"
    )
    with pytest.raises(MachineError, match="Unload another model, or add memory"):
        module.check_memory(engine, need, 100 * MIB)


def test_the_check_is_made_before_loading(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without the memory refuses before the session exists."""
    monkeypatch.setattr(module, "memory_available_bytes", lambda: 0)
    monkeypatch.setattr(module, "open_session", lambda *_: pytest.fail("the session was made"))
    with pytest.raises(MachineError, match="0 MiB are available"):
        OnnxRuntimeBackend(directory, tiny_engine())


def test_available_memory_is_the_kernels_estimate(tmp_path: Path) -> None:
    """MemAvailable, in kB; a kernel without it is explained."""
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:       24000000 kB\nMemFree:  5 kB\nMemAvailable:   12345 kB\n")
    assert memory_available_bytes(meminfo) == 12345 * 1024
    meminfo.write_text("MemTotal: 1 kB\n")
    with pytest.raises(MachineError, match="MemAvailable"):
        memory_available_bytes(meminfo)


@pytest.mark.parametrize(
    ("cores", "expected"),
    [
        pytest.param({0: ("0", "0"), 1: ("0", "1")}, 2, id="no hyperthreads"),
        pytest.param({0: ("0", "0"), 1: ("0", "1"), 2: ("0", "0"), 3: ("0", "1")}, 2, id="hyperthreads"),
        pytest.param({0: ("0", "0"), 1: ("1", "0")}, 2, id="two sockets"),
        pytest.param({0: None, 1: None, 2: None}, 3, id="unknown"),
        pytest.param({}, 1, id="none"),
    ],
)
def test_physical_cores(tmp_path: Path, cores: dict[int, tuple[str, str] | None], expected: int) -> None:
    """Hyperthreads of one core count once; cores of two sockets count twice; unknown ones count each."""
    for cpu, place in cores.items():
        if place is not None:
            folder = tmp_path / f"cpu{cpu}" / "topology"
            folder.mkdir(parents=True)
            (folder / "physical_package_id").write_text(place[0])
            (folder / "core_id").write_text(place[1])
    assert physical_cores(cores, tmp_path) == expected


def test_a_cache_type_without_a_cpu_kernel_is_refused(directory: Path) -> None:
    """bfloat16 caches are for another target; the way out is named."""
    engine: Engine = tiny_engine()
    cache = msgspec.structs.replace(engine.caches[0], dtype="bfloat16")
    with pytest.raises(MachineError, match="bfloat16 cannot be run on the CPU"):
        OnnxRuntimeBackend(directory, msgspec.structs.replace(engine, caches=(cache, *engine.caches[1:])))
