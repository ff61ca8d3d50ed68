"""POST /v1/completions: completes plain text or token ids."""

from __future__ import annotations

from typing import ClassVar

from fastapi import APIRouter, Request
from fastapi.responses import Response

from infer.server.api.rendering import ChoicesAnswer, Json, respond
from infer.server.protocol.completions import CompletionRequest
from infer.server.protocol.errors import invalid_field
from infer.server.protocol.logprobs import TokenNames, completion_logprobs
from infer.server.service import Service
from infer.server.session import Choice, Piece, Prompt, Session


class CompletionAnswer(ChoicesAnswer):
    prefix, whole, part = "cmpl", "text_completion", "text_completion"
    empty: ClassVar[Json] = {"text": ""}

    def __init__(self, body: CompletionRequest, session: Session, names: TokenNames) -> None:
        super().__init__(body, session, names)
        self._top_n = body.logprobs

    def choice(self, choice: Choice) -> Json:
        return self._text(choice.whole) | self.prompt_fields(choice)

    def delta(self, choice: Choice, piece: Piece) -> Json | None:
        return self._text(piece) if piece.text or piece.scored else None

    def _text(self, piece: Piece) -> Json:
        top_n = self._top_n
        logprobs = None if top_n is None else completion_logprobs(piece.scored, top_n, self._names)
        return {"text": piece.text, "logprobs": logprobs}


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

        session = await service.start(
            request, body, encode, body.prompts, structure=lambda: body.structure, only_prompt=body.only_prompt
        )
        return await respond(request, session, CompletionAnswer(body, session, service.names), stream=body.stream)
