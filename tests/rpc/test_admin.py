from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_status import rpc_status

from resident.v1 import admin_pb2, inference_pb2, inference_pb2_grpc
from residentd.backend.reference import PlannedFault, ReferenceModel
from support.daemon import Daemon, running, wait_for
from support.installed import EXPORTS
from support.proven import prove
from support.toy_version import make_toy_version

INSTALL_S_MAX = 120


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    make_toy_version(tmp_path, "toy")
    with running(tmp_path) as daemon:
        yield daemon


def install(daemon: Daemon, directory: Path, name: str, **fields: object) -> list[admin_pb2.InstallProgress]:
    request = admin_pb2.InstallRequest(directory=str(directory), name=name, **fields)  # type: ignore[arg-type]
    with daemon.admin() as admin:
        return list(admin.Install(request, timeout=INSTALL_S_MAX))


def answer(daemon: Daemon, model: str) -> inference_pb2.CompleteResponse:
    with daemon.channel() as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        sampling = inference_pb2.Sampling(max_tokens=4, temperature=0)
        reply: inference_pb2.CompleteResponse = stub.Complete(
            inference_pb2.GenerateRequest(model=model, prompt="a", sampling=sampling), timeout=30
        )
        return reply


def health(daemon: Daemon, service: str = "") -> str:
    with daemon.channel() as channel:
        status = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=service)).status
        return health_pb2.HealthCheckResponse.ServingStatus.Name(status)


def versions(daemon: Daemon, name: str = "") -> dict[str, admin_pb2.Version]:
    with daemon.admin() as admin:
        found = admin.ListVersions(admin_pb2.ListVersionsRequest(name=name)).versions
        return {f"{version.name}@{version.number}": version for version in found}


def staged(daemon: Daemon) -> list[Path]:
    return list((daemon.state / "staging").iterdir())


def test_an_export_is_installed_served_and_listed(daemon: Daemon) -> None:
    """Progress goes from 0 to 1 through every stage; then the version answers, is active and shows its agreement."""
    progress = install(daemon, EXPORTS / "llama", "tiny", slots=3)
    fractions = [entry.fraction for entry in progress]
    assert fractions == sorted(fractions)
    assert fractions[-1] == 1.0
    stages = list(dict.fromkeys(entry.stage for entry in progress))
    assert stages == ["validate", "canonicalise", "lower", "verify", "measure", "publish", "load", "done"]
    installed = progress[-1].installed
    assert (installed.name, installed.number, installed.state, installed.active) == ("tiny", 1, "ready", True)
    assert answer(daemon, "tiny").started.model_version == "tiny@1"
    listed = versions(daemon)["tiny@1"]
    assert listed.slots == 3
    assert listed.greedy_equal == listed.greedy_total > 0
    assert 0 < listed.logit_diff_max < listed.logit_diff_bound
    assert not staged(daemon)


def test_a_quantised_build_is_installed_served_and_listed(daemon: Daemon) -> None:
    """The options reach the compiler; the version passes its own goldens at load, and shows what it lost and costs."""
    progress = install(daemon, EXPORTS / "llama", "tiny", precision="int8", block=32, kl_max=1.0)
    assert "quantise" in {entry.stage for entry in progress}
    assert progress[-1].installed.state == "ready"
    assert answer(daemon, "tiny").started.model_version == "tiny@1"
    listed = versions(daemon)["tiny@1"]
    assert (listed.precision, listed.weights) == ("int8", "block 32; head int8; embedding int8")
    assert 0 < listed.quality.kl_mean < listed.quality.kl_bound == 1.0
    assert 0.5 < listed.quality.top1 < 1
    assert listed.quality.positions == 2040
    assert listed.cost.memory_bytes > listed.cost.file_bytes > 0
    assert min(listed.speeds.decode_one, listed.speeds.decode_many, listed.speeds.prefill) > 0
    assert 1 <= listed.speeds.rows <= listed.slots


def test_speeds_are_measured_once_and_kept(daemon: Daemon) -> None:
    """The first load measures; a second one, and a check beside it, leave the figures as they are."""
    install(daemon, EXPORTS / "llama", "tiny")
    first = versions(daemon)["tiny@1"].speeds
    assert first.decode_one > 0
    with daemon.admin() as admin:
        admin.Unload(admin_pb2.UnloadRequest(model="tiny"))
        admin.Verify(admin_pb2.VerifyRequest(model="tiny"))
        admin.Load(admin_pb2.LoadRequest(model="tiny"))
    assert versions(daemon)["tiny@1"].speeds == first


def test_a_build_that_loses_too_much_is_refused(daemon: Daemon) -> None:
    """FAILED_PRECONDITION with the numbers and the way out; nothing is staged or registered."""
    with pytest.raises(grpc.RpcError) as refusal:
        install(daemon, EXPORTS / "llama", "tiny", precision="int4", kl_max=0.01)
    assert refusal.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert "the bound is 0.01" in refusal.value.details()
    assert not staged(daemon)
    assert set(versions(daemon)) == {"toy@1"}


def test_a_second_version_takes_over_without_a_gap(daemon: Daemon) -> None:
    """While version 2 is compiled and loaded requests are answered and health is SERVING; afterwards it answers."""
    install(daemon, EXPORTS / "llama", "tiny", slots=2)
    over, seen = threading.Event(), []

    def keep_asking() -> None:
        while not over.is_set():
            seen.append((answer(daemon, "tiny").started.model_version, health(daemon), health(daemon, "tiny")))

    thread = threading.Thread(target=keep_asking)
    thread.start()
    try:
        install(daemon, EXPORTS / "llama", "tiny", slots=4)
        wait_for(lambda: bool(seen) and seen[-1][0] == "tiny@2", "the new version to answer")
    finally:
        over.set()
        thread.join()
    assert {entry[0] for entry in seen} == {"tiny@1", "tiny@2"}
    assert {entry[1:] for entry in seen} == {("SERVING", "SERVING")}
    assert versions(daemon)["tiny@1"].state == "available"


def test_keep_active_leaves_the_name_as_it_is(daemon: Daemon) -> None:
    """With keep_active the new version is registered, and the name still means the old one."""
    install(daemon, EXPORTS / "llama", "tiny", slots=2)
    installed = install(daemon, EXPORTS / "llama", "tiny", slots=4, keep_active=True)[-1].installed
    assert (installed.number, installed.active, installed.state) == (2, False, "available")
    assert answer(daemon, "tiny").started.model_version == "tiny@1"


def test_a_refused_source_reports_every_finding(daemon: Daemon, tmp_path: Path) -> None:
    """FAILED_PRECONDITION with all findings in the details; nothing staged, nothing registered, the others serve."""
    source = tmp_path / "source"
    shutil.copytree(EXPORTS / "llama", source)
    (source / "tokenizer.json").unlink()
    (source / "config.json").write_text("{")
    with pytest.raises(grpc.RpcError) as refusal:
        install(daemon, source, "broken")
    assert refusal.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    details = error_details_pb2.BadRequest()
    assert any(detail.Unpack(details) for detail in rpc_status.from_call(refusal.value).details)
    assert len(details.field_violations) >= 2
    assert not staged(daemon)
    assert set(versions(daemon)) == {"toy@1"}
    assert answer(daemon, "toy").started.model_version == "toy@1"


@pytest.mark.parametrize("stage", ["validate", "verify"])
def test_a_cancelled_installation_leaves_nothing(daemon: Daemon, stage: str) -> None:
    """Cancelling the call ends the compiler: no staging, no version; the next installation works."""
    with daemon.admin() as admin:
        call = admin.Install(admin_pb2.InstallRequest(directory=str(EXPORTS / "llama"), name="tiny"))
        next(entry for entry in call if entry.stage == stage)
        call.cancel()
    wait_for(lambda: not staged(daemon), "the staging directory to be empty")
    assert set(versions(daemon)) == {"toy@1"}
    wait_for(lambda: install_or_busy(daemon), "the next installation to be taken")
    assert answer(daemon, "tiny").started.model_version == "tiny@1"


def install_or_busy(daemon: Daemon) -> bool:
    try:
        install(daemon, EXPORTS / "llama", "tiny")
    except grpc.RpcError as error:
        if error.code() is not grpc.StatusCode.ALREADY_EXISTS:
            raise
        return False
    return True


def test_one_installation_runs_at_a_time(daemon: Daemon) -> None:
    """A second one is refused with ALREADY_EXISTS while the first runs, and the first is undisturbed."""
    with daemon.admin() as admin:
        first = admin.Install(admin_pb2.InstallRequest(directory=str(EXPORTS / "llama"), name="one"))
        next(first)
        with pytest.raises(grpc.RpcError) as refusal:
            install(daemon, EXPORTS / "qwen2", "two")
        assert refusal.value.code() is grpc.StatusCode.ALREADY_EXISTS
        assert list(first)[-1].installed.state == "ready"


@pytest.mark.parametrize(
    ("directory", "name", "message"),
    [("relative", "ok", "absolute"), ("/nonexistent", "../x", "not allowed"), ("/nonexistent", "", "not allowed")],
)
def test_a_wrong_request_is_refused_before_anything_starts(
    daemon: Daemon, directory: str, name: str, message: str
) -> None:
    """FAILED_PRECONDITION naming what is wrong."""
    with pytest.raises(grpc.RpcError) as refusal:
        install(daemon, Path(directory), name)
    assert refusal.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert message in refusal.value.details()


def test_load_and_unload(daemon: Daemon) -> None:
    """An unloaded model's requests are UNAVAILABLE and health follows; loaded again it answers as before."""
    before = answer(daemon, "toy").text
    with daemon.admin() as admin:
        admin.Unload(admin_pb2.UnloadRequest(model="toy"))
        wait_for(lambda: health(daemon) == "NOT_SERVING", "health to follow")
        with pytest.raises(grpc.RpcError) as refusal:
            answer(daemon, "toy")
        assert refusal.value.code() is grpc.StatusCode.UNAVAILABLE
        assert "residentctl load" in refusal.value.details()
        with pytest.raises(grpc.RpcError) as again:
            admin.Unload(admin_pb2.UnloadRequest(model="toy"))
        assert again.value.code() is grpc.StatusCode.NOT_FOUND
        assert admin.Load(admin_pb2.LoadRequest(model="toy")).version.state == "ready"
    assert answer(daemon, "toy").text == before
    wait_for(lambda: health(daemon) == "SERVING", "health to follow")


def test_a_version_that_does_not_come_up_changes_nothing(daemon: Daemon) -> None:
    """Load fails with the worker's reason; the name still means the version that serves, and health stays SERVING."""
    broken = ReferenceModel(faults=(PlannedFault(kind="error", step=1),))
    make_toy_version(daemon.state, "toy", model=broken, activate=False)
    with daemon.admin() as admin, pytest.raises(grpc.RpcError) as failure:
        admin.Load(admin_pb2.LoadRequest(model="toy@2"))
    assert failure.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert "as planned" in failure.value.details()
    assert answer(daemon, "toy").started.model_version == "toy@1"
    assert health(daemon) == "SERVING"
    assert versions(daemon)["toy@1"].active


def test_a_failed_model_can_be_loaded_again_and_health_recovers(tmp_path: Path) -> None:
    """FAILED after its restart budget, refused with UNAVAILABLE; another load that fails leaves no wreck behind."""
    doomed = ReferenceModel(faults=(PlannedFault(kind="crash", token=600),))
    make_toy_version(tmp_path, "doomed", model=doomed)
    with running(tmp_path, config="[engine]\nrestarts_max = 0\nrestart_backoff_s = 0.0\n") as daemon:
        poison = inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds(ids=[600]))
        with daemon.channel() as channel, pytest.raises(grpc.RpcError):
            inference_pb2_grpc.InferenceStub(channel).Complete(poison, timeout=30)
        wait_for(lambda: health(daemon) == "NOT_SERVING", "health to see the failure")
        assert versions(daemon)["doomed@1"].state == "failed"
        engine = next((daemon.state / "versions").glob("*/engine.json"))
        contents = engine.read_bytes()
        engine.write_bytes(b" " * len(contents))
        with daemon.admin() as admin:
            with pytest.raises(grpc.RpcError) as failure:
                admin.Load(admin_pb2.LoadRequest(model="doomed"))
            assert failure.value.code() is grpc.StatusCode.FAILED_PRECONDITION
            with pytest.raises(grpc.RpcError) as refusal:
                answer(daemon, "")
            assert refusal.value.code() is grpc.StatusCode.UNAVAILABLE
            engine.write_bytes(contents)
            admin.Load(admin_pb2.LoadRequest(model="doomed"))
        wait_for(lambda: health(daemon) == "SERVING", "health to recover")
        assert answer(daemon, "doomed").started.model_version == "doomed@1"


def test_an_idle_engine_is_not_taken_for_a_stalled_one(tmp_path: Path) -> None:
    """After more idle time than step_timeout_s a request is answered by the same worker, without a restart."""
    make_toy_version(tmp_path, model=ReferenceModel(step_ms=300.0))
    config = "[engine]\nstep_timeout_s = 1.0\nstall_s = 0.9\n"
    with running(tmp_path, config=config) as daemon:
        pids = daemon.worker_pids()
        threading.Event().wait(1.5)
        assert answer(daemon, "toy").finish.usage.completion_tokens == 4
        assert daemon.worker_pids() == pids
        assert daemon.status().engines[0].worker_restarts == 0


def test_a_daemon_whose_version_is_damaged_serves_the_others(tmp_path: Path) -> None:
    """At start a version that cannot be loaded is logged and left; every other active version is served."""
    digest = make_toy_version(tmp_path, "a-damaged")
    make_toy_version(tmp_path, "b-fine", vocab=2048)
    tokenizer = tmp_path / "versions" / digest / "tokenizer.json"
    tokenizer.write_bytes(b"{}".ljust(tokenizer.stat().st_size))
    with running(tmp_path) as daemon:
        assert answer(daemon, "b-fine").started.model_version == "b-fine@1"
        assert "load_failed" in daemon.log.read_text()


def test_a_state_that_others_can_write_is_refused(tmp_path: Path) -> None:
    """A model directory that another user could fill is not served from."""
    import subprocess
    import sys

    state = tmp_path / "state"
    state.mkdir()
    state.chmod(0o777)
    config = tmp_path / "c.toml"
    config.write_text(f'state = "{state}"\n')
    command = [sys.executable, "-m", "residentd", "--config", str(config)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 2
    assert "others could replace a model" in done.stderr


def flip(path: Path) -> None:
    """Change one bit in the middle of a file, its size unchanged."""
    contents = bytearray(path.read_bytes())
    contents[len(contents) // 2] ^= 1
    path.write_bytes(contents)


def test_one_flipped_bit_keeps_a_version_from_being_served(daemon: Daemon) -> None:
    """Weights that are not those of the manifest never reach READY: the load names the file, list shows the reason."""
    digest = install(daemon, EXPORTS / "llama", "tiny")[-1].installed.digest
    with daemon.admin() as admin:
        admin.Unload(admin_pb2.UnloadRequest(model="tiny"))
        flip(daemon.state / "versions" / digest / "engine" / "weights.bin")
        with pytest.raises(grpc.RpcError) as failure:
            admin.Load(admin_pb2.LoadRequest(model="tiny"))
    assert failure.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert "weights.bin" in failure.value.details()
    listed = versions(daemon)["tiny@1"]
    assert listed.state == "failed"
    assert "weights.bin" in listed.state_reason
    assert answer(daemon, "toy").started.model_version == "toy@1"


def test_a_name_falls_back_to_its_last_good_version(tmp_path: Path) -> None:
    """At start, a damaged active version is reported as failed and the last one that was good answers for the name."""
    make_toy_version(tmp_path, "toy")
    prove(tmp_path, "toy@1")
    digest = make_toy_version(tmp_path, "toy", vocab=2048)
    flip(tmp_path / "versions" / digest / "tokenizer.json")
    with running(tmp_path) as daemon:
        assert answer(daemon, "toy").started.model_version == "toy@1"
        wait_for(lambda: health(daemon) == "SERVING", "health to follow")
        listed = versions(daemon)
    assert (listed["toy@2"].active, listed["toy@2"].state) == (True, "failed")
    assert listed["toy@1"].state == "ready"


def test_a_worker_that_never_comes_up_is_given_up_and_blocks_nobody(tmp_path: Path) -> None:
    """Three starts, however slow, and the model is FAILED; another model is served meanwhile."""
    crashing = ReferenceModel(faults=(PlannedFault(kind="crash", step=2),), step_ms=400.0)
    make_toy_version(tmp_path, "a-crashing", model=crashing)
    make_toy_version(tmp_path, "b-fine")
    config = "[engine]\nrestart_window_s = 0.2\nrestart_backoff_s = 0.0\n"
    with running(tmp_path, config=config) as daemon:
        assert answer(daemon, "b-fine").started.model_version == "b-fine@1"
        wait_for(lambda: versions(daemon)["a-crashing@1"].state == "failed", "the model to be given up", 30)
        assert daemon.log.read_text().count("worker_lost") == 3


def test_two_names_for_one_export_are_two_models(tmp_path: Path) -> None:
    """Each name reports itself, and unloading one leaves the other."""
    make_toy_version(tmp_path, "one")
    make_toy_version(tmp_path, "two")
    with running(tmp_path, models=2) as daemon:
        assert answer(daemon, "two").started.model_version == "two@1"
        with daemon.admin() as admin:
            admin.Unload(admin_pb2.UnloadRequest(model="one"))
        assert answer(daemon, "two").started.model_version == "two@1"
