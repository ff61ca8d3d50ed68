"""API keys, the exposure check and the listening socket, all done before anything slow starts."""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Sequence

from infer.config import ServerConfig
from infer.settings.paths import resolve_path

KEY_VARIABLE = "HEADWAY_API_KEY"  # from the environment: an argument could be read by every user of the machine
MIN_KEY_LENGTH = 8


def read_api_keys(config: ServerConfig) -> tuple[str, ...]:
    """Return the API keys of the environment and of `server.api_keys_file` (one per line); each is a separate tenant.

    Raises ValueError if the file cannot be read or holds no key, or if a key is too short or not ASCII.
    """
    keys = [key for key in [key_of_environment()] if key is not None]
    if config.api_keys_file is not None:
        file = resolve_path(config.api_keys_file)
        try:
            lines = file.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"server.api_keys_file={file}: cannot be read ({error})") from error
        file_keys = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
        if not file_keys:
            raise ValueError(f"server.api_keys_file={file}: holds no key; write one a line")
        keys += file_keys
    for number, key in enumerate(keys, 1):
        if len(key) < MIN_KEY_LENGTH or not key.isascii():
            raise ValueError(f"API key {number}: must have at least {MIN_KEY_LENGTH} ASCII characters")
    return tuple(dict.fromkeys(keys))


def key_of_environment() -> str | None:
    """Return the key of KEY_VARIABLE, if set. Raises ValueError if it is set but empty."""
    key = os.environ.get(KEY_VARIABLE)
    if key is not None and not key.strip():
        raise ValueError(f"{KEY_VARIABLE}: is set but empty; unset it or give it a key")
    return key and key.strip()


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def check_exposure(config: ServerConfig, api_keys: Sequence[str]) -> None:
    """Raises ValueError if the server would be open to the network by accident: without a key or `server.insecure`."""
    if not is_loopback(config.host) and not api_keys and not config.insecure:
        raise ValueError(
            f"server.host={config.host}: others could use this server without a key; set {KEY_VARIABLE} or "
            "server.api_keys_file, or say server.insecure=true"
        )


def bind(host: str, port: int) -> socket.socket:
    """Return a listening socket. Raises ValueError with the address and a suggestion."""
    at = f"{host}:{port}"
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ValueError(f"server.host={host}: no such address ({error.strerror})") from error
    dualstack = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
    try:
        return socket.create_server(address, family=family, backlog=1024, dualstack_ipv6=dualstack)
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        other = port + 1 if 1024 <= port < 65535 else 8000
        raise ValueError(f"server.port={port}: cannot listen on {at} ({reason}); try server.port={other}") from error


def url(listener: socket.socket) -> str:
    """Return the server's URL for a client on this machine."""
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(str(host), str(host))
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
