"""Real exports, compiled and served, against what transformers answered: alone, and in ragged in-flight mixes."""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest

from resident.v1 import inference_pb2, inference_pb2_grpc
from support.daemon import Daemon, running
from support.installed import EXPORTS, install

ROOT = Path(__file__).resolve().parents[2]
FIXTURES = ROOT / "tests" / "fixtures"
GROUPS = {
    "llama and its like": ("llama", "smollm2", "tinyllama", "mistral", "qwen2", "qwen3"),
    "scaled positions": ("llama-rope-llama3", "llama-rope-linear", "llama-rope-yarn", "llama-rope-dynamic", "smollm3"),
    "windows, caps and multipliers": ("gemma2", "gemma3", "olmo2", "granite", "falcon3", "falcon"),
    "as exported, in compatibility mode": ("mpt",),
    "exporters": ("merged-llama", "nopositions-llama", "dynamo24-llama", "genai-qwen3", "genai18-llama", "bf16-llama"),
    "exporters of less than float32": ("fp16-llama", "genai-int4-llama", "genai18-int4-qwen3", "transformersjs-llama"),
    "others": ("phi3", "phi4-longrope", "stablelm", "gpt-neox", "gpt2", "gpt-oss", "qwen3-moe"),
}
MIXES = 4
JOIN_S_MAX = 0.15


@dataclass(frozen=True, slots=True)
class Golden:
    model: str
    prompt: tuple[int, ...]
    output: tuple[int, ...]


def goldens_of(model: str, path: Path) -> list[Golden]:
    prompts = json.loads(path.read_text())["prompts"]
    return [Golden(model, tuple(entry["prompt_ids"]), tuple(entry["greedy_ids"])) for entry in prompts]


@pytest.fixture(scope="module", params=GROUPS)
def tiny(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Daemon, list[Golden]]]:
    state = tmp_path_factory.mktemp("tiny")
    goldens = []
    for name in GROUPS[request.param]:
        install(EXPORTS / name, state, name, "--slots", "5", "--step-tokens", "48")
        goldens += goldens_of(name, EXPORTS / name / "goldens.json")
    config = "[engine]\nthreads = 1\nprefill_tokens_max = 40\n"
    with running(state, config=config, models=len(GROUPS[request.param])) as daemon:
        yield daemon, goldens


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Daemon, list[Golden]]]:
    export = os.environ.get("RESIDENTD_DEMO_MODEL")
    if not export:
        pytest.fail(
            "RESIDENTD_DEMO_MODEL is not set. Run ./tools/test, or set it to what ./tools/fetch_demo_model prints"
        )
    state = tmp_path_factory.mktemp("real")
    install(Path(export), state, "smollm2", "--context", "512", "--slots", "8")
    goldens = goldens_of("smollm2", FIXTURES / "smollm2_goldens.json")
    with running(state) as daemon:
        yield daemon, goldens


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Daemon, list[Golden]]]:
    export = subprocess.run([ROOT / "tools" / "fetch_gemma3"], capture_output=True, text=True, check=True)
    state = tmp_path_factory.mktemp("gemma")
    install(Path(export.stdout.splitlines()[-1]), state, "gemma3", "--context", "1024", "--slots", "4")
    goldens = goldens_of("gemma3", FIXTURES / "gemma3_goldens.json")
    with running(state) as daemon:
        yield daemon, goldens


def request_of(golden: Golden) -> inference_pb2.GenerateRequest:
    sampling = inference_pb2.Sampling(max_tokens=len(golden.output), temperature=0, ignore_eos=True)
    return inference_pb2.GenerateRequest(
        model=golden.model,
        token_ids=inference_pb2.TokenIds(ids=golden.prompt),
        sampling=sampling,
        return_token_ids=True,
    )


async def ask(stub: inference_pb2_grpc.InferenceAsyncStub, golden: Golden) -> None:
    reply = await stub.Complete(request_of(golden), timeout=240)
    assert tuple(reply.token_ids) == golden.output, f"{golden.model}, a prompt of {len(golden.prompt)} tokens"


async def alone(daemon: Daemon, goldens: list[Golden]) -> None:
    async with grpc.aio.insecure_channel(daemon.address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        for golden in goldens:
            await ask(stub, golden)


async def mixed(daemon: Daemon, goldens: list[Golden], seed: int) -> None:
    """All goldens in a random order, each joining at a random moment: prefills, decodes and slot reuse overlap."""
    rng = random.Random(seed)

    async def joining(stub: inference_pb2_grpc.InferenceAsyncStub, golden: Golden, delay_s: float) -> None:
        await asyncio.sleep(delay_s)
        await ask(stub, golden)

    async with grpc.aio.insecure_channel(daemon.address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        shuffled = rng.sample(goldens, len(goldens))
        await asyncio.gather(*(joining(stub, golden, rng.uniform(0, JOIN_S_MAX)) for golden in shuffled))


def rows_max(daemon: Daemon) -> int:
    return max(engine.batch_rows_max for engine in daemon.status().engines)


def test_every_architecture_answers_as_transformers_did_alone(tiny: tuple[Daemon, list[Golden]]) -> None:
    """Greedy tokens of each golden prompt, one at a time, equal the recorded ones."""
    asyncio.run(alone(*tiny))


@pytest.mark.parametrize("seed", range(MIXES))
def test_every_architecture_answers_as_transformers_did_in_flight(tiny: tuple[Daemon, list[Golden]], seed: int) -> None:
    """The same in every ragged mix that shares slots, steps and chunks."""
    asyncio.run(mixed(*tiny, seed))
    assert rows_max(tiny[0]) > 1  # the short answers of quantised exports seldom fill every slot


@pytest.mark.real_model
def test_the_real_model_answers_as_transformers_did(real: tuple[Daemon, list[Golden]]) -> None:
    """SmolLM2-135M: goldens alone for a few, then all of them in two ragged mixes."""
    daemon, goldens = real
    asyncio.run(alone(daemon, goldens[:4]))
    for seed in range(2):
        asyncio.run(mixed(daemon, goldens, seed))
    assert rows_max(daemon) == 8


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_real_gemma_answers_as_transformers_did(gemma: tuple[Daemon, list[Golden]]) -> None:
    """Gemma 3 270M, prompts beyond its window of 512 among them: alone, and all in flight together."""
    daemon, goldens = gemma
    asyncio.run(alone(daemon, goldens))
    asyncio.run(mixed(daemon, goldens, 0))
    assert rows_max(daemon) == 4
