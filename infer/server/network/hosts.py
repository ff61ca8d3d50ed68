"""Refuses requests under foreign host names, so that a page of another name cannot reach a server that needs no key.

A browser lets a page call its own origin. If the page's name is made to resolve to 127.0.0.1 once it is loaded (DNS
rebinding), that is this server; the request then still has the page's name as its host.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from infer.config import ServerConfig
from infer.server.address import is_loopback
from infer.server.protocol.error_responses import response_of
from infer.server.protocol.errors import ApiError

AUTHORITY = re.compile(r"(?:[^/?#]*@)?(?:\[([^\]]*)\]|([^:/?#\[\]]*))(?::[0-9]*)?")
ABSOLUTE = re.compile(r"https?://([^/?#]*)(.*)", re.DOTALL | re.IGNORECASE)


def own_names(config: ServerConfig, api_keys: Sequence[str]) -> frozenset[str] | None:
    """Return the names under which the server may be called beside this machine's; None if under any.

    A key protects a server under any name, and one that listens beyond this machine has names that it does not know:
    they are checked only if `server.allowed_hosts` says them.
    """
    names = frozenset(name.lower() for name in config.allowed_hosts)
    if "*" in names or (not names and (api_keys or not is_loopback(config.host))):
        return None
    return names | {config.host.lower()}


def host_of(authority: str) -> str | None:
    """Return the name of a `host` header, without its port, in lower case; None if it is no host."""
    match = AUTHORITY.fullmatch(authority.strip())
    return match and (match[1] or match[2] or "").rstrip(".").lower()


class HostCheck:
    """Middleware that returns 403 under a foreign name. A request without a name, which no browser sends, passes."""

    def __init__(self, app: ASGIApp, *, names: frozenset[str]) -> None:
        self.app, self.names = app, names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        stated = Headers(scope=scope).getlist("host")
        if absolute := ABSOLUTE.fullmatch(scope["path"]):  # its name counts, and not that of the header
            stated, scope = [*stated, absolute[1]], {**scope, "path": absolute[2] or "/"}
        foreign = [text for text in stated if (name := host_of(text)) is None or not self.is_own(name)]
        if foreign:
            why = f"host {foreign[0][:200]!r}: this server takes requests under the names of this machine alone"
            error = ApiError(403, f"{why}; others are allowed by server.allowed_hosts=[...]", code="foreign_host")
            await response_of(error, scope)(scope, receive, send)
        else:
            await self.app(scope, receive, send)

    def is_own(self, name: str) -> bool:
        return not name or is_loopback(name) or name in self.names
