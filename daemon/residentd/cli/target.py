"""Where the daemon is: from the options, the configuration and the address that a running daemon writes down."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from residentd.cli.exits import usage
from residentd.cli.options import ConnectionOptions
from residentd.config import Config, Listen, parse
from residentd.errors import ConfigError

SYSTEM_CONFIG = Path("/etc/residentd/residentd.toml")
ADDRESS_FILE = Path("run/address")  # under the state directory; HOST:PORT as bound, so port 0 can be found
ADDRESS_BYTES_MAX = 512
_WILDCARDS = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]", "": "127.0.0.1"}  # noqa: S104 - read, not bound


@dataclass(frozen=True, slots=True, kw_only=True)
class Tls:
    """PEM files of a TLS connection; `ca` alone is server authentication."""

    ca: Path | None
    certificate: Path | None
    key: Path | None
    name: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One daemon. `address` is "" where the admin socket alone is known: no daemon has said that it listens on TCP."""

    address: str
    admin_socket: Path
    state: Path | None  # known only where an option or a configuration names it
    tls: Tls | None


def dev_state(environ: Mapping[str, str]) -> Path:
    """Where `serve --dev` keeps its state unless told otherwise: $XDG_STATE_HOME/residentd."""
    home = environ.get("XDG_STATE_HOME") or str(Path(environ.get("HOME") or "/").joinpath(".local", "state"))
    return Path(home) / "residentd"


def dev_config(state: Path) -> Path:
    return state / "dev.toml"


def resolve(options: ConnectionOptions, environ: Mapping[str, str]) -> Target:
    """The daemon that `options` mean. An option beats the configuration, which beats the built-in defaults.

    Raises Failure (usage) where a named file cannot be read or is refused.
    """
    config = _config(options, environ)
    listen = (config or Config()).listen
    state = options.state or (Path(config.state) if config else None)
    if options.admin_socket:
        admin_socket = options.admin_socket
    elif listen.admin_socket and not options.state:
        admin_socket = Path(listen.admin_socket)
    else:
        admin_socket = (state or Path(Config().state)) / "admin.sock"
    return Target(
        address=options.address or _address(state, config),
        admin_socket=admin_socket.absolute(),
        state=state.absolute() if state else None,
        tls=_tls(options, listen),
    )


def _config(options: ConnectionOptions, environ: Mapping[str, str]) -> Config | None:
    if options.config:
        return _parsed(options.config)
    for path in (SYSTEM_CONFIG, dev_config(options.state or dev_state(environ))):
        if options.state and path == SYSTEM_CONFIG:
            continue  # a state directory was named: the machine's own daemon is not meant
        if _readable(path):
            return _parsed(path)
    return None


def _readable(path: Path) -> bool:
    try:
        with path.open("rb"):
            return True
    except OSError:
        return False


def _parsed(path: Path) -> Config:
    try:
        return parse(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise usage(f"the configuration {path} cannot be read: {reason}. Name another with --config") from error
    except ConfigError as error:
        raise usage(f"{path}: {error}") from error


def _address(state: Path | None, config: Config | None) -> str:
    """Where the daemon over `state` has said that it listens; "" where none has.

    The configured address is no substitute: while that daemon is down, another program may listen there.
    """
    configured = _reachable((config or Config()).listen.grpc)
    try:
        with ((state or Path(Config().state)) / ADDRESS_FILE).open(encoding="utf-8") as file:
            return _reachable(file.read(ADDRESS_BYTES_MAX).strip())
    except PermissionError:  # the directory is the daemon's own; the configuration is all that we may know
        return configured if config or not state else ""
    except (OSError, UnicodeDecodeError):
        return "" if state else configured


def _reachable(address: str) -> str:
    """`address` with a wildcard host replaced by loopback, as a client needs it."""
    host, colon, port = address.rpartition(":")
    return f"{_WILDCARDS.get(host, host)}:{port}" if colon else address


def _tls(options: ConnectionOptions, listen: Listen) -> Tls | None:
    if bool(options.tls_cert) != bool(options.tls_key):
        raise usage("--tls-cert and --tls-key belong together. Give both, or neither")
    from_config = Path(listen.tls_certificate) if listen.tls_certificate and not options.address else None
    ca = options.tls_ca or from_config
    if ca is None and options.tls_cert is None and options.tls_name is None:
        return None
    return Tls(ca=ca, certificate=options.tls_cert, key=options.tls_key, name=options.tls_name)
