"""A version changed on purpose and made whole again: hashes and digest are those of the changed files."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec

from residentd.backend.reference import ReferenceBackend, ReferenceModel
from residentd.backend.replay import replay
from residentd.models.manifest import Content, Golden, LogitStatistics, Tolerance
from residentd.models.registry import Registry
from residentd.models.statistics import statistics_of
from residentd.models.store import Store, measure_files
from residentd.text.goldens import record_chats, record_texts
from residentd.text.model import TextModel
from residentd.types import Limits
from support.manifests import sealed

TOY_BOUND = 1e-3


def reseal(
    state: Path,
    digest: str,
    name: str,
    change: Callable[[Path], None],
    *,
    content: Callable[[Content], Content] = lambda content: content,
    activate: bool,
) -> str:
    """Publish the version `digest` again with `change` applied to its files, as the next version of `name`."""
    store = Store(state)
    old, directory = store.load(digest)
    with store.staging() as stage:
        for file in old.content.files:
            (stage.path / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(directory / file, stage.path / file)
            (stage.path / file).chmod(0o600)
        change(stage.path)
        changed = content(msgspec.structs.replace(old.content, files=measure_files(stage.path)))
        manifest = sealed(name, changed)
        store.publish(stage, manifest)
    registry = Registry(state)
    registry.add_version(name, manifest.digest, activate=activate)
    registry.close()
    return manifest.digest


def unchanged(_directory: Path) -> None:
    """For a version whose manifest alone changes."""


def with_toy_statistics(directory: Path, content: Content) -> Content:
    """What a build records, of the toy model: statistics, texts and conversations."""
    assert content.text is not None
    limits = content.engine.limits
    model = msgspec.json.decode((directory / content.engine.path).read_bytes(), type=ReferenceModel)
    backend = ReferenceBackend(
        msgspec.structs.replace(model, faults=(), step_ms=0.0),
        Limits(limits.slots, limits.context, limits.step_tokens_max, limits.vocab),
    )
    found: list[list[LogitStatistics]] = [[] for _ in content.goldens]
    for place, answer in enumerate(replay(backend, content.goldens)):
        found[answer.golden].append(statistics_of(answer.logits, place))
    goldens: list[Golden] = [
        msgspec.structs.replace(golden, statistics=tuple(entries))
        for golden, entries in zip(content.goldens, found, strict=True)
    ]
    text = TextModel.load(content.text, directory)
    return msgspec.structs.replace(
        content,
        goldens=tuple(goldens),
        text_goldens=record_texts(text),
        chat_goldens=record_chats(text),
        tolerance=Tolerance(bound=TOY_BOUND, spread=0.0),
    )
