"""POST /v1/chat/completions: renders a conversation with the model's chat template, returns the assistant's turn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from fastapi import APIRouter, Request
from fastapi.responses import Response

from infer.server.api.conversation import Conversation, converse
from infer.server.api.rendering import ChoicesAnswer, Json
from infer.server.parsing.stream import ChatParser, Parts
from infer.server.parsing.tool_styles import Call
from infer.server.protocol.chat import ChatRequest
from infer.server.protocol.logprobs import chat_logprobs
from infer.server.service import Service
from infer.server.session import Choice, Piece, Session, tokens_within


class ChatAnswer(ChoicesAnswer):
    prefix, whole, part = "chatcmpl", "chat.completion", "chat.completion.chunk"
    begin: ClassVar[Json] = {"delta": {"role": "assistant", "content": ""}}
    empty: ClassVar[Json] = {"delta": {}}

    def __init__(self, body: ChatRequest, session: Session, conversation: Conversation) -> None:
        super().__init__(body, session, conversation.names)
        self._include_reasoning, self._with_logprobs = body.include_reasoning is not False, body.logprobs
        self._conversation = conversation
        self._parsers: dict[int, ChatParser] = {}  # by choice index
        self._calls: dict[int, list[Call]] = {}  # calls so far, by choice index

    def choice(self, choice: Choice) -> Json:
        parts = self._parser(choice).take(choice.whole.text, choice.finish_reason)
        self._calls[choice.index] = parts.calls
        content = parts.content if parts.content or not parts.calls else None
        message: Json = {"role": "assistant", "content": content, "refusal": None, **self._reasoning(parts)}
        if parts.calls:
            message["tool_calls"] = self._tool_calls(parts.calls)
        return {"message": message, "logprobs": self._logprobs(choice.whole)}

    def delta(self, choice: Choice, piece: Piece) -> Json | None:
        parts = self._parser(choice).take(piece.text, choice.finish_reason)
        delta: Json = {"content": parts.content} if parts.content else {}
        delta |= self._reasoning(parts)
        if calls := parts.calls:
            sent = self._calls.setdefault(choice.index, [])
            delta["tool_calls"] = [{"index": i, **call} for i, call in enumerate(self._tool_calls(calls), len(sent))]
            sent += calls
        if not delta and not piece.scored:
            return None
        return {"delta": delta, "logprobs": self._logprobs(piece)}

    def fields(self) -> Json:
        return self.prompt_fields(self._session.choices[0])

    def finish_reason(self, choice: Choice) -> str | None:
        calls = self._calls.get(choice.index, [])
        called = choice.finish_reason == "stop" and calls and all(call.complete for call in calls)
        return "tool_calls" if called else choice.finish_reason

    @property
    def reasoning_tokens(self) -> int | None:
        if not self._conversation.thinks:
            return None
        return sum(tokens_within(c.whole.tokens, self._parser(c).reasoning_span) for c in self._session.choices)

    def _parser(self, choice: Choice) -> ChatParser:
        return self._parsers.setdefault(choice.index, self._conversation.parser())

    def _reasoning(self, parts: Parts) -> Json:
        return {"reasoning_content": parts.reasoning} if parts.reasoning and self._include_reasoning else {}

    def _tool_calls(self, calls: Sequence[Call]) -> list[Json]:
        return [
            {
                "id": self._conversation.new_call_id(),
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in calls
        ]

    def _logprobs(self, piece: Piece) -> Json | None:
        return chat_logprobs(piece.scored, self._names) if self._with_logprobs else None


def add_routes(routes: APIRouter, service: Service) -> None:
    @routes.post("/v1/chat/completions", response_model=None)
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        return await converse(service, request, body, ChatAnswer)
