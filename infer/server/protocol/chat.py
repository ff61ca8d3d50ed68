"""Schema of chat requests: messages, and the fields that a chat adds to the common ones."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from infer.batch.params import MAX_INT
from infer.server.protocol.completions import Count, GenerationRequest
from infer.server.protocol.errors import field_error, shown
from infer.server.protocol.fields import Strict, Unless
from infer.server.protocol.tools import (
    MAX_CALLS,
    MAX_TOOLS,
    AllowedTools,
    AnyTool,
    NamedTool,
    Tool,
    ToolCall,
    ToolsChoice,
    ToolUse,
    tool_use_of,
)
from models.chat_template import text_part

MAX_MESSAGES = 2048
MAX_PARTS = 256  # per message

ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class Part(Strict):
    """A part of a message, of one of the `types`."""

    types: ClassVar[tuple[str, ...]]

    text: str
    refusal: str | None = Field(default=None, exclude=True)  # the text of a part of type refusal

    @model_validator(mode="before")
    @classmethod
    def check_type(cls, values: Any) -> Any:
        """Treat a refusal that a client sends back as ordinary text."""
        kind = values.get("type", "text") if isinstance(values, dict) else "text"
        if kind not in (*cls.types, "refusal"):
            raise field_error("type", f"{shown(kind)} is not read; this server reads text only")
        return values | {"type": "text", "text": values.get("refusal")} if kind == "refusal" else values


class TextPart(Part):
    accepted = frozenset({"cache_control", "prompt_cache_breakpoint", "annotations", "citations", "id"})
    types = ("text",)

    type: Literal["text"]


class Message(Strict):
    accepted = frozenset(
        {
            *("id", "status", "type", "index", "annotations", "metadata", "parsed", "phase"),
            *("cache_control", "prompt_cache_breakpoint", "provider_specific_fields"),
            *("thinking_blocks", "reasoning_details"),  # sent by gateways; the text is in `reasoning_content`
        }
    )
    refused: ClassVar[dict[str, Unless]] = {"audio": Unless(), "function_call": Unless(hint="say tool_calls")}

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], Field(max_length=MAX_PARTS)] | None = None
    refusal: str | None = None  # the assistant's text in place of `content`
    name: str | None = Field(default=None, max_length=256)
    reasoning_content: str | None = None
    reasoning: str | None = None  # vLLM's newer name of `reasoning_content`
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_CALLS)] | None = None
    tool_call_id: str | None = Field(default=None, max_length=256)

    @model_validator(mode="after")
    def check_role(self) -> Message:
        for name, role in (("tool_calls", "assistant"), ("reasoning_content", "assistant"), ("tool_call_id", "tool")):
            if getattr(self, name) and self.role != role:
                raise field_error(name, f"only in a message of role {role}")
        if self.role == "tool" and not self.tool_call_id:
            raise field_error("tool_call_id", "missing; it says which call this answers", "missing_required_parameter")
        if self.role != "assistant" and "content" not in self.model_fields_set:
            raise field_error("content", "missing; this field is required", "missing_required_parameter")
        return self

    @model_validator(mode="after")
    def merge_synonyms(self) -> Message:
        """Move `refusal` to `content`, `reasoning` to `reasoning_content`. Only a turn with calls may lack content."""
        if self.reasoning_content is None:
            self.reasoning_content = self.reasoning
        if not self.content:
            self.content = self.refusal or (None if self.tool_calls else "")
        self.reasoning = self.refusal = None
        return self

    def for_template(self) -> dict[str, Any]:
        """Return the message as the chat template receives it (models/chat.py)."""
        return self.model_dump(exclude_none=True)


def text_parts(content: str | Iterable[Any] | None) -> list[dict[str, str]]:
    """Return a text, or objects with a `text`, as the content of a message for the chat template."""
    if isinstance(content, str):
        return [text_part(content)]
    return [text_part(part.text) for part in content or ()]


# Variables of a chat template. `infer/server/api/conversation.py` lists those that a client may set.
TemplateOptions = Annotated[
    dict[Annotated[str, Field(max_length=64)], bool | Annotated[str, Field(max_length=256)] | None],
    Field(max_length=16),
]


class ConversationRequest(Strict):
    """A request with messages and tools, which each API words in its own way."""

    chat_template_kwargs: TemplateOptions | None = None

    @property
    def conversation(self) -> list[dict[str, Any]]:
        """The messages as the chat template receives them (models/chat.py)."""
        raise NotImplementedError

    @property
    def tool_use(self) -> ToolUse:
        raise NotImplementedError

    @property
    def template_options(self) -> dict[str, Any]:
        """Variables for the chat template."""
        return self.chat_template_kwargs or {}

    @model_validator(mode="after")
    def check_tools(self) -> Self:
        _ = self.tool_use
        return self


class ChatRequest(ConversationRequest, GenerationRequest):
    # `prediction` is a hint for speed only, and nothing here controls how verbose an answer is.
    accepted = GenerationRequest.accepted | {"prediction", "verbosity"}
    refused = GenerationRequest.refused | {
        **dict.fromkeys(("audio", "documents", "chat_template", "functions"), Unless()),
        "function_call": Unless(("none", "auto"), "say tools and tool_choice"),
        "modalities": Unless((["text"],)),
        "best_of": Unless((1,), "say n"),
        "suffix": Unless(),
        "echo": Unless((False,)),
        "add_special_tokens": Unless((False,)),
        "add_generation_prompt": Unless((True,)),
        "continue_final_message": Unless((False,)),
        "max_output_tokens": Unless(hint="say max_completion_tokens"),
    }
    absent = GenerationRequest.absent | {"tool_choice": ("", {})}

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_tokens: int | None = Field(default=None, ge=1, le=MAX_INT)
    max_completion_tokens: int | None = Field(default=None, ge=1, le=MAX_INT)
    logprobs: bool | None = None
    top_logprobs: Count | None = None
    tools: Annotated[list[AnyTool[Tool]], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolsChoice[NamedTool, AllowedTools] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: ReasoningEffort | None = None  # for templates that read it
    include_reasoning: bool | None = None  # false: reasoning is left out of the response

    @model_validator(mode="after")
    def check_limits(self) -> ChatRequest:
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise field_error("max_tokens", "contradicts max_completion_tokens; give one of them")
        if self.top_logprobs and not self.logprobs:
            raise field_error("top_logprobs", "only together with logprobs: true")
        return self

    @property
    def conversation(self) -> list[dict[str, Any]]:
        return [message.for_template() for message in self.messages]

    @property
    def tool_use(self) -> ToolUse:
        functions = [tool.function for tool in self.tools or () if isinstance(tool, Tool)]
        choice = self.tool_choice
        choice = choice.allowed_tools if isinstance(choice, AllowedTools) else choice
        return tool_use_of(functions, choice, parallel=self.parallel_tool_calls)

    @property
    def effort(self) -> ReasoningEffort | None:
        return self.reasoning_effort

    @property
    def limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None
