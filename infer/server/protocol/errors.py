"""Errors of requests, in the format of the API that was called: OpenAI's, or Anthropic's for /v1/messages.

A message names the field, the value (shortened) and what is allowed, but exposes nothing of the validator. An internal
error has no details for the client.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, LiteralString

from pydantic_core import PydanticCustomError
from starlette.exceptions import HTTPException

TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
ANTHROPIC_TYPES = TYPES | {413: "request_too_large", 503: "overloaded_error", 504: "timeout_error"}
# What Anthropic's SDKs act on: refused a thread, their tool runners send the whole conversation
ANTHROPIC_DETAILS = {"thread": {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}}
ANTHROPIC_PATH = "/v1/messages"  # and paths below it
REQUEST_ID = "headway.request_id"  # key of the ASGI scope


class ApiError(HTTPException):
    """The failure of one request, as the client sees it. FastAPI passes on no other exception from reading a body."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        headers = {} if retry_after is None else {"retry-after": str(retry_after)}  # seconds
        super().__init__(status, message, headers | {"www-authenticate": "Bearer"} if status == 401 else headers)
        self.status, self.code = status, code
        self.message, self.param = printable(message), param and printable(param)

    @property
    def body(self) -> dict[str, Any]:
        kind = TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def anthropic_body(self, request_id: str | None) -> dict[str, Any]:
        kind = ANTHROPIC_TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "api_error")
        error: dict[str, Any] = {"type": kind, "message": self.message}
        if self.param in ANTHROPIC_DETAILS:
            error["details"] = ANTHROPIC_DETAILS[self.param]
        return {"type": "error", "error": error, "request_id": request_id}


def is_anthropic(path: str) -> bool:
    return path == ANTHROPIC_PATH or path.startswith(f"{ANTHROPIC_PATH}/")


def printable(text: str) -> str:
    """Escape lone surrogates, which a client may send but which no response can contain."""
    return text.encode("utf-8", "backslashreplace").decode()


def invalid_field(param: str, why: str, code: str = "invalid_value", *, status: int = 400) -> ApiError:
    """Return the error of one field of a request, which its message begins with."""
    return ApiError(status, f"{param}: {why}", param=param, code=code)


def internal_error() -> ApiError:
    return ApiError(500, "internal error; the server's log has the details", code="internal_error")


def field_error(field: str, message: str, code: LiteralString = "invalid_value") -> PydanticCustomError:
    """Return an error that names its field, for validators of a whole object."""
    return PydanticCustomError(code, "{message}", {"field": printable(field), "message": message})


def from_validation(errors: Sequence[Mapping[str, Any]], body: Any) -> ApiError:
    """Convert pydantic's first error about `body` to one sentence that begins with the field.

    A union produces one error per alternative: the error deepest inside the value is reported, and alternatives that
    fail at the same place are listed together.
    """
    if errors[0]["type"] == "json_invalid":
        return ApiError(400, f"the body is not valid JSON ({errors[0]['ctx']['error']})", code="invalid_json")
    places = [place_of(error, body) for error in errors]
    same_field = [place for place in places if place[: len(places[0])] == places[0]]
    deepest = max(same_field, key=len)  # the first of the deepest
    chosen = [error for error, place in zip(errors, places, strict=True) if place == deepest]
    param = ""
    for part in deepest:
        param = join_path(param, part)
    kind = chosen[0]["type"]
    if not param:
        return ApiError(400, "the body must be a JSON object, sent with content-type: application/json")
    if kind == "missing":
        return invalid_field(param, "missing; this field is required", CODES[0])
    message = chosen[0]["msg"].removeprefix("Value error, ")
    if kind not in (*CODES, "invalid_value", "value_error", "assertion_error"):
        phrases = ((EXPECTED.get(error["type"], "another value"), error.get("ctx", {})) for error in chosen)
        options = dict.fromkeys(phrase if isinstance(phrase, str) else phrase(ctx) for phrase, ctx in phrases)
        message = f"must be {' or '.join(options)}, not {shown(chosen[0]['input'])}"
    return invalid_field(param, message, kind if kind in CODES else "invalid_value")


def place_of(error: Mapping[str, Any], body: Any) -> tuple[str | int, ...]:
    """Return the path of an error in the body. Pydantic's `loc` also contains the names of the union types it tried."""
    loc = error["loc"][1:] if error["loc"][:1] == ("body",) else error["loc"]
    place: list[str | int] = []
    node = body
    for part in loc:
        if isinstance(node, list) and isinstance(part, int) and part < len(node):
            node = node[part]
        elif isinstance(node, dict) and (name := str(part)) in node:
            node, part = node[name], name
        else:
            continue
        place.append(part)
    if error["type"] == "missing" and loc:
        place.append(loc[-1])
    if "field" in error.get("ctx", {}):
        place += [error["ctx"]["field"]] if error["ctx"]["field"] else []
    return tuple(place or loc[:1])


def join_path(path: str, part: str | int) -> str:
    """Append a part to a path: `messages`, 0 -> `messages[0]`; `messages[0]`, `role` -> `messages[0].role`."""
    if isinstance(part, int):
        return f"{path}[{part}]"
    if not PATH.fullmatch(part):
        return f"{path}[{shown(part)}]"
    return f"{path}.{part}" if path else part


def shown(value: Any) -> str:
    """Format a value as JSON, shortened."""
    if isinstance(value, dict | list):
        return ("an object" if isinstance(value, dict) else "a list") if value else json.dumps(value)
    if isinstance(value, str):
        text = json.dumps(value[:MAX_SHOWN])
        return text if len(value) <= MAX_SHOWN else f"{text[:-1]}..."
    text = json.dumps(value, default=repr)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


CODES: tuple[LiteralString, ...] = ("missing_required_parameter", "unknown_parameter", "unsupported_parameter")
MAX_SHOWN = 40  # characters of a value in a message
PATH = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}(?:(?:\.[A-Za-z_][A-Za-z0-9_]{0,63})|\[\d+\])*")
# what is expected, as a phrase to follow "must be", by the type of the error
EXPECTED: dict[str, str | Callable[[Mapping[str, Any]], str]] = {
    "string_type": "a string",
    "string_unicode": "a string of valid Unicode",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "int_parsing_size": "a whole number of fewer digits",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
    "literal_error": lambda ctx: ctx["expected"],
    "greater_than": lambda ctx: f"greater than {number(ctx['gt'])}",
    "greater_than_equal": lambda ctx: f"at least {number(ctx['ge'])}",
    "less_than": lambda ctx: f"less than {number(ctx['lt'])}",
    "less_than_equal": lambda ctx: f"at most {number(ctx['le'])}",
    "string_too_short": lambda ctx: f"a string of at least {count(ctx['min_length'], 'character')}",
    "string_too_long": lambda ctx: f"a string of at most {count(ctx['max_length'], 'character')}",
    "string_pattern_mismatch": lambda ctx: f"a string that matches {ctx['pattern']}",
    "too_short": lambda ctx: f"of at least {count(ctx['min_length'], 'item')}",
    "too_long": lambda ctx: f"of at most {count(ctx['max_length'], 'item')}",
}


def number(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:g}"


def count(n: int, noun: str) -> str:
    return f"{n} {noun}{'' if n == 1 else 's'}"
