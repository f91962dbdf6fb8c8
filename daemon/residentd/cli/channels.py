"""Connections to the two services. Whether anybody listens is found out before the first call, to say it plainly."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import grpc
import grpc.aio

from resident.v1 import admin_pb2_grpc, inference_pb2_grpc
from residentd.cli.exits import ExitCode, Failure, usage
from residentd.cli.failures import failure_from_rpc
from residentd.cli.target import Target, Tls

CONNECT_S_MAX = 5.0
UNARY_S_MAX = 30.0
RECEIVED_BYTES_MAX = 64 << 20
PEM_BYTES_MAX = 1 << 20


@contextlib.contextmanager
def admin_stub(target: Target) -> Iterator[admin_pb2_grpc.AdminStub]:
    """The Admin service, for as long as the context lasts. Raises Failure, also for a call that fails inside it."""
    reach_admin(target)
    with grpc.insecure_channel(_unix_target(target.admin_socket), options=_options(None)) as channel, failing_plainly():
        yield admin_pb2_grpc.AdminStub(channel)


@contextlib.contextmanager
def inference_stub(target: Target) -> Iterator[inference_pb2_grpc.InferenceStub]:
    """The Inference service, for as long as the context lasts. Raises Failure, also for a call that fails inside it."""
    address, tls = _inference_address(target)
    options = _options(tls)
    if tls is None:
        opened = grpc.insecure_channel(address, options=options)
    else:
        opened = grpc.secure_channel(address, _credentials(tls), options=options)
    with opened as channel, failing_plainly():
        yield inference_pb2_grpc.InferenceStub(channel)


def async_inference_channel(target: Target) -> grpc.aio.Channel:
    """An asyncio channel with a connection of its own; the caller closes it. Raises Failure where nobody listens."""
    address, tls = _inference_address(target)
    options = [*_options(tls), ("grpc.use_local_subchannel_pool", 1)]
    if tls is None:
        return grpc.aio.insecure_channel(address, options=options)
    return grpc.aio.secure_channel(address, _credentials(tls), options=options)


def _inference_address(target: Target) -> tuple[str, Tls | None]:
    """The gRPC target, once somebody is seen to listen there. The admin socket carries Inference as well."""
    if target.address:
        reach_inference(target)
        return target.address, target.tls
    reach_admin(target, options="--state, --admin-socket or --address")
    return _unix_target(target.admin_socket), None


def reach_admin(target: Target, *, options: str = "--state or --admin-socket") -> None:
    """Return if somebody listens on the admin socket. Raises Failure (unreachable) with what to do about it."""
    path = target.admin_socket
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.settimeout(CONNECT_S_MAX)
            probe.connect(str(path))
    except PermissionError as error:
        raise _unreachable(
            f"you may not open the admin socket {path}. Join the group that owns it, or run this as its user"
        ) from error
    except FileNotFoundError as error:
        raise _unreachable(
            f"no daemon: there is no admin socket {path}. Start it (systemctl start residentd, or "
            f"residentctl serve --dev), or say where it is with {options}"
        ) from error
    except OSError as error:
        reason = "the path is too long for a unix socket" if "too long" in str(error) else error.strerror or str(error)
        raise _unreachable(
            f"no daemon answers on the admin socket {path} ({reason}). Start it (systemctl start residentd, or "
            f"residentctl serve --dev), or say where it is with {options}"
        ) from error


def reach_inference(target: Target) -> None:
    """Return if somebody listens at the Inference address. Raises Failure (usage, unreachable)."""
    host, _, port = target.address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise usage(f"address {target.address!r} is not HOST:PORT with a port from 1 to 65535. Give one with --address")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_S_MAX).close()
    except OSError as error:
        raise _unreachable(
            f"no daemon answers at {target.address} ({error.strerror or error}). Start it (systemctl start residentd, "
            f"or residentctl serve --dev), or say where it is with --address or --state"
        ) from error


def _unreachable(message: str) -> Failure:
    return Failure(message, code=ExitCode.UNREACHABLE)


@contextlib.contextmanager
def failing_plainly() -> Iterator[None]:
    """Turn a gRPC error raised inside into the Failure that it means."""
    try:
        yield
    except grpc.RpcError as error:
        raise failure_from_rpc(error) from error


def _unix_target(path: Path) -> str:
    return f"unix:{quote(str(path))}"  # gRPC percent-decodes the path of a target


def _options(tls: Tls | None) -> list[tuple[str, int | str]]:
    options: list[tuple[str, int | str]] = [
        ("grpc.enable_http_proxy", 0),  # a prompt never takes a detour over $http_proxy
        ("grpc.max_receive_message_length", RECEIVED_BYTES_MAX),
    ]
    if tls is not None and tls.name:
        options.append(("grpc.ssl_target_name_override", tls.name))
    return options


def _credentials(tls: Tls) -> grpc.ChannelCredentials:
    ca, key, certificate = (_pem(path) for path in (tls.ca, tls.key, tls.certificate))
    return grpc.ssl_channel_credentials(ca, key, certificate)


def _pem(path: Path | None) -> bytes | None:
    if path is None:
        return None
    try:
        with path.open("rb") as file:
            return file.read(PEM_BYTES_MAX)
    except OSError as error:
        raise usage(
            f"the TLS file {path} cannot be read: {error.strerror}. Name another, or make it readable"
        ) from error
