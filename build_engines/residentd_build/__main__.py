"""`python -m residentd_build SOURCE --state DIR --name NAME`: compile an export and publish it as a version.

With --json every line on stdout is one event:

    {"event": "progress", "stage": "validate", "fraction": 0.1, "message": "…"}
    {"event": "installed", "name": "…", "version": 3, "digest": "…", "agreement": {…}, …}      the last line, or
    {"event": "failed", "kind": "source", "message": "…", "findings": [{"what", "where", "remedy"}, …]}

Exit codes: 0 installed; 1 our own fault; 2 usage; 3 the source is refused; 4 the engine does not reproduce its export;
5 the machine lacks memory, disk or a library; 130 cancelled by SIGINT or SIGTERM, with nothing left behind.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import shutil
import signal
import sys
import traceback
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import msgspec
import psutil

from residentd.errors import AccuracyError, MachineError, OperatorError, ResidentError, SourceError, StoreError
from residentd.models.environment import TEXT_LIBRARIES, engine_environment, library_versions
from residentd.models.registry import Registry
from residentd.models.store import Store
from residentd_build import watchdog
from residentd_build.options import (
    AUTO,
    KINDS,
    MODES,
    SLOTS_DEFAULT,
    STEP_TOKENS_DEFAULT,
    Options,
    OptionsError,
    Weights,
)
from residentd_build.precision import BLOCKS, CHOICES, PRECISIONS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from types import FrameType

    from residentd.models.manifest import Manifest

EXIT_CANCELLED = 130
RESERVE_SHARE = 8  # of the memory that is free, one part in so many is left to what is served
# Most specific first: the first type that an error is an instance of decides.
FAULTS: tuple[tuple[type[ResidentError], str], ...] = (
    (SourceError, "source"),
    (AccuracyError, "accuracy"),
    (OptionsError, "usage"),
    (OperatorError, "operator"),
    (MachineError, "machine"),
)
EXIT_BY_KIND: Mapping[str, int] = MappingProxyType(
    {"internal": 1, "usage": 2, "operator": 2, "source": 3, "accuracy": 4, "machine": 5, "cancelled": EXIT_CANCELLED}
)


class CancelledError(BaseException):
    """A signal asked us to stop. Not an Exception, so that no handler for failures takes it for one."""


class Reporter:
    """Writes events to stdout, as JSON lines or for a person."""

    def __init__(self, *, is_json: bool) -> None:
        self._is_json = is_json
        self._stage = ""

    def progress(self, stage: str, fraction: float, message: str) -> None:
        if self._is_json:
            self._write({"event": "progress", "stage": stage, "fraction": round(fraction, 4), "message": message})
        elif stage != self._stage:
            print(_as_utf8(f"{fraction:4.0%}  {stage}: {message}"), flush=True)
        self._stage = stage

    def installed(self, manifest: Manifest, number: int, *, is_active: bool) -> None:
        if self._is_json:
            self._write(installed_event(manifest, number, is_active=is_active))
            return
        agreement = manifest.agreement
        for line in (*manifest.build.passes, *manifest.build.candidates):
            print(f"      {line}")
        for line in _figures(manifest):
            print(f"      {line}")
        print(
            f"100%  installed {manifest.name}@{number}, digest {manifest.digest[:12]}: largest logit difference to the "
            f"export {agreement.logit_diff_max:.2g} of {agreement.logit_diff_bound:.2g} allowed, "
            f"{agreement.greedy_equal} of {agreement.greedy_total} greedy tokens equal"
        )

    def failed(self, kind: str, error: BaseException) -> None:
        findings = (
            [msgspec.to_builtins(finding) for finding in error.findings] if isinstance(error, SourceError) else []
        )
        if self._is_json:
            self._write({"event": "failed", "kind": kind, "message": str(error), "findings": findings})
            return
        print(_as_utf8(f"not installed: {error}"), file=sys.stderr)

    def _write(self, event: dict[str, Any]) -> None:
        print(_as_utf8(json.dumps(event, ensure_ascii=False)), flush=True)


def _as_utf8(text: str) -> str:
    """A path of the command line may hold bytes that are no text; what we write is UTF-8 all the same."""
    return text.encode("utf-8", "replace").decode()


def _figures(manifest: Manifest) -> Iterator[str]:
    """Quality and cost, for a person."""
    quality, cost = manifest.quality, manifest.cost
    if quality is not None:
        yield (
            f"quality: KL {quality.kl_mean:.2g} of {quality.kl_bound:g} allowed, perplexity {quality.perplexity:.4g} "
            f"(export {quality.perplexity_export:.4g}), same first choice at {quality.top1:.1%} of "
            f"{quality.positions:,} positions"
        )
    if cost is not None:
        yield f"cost: {cost.file_bytes >> 20:,} MiB, {cost.memory_bytes >> 20:,} MiB to load"


def installed_event(manifest: Manifest, number: int, *, is_active: bool) -> dict[str, Any]:
    """Everything that a listing of the version shows."""
    engine, agreement = manifest.content.engine, msgspec.to_builtins(manifest.agreement)
    measured = {"quality": manifest.quality, "cost": manifest.cost}
    return {
        "event": "installed",
        "name": manifest.name,
        "version": number,
        "kind": manifest.content.kind,
        "digest": manifest.digest,
        "architecture": manifest.content.architecture,
        "target": engine.target,
        "precision": engine.precision,
        "mode": engine.mode,
        "mode_reason": engine.mode_reason,
        "context": engine.limits.context,
        "slots": engine.limits.slots,
        "bytes": sum(file.bytes for file in manifest.content.files.values()),
        "created": manifest.build.created,
        "active": is_active,
        **agreement,
        "agreement": agreement,
        "seconds": manifest.build.seconds,
        "passes": list(manifest.build.passes),
        "weights": engine.weights,
        "candidates": list(manifest.build.candidates),
        **{name: msgspec.to_builtins(value) for name, value in measured.items() if value is not None},
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parsed = _parser().parse_args(arguments)
    if parsed.parent is not None:
        watchdog.end_with(parsed.parent)
    reporter = Reporter(is_json=parsed.json)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _cancel)
    try:
        _install(parsed, reporter)
    except ResidentError as error:
        kind = next((name for fault, name in FAULTS if isinstance(error, fault)), "internal")
        reporter.failed(kind, error)
        return EXIT_BY_KIND[kind]
    except MemoryError:
        reporter.failed("machine", MachineError("the machine ran out of memory. Free some, or build on a larger one"))
        return EXIT_BY_KIND["machine"]
    except CancelledError as error:
        reporter.failed("cancelled", error)
        return EXIT_CANCELLED
    except Exception as error:  # noqa: BLE001 - the last event must come whatever happened; the trace goes to stderr
        traceback.print_exc()
        reporter.failed("internal", RuntimeError(f"residentd's own fault, {type(error).__name__}: {error}. Report it"))
        return EXIT_BY_KIND["internal"]
    return 0


def _install(parsed: argparse.Namespace, reporter: Reporter) -> None:
    weights = Weights(parsed.precision, parsed.block, parsed.symmetric, parsed.embedding, parsed.head, parsed.kl_max)
    options = Options(
        parsed.name,
        parsed.context,
        parsed.slots,
        parsed.step_tokens,
        weights,
        parsed.mode,
        parsed.variant,
        parsed.kind,
        tuple(parsed.shapes or ()),
    )
    from residentd_build.kinds import build  # noqa: PLC0415 - a wrong option is refused before a second of imports

    store = Store(parsed.state)
    with contextlib.closing(Registry(parsed.state)) as registry:
        store.sweep(registry.digests)
        with store.staging() as stage:
            with watchdog.watching(reporter.progress, parsed.source, _giving_up(reporter, stage.path)) as progress:
                manifest = build(parsed.source, stage.path, options, progress, store.check_room)
            # From here on the version is whole or absent, and registered if whole: a signal would only confuse which.
            _ignore_signals()
            store.publish(stage, manifest)
            version = registry.add_version(manifest.name, manifest.digest, activate=not parsed.keep_active)
            _record_check(registry, manifest, version)
    reporter.installed(manifest, version, is_active=not parsed.keep_active)


def _giving_up(reporter: Reporter, stage: Path) -> watchdog.GiveUp:
    """What ends this process while its main thread is lost in native code."""

    def give_up(error: SourceError) -> None:
        shutil.rmtree(stage, ignore_errors=True)
        reporter.failed("source", error)
        os._exit(EXIT_BY_KIND["source"])

    return give_up


def _record_check(registry: Registry, manifest: Manifest, number: int) -> None:
    """What the build has shown is the version's first check. It is installed without it, too: a load checks again."""
    from residentd_build.goldens import parts_of  # noqa: PLC0415 - with numpy, as the build

    version = registry.resolve(f"{manifest.name}@{number}")
    environment = engine_environment() | library_versions(TEXT_LIBRARIES)
    with contextlib.suppress(StoreError):
        registry.record_check(version, "install", parts_of(manifest.content), environment)


def take_only_what_is_free() -> None:
    """Whatever a source asks for, less memory than is free now: what is served beside this build must go on.

    An allocation beyond it fails here. Files that are mapped, as weights are, do not count (getrlimit(2)); pages that
    others read again need the part that is left. Should the kernel have to choose all the same, it chooses this
    process first.
    """
    free = psutil.virtual_memory().available + psutil.swap_memory().free
    most = free - free // RESERVE_SHARE
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


def _cancel(_number: int, _frame: FrameType | None) -> None:
    _ignore_signals()  # a second one must not interrupt the cleaning up
    raise CancelledError("cancelled; nothing was installed")


def _ignore_signals() -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="residentd_build",
        description="Compile the ONNX export of a language model for this machine and publish it as a version.",
        epilog="Exit codes: 0 installed, 1 our fault, 2 usage, 3 source refused, 4 accuracy, 5 machine, 130 cancelled.",
    )
    parser.add_argument("source", type=Path, metavar="SOURCE", help="directory as optimum-cli export onnx writes it")
    parser.add_argument("--state", type=Path, required=True, metavar="DIR", help="state directory of the daemon")
    parser.add_argument("--name", required=True, help="model name to install the version under")
    parser.add_argument("--context", type=int, metavar="N", help="tokens a slot holds (the model's own, at most 2048)")
    parser.add_argument("--slots", type=int, default=SLOTS_DEFAULT, metavar="N", help="sequences at once (%(default)s)")
    parser.add_argument(
        "--step-tokens", type=int, default=STEP_TOKENS_DEFAULT, metavar="N", help="tokens in one step (%(default)s)"
    )
    parser.add_argument(
        "--mode",
        default=AUTO,
        metavar="|".join(MODES),
        help="canonical: or refuse it; compatibility: run it as it was exported; auto: so if it must be (%(default)s)",
    )
    parser.add_argument("--variant", metavar="FILE", help="which of several ONNX files (the least quantised)")
    parser.add_argument(
        "--kind", default=AUTO, metavar="|".join(KINDS), help="what it is; auto: by what it shows (%(default)s)"
    )
    parser.add_argument(
        "--shape",
        action="append",
        dest="shapes",
        metavar="INPUT=1x3x48x320",
        help="sizes to verify a tensor model's input with (found by trying); repeatable",
    )
    _add_weight_options(parser.add_argument_group("weights"))
    parser.add_argument("--keep-active", action="store_true", help="leave the model's active version as it is")
    parser.add_argument("--json", action="store_true", help="one JSON event a line on stdout")
    parser.add_argument("--parent", type=int, metavar="PID", help="who started it: with that process, it ends")
    return parser


def _add_weight_options(group: argparse._ArgumentGroup) -> None:
    # No `choices`: what is wrong with a value is said in the last event, as with every other option.
    group.add_argument(
        "--precision",
        metavar="|".join((*PRECISIONS, AUTO)),
        help="auto: the fastest here within the bound (fp32, or as a quantised export has its weights)",
    )
    blocks = "|".join(str(block) for block in sorted({block for possible in BLOCKS.values() for block in possible}))
    group.add_argument(
        "--block", type=int, metavar=blocks, help="weights that share a scale; 0: all of an output channel, int8 only"
    )
    group.add_argument("--symmetric", action="store_true", default=None, help="weights without a zero point")
    group.add_argument("--asymmetric", action="store_false", dest="symmetric", help="weights with one a block")
    group.add_argument("--embedding", metavar="|".join(CHOICES), help="format of the token embedding")
    group.add_argument("--head", metavar="|".join(CHOICES), help="format of the output head")
    group.add_argument(
        "--kl-max", type=float, metavar="NATS", help="mean KL divergence from the export allowed (by precision)"
    )


if __name__ == "__main__":
    take_only_what_is_free()
    sys.exit(main())
