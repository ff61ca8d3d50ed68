"""What chats and responses share: a conversation on its way into the template, and the parts of what comes back."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import Request

from infer.grammar import Grammar
from infer.server.chat_protocol import Message
from infer.server.errors import ApiError
from infer.server.parsing import THINK, ChatParser
from infer.server.protocol import GenerationRequest
from infer.server.service import Service
from infer.server.session import Prompt, Session
from infer.server.tool_protocol import FunctionTool, ToolFields

# Variables that published chat templates read and that a client may set. The others are the server's.
TEMPLATE_OPTIONS = (
    *("enable_thinking", "thinking", "reasoning_effort", "preserve_thinking", "clear_thinking"),
    *("date_string", "model_identity"),
)


def template_options(template: str, options: Mapping[str, Any], effort: str | None) -> dict[str, Any]:
    """Of what a request says to the template, what the template reads: `chat_template_kwargs`, and the effort of
    reasoning under the names that templates have for it. Raises ApiError for a variable that is the server's.
    """
    wanted = {name: value for name, value in options.items() if value is not None}
    if effort is not None:
        thinks = effort != "none"
        wanted = {"reasoning_effort": effort, "enable_thinking": thinks, "thinking": thinks} | wanted
    mentioned = set(re.findall(r"[A-Za-z_]\w*", template))
    wanted = {name: value for name, value in wanted.items() if name in mentioned}
    for name in wanted:
        if name not in TEMPLATE_OPTIONS:
            param = f"chat_template_kwargs.{name}"
            message = f"{param}: not for a client to set; these are: {', '.join(TEMPLATE_OPTIONS)}"
            raise ApiError(400, message, param=param, code="unsupported_parameter")
    return wanted


class Conversation:
    """`tools`: those that may be called; `structure`: the grammar that the answer is bound to, if any."""

    def __init__(
        self,
        service: Service,
        messages: Sequence[Message],
        tools: Sequence[FunctionTool],
        structure: tuple[str, Grammar] | None,
        options: Mapping[str, Any],
    ) -> None:
        self._service, self._messages, self._tools = service, messages, tools
        self._structure, self._options = structure, options
        self._begun_thinking = False  # by the template, in the prompt

    @classmethod
    def of(
        cls,
        service: Service,
        messages: Sequence[Message],
        fields: ToolFields,
        structure: tuple[str, Grammar] | None,
        options: Mapping[str, Any] | None,
        effort: str | None,
    ) -> Conversation:
        """`effort`: how much the model should reason, for templates that read it.

        Raises ApiError where tools are asked for and this model knows none.
        """
        tools = fields.tools_in_use
        if tools and service.tool_style is None:
            message = "tools: this model's chat template has no tools (or server.tool_parser=none)"
            raise ApiError(400, message, param="tools", code="unsupported_parameter")
        if tools and fields.must_call:
            style = service.tool_style
            assert style is not None
            parallel, begin_id = fields.parallel_tool_calls is not False, service.special_id(style.begin)
            structure = "tools", style.grammar(tools, parallel=parallel, begin_id=begin_id)
        variables = template_options(service.tokenizer.chat_template or "", options or {}, effort)
        return cls(service, messages, tools, structure, variables)

    async def start(self, request: Request, body: GenerationRequest, *, param: str, max_tokens: int | None) -> Session:
        style = self._service.tool_style
        return await self._service.start(
            request,
            body,
            self._encode,
            [self._messages],
            param=param,
            max_tokens=max_tokens,
            default_max_tokens=None,
            structure=self._structure,
            with_special=bool(self._tools) and style is not None and self._service.special_id(style.begin) is not None,
        )

    @property
    def thinks(self) -> bool:
        """Whether this model's answers may begin with a reasoning span."""
        return self._service.thinks

    def parser(self) -> ChatParser:
        """For one answer. An answer of a given form has no reasoning span."""
        thinking = self.thinks and self._structure is None
        names = [tool.name for tool in self._tools]
        return ChatParser(self._service.tool_style, names, thinking=thinking, inside=self._begun_thinking)

    def new_call_id(self) -> str:
        assert self._service.tool_style is not None
        return self._service.tool_style.new_id()

    def _encode(self, messages: Sequence[Message]) -> Prompt:
        tools = [{"type": "function", "function": tool.model_dump(exclude_none=True)} for tool in self._tools]
        text = self._service.render_chat(messages, tools or None, self._options)
        self._begun_thinking = text.rstrip().endswith(THINK)
        return Prompt(self._service.encode(text, "messages", add_special_tokens=False))  # the template writes them
