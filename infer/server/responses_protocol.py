"""The wire of /v1/responses, as far as this server implements it: text and tools, nothing stored."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, model_validator

from infer.grammar import Grammar
from infer.server.chat_protocol import MAX_MESSAGES, MAX_PARTS, Message, TemplateOptions
from infer.server.errors import field_error
from infer.server.fields import ANY, Strict, drop_nothing
from infer.server.protocol import Count, GenerationRequest
from infer.server.structure import JsonObject, JsonSchemaFormat, ResponseFormat
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
REASONING_PARTS = ("reasoning_text", "summary_text")
INCLUDABLE = Literal["message.output_text.logprobs"]


class InputPart(Strict):
    """`annotations` and `logprobs` come with parts that this server wrote itself, and are sent back."""

    type: Literal["input_text", "output_text", "text", "reasoning_text", "summary_text"]
    text: str
    annotations: list[Any] | None = Field(default=None, max_length=MAX_PARTS)
    logprobs: list[Any] | None = Field(default=None, max_length=2**20)


PartList = Annotated[list[InputPart], Field(max_length=MAX_PARTS)]


class InputItem(Strict):
    """A message, the reasoning before one, a call that the model made, or what came of one. OpenAI has four types."""

    type: Literal["message", "reasoning", "function_call", "function_call_output"] = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | PartList | None = None
    id: str | None = Field(default=None, max_length=256)
    status: str | None = Field(default=None, max_length=64)
    call_id: str | None = Field(default=None, max_length=256)
    name: ToolName | None = None
    arguments: str | None = Field(default=None, max_length=MAX_ARGUMENTS)
    output: str | PartList | None = None
    summary: PartList | None = None  # of reasoning; a template takes the reasoning itself
    encrypted_content: str | None = None  # of another server, and not to be read here

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
        allowed = REASONING_PARTS if kind == "reasoning" else TEXT_PARTS
        for name in ("content", "output", "summary"):
            check_parts(name, values.get(name), allowed)
        nothing = {"phase": (), "namespace": (), "caller": (), "created_by": (), "async": (), "async_": ()}
        return drop_nothing(values, set(cls.model_fields), nothing)


def check_parts(name: str, parts: Any, allowed: tuple[str, ...]) -> None:
    """Before pydantic tries the two forms of a text and reports both failures."""
    if parts is None or isinstance(parts, str):
        return
    if not isinstance(parts, list):
        raise field_error(name, "must be a string or a list of text parts")
    for part in parts:
        if not isinstance(part, dict) or part.get("type") not in allowed:
            raise field_error(name, f"every part must be text ({', '.join(allowed)})")


def messages_of(items: Sequence[InputItem]) -> list[Message]:
    """As a chat has them. What the model wrote in one answer is one turn: reasoning, text and calls."""
    turns: list[Message] = []
    turn: dict[str, Any] = {}  # the assistant's, while it grows
    previous = ""  # the type of the item before

    def end() -> None:
        if turn:
            turns.append(Message(**{"role": "assistant", "content": "", **turn}))
            turn.clear()

    for item in items:
        if item.type == "reasoning":
            end()
            if text := "".join(part["text"] for part in parts_of(item.content)):
                turn["reasoning_content"] = text
        elif item.type == "function_call":
            call = CalledFunction(name=item.name or "", arguments=item.arguments or "")
            turn.setdefault("tool_calls", []).append(ToolCall(id=item.call_id or "", function=call))
        elif item.type == "message" and item.role == "assistant":
            if previous == "message":
                end()
            written, more = turn.get("content", []), parts_of(item.content)
            if written:  # before a call; a chat has the text in one piece
                more[0] = text_part(written.pop()["text"] + more[0]["text"])
            turn["content"] = [*written, *more]
        else:
            end()
            is_message = item.type == "message"
            turns.append(
                Message(
                    role=item.role if is_message and item.role else "tool",
                    content=parts_of(item.content if is_message else item.output),
                    tool_call_id=None if is_message else item.call_id,
                )
            )
        previous = item.type
    end()
    return turns


def parts_of(content: str | list[InputPart] | None) -> list[Any]:
    """As a chat's message has them, at least one."""
    if isinstance(content, list) and content:
        return [text_part(part.text) for part in content]
    return [text_part(content if isinstance(content, str) else "")]


def text_part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


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
    schema_: JsonObject | None = Field(default=None, alias="schema")
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
        system = [Message(role="system", content=self.instructions)] if self.instructions else []
        return [*system, *messages_of(self.input)]

    @property
    def tool_fields(self) -> ToolFields:
        tools = [
            Tool(type="function", function=FunctionTool(**tool.model_dump(exclude={"type"})))
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
