"""POST /v1/responses: OpenAI's Responses API over the same sessions, with output items and named events.

One choice per request. Nothing is stored, so `previous_response_id` is refused and the response has `store: false`.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Iterator
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from infer.server.api.conversation import Conversation
from infer.server.api.rendering import Json, Pieces, named_event, respond, shown, speculation
from infer.server.parsing.stream import Parts
from infer.server.parsing.tool_styles import Call
from infer.server.protocol.errors import ApiError
from infer.server.protocol.logprobs import ScoredToken, TokenNames, chat_logprobs
from infer.server.protocol.responses import ResponsesRequest
from infer.server.service import Service
from infer.server.session import Choice, Piece, Session, tokens_within


class Items:
    """The output items under construction. Methods yield the stream events for each change."""

    def __init__(self, conversation: Conversation, names: TokenNames, *, logprobs: bool) -> None:
        self._conversation, self._names, self._with_logprobs = conversation, names, logprobs
        self.items: list[Json] = []
        self._open: Json | None = None  # the last item, while it is open

    def add(self, parts: Parts, scored: list[ScoredToken]) -> Iterator[Json]:
        """Append parts in the order of the text. `scored`: log-probabilities, sent with the first span of content."""
        for part in parts.items:
            if isinstance(part, Call):
                yield from self.close()
                yield from self._call(part)
            elif part.kind == "reasoning":
                yield from self._grow("reasoning", part.text, [])
            else:
                yield from self._grow("message", part.text, scored)
                scored = []

    def close(self, *, complete: bool = True) -> Iterator[Json]:
        """Close the open item, if any."""
        item, self._open = self._open, None
        if item is None:
            return
        place = {"item_id": item["id"], "output_index": len(self.items) - 1, "content_index": 0}
        (part,) = item["content"]
        kind = "response.output_text" if item["type"] == "message" else "response.reasoning_text"
        logprobs = {"logprobs": part.get("logprobs", [])} if item["type"] == "message" else {}
        yield {"type": f"{kind}.done", **place, "text": part["text"], **logprobs}
        yield {"type": "response.content_part.done", **place, "part": part}
        item["status"] = "completed" if complete else "incomplete"
        yield self._item_event("done")

    def _grow(self, kind: str, text: str, scored: list[ScoredToken]) -> Iterator[Json]:
        if self._open is None or self._open["type"] != kind:
            yield from self.close()
            yield from self._begin(kind)
        assert self._open is not None
        (part,) = self._open["content"]
        part["text"] += text
        place = {"item_id": self._open["id"], "output_index": len(self.items) - 1, "content_index": 0}
        if kind == "reasoning":
            yield {"type": "response.reasoning_text.delta", **place, "delta": text}
            return
        logprobs = chat_logprobs(scored, self._names)["content"] if self._with_logprobs else []
        if self._with_logprobs:
            part["logprobs"] += logprobs
        yield {"type": "response.output_text.delta", **place, "delta": text, "logprobs": logprobs}

    def _begin(self, kind: str) -> Iterator[Json]:
        if kind == "message":
            part: Json = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            item: Json = {"type": "message", "id": f"msg_{uuid.uuid4().hex}", "role": "assistant", "content": []}
        else:
            part = {"type": "reasoning_text", "text": ""}
            item = {"type": "reasoning", "id": f"rs_{uuid.uuid4().hex}", "summary": [], "content": []}
        item["status"] = "in_progress"
        self.items.append(item)
        self._open = item
        yield self._item_event("added")
        item["content"].append(part)
        place = {"item_id": item["id"], "output_index": len(self.items) - 1, "content_index": 0}
        yield {"type": "response.content_part.added", **place, "part": part}

    def _call(self, call: Call) -> Iterator[Json]:
        call_id = self._conversation.new_call_id()
        item: Json = {
            "type": "function_call",
            "id": f"fc_{uuid.uuid4().hex}",
            "call_id": call_id,
            "name": call.name,
            "arguments": "",
            "status": "in_progress",
        }
        self.items.append(item)
        yield self._item_event("added")
        place = {"item_id": item["id"], "output_index": len(self.items) - 1}
        yield {"type": "response.function_call_arguments.delta", **place, "delta": call.arguments}
        done = {"name": call.name, "arguments": call.arguments}
        yield {"type": "response.function_call_arguments.done", **place, **done}
        item |= {"arguments": call.arguments, "status": "completed" if call.complete else "incomplete"}
        yield self._item_event("done")

    def _item_event(self, change: str) -> Json:
        item = self.items[-1]
        content = {"content": list(item["content"])} if "content" in item else {}
        return {
            "type": f"response.output_item.{change}",
            "output_index": len(self.items) - 1,
            "item": {**item, **content},
        }


class Answer:
    """One response under construction: its document, and its stream events with sequence numbers."""

    def __init__(self, body: ResponsesRequest, session: Session, conversation: Conversation, names: TokenNames) -> None:
        self._body, self._session = body, session
        self._parser = conversation.parser()
        self._items = Items(conversation, names, logprobs=body.num_logprobs is not None)
        self._held_back: list[ScoredToken] = []  # scored tokens whose text is held back
        self._number = 0
        self._id, self._created = f"resp_{uuid.uuid4().hex}", time.time()

    def take(self, choice: Choice, piece: Piece) -> Iterator[Json]:
        parts = self._parser.take(piece.text, choice.finish_reason)
        scored = [*self._held_back, *piece.scored]
        self._held_back = [] if parts.content else scored
        for event in self._items.add(parts, scored):
            # our extension fields are sent with the text of their tokens
            yield event | (shown(self._body, piece) if event["type"] == "response.output_text.delta" else {})
        if choice.finish_reason is not None:
            yield from self._items.close(complete=choice.finish_reason == "stop")

    def numbered(self, document: Json) -> str:
        self._number += 1
        return named_event(document | {"sequence_number": self._number - 1})

    @property
    def last(self) -> Json:
        status = "completed" if self._session.choices[0].finish_reason == "stop" else "incomplete"
        return {"type": f"response.{status}", "response": self.document(status)}

    def document(self, status: str, error: Json | None = None) -> Json:
        body, finished = self._body, status in ("completed", "incomplete")
        tokens = self._session.choices[0].whole.tokens
        usage = self._session.usage(tokens_within(tokens, self._parser.reasoning_span))
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return {
            "id": self._id,
            "object": "response",
            "created_at": int(self._created),
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "error": error,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": body.model,
            "output": self._items.items if finished else [],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "seed": self._session.seed,
            "store": False,
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "text": {"format": self._format()},
            "tool_choice": self._tool_choice(),
            "tools": [tool.model_dump() for tool in body.tools or ()],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "truncation": "disabled",
            "usage": {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": usage["completion_tokens_details"],
                "total_tokens": usage["total_tokens"],
            }
            if finished
            else None,
            **(speculation(self._session) if finished else {}),
        }

    def _format(self) -> Json:
        text_format = self._body.text and self._body.text.format
        return text_format.model_dump(by_alias=True, exclude_none=True) if text_format else {"type": "text"}

    def _tool_choice(self) -> Any:
        choice = self._body.tool_choice or "auto"
        return choice if isinstance(choice, str) else choice.model_dump()


async def events(answer: Answer, pieces: Pieces) -> AsyncIterator[str]:
    for status in ("created", "in_progress"):
        yield answer.numbered({"type": f"response.{status}", "response": answer.document("in_progress")})
    async for choice, piece in pieces:
        for document in answer.take(choice, piece):
            yield answer.numbered(document)
    yield answer.numbered(answer.last)


def failure(error: ApiError) -> Json:
    return {"type": "error", "code": error.code, "message": error.message, "param": error.param, **error.body}


def add_routes(routes: APIRouter, service: Service) -> None:
    @routes.post("/v1/responses", response_model=None)
    async def responses(body: ResponsesRequest, request: Request) -> Response:
        service.check(body)
        conversation = Conversation(
            service, body.messages, body.tool_use, body.structure, body.chat_template_kwargs, body.effort
        )
        session = await conversation.start(request, body, param="input", max_tokens=body.max_output_tokens)
        answer = Answer(body, session, conversation, service.names)

        def document() -> Json:
            for _ in answer.take(session.choices[0], session.choices[0].whole):
                pass
            return answer.last["response"]

        return await respond(
            request,
            session,
            stream=bool(body.stream),
            document=document,
            events=lambda pieces: events(answer, pieces),
            failure=lambda error: answer.numbered(failure(error)),
        )
