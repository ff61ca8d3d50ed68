"""uvicorn's HTTP/1.1 connections, with a bound on how long a client may keep one waiting, and on their number.

uvicorn ends a connection that idles between two requests, and no other: one that sends nothing, half a request, or
reads nothing of its response would stay open for ever, until no descriptor is left for anybody else.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import resource
from collections.abc import Hashable
from functools import partial
from time import monotonic
from typing import Any, cast

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from infer.config import ServerConfig

log = logging.getLogger("headway.server")

LOG_INTERVAL_S = 60.0
NO_DESCRIPTOR = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
OWES = (h11.IDLE, h11.SEND_BODY)  # a client's states in which more of a request is to come
ANSWER = (
    "HTTP/1.1 {status}\r\nconnection: close\r\ncontent-type: application/json\r\ncontent-length: {size}\r\n\r\n{body}"
)
BODY = '{{"error": {{"message": "{message}", "type": "{type}", "param": null, "code": "{code}"}}}}'


def answer(status: str, message: str, kind: str, code: str) -> bytes:
    body = BODY.format(message=message, type=kind, code=code)
    return ANSWER.format(status=status, size=len(body), body=body).encode()


class Bounds:
    """The bounds of a server's connections: `server.client_timeout_s`, and `server.max_connections`, or as many as half
    of the descriptors that the system lets this process have.
    """

    def __init__(self, config: ServerConfig) -> None:
        self.timeout_s, self.most = config.client_timeout_s, config.max_connections
        descriptors, highest = resource.getrlimit(resource.RLIMIT_NOFILE)
        if descriptors != resource.RLIM_INFINITY and descriptors < 2 * self.most:
            descriptors = 2 * self.most if highest == resource.RLIM_INFINITY else min(2 * self.most, highest)
            resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, highest))
            self.most = min(self.most, descriptors // 2)
        self._unsaid: dict[str, int] = {}
        self._last_said: dict[str, float] = {}

    @property
    def protocol(self) -> type[asyncio.Protocol]:
        """What uvicorn makes a connection with."""
        return cast(type[asyncio.Protocol], partial(Connection, self))

    def note(self, what: str) -> None:
        """Log that something was refused: once, and then how often it was every LOG_INTERVAL_S."""
        self._unsaid[what] = self._unsaid.get(what, 0) + 1
        now = monotonic()
        if now - self._last_said.get(what, -LOG_INTERVAL_S) >= LOG_INTERVAL_S:
            log.warning("%s; %d since this was last said", what, self._unsaid.pop(what))
            self._last_said[what] = now

    def on_loop_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Handle an error of the event loop: asyncio reports `backlog` times that no descriptor is left to accept."""
        error = context.get("exception")
        if isinstance(error, OSError) and error.errno in NO_DESCRIPTOR and "socket" in context:
            self.note(f"no connection can be accepted ({error.strerror})")
        else:
            loop.default_exception_handler(context)

    def enforce(self, connections: set[Any]) -> None:
        """Close the connections whose clients keep them waiting. To be called every second or so."""
        for connection in list(connections):
            connection.enforce()

    def make_room(self, new: Connection) -> bool:
        """Drop the connection that has waited longest for a request, if there are too many. Returns whether there is
        room for a new one: not if every other has a request that is being served.
        """
        held = [each for each in cast(set[Connection], new.connections) if not each.dropped]
        if len(held) <= self.most:
            return True
        self.note(f"more than {self.most} connections: those that wait longest for a request are closed")
        idle = [each for each in held if each is not new and (each.owes or each.transport.is_closing())]
        if idle:
            max(idle, key=Connection.waited).drop()
        return bool(idle)


class Connection(H11Protocol):
    """A connection that is closed once its client has not done for `timeout_s` what it has to do next.

    That is to send a whole request, from the first moment or the end of the last response on, or to read any of what
    was written. A response may take as long as it likes.
    """

    def __init__(self, bounds: Bounds, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.bounds, self.dropped = bounds, False
        self._awaited: Hashable = None
        self._since = monotonic()  # from when that has been awaited

    @property
    def owes(self) -> bool:
        """Whether more of a request is to come."""
        return self.conn.their_state in OWES

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.waited()  # from now on
        if not self.bounds.make_room(self):
            why = f"this server has {self.bounds.most} connections (server.max_connections), all with requests"
            transport.write(answer("503 Service Unavailable", why, "overloaded_error", "too_many_connections"))
            transport.close()

    def drop(self) -> None:
        self.dropped = True
        self.transport.abort()

    def waited(self) -> float:
        """Return for how many seconds the client has owed what it has to do next."""
        awaited, now = self._await(), monotonic()
        if awaited != self._awaited:
            self._awaited, self._since = awaited, now
        return 0.0 if awaited is None else now - self._since

    def enforce(self) -> None:
        if self.waited() < self.bounds.timeout_s:
            return
        self.bounds.note("clients kept connections waiting, which were closed (server.client_timeout_s)")
        begun = self.conn.their_state is h11.SEND_BODY or self.conn.trailing_data[0]
        if not begun or self._answers or self.transport.is_closing() or self.flow.write_paused:
            self.drop()
            return
        why = f"the request did not arrive whole within server.client_timeout_s={self.bounds.timeout_s:g}"
        self.transport.write(answer("408 Request Timeout", why, "invalid_request_error", "client_timeout"))
        self.transport.close()

    @property
    def _answers(self) -> bool:
        """Whether a response to the latest request has begun, and perhaps ended."""
        return self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE)

    def _await(self) -> Hashable:
        """Return a mark of what the client has to do next, another one after any progress; None if that is nothing."""
        unread = self.transport.get_write_buffer_size()
        if unread and (self.flow.write_paused or self.transport.is_closing()):
            return unread  # nothing is written meanwhile, so it shrinks if any of it is read
        return (self.cycle, self.conn.their_state) if self.owes else None
