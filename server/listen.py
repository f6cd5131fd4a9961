"""The address, taken before anything slow begins."""

from __future__ import annotations

import socket

from tiercache.config import ServerConfig
from tiercache.errors import ConfigError


def bind(server: ServerConfig) -> socket.socket:
    """A socket on the configured address. ConfigError when it is taken or not ours."""
    where = f"server.host {server.host} and server.port {server.port}"
    try:
        found = socket.getaddrinfo(server.host, server.port, type=socket.SOCK_STREAM)
        family, kind, protocol, _, address = found[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(f"{where}: no such address: {error.strerror}") from None
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
    except OSError as error:
        listener.close()
        hint = "; is another server running? `--port` takes another" if server.port else ""
        raise ConfigError(f"{where} cannot be used: {error.strerror}{hint}") from None
    return listener
