"""Where the daemon is: options, configuration, and the address that a daemon writes down."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from residentd.cli.exits import ExitCode, Failure
from residentd.cli.options import ConnectionOptions
from residentd.cli.target import resolve

NOTHING: Mapping[str, str] = {"HOME": "/nonexistent"}


def _config(directory: Path, text: str) -> Path:
    path = directory / "residentd.toml"
    path.write_text(text)
    return path


def test_without_anything_the_built_in_defaults_hold() -> None:
    """Nothing given and nothing found: the machine's own daemon, whose state is not ours to write."""
    target = resolve(ConnectionOptions(), NOTHING)
    assert (target.address, target.admin_socket) == ("127.0.0.1:8470", Path("/var/lib/residentd/admin.sock"))
    assert target.state is None
    assert target.tls is None


@pytest.mark.parametrize(
    ("listen", "socket"),
    [
        ('grpc = "127.0.0.1:9000"', "STATE/admin.sock"),
        ('grpc = ""', "STATE/admin.sock"),
        ('admin_socket = "/run/residentd/admin.sock"', "/run/residentd/admin.sock"),
    ],
)
def test_the_configuration_says_where(tmp_path: Path, listen: str, socket: str) -> None:
    """The admin socket is in the state directory unless named; it is all there is until a daemon writes its address."""
    path = _config(tmp_path, f'state = "{tmp_path}"\n[listen]\n{listen}\n')
    target = resolve(ConnectionOptions(config=path), NOTHING)
    assert target.address == ""
    assert str(target.admin_socket) == socket.replace("STATE", str(tmp_path))
    assert target.state == tmp_path


@pytest.mark.parametrize(
    ("bound", "address"),
    [
        ("10.0.0.7:9000", "10.0.0.7:9000"),
        ("0.0.0.0:9000", "127.0.0.1:9000"),
        ("[::]:9000", "[::1]:9000"),
        (":9000", "127.0.0.1:9000"),
        ("", ""),
    ],
)
def test_a_wildcard_address_is_reached_over_loopback(tmp_path: Path, bound: str, address: str) -> None:
    """A daemon may listen on every address; a client needs one."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "address").write_text(f"{bound}\n")
    assert resolve(ConnectionOptions(state=tmp_path), NOTHING).address == address


def test_options_beat_the_configuration(tmp_path: Path) -> None:
    """--state brings its own admin socket; --address and --admin-socket are taken as they are."""
    path = _config(tmp_path, '[listen]\nadmin_socket = "/run/other.sock"\n')
    other = tmp_path / "other"
    assert resolve(ConnectionOptions(config=path, state=other), NOTHING).admin_socket == other / "admin.sock"
    named = ConnectionOptions(config=path, state=other, admin_socket=Path("/run/mine"), address="box:1")
    target = resolve(named, NOTHING)
    assert (target.admin_socket, target.address, target.state) == (Path("/run/mine"), "box:1", other)


def test_the_address_that_a_daemon_wrote_down_is_used(tmp_path: Path) -> None:
    """STATE/run/address beats listen.grpc, whose port may be 0, and loses to --address."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "address").write_text("0.0.0.0:40123\n")
    path = _config(tmp_path, f'state = "{tmp_path}"\n[listen]\ngrpc = "0.0.0.0:0"\n')
    assert resolve(ConnectionOptions(config=path), NOTHING).address == "127.0.0.1:40123"
    assert resolve(ConnectionOptions(state=tmp_path), NOTHING).address == "127.0.0.1:40123"
    assert resolve(ConnectionOptions(state=tmp_path, address="box:1"), NOTHING).address == "box:1"


def test_the_development_daemon_is_found_where_there_is_no_other(tmp_path: Path) -> None:
    """Without any option, the configuration that `serve --dev` has written is used."""
    state = tmp_path / "residentd"
    state.mkdir()
    (state / "dev.toml").write_text(f'state = "{state}"\n[listen]\ngrpc = "127.0.0.1:9001"\n')
    target = resolve(ConnectionOptions(), {"XDG_STATE_HOME": str(tmp_path)})
    assert (target.state, target.admin_socket) == (state, state / "admin.sock")


def test_a_relative_state_directory_becomes_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The daemon and the compiler work in other directories than the person who types."""
    monkeypatch.chdir(tmp_path)
    target = resolve(ConnectionOptions(state=Path("here")), NOTHING)
    assert (target.state, target.admin_socket) == (tmp_path / "here", tmp_path / "here" / "admin.sock")


def test_the_daemons_own_certificate_is_trusted(tmp_path: Path) -> None:
    """With TLS in the configuration, its certificate is what a local client pins; --tls-ca beats it."""
    path = _config(tmp_path, '[listen]\ntls_certificate = "/etc/tls/chain.pem"\ntls_key = "/etc/tls/key.pem"\n')
    tls = resolve(ConnectionOptions(config=path), NOTHING).tls
    assert tls is not None
    assert tls.ca == Path("/etc/tls/chain.pem")
    assert (tls.certificate, tls.key) == (None, None)  # the daemon's own key is not a client's
    given = resolve(ConnectionOptions(config=path, tls_ca=Path("ca.pem")), NOTHING).tls
    assert given is not None
    assert given.ca == Path("ca.pem")


@pytest.mark.parametrize(
    ("text", "said"),
    [("stat = 1", "did you mean state?"), ("not toml", "is not TOML"), ("\udcff", "it is not UTF-8"), (None, "cannot")],
)
def test_a_configuration_that_cannot_be_used_is_a_usage_error(tmp_path: Path, text: str | None, said: str) -> None:
    """The failure names the file and the reason, and nothing is connected to."""
    path = tmp_path / "residentd.toml"
    if text is not None:
        path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(Failure) as caught:
        resolve(ConnectionOptions(config=path), NOTHING)
    assert caught.value.code == ExitCode.USAGE
    assert str(path) in caught.value.message
    assert said in caught.value.message


def test_half_a_client_certificate_is_a_usage_error() -> None:
    """--tls-cert without --tls-key cannot work, and would fail obscurely."""
    with pytest.raises(Failure, match="belong together"):
        resolve(ConnectionOptions(tls_cert=Path("cert.pem")), NOTHING)


def test_options_after_the_subcommand_beat_those_before() -> None:
    """`residentctl --address a list --address b` means b; what only one of them names holds."""
    before = ConnectionOptions(address="a:1", state=Path("s"), json=True)
    merged = ConnectionOptions(address="b:2").over(before)
    assert (merged.address, merged.state, merged.json) == ("b:2", Path("s"), True)
