"""Several replicas of this server behind one address, by Ray Serve: `server.replicas=2`. Needs the extra `ray`.

Each replica is a process with this server's application and its own engine. Ray's router sends requests with the same
`x-session-id` header to the same replica, whose prefix cache holds the conversation so far (consistent hashing);
requests without the header are distributed.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable, Sequence
from typing import Any

# Set before Ray is imported: no usage reports, and more time to start the proxy on a busy machine.
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S", "30")

import ray
from fastapi import FastAPI
from ray import serve
from ray.exceptions import RayError
from ray.serve.config import HTTPOptions, RequestRouterConfig
from ray.serve.schema import LoggingConfig
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from infer.config import ServeConfig
from infer.options.environment import wake_collector

ROUTER = "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"
APPLICATION = "headway"
RAY_STARTS = 10  # attempts, of half a minute each


class ProxyGone:
    """Reports a disconnect when Ray's proxy no longer waits for a response, because its client has disconnected.

    Ray itself reports one if the proxy has dropped the request, but raises if its call to the proxy was cancelled.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gone = False

        async def receive_or_hang_up() -> Message:
            nonlocal gone
            if not gone:  # after a RayError, Ray's `receive` would wait forever
                try:
                    return await receive()
                except RayError:
                    gone = True
            return {"type": "http.disconnect"}

        await self.app(scope, receive_or_hang_up, send)


@serve.deployment(request_router_config=RequestRouterConfig(request_router_class=ROUTER))  # pyright: ignore[reportArgumentType]
@serve.ingress()
class Replica:
    """One replica. Raises what loading the engine raises; Ray then reports a failed deployment."""

    async def __init__(self, config: ServeConfig, api_keys: Sequence[str]) -> None:
        from infer.engine import Engine
        from infer.server.lifecycle import end_after, log_to_console
        from infer.server.runtime import Runtime
        from infer.server.service import Service

        log_to_console()

        def load() -> Engine:
            parts = config.model, config.head, config.engine, config.proposer
            return Engine.load(*parts, output_dir=config.output_dir, profile=config.server.profile_first)

        self._api_keys = api_keys
        runtime = Runtime(load, config.server)
        end_after(runtime.died)  # and Ray starts another replica
        self._service = Service(config.model.name, runtime)
        self._service.attach(await runtime.start())
        wake_collector()

    def __serve_build_asgi_app__(self) -> FastAPI:
        from infer.server.app import create_app

        app = create_app(self._service, api_keys=self._api_keys)
        app.add_middleware(ProxyGone)
        return app

    def check_health(self) -> None:
        """Raises RuntimeError if the engine is dead; Ray then replaces the replica."""
        if self._service.runtime.state == "dead":
            raise RuntimeError("the engine has stopped")

    async def __del__(self) -> None:
        await self._service.close()
        self._service.runtime.stop(0)


def start_ray(replicas: int) -> None:
    """Start Ray on this machine. Raises ValueError if it does not start.

    Ray gives its own processes 30 seconds, which are too few on a busy machine, so it is tried several times.
    """
    for attempt in range(1, RAY_STARTS + 1):
        try:
            ray.init(address="local", include_dashboard=False, logging_level=logging.WARNING)
            return
        except Exception as error:  # Ray raises no narrower class here
            ray.shutdown()
            if attempt == RAY_STARTS:
                raise ValueError(f"server.replicas={replicas}: Ray did not start; {error}") from error


def serve_replicas(config: ServeConfig, *, port: int, api_keys: Sequence[str], on_ready: Callable[[], None]) -> None:
    """Serve until SIGTERM or Ctrl-C, then let running requests finish; a second signal ends it immediately.

    Raises ValueError if the replicas do not start.
    """
    stopping = threading.Event()

    def stop(number: int, _frame: object) -> None:
        signal.signal(number, signal.default_int_handler)
        stopping.set()

    start_ray(config.server.replicas)
    try:
        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        serve.start(
            proxy_location="HeadOnly",
            http_options=HTTPOptions(host=config.server.host, port=port),
            logging_config=LoggingConfig(log_level="WARNING"),  # for Ray's actors; replicas log like a single server
        )
        try:
            serve.run(application(config, api_keys), name=APPLICATION, route_prefix="/")
        except RuntimeError as error:
            raise ValueError(f"server.replicas={config.server.replicas}: they did not start; {error}") from error
        for number in (signal.SIGINT, signal.SIGTERM):  # replaces Ray's handlers, which end it immediately
            signal.signal(number, stop)
        on_ready()
        stopping.wait()
        serve.delete(APPLICATION)
    finally:
        ray.shutdown()


def application(config: ServeConfig, api_keys: Sequence[str]) -> Any:
    """Return the Ray application. Raises ValueError for more replicas than GPUs, for which Ray would wait forever."""
    server, resources = config.server, ray.cluster_resources()
    gpus = 0 if config.model.device == "cpu" else int(resources.get("GPU", 0))
    if 0 < gpus < server.replicas:
        raise ValueError(f"server.replicas={server.replicas}: each needs a GPU, and there are {gpus}")
    share = {"num_gpus": 1, "num_cpus": 0} if gpus else {"num_cpus": min(1.0, resources["CPU"] / server.replicas)}
    deployment: Any = Replica  # the type that Ray's decorators return
    return deployment.options(
        num_replicas=server.replicas,
        # A request goes to a replica that is not full, else it queues; beyond `max_queued_requests` Ray returns a 503.
        max_ongoing_requests=config.engine.max_batch + server.max_waiting,
        max_queued_requests=server.max_waiting,
        graceful_shutdown_timeout_s=server.drain_s,
        ray_actor_options=share,
    ).bind(config, tuple(api_keys))
