"""What chats and responses share: a conversation on its way into the template, and the parts of what comes back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import Request

from infer.grammar import Grammar
from infer.server.chat_protocol import Message, TemplateOptions
from infer.server.errors import ApiError
from infer.server.parsing import THINK, ChatParser
from infer.server.protocol import GenerationRequest
from infer.server.service import Service
from infer.server.session import Prompt, Session
from infer.server.tool_protocol import FunctionTool, ToolFields


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
        options: TemplateOptions | None,
    ) -> Conversation:
        """Raises ApiError where tools are asked for and this model knows none."""
        tools = fields.tools_in_use
        if tools and service.tool_style is None:
            message = "tools: this model's chat template has no tools (or server.tool_parser=none)"
            raise ApiError(400, message, param="tools", code="unsupported_parameter")
        if tools and fields.must_call:
            style = service.tool_style
            assert style is not None
            parallel, begin_id = fields.parallel_tool_calls is not False, service.special_id(style.begin)
            structure = "tools", style.grammar(tools, parallel=parallel, begin_id=begin_id)
        given = {} if options is None else options.model_dump(exclude_none=True)
        return cls(service, messages, tools, structure, given)

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
        text = self._service.render_chat(messages, [tool.for_template() for tool in self._tools], self._options)
        self._begun_thinking = text.rstrip().endswith(THINK)
        return Prompt(self._service.encode(text, "messages", add_special_tokens=False))  # the template writes them
