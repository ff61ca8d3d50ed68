"""Shared by chats, messages and responses: rendering a conversation for the model, and parsing its output."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from fastapi import Request
from fastapi.responses import Response

from infer.batch.grammar import Grammar
from infer.server.api.rendering import Answer, respond
from infer.server.parsing.call_grammar import call_grammar
from infer.server.parsing.harmony import CHANNEL, FINAL, HarmonyParser
from infer.server.parsing.schema_check import fits
from infer.server.parsing.stream import END_THINK, THINK, ChatParser
from infer.server.parsing.tool_styles import MAX_FORCED_CALLS, Call
from infer.server.protocol.chat import ChatRequest
from infer.server.protocol.completions import GenerationRequest
from infer.server.protocol.errors import invalid_field
from infer.server.protocol.messages import CountTokensRequest, MessagesRequest
from infer.server.protocol.responses import ResponsesRequest
from infer.server.protocol.structure import check_depth
from infer.server.protocol.tools import NO_PARAMETERS
from infer.server.service import Service
from infer.server.session import Prompt, Session
from models.json_text import read

# Variables of published chat templates that a client may set. All others are reserved for the server.
TEMPLATE_OPTIONS = (
    *("enable_thinking", "thinking", "reasoning_effort", "preserve_thinking", "clear_thinking"),
    *("date_string", "model_identity"),
)


def template_options(template: str, options: Mapping[str, Any], effort: str | None) -> dict[str, Any]:
    """Return the template variables of a request that the template reads.

    They come from `chat_template_kwargs`, and from the reasoning effort under the names that templates use for it.
    Raises ApiError for a variable that a client may not set.
    """
    variables = {name: value for name, value in options.items() if value is not None}
    if effort is not None:
        thinks = effort != "none"
        variables = {"reasoning_effort": effort, "enable_thinking": thinks, "thinking": thinks} | variables
    mentioned = set(re.findall(r"[A-Za-z_]\w*", template))
    variables = {name: value for name, value in variables.items() if name in mentioned}
    for name in variables:
        if name not in TEMPLATE_OPTIONS:
            why = f"not for a client to set; these are: {', '.join(TEMPLATE_OPTIONS)}"
            raise invalid_field(f"chat_template_kwargs.{name}", why, "unsupported_parameter")
    return variables


class Conversation:
    """The messages, tools and output constraint of one request.

    Raises ApiError if the request has tools and this model's template supports none.
    """

    def __init__(self, service: Service, body: ChatRequest | ResponsesRequest | CountTokensRequest) -> None:
        tool_use = body.tool_use
        structure = body.structure if isinstance(body, GenerationRequest) else body.form
        tools, style = tool_use.allowed, service.tool_style
        if tools and style is None:
            why = f"calls of this template are not read: {service.unread}; server.tool_parser= names their style"
            raise invalid_field("tools", why, "unsupported_parameter")
        for tool in tools:
            check_depth(tool.parameters, f"tools: the parameters of {tool.name}", "tools")
        if tool_use.must_call and structure is not None:
            raise invalid_field("tool_choice", "the output cannot be a call and of another form as well")
        if tool_use.must_call and style is not None:
            most = tool_use.max_calls or MAX_FORCED_CALLS
            try:
                structure = "tools", call_grammar(style, tools, most=most, tokens=service.added_tokens)
            except ValueError as error:
                raise invalid_field("tools", str(error), "invalid_grammar") from error
        template = service.tokenizer.chat.text_for(tools=bool(tools)) or ""
        self._options = template_options(template, body.template_options, body.effort)
        self._service, self._messages, self._tools, self._structure = service, body.conversation, tools, structure
        self._schemas = {t.name: NO_PARAMETERS if t.parameters is None else t.parameters for t in tools}
        self._forced, self._most_calls = tool_use.must_call, tool_use.max_calls
        self._bound_to_json = structure is not None and structure[1].kind in ("json_object", "json_schema")
        self._begun_thinking = False  # whether the rendered prompt ends with an open reasoning span
        self.names = service.names
        self.thinks = service.reasoning_parser != "none"  # whether the output may begin with a reasoning span

    async def start(self, request: Request, body: ChatRequest | ResponsesRequest | MessagesRequest) -> Session:
        service = self._service
        marks = [] if service.tool_style is None or not self._tools else list(service.tool_style.marks)
        marks += [CHANNEL, THINK, END_THINK] if self.thinks else []
        special = any(service.special_id(mark) is not None for mark in marks)
        return await service.start(
            request, body, self._encode, [self._messages], structure=lambda: self._constrained, with_special=special
        )

    async def count_tokens(self, param: str) -> int:
        """Return the length of the prompt in tokens."""
        (prompt,) = await self._service.encode_all(self._encode, [self._messages], param)
        return len(prompt.ids)

    @property
    def _in_harmony(self) -> bool:
        service = self._service
        return "harmony" in (service.reasoning_parser, self._tools and service.tool_style and service.tool_style.name)

    @property
    def _constrained(self) -> tuple[str, Grammar] | None:
        """The output's grammar and its field; it applies behind a reasoning span that the prompt has begun."""
        if self._structure is None or not self._begun_thinking:
            return self._structure
        return self._structure[0], replace(self._structure[1], after=END_THINK)

    def parser(self) -> ChatParser:
        """Return a parser for one choice. Output bound to a grammar begins no reasoning span, and JSON no calls."""
        names = list(self._schemas)
        if self._in_harmony:
            return HarmonyParser(names, inside=self._bound, forced=self._forced, max_calls=self._most_calls)
        return ChatParser(
            None if self._bound_to_json else self._service.tool_style,
            names,
            thinking=self.thinks and (self._structure is None or self._begun_thinking),
            inside=self._begun_thinking,
            wrapped=self._service.wraps_answers,
            forced=self._forced,
            max_calls=self._most_calls,
            fits=None if self._forced else self._fits,
            schemas=self._schemas,
        )

    @property
    def _bound(self) -> bool:
        """Whether the output is of a given form that is no call."""
        return self._structure is not None and not self._forced

    def _fits(self, call: Call) -> bool:
        """Return whether the arguments of a call fit the parameters of its tool."""
        return fits(read(call.arguments), self._schemas[call.name])

    def new_call_id(self) -> str:
        assert self._service.tool_style is not None
        return self._service.tool_style.new_id()

    def _encode(self, messages: Sequence[Mapping[str, Any]]) -> Prompt:
        tools = [tool.for_template() for tool in self._tools]
        text = self._service.render_chat(messages, tools=tools, **self._options)
        self._begun_thinking = self.thinks and text.rstrip().endswith(THINK)
        text += FINAL if self._in_harmony and self._bound else ""
        return Prompt(self._service.encode(text, "messages", add_special_tokens=False))  # the template writes them


async def converse(
    service: Service,
    request: Request,
    body: ChatRequest | ResponsesRequest | MessagesRequest,
    answer: Callable[[Any, Session, Conversation], Answer],
) -> Response:
    """Return the response to a conversation; `answer` makes what its API takes, of the body and its session."""
    service.check(body)
    conversation = Conversation(service, body)
    session = await conversation.start(request, body)
    return await respond(request, session, answer(body, session, conversation), stream=body.stream)
