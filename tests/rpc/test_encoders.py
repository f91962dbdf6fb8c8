"""Embed, Classify, Rerank and Infer through the daemon: tiny exports against transformers, and small graphs."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from resident.v1 import admin_pb2, inference_pb2, inference_pb2_grpc
from support import tensor_graphs
from support.daemon import Daemon, running, wait_for
from support.installed import install

pb = inference_pb2
FIXTURES = Path(__file__).resolve().parent.parent / "fixtures" / "encoders"
NAMES = ("embed-bert", "embed-roberta", "classify-distilbert", "rerank-bert")
TENSORS = ("linear", "centred", "counter", "lookup", "detections", "largest")
# transformers on torch and ONNX Runtime add in other orders: 340 roundings of 2^-24 of the largest number, as the build
# allows, on either side.
RELATIVE = 4e-5
CONFIG = "[engine]\nthreads = 1\n[limits]\ntexts_max = 64\nprompt_bytes_max = 20000\n"


@dataclass(frozen=True, slots=True)
class Golden:
    text: str
    pair: str | None
    ids: list[int]
    output: list[float]


def goldens_of(name: str) -> list[Golden]:
    return [Golden(**entry) for entry in json.loads((FIXTURES / name / "goldens.json").read_text(encoding="utf-8"))]


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    state = tmp_path_factory.mktemp("encoders")
    for name in NAMES:
        install(FIXTURES / name, state, name)
    for name in TENSORS:
        install(getattr(tensor_graphs, name)(state / "graphs" / f"{name}.onnx"), state, name)
    with running(state, config=CONFIG, models=len(NAMES) + len(TENSORS)) as daemon:
        yield daemon


@pytest.fixture
def stub(daemon: Daemon) -> Iterator[inference_pb2_grpc.InferenceStub]:
    with daemon.channel() as channel:
        yield inference_pb2_grpc.InferenceStub(channel)


def tensor(name: str, array: Any) -> inference_pb2.Tensor:
    return pb.Tensor(name=name, dtype=array.dtype.name, shape=array.shape, data=array.tobytes())


def array_of(message: inference_pb2.Tensor) -> Any:
    return np.frombuffer(message.data, message.dtype).reshape(tuple(message.shape))


def refusal(call: Any, message: Any) -> tuple[grpc.StatusCode, str, str]:
    """Status, text and field of the error that `message` meets."""
    with pytest.raises(grpc.RpcError) as caught:
        call(message)
    status = rpc_status.from_call(caught.value)
    assert status is not None
    bad = error_details_pb2.BadRequest()
    field = next((bad.field_violations[0].field for detail in status.details if detail.Unpack(bad)), "")
    return caught.value.code(), caught.value.details(), field


def items(goldens: list[Golden]) -> list[inference_pb2.ClassifyRequest.Item]:
    return [pb.ClassifyRequest.Item(text=golden.text, pair=golden.pair) for golden in goldens]


def bound_for(goldens: list[Golden]) -> float:
    return RELATIVE * max(abs(number) for golden in goldens for number in golden.output)


# ---- against transformers ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["embed-bert", "embed-roberta"])
def test_embeddings_are_those_of_transformers(stub: inference_pb2_grpc.InferenceStub, name: str) -> None:
    """Pooling, length 1, truncation and token counts as sentence-transformers has them, all texts in one request."""
    goldens = goldens_of(name)
    reply = stub.Embed(pb.EmbedRequest(model=name, texts=[golden.text for golden in goldens], truncate=True))
    assert [found.tokens for found in reply.embeddings] == [len(golden.ids) for golden in goldens]
    for golden, found in zip(goldens, reply.embeddings, strict=True):
        assert np.abs(np.array(found.values) - golden.output).max() <= bound_for(goldens)
    assert reply.answered.model_version == f"{name}@1"
    assert reply.answered.tokens == sum(len(golden.ids) for golden in goldens)
    assert [found.truncated for found in reply.embeddings].count(True) == 1


def test_class_scores_are_those_of_transformers(stub: inference_pb2_grpc.InferenceStub) -> None:
    """Logits as recorded, labels from id2label, scores their softmax."""
    goldens = goldens_of("classify-distilbert")
    reply = stub.Classify(pb.ClassifyRequest(model="classify-distilbert", items=items(goldens), truncate=True))
    assert list(reply.labels) == ["calm", "windy", "stormy"]
    for golden, found in zip(goldens, reply.classifications, strict=True):
        assert np.abs(np.array(found.logits) - golden.output).max() <= bound_for(goldens)
        powers = np.exp(np.array(golden.output) - max(golden.output))
        assert np.array(found.scores) == pytest.approx(powers / powers.sum(), abs=1e-4)


def test_pairs_are_judged_as_transformers_does(stub: inference_pb2_grpc.InferenceStub) -> None:
    """Token types, the template for pairs and truncation of the longer text; the cross-encoder's own activation."""
    goldens = [golden for golden in goldens_of("rerank-bert") if golden.pair is not None]
    reply = stub.Classify(pb.ClassifyRequest(model="rerank-bert", items=items(goldens), truncate=True))
    for golden, found in zip(goldens, reply.classifications, strict=True):
        assert found.tokens == len(golden.ids)
        assert found.logits[0] == pytest.approx(golden.output[0], abs=bound_for(goldens))
        assert found.scores == found.logits, "the configuration says Identity"


def test_rerank_orders_by_score(stub: inference_pb2_grpc.InferenceStub) -> None:
    """Best first, with the places of the request; top_n cuts the rest; a bare call finds the only such model."""
    documents = ["The river froze.", "Paris is the capital of France.", "you", "The river froze."]
    reply = stub.Rerank(pb.RerankRequest(query="What is the capital of France?", documents=documents))
    scores = [entry.score for entry in reply.ranked]
    assert scores == sorted(scores, reverse=True)
    assert sorted(entry.index for entry in reply.ranked) == [0, 1, 2, 3]
    places = [entry.index for entry in reply.ranked]
    assert places.index(0) + 1 == places.index(3), "equal documents keep their order"
    cut = stub.Rerank(pb.RerankRequest(query="What is the capital of France?", documents=documents, top_n=2))
    assert [entry.index for entry in cut.ranked] == places[:2]


def test_prompts_and_dimensions(stub: inference_pb2_grpc.InferenceStub) -> None:
    """A named prompt is written before the text; fewer dimensions are the first ones, at length 1 again."""
    plain = stub.Embed(pb.EmbedRequest(model="embed-bert", texts=["where is paris"])).embeddings[0]
    asked = stub.Embed(pb.EmbedRequest(model="embed-bert", texts=["paris"], prompt_name="query")).embeddings[0]
    assert asked.values == plain.values
    short = stub.Embed(pb.EmbedRequest(model="embed-bert", texts=["where is paris"], dimensions=5)).embeddings[0]
    first = np.array(plain.values[:5])
    assert np.array(short.values) == pytest.approx(first / np.linalg.norm(first), abs=1e-6)


# ---- in company ----------------------------------------------------------------------------------------------------


def test_ragged_company_changes_no_bit(daemon: Daemon) -> None:
    """Texts of all lengths from 40 callers at once give, to the bit, what each gave alone; runs were shared."""
    rng = random.Random(5)
    words = ["what", "is", "the", "capital", "of", "france", "paris", "river", "froze", "winter", "10", "1999"]
    texts = [" ".join(rng.choices(words, k=rng.randint(1, 36))) for _ in range(120)]

    async def scenario() -> None:
        async with grpc.aio.insecure_channel(daemon.address) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)

            async def embed(part: list[str]) -> list[tuple[float, ...]]:
                reply = await stub.Embed(pb.EmbedRequest(model="embed-bert", texts=part, truncate=True), timeout=60)
                return [tuple(found.values) for found in reply.embeddings]

            alone = [(await embed([text]))[0] for text in texts]
            parts = [texts[first : first + 3] for first in range(0, len(texts), 3)]
            together = await asyncio.gather(*(embed(part) for part in parts))
            assert [vector for part in together for vector in part] == alone

    asyncio.run(scenario())
    status = next(engine for engine in daemon.status().engines if engine.model_version == "embed-bert@1")
    assert status.batch_rows_max > 1
    assert (status.kind, status.waiting, status.slots_used) == ("embed", 0, 0)


@contextlib.contextmanager
def stopped(pids: Sequence[int]) -> Iterator[None]:
    """The processes do not run within."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


def answers_at_once(daemon: Daemon, name: str, calls: Sequence[Any]) -> list[Any]:
    """The first output of each call; all of them wait when the worker takes its next run."""

    async def scenario() -> list[Any]:
        async with grpc.aio.insecure_channel(daemon.address) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            requests = [pb.InferRequest(model=name, inputs=[tensor("x", call)]) for call in calls]
            with stopped(daemon.worker_pids()):
                asked = [stub.Infer(request, timeout=60) for request in requests]
                await stub.ListModels(pb.ListModelsRequest())  # the daemon has taken in what was sent before this
            return [array_of((await reply).outputs[0]) for reply in asked]

    return asyncio.run(scenario())


def test_tensor_calls_share_runs_where_that_was_shown(daemon: Daemon) -> None:
    """Calls of several rows at once get their own; a model whose rows depend on their company runs alone."""
    rng = np.random.default_rng(1)
    calls = [rng.standard_normal((rows, 4)).astype(np.float32) for rows in (1, 2, 1, 3, 1, 1, 2, 1) * 6]
    for call, found in zip(calls, answers_at_once(daemon, "linear", calls), strict=True):
        # tanh of four products: a few roundings of 2^-24 of numbers up to 8
        assert found == pytest.approx(np.tanh(call @ tensor_graphs.WEIGHTS), abs=4e-6)
    for call, found in zip(calls, answers_at_once(daemon, "centred", calls), strict=True):
        assert found == pytest.approx(call - call.mean(axis=0), abs=4e-6)
    rows = {engine.model_version: engine.batch_rows_max for engine in daemon.status().engines}
    assert rows["linear@1"] > 3, "several calls were in one run"
    assert rows["centred@1"] == 1, "one call a run"


def test_no_call_gets_what_its_company_decides(daemon: Daemon) -> None:
    """Detections are the caller's own, and one of a thousand beside it changes no other's scale."""
    calls = [np.array([[0.6 + place / 100, 0.7, 0, 0], [0] * 4][place % 2 :][:1], np.float32) for place in range(24)]
    for call, found in zip(calls, answers_at_once(daemon, "detections", calls), strict=True):
        assert found.tolist() == call[call > 0.5].tolist()
    calls = [np.array([[1, 2, 3, 4]], np.float32) * (1000 if place % 2 else 0.01) for place in range(24)]
    for found in answers_at_once(daemon, "largest", calls):
        assert found[0] == pytest.approx([0.25, 0.5, 0.75, 1.0])


def test_a_state_is_the_callers(stub: inference_pb2_grpc.InferenceStub) -> None:
    """What a call gives as the next state is passed in again: the server keeps nothing."""
    state = np.zeros(1, np.float32)
    for step in range(1, 4):
        inputs = [tensor("state", state), tensor("step", np.array(2, np.float32))]
        reply = stub.Infer(pb.InferRequest(model="counter", inputs=inputs))
        outputs = {entry.name: array_of(entry) for entry in reply.outputs}
        state = outputs["next"]
        assert (state[0], outputs["out"][0]) == (2 * step, 4 * step * step)
    only = stub.Infer(pb.InferRequest(model="counter", inputs=inputs, outputs=["out"]))
    assert [entry.name for entry in only.outputs] == ["out"]


def test_an_input_that_the_graph_refuses_ends_its_own_call_only(daemon: Daemon) -> None:
    """Calls that shared a run with it are answered."""

    async def scenario() -> list[Any]:
        async with grpc.aio.insecure_channel(daemon.address) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            ids = [np.array([[number, 7]], np.int64) for number in range(20)]
            ids[9][0, 0] = 5000
            calls = [stub.Infer(pb.InferRequest(model="lookup", inputs=[tensor("ids", entry)])) for entry in ids]
            return await asyncio.gather(*calls, return_exceptions=True)

    replies = asyncio.run(scenario())
    bad = replies.pop(9)
    assert isinstance(bad, grpc.aio.AioRpcError)
    assert bad.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "out of" in bad.details()
    assert "/" not in bad.details().replace("…", ""), "no path of ours or of the runtime's"
    for number, reply in zip((n for n in range(20) if n != 9), replies, strict=True):
        assert array_of(reply.outputs[0])[0, 0, 0] == 3 * number


# ---- refusals ------------------------------------------------------------------------------------------------------

LONG = "waiting for the train " * 30
TOO_MANY = ["a"] * 65
INVALID = grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize(
    ("call", "message", "field", "says"),
    [
        ("Embed", pb.EmbedRequest(model="embed-bert"), "texts", "0 texts; 1 to 64"),
        ("Embed", pb.EmbedRequest(model="embed-bert", texts=TOO_MANY), "texts", "65 texts; 1 to 64"),
        ("Embed", pb.EmbedRequest(model="embed-bert", texts=["ok", LONG]), "texts", "text 1 has 120 tokens"),
        ("Embed", pb.EmbedRequest(model="embed-bert", texts=["x" * 20001]), "texts", "limits.prompt_bytes_max"),
        ("Embed", pb.EmbedRequest(model="embed-bert", texts=["x" * 1000] * 21), "texts", "the texts have 21,000 bytes"),
        ("Embed", pb.EmbedRequest(model="embed-bert", texts=["a"], prompt_name="passage"), "prompt_name", "document"),
        ("Embed", pb.EmbedRequest(model="embed-bert", texts=["a"], dimensions=33), "dimensions", "gives 32"),
        ("Embed", pb.EmbedRequest(model="rerank-bert", texts=["a"]), "model", "of kind rerank"),
        ("Generate", pb.GenerateRequest(model="embed-bert", prompt="a"), "model", "Use Embed"),
        ("Rerank", pb.RerankRequest(model="classify-distilbert", query="a", documents=["b"]), "model", "Use Classify"),
        ("Rerank", pb.RerankRequest(model="rerank-bert", query="a"), "documents", "0 documents"),
        (
            "Rerank",
            pb.RerankRequest(model="rerank-bert", query="x" * 400, documents=["a"] * 60),
            "documents",
            "the documents, each with the query, have 24,060 bytes",
        ),
        (
            "Rerank",
            pb.RerankRequest(model="rerank-bert", query="a", documents=["b", LONG]),
            "documents",
            "document 1 has 121 tokens",
        ),
        (
            "Classify",
            pb.ClassifyRequest(model="classify-distilbert", items=[pb.ClassifyRequest.Item(text=LONG)]),
            "items",
            "item 0 has 120 tokens",
        ),
        ("Infer", pb.InferRequest(model="embed-bert"), "model", "takes tensors"),
        (
            "Classify",
            pb.ClassifyRequest(
                model="rerank-bert",
                items=[pb.ClassifyRequest.Item(text="a"), pb.ClassifyRequest.Item(text="a", pair="b")],
            ),
            "items",
            "two requests",
        ),
    ],
)
def test_text_calls_are_refused_clearly(
    stub: inference_pb2_grpc.InferenceStub, call: str, message: Any, field: str, says: str
) -> None:
    """What, the value, the limit and what to do next; nothing is cut silently."""
    method = getattr(stub, call)
    answer = refusal(lambda request: list(method(request)) if call == "Generate" else method(request), message)
    assert (answer[0], answer[2]) == (INVALID, field)
    assert says in answer[1]


def test_what_can_be_refused_at_once_is_not_computed(daemon: Daemon, stub: inference_pb2_grpc.InferenceStub) -> None:
    """A wrong number of dimensions costs no run."""

    def runs() -> int:
        return next(engine.steps for engine in daemon.status().engines if engine.model_version == "embed-bert@1")

    before = runs()
    refusal(stub.Embed, pb.EmbedRequest(model="embed-bert", texts=["a"] * 9, dimensions=33))
    assert runs() == before


@pytest.mark.parametrize(
    ("inputs", "outputs", "says"),
    [
        ([], [], "the model takes x"),
        ([tensor("y", np.zeros((1, 4), np.float32))], [], "the model takes x"),
        ([tensor("x", np.zeros((1, 4), np.float32))] * 2, [], "each once"),
        ([tensor("x", np.zeros((1, 4), np.float64))], [], "float64; the model takes float32"),
        ([tensor("x", np.zeros((1, 5), np.float32))], [], "the model takes [n, 4]"),
        ([tensor("x", np.zeros((4,), np.float32))], [], "1 axes"),
        ([pb.Tensor(name="x", dtype="float32", shape=[1, 4], data=b"123")], [], "needs 16"),
        ([pb.Tensor(name="x", dtype="float32", shape=[-1, 4], data=b"")], [], "the model takes [n, 4]"),
        ([pb.Tensor(name="x", dtype="float32", shape=[1 << 40, 4], data=b"")], [], "the model takes [n, 4]"),
        ([tensor("x", np.zeros((1, 4), np.float32))], ["z"], "the model has y"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_before_they_are_queued(
    stub: inference_pb2_grpc.InferenceStub, inputs: list[Any], outputs: list[str], says: str
) -> None:
    """Names, types, shapes and sizes are judged by the manifest."""
    code, text, _ = refusal(stub.Infer, pb.InferRequest(model="linear", inputs=inputs, outputs=outputs))
    assert code is INVALID
    assert says in text


def test_models_say_what_they_are(stub: inference_pb2_grpc.InferenceStub) -> None:
    """Kind, dimensions, labels, prompts, and a tensor model's inputs and outputs."""
    models = {model.name: model for model in stub.ListModels(pb.ListModelsRequest()).models}
    assert {name: models[name].kind for name in NAMES} == {
        "embed-bert": "embed",
        "embed-roberta": "embed",
        "classify-distilbert": "classify",
        "rerank-bert": "rerank",
    }
    assert (models["embed-bert"].dimensions, models["embed-roberta"].dimensions) == (32, 64)
    assert list(models["embed-bert"].prompts) == ["document", "query"]
    assert models["embed-bert"].context == 48
    (spec,) = models["linear"].inputs
    assert (spec.name, spec.dtype, list(spec.shape), list(spec.axes)) == ("x", "float32", [-1, 4], ["n", ""])


@pytest.mark.parametrize("name", [*NAMES, *TENSORS])
def test_every_kind_is_checked_on_demand(daemon: Daemon, name: str) -> None:
    """Files, tokenizer and golden outputs pass in a worker of their own; what was built is the first check."""
    with daemon.admin() as admin:
        check = admin.Verify(admin_pb2.VerifyRequest(model=name), timeout=60).version.check
    assert check.passed
    assert check.occasion == "verify"
    parts = {part.name: part for part in check.parts}
    assert parts["golden outputs"].checked > 0
    assert parts["golden outputs"].worst <= parts["golden outputs"].bound
    assert ("tokenizer" in parts) == (name in NAMES)


def test_everything_is_answered_and_nothing_waits(daemon: Daemon) -> None:
    """After all of these calls no queue holds anything."""
    wait_for(lambda: not any(engine.waiting for engine in daemon.status().engines), "empty queues", 10)
