"""Tools on the wire, as OpenAI's chats have them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from infer.server.errors import field_error
from infer.server.fields import Strict
from infer.server.structure import check_sendable

MAX_TOOLS = 128
MAX_CALLS = 128  # in one message of a conversation
MAX_ARGUMENTS = 2**20
NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
ToolName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]


def check_schema(schema: Any) -> Any:
    if schema is not None and not isinstance(schema, dict | bool):
        raise ValueError("must be a JSON schema")
    return check_sendable(schema)


class FunctionTool(Strict):
    name: ToolName
    description: str | None = Field(default=None, max_length=16384)
    parameters: Annotated[Any, AfterValidator(check_schema)] = None  # a JSON schema; null: takes none
    strict: bool | None = None  # changes nothing: arguments of a forced call always keep the schema

    @property
    def arguments_schema(self) -> dict[str, Any]:
        """Of the arguments' object, as a document of its own. Raises ValueError where no object could keep it."""
        if self.parameters is None:
            return NO_PARAMETERS
        schema = self.parameters if isinstance(self.parameters, dict) else {}
        kinds = schema.get("type", "object")
        if self.parameters is False or "object" not in (kinds if isinstance(kinds, list) else [kinds]):
            raise ValueError(f"the parameters of {self.name} must be a schema of type object")
        return schema | {"type": "object"}


class Tool(Strict):
    type: Literal["function"]
    function: FunctionTool


class NamedFunction(Strict):
    name: ToolName


class NamedTool(Strict):
    type: Literal["function"]
    function: NamedFunction


class CalledFunction(Strict):
    name: ToolName
    arguments: str = Field(max_length=MAX_ARGUMENTS)


class ToolCall(Strict):
    id: str = Field(max_length=256)
    type: Literal["function"] = "function"
    function: CalledFunction


class ToolFields(Strict):
    """What a request with tools has; `tools_in_use` are those that may be called, none where nothing may."""

    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None

    @model_validator(mode="after")
    def check_tools(self) -> ToolFields:
        names = [tool.function.name for tool in self.tools or ()]
        if len(set(names)) < len(names):
            raise field_error("tools", "two functions have one name")
        if isinstance(self.tool_choice, NamedTool) and self.tool_choice.function.name not in names:
            raise field_error("tool_choice", f"{self.tool_choice.function.name!r} is not among the tools")
        if self.tool_choice == "required" and not names:
            raise field_error("tool_choice", "required needs tools")
        return self

    @property
    def tools_in_use(self) -> list[FunctionTool]:
        if self.tool_choice == "none":
            return []
        functions = [tool.function for tool in self.tools or ()]
        if isinstance(self.tool_choice, NamedTool):
            return [function for function in functions if function.name == self.tool_choice.function.name]
        return functions

    @property
    def most_calls(self) -> int | None:
        """A named tool is called exactly once, whatever `parallel_tool_calls` says. None: no bound."""
        return 1 if isinstance(self.tool_choice, NamedTool) or self.parallel_tool_calls is False else None

    @property
    def must_call(self) -> bool:
        return self.tool_choice == "required" or isinstance(self.tool_choice, NamedTool)
