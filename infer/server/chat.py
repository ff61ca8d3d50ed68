"""POST /v1/chat/completions: a conversation in, the assistant's turn out, through the model's own chat template."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import Response

from infer.server.answers import Json, answer
from infer.server.errors import ApiError
from infer.server.protocol import ChatRequest, Message
from infer.server.service import Service
from infer.server.session import Choice


class ChatFormat:
    prefix, whole, part = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def choice(self, choice: Choice) -> Json:
        return {
            "index": choice.index,
            "message": {"role": "assistant", "content": choice.text, "refusal": None},
            "logprobs": None,
            "finish_reason": choice.finish_reason,
        }

    def opening(self, choice: Choice) -> Json:
        return {"delta": {"role": "assistant", "content": ""}}

    def delta(self, piece: str) -> Json:
        return {"delta": {"content": piece}}

    def closing(self) -> Json:
        return {"delta": {}}


def router(service: Service) -> APIRouter:
    routes = APIRouter()

    @routes.post("/v1/chat/completions", response_model=None)
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        service.check(body)

        def encode(messages: list[Message]) -> list[int]:
            try:
                text = service.tokenizer.render_chat([{"role": m.role, "content": m.text} for m in messages])
            except ValueError as error:
                raise ApiError(400, str(error), param="messages", code="chat_template") from error
            return service.encode(text, "messages", add_special_tokens=False)  # the template writes them itself

        session = await service.start(
            body, encode, [body.messages], param="messages", max_tokens=body.limit, default_max_tokens=None
        )
        return await answer(request, session, ChatFormat(), body)

    return routes
