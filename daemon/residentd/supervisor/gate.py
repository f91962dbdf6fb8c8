"""The accuracy gate's memory: every check of a version is judged here, kept in the registry and logged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import structlog

from residentd.errors import OperatorError, StoreError
from residentd.models.checks import FILES, TOKENIZER, Check, Occasion, Part, Speeds, judge
from residentd.models.environment import TEXT_LIBRARIES, changes_between, engine_environment, library_versions
from residentd.models.manifest import Manifest
from residentd.models.registry import Registry, Version
from residentd.models.store import Store
from residentd.text.encoder_text import EncoderText
from residentd.text.goldens import check_texts
from residentd.text.model import TextModel

log = structlog.get_logger("residentd.gate")

ASKED_A_WORKER: Final[tuple[Occasion, ...]] = ("load", "verify")


class Gate:
    """Owned by Engines. Text is checked in this process, with the libraries that it has loaded."""

    def __init__(self, store: Store, registry: Registry) -> None:
        self._store = store
        self._registry = registry
        self._text_libraries = library_versions(TEXT_LIBRARIES)

    def last(self, version: Version) -> Check | None:
        return self._registry.last_check(version)

    def proven(self, version: Version) -> bool:
        """Whether `version` reproduced what was recorded when a worker here was last asked."""
        check = self._registry.last_check_of(version, ASKED_A_WORKER)
        return check is not None and check.passed

    def check_files(self, version: Version) -> tuple[Manifest, Path, Part]:
        """Every file hashed. Raises StoreError naming the first that is damaged."""
        manifest = self._store.verify_files(version.digest)
        _, directory = self._store.load(version.digest)
        return manifest, directory, Part(name=FILES, checked=len(manifest.content.files), missed=0)

    def check_text(
        self, manifest: Manifest, directory: Path
    ) -> tuple[TextModel | EncoderText | None, tuple[Part, ...]]:
        """The text side, loaded and compared with its goldens; None where there is none, or it cannot be loaded."""
        if manifest.content.text is None:
            return None, ()
        encoder = manifest.content.encoder
        try:
            if encoder is not None:
                texts = EncoderText.load(manifest.content, directory)
                return texts, texts.check()
            model = TextModel.load(manifest.content.text, directory)
        except OperatorError as error:
            goldens = len(manifest.content.text_goldens if encoder is None else encoder.texts)
            return None, (Part(name=TOKENIZER, checked=goldens, missed=max(goldens, 1), detail=str(error)),)
        return model, check_texts(model, manifest.content)

    def lacks_speeds(self, version: Version) -> bool:
        """Whether nobody has measured `version` with the libraries and the processor of now."""
        check = self.last(version)
        if check is None or check.speeds is None:
            return True
        return bool(changes_between(check.environment, self._environment()))

    def record(
        self,
        version: Version,
        occasion: Occasion,
        parts: Sequence[Part],
        engine: Mapping[str, str] | None = None,
        speeds: Speeds | None = None,
    ) -> Check:
        """Judge and keep. `engine`: what the worker computed with, else what a new one would."""
        environment = self._environment(engine)
        try:
            check = self._registry.record_check(version, occasion, parts, environment, speeds)
        except StoreError as error:  # a full disk must not take a model away
            log.warning("check_not_recorded", model=version.reference, reason=str(error))
            now = datetime.now(UTC).isoformat(timespec="seconds")
            check = judge(occasion, parts, environment, checked=now, last_good=None)
        _log(version, check)
        return check

    def _environment(self, engine: Mapping[str, str] | None = None) -> dict[str, str]:
        return {**(engine_environment() if engine is None else engine), **self._text_libraries}


def _log(version: Version, check: Check) -> None:
    numbers: dict[str, str | float] = {}
    for part in check.parts:
        numbers[part.name.replace(" ", "_")] = f"{part.checked - part.missed}/{part.checked}"
        if part.bound:
            numbers |= {"worst": part.worst, "bound": part.bound}
    entry = log.bind(model=version.reference, occasion=check.occasion, since=check.since, **numbers)
    if check.passed:
        entry.info("check_passed")
    else:
        entry.error("check_failed", reason=check.message)
