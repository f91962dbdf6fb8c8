"""One model version and its engine worker: started, watched, replaced; every live request carried over.

States:
    STOPPED -> LOADING -> READY -> (worker lost) -> LOADING -> … -> FAILED when the restart budget is used up
    READY or LOADING -> DRAINING -> STOPPED
While LOADING after a loss, live requests wait; they are submitted again, oldest first, when the new worker is READY.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import os
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final, Literal

import structlog

from residentd.config import Config
from residentd.engine.link import (
    Cancel,
    Checked,
    Events,
    Failed,
    FrameReader,
    FromWorker,
    Loading,
    Ping,
    Pong,
    Ready,
    Results,
    Start,
    Stop,
    ToWorker,
    decode_from_worker,
    encode,
)
from residentd.engine.queue_limit import QueueLimit, queue_limit
from residentd.errors import LinkError, OverloadedError, UnavailableError
from residentd.models.manifest import Manifest
from residentd.supervisor.asked import Asked
from residentd.supervisor.generation import Generation
from residentd.supervisor.stats import EngineStats
from residentd.supervisor.work import Work
from residentd.types import Finish, Finished, RequestId, Sampled

RECEIVE_BYTES: Final = 1 << 18
BACKOFF_MAX_S: Final = 10.0
WATCH_PERIOD_S: Final = 0.25
PING_PERIOD_S: Final = 15.0
STOP_GRACE_S: Final = 2.0

HUGE_PAGES: Final = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
"""Weights on huge pages: 2 to 3 % off a step (SmolLM2-135M, 2 cores, 2026-12). An operator's own value wins."""

log = structlog.get_logger("residentd.host")


class State(enum.StrEnum):
    STOPPED = "stopped"
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    FAILED = "failed"


class EngineHost:
    """The daemon's end of one engine worker. Everything here runs on the daemon's event loop.

    `on_checked` judges what every worker that starts makes of the goldens: "", or why the version may not serve.
    """

    def __init__(
        self,
        *,
        label: str,
        directory: Path,
        manifest: Manifest,
        config: Config,
        on_checked: Callable[[Checked], str] = lambda _checked: "",
        measures: bool = False,
    ) -> None:
        self.label = label  # NAME@N, for people
        self.directory = directory
        self.manifest = manifest
        self.state = State.STOPPED
        self.state_reason = ""
        self.refusal = ""  # by on_checked, of the last worker
        self.restarts = 0
        self.stats = EngineStats(started_ns=time.monotonic_ns())
        self._config = config
        self._on_checked = on_checked
        self._measures = measures
        self._live: dict[RequestId, Work] = {}
        self._suspects: deque[Work] = deque()  # lost a worker without a token: submitted one at a time
        self._trial: Work | None = None
        self._losses: deque[float] = deque()
        self._failed_starts = 0  # workers in a row that were lost before READY
        self._process: asyncio.subprocess.Process | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._task: asyncio.Task[None] | None = None
        self._progress_at = time.monotonic()
        self._started_at = self._progress_at
        self._ping_number = 0
        self._state_changed = asyncio.Event()

    # -- what the rest of the daemon calls -------------------------------------------------------------------------

    def start(self) -> None:
        assert self._task is None, "an engine host is started once"
        self._move(State.LOADING, "starting")
        self._task = asyncio.create_task(self._run(), name=f"engine {self.label}")

    async def wait_until_settled(self) -> State:
        """READY, FAILED or STOPPED, whichever comes first."""
        while self.state not in (State.READY, State.FAILED, State.STOPPED):
            await self._state_changed.wait()
        return self.state

    def submit(self, work: Work) -> None:
        """Hand over a request. Raises UnavailableError when this engine takes none, OverloadedError when it is full."""
        if self.state not in (State.READY, State.LOADING):
            raise UnavailableError(f"model {self.label} is {self.state}. Retry later, or name another version")
        self._check_room(work.weight)
        if not self._live:
            self._progress_at = time.monotonic()  # an engine that was idle until now has not stalled
        self._live[work.id] = work
        if self.state is State.READY:
            self._send(work.submit())

    def _check_room(self, weight: int) -> None:
        """The scheduler's own rule, applied before the caller is told that the request is accepted."""
        limits, slots = self._config.limits, self.manifest.content.engine.limits.slots
        queued = len(self._live) - slots
        if queued >= limits.waiting_max:
            raise OverloadedError(
                f"the queue of model {self.label} holds {queued:,} of at most {limits.waiting_max:,} requests "
                "(limits.waiting_max). Retry later"
            )
        if self.manifest.content.kind == "generate" and queued < 0:
            return
        waiting = sum(other.weight for other in self._live.values() if not other.times.scheduled_ns)
        limit = self.queue_limit
        if waiting and waiting + weight > limit.most:
            raise OverloadedError(
                f"the queue of model {self.label} holds {waiting:,} {limit.unit} and this request has {weight:,}; "
                f"at most {limit.most:,} may wait ({limit.key}). Retry later"
            )

    def cancel(self, work: Work, reason: Finish) -> None:
        """End a request now. Idempotent; the worker frees its slot within one step."""
        if self._live.pop(work.id, None) is None:
            return
        work.finish(Finished(work.id, reason), time.monotonic_ns())
        self.stats.finished[reason] += 1
        self._send(Cancel(work.id, reason))
        self._try_next_suspect()

    async def drain(self, limit_s: float) -> bool:
        """Take no more requests, let the running ones end, stop the worker. Whether all of them ended in time."""
        if self.state in (State.STOPPED, State.FAILED):
            return not self._live
        self._move(State.DRAINING, f"{len(self._live)} generations are finishing")
        deadline = time.monotonic() + limit_s
        while self._live and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        ended = not self._live
        for generation in list(self._live.values()):
            self.cancel(generation, Finish.CANCELLED)
        await self.stop()
        return ended

    async def stop(self) -> None:
        """Stop the worker and end what is left. Safe to call twice."""
        if self._task is None:
            return
        self._move(State.STOPPED, "unloaded")
        self._send(Stop())
        if self._process is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), STOP_GRACE_S)
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        self._kill()
        self._fail_all("the model was unloaded")

    @property
    def queue_limit(self) -> QueueLimit:
        limits, content = self._config.limits, self.manifest.content
        return queue_limit(
            content.kind,
            content.engine.limits,
            tokens_max=limits.waiting_tokens_max,
            bytes_max=limits.waiting_bytes_max,
        )

    @property
    def pid(self) -> int:
        return self._process.pid if self._process else 0

    @property
    def live_count(self) -> int:
        return len(self._live)

    @property
    def kv_tokens_used(self) -> int:
        """Positions that live requests hold, as far as the daemon knows."""
        live = (work for work in self._live.values() if isinstance(work, Generation) and work.times.scheduled_ns)
        return sum(work.weight + work.tokens_count for work in live)

    def progressing(self, *, now: float) -> bool:
        """False when there is work and no step for `engine.stall_s`: health says NOT_SERVING."""
        return self.state is State.READY and not (self._live and now - self._progress_at > self._config.engine.stall_s)

    # -- the life of the worker ------------------------------------------------------------------------------------

    async def _run(self) -> None:
        """Start workers until told to stop or the restart budget is used up."""
        while True:
            try:
                reason, permanent = await self._live_once()
            except Exception as error:  # no process, no descriptor, a bug in the link: a lost worker all the same
                log.exception("worker_error", model=self.label)
                reason, permanent = f"{type(error).__name__}: {error}", False
            if self.state in (State.STOPPED, State.FAILED):
                return
            for generation in self._live.values():
                generation.lose_worker()
            now = time.monotonic()
            self._losses.append(now)
            while self._losses[0] < now - self._config.engine.restart_window_s:
                self._losses.popleft()
            log.warning("worker_lost", model=self.label, reason=reason, losses=len(self._losses), live=len(self._live))
            self._failed_starts = self._failed_starts + 1 if self.state is State.LOADING else 0
            stillborn = self._failed_starts >= self._config.engine.load_attempts_max
            if permanent or stillborn or len(self._losses) > self._config.engine.restarts_max:
                self._move(State.FAILED, reason)
                self._fail_all(f"model {self.label} has failed: its engine worker could not be kept running")
                return
            if self.state is State.READY:
                self._move(State.LOADING, f"restarting: {reason}")
            self.restarts += 1
            if len(self._losses) > 1:
                backoff_s = self._config.engine.restart_backoff_s * 2 ** (len(self._losses) - 2)
                await asyncio.sleep(min(BACKOFF_MAX_S, backoff_s))

    async def _live_once(self) -> tuple[str, bool]:
        """One worker from start to death. Returns why it ended and whether another would end the same way."""
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        self._started_at = time.monotonic()
        self.refusal = ""
        try:
            self._process = await spawn_worker(theirs)
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        stream, self._writer = await asyncio.open_connection(sock=ours, limit=RECEIVE_BYTES)
        self._progress_at = time.monotonic()
        self._send(start_frame(self.directory, self._config, measures=self._measures and not self.restarts))
        watch = asyncio.create_task(self._watch())
        try:
            failed = await self._receive(stream)
        except (LinkError, AssertionError, ValueError) as error:
            failed = Failed(message=f"protocol error: {error}", permanent=False)
        finally:
            watch.cancel()
            self._writer.close()
            self._writer = None
            self._kill()
            status = await self._process.wait()
        if self.refusal:
            return self.refusal, True
        return (failed.message, failed.permanent) if failed else (describe_exit(status), False)

    async def _receive(self, stream: asyncio.StreamReader) -> Failed | None:
        """Handle frames until the worker's last words or the end of the link."""
        reader = FrameReader()
        while chunk := await _read(stream):
            for body in reader.feed(chunk):
                self._progress_at = time.monotonic()
                frame = decode_from_worker(body)
                if isinstance(frame, Failed):
                    return frame
                self._handle(frame)
        return None

    def _handle(self, frame: FromWorker) -> None:
        match frame:
            case Events():
                self._dispatch(frame)
            case Results():
                self._deliver(frame)
            case Checked():
                self.refusal = self._on_checked(frame)
            case Ready():
                self._on_ready(frame)
            case Loading(stage):
                self.state_reason = stage
            case Pong() | Failed():
                pass

    def _on_ready(self, ready: Ready) -> None:
        log.info("engine_ready", model=self.label, load_ms=ready.load_ms, resumed=len(self._live))
        if self.state is State.LOADING:
            self._move(State.READY, "")
        self._trial = None
        by_losses = sorted(self._live.values(), key=lambda generation: generation.barren_losses)
        for generation in by_losses:
            if generation.barren_losses == 0:
                self._send(generation.submit())
        self._suspects = deque(generation for generation in by_losses if generation.barren_losses)
        self._try_next_suspect()

    def _try_next_suspect(self) -> None:
        """Submit the next suspect once the one on trial has made a token or ended.

        A request that ends every worker it meets is so found alone, and only it is failed.
        """
        while self._suspects and (self._trial is None or self._trial.progressed or self._trial.finished):
            generation = self._suspects.popleft()
            if generation.finished:
                continue
            if generation.barren_losses > self._config.engine.resumes_max:
                self._end(generation, Finish.ENGINE_FAILED, "the engine was lost again and again under this request")
                continue
            self._trial = generation
            self._send(generation.submit())

    def _dispatch(self, frame: Events) -> None:
        now_ns = time.monotonic_ns()
        if frame.record is not None:
            self._account(frame, now_ns)
        logprobs = frame.logprobs or [None] * len(frame.ids)
        for request_id, index, token, entry in zip(frame.ids, frame.indexes, frame.tokens, logprobs, strict=True):
            generation = self._live.get(request_id)
            if not isinstance(generation, Generation):
                continue  # cancelled here while the step ran
            self._time_token(generation, now_ns)
            if not generation.accept(index, Sampled(token, entry), now_ns):
                self.cancel(generation, Finish.SLOW_CONSUMER)
        self._finish(frame.finished, now_ns)

    def _deliver(self, frame: Results) -> None:
        """What one run gave, to the requests that still want it."""
        now_ns = time.monotonic_ns()
        record, stats = frame.record, self.stats
        if record is not None:
            stats.steps += 1
            stats.waiting, stats.running = record.waiting, len(record.ids)
            stats.batch_rows_max = max(stats.batch_rows_max, record.rows)
            stats.prompt_tokens.add(now_ns, record.weight)
            stats.output_tokens.add(now_ns, record.rows)
            self._schedule(record.ids, now_ns - record.elapsed_us * 1000)
        for request_id, place, value in zip(frame.ids, frame.places, frame.values, strict=True):
            work = self._live.get(request_id)
            if isinstance(work, Asked):
                work.accept(place, value, now_ns)
        for finished in frame.finished:
            if finished.id in self._live:
                stats.ttft_ms.add(now_ns, (now_ns - self._live[finished.id].times.arrived_ns) / 1e6)
        self._finish(frame.finished, now_ns)

    def _finish(self, ended: Iterable[Finished], now_ns: int) -> None:
        for finished in ended:
            work = self._live.pop(finished.id, None)
            if work is not None:
                work.finish(finished, now_ns)
                self.stats.finished[finished.reason] += 1
        self._try_next_suspect()

    def _schedule(self, ids: Iterable[RequestId], started_ns: int) -> None:
        """`ids` were computed for the first time in a step that began at `started_ns`."""
        for request_id in ids:
            work = self._live.get(request_id)
            if work is not None and not work.times.scheduled_ns:
                work.times.scheduled_ns = started_ns

    def _account(self, frame: Events, now_ns: int) -> None:
        record, stats = frame.record, self.stats
        assert record is not None
        stats.steps += 1
        stats.waiting, stats.running = record.waiting, record.running
        stats.batch_rows_max = max(stats.batch_rows_max, record.decode_rows + record.prefill_rows)
        stats.prompt_tokens.add(now_ns, record.prefill_tokens)
        stats.output_tokens.add(now_ns, len(frame.tokens))
        self._schedule(record.ids, now_ns - record.elapsed_us * 1000)

    def _time_token(self, generation: Generation, now_ns: int) -> None:
        times = generation.times
        if times.last_token_ns:
            self.stats.itl_ms.add(now_ns, (now_ns - times.last_token_ns) / 1e6)
        else:
            self.stats.ttft_ms.add(now_ns, (now_ns - times.arrived_ns) / 1e6)

    async def _watch(self) -> None:
        """Kill a worker that has work and makes no step, or that loads for too long: then it is lost as any other."""
        pinged_at = time.monotonic()
        while True:
            await asyncio.sleep(WATCH_PERIOD_S)
            now = time.monotonic()
            loading = self.state is State.LOADING
            limit_s = self._config.engine.load_timeout_s if loading else self._config.engine.step_timeout_s
            busy = loading or self._live or self._progress_at < pinged_at
            silent_s = now - (self._started_at if loading else self._progress_at)
            if busy and silent_s > limit_s:
                log.error("worker_hung", model=self.label, silent_s=round(silent_s, 1), limit_s=limit_s)
                self._kill()
                return
            if not loading and not self._live and now - max(self._progress_at, pinged_at) > PING_PERIOD_S:
                self._ping_number += 1
                pinged_at = now
                self._send(Ping(self._ping_number))

    # -- small things ----------------------------------------------------------------------------------------------

    def _send(self, frame: ToWorker) -> None:
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(encode(frame))

    def _move(self, state: State, reason: str) -> None:
        self.state, self.state_reason = state, reason
        self._progress_at = time.monotonic()
        self._state_changed.set()
        self._state_changed = asyncio.Event()

    def _end(self, work: Work, reason: Finish, detail: str) -> None:
        self._live.pop(work.id, None)
        work.finish(Finished(work.id, reason, detail), time.monotonic_ns())
        self.stats.finished[reason] += 1

    def _fail_all(self, detail: str) -> None:
        for generation in list(self._live.values()):
            self._end(generation, Finish.ENGINE_FAILED, detail)

    def _kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGKILL)


async def spawn_worker(link: socket.socket) -> asyncio.subprocess.Process:
    """An engine worker at the other end of `link`; it waits for a Start frame."""
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "residentd.engine.worker",
        str(link.fileno()),
        pass_fds=(link.fileno(),),
        stdin=asyncio.subprocess.DEVNULL,
        start_new_session=True,
        env=HUGE_PAGES | os.environ,
    )


def start_frame(
    directory: Path, config: Config, purpose: Literal["serve", "check"] = "serve", *, measures: bool = False
) -> Start:
    engine, limits = config.engine, config.limits
    return Start(
        version_dir=str(directory),
        threads=engine.threads,
        spin_us=engine.spin_us,
        scheduling=engine.scheduling,
        prefill_tokens_max=engine.prefill_tokens_max,
        waiting_max=limits.waiting_max,
        waiting_tokens_max=limits.waiting_tokens_max,
        waiting_bytes_max=limits.waiting_bytes_max,
        retries_max=engine.retries_max,
        measures=measures,
        purpose=purpose,
    )


def describe_exit(status: int) -> str:
    if status < 0:
        known = {number.value: number.name for number in signal.Signals}
        return f"the engine worker was ended by signal {known.get(-status, -status)}"
    return f"the engine worker exited with status {status}"


async def _read(stream: asyncio.StreamReader) -> bytes:
    """Whatever has arrived; empty at the end of the link, however it ended."""
    try:
        return await stream.read(RECEIVE_BYTES)
    except (ConnectionResetError, BrokenPipeError):
        return b""
