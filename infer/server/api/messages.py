"""POST /v1/messages: Anthropic's Messages API over the same sessions, with content blocks and named events."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from functools import partial

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic_core import from_json

from infer.server.api.conversation import Conversation, converse
from infer.server.api.items import ItemsAnswer, Kind
from infer.server.api.rendering import Json, shown, speculation
from infer.server.parsing.tool_styles import Call
from infer.server.protocol.errors import REQUEST_ID, ApiError
from infer.server.protocol.messages import CountTokensRequest, MessagesRequest
from infer.server.service import Service
from infer.server.session import Piece, Session

BLOCKS: dict[Kind, str] = {"content": "text", "reasoning": "thinking"}  # a block's type, and the name of its text


class MessageAnswer(ItemsAnswer):
    """One message, whose items are content blocks. `request_id`: for errors."""

    def __init__(
        self, request_id: str | None, body: MessagesRequest, session: Session, conversation: Conversation
    ) -> None:
        super().__init__(session, conversation)
        self._body, self._request_id = body, request_id
        self._id = f"msg_{uuid.uuid4().hex}"

    def begin(self, kind: Kind) -> Iterator[Json]:
        name = BLOCKS[kind]
        yield self._start({"type": name, name: ""} | ({"signature": ""} if kind == "reasoning" else {}))

    def grow(self, kind: Kind, text: str, piece: Piece) -> Iterator[Json]:
        thinking = self._body.thinking
        if kind == "content" or thinking is None or thinking.display != "omitted":
            name = BLOCKS[kind]
            self.items[-1][name] += text
            yield self._delta(f"{name}_delta", name, text)

    def end(self, kind: Kind, *, complete: bool) -> Iterator[Json]:
        if kind == "reasoning":
            yield self._delta("signature_delta", "signature", "")  # some clients drop thinking without a signature
        yield self._stop()

    def call(self, call: Call) -> Iterator[Json]:
        block: Json = {"type": "tool_use", "id": self._conversation.new_call_id(), "name": call.name, "input": {}}
        yield self._start(block)
        yield self._delta("input_json_delta", "partial_json", call.arguments)
        block["input"] = input_of(call)
        yield self._stop()

    def opening(self) -> list[Json]:
        start = self._message([]) | {"stop_reason": None, "stop_sequence": None, "usage": self._usage()}
        return [{"type": "message_start", "message": start}]

    def closing(self) -> list[Json]:
        delta = {"type": "message_delta", "delta": self._end(), "usage": self._usage()} | self._extensions()
        return [delta, {"type": "message_stop"}]

    def result(self) -> Json:
        return self._message(self.items) | self._end() | {"usage": self._usage()} | self._extensions()

    def failure(self, error: ApiError) -> Json:
        return error.anthropic_body(self._request_id)

    def _start(self, block: Json) -> Json:
        self.items.append(block)
        return {"type": "content_block_start", "index": len(self.items) - 1, "content_block": dict(block)}

    def _delta(self, kind: str, name: str, text: str) -> Json:
        return {"type": "content_block_delta", "index": len(self.items) - 1, "delta": {"type": kind, name: text}}

    def _stop(self) -> Json:
        return {"type": "content_block_stop", "index": len(self.items) - 1}

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
        called = any(block["type"] == "tool_use" for block in self.items)
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
        usage = self._session.usage(self.reasoning_tokens)
        details = usage["completion_tokens_details"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": usage["prompt_tokens"] - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"thinking_tokens": details.pop("reasoning_tokens"), **details},
        }

    def _extensions(self) -> Json:
        return shown(self._body, self._choice.whole) | speculation(self._session)


def input_of(call: Call) -> Json:
    """Parse a call's arguments; of truncated ones, the complete part, as Anthropic's client parses such a stream."""
    try:
        value = from_json(call.arguments, allow_partial=True)
    except ValueError:  # empty, or nested deeper than the parser allows
        return {}
    return value if isinstance(value, dict) else {}


def add_routes(routes: APIRouter, service: Service) -> None:
    @routes.post("/v1/messages", response_model=None)
    async def messages(body: MessagesRequest, request: Request) -> Response:
        request_id = request.scope.get(REQUEST_ID)
        return await converse(service, request, body, partial(MessageAnswer, request_id))

    @routes.post("/v1/messages/count_tokens")
    async def count_tokens(body: CountTokensRequest) -> dict[str, int]:
        service.check_fields(body, body.model)
        return {"input_tokens": await Conversation(service, body).count_tokens("messages")}
