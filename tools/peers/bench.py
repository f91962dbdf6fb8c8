"""Closed-loop comparison: for each round and concurrency every server in turn answers the same prompts.

Each of `concurrency` clients sends one request after another; prompts are token ids, greedy, end-of-sequence ignored,
so every server computes the same counts. Figures are medians over rounds; ratios are taken round by round, then their
median.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import numpy as np
from rich.console import Console
from rich.table import Table

from resident.v1 import inference_pb2, inference_pb2_grpc

MODEL = "smollm2"
START_S_MAX = 300
PROMPT_IDS = (1000, 40000)
PROFILES = ("throughput", "interactive")
PEERS = ("Q4_0", "Q8_0")
RATIOS = ("tokens_per_s", "ttft_ms", "itl_p50_ms")


@dataclass(frozen=True, slots=True)
class Timeline:
    """One request: when it was sent, and when each output token arrived (seconds)."""

    sent: float
    arrivals: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Figures:
    tokens_per_s: float
    ttft_ms: float  # median
    itl_p50_ms: float
    itl_p95_ms: float


def figures_of(timelines: list[Timeline], elapsed_s: float) -> Figures:
    gaps = np.concatenate([np.diff(timeline.arrivals) for timeline in timelines]) * 1e3
    ttft = [(timeline.arrivals[0] - timeline.sent) * 1e3 for timeline in timelines]
    return Figures(
        tokens_per_s=sum(len(timeline.arrivals) for timeline in timelines) / elapsed_s,
        ttft_ms=statistics.median(ttft),
        itl_p50_ms=float(np.percentile(gaps, 50)),
        itl_p95_ms=float(np.percentile(gaps, 95)),
    )


def prompts(count: int, length: int, seed: int) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(*PROMPT_IDS, length).tolist() for _ in range(count)]


Client = Callable[[list[int], int], Timeline]


def run_closed_loop(client: Client, work: list[list[int]], concurrency: int, output_tokens: int) -> Figures:
    """`concurrency` threads, each with its share of the prompts, one after another."""
    timelines: list[Timeline] = []

    def loop(first: int) -> None:
        timelines.extend(client(prompt, output_tokens) for prompt in work[first::concurrency])

    threads = [threading.Thread(target=loop, args=(first,)) for first in range(concurrency)]
    started = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(timelines) == len(work), "a client failed"
    return figures_of(timelines, time.perf_counter() - started)


def llamacpp_client(address: str) -> Client:
    def ask(prompt: list[int], output_tokens: int) -> Timeline:
        body = {
            "prompt": prompt,
            "n_predict": output_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "top_k": 1,
            "cache_prompt": False,
            "stream": True,
            "return_tokens": True,
        }
        connection = http.client.HTTPConnection(address, timeout=600)
        sent, arrivals = time.perf_counter(), []
        connection.request("POST", "/completion", json.dumps(body), {"Content-Type": "application/json"})
        for line in connection.getresponse():
            if line.startswith(b"data: "):
                event = json.loads(line[6:])
                if event.get("stop"):
                    assert event["tokens_predicted"] == output_tokens, event
                    break
                arrivals += [time.perf_counter()] * len(event["tokens"])
        connection.close()
        return Timeline(sent, tuple(arrivals))

    return ask


def residentd_client(address: str) -> Client:
    channel = grpc.insecure_channel(address)
    stub = inference_pb2_grpc.InferenceStub(channel)

    def ask(prompt: list[int], output_tokens: int) -> Timeline:
        request = inference_pb2.GenerateRequest(
            model=MODEL,
            token_ids=inference_pb2.TokenIds(ids=prompt),
            sampling=inference_pb2.Sampling(max_tokens=output_tokens, temperature=0, ignore_eos=True),
            return_token_ids=True,
        )
        sent, arrivals = time.perf_counter(), []
        for message in stub.Generate(request):
            arrivals += [time.perf_counter()] * len(message.token_ids)
        assert len(arrivals) == output_tokens, len(arrivals)
        return Timeline(sent, tuple(arrivals))

    return ask


@contextlib.contextmanager
def residentd(state: Path, profile: str, threads: int) -> Iterator[Client]:
    """A daemon on `state` with one scheduling profile, ready to answer."""
    config = state / f"{profile}.toml"
    admin = state / f"{profile}.sock"
    run = state / profile
    config.write_text(
        f'state = "{run}"\n[listen]\ngrpc = "127.0.0.1:0"\nadmin_socket = "{admin}"\n'
        f'[engine]\nthreads = {threads}\nscheduling = "{profile}"\n[log]\nlevel = "warning"\n'
    )
    process = subprocess.Popen([sys.executable, "-m", "residentd", "--config", config])
    try:
        yield residentd_client(wait_ready(run, process))
    finally:
        process.terminate()
        process.wait(60)


def wait_ready(run: Path, process: subprocess.Popen[bytes]) -> str:
    deadline = time.monotonic() + START_S_MAX
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(OSError, grpc.RpcError):
            address = (run / "run" / "address").read_text().strip()
            with grpc.insecure_channel(address) as channel:
                models = inference_pb2_grpc.InferenceStub(channel).ListModels(inference_pb2.ListModelsRequest()).models
            if any(model.ready for model in models):
                return address
        time.sleep(0.2)
    sys.exit("residentd did not become ready")


@contextlib.contextmanager
def llamacpp(peers: Path, kind: str, arguments: argparse.Namespace) -> Iterator[Client]:
    words = [arguments.threads, max(arguments.concurrency), arguments.prompt_tokens + arguments.output_tokens + 64]
    process = subprocess.Popen(
        [
            peers / "venv/bin/python",
            Path(__file__).with_name("llamacpp_server.py"),
            peers / f"{kind}.gguf",
            *map(str, words),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert process.stdout is not None
        line = next((line for line in process.stdout if line.startswith("LISTEN")), None)
        if line is None:
            sys.exit(f"llama.cpp did not start with {kind}")
        yield llamacpp_client(line.split()[1])
    finally:
        process.kill()
        process.wait()


def install(export: Path, state: Path, slots: int) -> None:
    """Compile once; both profiles serve the same version from a state directory of their own (hard links would do)."""
    command = (sys.executable, "-m", "residentd_build", export)
    for profile in PROFILES:
        if (state / profile / "registry.sqlite3").exists():
            continue
        subprocess.run(
            [*command, "--state", state / profile, "--name", MODEL, "--context", "512", "--slots", str(slots)],
            check=True,
        )


def measure(
    clients: dict[str, Client], arguments: argparse.Namespace, console: Console
) -> dict[tuple[str, int], list[Figures]]:
    results: dict[tuple[str, int], list[Figures]] = {}
    for client in clients.values():
        run_closed_loop(client, prompts(2, 16, 99), 2, 8)
    for round_number in range(arguments.rounds):
        for concurrency in arguments.concurrency:
            work = prompts(concurrency * arguments.requests, arguments.prompt_tokens, round_number)
            for name, client in clients.items():
                figures = run_closed_loop(client, work, concurrency, arguments.output_tokens)
                results.setdefault((name, concurrency), []).append(figures)
                console.print(
                    f"round {round_number + 1} c={concurrency:<2} {name:12} {figures.tokens_per_s:6.1f} tok/s  "
                    f"TTFT {figures.ttft_ms:6.0f} ms  ITL p50 {figures.itl_p50_ms:5.1f} p95 {figures.itl_p95_ms:5.1f}"
                )
    return results


def median_ratio(ours: list[Figures], theirs: list[Figures], figure: str) -> float:
    return statistics.median(getattr(a, figure) / getattr(b, figure) for a, b in zip(ours, theirs, strict=True))


def report(results: dict[tuple[str, int], list[Figures]], concurrency: list[int], console: Console) -> None:
    table = Table(title="residentd (fp32) beside llama.cpp: medians, and median ratios of the same round")
    for column in ("c", "server", "tok/s", "TTFT ms", "ITL p50", "ITL p95", "p95/p50"):
        table.add_column(column, justify="left" if column == "server" else "right")
    for peer in PEERS:
        table.add_column(f"tok/s ÷ {peer}", justify="right")
        table.add_column(f"TTFT ÷ {peer}", justify="right")
        table.add_column(f"ITL ÷ {peer}", justify="right")
    for count in concurrency:
        for name in (*PROFILES, *PEERS):
            rows = results[name, count]
            mid = Figures(*(statistics.median(getattr(row, f) for row in rows) for f in Figures.__slots__))
            pairs = [(peer, figure) for peer in PEERS for figure in RATIOS]
            shown = name in PROFILES
            ratios = [f"{median_ratio(rows, results[p, count], f):.2f}" if shown else "" for p, f in pairs]
            table.add_row(
                str(count), name, f"{mid.tokens_per_s:.1f}", f"{mid.ttft_ms:.0f}", f"{mid.itl_p50_ms:.1f}",
                f"{mid.itl_p95_ms:.1f}", f"{mid.itl_p95_ms / mid.itl_p50_ms:.2f}", *ratios,
            )  # fmt: skip
        ours, base = results["interactive", count], results["throughput", count]
        table.add_section()
        console.print(
            f"c={count}: interactive keeps {median_ratio(ours, base, 'tokens_per_s'):.2f} of throughput's tokens/s"
        )
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(prog="tools/bench_peers", description=__doc__)
    parser.add_argument("--export", type=Path, required=True, help=argparse.SUPPRESS)
    parser.add_argument("--peers", type=Path, required=True, help=argparse.SUPPRESS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--concurrency", type=lambda text: [int(word) for word in text.split(",")], default=[1, 4, 8, 16]
    )
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--requests", type=int, default=2, help="of each client in a round")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--output-tokens", type=int, default=64)
    arguments = parser.parse_args()
    console = Console(highlight=False, width=170)
    state = arguments.peers.resolve() / "state"
    state.mkdir(exist_ok=True)
    install(arguments.export, state, max(arguments.concurrency))
    with contextlib.ExitStack() as stack:
        clients = {name: stack.enter_context(residentd(state, name, arguments.threads)) for name in PROFILES}
        clients |= {kind: stack.enter_context(llamacpp(arguments.peers, kind, arguments)) for kind in PEERS}
        results = measure(clients, arguments, console)
    report(results, arguments.concurrency, console)


if __name__ == "__main__":
    main()
