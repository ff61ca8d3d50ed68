"""Converts every exception of a request to the response of the API that was called."""

from __future__ import annotations

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.types import Scope

from infer.server.protocol.errors import REQUEST_ID, ApiError, from_validation, is_anthropic


def response_of(error: ApiError, scope: Scope) -> JSONResponse:
    """Return the HTTP response to the request of `scope`, in the format of the API that its path belongs to."""
    body = error.anthropic_body(scope.get(REQUEST_ID)) if is_anthropic(scope["path"]) else error.body
    return JSONResponse(body, error.status, headers=error.headers)


def install(app: FastAPI) -> None:
    @app.exception_handler(ApiError)
    async def api_error(request: Request, error: ApiError) -> JSONResponse:
        return response_of(error, request.scope)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        return response_of(from_validation(error.errors(), error.body), request.scope)

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> JSONResponse:
        if error.status_code == 404:
            message = f"{request.method} {request.url.path}: no such endpoint"
            return response_of(ApiError(404, message, code="not_found"), request.scope)
        allowed = (error.headers or {}).get("Allow")
        if error.status_code == 405 and allowed is not None:
            message = f"{request.method} {request.url.path}: this endpoint takes {allowed}"
            response = response_of(ApiError(405, message, code="method_not_allowed"), request.scope)
            response.headers["allow"] = allowed
            return response
        return response_of(ApiError(error.status_code, str(error.detail)), request.scope)
