"""Schema of /v1/messages, Anthropic's Messages API, as far as this server implements it: text and tools."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import groupby
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from infer.batch.grammar import Grammar
from infer.batch.params import MAX_INT
from infer.server.protocol.chat import MAX_MESSAGES, MAX_PARTS, ConversationRequest, text_parts
from infer.server.protocol.completions import GenerationRequest, Stop
from infer.server.protocol.errors import field_error, shown
from infer.server.protocol.fields import Strict, Unless
from infer.server.protocol.structure import JsonObject
from infer.server.protocol.tools import (
    MAX_ARGUMENTS,
    MAX_TOOLS,
    TOOL_ACCEPTED,
    FunctionTool,
    OtherTool,
    ToolName,
    ToolUse,
    is_other_tool,
    type_of,
)

KEEP_ALL_THINKING = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
# Prefix caching is always on; the other fields identify, bill or route a request, which is never passed on.
ACCEPTED = frozenset(
    {
        *("cache_control", "metadata", "service_tier", "inference_geo", "speed", "diagnostics"),
        *("user_profile_id", "workspace_id", "billing_policy", "betas"),
        *("fallbacks", "fallback_credit_token"),
    }
)
REFUSED: dict[str, Unless] = {
    **dict.fromkeys(("container", "mcp_servers", "compaction"), Unless()),
    "thread": Unless(hint="nothing is stored here; send the whole conversation"),
    "context_management": Unless(
        ({"edits": []}, KEEP_ALL_THINKING),
        hint="the whole conversation is read, and nothing of it cleared; leave it out",
    ),
}
BLOCKS: dict[str, tuple[str, ...]] = {  # type -> required fields
    "text": ("text",),
    "thinking": ("thinking",),
    "redacted_thinking": (),
    "tool_use": ("id", "name", "input"),
    "tool_result": ("tool_use_id",),
    "tool_addition": ("tool",),
    "tool_removal": ("tool",),
}
ROLE_BLOCKS: dict[str, tuple[str, ...]] = {
    "user": ("text", "tool_result"),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
    "system": ("text", "tool_addition", "tool_removal"),
}
AVAILABLE = {"tool_addition": "The tool {} can be called now.", "tool_removal": "The tool {} can no longer be called."}
Identifier = Annotated[str, Field(min_length=1, max_length=256)]


def as_blocks(name: str, content: Any, allowed: Sequence[str]) -> Any:
    """Return the field `name` as a list of blocks; a string is one text block. Raises for a type not in `allowed`."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise field_error(name, f"must be a string or a list of blocks, not {shown(content)}")
    for index, block in enumerate(content):
        if not isinstance(block, dict):
            raise field_error(f"{name}[{index}]", f"must be a block, not {shown(block)}")
        if block.get("type") not in allowed:
            types = " or ".join(allowed)
            message = f"must be {types} here, not {shown(block.get('type'))}; this server reads text only"
            raise field_error(f"{name}[{index}].type", message)
    return content


class TextBlock(Strict):
    accepted = frozenset({"cache_control", "citations"})

    type: Literal["text"]
    text: str


class ToolReference(Strict):
    """In a tool result: a tool that the client has found, and has added to `tools`."""

    accepted = frozenset({"cache_control"})

    type: Literal["tool_reference"]
    tool_name: ToolName

    @property
    def text(self) -> str:
        return AVAILABLE["tool_addition"].format(self.tool_name)


ResultBlock = Annotated[
    Annotated[TextBlock, Tag("<text>")] | Annotated[ToolReference, Tag("<reference>")],
    Discriminator(lambda block: "<reference>" if type_of(block) == "tool_reference" else "<text>"),
]


class CustomTool(Strict):
    accepted = TOOL_ACCEPTED | {"eager_input_streaming"}
    refused: ClassVar[dict[str, Unless]] = {"input_examples": Unless()}

    type: Literal["custom"] | None = None
    name: ToolName
    description: str | None = None
    input_schema: JsonObject
    strict: bool | None = None  # no effect: arguments of a forced call always follow the schema

    @property
    def function(self) -> FunctionTool:
        """The tool as in a chat request."""
        fields = {"description": self.description, "parameters": self.input_schema, "strict": self.strict}
        return FunctionTool.model_construct(name=self.name, **fields)


# Other tools are run by Anthropic's servers, or by the client by a convention that the model must know.
AnyTool = Annotated[
    Annotated[CustomTool, Tag("<custom>")] | Annotated[OtherTool, Tag("<other>")],
    Discriminator(lambda tool: "<other>" if is_other_tool(tool, "custom") else "<custom>"),
]


class ChangedTool(Strict):
    """The tool that a block of a system turn adds or removes: the name of one, or a new one."""

    type: Literal["tool_reference", "tool_definition"]
    name: ToolName | None = None
    definition: CustomTool | None = None

    @model_validator(mode="after")
    def check_one(self) -> ChangedTool:
        if (self.name if self.type == "tool_reference" else self.definition) is None:
            name = "name" if self.type == "tool_reference" else "definition"
            raise field_error(name, f"missing; a {self.type} needs it", "missing_required_parameter")
        return self

    @property
    def tool_name(self) -> str:
        return self.definition.name if self.definition is not None else str(self.name)


class Block(Strict):
    """A content block of a turn: text, reasoning, a tool call of the model, a tool result, or a change of the tools.

    This server does not sign reasoning. `is_error` has no effect: the result's text says that a tool failed.
    """

    accepted = frozenset({"cache_control", "citations", "signature", "data", "is_error", "caller"})
    refused: ClassVar[dict[str, Unless]] = {"toolset_name": Unless()}

    type: Literal["text", "thinking", "redacted_thinking", "tool_use", "tool_result", "tool_addition", "tool_removal"]
    text: str | None = None
    thinking: str | None = None
    id: Identifier | None = None
    name: ToolName | None = None
    input: JsonObject | None = None
    tool_use_id: Identifier | None = None
    content: Annotated[list[ResultBlock], Field(max_length=MAX_PARTS)] | None = None  # of a tool result
    tool: ChangedTool | None = None

    @model_validator(mode="before")
    @classmethod
    def check_fields(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        for name in BLOCKS.get(str(values.get("type")), ()):
            if values.get(name) is None:
                raise field_error(
                    name, f"missing; a block of type {values['type']} needs it", "missing_required_parameter"
                )
        if values.get("content") is not None:
            values = values | {"content": as_blocks("content", values["content"], ("text", "tool_reference"))}
        return values

    @model_validator(mode="after")
    def check_input(self) -> Block:
        if self.input is not None and len(self.arguments) > MAX_ARGUMENTS:
            raise field_error("input", f"longer than {MAX_ARGUMENTS} characters")
        if self.tool is not None and self.type in AVAILABLE:
            self.text = AVAILABLE[self.type].format(self.tool.tool_name)
        return self

    @property
    def arguments(self) -> str:
        return json.dumps(self.input or {})


class OutputFormat(Strict):
    type: Literal["json_schema"]
    schema_: JsonObject = Field(alias="schema")


class Effort(Strict):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None


class OutputConfig(Effort):
    accepted = frozenset({"task_budget"})

    format: OutputFormat | None = None


class Turn(Strict):
    role: Literal["user", "assistant", "system"]
    content: Annotated[list[Block], Field(max_length=MAX_PARTS)]
    clear_at: Literal["next_user_message", "never"] | None = None  # of a system turn: when the model no longer sees it
    output_config: Effort | None = None  # of a system turn: from there on

    @model_validator(mode="before")
    @classmethod
    def check_blocks(cls, values: Any) -> Any:
        allowed = ROLE_BLOCKS.get(str(values.get("role"))) if isinstance(values, dict) else None
        return values if allowed is None else values | {"content": as_blocks("content", values.get("content"), allowed)}


class ToolChoice(Strict):
    type: Literal["auto", "any", "tool", "none"]
    name: ToolName | None = None
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def check_name(self) -> ToolChoice:
        if (self.type == "tool") != (self.name is not None):
            raise field_error("name", "goes with type: tool, and must be there with it")
        return self


class Thinking(Strict):
    """Reasoning options. `budget_tokens`, an upper bound, has no effect: only `max_tokens` limits the output."""

    accepted = frozenset({"block_binding"})

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = Field(default=None, ge=1, lt=2**31)
    display: Literal["summarized", "omitted", "updates"] | None = None


class CountTokensRequest(ConversationRequest):
    """The fields of a request that determine the prompt."""

    accepted: ClassVar[frozenset[str]] = ACCEPTED
    refused: ClassVar[dict[str, Unless]] = REFUSED

    model: str
    messages: Annotated[list[Turn], Field(min_length=1, max_length=MAX_MESSAGES)]
    system: Annotated[list[TextBlock], Field(max_length=MAX_PARTS)] | None = None
    tools: Annotated[list[AnyTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None  # the older name of output_config.format

    @model_validator(mode="before")
    @classmethod
    def check_system(cls, values: Any) -> Any:
        if not isinstance(values, dict) or values.get("system") is None:
            return values
        return values | {"system": as_blocks("system", values["system"], ("text",))}

    @model_validator(mode="after")
    def check_conversation(self) -> CountTokensRequest:
        if self.messages[-1].role == "assistant":
            raise field_error("messages", "the last turn must not be the assistant's; this server does not continue it")
        if self.output_format is not None and self.output_config is not None and self.output_config.format is not None:
            raise field_error("output_format", "not together with output_config.format")
        return self

    @property
    def conversation(self) -> list[dict[str, Any]]:
        system = [{"role": "system", "content": text_parts(self.system)}] if self.system else []
        last = max((index for index, turn in enumerate(self.messages) if turn.role == "user"), default=0)
        shown = [t for i, t in enumerate(self.messages) if t.clear_at != "next_user_message" or i > last]
        return system + [message for role, blocks in turns(shown) for message in messages_of(role, blocks)]

    @property
    def tool_use(self) -> ToolUse:
        changes = [(b.type, b.tool) for turn in self.messages for b in turn.content if b.tool and b.type in AVAILABLE]
        new = {tool.tool_name: tool.definition.function for _, tool in changes if tool.definition is not None}
        last = {tool.tool_name: kind for kind, tool in changes}
        declared = [tool.function for tool in self.tools or () if isinstance(tool, CustomTool)]
        functions = [*(function for function in declared if function.name not in new), *new.values()]
        functions = [function for function in functions if last.get(function.name) != "tool_removal"]
        choice = self.tool_choice or ToolChoice(type="auto")
        kind = {"any": "required", "tool": "auto"}.get(choice.type, choice.type)
        return ToolUse(functions, kind, choice.name, parallel=not choice.disable_parallel_tool_use)

    @property
    def template_options(self) -> dict[str, Any]:
        """Variables for the chat template. `adaptive` sets none, since templates leave it to the model by default."""
        options: dict[str, Any] = {}
        if self.thinking is not None and self.thinking.type != "adaptive":
            thinks = self.thinking.type == "enabled"
            options = {"enable_thinking": thinks, "thinking": thinks}
        return options | super().template_options

    @property
    def effort(self) -> str | None:
        configs = [*(turn.output_config for turn in reversed(self.messages)), self.output_config]
        return next((config.effort for config in configs if config is not None and config.effort is not None), None)

    @property
    def form(self) -> tuple[str, Grammar] | None:
        config = self.output_config
        for name, form in (("output_format", self.output_format), ("output_config.format", config and config.format)):
            if form is not None:
                return name, Grammar("json_schema", json.dumps(form.schema_))
        return None


class MessagesRequest(CountTokensRequest, GenerationRequest):
    accepted = GenerationRequest.accepted | ACCEPTED
    refused = (
        GenerationRequest.refused
        | REFUSED
        | {
            # fields of other endpoints
            **dict.fromkeys(("logprobs", "top_logprobs", "prompt_logprobs"), Unless()),
            **dict.fromkeys(("max_completion_tokens", "max_output_tokens"), Unless(hint="say max_tokens")),
            "stop": Unless(hint="say stop_sequences"),
            "response_format": Unless(hint="say output_config.format"),
            "reasoning_effort": Unless(hint="say output_config.effort"),
            "n": Unless((1,)),
        }
    )

    max_tokens: int = Field(ge=1, le=MAX_INT)  # the context may end the output earlier
    stop: Stop | None = Field(default=None, alias="stop_sequences")

    @property
    def limit(self) -> None:
        return None

    @property
    def soft_limit(self) -> int:
        return self.max_tokens

    @property
    def structure(self) -> tuple[str, Grammar] | None:
        return self.form or super().structure


def turns(messages: Sequence[Turn]) -> list[tuple[str, list[Block]]]:
    """Return roles with their blocks. Consecutive turns of one role are merged."""
    grouped = groupby(messages, key=lambda turn: turn.role)
    return [(role, [block for turn in group for block in turn.content]) for role, group in grouped]


def messages_of(role: str, blocks: Sequence[Block]) -> list[dict[str, Any]]:
    """Convert a turn to messages for the chat template. Each tool result becomes a separate message."""
    if role == "assistant":
        calls = [
            {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": block.arguments}}
            for block in blocks
            if block.type == "tool_use"
        ]
        content = text_parts([block for block in blocks if block.type == "text"])
        thinking = "".join(block.thinking or "" for block in blocks) or None
        return [{"role": role, "content": content, "reasoning_content": thinking, "tool_calls": calls}]
    messages: list[dict[str, Any]] = []
    for is_result, group in groupby(blocks, key=lambda block: block.type == "tool_result"):
        if is_result:
            messages += [
                {"role": "tool", "tool_call_id": block.tool_use_id, "content": text_parts(block.content)}
                for block in group
            ]
        else:
            messages.append({"role": role, "content": text_parts(group)})
    return messages or [{"role": role, "content": ""}]
