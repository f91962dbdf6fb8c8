"""The accuracy gate of a running daemon: at load, when a worker starts again, and on demand."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from importlib.metadata import version as version_of
from pathlib import Path

import grpc
import msgspec
import numpy as np
import pytest

from resident.v1 import admin_pb2, inference_pb2, inference_pb2_grpc
from residentd.backend.reference import PlannedFault, ReferenceModel
from residentd.models.checks import CHAT, FILES, STATISTICS, TOKENIZER, TOKENS, Part
from residentd.models.environment import TEXT_LIBRARIES, engine_environment, library_versions
from residentd.models.registry import Registry
from residentd.models.store import Store
from support.daemon import Daemon, running, wait_for
from support.installed import EXPORTS, install
from support.proven import prove
from support.resealed import reseal, unchanged, with_toy_statistics
from support.toy_version import make_toy_version

VERIFY_S_MAX = 60
PEAKS = (16.0, 12.0)
PARTS = [FILES, TOKENIZER, CHAT, TOKENS, STATISTICS]


def toy(state: Path, model: ReferenceModel | None = None, *, vocab: int = 1024, activate: bool = True) -> str:
    """A toy version with everything that a build records; returns its digest."""
    model = model or ReferenceModel(peaks=PEAKS)
    plain = make_toy_version(state, "made", vocab=vocab, model=model, activate=False)
    directory = Store(state).load(plain)[1]
    return reseal(
        state,
        plain,
        "toy",
        unchanged,
        content=lambda content: with_toy_statistics(directory, content),
        activate=activate,
    )


def less_sure(directory: Path) -> None:
    """The same tokens everywhere, and lower logits: only the statistics can tell."""
    path = directory / "engine.json"
    model = msgspec.json.decode(path.read_bytes(), type=ReferenceModel)
    path.write_bytes(msgspec.json.encode(msgspec.structs.replace(model, peaks=(15.75, 12.0))))


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    toy(tmp_path)
    with running(tmp_path) as daemon:
        yield daemon


def verify(daemon: Daemon, model: str) -> admin_pb2.VerifyResponse:
    with daemon.admin() as admin:
        return admin.Verify(admin_pb2.VerifyRequest(model=model), timeout=VERIFY_S_MAX)


def listed(daemon: Daemon) -> dict[str, admin_pb2.Version]:
    with daemon.admin() as admin:
        found = admin.ListVersions(admin_pb2.ListVersionsRequest(name="toy")).versions
        return {f"{version.name}@{version.number}": version for version in found}


def serving(daemon: Daemon) -> str:
    with daemon.channel() as channel:
        request = inference_pb2.GenerateRequest(
            model="toy", prompt="a", sampling=inference_pb2.Sampling(max_tokens=2, temperature=0)
        )
        return inference_pb2_grpc.InferenceStub(channel).Complete(request, timeout=30).started.model_version


def parts_of(check: admin_pb2.Check) -> dict[str, admin_pb2.CheckPart]:
    return {part.name: part for part in check.parts}


def test_a_version_that_serves_is_verified_beside_its_requests(daemon: Daemon) -> None:
    """Every part is counted; a stream that runs meanwhile goes on in the same worker, token for token."""
    pids = daemon.worker_pids()
    with daemon.channel() as channel:
        sampling = inference_pb2.Sampling(max_tokens=200, temperature=0, ignore_eos=True)
        request = inference_pb2.GenerateRequest(model="toy", prompt="abc", sampling=sampling, return_token_ids=True)
        stub = inference_pb2_grpc.InferenceStub(channel)
        before = list(stub.Complete(request, timeout=30).token_ids)
        stream = stub.Generate(request, timeout=60)
        next(stream)
        answer = verify(daemon, "toy")
        assert [token for message in stream for token in message.token_ids] == before
    check = answer.version.check
    assert (check.passed, check.message, check.occasion) == (True, "", "verify")
    assert [part.name for part in check.parts] == PARTS
    assert all(part.checked and not part.missed for part in check.parts)
    assert parts_of(check)[STATISTICS].worst < parts_of(check)[STATISTICS].bound == 1e-3
    assert check.environment["onnxruntime"] == version_of("onnxruntime")
    assert check.environment["jinja2"] == version_of("jinja2")
    assert answer.serving == "toy@1"
    assert daemon.worker_pids() == pids


def test_a_version_that_is_not_loaded_is_verified_and_stays_so(daemon: Daemon) -> None:
    """Its worker is gone when the answer comes, and what serves is what served."""
    toy(daemon.state, vocab=2048, activate=False)
    pids = daemon.worker_pids()
    answer = verify(daemon, "toy@2")
    assert answer.version.check.passed
    assert answer.version.state == "available"
    assert answer.serving == serving(daemon) == "toy@1"
    assert daemon.worker_pids() == pids


def test_a_mutant_is_degraded_with_its_numbers(daemon: Daemon) -> None:
    """Whole by its hashes, right in every token: the statistics refuse it, list and log say by how much of what."""
    reseal(daemon.state, listed(daemon)["toy@1"].digest, "toy", less_sure, activate=False)
    check = verify(daemon, "toy@2").version.check
    assert not check.passed
    parts = parts_of(check)
    assert parts[FILES].missed == parts[TOKENS].missed == 0
    assert parts[STATISTICS].missed == parts[STATISTICS].checked
    assert parts[STATISTICS].worst == pytest.approx(0.25, abs=0.01)
    degraded = listed(daemon)["toy@2"]
    assert degraded.state == "degraded"
    assert degraded.state_reason == check.message
    assert "worst difference 0.25, the bound is 0.001" in check.message
    assert "nstall the model again" in check.message
    assert serving(daemon) == "toy@1"
    assert '"event": "check_failed"' in daemon.log.read_text()


def test_a_mutant_is_not_loaded_and_changes_nothing(daemon: Daemon) -> None:
    """Load is refused with the numbers; the version is DEGRADED, and the name means what it meant."""
    reseal(daemon.state, listed(daemon)["toy@1"].digest, "toy", less_sure, activate=True)
    with daemon.admin() as admin, pytest.raises(grpc.RpcError) as refusal:
        admin.Load(admin_pb2.LoadRequest(model="toy@2"))
    assert refusal.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert "worst difference 0.25, the bound is 0.001" in refusal.value.details()
    assert listed(daemon)["toy@2"].state == "degraded"
    assert serving(daemon) == "toy@1"


def test_at_start_a_name_falls_back_from_a_mutant(tmp_path: Path) -> None:
    """The active version does not reproduce what was recorded: the one before it answers, and a restart keeps it so."""
    digest = toy(tmp_path)
    prove(tmp_path, "toy@1")
    reseal(tmp_path, digest, "toy", less_sure, activate=True)
    for _ in range(2):
        with running(tmp_path) as daemon:
            assert serving(daemon) == "toy@1"
            found = listed(daemon)
            assert (found["toy@2"].active, found["toy@2"].state) == (True, "degraded")
            assert found["toy@1"].state == "ready"


@pytest.mark.parametrize("golden", ["text", "chat"])
def test_changed_texts_degrade_a_version_too(tmp_path: Path, golden: str) -> None:
    """As if the tokenizer or the template library had changed: refused before an engine is started, and named."""
    digest = toy(tmp_path)
    prove(tmp_path, "toy@1")

    def change(content: object) -> object:
        texts, chats = content.text_goldens, content.chat_goldens
        if golden == "text":
            wrong = msgspec.structs.replace(texts[0], ids=(*texts[0].ids[:-1], 7))
            return msgspec.structs.replace(content, text_goldens=(wrong, *texts[1:]))
        wrong = msgspec.structs.replace(chats[0], text=chats[0].text + " ")
        return msgspec.structs.replace(content, chat_goldens=(wrong, *chats[1:]))

    reseal(tmp_path, digest, "toy", unchanged, content=change, activate=True)
    with running(tmp_path) as daemon:
        assert serving(daemon) == "toy@1"
        found = listed(daemon)["toy@2"]
        assert found.state == "degraded"
        name = TOKENIZER if golden == "text" else CHAT
        assert f"{name}: 1 of 5 differ (first: " in found.state_reason
        assert verify(daemon, "toy@2").version.check.message == found.state_reason


def test_damage_found_on_demand_moves_the_name_and_repair_clears_it(tmp_path: Path) -> None:
    """The version that serves is found damaged: the one before it takes over; repaired and verified it is good."""
    toy(tmp_path)
    prove(tmp_path, "toy@1")
    digest = toy(tmp_path, vocab=2048)
    template = tmp_path / "versions" / digest / "chat_template.jinja"
    whole = template.read_bytes()
    with running(tmp_path) as daemon:
        assert serving(daemon) == "toy@2"
        template.chmod(0o640)
        template.write_bytes(whole.replace(b"assistant", b"assistanT"))
        answer = verify(daemon, "toy")
        assert "chat_template.jinja is damaged" in answer.version.check.message
        assert (answer.version.state, answer.serving, serving(daemon)) == ("degraded", "toy@1", "toy@1")
        template.write_bytes(whole)
        assert verify(daemon, "toy@2").version.state == "available"
        with daemon.admin() as admin:
            assert admin.Load(admin_pb2.LoadRequest(model="toy")).version.state == "ready"
        assert serving(daemon) == "toy@2"


def test_a_failure_to_load_does_not_hide_what_a_later_check_found(daemon: Daemon) -> None:
    """Refused for its numbers, then found damaged: it is DEGRADED all along, with the reason of now."""
    digest = reseal(daemon.state, listed(daemon)["toy@1"].digest, "toy", less_sure, activate=False)
    with daemon.admin() as admin, pytest.raises(grpc.RpcError):
        admin.Load(admin_pb2.LoadRequest(model="toy@2"))
    template = daemon.state / "versions" / digest / "chat_template.jinja"
    template.chmod(0o640)
    template.write_bytes(template.read_bytes().replace(b"assistant", b"assistanT"))
    version = verify(daemon, "toy@2").version
    assert (version.state, version.state_reason) == ("degraded", version.check.message)
    assert "chat_template.jinja is damaged" in version.state_reason


def test_a_good_version_that_nobody_promoted_does_not_take_over(daemon: Daemon) -> None:
    """Installed beside what serves and found good there: what serves is found damaged, and serves on."""
    toy(daemon.state, vocab=2048, activate=False)
    assert verify(daemon, "toy@2").version.check.passed
    template = daemon.state / "versions" / listed(daemon)["toy@1"].digest / "chat_template.jinja"
    template.chmod(0o640)
    template.write_bytes(template.read_bytes().replace(b"assistant", b"assistanT"))
    answer = verify(daemon, "toy")
    assert (answer.version.state, answer.serving, serving(daemon)) == ("degraded", "toy@1", "toy@1")
    assert listed(daemon)["toy@2"].state == "available"


def test_without_another_good_version_what_serves_goes_on(daemon: Daemon) -> None:
    """Degraded and said so, with a worker that still answers."""
    template = daemon.state / "versions" / listed(daemon)["toy@1"].digest / "chat_template.jinja"
    template.chmod(0o640)
    template.write_bytes(template.read_bytes().replace(b"assistant", b"assistanT"))
    answer = verify(daemon, "toy")
    assert answer.version.state == "degraded"
    assert answer.version.state_reason.endswith("It still serves")
    assert answer.serving == serving(daemon) == "toy@1"
    assert daemon.status().engines[0].check.message == answer.version.check.message


def test_a_worker_that_starts_again_is_checked_again(tmp_path: Path) -> None:
    """Its engine computes otherwise than the one that was lost: the name falls back, and requests are answered."""
    toy(tmp_path)
    prove(tmp_path, "toy@1")
    digest = toy(tmp_path, vocab=2048)
    engine = tmp_path / "versions" / digest / "engine.json"
    with running(tmp_path) as daemon:
        assert serving(daemon) == "toy@2"
        engine.chmod(0o640)
        engine.write_bytes(engine.read_bytes().replace(b"16.0", b"15.5"))
        assert daemon.kill_worker()
        wait_for(lambda: daemon.status().engines[0].model_version == "toy@1", "the name to fall back")
        assert serving(daemon) == "toy@1"
        assert listed(daemon)["toy@2"].state == "degraded"


def test_the_first_check_since_a_change_says_so(tmp_path: Path) -> None:
    """A library that changed between two starts is named in status, in list and in the log."""
    toy(tmp_path)
    registry = Registry(tmp_path)
    now = engine_environment() | library_versions(TEXT_LIBRARIES)
    before = now | {"onnxruntime": "1.31.1"}
    registry.record_check(registry.resolve("toy"), "install", [Part(name=FILES, checked=1, missed=0)], before)
    registry.close()
    expected = f"first check since onnxruntime 1.31.1 → {now['onnxruntime']}"
    with running(tmp_path) as daemon:
        assert daemon.status().engines[0].check.since == expected
        check = listed(daemon)["toy@1"].check
        assert [(change.name, change.before) for change in check.changes] == [("onnxruntime", "1.31.1")]
        assert expected.encode("unicode_escape").decode() in daemon.log.read_text()
        assert verify(daemon, "toy").version.check.since == ""


def test_one_verification_runs_at_a_time_and_cancelling_ends_its_worker(tmp_path: Path) -> None:
    """A second call is refused with ALREADY_EXISTS; a caller that leaves takes the worker with it."""
    toy(tmp_path, ReferenceModel(peaks=PEAKS, step_ms=150.0))
    with running(tmp_path) as daemon, daemon.admin() as admin:
        first = admin.Verify.future(admin_pb2.VerifyRequest(model="toy"))
        wait_for(lambda: len(daemon.worker_pids()) == 2, "the worker that checks")
        with pytest.raises(grpc.RpcError) as refusal:
            verify(daemon, "toy")
        assert refusal.value.code() is grpc.StatusCode.ALREADY_EXISTS
        first.cancel()
        wait_for(lambda: len(daemon.worker_pids()) == 1, "the worker to be gone")
        assert verify(daemon, "toy").version.check.passed


def test_a_check_that_could_not_be_made_degrades_nothing(daemon: Daemon) -> None:
    """The machine's fault, as the status says: RESOURCE_EXHAUSTED; the version is as it was."""
    crashing = ReferenceModel(peaks=PEAKS, faults=(PlannedFault(kind="crash", step=2),))
    toy(daemon.state, crashing, activate=False)
    with pytest.raises(grpc.RpcError) as failure:
        verify(daemon, "toy@2")
    assert failure.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "the check could not be made: the engine worker was ended by signal SIGKILL" in failure.value.details()
    found = listed(daemon)["toy@2"]
    assert found.state == "available"
    assert not found.HasField("check")


def test_an_unknown_model_is_not_found(daemon: Daemon) -> None:
    """NOT_FOUND with what there is."""
    with pytest.raises(grpc.RpcError) as refusal:
        verify(daemon, "toy@9")
    assert refusal.value.code() is grpc.StatusCode.NOT_FOUND


def test_requests_are_answered_throughout_a_fall_back(tmp_path: Path) -> None:
    """While the name moves from the damaged version to the good one no request fails."""
    toy(tmp_path)
    prove(tmp_path, "toy@1")
    digest = toy(tmp_path, vocab=2048)
    template = tmp_path / "versions" / digest / "chat_template.jinja"
    over, seen = threading.Event(), []

    with running(tmp_path) as daemon:

        def keep_asking() -> None:
            while not over.is_set():
                seen.append(serving(daemon))

        thread = threading.Thread(target=keep_asking)
        thread.start()
        try:
            wait_for(lambda: bool(seen), "the first answer")
            template.chmod(0o640)
            template.write_bytes(template.read_bytes().replace(b"assistant", b"assistanT"))
            verify(daemon, "toy")
            wait_for(lambda: seen[-1] == "toy@1", "the good version to answer")
        finally:
            over.set()
            thread.join()
    assert set(seen) == {"toy@1", "toy@2"}


def test_an_installed_export_is_checked_for_life(tmp_path: Path) -> None:
    """The real thing: installing it is its first check, it passes on demand, and a mutant of its weights does not."""
    install(EXPORTS / "llama", tmp_path, "toy", "--slots", "3", "--step-tokens", "48")
    registry = Registry(tmp_path)
    first = registry.last_check(registry.resolve("toy@1"))
    registry.close()
    assert first is not None
    assert (first.occasion, first.passed, first.first) == ("install", True, True)
    assert [part.name for part in first.parts] == PARTS

    def one_percent(directory: Path) -> None:
        path = directory / "engine" / "weights.bin"
        path.write_bytes((np.fromfile(path, np.float32) * np.float32(1.01)).tobytes())

    with running(tmp_path) as daemon:
        answer = verify(daemon, "toy")
        assert answer.version.check.since == ""
        found = parts_of(answer.version.check)
        assert found[STATISTICS].checked == 128
        assert found[STATISTICS].worst < found[STATISTICS].bound / 100
        reseal(tmp_path, answer.version.digest, "toy", one_percent, activate=False)
        wrong = verify(daemon, "toy@2").version
        assert (wrong.state, parts_of(wrong.check)[FILES].missed) == ("degraded", 0)
        assert parts_of(wrong.check)[STATISTICS].worst > 100 * parts_of(wrong.check)[STATISTICS].bound
        assert serving(daemon) == "toy@1"
