"""Turns a session into an HTTP response: one JSON document, or server-sent events. Both stop if the client disconnects.

An `Answer` is the response of one API. OpenAI's chats and completions are lists of choices (`ChoicesAnswer`), messages
and responses lists of items (items.py); what stands in them is in the module of each endpoint.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Iterable, Iterator
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from infer.server.protocol.completions import GenerationRequest
from infer.server.protocol.errors import ApiError, internal_error
from infer.server.protocol.logprobs import TokenNames, prompt_logprobs
from infer.server.session import Choice, Piece, Session

log = logging.getLogger("headway.server")
T = TypeVar("T")
Json = dict[str, Any]


class Answer(ABC):
    """The response of one API, under construction: either its `document` or its events are taken, once."""

    terminator: str = ""  # of a stream, after all events

    @abstractmethod
    def document(self) -> Json:
        """Return the whole response. Called after all choices have finished."""

    @abstractmethod
    def opening(self) -> Iterable[Json]:
        """Return the events before all text."""

    @abstractmethod
    def take(self, choice: Choice, piece: Piece) -> Iterable[Json]:
        """Yield the events of a piece of a choice."""

    @abstractmethod
    def closing(self) -> Iterable[Json]:
        """Return the events after all text."""

    @abstractmethod
    def failure(self, error: ApiError) -> Json:
        """Return the event that ends a stream after an error."""

    def line(self, document: Json) -> str:
        """Format an event, one with a type under its name, as in Anthropic's API and OpenAI's Responses."""
        name = f"event: {document['type']}\n" if "type" in document else ""
        # ASCII, because some clients treat U+0085 or U+2028 as a line break
        return f"{name}data: {json.dumps(document, separators=(',', ':'))}\n\n"


async def respond(request: Request, session: Session, answer: Answer, *, stream: bool | None) -> Response:
    """Return the answer's document once all choices have finished, or its stream. Always closes the session."""
    try:
        if not stream:
            await cancel_on_disconnect(request, run_to_end(session))
            return JSONResponse(answer.document())
        # Before the first output, a failure can still be returned as an HTTP status.
        first = await cancel_on_disconnect(request, session.next())
    except BaseException:
        session.close()
        raise
    return EventStream(session, stream_of(session, answer, first))


async def run_to_end(session: Session) -> None:
    while not session.finished:
        await session.next()


async def stream_of(session: Session, answer: Answer, first: tuple[Choice, Piece]) -> AsyncIterator[str]:
    """Yield the events of a session whose `first` piece was taken, down to one that reports an error."""
    try:
        for document in answer.opening():
            yield answer.line(document)
        for document in answer.take(*first):
            yield answer.line(document)
        while not session.finished:
            for document in answer.take(*await session.next()):
                yield answer.line(document)
        for document in answer.closing():
            yield answer.line(document)
        if answer.terminator:
            yield answer.terminator
    except ApiError as error:
        yield answer.line(answer.failure(error))
    except Exception:
        log.exception("a response stream failed")
        yield answer.line(answer.failure(internal_error()))


class ChoicesAnswer(Answer):
    """An answer with a list of choices; a subclass says what stands in one."""

    prefix: str  # of the response's id
    whole: str  # `object` of a full document
    part: str  # `object` of a streamed chunk
    begin: Json | None = None  # a choice before any text
    empty: Json  # a choice without any
    terminator = "data: [DONE]\n\n"

    def __init__(self, body: GenerationRequest, session: Session, names: TokenNames) -> None:
        self._body, self._session, self._names = body, session, names
        self._head: Json = {
            "id": f"{self.prefix}-{uuid.uuid4().hex}",
            "object": self.part if body.stream else self.whole,
            "created": int(time.time()),
            "model": body.model,
            "seed": session.seed,  # our extension: the seed in use, from the request or random
        }

    @abstractmethod
    def choice(self, choice: Choice) -> Json:
        """Return a finished choice."""

    @abstractmethod
    def delta(self, choice: Choice, piece: Piece) -> Json | None:
        """Return what a piece adds to a choice, or None if there is nothing to send yet."""

    def fields(self) -> Json:
        """Return the fields beside the choices."""
        return {}

    def finish_reason(self, choice: Choice) -> str | None:
        return choice.finish_reason

    @property
    def reasoning_tokens(self) -> int | None:
        """The reasoning tokens of all choices so far, or None if this format has no reasoning."""
        return None

    def document(self) -> Json:
        choices = [
            {"index": choice.index, **self.choice(choice), **shown(self._body, choice.whole), **self._ending(choice)}
            for choice in self._session.choices
        ]
        return {**self._head, "choices": choices, **self.fields(), **self._usage_fields()}

    def opening(self) -> Iterable[Json]:
        choices = self._session.choices
        return [] if self.begin is None else [self._chunk(choice, self.begin) for choice in choices]

    def take(self, choice: Choice, piece: Piece) -> Iterator[Json]:
        extra = shown(self._body, piece)
        if (delta := self.delta(choice, piece)) is not None or extra:
            yield self._chunk(choice, (delta or self.empty) | extra)
        if choice.finish_reason is not None:
            yield self._chunk(choice, self.empty | self._ending(choice))

    def closing(self) -> Iterator[Json]:
        if self._body.stream_options and self._body.stream_options.include_usage:
            yield {**self._head, "choices": [], **self._usage_fields()}

    def failure(self, error: ApiError) -> Json:
        return error.body

    def prompt_fields(self, choice: Choice) -> Json:
        """Return the fields about a choice's prompt that the request asks for."""
        top_n, fields = self._body.prompt_logprobs, {}
        if top_n is not None:
            fields["prompt_logprobs"] = prompt_logprobs(choice.prompt_logprobs, top_n, self._names)
        return fields | ({"prompt_token_ids": choice.prompt.ids} if self._body.return_token_ids else {})

    def _chunk(self, choice: Choice, delta: Json) -> Json:
        options, usage = self._body.stream_options, {}
        if options and (options.include_usage or options.continuous_usage_stats):
            usage["usage"] = self._session.usage(self.reasoning_tokens) if options.continuous_usage_stats else None
        entry = {"index": choice.index, "logprobs": None, "finish_reason": None, **delta}
        return {**self._head, "choices": [entry], **usage}

    def _ending(self, choice: Choice) -> Json:
        return {"finish_reason": self.finish_reason(choice), "stop_reason": choice.stop_reason}

    def _usage_fields(self) -> Json:
        return {"usage": self._session.usage(self.reasoning_tokens), **speculation(self._session)}


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

    async def hang_up() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(hang_up())
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ApiError(499, "the client closed the connection", code="client_closed")
        return task.result()
    finally:
        task.cancel()
        gone.cancel()
