"""Small manifests for tests of whatever handles versions."""

from __future__ import annotations

from pathlib import Path

from residentd.models.manifest import (
    SCHEMA,
    Agreement,
    Build,
    Content,
    Engine,
    EngineLimits,
    File,
    Manifest,
    SamplingDefaults,
    Text,
    content_digest,
)
from residentd.models.store import Store, measure_files


def sealed(name: str, content: Content) -> Manifest:
    """`content` with its digest, an exact agreement and no build history."""
    return Manifest(
        schema=SCHEMA,
        name=name,
        content=content,
        digest=content_digest(content),
        agreement=Agreement(logit_diff_max=0.0, logit_diff_bound=1e-3, greedy_equal=1, greedy_total=1, positions=1),
        build=Build(created="2026-01-01T00:00:00Z", tool_versions={}, source_sha256="0" * 64, seconds=0.0, passes=()),
    )


def plain_manifest(files: dict[str, File], *, name: str = "toy", architecture: str = "toy") -> Manifest:
    engine = Engine(
        target="reference",
        mode="canonical",
        precision="fp32",
        path="engine.json",
        limits=EngineLimits(slots=1, context=8, step_tokens_max=8, vocab=8),
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
    content = Content(
        architecture=architecture,
        engine=engine,
        text=text,
        sampling=SamplingDefaults(),
        goldens=(),
        text_goldens=(),
        files=files,
    )
    return sealed(name, content)


def write_files(directory: Path, files: dict[str, bytes]) -> None:
    for name, data in files.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(data)


def publish_files(store: Store, files: dict[str, bytes], *, name: str = "toy") -> tuple[Manifest, Path]:
    """Stage `files` as they are and publish them."""
    with store.staging() as stage:
        write_files(stage.path, files)
        manifest = plain_manifest(measure_files(stage.path), name=name)
        return manifest, store.publish(stage, manifest)
