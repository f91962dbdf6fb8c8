"""How far a peer's answers are from the export's: the divergence that the compiler measures of our own builds.

Passages, reference and formula are the compiler's (residentd_build.quality): KL(export || peer) at every position of
the text that the package carries, at most 8 passages of 256 tokens (2,040 positions of the demo model), teacher-forced.
A script in the peer's own environment reads the same token ids and leaves its logits in a file. Our builds read all
passages in flight, peers one token a step: both decode. The demo model's export was made from a Q4_1 file: a peer in
Q4_1 has its very weights.

A figure is kept beside the peer's model and measured again once anything that it depends on has changed.
"""

from __future__ import annotations

import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

import residentd_build
from residentd.models import manifest
from residentd_build import quality
from residentd_build.quality import Reference, divergences, passages_of, record_export
from residentd_build.source import Source
from residentd_build.validate import validate
from residentd_build.verify import Export

CONTEXT = 512  # of our builds beside the peers
ERROR_LINES = 5
GENAI = "genai-int4"
GGUF_KINDS = ("Q4_0", "Q4_1", "Q8_0")
PEERS = (*GGUF_KINDS, GENAI)
HERE = Path(__file__).parent
REQUIREMENTS = HERE.parent / "requirements"
LOCK = REQUIREMENTS / "dev.txt"

Passages = Sequence[tuple[int, ...]]
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Divergence:
    """From the export, in nats."""

    kl_mean: float
    positions: int


@dataclass(frozen=True, slots=True)
class Peer:
    """As tools/bench_peers installed it. `requirements` says which release its environment has."""

    name: str
    python: Path
    model: Path
    server: Path
    reader: Path
    requirements: Path

    @property
    def kept(self) -> Path:
        return self.model.with_suffix(".kl.json")


def peer_of(name: str, peers: Path) -> Peer:
    if name == GENAI:
        scripts = HERE / "genai_server.py", HERE / "genai_logits.py"
        return Peer(name, peers / "genai/bin/python", peers / GENAI, *scripts, REQUIREMENTS / "peer_genai.txt")
    scripts = HERE / "llamacpp_server.py", HERE / "llamacpp_logits.py"
    return Peer(name, peers / "venv/bin/python", peers / f"{name}.gguf", *scripts, REQUIREMENTS / "peers.txt")


def divergences_of_peers(peers: Sequence[Peer], export: Path, say: Say) -> dict[str, Divergence]:
    """What is kept, and the rest measured. Exits where a peer does not answer."""
    if not peers:
        return {}
    source = validate(export)
    passages = passages_of(source, CONTEXT)
    keys = {peer: key_of(peer, source.sha256, passages) for peer in peers}
    found = {peer.name: figure for peer, key in keys.items() if (figure := kept(peer, key))}
    if missing := [peer for peer in peers if peer.name not in found]:
        for peer, figure in _measured(missing, source, passages, say):
            peer.kept.write_text(json.dumps({"key": keys[peer]} | asdict(figure)), encoding="utf-8")
            found[peer.name] = figure
    return found


def key_of(peer: Peer, export: str, passages: Passages) -> str:
    """One digest of everything that decides the figure."""
    weights = sorted(path for path in peer.model.rglob("*") if path.is_file()) if peer.model.is_dir() else [peer.model]
    files = (*weights, peer.reader, peer.requirements, Path(__file__), Path(quality.__file__))
    return digest_of(json.dumps([export, passages]), files)


def key_of_builds(export: Path) -> str:
    """One digest of the export, and of what makes a build of it and its manifest."""
    compiler = Path(residentd_build.__file__).parent
    files = (*sorted(compiler.rglob("*.py")), compiler / quality.TEXT_FILE, Path(manifest.__file__), LOCK)
    return digest_of(validate(export).sha256, files)


def digest_of(text: str, files: Iterable[Path]) -> str:
    digest = hashlib.sha256(text.encode())
    for path in files:
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def kept(peer: Peer, key: str) -> Divergence | None:
    """The figure of an earlier run, if `key` is still its key."""
    try:
        content = json.loads(peer.kept.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return Divergence(content["kl_mean"], content["positions"]) if content["key"] == key else None


def _measured(peers: Sequence[Peer], source: Source, passages: Passages, say: Say) -> Iterator[tuple[Peer, Divergence]]:
    with tempfile.TemporaryDirectory(dir=peers[0].model.parent) as name:
        folder = Path(name)
        say("KL: the export reads the text")
        export = Export(source.model_path, source.model_states)
        # A clock that stands: every passage is read, however slow the machine, so that the figure can be kept.
        expected = record_export(export, passages, folder / "export", lambda *_: None, clock=lambda: 0.0)
        del export  # its memory is the peers' now
        for peer in peers:
            say(f"KL: {peer.name} reads the text (once)")
            yield peer, divergence_between(expected, answers_of(peer, expected, folder))
            (folder / peer.name).unlink()


def answers_of(peer: Peer, expected: Reference, folder: Path) -> Reference:
    """The logits of `peer` at the positions of `expected`. Exits if there are others, or none."""
    passages, out = folder / "passages.json", folder / peer.name
    passages.write_text(json.dumps(expected.passages), encoding="utf-8")
    done = subprocess.run(
        [peer.python, peer.reader, peer.model.resolve(), passages, out],
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
        env=os.environ | {"ORT_DISABLE_TELEMETRY": "1"},
    )
    if done.returncode:
        last = "\n".join(done.stderr.splitlines()[-ERROR_LINES:])
        sys.exit(f"{peer.name} did not read the text: {peer.reader.name} ended with {done.returncode}\n{last}")
    positions = sum(len(passage) - 1 for passage in expected.passages)
    wanted, written = 4 * positions * expected.vocab, out.stat().st_size
    if written != wanted:
        sys.exit(
            f"{peer.name} wrote {written:,} bytes of logits; {positions:,} positions of {expected.vocab:,} ids are "
            f"{wanted:,}. It is another model than the export: delete {peer.model} and run again"
        )
    return Reference(expected.passages, out, expected.vocab)


def divergence_between(expected: Reference, found: Reference) -> Divergence:
    """Logits or log-probabilities: a shift of a position's row changes nothing."""
    pairs = zip(expected.logits(), found.logits(), strict=True)
    each = np.concatenate([divergences(one, other) for one, other in pairs])
    return Divergence(statistics.fmean(each), len(each))
