"""POST /tokenize and /detokenize, GET /tokenizer_info: the model's tokenizer, as in vLLM and as lm-eval calls it."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, ClassVar

from fastapi import APIRouter
from pydantic import Field, model_validator

from infer.server.api.conversation import template_options
from infer.server.protocol.chat import MAX_MESSAGES, Message, TemplateOptions
from infer.server.protocol.completions import TokenId
from infer.server.protocol.errors import field_error
from infer.server.protocol.fields import Strict, Unless
from infer.server.protocol.tools import MAX_TOOLS, AnyTool, Tool
from infer.server.service import Service

MAX_TOKENS = 2**20  # per /detokenize request


class TokenizeRequest(Strict):
    """A text, or a conversation that is rendered with the chat template as in a chat request."""

    accepted = frozenset({"mm_processor_kwargs", "media_io_kwargs", "return_token_offsets"})
    refused: ClassVar[dict[str, Unless]] = {"chat_template": Unless(), "continue_final_message": Unless((False,))}

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)] | None = None
    tools: Annotated[list[AnyTool[Tool]], Field(max_length=MAX_TOOLS)] | None = None
    chat_template_kwargs: TemplateOptions | None = None
    add_generation_prompt: bool | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def check_one(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise field_error("prompt", "give prompt or messages, one of them")
        if self.messages is not None and self.add_special_tokens:
            raise field_error("add_special_tokens", "a chat template writes them itself")
        for name in ("tools", "chat_template_kwargs", "add_generation_prompt"):
            if self.messages is None and getattr(self, name):
                raise field_error(name, "only together with messages")
        return self


class DetokenizeRequest(Strict):
    model: str | None = None
    tokens: Annotated[list[TokenId], Field(max_length=MAX_TOKENS)]


def add_routes(routes: APIRouter, service: Service) -> None:
    @routes.post("/tokenize")
    async def tokenize(body: TokenizeRequest) -> dict[str, Any]:
        service.check_fields(body, body.model)

        def ids() -> list[int]:
            if body.messages is not None:
                tools = [tool.function.for_template() for tool in body.tools or () if isinstance(tool, Tool)]
                template = service.tokenizer.chat.text_for(tools=bool(tools)) or ""
                options = template_options(template, body.chat_template_kwargs or {}, None)
                options["generation_prompt"] = body.add_generation_prompt is not False
                messages = [message.for_template() for message in body.messages]
                text = service.render_chat(messages, tools=tools, **options)
                return service.encode(text, "messages", add_special_tokens=False)
            special = True if body.add_special_tokens is None else body.add_special_tokens
            return service.encode(body.prompt or "", "prompt", add_special_tokens=special) if body.prompt else []

        tokens = await asyncio.to_thread(ids)
        response = {"count": len(tokens), "max_model_len": service.context, "tokens": tokens}
        return response | ({"token_strs": [service.names(token) for token in tokens]} if body.return_token_strs else {})

    @routes.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> dict[str, str]:
        service.check_fields(body, body.model)
        service.check_ids("tokens", body.tokens)
        return {"prompt": await asyncio.to_thread(service.tokenizer.decode, body.tokens, with_special=True)}

    @routes.get("/tokenizer_info")
    async def tokenizer_info() -> dict[str, Any]:
        service.runtime.check_open()
        tokenizer = service.tokenizer
        specials = {name: tokenizer.special_tokens.get(name) for name in ("bos_token", "eos_token", "pad_token")}
        return {
            **specials,
            "vocab_size": tokenizer.vocab_size,
            "eos_token_ids": list(service.end_tokens),
            "chat_template": tokenizer.chat_template,
            "max_model_len": service.context,
        }
