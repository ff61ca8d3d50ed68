"""The wire of /v1/responses, as far as this server implements it: text and tools, nothing stored."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, model_validator

from infer.grammar import Grammar
from infer.server.chat_protocol import MAX_MESSAGES, MAX_PARTS, Message, TemplateOptions
from infer.server.errors import field_error
from infer.server.fields import ANY, Strict, drop_nothing
from infer.server.protocol import Count, GenerationRequest
from infer.server.structure import JsonSchemaFormat, ResponseFormat
from infer.server.tool_protocol import (
    MAX_ARGUMENTS,
    MAX_TOOLS,
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
RESPONSES_NOTHING: dict[str, tuple[Any, ...]] = {
    "previous_response_id": (),
    "conversation": (),
    "prompt": (),
    "background": (False,),
    "reasoning": ({},),
    "truncation": ("disabled",),
    "max_tool_calls": (),
    "context_management": (),
    "moderation": (),
    "prompt_cache_key": (),
    "prompt_cache_retention": (),
    "prompt_cache_options": (),
    "service_tier": ("auto", "default"),
    "store": (False, True),  # it is never stored, and the answer says so
    "user": (ANY,),
    "safety_identifier": (ANY,),
}
# Of the fields of other endpoints, those that /v1/responses does not have.
ELSEWHERE = {"max_tokens", "n", "stop", "logprobs", "stream_options", "prompt_logprobs", "response_format"}
TEXT_PARTS = ("input_text", "output_text", "text")
INCLUDABLE = Literal["message.output_text.logprobs"]


class InputPart(Strict):
    """`annotations` and `logprobs` come with parts that this server wrote itself, and are sent back."""

    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: list[Any] | None = Field(default=None, max_length=MAX_PARTS)
    logprobs: list[Any] | None = Field(default=None, max_length=2**20)


class InputItem(Strict):
    """A message, a call that the model made, or what came of one. OpenAI has three types; their fields differ."""

    type: Literal["message", "function_call", "function_call_output"] = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | Annotated[list[InputPart], Field(min_length=1, max_length=MAX_PARTS)] | None = None
    id: str | None = Field(default=None, max_length=256)
    status: str | None = Field(default=None, max_length=64)
    call_id: str | None = Field(default=None, max_length=256)
    name: ToolName | None = None
    arguments: str | None = Field(default=None, max_length=MAX_ARGUMENTS)
    output: str | None = None

    @model_validator(mode="before")
    @classmethod
    def check_fields(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        kind = values.get("type", "message")
        needed = {
            "message": ("role", "content"),
            "function_call": ("call_id", "name", "arguments"),
            "function_call_output": ("call_id", "output"),
        }.get(kind if isinstance(kind, str) else "", ())
        for name in needed:
            if values.get(name) is None:
                raise field_error(name, f"missing; an item of type {kind} needs it", "missing_required_parameter")
        content = values.get("content")
        if isinstance(content, list) and content:
            for part in content:
                if not isinstance(part, dict) or part.get("type") not in TEXT_PARTS:
                    raise field_error("content", f"every part must be text ({', '.join(TEXT_PARTS)})")
        nothing = {"phase": (), "namespace": (), "caller": (), "created_by": (), "async": (), "async_": ()}
        return drop_nothing(values, set(cls.model_fields), nothing)

    @property
    def message(self) -> Message:
        """Of an item that is one. Its parts stay parts: how they are joined is the template's affair."""
        assert self.content is not None
        content = self.content
        if not isinstance(content, str):
            content = [{"type": "text", "text": part.text} for part in content]
        return Message.model_validate({"role": self.role, "content": content})


class ResponsesTool(FunctionTool):
    type: Literal["function"]

    @model_validator(mode="before")
    @classmethod
    def check_type(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("type") != "function":
            raise field_error("type", "must be function; this server has no tools of its own")
        return values


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
    format: TextFormat | None = None

    @model_validator(mode="before")
    @classmethod
    def refuse(cls, values: Any) -> Any:
        return drop_nothing(values, set(cls.model_fields), {"verbosity": ("medium",)})


class ResponsesRequest(GenerationRequest):
    input: Annotated[list[InputItem], Field(min_length=1, max_length=MAX_MESSAGES)]  # a string is one user message
    instructions: str | None = None
    max_output_tokens: int | None = Field(default=None, ge=1)
    top_logprobs: Count | None = None
    include: Annotated[list[INCLUDABLE], Field(max_length=8)] | None = None
    text: TextOptions | None = None
    tools: Annotated[list[ResponsesTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ResponsesNamedTool | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: TemplateOptions | None = None
    metadata: Annotated[dict[str, Annotated[str, Field(max_length=512)]], Field(max_length=MAX_METADATA)] | None = None

    @model_validator(mode="before")
    @classmethod
    def refuse(cls, values: Any) -> Any:
        if isinstance(values, dict) and not isinstance(values.get("input"), list):
            if not isinstance(values.get("input"), str):
                raise field_error("input", "must be a string or a list of items")
            values = values | {"input": [{"role": "user", "content": values["input"]}]}
        return drop_nothing(values, set(cls.model_fields) - ELSEWHERE, RESPONSES_NOTHING)

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
    def messages(self) -> list[Message]:
        """As a chat has them; calls that stand beside each other are one turn."""
        found = [Message(role="system", content=self.instructions)] if self.instructions else []
        for item in self.input:
            if item.type == "message":
                found.append(item.message)
            elif item.type == "function_call_output":
                found.append(Message(role="tool", content=item.output, tool_call_id=item.call_id))
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
            Tool(type="function", function=FunctionTool.model_validate(tool.for_template()["function"]))
            for tool in self.tools or ()
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
        return self.top_logprobs if self.top_logprobs is not None else (0 if self.include else None)
