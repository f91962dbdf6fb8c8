"""The real models that wheels carry, served: MiniLM against transformers, the others against their files."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest

from resident.v1 import inference_pb2, inference_pb2_grpc
from support.daemon import Daemon, running
from support.installed import install

pb = inference_pb2
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
ROOT = Path(__file__).resolve().parents[2]
GOLDENS = json.loads((ROOT / "tests" / "fixtures" / "minilm_goldens.json").read_text(encoding="utf-8"))
MODELS = {
    "minilm": "minilm",
    "vad": "packages/silero_vad/data/silero_vad.onnx",
    "vad-16k": "packages/silero_vad/data/silero_vad_16k_op15.onnx",
    "magika": "packages/magika/models/standard_v3_3/model.onnx",
    "ocr-det": "packages/rapidocr/models/PP-OCRv6_det_small.onnx",
    "ocr-rec": "packages/rapidocr/models/PP-OCRv6_rec_small.onnx",
    "ocr-cls": "packages/rapidocr/models/ch_ppocr_mobile_v2.0_cls_mobile.onnx",
}
# 340 roundings of 2^-24 of the largest number, as a build allows; the recorded numbers have seven digits.
RELATIVE = 2e-5


@pytest.fixture(scope="module")
def files() -> Path:
    done = subprocess.run([ROOT / "tools/fetch_encoders"], capture_output=True, text=True, check=True)
    return Path(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def daemon(files: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    state = tmp_path_factory.mktemp("real")
    for name, path in MODELS.items():
        install(files / path, state, name)
    with running(state, models=len(MODELS)) as daemon:
        yield daemon


@pytest.fixture
def stub(daemon: Daemon) -> Iterator[inference_pb2_grpc.InferenceStub]:
    with daemon.channel() as channel:
        yield inference_pb2_grpc.InferenceStub(channel)


def tensor(name: str, array: Any) -> inference_pb2.Tensor:
    return pb.Tensor(name=name, dtype=array.dtype.name, shape=array.shape, data=array.tobytes())


def infer(stub: inference_pb2_grpc.InferenceStub, model: str, feeds: dict[str, Any]) -> dict[str, Any]:
    reply = stub.Infer(pb.InferRequest(model=model, inputs=[tensor(*entry) for entry in feeds.items()]))
    return {found.name: np.frombuffer(found.data, found.dtype).reshape(tuple(found.shape)) for found in reply.outputs}


def direct(files: Path, model: str, feeds: dict[str, Any]) -> dict[str, Any]:
    session = ort.InferenceSession(files / MODELS[model], providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_outputs()]
    return dict(zip(names, session.run(names, feeds), strict=True))


def test_minilm_embeds_as_transformers_does(stub: inference_pb2_grpc.InferenceStub) -> None:
    """Vectors, token counts and truncation at 256 of five texts; the first two are 0.7553 alike, as published."""
    reply = stub.Embed(pb.EmbedRequest(model="minilm", texts=[golden["text"] for golden in GOLDENS], truncate=True))
    assert [found.tokens for found in reply.embeddings] == [len(golden["ids"]) for golden in GOLDENS]
    vectors = np.array([found.values for found in reply.embeddings])
    wanted = np.array([golden["output"] for golden in GOLDENS])
    assert np.abs(vectors - wanted).max() <= RELATIVE * np.abs(wanted).max()
    assert vectors[0] @ vectors[1] == pytest.approx(0.7553, abs=5e-5)


@pytest.mark.parametrize("model", ["vad", "vad-16k"])
def test_silero_hears_the_same_chunk_by_chunk(stub: inference_pb2_grpc.InferenceStub, files: Path, model: str) -> None:
    """Ten chunks of sound with the state passed by the caller, as its own package does it."""
    rng = np.random.default_rng(3)
    ours = theirs = np.zeros((2, 1, 128), np.float32)
    for _ in range(10):
        sound = (0.1 * rng.standard_normal((1, 576))).astype(np.float32)
        rate = np.array(16000, np.int64)
        found = infer(stub, model, {"input": sound, "state": ours, "sr": rate})
        wanted = direct(files, model, {"input": sound, "state": theirs, "sr": rate})
        assert found["output"] == pytest.approx(wanted["output"], abs=1e-6)
        ours, theirs = found["stateN"], wanted["stateN"]
        assert ours.shape == (2, 1, 128)


@pytest.mark.parametrize(
    ("model", "name", "shape"),
    [
        ("ocr-det", "x", (1, 3, 160, 320)),
        ("ocr-rec", "x", (2, 3, 48, 200)),
        ("ocr-cls", "x", (3, 3, 48, 192)),
        ("magika", "bytes", (4, 2048)),
    ],
)
def test_pictures_and_bytes_give_what_their_files_give(
    stub: inference_pb2_grpc.InferenceStub, files: Path, model: str, name: str, shape: tuple[int, ...]
) -> None:
    """Outputs of the served model and of ONNX Runtime on the file itself, at sizes that the build never saw."""
    rng = np.random.default_rng(4)
    if model == "magika":
        array = rng.integers(0, 257, shape).astype(np.int32)
    else:
        array = rng.standard_normal(shape).astype(np.float32)
    found, wanted = infer(stub, model, {name: array}), direct(files, model, {name: array})
    for output, numbers in wanted.items():
        assert found[output].shape == numbers.shape
        assert np.abs(found[output] - numbers).max() <= max(RELATIVE * np.abs(numbers).max(), 3e-6)
