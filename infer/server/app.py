"""The FastAPI application, its endpoints and the `Gate` middleware in front of them; uvicorn, which runs it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from importlib import metadata
from socket import socket
from typing import Any

import uvicorn
from fastapi import APIRouter, FastAPI
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import HTMLResponse, JSONResponse, Response

from infer.config import ServerConfig
from infer.server.api import chat, completions, messages, responses, tokens
from infer.server.metrics import CONTENT_TYPE
from infer.server.middleware import Gate
from infer.server.network.connections import Bounds
from infer.server.network.hosts import HostCheck, own_names
from infer.server.playground import page
from infer.server.protocol import error_responses
from infer.server.protocol.bodies import JsonRoute
from infer.server.protocol.errors import ApiError
from infer.server.service import Service

TICKS_PER_S = 10  # of uvicorn
HTTP_GRACE_S = 3  # for responses still being sent after everything else has ended


class HttpServer(uvicorn.Server):
    """uvicorn without its signal handling: the caller stops it."""

    def __init__(self, app: FastAPI, config: ServerConfig) -> None:
        self.bounds = Bounds(config)
        super().__init__(
            uvicorn.Config(
                app,
                http=self.bounds.protocol,
                ws="none",
                lifespan="off",
                log_config=None,
                server_header=False,
                timeout_graceful_shutdown=HTTP_GRACE_S,
            )
        )

    async def startup(self, sockets: list[socket] | None = None) -> None:
        asyncio.get_running_loop().set_exception_handler(self.bounds.on_loop_error)
        await super().startup(sockets)

    async def on_tick(self, counter: int) -> bool:
        if counter % TICKS_PER_S == 0:
            self.bounds.enforce(self.server_state.connections)
        return await super().on_tick(counter)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def create_app(service: Service, *, api_keys: Sequence[str]) -> FastAPI:
    # No /docs: its page loads scripts from other hosts. /openapi.json remains for tools.
    app = FastAPI(title="Headway", docs_url=None, redoc_url=None)
    error_responses.install(app)
    app.add_middleware(Gate, api_keys=api_keys, max_body_bytes=service.config.max_body_bytes)
    if origins := service.config.cors_origins:  # runs before the gate: a browser's preflight carries no API key
        app.add_middleware(
            CORSMiddleware,
            allow_origins=origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after"],
            allow_private_network=True,
            allow_credentials=False,  # keys come in a header that the page sets, never in cookies
        )
    if (names := own_names(service.config, api_keys)) is not None:
        app.add_middleware(HostCheck, names=names)
    routes = APIRouter(route_class=JsonRoute)
    for endpoint in (completions, chat, responses, messages, tokens):
        endpoint.add_routes(routes, service)
    app.include_router(routes)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        service.runtime.check_open()
        return {"object": "list", "data": [card()]}

    @app.get("/v1/models/{model_id:path}")
    async def model(model_id: str) -> dict[str, Any]:
        service.runtime.check_open()
        service.check_model(model_id)
        return card()

    @app.get("/", include_in_schema=False)
    async def playground() -> HTMLResponse:
        return HTMLResponse(page().html, headers=page().headers)

    @app.get("/health")
    async def health() -> JSONResponse:
        state = service.runtime.state
        return JSONResponse({"status": state}, 200 if state == "ready" else 503)

    @app.get("/ready")
    async def ready() -> JSONResponse:
        """Return 200 if a request sent now would be accepted, else 503."""
        service.runtime.check_open()
        if service.runtime.room < 1:
            raise ApiError(503, "as many requests wait as may", code="queue_full", retry_after=1)
        return JSONResponse({"status": "ready"})

    @app.get("/version")
    async def version() -> dict[str, str]:
        return {"version": metadata.version("headway")}

    @app.get("/learning")
    async def learning() -> dict[str, Any]:
        """Return how the head learns, for the page; a number that is not there yet is null."""
        service.runtime.check_open()
        if service.learning is None:
            raise ApiError(404, "the head of this server does not learn (learn=true)", code="not_learning")
        return {name: None if value != value else value for name, value in asdict(service.learning).items()}

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(service.metrics.text(), media_type=CONTENT_TYPE)

    def card() -> dict[str, Any]:
        return {
            "id": service.model_id,
            "object": "model",
            "created": service.created,
            "owned_by": "headway",
            "max_model_len": service.context,
            "proposer": service.proposer,
            "proposers": list(service.proposers),
            **({} if service.learning is None else {"learns": True}),
        }

    return app
