"""POST /v1/chat/completions: a conversation in, the assistant's turn out, through the model's own chat template."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import Response

from infer.server.answers import Json, answer
from infer.server.chat_protocol import ChatRequest
from infer.server.logprobs import TokenNames, chat_logprobs, prompt_logprobs
from infer.server.service import Service
from infer.server.session import Choice, Piece, Prompt, Session


class ChatFormat:
    prefix, whole, part = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, body: ChatRequest, names: TokenNames) -> None:
        self._body, self._names = body, names

    def choice(self, choice: Choice) -> Json:
        message = {"role": "assistant", "content": choice.whole.text, "refusal": None}
        return {"message": message, "logprobs": self._logprobs(choice.whole)}

    def document(self, session: Session) -> Json:
        first, asked = session.choices[0], self._body.prompt_logprobs
        extra = {} if asked is None else {"prompt_logprobs": prompt_logprobs(first.prompt_logprobs, asked, self._names)}
        return extra | ({"prompt_token_ids": first.prompt.ids} if self._body.return_token_ids else {})

    def opening(self, choice: Choice) -> Json:
        return {"delta": {"role": "assistant", "content": ""}}

    def delta(self, choice: Choice, piece: Piece) -> Json | None:
        if not piece.text and not piece.scored:
            return None
        return {"delta": {"content": piece.text}, "logprobs": self._logprobs(piece)}

    def closing(self, choice: Choice) -> Json:
        return {"delta": {}}

    def _logprobs(self, piece: Piece) -> Json | None:
        return chat_logprobs(piece.scored, self._names) if self._body.logprobs else None


def router(service: Service) -> APIRouter:
    routes = APIRouter()

    @routes.post("/v1/chat/completions", response_model=None)
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        service.check(body)
        session = await service.start(
            request,
            body,
            lambda messages: Prompt(service.encode_chat(messages)),
            [body.messages],
            param="messages",
            max_tokens=body.limit,
            default_max_tokens=None,
        )
        return await answer(request, session, ChatFormat(body, service.names), body)

    return routes
