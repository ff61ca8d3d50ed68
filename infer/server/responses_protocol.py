"""The wire of /v1/responses, as far as this server implements it: text and tools, nothing stored."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, model_validator

from infer.grammar import Grammar
from infer.server.chat_protocol import MAX_MESSAGES, MAX_PARTS, Message, ReasoningEffort, TemplateOptions
from infer.server.errors import field_error, shown
from infer.server.fields import Strict, Unless
from infer.server.protocol import Count, GenerationRequest
from infer.server.structure import JsonSchemaFormat, ResponseFormat
from infer.server.tool_protocol import (
    MAX_ARGUMENTS,
    MAX_TOOLS,
    AnyTool,
    CalledFunction,
    FunctionTool,
    NamedFunction,
    NamedTool,
    Tool,
    ToolCall,
    ToolFields,
    ToolName,
)

MAX_METADATA = 16  # OpenAI's bounds
TEXT_PARTS = ("input_text", "output_text", "text", "refusal")
LOGPROBS = "message.output_text.logprobs"
# What OpenAI's API can add to a response. All but the log-probabilities are of tools and formats that are not here.
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


class InputPart(Strict):
    """`annotations` and `logprobs` come with parts that this server wrote itself, and are sent back."""

    accepted = frozenset({"annotations", "logprobs", "cache_control", "prompt_cache_breakpoint", "id"})

    type: Literal["input_text", "output_text", "text"]
    text: str
    refusal: str | None = None  # the text of a part of type refusal

    @model_validator(mode="before")
    @classmethod
    def check_type(cls, values: Any) -> Any:
        kind = values.get("type", "text") if isinstance(values, dict) else "text"
        if kind not in TEXT_PARTS:
            raise field_error("type", f"{shown(kind)} is not read; this server reads text only")
        return values | {"type": "text", "text": values.get("refusal")} if kind == "refusal" else values


Content = str | Annotated[list[InputPart], Field(max_length=MAX_PARTS)]
NEEDED = {
    "message": ("role", "content"),
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
}


class InputItem(Strict):
    """A message, a call that the model made, or what came of one. OpenAI has three types; their fields differ."""

    accepted = frozenset(
        {"id", "status", "phase", "namespace", "caller", "created_by", "async", "metadata", "cache_control"}
    )

    type: Literal["message", "function_call", "function_call_output"] = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: Content | None = None
    call_id: str | None = Field(default=None, max_length=256)
    name: ToolName | None = None
    arguments: str | None = Field(default=None, max_length=MAX_ARGUMENTS)
    output: Content | None = None

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

    @property
    def text(self) -> str:
        """Of a message, or of what came of a call."""
        content = self.output if self.type == "function_call_output" else self.content
        return content if isinstance(content, str) else "\n".join(part.text for part in content or ())


class ResponsesTool(FunctionTool):
    type: Literal["function"]


class ResponsesNamedTool(Strict):
    type: Literal["function"]
    name: ToolName


class TextFormat(Strict):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = Field(default=None, max_length=64)
    description: str | None = Field(default=None, max_length=4096)
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None

    @model_validator(mode="after")
    def check_schema(self) -> TextFormat:
        if (self.type == "json_schema") != (self.schema_ is not None):
            raise field_error("schema", "goes with type: json_schema, and must be there with it")
        return self

    @property
    def grammar(self) -> Grammar | None:
        schema = None
        if self.schema_ is not None:
            schema = JsonSchemaFormat(name=self.name or "answer", schema=self.schema_)
        return ResponseFormat(type=self.type, json_schema=schema).grammar


class TextOptions(Strict):
    accepted = frozenset({"verbosity"})

    format: TextFormat | None = None


class Reasoning(Strict):
    accepted = frozenset({"summary", "generate_summary", "context", "mode"})

    effort: ReasoningEffort | None = None  # for templates that read it


class ResponsesRequest(GenerationRequest):
    """OpenAI's `truncation: auto` shortens inputs that do not fit; here they are refused, whatever it says. A limit on
    calls of built-in tools limits nothing, for there are none.
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

    input: Annotated[list[InputItem], Field(min_length=1, max_length=MAX_MESSAGES)]  # a string is one user message
    instructions: str | None = None
    max_output_tokens: int | None = Field(default=None, ge=1)
    top_logprobs: Count | None = None
    include: Annotated[list[Includable], Field(max_length=16)] | None = None
    reasoning: Reasoning | None = None
    text: TextOptions | None = None
    tools: Annotated[list[AnyTool[ResponsesTool]], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ResponsesNamedTool | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: TemplateOptions | None = None
    metadata: Annotated[dict[str, Annotated[str, Field(max_length=512)]], Field(max_length=MAX_METADATA)] | None = None

    @model_validator(mode="before")
    @classmethod
    def check_input(cls, values: Any) -> Any:
        if not isinstance(values, dict) or "input" not in values or isinstance(values["input"], list):
            return values
        if not isinstance(values["input"], str):
            raise field_error("input", f"must be a string or a list of items, not {shown(values['input'])}")
        return values | {"input": [{"role": "user", "content": values["input"]}]}

    @model_validator(mode="after")
    def check_tools(self) -> ResponsesRequest:
        try:
            fields = self.tool_fields  # whose own checks run
        except ValidationError as error:
            raise field_error(**error.errors()[0].get("ctx", {})) from error
        if fields.must_call and self.structure is not None:
            raise field_error("tool_choice", "the output cannot be a call and of another form as well")
        return self

    @property
    def effort(self) -> ReasoningEffort | None:
        return None if self.reasoning is None else self.reasoning.effort

    @property
    def messages(self) -> list[Message]:
        """As a chat has them; calls that stand beside each other are one turn."""
        found = [Message(role="system", content=self.instructions)] if self.instructions else []
        for item in self.input:
            if item.type == "message":
                assert item.role is not None
                found.append(Message(role=item.role, content=item.text))
            elif item.type == "function_call_output":
                found.append(Message(role="tool", content=item.text, tool_call_id=item.call_id))
            else:
                assert item.call_id is not None
                assert item.name is not None
                assert item.arguments is not None
                call = ToolCall(id=item.call_id, function=CalledFunction(name=item.name, arguments=item.arguments))
                if found and found[-1].role == "assistant":
                    calls = [*(found[-1].tool_calls or ()), call]
                    found[-1] = found[-1].model_copy(update={"tool_calls": calls})
                else:
                    found.append(Message(role="assistant", tool_calls=[call]))
        return found

    @property
    def tool_fields(self) -> ToolFields:
        tools = [
            Tool(type="function", function=FunctionTool(**tool.model_dump(exclude={"type"})))
            for tool in self.tools or ()
            if isinstance(tool, ResponsesTool)
        ]
        choice = self.tool_choice
        if isinstance(choice, ResponsesNamedTool):
            choice = NamedTool(type="function", function=NamedFunction(name=choice.name))
        return ToolFields(tools=tools, tool_choice=choice, parallel_tool_calls=self.parallel_tool_calls)

    @property
    def structure(self) -> tuple[str, Grammar] | None:
        if self.text is not None and self.text.format is not None and (grammar := self.text.format.grammar) is not None:
            return "text.format", grammar
        return super().structure

    @property
    def asked_logprobs(self) -> int | None:
        if LOGPROBS in (self.include or ()):
            return self.top_logprobs or 0
        return self.top_logprobs or None
