"""How an engine worker loads a model that answers in one run: backend, goldens, batcher, loop."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from residentd.backend.encoder import EncoderModel
from residentd.backend.graph import Graph
from residentd.backend.tensor_model import TensorModel
from residentd.core.batching import Batcher, Policy
from residentd.engine.batch_backend import EncoderBackend, TensorBackend
from residentd.engine.batch_loop import BatchLoop
from residentd.engine.batch_probe import probe_rows, probe_tensors
from residentd.engine.link import Checked, FromWorker, Loading, Ready, Start
from residentd.engine.queue_limit import queue_limit
from residentd.errors import AccuracyError, StoreError
from residentd.models.checks import failure_message
from residentd.models.environment import engine_environment
from residentd.models.manifest import Content, Manifest
from residentd.types import Limits

Emit = Callable[[FromWorker], None]
AnyBackend = EncoderBackend | TensorBackend


def load_batches(start: Start, manifest: Manifest, emit: Emit) -> tuple[BatchLoop, AnyBackend, Ready]:
    """Load, prove, and make the loop. Raises ResidentError."""
    started_ns = time.monotonic_ns()
    backend = check_batches(start, manifest, emit)
    limits = manifest.content.engine.limits
    queue = queue_limit(
        manifest.content.kind, limits, tokens_max=start.waiting_tokens_max, bytes_max=start.waiting_bytes_max
    )
    batcher = Batcher(
        Policy(
            run_rows_max=backend.limits.rows_max,
            run_weight_max=backend.limits.weight_max,
            waiting_max=start.waiting_max + limits.slots,
            waiting_weight_max=queue.most,
            retries_max=start.retries_max,
        )
    )
    loop = BatchLoop(backend=backend, batcher=batcher, clock_ns=time.monotonic_ns, emit=emit)
    shown = Limits(limits.slots, limits.context, limits.step_tokens_max, limits.vocab)
    return loop, backend, Ready(limits=shown, load_ms=(time.monotonic_ns() - started_ns) // 1_000_000)


def check_batches(start: Start, manifest: Manifest, emit: Emit) -> AnyBackend:
    """The loaded backend, after its goldens. Raises AccuracyError where a worker that is to serve misses them."""
    emit(Loading(stage="loading the engine"))
    backend = open_batch_backend(
        manifest.content, Path(start.version_dir), threads=start.threads, spin_us=start.spin_us
    )
    emit(Loading(stage="replaying the goldens"))
    if isinstance(backend, EncoderBackend):
        parts = probe_rows(backend.model, backend.limits.rows_max)
    else:
        parts = probe_tensors(backend.model)
    emit(Checked(parts=parts, environment=engine_environment()))
    failure = failure_message(parts, ())
    if failure and start.purpose == "serve":
        raise AccuracyError(failure)
    return backend


def open_batch_backend(content: Content, directory: Path, *, threads: int, spin_us: int) -> AnyBackend:
    """The backend that `content` was built for. Runtimes are imported here, so a worker loads only its own."""
    engine = content.engine
    has_arena = content.encoder is not None
    graph = _open_graph(engine.target, directory / engine.path, threads=threads, spin_us=spin_us, has_arena=has_arena)
    if content.encoder is not None:
        return EncoderBackend(EncoderModel(content.encoder, graph), engine.limits)
    if content.tensors is not None:
        return TensorBackend(TensorModel(content.tensors, graph), engine.limits)
    raise StoreError(f"the manifest says {content.kind} and not how. Install the version again")


def _open_graph(target: str, path: Path, *, threads: int, spin_us: int, has_arena: bool) -> Graph:
    if target == "reference":
        from residentd.backend import reference_graph  # noqa: PLC0415

        return reference_graph.load(path)
    from residentd.backend.onnxruntime import RuntimeOptions  # noqa: PLC0415
    from residentd.backend.onnxruntime_graph import OnnxRuntimeGraph  # noqa: PLC0415

    return OnnxRuntimeGraph(path, RuntimeOptions(threads=threads, spin_us=spin_us), has_arena=has_arena)
