"""Schema of tools, as in OpenAI's chat API."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, Discriminator, Field, ModelWrapValidatorHandler, PrivateAttr, Tag, model_validator

from infer.server.protocol.errors import field_error
from infer.server.protocol.fields import Strict
from infer.server.protocol.structure import check_sendable

MAX_TOOLS = 10_000  # as with Anthropic; the context bounds them earlier
MAX_CALLS = 128  # per message
MAX_ARGUMENTS = 2**20
NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
# Anthropic's bound. OpenAI's is 64 for chats, which names of MCP tools exceed, and none for responses.
ToolName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,128}$")]


# Callers of a tool, when its definition is loaded, the schema of its result: these matter only to OpenAI's tools.
TOOL_ACCEPTED = frozenset({"async", "allowed_callers", "defer_loading", "output_schema", "cache_control"})


def check_schema(schema: Any) -> Any:
    if schema is not None and not isinstance(schema, dict | bool):
        raise ValueError("must be a JSON schema")
    return check_sendable(schema)


class FunctionTool(Strict):
    accepted = TOOL_ACCEPTED

    name: ToolName
    description: str | None = None
    parameters: Annotated[Any, AfterValidator(check_schema)] = None  # a JSON schema; null: no parameters
    strict: bool | None = None  # no effect: arguments of a forced call always follow the schema
    _order: tuple[str, ...] = PrivateAttr(default=())  # order of the fields in the request

    @model_validator(mode="wrap")
    @classmethod
    def keep_order(cls, values: Any, handler: ModelWrapValidatorHandler[FunctionTool]) -> FunctionTool:
        function = handler(values)
        if isinstance(values, dict):
            function._order = tuple(values)
        return function

    def for_template(self) -> dict[str, Any]:
        """Return the tool for the chat template. Templates print all of it, so the fields keep the client's order."""
        fields = {name: getattr(self, name) for name in FunctionTool.model_fields}
        ordered = {name: fields[name] for name in (*self._order, *fields) if name in fields}
        return {"type": "function", "function": ordered}

    @property
    def arguments_schema(self) -> dict[str, Any]:
        """The JSON schema of the arguments, as a separate document. Raises ValueError if its type excludes objects."""
        if self.parameters is None:
            return NO_PARAMETERS
        schema = self.parameters if isinstance(self.parameters, dict) else {}
        kinds = schema.get("type", "object")
        if self.parameters is False or "object" not in (kinds if isinstance(kinds, list) else [kinds]):
            raise ValueError(f"the parameters of {self.name} must be a schema of type object")
        return schema | {"type": "object"}


class Tool(Strict):
    accepted = TOOL_ACCEPTED

    type: Literal["function"]
    function: FunctionTool


class OtherTool(Strict):
    """A tool of another type (`web_search`, `namespace`, `custom`, ...). It is not shown to the model."""

    type: str = Field(max_length=64)

    @classmethod
    def select(cls, values: dict[str, Any]) -> dict[str, Any]:
        return {"type": values["type"]}

    @property
    def remark(self) -> str:
        return f"tools of type {self.type!r} are ignored; this server supports function tools only"


AnyFunction = TypeVar("AnyFunction")
# The tags appear in the `loc` of pydantic's errors, so they must not be keys of a request.
AnyTool = Annotated[
    Annotated[AnyFunction, Tag("<function>")] | Annotated[OtherTool, Tag("<other>")],
    Discriminator(lambda tool: "<other>" if is_other_tool(tool) else "<function>"),
]


def is_other_tool(tool: Any, supported: str = "function") -> bool:
    """Return whether the tool's type is another one than the `supported`."""
    kind = type_of(tool)
    return isinstance(kind, str) and kind != supported


def type_of(value: Any) -> Any:
    return value.get("type") if isinstance(value, dict) else getattr(value, "type", None)


NamedChoice = TypeVar("NamedChoice")
AllowedChoice = TypeVar("AllowedChoice")
ToolsChoice = (
    Literal["none", "auto", "required"]
    | Annotated[
        Annotated[NamedChoice, Tag("<named>")] | Annotated[AllowedChoice, Tag("<allowed>")],
        Discriminator(lambda choice: "<allowed>" if type_of(choice) == "allowed_tools" else "<named>"),
    ]
)


class NamedFunction(Strict):
    name: ToolName


class NamedTool(Strict):
    type: Literal["function"]
    function: NamedFunction

    @property
    def name(self) -> str:
        return self.function.name


class AllowedFunctions(Strict):
    mode: Literal["auto", "required"]
    tools: Annotated[list[AnyTool[NamedTool]], Field(max_length=MAX_TOOLS)]


class AllowedTools(Strict):
    type: Literal["allowed_tools"]
    allowed_tools: AllowedFunctions


class CalledFunction(Strict):
    accepted = frozenset({"parsed_arguments", "provider_specific_fields"})

    name: ToolName
    arguments: str = Field(max_length=MAX_ARGUMENTS)


class ToolCall(Strict):
    accepted = frozenset({"index", "provider_specific_fields", "extra_content", "cache_control"})

    id: str = Field(max_length=256)
    type: Literal["function"] = "function"
    function: CalledFunction


@dataclass(frozen=True)
class ToolUse:
    """The functions of a request, and which of them may or must be called. Raises a field error if that contradicts.

    `choice`: none, auto or required; `named`: the one function that must be called; `only`: names of those that may be,
    None for all; `parallel`: several calls may be.
    """

    functions: Sequence[FunctionTool]
    choice: str = "auto"
    named: str | None = None
    only: Sequence[str] | None = None
    parallel: bool = True

    def __post_init__(self) -> None:
        names = [function.name for function in self.functions]
        if len(set(names)) < len(names):
            raise field_error("tools", "two functions have one name")
        for name in (*(self.only or ()), *([self.named] if self.named is not None else [])):
            if name not in names:
                raise field_error("tool_choice", f"{name!r} is not among the tools")
        if self.choice == "required" and not self.allowed:
            raise field_error("tool_choice", "required needs tools that are functions")

    @property
    def allowed(self) -> list[FunctionTool]:
        """The functions that may be called."""
        if self.named is not None:
            return [function for function in self.functions if function.name == self.named]
        if self.choice == "none":
            return []
        return [function for function in self.functions if self.only is None or function.name in self.only]

    @property
    def max_calls(self) -> int | None:
        """Maximum number of calls, None for no limit. A named function is called once even with `parallel`."""
        return 1 if self.named is not None or not self.parallel else None

    @property
    def must_call(self) -> bool:
        return self.choice == "required" or self.named is not None


def tool_use_of(functions: Sequence[FunctionTool], choice: Any, *, parallel: bool | None) -> ToolUse:
    """Return what a `tool_choice` means: a word, one function, or some with a mode. `parallel`: null means true."""
    several = parallel is not False
    if choice is None or isinstance(choice, str):
        return ToolUse(functions, choice or "auto", parallel=several)
    if isinstance(choice, AllowedFunctions):
        only = [tool.name for tool in choice.tools if not isinstance(tool, OtherTool)]
        return ToolUse(functions, choice.mode, only=only, parallel=several)
    return ToolUse(functions, named=choice.name, parallel=several)
