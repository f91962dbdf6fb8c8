"""The two listeners: Inference, health and reflection on TCP; Admin and the same on a unix socket of mode 0660."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Final
from urllib.parse import quote

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from resident.v1 import admin_pb2, admin_pb2_grpc, inference_pb2, inference_pb2_grpc
from residentd.config import UNIX_PATH_BYTES_MAX, Config
from residentd.errors import ConfigError
from residentd.rpc.admin import AdminServicer
from residentd.rpc.health import HealthFeed
from residentd.rpc.inference import InferenceServicer
from residentd.supervisor.engines import Engines

TRANSPORT_FACTOR: Final = 2
"""gRPC itself refuses what is past this multiple of a limit, in its own words; below it our error names the key."""
CALLS_MAX: Final = 16_384
"""In progress at once, watches and calls without a message too: bounds memory. Generations have their own limit."""
MESSAGE_BYTES_END: Final = (1 << 31) - 1  # the option is a C int
ADMIN_SOCKET_MODE: Final = 0o660
# Clients of other servers ping as often as every 5 s (tritonclient); grpc's default would close them with
# ENHANCE_YOUR_CALM.
KEEPALIVE_OPTIONS: Final = (
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.server_handshake_timeout_ms", 10_000),
)


def admin_socket(config: Config) -> Path:
    return Path(config.listen.admin_socket or Path(config.state) / "admin.sock")


async def serve_inference(engines: Engines, feed: HealthFeed, config: Config) -> tuple[grpc.aio.Server, int]:
    """The started TCP server and its port. Raises ConfigError when the address cannot be taken."""
    server = _server(config)
    inference_pb2_grpc.add_InferenceServicer_to_server(InferenceServicer(engines, config), server)
    names = [inference_pb2.DESCRIPTOR.services_by_name["Inference"].full_name]
    _add_common(server, feed, names)
    address = config.listen.grpc
    try:
        credentials = _credentials(config)
        if credentials is None:
            port = server.add_insecure_port(address)
        else:
            port = server.add_secure_port(address, credentials)
    except (RuntimeError, OSError) as error:
        raise ConfigError(
            f"cannot listen on {address} (listen.grpc): {error}. Free the port or choose another"
        ) from error
    await server.start()
    return server, port


async def serve_admin(engines: Engines, feed: HealthFeed, config: Config) -> grpc.aio.Server:
    """The started admin server. The caller holds the state's lock, so a socket that is there is a dead daemon's."""
    path = admin_socket(config)
    if len(os.fsencode(path)) > UNIX_PATH_BYTES_MAX:
        raise ConfigError(
            f"the admin socket's path has {len(os.fsencode(path))} bytes; a unix socket takes {UNIX_PATH_BYTES_MAX}. "
            "Set listen.admin_socket to a shorter path"
        )
    server = _server(config)
    admin_pb2_grpc.add_AdminServicer_to_server(AdminServicer(engines, feed, config), server)
    inference_pb2_grpc.add_InferenceServicer_to_server(InferenceServicer(engines, config), server)
    names = [
        inference_pb2.DESCRIPTOR.services_by_name["Inference"].full_name,
        admin_pb2.DESCRIPTOR.services_by_name["Admin"].full_name,
    ]
    _add_common(server, feed, names)
    if path.exists() and stat.S_ISSOCK(path.lstat().st_mode):
        path.unlink()
    mask = os.umask(0o777 & ~ADMIN_SOCKET_MODE)
    try:
        server.add_insecure_port(f"unix:{quote(str(path))}")  # gRPC decodes percent signs
        await server.start()
    except RuntimeError as error:
        raise ConfigError(f"cannot listen on {path} (listen.admin_socket): {error}") from error
    finally:
        os.umask(mask)
    path.chmod(ADMIN_SOCKET_MODE)
    return server


def _add_common(server: grpc.aio.Server, feed: HealthFeed, names: list[str]) -> None:
    health_pb2_grpc.add_HealthServicer_to_server(feed.servicer, server)
    health_name = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
    reflection.enable_server_reflection((*names, health_name, reflection.SERVICE_NAME), server)


def _server(config: Config) -> grpc.aio.Server:
    return grpc.aio.server(options=_options(config), maximum_concurrent_rpcs=CALLS_MAX)


def _options(config: Config) -> list[tuple[str, int]]:
    limits = config.limits
    return [
        ("grpc.so_reuseport", 0),  # two daemons on one port must be an error, not a lottery
        ("grpc.max_receive_message_length", min(MESSAGE_BYTES_END, TRANSPORT_FACTOR * limits.message_bytes_max)),
        ("grpc.max_metadata_size", TRANSPORT_FACTOR * limits.metadata_bytes_max),
        ("grpc.absolute_max_metadata_size", TRANSPORT_FACTOR * limits.metadata_bytes_max),
        ("grpc.max_concurrent_streams", limits.streams_max),
        *KEEPALIVE_OPTIONS,
    ]


def _credentials(config: Config) -> grpc.ServerCredentials | None:
    listen = config.listen
    if not listen.tls_certificate and not listen.tls_key:
        return None
    try:
        pair = (Path(listen.tls_key).read_bytes(), Path(listen.tls_certificate).read_bytes())
        client_ca = Path(listen.tls_client_ca).read_bytes() if listen.tls_client_ca else None
    except OSError as error:
        raise ConfigError(f"cannot read {error.filename} (listen.tls_*): {error.strerror}") from error
    return grpc.ssl_server_credentials([pair], client_ca, require_client_auth=client_ca is not None)
