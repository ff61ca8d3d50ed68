"""Reads a request's JSON strictly.

What is no JSON, nests too deep, or is no number that can be held is a 400 that names its field, whatever the field's
own type: JSON schemas and template options pass through here too.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response
from fastapi.routing import APIRoute

from infer.server.protocol.errors import ApiError, RefusedBody, join_path

MAX_NESTING = 128  # levels of objects and lists; what reads them recurses
PARTS = re.compile(rb'"[^"\\]*+(?:\\[\s\S][^"\\]*+)*+"?|[\[\]{}:]')  # its time is linear in the body


class Unfit:
    """Stands in a document for a number that is none."""

    def __init__(self, why: str) -> None:
        self.why = why


def json_router() -> APIRouter:
    """For endpoints that read JSON: all of them."""
    return APIRouter(route_class=JsonRoute)


class JsonRoute(APIRoute):
    def get_route_handler(self) -> Callable[[Request], Awaitable[Response]]:  # pyright: ignore[reportIncompatibleMethodOverride]
        handle = super().get_route_handler()

        async def strictly(request: Request) -> Response:
            return await handle(JsonRequest(request.scope, request.receive))

        return strictly


class JsonRequest(Request):
    async def json(self) -> Any:
        try:
            return parse(await self.body())
        except ApiError as error:
            raise RefusedBody(error) from error


def parse(body: bytes) -> Any:
    """Raises ApiError."""
    if body.count(b"[") + body.count(b"{") > MAX_NESTING and (field := nested_too_deep(body)) is not None:
        raise refusal(field, f"nested deeper than {MAX_NESTING} levels")
    unfit: list[Unfit] = []

    def refuse(why: str) -> Unfit:
        unfit.append(Unfit(why))
        return unfit[-1]

    def real(text: str) -> float | Unfit:
        number = float(text)
        return number if math.isfinite(number) else refuse("is too large for a number")

    def whole(text: str) -> int | Unfit:
        digits = sys.get_int_max_str_digits()
        return int(text) if 0 < len(text) <= digits else refuse(f"is a number of {len(text)} digits")

    hooks: dict[str, Any] = {"parse_constant": lambda name: refuse(f"{name} is not JSON"), "parse_float": real}
    try:
        try:
            document = json.loads(body, **hooks)
        except (json.JSONDecodeError, UnicodeDecodeError):
            raise
        except ValueError:  # Python reads no integer of thousands of digits
            document = json.loads(body, **hooks, parse_int=whole)
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
    """The field of the body whose value nests deeper than MAX_NESTING, if one does."""
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
    """The path of keys and indices to it."""
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
