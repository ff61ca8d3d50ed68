"""Errors in OpenAI's shape: what may go wrong with a request, and how FastAPI's own errors are put into that shape.

A message names the field and what to do; it never carries a prompt, and an internal error tells a client nothing.
"""

from __future__ import annotations

import logging
from typing import Any, LiteralString

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic_core import PydanticCustomError
from starlette.exceptions import HTTPException

log = logging.getLogger("headway.server")

TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """One request's failure, as the client will see it."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.code = status, code
        self.message, self.param = printable(message), param and printable(param)
        self.retry_after = retry_after  # seconds

    @property
    def body(self) -> dict[str, Any]:
        kind = TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    @property
    def headers(self) -> dict[str, str]:
        headers = {} if self.retry_after is None else {"retry-after": str(self.retry_after)}
        return headers | {"www-authenticate": "Bearer"} if self.status == 401 else headers

    def response(self) -> JSONResponse:
        return JSONResponse(self.body, self.status, headers=self.headers)


def printable(text: str) -> str:
    """What a client sent may hold half a surrogate pair, which no answer can."""
    return text.encode("utf-8", "backslashreplace").decode()


def internal_error() -> ApiError:
    return ApiError(500, "internal error; the server's log has the details", code="internal_error")


def field_error(field: str, message: str, code: LiteralString = "invalid_value") -> PydanticCustomError:
    """For validators that look at a whole object: the error carries the field that it is about."""
    return PydanticCustomError(code, "{message}", {"field": printable(field), "message": message})


def from_validation(error: dict[str, Any]) -> ApiError:
    """Pydantic's first complaint, as one sentence that begins with the field."""
    kind, place = error["type"], [str(part) for part in error["loc"] if part != "body"]
    if kind == "json_invalid":
        return ApiError(400, f"the body is not valid JSON ({error['ctx']['error']})", code="invalid_json")
    if "field" in error.get("ctx", {}):
        place.append(error["ctx"]["field"])
    if not place:
        return ApiError(400, "the body must be a JSON object, sent with content-type: application/json")
    param = ".".join(place)
    if kind == "missing":
        return ApiError(
            400, f"{param}: missing; this field is required", param=param, code="missing_required_parameter"
        )
    if kind == "extra_forbidden":
        return ApiError(400, f"{param}: unknown field", param=param, code="unknown_parameter")
    message = error["msg"].removeprefix("Value error, ")
    return ApiError(400, f"{param}: {message}", param=param, code=kind if kind.startswith("un") else "invalid_value")


def install(app: FastAPI) -> None:
    @app.exception_handler(ApiError)
    async def api_error(_: Request, error: ApiError) -> JSONResponse:
        return error.response()

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        return from_validation(error.errors()[0]).response()

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> JSONResponse:
        if error.status_code == 404:
            return ApiError(404, f"{request.method} {request.url.path}: no such endpoint", code="not_found").response()
        return ApiError(error.status_code, str(error.detail)).response()

    @app.exception_handler(Exception)
    async def unexpected(_: Request, __: Exception) -> JSONResponse:
        return internal_error().response()  # Starlette raises it again, so that uvicorn logs it
