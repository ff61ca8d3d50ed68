"""POST /v1/completions: completes plain text or token ids."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import Response

from infer.server.api.rendering import Json, ResponseFormat, answer
from infer.server.protocol.completions import COMPLETION_MAX_TOKENS, CompletionRequest
from infer.server.protocol.errors import invalid_field
from infer.server.protocol.logprobs import TokenNames, completion_logprobs, prompt_logprobs
from infer.server.service import Service
from infer.server.session import Choice, Piece, Prompt


class CompletionFormat(ResponseFormat):
    prefix, whole, part = "cmpl", "text_completion", "text_completion"

    def __init__(self, body: CompletionRequest, names: TokenNames) -> None:
        self._body, self._names = body, names

    def choice(self, choice: Choice) -> Json:
        top_n = self._body.prompt_logprobs
        extra: Json = {}
        if top_n is not None:
            extra["prompt_logprobs"] = prompt_logprobs(choice.prompt_logprobs, top_n, self._names)
        if self._body.return_token_ids:
            extra["prompt_token_ids"] = choice.prompt.ids
        return {"text": choice.whole.text, "logprobs": self._logprobs(choice.whole), **extra}

    def delta(self, choice: Choice, piece: Piece) -> Json | None:
        if not piece.text and not piece.scored:
            return None
        return {"text": piece.text, "logprobs": self._logprobs(piece)}

    def closing(self, choice: Choice) -> Json:
        return {"text": ""}

    def _logprobs(self, piece: Piece) -> Json | None:
        top_n = self._body.logprobs
        return None if top_n is None else completion_logprobs(piece.scored, top_n, self._names)


def add_routes(routes: APIRouter, service: Service) -> None:
    @routes.post("/v1/completions", response_model=None)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        service.check(body)
        if len(body.prompts) > service.config.max_prompts:
            most = service.config.max_prompts
            raise invalid_field("prompt", f"{len(body.prompts)} prompts; at most server.max_prompts={most}")
        special = True if body.add_special_tokens is None else body.add_special_tokens

        def encode(prompt: str | list[int]) -> Prompt:
            ids = service.encode(prompt, "prompt", add_special_tokens=special) if isinstance(prompt, str) else prompt
            return service.echo(ids, prompt, add_special_tokens=special) if body.echo else Prompt(ids)

        only_prompt = body.max_tokens == 0
        session = await service.start(
            request,
            body,
            encode,
            body.prompts,
            param="prompt",
            max_tokens=1 if only_prompt else body.max_tokens,
            default_max_tokens=COMPLETION_MAX_TOKENS,
            structure=body.structure,
            only_prompt=only_prompt,
        )
        return await answer(request, session, CompletionFormat(body, service.names), body)
