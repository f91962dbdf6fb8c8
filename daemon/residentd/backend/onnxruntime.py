"""Engines in the canonical packed form on ONNX Runtime's CPU provider.

Inputs  (T new tokens, of which R yield logits; B slots from slot 0; at most S new tokens a slot):
    input_ids, position_ids int64 [1, T]     query_lengths, seqlens_k int32 [B]     pack_index int64 [B, S]
    unpack_index int64 [T]     logits_index int64 [R]     total_sequence_length int32 []: the capacity C
    past_key_values.N.key / .value [B, heads, C, dim]; C is the context plus 1
Outputs logits float32 [R, vocab], and the caches again, bound to the memory of the inputs.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from residentd.backend.base import Logits
from residentd.backend.messages import is_lack_of_memory, plain
from residentd.backend.steps import StepArranger, StepArrays, runs_that_fit
from residentd.errors import BackendLostError, MachineError, StepRetryableError, StoreError
from residentd.models.environment import read_processor
from residentd.models.manifest import CacheTensor, Engine
from residentd.types import Limits, Row, StepPlan

try:
    import onnxruntime as ort
    from onnxruntime.capi.onnxruntime_pybind11_state import get_all_operator_schema
except ImportError as missing:
    raise MachineError(
        "this version runs on ONNX Runtime, which is not installed. Install residentd with its cpu extra"
    ) from missing

ORT_VERSION_MIN = "1.32"
THREADS_MAX = 256
MIB = 1 << 20
LOAD_PEAK_FACTOR = 1.3  # 698 MiB peak for 540 MB of weights while packing them (onnxruntime 1.32.0, 2026-12)
WIDENED_PEAK_FACTOR = 2.6  # of weights in 16 bits, which are widened at load: 630 MiB for 257 MiB of files (same)
WORKSPACE_BYTES = 128 * MIB  # activations of a 512-token step of a 135M model took 57 MiB (same)
PADDED_FACTOR = 12  # KV widths of padded queries, keys, values and outputs, up to 5 query heads a KV head

STEP_INPUTS = (
    "input_ids",
    "position_ids",
    "pack_index",
    "unpack_index",
    "query_lengths",
    "seqlens_k",
    "logits_index",
)
OPTIONAL_INPUTS = frozenset({"position_ids"})  # a graph that computes no position from it does not have it
CAPACITY_INPUT = "total_sequence_length"
LOGITS_OUTPUT = "logits"
CACHE_DTYPES: Mapping[str, type[np.floating[Any]]] = MappingProxyType({"float32": np.float32, "float16": np.float16})
VNNI_FLAGS = frozenset({"avx512_vnni", "avx_vnni"})

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class RuntimeOptions:
    """threads 0: one for each physical core that this process may use.

    spin_us: how long a compute thread without work spins within a step before it sleeps; it never spins between steps.
    50 makes a decode step 10 to 15 % shorter (SmolLM2-135M, 2 cores, onnxruntime 1.32.0, 2026-12); more gains nothing
    and costs much where other processes want the cores.

    exact: a row's logits do not depend, to the bit, on its neighbours or on how its history was cut into steps, so that
    an answer resumed after a lost worker goes on as it would have (fp32). Costs 5 % of a decode step of 8 rows, and
    12 % of one of 16 rows at 800 tokens of context (CPU time, SmolLM2-135M, onnxruntime 1.32.0, 2026-12).

    packs: matrices are copied into the order that the kernels read best, as serving wants it. Without, weights stay in
    the mapping of their file and take no memory of the process: float32 products give the same to rounding, in up to
    three times the time.
    """

    threads: int = 0
    spin_us: int = 50
    exact: bool = True
    packs: bool = True


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """Bytes that a loaded engine takes at its peak."""

    weights: int
    caches: int
    logits: int
    workspace: int

    @property
    def total(self) -> int:
        return self.weights + self.caches + self.logits + self.workspace


class OnnxRuntimeBackend:
    """One loaded engine and its KV caches. Used by one thread; implements backend.base.Backend."""

    def __init__(self, directory: Path, engine: Engine, *, options: RuntimeOptions | None = None) -> None:
        """Load `engine` from the version's `directory`. Raises MachineError or StoreError before anything is held."""
        limits = engine.limits
        _check_supported(engine)
        options = options or RuntimeOptions()
        check_memory(engine, memory_need(directory, engine, options), memory_available_bytes())
        self._limits = Limits(limits.slots, limits.context, limits.step_tokens_max, limits.vocab)
        self._session = open_session(directory / engine.path, options)
        self._inputs = _step_inputs(self._session, engine)
        self._exact = options.exact
        self._arranger = StepArranger(self._limits, exact=self._exact)
        self._positions = limits.context + 1  # the last is for a repeated query at the context's end; nobody reads it
        self._caches = {cache.input: _cache_memory(cache, limits.slots, self._positions) for cache in engine.caches}
        self._cache_names = {cache.input: cache.output for cache in engine.caches}
        self._capacity = np.array(self._positions, np.int32)
        self._logits = np.zeros((limits.slots, limits.vocab), np.float32)
        self._bindings: dict[int, _Binding] = {}  # by B, so at most one a slot

    @property
    def limits(self) -> Limits:
        return self._limits

    @property
    def caches(self) -> tuple[Array, ...]:
        """The cache memory itself, [slots, heads, capacity + 1, dim] each: for verification, which poisons it."""
        return tuple(self._caches.values())

    def step(self, plan: StepPlan) -> Logits:
        runs = runs_that_fit(plan.rows, self._positions, exact=self._exact)
        try:
            if len(runs) == 1:
                return self._run(plan.rows)
            return self._run_in_turn(plan.rows, runs)
        except AssertionError:
            raise
        except Exception as error:
            raise step_error(plan, error) from error

    def _run(self, rows: Sequence[Row]) -> Logits:
        arrays = self._arranger.arrange(rows)
        binding = self._bindings.get(arrays.slots_used) or self._bind_caches(arrays.slots_used)
        logits = self._logits[: arrays.logits_index.size]
        binding.update(arrays, self._inputs, logits)
        self._session.run_with_iobinding(binding.io)
        return logits

    def _run_in_turn(self, rows: Sequence[Row], runs: Sequence[Sequence[Row]]) -> Logits:
        parts = [self._run(run).copy() for run in runs]
        sampling = {row.slot: index for index, row in enumerate(row for row in rows if row.samples)}
        logits = self._logits[: len(sampling)]
        for run, part in zip(runs, parts, strict=True):
            logits[[sampling[row.slot] for row in run if row.samples]] = part
        return logits

    def close(self) -> None:
        """Release the memory. The backend cannot be used afterwards."""
        self._bindings.clear()
        self._caches.clear()
        del self._session

    def _bind_caches(self, slots: int) -> _Binding:
        binding = _Binding(self._session.io_binding())
        for name, memory in self._caches.items():
            value = ort.OrtValue.ortvalue_from_numpy(memory[:slots])
            assert value.data_ptr() == memory.ctypes.data, "ONNX Runtime copied a cache instead of sharing it"
            binding.io.bind_ortvalue_input(name, value)
            binding.io.bind_ortvalue_output(self._cache_names[name], value)
        _bind_input(binding.io, CAPACITY_INPUT, self._capacity)
        self._bindings[slots] = binding
        return binding


class _Binding:
    """ONNX Runtime's view of our memory for one B. An array is bound again only when its shape changes: 15 µs each."""

    def __init__(self, io: Any) -> None:
        self.io = io
        self._shapes: dict[str, tuple[int, ...]] = {}

    def update(self, arrays: StepArrays, inputs: Iterable[str], logits: Logits) -> None:
        for name in inputs:
            array: Array = getattr(arrays, name)
            if self._shapes.get(name) != array.shape:
                _bind_input(self.io, name, array)
                self._shapes[name] = array.shape
        if self._shapes.get(LOGITS_OUTPUT) != logits.shape:
            self.io.bind_output(LOGITS_OUTPUT, "cpu", 0, np.float32, logits.shape, logits.ctypes.data)
            self._shapes[LOGITS_OUTPUT] = logits.shape


def memory_need(directory: Path, engine: Engine, options: RuntimeOptions | None = None) -> MemoryNeed:
    """What loading `engine` takes, from the sizes of its files and its limits."""
    limits = engine.limits
    positions = limits.slots * (limits.context + 1)
    widest = max((cache.heads * cache.dim for cache in engine.caches), default=0)
    return MemoryNeed(
        weights=weights_need(directory, engine, options),
        caches=sum(positions * cache.heads * cache.dim * _dtype(cache)().itemsize for cache in engine.caches),
        logits=limits.slots * limits.vocab * 4,
        workspace=WORKSPACE_BYTES + limits.slots * limits.step_tokens_max * widest * PADDED_FACTOR * 4,
    )


def weights_need(directory: Path, engine: Engine, options: RuntimeOptions | None = None) -> int:
    """Bytes at the peak of loading the files beside the engine's graph; none where they stay mapped."""
    if options is not None and not options.packs:
        return 0
    files = sum(path.stat().st_size for path in (directory / engine.path).parent.iterdir() if path.is_file())
    return int(files * (WIDENED_PEAK_FACTOR if engine.precision in {"fp16", "bf16"} else LOAD_PEAK_FACTOR))


def memory_available_bytes(meminfo: Path = Path("/proc/meminfo")) -> int:
    """MemAvailable: what can be allocated without swapping (proc(5))."""
    for line in meminfo.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise MachineError("/proc/meminfo has no MemAvailable line. Linux 3.14 or newer is needed")


def physical_cores(cpus: Iterable[int], topology: Path = Path("/sys/devices/system/cpu")) -> int:
    """Distinct cores among the logical `cpus`; where the kernel does not say, each counts as one."""
    return max(1, len({_core_of(cpu, topology) for cpu in cpus}))


def _core_of(cpu: int, topology: Path) -> tuple[str, ...]:
    folder = topology / f"cpu{cpu}" / "topology"
    try:
        return ((folder / "physical_package_id").read_text(), (folder / "core_id").read_text())
    except OSError:
        return (str(cpu),)


def session_options(options: RuntimeOptions | None = None) -> Any:
    """ONNX Runtime's session options, the same for engines and for the export that they are compared with."""
    options = options or RuntimeOptions()
    if not 0 <= options.threads <= THREADS_MAX:
        raise MachineError(
            f"threads is {options.threads}; 0 (automatic) to {THREADS_MAX} are possible. Change the setting"
        )
    settings = ort.SessionOptions()
    settings.intra_op_num_threads = options.threads or physical_cores(os.sched_getaffinity(0))
    settings.inter_op_num_threads = 1
    settings.execution_mode = ort.ExecutionMode.ORT_SEQUENTIAL
    settings.log_severity_level = 4  # its exceptions carry the same text
    settings.enable_mem_pattern = False  # ONNX Runtime keeps one plan a shape, and nearly every step has its own shape
    settings.add_session_config_entry("session.intra_op.allow_spinning", str(int(options.spin_us > 0)))
    if options.spin_us > 0:
        settings.add_session_config_entry("session.intra_op.spin_duration_us", str(options.spin_us))
        settings.add_session_config_entry("session.force_spinning_stop", "1")
    if not options.packs:
        settings.add_session_config_entry("session.disable_prepacking", "1")
    if not has_vnni():
        # There uint8 times int8 saturates in 16 bits. Told so, ONNX Runtime makes the weights uint8 at load, which is
        # exact (tried on an emulated AVX2 processor). With VNNI it would do so too, and take twice as long.
        settings.add_session_config_entry("session.x64quantprecision", "1")
    # Not session.set_denormal_as_zero: it switches the calling thread for good, and our sampling with it.
    return settings


def has_vnni(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether this x86 processor adds products of 8 bits up in 32 bits at once; false for any other kind."""
    return not VNNI_FLAGS.isdisjoint(read_processor(cpuinfo).flags)


def new_session(path: Path, options: RuntimeOptions, *, keeps_memory: bool = True) -> Any:
    """The session of any ONNX file. Raises whatever ONNX Runtime says.

    keeps_memory: what a run frees stays for the next. Without, tensors whose sizes never repeat leave no gaps.
    """
    settings = session_options(options)
    settings.enable_cpu_mem_arena = keeps_memory
    # A weight that is transposed or cast before its use would be folded into memory of the process.
    unwanted = [] if options.packs else ["ConstantFolding"]
    return ort.InferenceSession(str(path), settings, providers=["CPUExecutionProvider"], disabled_optimizers=unwanted)


def open_session(path: Path, options: RuntimeOptions, *, keeps_memory: bool = True) -> Any:
    """`new_session` of an engine's file. Raises MachineError."""
    try:
        return new_session(path, options, keeps_memory=keeps_memory)
    except MachineError:
        raise
    except Exception as error:
        raise MachineError(
            f"ONNX Runtime {ort.__version__} cannot load the engine: {plain(error)}. Install the version again"
        ) from error


def _step_inputs(session: Any, engine: Engine) -> tuple[str, ...]:
    """The step inputs that the graph has. Raises StoreError when its names are not the contract's."""
    present = {value.name for value in session.get_inputs()}
    expected = {*STEP_INPUTS, CAPACITY_INPUT, *(cache.input for cache in engine.caches)}
    wrong = (expected - present - OPTIONAL_INPUTS) | (present - expected)
    outputs = {value.name for value in session.get_outputs()}
    wrong |= outputs ^ {LOGITS_OUTPUT, *(cache.output for cache in engine.caches)}
    if wrong:
        raise StoreError(
            f"the engine's inputs and outputs are not those of its manifest ({', '.join(sorted(wrong)[:8])}). "
            "Install the version again"
        )
    return tuple(name for name in STEP_INPUTS if name in present)


def _check_supported(engine: Engine) -> None:
    if engine.mode != "canonical":
        raise MachineError(f"the engine is in {engine.mode} mode, which this residentd cannot run. Upgrade residentd")
    if not _has_query_lengths():
        raise MachineError(
            f"this version needs ONNX Runtime {ORT_VERSION_MIN} or newer (GroupQueryAttention with query_seqlens); "
            f"{ort.__version__} is installed. Upgrade onnxruntime"
        )


def _has_query_lengths() -> bool:
    """Whether the installed GroupQueryAttention takes query_seqlens: its schema knows, whatever the version."""
    schemas = (schema for schema in get_all_operator_schema() if schema.name == "GroupQueryAttention")
    return any(value.name == "query_seqlens" for schema in schemas for value in schema.inputs)


def check_memory(engine: Engine, need: MemoryNeed, available: int) -> None:
    """Raise MachineError, with what would fit, if `need` is more than the `available` bytes."""
    if need.total <= available:
        return
    limits = engine.limits
    fits = (available - need.total + need.caches) * limits.context // max(need.caches, 1) // 64 * 64
    smaller = f"install it with --context {fits} or fewer --slots, " if fits > 0 else ""
    parts = (
        f"weights {need.weights // MIB:,}, KV caches {need.caches // MIB:,} for {limits.slots} slots of "
        f"{limits.context:,} tokens, logits {need.logits // MIB:,}, working space {need.workspace // MIB:,}"
    )
    raise MachineError(
        f"loading needs {need.total // MIB:,} MiB ({parts}); {available // MIB:,} MiB are available, "
        f"{(need.total - available) // MIB + 1:,} MiB too few. Unload another model, {smaller}or add memory"
    )


def _cache_memory(cache: CacheTensor, slots: int, positions: int) -> Array:
    # Filled, not only reserved: a machine without the memory refuses here, not in the middle of somebody's answer.
    return np.full((slots, cache.heads, positions, cache.dim), 0, _dtype(cache))


def _dtype(cache: CacheTensor) -> type[np.floating[Any]]:
    dtype = CACHE_DTYPES.get(cache.dtype)
    if dtype is None:
        raise MachineError(f"KV caches of {cache.dtype} cannot be run on the CPU. Install the version as fp32")
    return dtype


def _bind_input(io: Any, name: str, array: Array) -> None:
    io.bind_input(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)


def step_error(plan: StepPlan, error: Exception) -> MachineError:
    """Out of memory may pass, and K/V written so far lie beyond every row's start; anything else ends the backend."""
    text = plain(error)
    if is_lack_of_memory(error):
        return StepRetryableError(f"step {plan.step} of {plan.tokens_count} tokens ran out of memory ({text})")
    return BackendLostError(f"ONNX Runtime failed in step {plan.step} ({text})")
