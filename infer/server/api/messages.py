"""POST /v1/messages: Anthropic's Messages API over the same sessions, with content blocks and named events."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Iterator

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic_core import from_json

from infer.server.api.conversation import Conversation
from infer.server.api.rendering import Json, Pieces, named_event, respond, shown, speculation
from infer.server.parsing.stream import Parts
from infer.server.parsing.tool_styles import Call
from infer.server.protocol.errors import REQUEST_ID
from infer.server.protocol.messages import CountTokensRequest, MessagesRequest
from infer.server.service import Service
from infer.server.session import Choice, Piece, Session, tokens_within


class Blocks:
    """The content blocks of a message under construction. Methods yield the stream events for each change."""

    def __init__(self, conversation: Conversation, *, hides_thinking: bool) -> None:
        self._conversation, self._hides_thinking = conversation, hides_thinking
        self.blocks: list[Json] = []
        self._open = False  # whether the last block is still open

    def add(self, parts: Parts) -> Iterator[Json]:
        """Append parts in the order in which the model wrote them."""
        for part in parts.items:
            if isinstance(part, Call):
                yield from self._call(part)
            elif part.kind == "reasoning":
                yield from self._grow("thinking", "" if self._hides_thinking else part.text)
            else:
                yield from self._grow("text", part.text)

    def close(self) -> Iterator[Json]:
        """Close the open block, if any."""
        if not self._open:
            return
        self._open = False
        if self.blocks[-1]["type"] == "thinking":
            yield self._delta("signature_delta", "signature", "")  # some clients drop thinking without a signature
        yield {"type": "content_block_stop", "index": len(self.blocks) - 1}

    def _grow(self, kind: str, text: str) -> Iterator[Json]:
        if not self._open or self.blocks[-1]["type"] != kind:
            yield from self._begin({"type": kind, kind: ""} | ({"signature": ""} if kind == "thinking" else {}))
        self.blocks[-1][kind] += text
        if text:
            yield self._delta(f"{kind}_delta", kind, text)

    def _call(self, call: Call) -> Iterator[Json]:
        block: Json = {"type": "tool_use", "id": self._conversation.new_call_id(), "name": call.name, "input": {}}
        yield from self._begin(block)
        yield self._delta("input_json_delta", "partial_json", call.arguments)
        block["input"] = input_of(call)

    def _begin(self, block: Json) -> Iterator[Json]:
        yield from self.close()
        self.blocks.append(block)
        self._open = True
        yield {"type": "content_block_start", "index": len(self.blocks) - 1, "content_block": dict(block)}

    def _delta(self, kind: str, name: str, text: str) -> Json:
        return {"type": "content_block_delta", "index": len(self.blocks) - 1, "delta": {"type": kind, name: text}}


def input_of(call: Call) -> Json:
    """Parse a call's arguments; of truncated ones, the complete part, as Anthropic's client parses such a stream."""
    try:
        value = from_json(call.arguments, allow_partial=True)
    except ValueError:  # empty, or nested deeper than the parser allows
        return {}
    return value if isinstance(value, dict) else {}


class Answer:
    """One message under construction: its document, or its stream events."""

    def __init__(self, body: MessagesRequest, session: Session, conversation: Conversation) -> None:
        self._body, self._session = body, session
        self._choice = session.choices[0]
        self._parser = conversation.parser()
        self._blocks = Blocks(conversation, hides_thinking=body.hides_thinking)
        self._id = f"msg_{uuid.uuid4().hex}"

    def take(self, choice: Choice, piece: Piece) -> Iterator[Json]:
        yield from self._blocks.add(self._parser.take(piece.text, choice.finish_reason))
        if choice.finish_reason is not None:
            yield from self._blocks.close()

    def document(self) -> Json:
        for _ in self.take(self._choice, self._choice.whole):
            pass
        return self._message(self._blocks.blocks) | self._end() | {"usage": self._usage()} | self._extensions()

    async def events(self, pieces: Pieces) -> AsyncIterator[str]:
        begun = False
        async for choice, piece in pieces:
            if not begun:
                start = self._message([]) | {"stop_reason": None, "stop_sequence": None, "usage": self._usage()}
                yield named_event({"type": "message_start", "message": start})
                begun = True
            for document in self.take(choice, piece):
                yield named_event(document)
        yield named_event({"type": "message_delta", "delta": self._end(), "usage": self._usage()} | self._extensions())
        yield named_event({"type": "message_stop"})

    def _message(self, content: list[Json]) -> Json:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._body.model,
            "content": content,
            "seed": self._session.seed,  # our extension, as in the other endpoints
        }

    def _end(self) -> Json:
        called = any(block["type"] == "tool_use" for block in self._blocks.blocks)
        cut = self._choice.finish_reason == "length"
        stop = self._choice.stop_reason
        if cut:
            full = len(self._choice.whole.tokens) < self._body.max_tokens
            reason = "model_context_window_exceeded" if full else "max_tokens"
        elif isinstance(stop, str):
            reason = "stop_sequence"
        else:
            reason = "tool_use" if called else "end_turn"
        return {"stop_reason": reason, "stop_sequence": stop if isinstance(stop, str) and not cut else None}

    def _usage(self) -> Json:
        """Return the usage so far. Cached tokens count separately: the prompt is the sum of the three input counts."""
        usage = self._session.usage()
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        thinking = tokens_within(self._choice.whole.tokens, self._parser.reasoning_span)
        return {
            "input_tokens": usage["prompt_tokens"] - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"thinking_tokens": thinking, **usage.get("completion_tokens_details", {})},
        }

    def _extensions(self) -> Json:
        return shown(self._body, self._choice.whole) | speculation(self._session)


def add_routes(routes: APIRouter, service: Service) -> None:
    def conversation_of(body: CountTokensRequest) -> Conversation:
        structure = body.structure if isinstance(body, MessagesRequest) else body.form
        return Conversation(service, body.conversation, body.tool_use, structure, body.template_options, body.effort)

    @routes.post("/v1/messages", response_model=None)
    async def messages(body: MessagesRequest, request: Request) -> Response:
        service.check(body)
        conversation = conversation_of(body)
        session = await conversation.start(
            request, body, param="messages", max_tokens=None, default_max_tokens=body.max_tokens
        )
        answer = Answer(body, session, conversation)
        return await respond(
            request,
            session,
            stream=bool(body.stream),
            document=answer.document,
            events=answer.events,
            failure=lambda error: named_event(error.anthropic_body(request.scope.get(REQUEST_ID))),
        )

    @routes.post("/v1/messages/count_tokens")
    async def count_tokens(body: CountTokensRequest) -> dict[str, int]:
        service.check_fields(body, body.model)
        return {"input_tokens": await conversation_of(body).count_tokens("messages")}
