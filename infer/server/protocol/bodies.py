"""Strict parser of JSON request bodies.

Invalid JSON, too deep nesting and numbers that cannot be represented are a 400. The error names the field where
possible, whatever the field's type, since JSON schemas and template options are parsed here too.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import Request
from fastapi.responses import Response
from fastapi.routing import APIRoute

from infer.server.protocol.errors import ApiError, join_path

MAX_NESTING = 128  # levels of objects and lists; their readers recurse
JSON_TYPE = (b"content-type", b"application/json")
PARTS = re.compile(rb'"[^"\\]*+(?:\\[\s\S][^"\\]*+)*+"?|[\[\]{}:]')  # matches in time linear in the body


class Unfit:
    """Placeholder in a document for a number that is invalid or cannot be represented."""

    def __init__(self, why: str) -> None:
        self.why = why


class JsonRoute(APIRoute):
    """A route that parses its request body strictly. A body without a content type is JSON.

    Unless a web page sends it: without a type a browser asks no preflight, which decides whether the page may call.
    """

    def get_route_handler(self) -> Callable[[Request], Awaitable[Response]]:  # pyright: ignore[reportIncompatibleMethodOverride]
        handle = super().get_route_handler()

        async def strictly(request: Request) -> Response:
            scope = request.scope
            if not request.headers.get("content-type") and "origin" not in request.headers:
                headers = [header for header in scope["headers"] if header[0] != JSON_TYPE[0]]
                scope = {**scope, "headers": [*headers, JSON_TYPE]}
            return await handle(JsonRequest(scope, request.receive))

        return strictly


class JsonRequest(Request):
    async def json(self) -> Any:
        return parse(await self.body())


def parse(body: bytes) -> Any:
    """Parse a JSON body. Raises ApiError if it is invalid, nested too deep, or has an invalid number."""
    if body.count(b"[") + body.count(b"{") > MAX_NESTING and (field := nested_too_deep(body)) is not None:
        raise refusal(field, f"nested deeper than {MAX_NESTING} levels")
    unfit: list[Unfit] = []

    def refuse(why: str) -> Unfit:
        unfit.append(Unfit(why))
        return unfit[-1]

    def real(text: str) -> float | Unfit:
        number = float(text)
        return number if math.isfinite(number) else refuse("is too large for a number")

    def integer(text: str) -> int | Unfit:
        digits = sys.get_int_max_str_digits()
        return int(text) if 0 < len(text) <= digits else refuse(f"is a number of {len(text)} digits")

    hooks: dict[str, Any] = {"parse_constant": lambda name: refuse(f"{name} is not JSON"), "parse_float": real}
    try:
        try:
            document = json.loads(body, **hooks)
        except (json.JSONDecodeError, UnicodeDecodeError):
            raise
        except ValueError:  # Python refuses integers of thousands of digits
            document = json.loads(body, **hooks, parse_int=integer)
    except json.JSONDecodeError as error:
        raise ApiError(400, f"the body is not valid JSON ({error.msg})", code="invalid_json") from error
    except (UnicodeDecodeError, RecursionError) as error:
        reason = "not UTF-8" if isinstance(error, UnicodeDecodeError) else "nested too deep"
        raise ApiError(400, f"the body is not valid JSON ({reason})", code="invalid_json") from error
    if unfit:
        raise refusal(place_of(document, unfit[0]), unfit[0].why)
    return document


def refusal(field: str, why: str) -> ApiError:
    return ApiError(400, f"{field or 'the body'}: {why}", param=field or None, code="invalid_value")


def nested_too_deep(body: bytes) -> str | None:
    """Return the top-level field whose value is nested deeper than MAX_NESTING, or None."""
    level, field, last = 0, b'""', b'""'
    for match in PARTS.finditer(body):
        part = match[0]
        if part in b"[{":
            level += 1
            if level > MAX_NESTING:
                return str(json.loads(field))
        elif part in b"]}":
            level -= 1
        elif part == b":":
            field = last if level == 1 else field
        else:
            last = part
    return None


def place_of(document: Any, wanted: Unfit) -> str:
    """Return the path of keys and indices to `wanted`."""
    layer: list[tuple[str, Any]] = [("", document)]
    while layer:
        inner: list[tuple[str, Any]] = []
        for path, value in layer:
            if value is wanted:
                return path
            items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
            inner += [(join_path(path, key), item) for key, item in items]
        layer = inner
    raise AssertionError("it is not in this document")
