"""The server process from a listening socket to its exit code: start HTTP, load the model, serve, drain, exit.

HTTP is up before the model is loaded. SIGTERM and Ctrl-C drain; a second one ends the drain. When the engine dies, the
process exits with code 1. Handles the order of events only, not requests.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from infer.engine import Engine
from infer.processes.process_end import end_at_once
from infer.server.runtime import Runtime

if TYPE_CHECKING:
    from infer.server.service import Service

log = logging.getLogger("headway.server")

OnReady = Callable[[Engine, "Service"], None]
THREAD_GRACE_S = 5.0  # for the engine's step in progress
# After the engine has died: /health reports it for DEAD_LINGER_S, for load balancers; then HTTP stops, and then the
# process, whatever still hangs. The total stays below five seconds.
DEAD_LINGER_S, DEAD_HTTP_GRACE_S, DEAD_LIMIT_S = 1.0, 1, 4.5


def log_to_console() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)


class Stopping:
    """Shutdown requests: the first sets `asked` and starts the drain, the second sets `hurry` and ends it."""

    def __init__(self) -> None:
        self.requested, self.hurry = asyncio.Event(), asyncio.Event()

    def ask(self) -> None:
        if self.requested.is_set():
            self.hurry.set()
        self.requested.set()


def serve(
    model_id: str, runtime: Runtime, listener: socket.socket, *, api_keys: Sequence[str], on_ready: OnReady
) -> int:
    """Serve until a signal. Returns the exit code; raises what loading the engine raised."""

    async def main() -> int:
        stopping = Stopping()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, stopping.ask)
        return await run(model_id, runtime, listener, stopping, api_keys=api_keys, on_ready=on_ready)

    end_after(runtime.died)
    code = asyncio.run(main())
    if not runtime.stop(THREAD_GRACE_S if runtime.loaded else 0):
        # Still loading, or in a long step: a thread in native code cannot be ended, and the interpreter's normal
        # shutdown would fail on it.
        end_at_once(code=code)
    return code


def end_after(died: threading.Event) -> None:
    """End the process DEAD_LIMIT_S after `died` is set, even if the event loop or a worker thread hangs."""

    def wait() -> None:
        died.wait()
        time.sleep(DEAD_LIMIT_S)
        end_at_once()

    threading.Thread(target=wait, name="end after the engine", daemon=True).start()


async def run(
    model_id: str,
    runtime: Runtime,
    listener: socket.socket,
    stopping: Stopping,
    *,
    api_keys: Sequence[str],
    on_ready: OnReady,
    linger_s: float = DEAD_LINGER_S,
) -> int:
    """Run the server and return its exit code. `linger_s`: how long HTTP stays up after the engine has died."""
    loading = runtime.start()
    # Web frameworks take a third of a second to import; meanwhile the engine's thread loads the model.
    from infer.server.app import HttpServer, create_app
    from infer.server.service import Service

    service = Service(model_id, runtime)
    http = HttpServer(create_app(service, api_keys=api_keys), runtime.config)
    serving = asyncio.ensure_future(http.serve(sockets=[listener]))
    requested, hurry, dead = (
        asyncio.ensure_future(event.wait()) for event in (stopping.requested, stopping.hurry, runtime.dead)
    )
    try:
        await asyncio.wait((loading, requested, serving), return_when=asyncio.FIRST_COMPLETED)
        if loading.done():
            engine = loading.result()
            service.attach(engine)
            on_ready(engine, service)
            await asyncio.wait((requested, serving, dead), return_when=asyncio.FIRST_COMPLETED)
            if dead.done():
                log.error("the engine is dead: the server exits with code 1")
                await asyncio.wait((requested, serving), timeout=linger_s, return_when=asyncio.FIRST_COMPLETED)
                http.config.timeout_graceful_shutdown = DEAD_HTTP_GRACE_S
        drain = asyncio.ensure_future(runtime.drain(runtime.config.drain_s))
        if runtime.in_flight:
            log.info("waiting for %d requests, at most %g s", runtime.in_flight, runtime.config.drain_s)
        await asyncio.wait((drain, hurry), return_when=asyncio.FIRST_COMPLETED)
        if not drain.done():
            drain.cancel()
            await runtime.drain(0)
    finally:
        requested.cancel()
        hurry.cancel()
        dead.cancel()
        http.should_exit = True
        await serving
        await service.close()
    return 1 if runtime.state == "dead" else 0
