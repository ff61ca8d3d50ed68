"""Middleware in front of all endpoints: request ids, API keys, compressed bodies, and the limit on the body's size.

A trailing slash of a path is ignored, and HEAD is served as GET without the body.

Plain ASGI, because Starlette's middleware base class hides a client's disconnect from the endpoint.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
import uuid
import zlib
from collections.abc import Sequence

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from infer.sampling.isolation import panics_as_errors
from infer.server.protocol.error_responses import response_of
from infer.server.protocol.errors import REQUEST_ID, ApiError, internal_error, is_anthropic

OPEN_PATHS = {"/health"}  # every other path needs a key, whether or not the endpoint exists
PAGE_PATH = "/"  # a browser prompts for a password here, and sends it with every later request
TENANT = "headway.tenant"  # key of the ASGI scope. Tenants share no prefix cache; without API keys there is one
COMPRESSED = ("gzip", "deflate")
REQUEST_ID_FORM = re.compile(r"[A-Za-z0-9._:-]{1,128}")


class Gate:
    def __init__(self, app: ASGIApp, *, api_keys: Sequence[str], max_body_bytes: int) -> None:
        self.app = app
        self.keys = [digest(key) for key in api_keys]
        self.max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        scope = normalize(scope)
        headers = Headers(scope=scope)
        header_id = headers.get("x-request-id", "")
        request_id = header_id if REQUEST_ID_FORM.fullmatch(header_id) else uuid.uuid4().hex
        scope[REQUEST_ID] = request_id
        names = ("x-request-id", "request-id") if is_anthropic(scope["path"]) else ("x-request-id",)
        started = False

        async def send_with_id(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                for name in names:
                    MutableHeaders(scope=message)[name] = request_id
            await send(message)

        try:
            scope[TENANT] = self.tenant(scope["path"], headers)
            receive = await self.read_body(headers, receive)
        except ApiError as error:
            response = response_of(error, scope)
            if error.status == 415:
                response.headers["accept-encoding"] = ", ".join(COMPRESSED)
            if error.status == 401 and scope["path"] == PAGE_PATH:
                response.headers["www-authenticate"] = 'Basic realm="Headway, password: an API key"'
            await response(scope, receive, send_with_id)
            return
        try:
            with panics_as_errors():
                await self.app(scope, receive, send_with_id)
        except Exception:
            if not started:
                await response_of(internal_error(), scope)(scope, receive, send_with_id)
            raise  # so that uvicorn logs it

    def tenant(self, path: str, headers: Headers) -> str:
        """Return the tenant of the request's API key. Raises ApiError if the key is missing or invalid."""
        if not self.keys or path in OPEN_PATHS:
            return ""
        sent = digest(key_in(headers))
        # Constant time: both sides are hashed, and all keys are compared.
        matches = [hmac.compare_digest(sent, key) for key in self.keys]
        if not any(matches):
            message = "this server needs an API key: authorization: Bearer <key>, or x-api-key: <key>"
            raise ApiError(401, message, code="invalid_api_key")
        return self.keys[matches.index(True)].hex()

    async def read_body(self, headers: Headers, receive: Receive) -> Receive:
        """Read the body and return a `receive` that yields it in one message, then reports a disconnect as before.

        A compressed body is decompressed. Raises ApiError if that fails, or if the body exceeds `max_body_bytes`, as it
        came or decompressed, so that no later code has to count.
        """
        limit, encoding = self.max_body_bytes, headers.get("content-encoding", "identity").strip().lower()
        if encoding not in ("", "identity", *COMPRESSED):
            why = f"content-encoding: {encoding[:40]} is not read here; this server reads {' and '.join(COMPRESSED)}"
            raise ApiError(415, why, code="unsupported_encoding")
        decoder = zlib.decompressobj(wbits=47) if encoding in COMPRESSED else None  # reads the header of either
        too_large = ApiError(413, f"the body is larger than server.max_body_bytes={limit}", code="body_too_large")
        length = headers.get("content-length", "0")
        if not length.isdigit() or int(length) > limit:
            raise too_large
        parts: list[bytes] = []
        size = received = 0
        more = True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return receive
            part = message.get("body", b"")
            received += len(part)
            try:
                parts.append(part if decoder is None else decoder.decompress(part, limit + 1 - size))
            except zlib.error as error:
                raise ApiError(400, f"the body is not valid {encoding} ({error})", code="invalid_encoding") from error
            size += len(parts[-1])
            if max(size, received) > limit:
                raise too_large
            more = message.get("more_body", False)
        if decoder is not None and received and (decoder.unused_data or not decoder.eof):
            raise ApiError(400, f"the body is not one whole {encoding} stream", code="invalid_encoding")
        pending: list[Message] = [{"type": "http.request", "body": b"".join(parts), "more_body": False}]

        async def replay() -> Message:
            return pending.pop() if pending else await receive()

        return replay


def normalize(scope: Scope) -> Scope:
    """Replace HEAD by GET and strip trailing slashes. uvicorn keeps the original method, and sends no body for HEAD."""
    method = "GET" if scope["method"] == "HEAD" else scope["method"]
    return {**scope, "method": method, "path": scope["path"].rstrip("/") or "/"}


def key_in(headers: Headers) -> str:
    """Return the key of `authorization: Bearer <key>` or `Basic` (the password, with any name), else of `x-api-key`."""
    if "authorization" not in headers:
        return headers.get("x-api-key", "").strip()
    scheme, _, credentials = headers["authorization"].partition(" ")
    if scheme.lower() == "bearer":
        return credentials.strip()
    if scheme.lower() != "basic":
        return ""
    try:
        return base64.b64decode(credentials.strip(), validate=True).decode().partition(":")[2]
    except ValueError:
        return ""


def digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
