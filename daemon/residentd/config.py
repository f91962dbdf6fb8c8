"""residentd.toml: every key, its default, its unit and its range. `parse(text)` is pure; nothing is read elsewhere."""

from __future__ import annotations

import difflib
import tomllib
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from residentd.errors import ConfigError

CONFIG_BYTES_MAX = 1 << 20
PORT_MAX = 65_535
UNIX_PATH_BYTES_MAX = 107  # sockaddr_un.sun_path has 108, one of them the NUL

Port = Annotated[str, Meta(max_length=256)]
Count = Annotated[int, Meta(ge=1, le=1_000_000)]
Seconds = Annotated[float, Meta(gt=0, le=86_400)]


class _Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A table of the file. The comment beside a key is its documentation."""


class Listen(_Section, frozen=True):
    """[listen]: where callers connect."""

    grpc: Port = "127.0.0.1:8470"  # HOST:PORT of the Inference service; "" turns it off
    admin_socket: str = ""  # unix socket of the Admin service, mode 0660; "" is STATE/admin.sock
    tls_certificate: str = ""  # PEM chain; with tls_key set, the Inference port speaks TLS only
    tls_key: str = ""  # PEM private key
    tls_client_ca: str = ""  # PEM; set, callers must show a certificate signed by it


class Limits(_Section, frozen=True):
    """[limits]: what one caller may ask for; each is named in the error that it causes."""

    message_bytes_max: Annotated[int, Meta(ge=1 << 12, le=1 << 30)] = 16 << 20  # a request message
    metadata_bytes_max: Annotated[int, Meta(ge=1 << 10, le=1 << 20)] = 16 << 10  # the headers of a call
    streams_max: Count = 256  # calls in progress on one connection
    requests_max: Count = 512  # generations in progress, running and waiting, all models
    waiting_max: Count = 256  # generations waiting for a slot, one model
    waiting_tokens_max: Annotated[int, Meta(ge=1, le=1 << 30)] = 262_144  # waiting, one model; at least its context
    waiting_bytes_max: Annotated[int, Meta(ge=1, le=1 << 34)] = 256 << 20  # tensors waiting, one model
    texts_max: Annotated[int, Meta(ge=1, le=65_536)] = 2048  # texts of one embed, classify or rerank request
    prompt_bytes_max: Annotated[int, Meta(ge=1, le=16 << 20)] = 4 << 20  # prompt text of one request, UTF-8
    messages_max: Annotated[int, Meta(ge=1, le=16_384)] = 1024  # messages of one conversation
    output_tokens_default: Count = 256  # max_tokens where a request does not say
    stream_tokens_max: Count = 4096  # output tokens that wait for one slow reader before its request ends
    stop_strings_max: Annotated[int, Meta(ge=0, le=64)] = 16  # stop strings of one request


class Engine(_Section, frozen=True):
    """[engine]: how the engine workers run."""

    threads: Annotated[int, Meta(ge=0, le=1024)] = 0  # compute threads of one worker; 0 is one for each core
    spin_us: Annotated[int, Meta(ge=0, le=1_000_000)] = 50  # an idle compute thread's spinning within a step; 0: none
    # interactive: the prefill of a step is sized from measured costs so that decodes keep their pace. At 16 streams it
    # kept 0.97 of the tokens/s of throughput and halved ITL p95 (tools/bench_peers, 2026-12).
    scheduling: Literal["throughput", "interactive"] = "interactive"
    prefill_tokens_max: Count = 256  # prompt tokens computed in one step at most
    stall_s: Seconds = 10.0  # work and no step for so long: health says NOT_SERVING
    step_timeout_s: Seconds = 60.0  # a step longer than this: the worker is replaced
    load_timeout_s: Seconds = 600.0  # from start of a worker to READY
    retries_max: Annotated[int, Meta(ge=0, le=100)] = 3  # of one failed step
    load_attempts_max: Count = 3  # workers lost in a row before READY; then the model is FAILED
    restarts_max: Annotated[int, Meta(ge=0, le=100_000)] = 10  # within restart_window_s; past that the model is FAILED
    restart_window_s: Seconds = 60.0
    restart_backoff_s: Annotated[float, Meta(ge=0, le=3600)] = 0.2  # before the second in a row; doubles, up to 10 s
    resumes_max: Count = 3  # workers lost in a row without a token of progress that one request survives
    drain_s: Seconds = 30.0  # on SIGTERM and unload: running generations may finish within this


class Log(_Section, frozen=True):
    """[log]: structured events on stderr; never the text of a prompt or an answer."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["json", "console"] = "json"


class Config(_Section, frozen=True):
    """The whole file."""

    state: Annotated[str, Meta(min_length=1)] = (
        "/var/lib/residentd"  # versions, registry and the admin socket live here
    )
    models: tuple[str, ...] = ()  # NAME or NAME@N to load at start; empty: every active version
    listen: Listen = Listen()
    limits: Limits = Limits()
    engine: Engine = Engine()
    log: Log = Log()


def parse(text: str) -> Config:
    """The configuration in `text` (TOML). Raises ConfigError naming every unknown key or the bad value."""
    if len(text) > CONFIG_BYTES_MAX:
        raise ConfigError(f"the configuration has {len(text):,} characters; at most {CONFIG_BYTES_MAX:,} are read")
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"the configuration is not TOML: {error}") from error
    unknown = list(_unknown_keys(table, Config, ""))
    if unknown:
        raise ConfigError("\n".join(unknown))
    try:
        config = msgspec.convert(table, Config)
    except msgspec.ValidationError as error:
        raise ConfigError(f"the configuration is refused: {error}. See the table of keys in README.md") from error
    _check_tls(config.listen)
    _check_address(config.listen.grpc)
    return config


def _check_address(address: str) -> None:
    """By itself gRPC takes a port modulo 65,536, and invents one that is missing."""
    host, _, port = address.rpartition(":")
    valid = bool(host) and "/" not in host and port.isascii() and port.isdigit() and int(port) <= PORT_MAX
    if address and not valid:
        raise ConfigError(
            f"listen.grpc is {address!r}; it must be HOST:PORT with a port from 0 to {PORT_MAX:,}. Change it"
        )


def _check_tls(listen: Listen) -> None:
    """Half of a TLS configuration would silently serve in the clear."""
    if bool(listen.tls_certificate) != bool(listen.tls_key):
        raise ConfigError("listen.tls_certificate and listen.tls_key go together. Set both, or neither")
    if listen.tls_client_ca and not listen.tls_key:
        raise ConfigError("listen.tls_client_ca needs listen.tls_certificate and listen.tls_key. Set them too")


def _unknown_keys(table: dict[str, Any], section: type[msgspec.Struct], prefix: str) -> list[str]:
    """One line for each key of `table` that `section` does not have, tables within included."""
    fields = {field.name: field.type for field in msgspec.structs.fields(section)}
    lines = []
    for key, value in table.items():
        if key not in fields:
            close = difflib.get_close_matches(key, fields, n=1)
            hint = f"did you mean {prefix}{close[0]}?" if close else f"known keys: {', '.join(sorted(fields))}"
            lines.append(f"unknown key {prefix}{key}: {hint}")
        elif isinstance(value, dict) and isinstance(fields[key], type) and issubclass(fields[key], msgspec.Struct):
            lines.extend(_unknown_keys(value, fields[key], f"{prefix}{key}."))
    return lines


def key_table() -> list[tuple[str, str, str]]:
    """(key, type, default) of every key, in file order: for the README's table and a test that holds it current."""
    rows: list[tuple[str, str, str]] = []
    for field in msgspec.structs.fields(Config):
        if isinstance(field.type, type) and issubclass(field.type, _Section):
            rows.extend(
                (f"{field.name}.{inner.name}", _shown(inner.type), str(inner.default))
                for inner in msgspec.structs.fields(field.type)
            )
        else:
            rows.append((field.name, _shown(field.type), str(field.default)))
    return rows


def _shown(kind: Any) -> str:
    described = msgspec.inspect.type_info(kind)
    if isinstance(described, msgspec.inspect.LiteralType):
        return " or ".join(str(value) for value in described.values)
    return {"IntType": "integer", "FloatType": "number", "StrType": "text"}.get(
        type(described).__name__, "list of text"
    )
