"""The wire of chats: messages, and what a chat adds to the common fields."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from infer.server.errors import field_error
from infer.server.fields import Strict, drop_nothing
from infer.server.protocol import Count, GenerationRequest
from infer.server.tool_protocol import MAX_CALLS, ToolCall, ToolFields
from models.chat import content_text, normalise_arguments

MAX_MESSAGES = 2048
MAX_PARTS = 256  # of one message

MESSAGE_NOTHING: dict[str, tuple[Any, ...]] = {
    "name": (),
    "refusal": (),
    "audio": (),
    "annotations": ([],),
    "function_call": (),
}


class TextPart(Strict):
    type: Literal["text"]
    text: str


class Message(Strict):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], Field(min_length=1, max_length=MAX_PARTS)] | None = None
    reasoning_content: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_CALLS)] | None = None
    tool_call_id: str | None = Field(default=None, max_length=256)

    @model_validator(mode="before")
    @classmethod
    def refuse(cls, values: Any) -> Any:
        if isinstance(values, dict):
            calls = values.get("role") == "assistant" and values.get("tool_calls")
            if values.get("content") is not None or not calls:
                check_content(values.get("content"))
        return drop_nothing(values, set(cls.model_fields), MESSAGE_NOTHING)

    @model_validator(mode="after")
    def check_role(self) -> Message:
        for name, role in (("tool_calls", "assistant"), ("reasoning_content", "assistant"), ("tool_call_id", "tool")):
            if getattr(self, name) and self.role != role:
                raise field_error(name, f"only in a message of role {role}")
        if self.role == "tool" and not self.tool_call_id:
            raise field_error("tool_call_id", "missing; it says which call this answers")
        return self

    @property
    def text(self) -> str:
        return content_text(self.model_dump(include={"content"}))

    def for_template(self) -> dict[str, Any]:
        """What models/chat.py renders. Raises ValueError for calls whose arguments are no object."""
        for call in self.tool_calls or ():
            check_arguments(call)
        return self.model_dump(exclude_none=True)


def check_arguments(call: ToolCall) -> None:
    if not isinstance(normalise_arguments(call.function.arguments), dict):
        raise ValueError(f"tool_calls: the arguments of {call.function.name} must be a JSON object, as a string")


def check_content(content: Any) -> None:
    """Before pydantic tries the two forms of a content and reports both failures."""
    if isinstance(content, str):
        return
    if not isinstance(content, list) or not content:
        raise field_error("content", "must be a string or a list of text parts")
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text":
            raise field_error(
                "content", 'every part must be {"type": "text", "text": ...}; this server reads text only'
            )


class TemplateOptions(Strict):
    """Of a chat template's many variables, those that a client may set."""

    enable_thinking: bool | None = None
    thinking: bool | None = None


class ChatRequest(ToolFields, GenerationRequest):
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool | None = None
    top_logprobs: Count | None = None
    chat_template_kwargs: TemplateOptions | None = None
    include_reasoning: bool | None = None  # false: a reasoning span is left out of the answer

    @model_validator(mode="after")
    def check_limits(self) -> ChatRequest:
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise field_error("max_tokens", "contradicts max_completion_tokens; give one of them")
        if self.top_logprobs is not None and not self.logprobs:
            raise field_error("top_logprobs", "only together with logprobs: true")
        if self.must_call and super().structure is not None:
            raise field_error("tool_choice", "the output cannot be a call and of another form as well")
        return self

    @property
    def limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def asked_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None
