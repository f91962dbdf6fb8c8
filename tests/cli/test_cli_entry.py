"""The entry point: completion, TLS, start-up, and what happens when something of ours breaks."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from cli_fake_daemon import FakeDaemon, Inference, Running
from cli_support import Residentctl
from cli_terminal import WAIT_S_MAX, piped

from resident.v1 import inference_pb2_grpc
from residentd.cli.exits import ExitCode
from residentd.cli.main import INTERRUPTED

COMMANDS = {
    "install", "list", "load", "unload", "status", "generate", "chat", "count-tokens", "models", "bench", "serve",
}  # fmt: skip


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_shell_completes_commands_and_options(shell: str) -> None:
    """The completion protocol of each shell that typer knows: every command, and a command's own options."""
    commands = _completed(shell, "residentctl ")
    assert set(re.findall(r"[a-z]+(?:-[a-z]+)?", commands)) >= COMMANDS
    assert "--concurrency" in _completed(shell, "residentctl bench --conc")
    precisions = _completed(shell, "residentctl install /tmp --precision ")
    assert {"fp32", "fp16", "bf16", "int8", "int4", "auto"} <= set(re.findall(r"[a-z]+[0-9]*", precisions))


def _completed(shell: str, line: str) -> str:
    words = {"COMP_WORDS": line, "COMP_CWORD": str(len(line.split(" ")) - 1), "_TYPER_COMPLETE_ARGS": line}
    last = line.rpartition(" ")[2]
    process = piped(
        environment={
            "_RESIDENTCTL_COMPLETE": f"complete_{shell}",
            "_TYPER_COMPLETE_FISH_ACTION": "get-args",
            "_TYPER_COMPLETE_WORD_TO_COMPLETE": last,
            **words,
        }
    )
    out, err = process.communicate(timeout=WAIT_S_MAX)
    assert err == b""
    return out.decode()


def test_show_completion_prints_a_script() -> None:
    """`residentctl --show-completion` is what a user's shell can source."""
    process = piped("--show-completion", "bash", environment={"_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"})
    out, _ = process.communicate(timeout=WAIT_S_MAX)
    assert process.returncode == 0
    assert b"_RESIDENTCTL_COMPLETE=complete_bash" in out


def test_the_client_carries_no_engine() -> None:
    """residentctl starts without numpy, ONNX Runtime, tokenizers or the daemon's own packages: it is a client."""
    code = "import sys, residentd.cli.app; print(*sorted(sys.modules))"
    listed = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    ours = {".".join(name.split(".")[:2]) for name in listed if name.split(".")[0] == "residentd"}
    assert ours == {"residentd", "residentd.cli", "residentd.config", "residentd.errors"}
    heavy = {"numpy", "onnx", "onnxruntime", "onnx_ir", "tokenizers", "jinja2", "residentd_build", "sqlite3"}
    assert not heavy & {name.split(".")[0] for name in listed}


def test_ctrl_c_while_it_starts_is_quiet(tmp_path: Path) -> None:
    """Half of the start is imports; an interrupt there is exit code 130 and no traceback."""
    (tmp_path / "typer.py").write_text("import signal\n\nsignal.raise_signal(signal.SIGINT)\n")
    process = piped("list", environment={"PYTHONPATH": str(tmp_path)})
    assert process.communicate(timeout=WAIT_S_MAX) == (b"", b"")
    assert process.returncode == ExitCode.INTERRUPTED == INTERRUPTED


def test_our_own_mistake_is_one_line(residentctl: Residentctl, monkeypatch: pytest.MonkeyPatch) -> None:
    """No traceback for the operator; RESIDENTCTL_TRACEBACK=1 gives the developer one."""

    def broken(*_: object, **__: object) -> None:
        raise KeyError("a mistake")

    monkeypatch.setattr("residentd.cli.versions.versions_table", broken)
    result = residentctl("list")
    assert result.code == ExitCode.FAILED
    (line,) = result.err.splitlines()
    assert "internal error: KeyError: 'a mistake'" in line
    monkeypatch.setenv("RESIDENTCTL_TRACEBACK", "1")
    with pytest.raises(KeyError):
        residentctl("list")


def test_an_answer_that_the_terminal_cannot_encode(running: Running) -> None:
    """An ASCII terminal gets escapes, not a traceback."""
    process = piped("generate", "x", "--address", "127.0.0.1:é", environment={"PYTHONIOENCODING": "ascii"})
    _, err = process.communicate(timeout=WAIT_S_MAX)
    assert process.returncode == ExitCode.USAGE
    assert b"127.0.0.1:\\xe9" in err


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    """A fresh self-signed certificate for the name `residentd.test`, beside its key."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("needs the openssl command to make a certificate")
    subprocess.run(
        [openssl, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "1",
         "-subj", "/CN=residentd.test", "-addext", "subjectAltName=DNS:residentd.test",
         "-keyout", str(tmp_path / "key.pem"), "-out", str(tmp_path / "cert.pem")],
        check=True, capture_output=True,
    )  # fmt: skip
    return tmp_path / "cert.pem"


def test_tls(lonely_residentctl: Residentctl, certificate: Path) -> None:
    """With the authority and the certificate's name it works; without either, one line that points to them."""
    server = grpc.server(ThreadPoolExecutor(max_workers=2))
    inference_pb2_grpc.add_InferenceServicer_to_server(Inference(FakeDaemon()), server)
    pair = ((certificate.parent / "key.pem").read_bytes(), certificate.read_bytes())
    address = f"127.0.0.1:{server.add_secure_port('127.0.0.1:0', grpc.ssl_server_credentials([pair]))}"
    server.start()
    try:
        asked = ("generate", "one two", "--address", address)
        trusted = lonely_residentctl(*asked, "--tls-ca", str(certificate), "--tls-name", "residentd.test")
        assert (trusted.code, trusted.out) == (ExitCode.OK, " w0 w1")
        for wrong in ((), ("--tls-ca", str(certificate))):
            refused = lonely_residentctl(*asked, *wrong)
            assert refused.code == ExitCode.UNREACHABLE
            assert "--tls-ca" in refused.err
        missing = lonely_residentctl(*asked, "--tls-ca", "/nonexistent.pem")
        assert missing.code == ExitCode.USAGE
    finally:
        server.stop(None).wait()


def test_a_state_directory_with_a_blank_in_its_name(
    lonely_residentctl: Residentctl, running: Running, tmp_path: Path
) -> None:
    """gRPC reads a unix target as a URI: the path is quoted for it."""
    link = running.state / "a b%20c"
    link.symlink_to(running.state)
    result = lonely_residentctl("list", "--admin-socket", str(link / "admin.sock"), "--json")
    assert [version["name"] for version in result.document["versions"]] == ["toy"]
