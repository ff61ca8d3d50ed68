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
from infer.server.structure import check_depth
from infer.server.tool_protocol import FunctionTool, ToolFields
from infer.server.tool_styles import MAX_FORCED_CALLS


class Conversation:
    """`tools`: those that may be called; `structure`: the grammar that the answer is bound to, if any.

    `forced`: that grammar is of calls. `most_calls`: bounds them in one answer.
    """

    def __init__(
        self,
        service: Service,
        messages: Sequence[Message],
        tools: Sequence[FunctionTool],
        structure: tuple[str, Grammar] | None,
        options: Mapping[str, Any],
        *,
        forced: bool = False,
        most_calls: int | None = None,
    ) -> None:
        self._service, self._messages, self._tools = service, messages, tools
        self._structure, self._options = structure, options
        self._forced, self._most_calls = forced, most_calls
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
        for tool in tools:
            check_depth(
                tool.parameters, f"tools: the parameters of {tool.name}", "tools", service.config.max_schema_depth
            )
        if tools and fields.must_call:
            style = service.tool_style
            assert style is not None
            most = fields.most_calls or MAX_FORCED_CALLS
            try:
                structure = "tools", style.grammar(tools, most=most, special_id=service.special_id)
            except ValueError as error:
                raise ApiError(400, f"tools: {error}", param="tools", code="invalid_grammar") from error
        given = {} if options is None else options.model_dump(exclude_none=True)
        return cls(service, messages, tools, structure, given, forced=fields.must_call, most_calls=fields.most_calls)

    async def start(self, request: Request, body: GenerationRequest, *, param: str, max_tokens: int | None) -> Session:
        style = self._service.tool_style
        marks = () if style is None or not self._tools else style.marks
        return await self._service.start(
            request,
            body,
            self._encode,
            [self._messages],
            param=param,
            max_tokens=max_tokens,
            default_max_tokens=None,
            structure=self._structure,
            with_special=any(self._service.special_id(mark) is not None for mark in marks),
        )

    @property
    def thinks(self) -> bool:
        """Whether this model's answers may begin with a reasoning span."""
        return self._service.thinks

    def parser(self) -> ChatParser:
        """For one answer. An answer of a given form has no reasoning span."""
        thinking = self.thinks and self._structure is None
        names = [tool.name for tool in self._tools]
        return ChatParser(
            self._service.tool_style,
            names,
            thinking=thinking,
            inside=self._begun_thinking,
            forced=self._forced,
            most_calls=self._most_calls,
        )

    def new_call_id(self) -> str:
        assert self._service.tool_style is not None
        return self._service.tool_style.new_id()

    def _encode(self, messages: Sequence[Message]) -> Prompt:
        tools = [{"type": "function", "function": tool.model_dump(exclude_none=True)} for tool in self._tools]
        text = self._service.render_chat(messages, tools or None, self._options)
        self._begun_thinking = text.rstrip().endswith(THINK)
        return Prompt(self._service.encode(text, "messages", add_special_tokens=False))  # the template writes them
