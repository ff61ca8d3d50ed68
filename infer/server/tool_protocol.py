"""Tools on the wire, as OpenAI's chats have them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, ModelWrapValidatorHandler, PrivateAttr, model_validator

from infer.server.errors import field_error
from infer.server.fields import Strict

MAX_TOOLS = 128
MAX_CALLS = 128  # in one message of a conversation
MAX_ARGUMENTS = 2**20
ToolName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]


class FunctionTool(Strict):
    name: ToolName
    description: str | None = Field(default=None, max_length=16384)
    parameters: dict[str, Any] | None = None  # null: takes none
    strict: bool | None = None  # changes nothing: arguments of a forced call always keep the schema
    _order: tuple[str, ...] = PrivateAttr(default=())  # of the fields, as the client wrote them

    @model_validator(mode="wrap")
    @classmethod
    def keep_order(cls, values: Any, handler: ModelWrapValidatorHandler[FunctionTool]) -> FunctionTool:
        function = handler(values)
        if isinstance(values, dict):
            function._order = tuple(values)
        return function

    def for_template(self) -> dict[str, Any]:
        """As a tool of a conversation. Templates print it whole, so its fields keep their order."""
        fields = {name: getattr(self, name) for name in FunctionTool.model_fields}
        ordered = {name: fields[name] for name in (*self._order, *fields) if name in fields}
        return {"type": "function", "function": ordered}


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
    def must_call(self) -> bool:
        return self.tool_choice == "required" or isinstance(self.tool_choice, NamedTool)
