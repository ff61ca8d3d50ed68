"""Several replicas of this server behind one address, by Ray Serve: `server.replicas=2`. Needs the extra `ray`.

Every replica is this server's own application with an engine of its own, in a process of its own. Ray's router takes
requests with one `x-session-id` header to one replica, whose pages then hold the conversation so far (consistent
hashing); requests without it are spread.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable, Sequence
from typing import Any

# Before Ray is imported: nothing of ours reports to anybody, and a busy machine may take its time to start the proxy.
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

ROUTER = "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"
APPLICATION = "headway"


class ProxyGone:
    """Where Ray's proxy no longer waits for an answer, its client has hung up.

    Ray itself says so where the proxy has forgotten the request, but raises where its call to the proxy was cancelled.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gone = False

        async def receive_or_hang_up() -> Message:
            nonlocal gone
            if not gone:  # else Ray's would wait without end
                try:
                    return await receive()
                except RayError:
                    gone = True
            return {"type": "http.disconnect"}

        await self.app(scope, receive_or_hang_up, send)


@serve.deployment(request_router_config=RequestRouterConfig(request_router_class=ROUTER))  # pyright: ignore[reportArgumentType]
@serve.ingress()
class Replica:
    """Raises what loading the engine raises; Ray then says that the deployment failed."""

    async def __init__(self, config: ServeConfig, api_keys: Sequence[str]) -> None:
        from infer.engine import Engine
        from infer.server.lifecycle import end_after, log_to_console
        from infer.server.service import Service

        log_to_console()

        def load() -> Engine:
            return Engine.load(config.model, config.head, config.engine, config.proposer, output_dir=config.output_dir)

        self._api_keys = api_keys
        self._service = Service(config.model.name, config.server, load)
        end_after(self._service.runtime.died)  # and Ray starts another replica
        self._service.attach(await self._service.runtime.start())

    def __serve_build_asgi_app__(self) -> FastAPI:
        from infer.server.app import create_app

        app = create_app(self._service, api_keys=self._api_keys)
        app.add_middleware(ProxyGone)
        return app

    def check_health(self) -> None:
        """Ray replaces a replica where this raises."""
        if self._service.runtime.state == "dead":
            raise RuntimeError("the engine has stopped")

    async def __del__(self) -> None:
        await self._service.close()
        self._service.runtime.stop(0)


def serve_replicas(config: ServeConfig, *, port: int, api_keys: Sequence[str], on_ready: Callable[[], None]) -> None:
    """Serves until SIGTERM or Ctrl-C, then lets running requests finish; a second signal ends it at once.

    Raises ValueError where the replicas do not start.
    """
    stopping = threading.Event()

    def stop(number: int, _frame: object) -> None:
        signal.signal(number, signal.default_int_handler)
        stopping.set()

    ray.init(address="local", include_dashboard=False, logging_level=logging.WARNING)
    try:
        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        serve.start(
            proxy_location="HeadOnly",
            http_options=HTTPOptions(host=config.server.host, port=port),
            logging_config=LoggingConfig(log_level="WARNING"),  # of Ray's own actors; replicas log as servers do
        )
        try:
            serve.run(application(config, api_keys), name=APPLICATION, route_prefix="/")
        except RuntimeError as error:
            raise ValueError(f"server.replicas={config.server.replicas}: they did not start; {error}") from error
        for number in (signal.SIGINT, signal.SIGTERM):  # until now Ray's, which end it at once
            signal.signal(number, stop)
        on_ready()
        stopping.wait()
        serve.delete(APPLICATION)
    finally:
        ray.shutdown()


def application(config: ServeConfig, api_keys: Sequence[str]) -> Any:
    """Raises ValueError for more replicas than GPUs, for which Ray would wait without end."""
    server, there = config.server, ray.cluster_resources()
    gpus = 0 if config.model.device == "cpu" else int(there.get("GPU", 0))
    if 0 < gpus < server.replicas:
        raise ValueError(f"server.replicas={server.replicas}: each needs a GPU, and there are {gpus}")
    share = {"num_gpus": 1, "num_cpus": 0} if gpus else {"num_cpus": min(1.0, there["CPU"] / server.replicas)}
    deployment: Any = Replica  # what Ray's decorators have made of it
    return deployment.options(
        num_replicas=server.replicas,
        # A full replica hands on to the next; the rest waits for a place, and what is beyond that gets Ray's 503.
        max_ongoing_requests=config.engine.max_batch + server.max_waiting,
        max_queued_requests=server.max_waiting,
        graceful_shutdown_timeout_s=server.drain_s,
        ray_actor_options=share,
    ).bind(config, tuple(api_keys))
