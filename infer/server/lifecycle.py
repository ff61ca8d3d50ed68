"""From a listening socket to an exit code: HTTP up at once, the model loaded behind it, serving, draining, the end.

SIGTERM and Ctrl-C drain; a second one ends the drain. Knows what happens when, and nothing about requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Sequence

import uvicorn

from infer.engine import Engine
from infer.server.app import create_app
from infer.server.service import Service

log = logging.getLogger("headway.server")

HTTP_GRACE_S = 3  # for answers that are still being written when everything else has ended
THREAD_GRACE_S = 5.0  # for the engine's step in progress


def log_to_console() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)


class HttpServer(uvicorn.Server):
    """uvicorn without its signal handling: who runs it says when it ends."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Stopping:
    """`asked` starts the drain, `hurry` ends it."""

    def __init__(self) -> None:
        self.asked, self.hurry = asyncio.Event(), asyncio.Event()

    def ask(self) -> None:
        if self.asked.is_set():
            self.hurry.set()
        self.asked.set()


def serve(
    service: Service, listener: socket.socket, *, api_keys: Sequence[str], on_ready: Callable[[Engine], None]
) -> int:
    """Serves until a signal. Returns the exit code; raises what loading the engine raised."""

    async def main() -> int:
        stopping = Stopping()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, stopping.ask)
        return await run(service, listener, stopping, api_keys=api_keys, on_ready=on_ready)

    code = asyncio.run(main())
    if not service.runtime.stop(THREAD_GRACE_S if service.attached else 0):
        # Still loading, or inside a long step: a thread in native code cannot be ended, and the interpreter's own
        # shutdown would trip over it.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


async def run(
    service: Service,
    listener: socket.socket,
    stopping: Stopping,
    *,
    api_keys: Sequence[str],
    on_ready: Callable[[Engine], None],
) -> int:
    app = create_app(service, api_keys=api_keys)
    options = uvicorn.Config(
        app,
        http="h11",  # named, so that what else is installed changes nothing
        ws="none",
        lifespan="off",
        log_config=None,
        server_header=False,
        timeout_graceful_shutdown=HTTP_GRACE_S,
    )
    http = HttpServer(options)
    serving = asyncio.ensure_future(http.serve(sockets=[listener]))
    loading = service.runtime.start()
    asked, hurry = (asyncio.ensure_future(event.wait()) for event in (stopping.asked, stopping.hurry))
    try:
        await asyncio.wait((loading, asked, serving), return_when=asyncio.FIRST_COMPLETED)
        if loading.done():
            engine = loading.result()
            service.attach(engine)
            on_ready(engine)
            await asyncio.wait((asked, serving), return_when=asyncio.FIRST_COMPLETED)
        drain = asyncio.ensure_future(service.runtime.drain(service.config.drain_s))
        if service.runtime.in_flight:
            log.info("finishing %d requests, at most %g s", service.runtime.in_flight, service.config.drain_s)
        await asyncio.wait((drain, hurry), return_when=asyncio.FIRST_COMPLETED)
        if not drain.done():
            drain.cancel()
            await service.runtime.drain(0)
    finally:
        asked.cancel()
        hurry.cancel()
        http.should_exit = True
        await serving
        await service.close()
    return 1 if service.runtime.state == "dead" else 0
