"""Turns a session into an HTTP response: one JSON document, or server-sent events. Both stop if the client disconnects.

An `ResponseFormat` defines the documents (completions.py, chat.py); the order of events is decided here.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from infer.server.protocol.completions import GenerationRequest
from infer.server.protocol.errors import ApiError, internal_error
from infer.server.session import Choice, Piece, Session

log = logging.getLogger("headway.server")
T = TypeVar("T")
Json = dict[str, Any]
Pieces = AsyncIterator[tuple[Choice, Piece]]


class ResponseFormat:
    """The documents of an endpoint, without the fields that all endpoints share."""

    prefix: str  # of the response's id
    whole: str  # `object` of a full document
    part: str  # `object` of a streamed chunk

    def choice(self, choice: Choice) -> Json:
        """Return a finished choice."""
        raise NotImplementedError

    def document(self, session: Session) -> Json:
        """Return the fields beside the choices."""
        return {}

    def opening(self, choice: Choice) -> Json | None:
        """Return the delta that is sent before any text."""
        return None

    def delta(self, choice: Choice, piece: Piece) -> Json | None:
        """Return the delta for a piece, or None if there is nothing to send yet."""
        raise NotImplementedError

    def closing(self, choice: Choice) -> Json:
        """Return the empty delta that is sent with the finish reason."""
        raise NotImplementedError

    def finish_reason(self, choice: Choice) -> str | None:
        return choice.finish_reason

    def reasoning_tokens(self, session: Session) -> int | None:
        """Return the reasoning tokens of all choices so far, or None if this format has no reasoning."""
        return None


async def answer(request: Request, session: Session, form: ResponseFormat, body: GenerationRequest) -> Response:
    head: Json = {
        "id": f"{form.prefix}-{uuid.uuid4().hex}",
        "object": form.part if body.stream else form.whole,
        "created": int(time.time()),
        "model": body.model,
        "seed": session.seed,  # our extension: the seed in use, from the request or random
    }

    def document() -> Json:
        choices = [
            {"index": choice.index, **form.choice(choice), **shown(body, choice.whole), **ending(form, choice)}
            for choice in session.choices
        ]
        return {**head, "choices": choices, **form.document(session), **usage_fields(session, form)}

    return await respond(
        request,
        session,
        stream=bool(body.stream),
        document=document,
        events=lambda pieces: events(session, form, head, pieces, body),
        failure=lambda error: event(error.body),
    )


async def respond(
    request: Request,
    session: Session,
    *,
    stream: bool,
    document: Callable[[], Json],
    events: Callable[[Pieces], AsyncIterator[str]],
    failure: Callable[[ApiError], str],
) -> Response:
    """Return `document()` once all choices have finished, or a stream of `events(pieces)`. Always closes the session.

    `failure` returns the event that ends a stream after an error.
    """
    try:
        if not stream:
            await cancel_on_disconnect(request, run_to_end(session))
            return JSONResponse(document())
        # Before the first output, a failure can still be returned as an HTTP status.
        first = await cancel_on_disconnect(request, session.next())
    except BaseException:
        session.close()
        raise
    return EventStream(session, guarded(events(pieces_of(session, first)), failure))


async def run_to_end(session: Session) -> None:
    while not session.finished:
        await session.next()


async def pieces_of(session: Session, first: tuple[Choice, Piece]) -> Pieces:
    yield first
    while not session.finished:
        yield await session.next()


async def guarded(events: AsyncIterator[str], failure: Callable[[ApiError], str]) -> AsyncIterator[str]:
    try:
        async for text in events:
            yield text
    except ApiError as error:
        yield failure(error)
    except Exception:
        log.exception("a response stream failed")
        yield failure(internal_error())


async def events(
    session: Session, form: ResponseFormat, head: Json, pieces: Pieces, body: GenerationRequest
) -> AsyncIterator[str]:
    def chunk(choice: Choice, delta: Json, end: Json | None = None) -> str:
        entry = {"index": choice.index, "logprobs": None, **delta, **(end or {"finish_reason": None})}
        usage = {}
        if body.include_usage or body.continuous_usage:
            usage["usage"] = session.usage(form.reasoning_tokens(session)) if body.continuous_usage else None
        return event({**head, "choices": [entry], **usage})

    for choice in session.choices:
        if (opening := form.opening(choice)) is not None:
            yield chunk(choice, opening)
    async for choice, piece in pieces:
        extra = shown(body, piece)
        if (delta := form.delta(choice, piece)) is not None or extra:
            yield chunk(choice, (delta or form.closing(choice)) | extra)
        if choice.finish_reason is not None:
            yield chunk(choice, form.closing(choice), ending(form, choice))
    if body.include_usage:
        yield event({**head, "choices": [], **usage_fields(session, form)})
    yield "data: [DONE]\n\n"


def ending(form: ResponseFormat, choice: Choice) -> Json:
    return {"finish_reason": form.finish_reason(choice), "stop_reason": choice.stop_reason}


def usage_fields(session: Session, form: ResponseFormat) -> Json:
    return {"usage": session.usage(form.reasoning_tokens(session)), **speculation(session)}


def speculation(session: Session) -> Json:
    """Return the speculation statistics, or nothing if the request did not speculate."""
    return {"metrics": {"speculative_decoding": session.speculation}} if session.speculation else {}


def shown(body: GenerationRequest, piece: Piece) -> Json:
    """Return our extension fields about tokens, if the request enables them and the piece has tokens."""
    extra: Json = {}
    if body.return_token_ids and piece.tokens:
        extra["token_ids"] = [token.token for token in piece.tokens]
    if body.drafts.detail and piece.tokens:
        extra["tokens"] = [{"id": t.token, "text": t.text, "accepted_depth": t.depth} for t in piece.tokens]
    return extra


def event(document: Json) -> str:
    # ASCII, because some clients treat U+0085 or U+2028 as a line break
    return f"data: {json.dumps(document, separators=(',', ':'))}\n\n"


def named_event(document: Json) -> str:
    """Format an event with its type as its name, as in Anthropic's API and OpenAI's Responses."""
    return f"event: {document['type']}\n" + event(document)


class EventStream(StreamingResponse):
    """A stream that closes the session however it ends, even if it never started."""

    def __init__(self, session: Session, content: AsyncIterator[str]) -> None:
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}  # proxies must not buffer
        super().__init__(content, media_type="text/event-stream", headers=headers)
        self._session = session

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._session.close()


async def cancel_on_disconnect(request: Request, work: Awaitable[T]) -> T:
    """Await `work`. If the client disconnects, cancels it and raises ApiError."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(hang_up(request))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ApiError(499, "the client closed the connection", code="client_closed")
        return task.result()
    finally:
        task.cancel()
        gone.cancel()


async def hang_up(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
