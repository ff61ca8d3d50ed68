"""The wire of chats: messages, and what a chat adds to the common fields."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from infer.server.errors import field_error
from infer.server.fields import Strict, drop_nothing
from infer.server.protocol import Count, GenerationRequest

MAX_MESSAGES = 2048
MAX_PARTS = 256  # of one message

MESSAGE_NOTHING: dict[str, tuple[Any, ...]] = {
    "name": (),
    "refusal": (),
    "audio": (),
    "annotations": ([],),
    "function_call": (),
    "tool_calls": ([],),
    "tool_call_id": (),
    "reasoning_content": (),
}


class TextPart(Strict):
    type: Literal["text"]
    text: str


class Message(Strict):
    role: Literal["system", "user", "assistant"]
    content: str | Annotated[list[TextPart], Field(min_length=1, max_length=MAX_PARTS)]

    @model_validator(mode="before")
    @classmethod
    def refuse(cls, values: Any) -> Any:
        if isinstance(values, dict):
            check_content(values.get("content"))
        return drop_nothing(values, set(cls.model_fields), MESSAGE_NOTHING)

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "\n".join(part.text for part in self.content)


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


class ChatRequest(GenerationRequest):
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: Count | None = None

    @model_validator(mode="after")
    def check_limits(self) -> ChatRequest:
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise field_error("max_tokens", "contradicts max_completion_tokens; give one of them")
        if self.top_logprobs is not None and not self.logprobs:
            raise field_error("top_logprobs", "only together with logprobs: true")
        return self

    @property
    def limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def asked_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None
