"""Put a toy encoder into a state directory, as if it had been installed; and what it answers, by its oracle."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from residentd.backend.reference_graph import ReferenceEncoder, token_vectors
from residentd.models.encoder import EncodedGolden, Encoder, RowGolden
from residentd.models.manifest import Content, Engine, EngineLimits, SamplingDefaults, Text
from residentd.models.registry import Registry
from residentd.models.store import Store, measure_files
from support.manifests import sealed
from support.toy_version import toy_tokenizer

WIDTH = 12
VOCAB = 300
GOLDEN_IDS = ((72, 105), (1, 2, 3, 4, 5, 6, 7, 8, 9, 10))


def make_toy_encoder(
    state_dir: Path,
    name: str = "toy",
    *,
    model: ReferenceEncoder | None = None,
    rows: int = 8,
    context: int = 64,
    run_tokens: int = 128,
    width: int = WIDTH,
) -> str:
    """Publish and register it; return its digest. Ids 0 to 255 are the bytes of a text."""
    model = model or ReferenceEncoder(width=width)
    store = Store(state_dir)
    with store.staging() as stage:
        (stage.path / "engine.json").write_bytes(msgspec.json.encode(model))
        (stage.path / "tokenizer.json").write_text(toy_tokenizer(VOCAB, has_end=False))
        engine = Engine(
            target="reference",
            mode="canonical",
            precision="fp32",
            path="engine.json",
            limits=EngineLimits(slots=rows, context=context, step_tokens_max=run_tokens, vocab=VOCAB),
            caches=(),
        )
        text = Text(
            tokenizer="tokenizer.json",
            chat_template=None,
            bos_id=None,
            bos_token="",
            eos_token="",
            adds_bos=False,
            eos_ids=(),
        )
        encoder = Encoder(
            inputs=("input_ids", "attention_mask"),
            output="last_hidden_state",
            width=width,
            pooling=("mean",),
            normalise=True,
            prompts={"query": "q: "},
            tolerance=1e-6,
            goldens=tuple(RowGolden(ids=ids, output=toy_embedding(ids).tobytes()) for ids in GOLDEN_IDS),
            texts=(EncodedGolden(text="Hi", ids=(72, 105)),),
        )
        content = Content(
            architecture="toy",
            engine=engine,
            text=text,
            sampling=SamplingDefaults(),
            goldens=(),
            text_goldens=(),
            files=measure_files(stage.path),
            kind="embed",
            encoder=encoder,
        )
        manifest = sealed(name, content)
        store.publish(stage, manifest)
    registry = Registry(state_dir)
    registry.add_version(name, manifest.digest, activate=True)
    registry.close()
    return manifest.digest


def toy_embedding(ids: Sequence[int], width: int = WIDTH) -> np.ndarray:
    """float32 [width]: the mean of the tokens' vectors, at length 1."""
    mean = token_vectors(np.array(ids, np.int64), width).mean(axis=0, dtype=np.float64).astype(np.float32)
    norm = np.sqrt(np.square(mean, dtype=np.float64).sum())
    return (mean / norm).astype(np.float32)
