"""Closed-loop comparison: for each round and concurrency every server in turn answers the same prompts.

Each of `concurrency` clients sends one request after another; prompts are token ids, greedy, end-of-sequence ignored,
so every server computes the same counts. Figures are medians over rounds; ratios are taken round by round, then their
median. The KL divergence from the fp32 export is over the same positions of text for our builds and for the peers.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc
import numpy as np
from rich.console import Console
from rich.table import Table
from tools.peers.divergence import CONTEXT, GENAI, PEERS, Divergence, divergences_of_peers, key_of_builds, peer_of

from resident.v1 import inference_pb2, inference_pb2_grpc
from residentd.models.manifest import decode

START_S_MAX = 300
PROMPT_IDS = (1000, 40000)
PROFILES = ("throughput", "interactive")
PRECISIONS = ("fp32", "int8", "int4")
GOALS = {  # (precision, concurrency, peer): least ratio of tokens/s that the throughput profile is to reach
    ("fp32", 8, "Q4_0"): 1.0,
    ("fp32", 16, "Q4_0"): 1.0,
    ("fp32", 8, "Q8_0"): 1.5,
    ("fp32", 16, "Q8_0"): 1.5,
    ("int8", 8, "Q4_0"): 1.2,
    ("int8", 8, "Q8_0"): 1.6,
    ("int8", 8, "Q4_1"): 2.2,
    ("int8", 8, GENAI): 1.2,
    ("int8", 16, "Q4_0"): 1.3,
    ("int4", 1, "Q4_0"): 1.05,
}
ITL_SPREAD_MAX, INTERACTIVE_SHARE_MIN = 3.0, 0.75  # p95 ÷ p50, and of throughput's tokens/s


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


def genai_client(address: str) -> Client:
    host, _, port = address.partition(":")

    def ask(prompt: list[int], output_tokens: int) -> Timeline:
        line = json.dumps({"prompt": prompt, "output_tokens": output_tokens}).encode() + b"\n"
        sent = time.perf_counter()
        with socket.create_connection((host, int(port))) as connection, connection.makefile("rb") as lines:
            connection.sendall(line)
            arrivals = [time.perf_counter() for _ in lines]
        assert len(arrivals) == output_tokens, len(arrivals)
        return Timeline(sent, tuple(arrivals))

    return ask


def residentd_client(address: str, model: str) -> Client:
    channel = grpc.insecure_channel(address)
    stub = inference_pb2_grpc.InferenceStub(channel)

    def ask(prompt: list[int], output_tokens: int) -> Timeline:
        request = inference_pb2.GenerateRequest(
            model=model,
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
def residentd(state: Path, profile: str, models: Sequence[str], threads: int) -> Iterator[dict[str, Client]]:
    """A daemon on `state` with one scheduling profile and every model ready to answer; a client for each."""
    config = state / f"{profile}.toml"
    admin = state / f"{profile}.sock"
    run = state / profile
    config.write_text(
        f'state = "{run}"\n[listen]\ngrpc = "127.0.0.1:0"\nadmin_socket = "{admin}"\n'
        f'[engine]\nthreads = {threads}\nscheduling = "{profile}"\n[log]\nlevel = "warning"\n'
    )
    process = subprocess.Popen([sys.executable, "-m", "residentd", "--config", config])
    try:
        address = wait_ready(run, process, set(models))
        yield {model: residentd_client(address, model) for model in models}
    finally:
        process.terminate()
        process.wait(60)


def wait_ready(run: Path, process: subprocess.Popen[bytes], wanted: set[str]) -> str:
    deadline = time.monotonic() + START_S_MAX
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(OSError, grpc.RpcError):
            address = (run / "run" / "address").read_text().strip()
            with grpc.insecure_channel(address) as channel:
                models = inference_pb2_grpc.InferenceStub(channel).ListModels(inference_pb2.ListModelsRequest()).models
            if wanted <= {model.name for model in models if model.ready}:
                return address
        time.sleep(0.2)
    sys.exit("residentd did not become ready")


@contextlib.contextmanager
def peer(name: str, arguments: argparse.Namespace) -> Iterator[Client]:
    """A peer's own server in its own environment, answering."""
    found = peer_of(name, arguments.peers)
    words = [arguments.threads, max(arguments.concurrency), arguments.prompt_tokens + arguments.output_tokens + 64]
    process = subprocess.Popen(
        [found.python, found.server, found.model, *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=os.environ | {"ORT_DISABLE_TELEMETRY": "1"},
    )
    try:
        assert process.stdout is not None
        line = next((line for line in process.stdout if line.startswith("LISTEN")), None)
        if line is None:
            sys.exit(f"the server of {name} did not start")
        yield (genai_client if name == GENAI else llamacpp_client)(line.split()[1])
    finally:
        process.kill()
        process.wait()


def install(export: Path, state: Path, precisions: Sequence[str], slots: int) -> None:
    """Compile each precision once for this export and compiler; each profile serves them from a state of its own."""
    key, built = key_of_builds(export), state / "key"
    if not built.exists() or built.read_text(encoding="utf-8") != key:
        shutil.rmtree(state, ignore_errors=True)
        state.mkdir()
        built.write_text(key, encoding="utf-8")
    first, *others = (state / profile for profile in PROFILES)
    for precision in precisions:
        if not (first / f"{precision}.{slots}").exists():
            limits = ("--context", str(CONTEXT), "--slots", str(slots), "--precision", precision)
            command = (sys.executable, "-m", "residentd_build", export, "--state", first, "--name", precision)
            subprocess.run([*command, *limits], check=True)
            (first / f"{precision}.{slots}").touch()
    for other in others:
        shutil.rmtree(other, ignore_errors=True)
        shutil.copytree(first, other, copy_function=link_weights, ignore=shutil.ignore_patterns("*.sock", "run"))


def link_weights(source: str, target: str) -> None:
    """The registry is written to; the files of a version never are."""
    if "/versions/" in source:
        os.link(source, target)
    else:
        shutil.copy2(source, target)


def divergences_of(state: Path) -> dict[str, Divergence]:
    """Of each of our builds, as measured when it was built."""
    manifests = (decode(path.read_bytes()) for path in (state / PROFILES[0]).glob("versions/*/manifest.json"))
    found = ((manifest.name, manifest.quality) for manifest in manifests)
    return {name: Divergence(quality.kl_mean, quality.positions) for name, quality in found if quality is not None}


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
                    f"round {round_number + 1} c={concurrency:<2} {name:16} {figures.tokens_per_s:6.1f} tok/s  "
                    f"TTFT {figures.ttft_ms:6.0f} ms  ITL p50 {figures.itl_p50_ms:5.1f} p95 {figures.itl_p95_ms:5.1f}"
                )
    return results


def median_ratio(ours: list[Figures], theirs: list[Figures], figure: str) -> float:
    return float(statistics.median(getattr(a, figure) / getattr(b, figure) for a, b in zip(ours, theirs, strict=True)))


class Report:
    """What was measured, as tables and as goals met or missed. Ours are named precision/profile."""

    def __init__(
        self, results: dict[tuple[str, int], list[Figures]], divergences: dict[str, Divergence], console: Console
    ) -> None:
        self._results = results
        self._divergences = divergences
        self._console = console
        self._names = list(dict.fromkeys(name for name, _ in results))
        self._counts = list(dict.fromkeys(count for _, count in results))
        self._peers = [name for name in self._names if name in PEERS]

    def figures(self, load: str) -> None:
        table = Table(title=f"{load}: medians of the rounds; ratios are medians of the same round's")
        table.add_column("c", justify="right")
        table.add_column("server", no_wrap=True)
        for column in ("KL", "tok/s", "TTFT ms", "ITL p50", "p95/p50"):
            table.add_column(column, justify="right")
        for peer_name in self._peers:
            table.add_column(f"tok/s ÷ {peer_name}", justify="right")
        for peer_name in self._peers:
            table.add_column(f"TTFT ÷ {peer_name}", justify="right")
        for count in self._counts:
            for name in self._names:
                table.add_row(*self._row(name, count))
            table.add_section()
        self._console.print(table)
        self._console.print(self._divergence_line())

    def _divergence_line(self) -> str:
        names = {name.partition("/")[0] for name in self._names}
        counts = sorted({figure.positions for name, figure in self._divergences.items() if name in names})
        over = " to ".join(f"{count:,}" for count in dict.fromkeys(counts[:1] + counts[-1:]))
        return (
            f"KL: mean divergence in nats from the fp32 export (its weights were Q4_1), over {over} positions of text"
        )

    def _row(self, name: str, count: int) -> list[str]:
        rows = self._results[name, count]
        mid = {figure: statistics.median(getattr(row, figure) for row in rows) for figure in Figures.__slots__}
        spread = statistics.median(row.itl_p95_ms / row.itl_p50_ms for row in rows)
        divergence = self._divergences.get(name.partition("/")[0])
        cells = [str(count), name, "" if divergence is None else f"{divergence.kl_mean:.2g}"]
        cells += [f"{mid['tokens_per_s']:.1f}", f"{mid['ttft_ms']:.0f}", f"{mid['itl_p50_ms']:.1f}"]
        ratios = [
            f"{median_ratio(rows, self._results[peer_name, count], figure):.2f}" if name not in PEERS else ""
            for figure in ("tokens_per_s", "ttft_ms")
            for peer_name in self._peers
        ]
        return [*cells, f"{spread:.2f}", *ratios]

    def goals(self) -> bool:
        """Print every goal that this run can judge; whether all were met."""
        judged = [*self._speed_goals(), *self._pace_goals()]
        for text, is_met in judged:
            self._console.print(f"{'met   ' if is_met else 'MISSED'} {text}")
        return all(is_met for _, is_met in judged)

    def _speed_goals(self) -> Iterator[tuple[str, bool]]:
        for (precision, count, peer_name), least in GOALS.items():
            ours, theirs = self._results.get((f"{precision}/throughput", count)), self._results.get((peer_name, count))
            if ours and theirs:
                ratio = median_ratio(ours, theirs, "tokens_per_s")
                yield f"{precision} at c={count}: {ratio:.2f} of {peer_name} (at least {least})", ratio >= least

    def _pace_goals(self) -> Iterator[tuple[str, bool]]:
        for (name, count), rows in self._results.items():
            precision, _, profile = name.partition("/")
            base = self._results.get((f"{precision}/throughput", count))
            if profile == "interactive" and base:
                share = median_ratio(rows, base, "tokens_per_s")
                spread = statistics.median(row.itl_p95_ms / row.itl_p50_ms for row in rows)
                text = f"{name} at c={count}: ITL p95/p50 {spread:.2f} (at most {ITL_SPREAD_MAX}) at {share:.2f} of "
                is_met = spread <= ITL_SPREAD_MAX and share >= INTERACTIVE_SHARE_MIN
                yield f"{text}throughput's tokens/s (at least {INTERACTIVE_SHARE_MIN})", is_met


def choices_of(allowed: Sequence[str]) -> Callable[[str], list[str]]:
    def parse(text: str) -> list[str]:
        words = text.split(",")
        if unknown := sorted(set(words) - set(allowed)):
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)} is not among {', '.join(allowed)}")
        return words

    return parse


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tools/bench_peers", description=__doc__)
    parser.add_argument("--export", type=Path, required=True, help=argparse.SUPPRESS)
    parser.add_argument("--peers-dir", dest="peers", type=Path, required=True, help=argparse.SUPPRESS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--concurrency", type=lambda text: [int(word) for word in text.split(",")], default=[1, 4, 8, 16]
    )
    parser.add_argument("--precision", type=choices_of(PRECISIONS), default=["fp32"], help="of our builds, by commas")
    parser.add_argument("--profile", type=choices_of(PROFILES), default=list(PROFILES), help="by commas")
    parser.add_argument("--beside", type=choices_of(PEERS), default=["Q4_0", "Q8_0"], help="peers, by commas")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--requests", type=int, default=2, help="of each client in a round")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--check", action="store_true", help="exit with 1 if a goal was missed")
    return parser.parse_args(words)


def main() -> int:
    arguments = parse()
    console = Console(highlight=False, width=170)
    state = arguments.peers.resolve() / "state"
    install(arguments.export, state, arguments.precision, max(arguments.concurrency))
    peers = [peer_of(name, arguments.peers) for name in arguments.beside]
    divergences = divergences_of_peers(peers, arguments.export, console.print) | divergences_of(state)
    with contextlib.ExitStack() as stack:
        clients: dict[str, Client] = {}
        for profile in arguments.profile:
            ours = stack.enter_context(residentd(state, profile, arguments.precision, arguments.threads))
            clients |= {f"{precision}/{profile}": client for precision, client in ours.items()}
        clients |= {name: stack.enter_context(peer(name, arguments)) for name in arguments.beside}
        results = measure(clients, arguments, console)
    report = Report(results, divergences, console)
    report.figures(f"{arguments.prompt_tokens} tokens in, {arguments.output_tokens} out")
    is_met = report.goals()
    return 0 if is_met or not arguments.check else 1


if __name__ == "__main__":
    sys.exit(main())
