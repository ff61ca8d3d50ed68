"""Schema of /v1/responses, as far as this server implements it: text and tools, nothing stored."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from infer.batch.grammar import Grammar
from infer.batch.params import MAX_INT
from infer.server.protocol.chat import MAX_MESSAGES, MAX_PARTS, ConversationRequest, Part, ReasoningEffort, text_parts
from infer.server.protocol.completions import Count, GenerationRequest
from infer.server.protocol.errors import field_error, shown
from infer.server.protocol.fields import Strict, Unless
from infer.server.protocol.structure import TextFormat
from infer.server.protocol.tools import (
    MAX_ARGUMENTS,
    MAX_TOOLS,
    AllowedFunctions,
    AnyTool,
    FunctionTool,
    OtherTool,
    ToolName,
    ToolsChoice,
    ToolUse,
    is_other_tool,
    tool_use_of,
    type_of,
)
from models.chat_template import text_part

MAX_METADATA = 16  # OpenAI's bounds
LOGPROBS = "message.output_text.logprobs"
# Values of `include` in OpenAI's API. All but the log-probabilities concern tools and formats not supported here.
Includable = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "message.input_image.image_url",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
]
NOTHING_STORED = "nothing is stored here; send the items themselves (clients do with store: false)"


class InputPart(Part):
    """A text part. `annotations` and `logprobs` are in parts that this server wrote and the client sends back."""

    accepted = frozenset({"annotations", "logprobs", "cache_control", "prompt_cache_breakpoint", "id"})
    types = ("input_text", "output_text", "text", "reasoning_text", "summary_text")

    type: Literal["input_text", "output_text", "text", "reasoning_text", "summary_text"]


class ResponsesTool(FunctionTool):
    type: Literal["function"]
    namespace: str | None = Field(default=None, exclude=True)  # that its name begins with


class NamespaceTool(Strict):
    """Functions under one name; the namespace `functions` is that of functions without one."""

    accepted = frozenset({"description"})

    type: Literal["namespace"]
    name: ToolName
    tools: Annotated[list[AnyTool[ResponsesTool]], Field(max_length=MAX_TOOLS)]


ListedTool = Annotated[
    Annotated[ResponsesTool, Tag("<function>")]
    | Annotated[NamespaceTool, Tag("<namespace>")]
    | Annotated[OtherTool, Tag("<other>")],
    Discriminator(
        lambda tool: (
            "<namespace>" if type_of(tool) == "namespace" else "<other>" if is_other_tool(tool) else "<function>"
        )
    ),
]
ToolList = Annotated[list[ListedTool], Field(max_length=MAX_TOOLS)]


def in_namespace(name: str | None, namespace: str | None) -> str:
    """Return the name of a function for the model."""
    return str(name) if namespace in (None, "", "functions") else f"{namespace}.{name}"


def functions_of(tools: Sequence[ResponsesTool | NamespaceTool | OtherTool]) -> list[ResponsesTool]:
    functions: list[ResponsesTool] = []
    for tool in tools:
        namespace = tool.name if isinstance(tool, NamespaceTool) else None
        for function in tool.tools if isinstance(tool, NamespaceTool) else [tool]:
            if isinstance(function, ResponsesTool):
                fields = {"name": in_namespace(function.name, namespace), "namespace": namespace}
                functions.append(function.model_copy(update=fields))
    return functions


PartList = Annotated[list[InputPart], Field(max_length=MAX_PARTS)]
Content = str | PartList
NEEDED: dict[str, tuple[str, ...]] = {
    "message": ("role", "content"),
    "reasoning": (),
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
    "additional_tools": ("tools",),
}


class InputItem(Strict):
    """A message, reasoning before one, a tool call of the model, a tool result, or more tools.

    Encrypted reasoning comes from another server and cannot be read here.
    """

    accepted = frozenset(
        {
            *("id", "status", "phase", "caller", "created_by", "async", "metadata", "cache_control"),
            "encrypted_content",
        }
    )

    type: Literal["message", "reasoning", "function_call", "function_call_output", "additional_tools"] = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: Content | None = None
    call_id: str | None = Field(default=None, max_length=256)
    name: ToolName | None = None
    namespace: str | None = Field(default=None, max_length=128)  # of the name
    arguments: str | None = Field(default=None, max_length=MAX_ARGUMENTS)
    output: Content | None = None
    summary: PartList | None = None  # of reasoning; ignored, since templates take the full reasoning
    tools: ToolList | None = None

    @model_validator(mode="before")
    @classmethod
    def check_fields(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        kind = values.get("type", "message")
        if kind == "item_reference":
            raise field_error("type", f"item_reference: {NOTHING_STORED}", "unsupported_parameter")
        if not isinstance(kind, str) or kind not in NEEDED:
            raise field_error("type", f"{shown(kind)} is not implemented by this server; it reads {', '.join(NEEDED)}")
        for name in NEEDED[kind]:
            if name not in values or (values[name] is None and name != "content"):
                raise field_error(name, f"missing; an item of type {kind} needs it", "missing_required_parameter")
        return values


def messages_of(items: Sequence[InputItem]) -> list[dict[str, Any]]:
    """Convert items to messages for the chat template. Reasoning, text and calls of one response form one turn."""
    turns: list[dict[str, Any]] = []
    turn: dict[str, Any] = {}  # the assistant's turn under construction
    previous = ""  # the type of the previous item

    def end() -> None:
        if turn:
            turns.append({"role": "assistant", "content": "", **turn})
            turn.clear()

    for item in items:
        if item.type == "reasoning":
            end()
            if text := "".join(part["text"] for part in text_parts(item.content)):
                turn["reasoning_content"] = text
        elif item.type == "function_call":
            function = {"name": in_namespace(item.name, item.namespace), "arguments": item.arguments}
            turn.setdefault("tool_calls", []).append({"id": item.call_id, "type": "function", "function": function})
        elif item.type == "message" and item.role == "assistant":
            if previous == "message":
                end()
            written, more = turn.get("content", []), text_parts(item.content) or [text_part("")]
            if written:  # text before a call; a chat has the text in one part
                more[0] = text_part(written.pop()["text"] + more[0]["text"])
            turn["content"] = [*written, *more]
        elif item.type != "additional_tools":
            end()
            if item.type == "message":
                turns.append({"role": item.role, "content": text_parts(item.content)})
            else:
                turns.append({"role": "tool", "tool_call_id": item.call_id, "content": text_parts(item.output)})
        previous = item.type
    end()
    return turns


class ResponsesNamedTool(Strict):
    type: Literal["function"]
    name: ToolName


class TextOptions(Strict):
    accepted = frozenset({"verbosity"})

    format: TextFormat | None = None


class ResponsesAllowedTools(AllowedFunctions):
    type: Literal["allowed_tools"]
    tools: Annotated[list[AnyTool[ResponsesNamedTool]], Field(max_length=MAX_TOOLS)]


class Reasoning(Strict):
    accepted = frozenset({"summary", "generate_summary", "context", "mode"})

    effort: ReasoningEffort | None = None  # for templates that read it


class ResponsesRequest(ConversationRequest, GenerationRequest):
    """A request to /v1/responses.

    Inputs that do not fit the context are refused, even with `truncation: auto`, which shortens them at OpenAI.
    `max_tool_calls` limits built-in tools, of which there are none.
    """

    accepted = (GenerationRequest.accepted - {"metadata"}) | {
        *("truncation", "max_tool_calls", "access_programs", "background_options", "image", "enable_response_messages"),
    }
    refused = GenerationRequest.refused | {
        **dict.fromkeys(("previous_response_id", "conversation"), Unless(hint=NOTHING_STORED)),
        **dict.fromkeys(("previous_response", "previous_input_messages"), Unless(hint="send the items as input")),
        "prompt": Unless(hint="there are no stored prompts here; send instructions and input"),
        "background": Unless((False,), "nothing is stored here; wait for the response, or stream it"),
        "context_management": Unless(),
        # fields of other endpoints
        **dict.fromkeys(("max_tokens", "max_completion_tokens"), Unless(hint="say max_output_tokens")),
        **dict.fromkeys(("logprobs", "prompt_logprobs"), Unless(hint=f"say include: [{LOGPROBS}]")),
        "response_format": Unless(hint="say text.format"),
        "messages": Unless(hint="say input"),
        "reasoning_effort": Unless(hint="say reasoning.effort"),
        "n": Unless((1,)),
    }
    absent = GenerationRequest.absent | {"tool_choice": ("", {})}
    prompt_field = "input"

    input: Annotated[list[InputItem], Field(max_length=MAX_MESSAGES)]  # a string is one user message
    instructions: str | None = None
    max_output_tokens: int | None = Field(default=None, ge=1, le=MAX_INT)
    top_logprobs: Count | None = None
    include: Annotated[list[Includable], Field(max_length=16)] | None = None
    reasoning: Reasoning | None = None
    text: TextOptions | None = None
    tools: ToolList | None = None
    tool_choice: ToolsChoice[ResponsesNamedTool, ResponsesAllowedTools] | None = None
    parallel_tool_calls: bool | None = None
    metadata: Annotated[dict[str, Annotated[str, Field(max_length=512)]], Field(max_length=MAX_METADATA)] | None = None

    @model_validator(mode="before")
    @classmethod
    def check_input(cls, values: Any) -> Any:
        if not isinstance(values, dict) or "input" not in values or isinstance(values["input"], list):
            return values
        if not isinstance(values["input"], str):
            raise field_error("input", f"must be a string or a list of items, not {shown(values['input'])}")
        return values | {"input": [{"role": "user", "content": values["input"]}]}

    @property
    def effort(self) -> ReasoningEffort | None:
        return None if self.reasoning is None else self.reasoning.effort

    @property
    def limit(self) -> int | None:
        return self.max_output_tokens

    @property
    def conversation(self) -> list[dict[str, Any]]:
        system = [{"role": "system", "content": self.instructions}] if self.instructions else []
        return [*system, *(messages_of(self.input) or [{"role": "user", "content": ""}])]

    @property
    def functions(self) -> list[ResponsesTool]:
        """The functions of `tools` and of items of the input, which replace those of the same name."""
        added = {function.name: function for item in self.input for function in functions_of(item.tools or ())}
        return [*(tool for tool in functions_of(self.tools or ()) if tool.name not in added), *added.values()]

    @property
    def tool_use(self) -> ToolUse:
        return tool_use_of(self.functions, self.tool_choice, parallel=self.parallel_tool_calls)

    @property
    def structure(self) -> tuple[str, Grammar] | None:
        if self.text is not None and self.text.format is not None and (grammar := self.text.format.grammar) is not None:
            return "text.format", grammar
        return super().structure

    @property
    def num_logprobs(self) -> int | None:
        if LOGPROBS in (self.include or ()):
            return self.top_logprobs or 0
        return self.top_logprobs or None
