"""Where the server listens, settled before anything slow happens: exposure, and the socket itself."""

from __future__ import annotations

import ipaddress
import os
import socket

from infer.config import ServerConfig

KEY_VARIABLE = "HEADWAY_API_KEY"  # from the environment: an argument could be read by every user of the machine


def read_api_key() -> str | None:
    key = os.environ.get(KEY_VARIABLE)
    if key is not None and not key.strip():
        raise ValueError(f"{KEY_VARIABLE}: is set but empty; unset it or give it a key")
    return key


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def check_exposure(config: ServerConfig, api_key: str | None) -> None:
    """Nobody opens a server to the network by accident."""
    if not is_loopback(config.host) and api_key is None and not config.insecure:
        raise ValueError(
            f"server.host={config.host}: others could use this server without a key; set {KEY_VARIABLE}, "
            "or say server.insecure=true"
        )


def bind(host: str, port: int) -> socket.socket:
    """A listening socket. Raises ValueError with the address and what to do."""
    at = f"{host}:{port}"
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ValueError(f"server.host={host}: no such address ({error.strerror})") from error
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # or a restart would have to wait a minute
        listener.bind(address)
        listener.listen(1024)
    except OSError as error:
        listener.close()
        reason = error.strerror or str(error)
        raise ValueError(
            f"server.port={port}: cannot listen on {at} ({reason}); try server.port={other(port)}"
        ) from error
    return listener


def other(port: int) -> int:
    return port + 1 if 1024 <= port < 65535 else 8000


def url(listener: socket.socket) -> str:
    """As a client on this machine would write it."""
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(str(host), str(host))
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
