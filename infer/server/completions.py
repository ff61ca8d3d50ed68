"""POST /v1/completions: plain text or token ids in, text out."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import Response

from infer.server.answers import Json, answer
from infer.server.errors import ApiError
from infer.server.protocol import COMPLETION_MAX_TOKENS, CompletionRequest
from infer.server.service import Service
from infer.server.session import Choice


class CompletionFormat:
    prefix, whole, part = "cmpl", "text_completion", "text_completion"

    def __init__(self, *, token_ids: bool = False) -> None:
        self._token_ids = token_ids

    def choice(self, choice: Choice) -> Json:
        return {
            "index": choice.index,
            "text": choice.text,
            "logprobs": None,
            "finish_reason": choice.finish_reason,
            **({"token_ids": choice.token_ids} if self._token_ids else {}),
        }

    def opening(self, choice: Choice) -> None:
        return None

    def delta(self, piece: str) -> Json:
        return {"text": piece}

    def closing(self) -> Json:
        return {"text": ""}


def router(service: Service) -> APIRouter:
    routes = APIRouter()

    @routes.post("/v1/completions", response_model=None)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        service.check(body)
        prompts = body.prompts
        if len(prompts) > service.config.max_prompts:
            message = f"prompt: {len(prompts)} prompts; at most server.max_prompts={service.config.max_prompts}"
            raise ApiError(400, message, param="prompt", code="invalid_value")

        def encode(prompt: str | list[int]) -> list[int]:
            return service.encode(prompt, "prompt", add_special_tokens=True) if isinstance(prompt, str) else prompt

        session = await service.start(
            body,
            encode,
            prompts,
            param="prompt",
            max_tokens=body.max_tokens,
            default_max_tokens=COMPLETION_MAX_TOKENS,
        )
        return await answer(request, session, CompletionFormat(token_ids=bool(body.return_token_ids)), body)

    return routes
