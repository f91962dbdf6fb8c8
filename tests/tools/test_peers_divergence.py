"""The KL column of tools/bench_peers: the compiler's own measure, of a peer that answers from another environment."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from tools.peers import bench
from tools.peers.bench import Figures, Report
from tools.peers.divergence import (
    CONTEXT,
    PEERS,
    Divergence,
    Peer,
    answers_of,
    divergence_between,
    divergences_of_peers,
    kept,
    key_of,
    key_of_builds,
    peer_of,
)

from residentd_build.quality import Reference, divergences, passages_of, record_export
from residentd_build.validate import validate
from residentd_build.verify import Export

ROOT = Path(__file__).resolve().parent.parent.parent
EXPORT = ROOT / "tests" / "fixtures" / "exports" / "llama"
VOCAB = 480  # of EXPORT
PASSAGES = ((1, 2, 3, 4), (5, 6, 7))

UNIFORM = f"""
import json, sys
from pathlib import Path
model, passages, out = sys.argv[1:]
positions = sum(len(passage) - 1 for passage in json.loads(Path(passages).read_text()))
Path(out).write_bytes(bytes(4 * {VOCAB} * positions))
with Path(model).with_suffix(".runs").open("a") as file:
    file.write("run ")
"""
AS_THE_EXPORT = """
import json, sys
from pathlib import Path
import numpy as np
from residentd_build.verify import Export
model, passages, out = sys.argv[1:]
export = Export(Path(Path(model).read_text()))
with Path(out).open("wb") as file:
    for passage in json.loads(Path(passages).read_text()):
        export.forget()
        for token in passage[:-1]:
            logits = export.read([token]).astype(np.float64)
            log_probabilities = logits - np.log(np.exp(logits).sum())
            file.write(log_probabilities.astype(np.float32).tobytes())
"""


def peer_with(folder: Path, reader: str, model: str = "weights") -> Peer:
    """A peer installed in `folder`, whose reader is this script."""
    files = {"peer.gguf": model, "reader.py": reader, "server.py": "", "requirements.txt": "peer==1"}
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    paths = [folder / name for name in ("peer.gguf", "server.py", "reader.py", "requirements.txt")]
    return Peer("Q4_0", Path(sys.executable), *paths)


def reference_from(path: Path, rows: np.ndarray) -> Reference:
    path.write_bytes(rows.astype(np.float32).tobytes())
    return Reference(PASSAGES, path, rows.shape[1])


def quiet(_text: str) -> None:
    """Nobody follows."""


def test_log_probabilities_diverge_as_logits_do(tmp_path: Path) -> None:
    """What a peer leaves may be shifted row by row; the mean is that of the definition, over every position."""
    rng = np.random.default_rng(20261201)
    expected, found = (rng.standard_normal((5, 11)) * 3 for _ in range(2))
    log_p, log_q = (rows - np.log(np.exp(rows).sum(axis=1, keepdims=True)) for rows in (expected, found))
    direct = (np.exp(log_p) * (log_p - log_q)).sum(axis=1).mean()

    reference = reference_from(tmp_path / "export", expected)
    for name, rows in {"logits": found, "shifted": log_q}.items():
        figure = divergence_between(reference, reference_from(tmp_path / name, rows))
        assert figure.positions == 5
        assert figure.kl_mean == pytest.approx(direct, rel=1e-5)  # 40 roundings of float32
        assert figure.kl_mean == pytest.approx(divergences(expected, rows).mean(), rel=1e-5)


def test_a_peer_that_answers_as_the_export_does_not_diverge(tmp_path: Path) -> None:
    """Token ids and positions arrive unchanged: read one by one, as log-probabilities, the export is itself."""
    peer = peer_with(tmp_path, AS_THE_EXPORT, model=str(EXPORT / "model.onnx"))
    passages = passages_of(validate(EXPORT), CONTEXT)
    figure = divergences_of_peers([peer], EXPORT, quiet)["Q4_0"]
    assert figure.positions == sum(len(passage) - 1 for passage in passages)
    assert figure.kl_mean < 1e-9  # float32 rounds logits below 2^4 by 2^-21, and a divergence is of second order


def test_a_peer_that_knows_nothing_diverges_by_what_the_export_knows(tmp_path: Path) -> None:
    """Against equal probabilities the divergence is log(vocab) less the export's entropy, a closed form."""
    source = validate(EXPORT)
    recorded = record_export(
        Export(source.model_path), passages_of(source, CONTEXT), tmp_path / "recorded", lambda *_: None
    )
    logits = np.concatenate(recorded.logits()).astype(np.float64)
    log_p = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    entropy = -(np.exp(log_p) * log_p).sum(axis=1)

    figure = divergences_of_peers([peer_with(tmp_path, UNIFORM)], EXPORT, quiet)["Q4_0"]
    assert figure.kl_mean == pytest.approx(np.log(VOCAB) - entropy.mean(), rel=1e-4)


def test_a_figure_is_measured_once_and_again_after_a_change(tmp_path: Path) -> None:
    """A second run reads what the first kept; other weights under the same name are measured."""
    peer = peer_with(tmp_path, UNIFORM)
    first = divergences_of_peers([peer], EXPORT, quiet)
    assert divergences_of_peers([peer], EXPORT, quiet) == first
    assert (tmp_path / "peer.runs").read_text() == "run "
    peer.model.write_text("other weights", encoding="utf-8")
    assert divergences_of_peers([peer], EXPORT, quiet) == first
    assert (tmp_path / "peer.runs").read_text() == "run run "
    assert not [path for path in tmp_path.iterdir() if path.is_dir()], "hundreds of megabytes of logits stayed"


@pytest.mark.parametrize(
    "change",
    [
        lambda peer: (peer, "export", ((1, 2), (3, 5))),
        lambda peer: (peer, "another export", ((1, 2), (3, 4))),
        lambda peer: (rewritten(peer, peer.model), "export", ((1, 2), (3, 4))),
        lambda peer: (rewritten(peer, peer.reader), "export", ((1, 2), (3, 4))),
        lambda peer: (rewritten(peer, peer.requirements), "export", ((1, 2), (3, 4))),
    ],
    ids=["passages", "export", "model", "reader", "release"],
)
def test_everything_that_decides_a_figure_is_in_its_key(
    tmp_path: Path, change: Callable[[Peer], tuple[Peer, str, tuple[tuple[int, ...], ...]]]
) -> None:
    """A change of the token ids, the export, the weights, the script or the release makes the kept figure void."""
    peer = peer_with(tmp_path, UNIFORM)
    key = key_of(peer, "export", ((1, 2), (3, 4)))
    peer.kept.write_text(json.dumps({"key": key, "kl_mean": 0.5, "positions": 2}), encoding="utf-8")
    assert kept(peer, key_of(peer, "export", ((1, 2), (3, 4)))) == Divergence(0.5, 2)
    assert kept(peer, key_of(*change(peer))) is None


def rewritten(peer: Peer, path: Path) -> Peer:
    path.write_text("changed", encoding="utf-8")
    return peer


def test_the_weights_of_a_directory_are_in_the_key(tmp_path: Path) -> None:
    """A model of several files is another model when one of them changes."""
    model = tmp_path / "genai-int4"
    model.mkdir()
    for name in ("model.onnx", "model.onnx.data"):
        (model / name).write_text(name, encoding="utf-8")
    peer = replace(peer_with(tmp_path, UNIFORM), model=model)
    before = key_of(peer, "export", PASSAGES)
    (model / "model.onnx.data").write_text("other weights", encoding="utf-8")
    assert key_of(peer, "export", PASSAGES) != before


def test_what_a_killed_run_left_is_measured_again(tmp_path: Path) -> None:
    """Half a line of JSON is no figure."""
    peer = peer_with(tmp_path, UNIFORM)
    peer.kept.write_text('{"key": "', encoding="utf-8")
    assert kept(peer, "key") is None


def test_a_reader_that_fails_is_told_with_its_last_words(tmp_path: Path) -> None:
    """The run ends with the peer, the script and what it said last, not with a column left empty."""
    peer = peer_with(tmp_path, "import sys; print('noise\\n' * 50 + 'no such model', file=sys.stderr); sys.exit(3)")
    expected = reference_from(tmp_path / "export", np.zeros((5, 11)))
    with pytest.raises(SystemExit, match=r"Q4_0 did not read the text: reader.py ended with 3\n(noise\n|\n)*no such"):
        answers_of(peer, expected, tmp_path)


def test_a_peer_with_another_vocabulary_is_refused(tmp_path: Path) -> None:
    """Logits of other ids are never compared."""
    peer = peer_with(tmp_path, UNIFORM)
    expected = reference_from(tmp_path / "export", np.zeros((5, 11)))
    with pytest.raises(SystemExit, match=r"wrote 9,600 bytes of logits; 5 positions of 11 ids are 220"):
        answers_of(peer, expected, tmp_path)


@pytest.mark.parametrize("name", PEERS)
def test_every_peer_has_its_scripts(name: str) -> None:
    """No peer is offered that could not be started or read."""
    peer = peer_of(name, Path("peers"))
    assert [path for path in (peer.server, peer.reader, peer.requirements) if not path.is_file()] == []


def test_the_table_shows_the_divergence_of_peers_and_builds() -> None:
    """One column for all, and below it over how many positions."""
    figures = [Figures(100.0, 5.0, 10.0, 12.0)]
    results = {("int8/throughput", 1): figures, ("Q4_0", 1): figures}
    out = io.StringIO()
    found = {"int8": Divergence(0.0321, 2040), "Q4_0": Divergence(0.366, 2040), "fp32": Divergence(0.0, 7)}
    Report(results, found, Console(file=out, width=170)).figures("16 tokens in, 8 out")
    rows = [line.replace("│", " ").split() for line in out.getvalue().splitlines()]
    assert {row[1]: row[2] for row in rows if row[:1] == ["1"]} == {"int8/throughput": "0.032", "Q4_0": "0.37"}
    assert "over 2,040 positions of text" in out.getvalue()


def test_the_table_says_when_positions_differ() -> None:
    """A build whose reading was cut short is not passed off as compared over as many."""
    figures = [Figures(100.0, 5.0, 10.0, 12.0)]
    out = io.StringIO()
    found = {"int8": Divergence(0.03, 510), "Q4_0": Divergence(0.37, 2040)}
    results = {("int8/throughput", 1): figures, ("Q4_0", 1): figures}
    Report(results, found, Console(file=out, width=170)).figures("16 tokens in, 8 out")
    assert "over 510 to 2,040 positions of text" in out.getvalue()


def test_a_build_is_kept_for_its_own_export_only() -> None:
    """Builds of one export are never measured as those of another."""
    one, same, other = (key_of_builds(EXPORT.with_name(name)) for name in ("llama", "llama", "qwen3"))
    assert one == same != other


def test_builds_of_an_older_compiler_are_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What an older compiler left is neither served nor shown; what this one made is kept."""
    made: list[str] = []

    def compile_to(command: Sequence[str], *, check: bool) -> None:
        assert check
        made.append(command[-1])
        Path(command[5]).mkdir(exist_ok=True)

    monkeypatch.setattr(bench.subprocess, "run", compile_to)
    state = tmp_path / "state"
    (state / "throughput" / "versions" / "old").mkdir(parents=True)
    (state / "throughput" / "int8.4").touch()
    (state / "key").write_text("older", encoding="utf-8")
    bench.install(EXPORT, state, ["int8"], 4)
    bench.install(EXPORT, state, ["int8"], 4)
    assert made == ["int8"]
    assert not (state / "throughput" / "versions").exists()


def test_every_server_keeps_its_whole_name_beside_all_peers() -> None:
    """With every peer in the table the two profiles of a build can still be told apart, and no line is cut."""
    figures = [Figures(100.0, 1105.0, 110.0, 12.0)]
    names = ("int8/throughput", "int8/interactive", *PEERS)
    out = io.StringIO()
    found = {name: Divergence(0.0041, 2040) for name in ("int8", *PEERS)}
    Report({(name, 16): figures for name in names}, found, Console(file=out, width=170)).figures("16 tokens in, 8 out")
    rows = [line for line in out.getvalue().splitlines() if line.startswith("│")]
    assert [row.replace("│", " ").split()[1] for row in rows] == list(names)
    assert all(row.endswith("│") for row in rows)
