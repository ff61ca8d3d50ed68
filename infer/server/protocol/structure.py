"""Schema of structured output: OpenAI's `response_format` and vLLM's `structured_outputs`, and their grammars."""

from __future__ import annotations

import json
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from infer.batch.grammar import Grammar
from infer.server.protocol.errors import ApiError, field_error, invalid_field
from infer.server.protocol.fields import Strict, Unless
from models.json_text import depth

MAX_CHOICES = 1024
MAX_GRAMMAR_TEXT = 2**20  # characters of a field that a request may have at all
# What is compiled: several times what hand-written grammars and schemas need, and little enough to be compiled in time.
MAX_GRAMMAR_BYTES = 2**16
MAX_SCHEMA_DEPTH = 32

GrammarText = Annotated[str, Field(min_length=1, max_length=MAX_GRAMMAR_TEXT)]


def check_sendable(value: Any) -> Any:
    """Return the value. Raises ValueError if it cannot be sent as JSON.

    Python's JSON parser accepts NaN, 1e999 and lone surrogates, which no response and no grammar can contain.
    """
    try:
        json.dumps(value, allow_nan=False, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise ValueError("must hold finite numbers and whole characters, and not be nested too deeply") from error
    return value


JsonObject = Annotated[dict[str, Any], AfterValidator(check_sendable)]


class JsonSchemaFormat(Strict):
    """A named JSON schema. `strict` has no effect: the schema is always enforced."""

    name: str = Field(max_length=64)
    description: str | None = Field(default=None, max_length=4096)
    schema_: JsonObject = Field(alias="schema")
    strict: bool | None = None


class TextFormat(Strict):
    """The format of an output. A schema is enforced with `json_object` too, as in llama.cpp; `strict` has no effect."""

    schema_field: ClassVar[str] = "schema"

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = Field(default=None, max_length=64)
    description: str | None = Field(default=None, max_length=4096)
    schema_: JsonObject | None = Field(default=None, alias="schema")
    strict: bool | None = None

    @property
    def enforced(self) -> dict[str, Any] | None:
        """The schema of this format."""
        return self.schema_

    @model_validator(mode="after")
    def check_schema(self) -> Self:
        if (self.type == "json_schema" and self.enforced is None) or (self.type == "text" and self.enforced):
            raise field_error(self.schema_field, "goes with type: json_schema, and must be there with it")
        return self

    @property
    def grammar(self) -> Grammar | None:
        if self.type == "text":
            return None
        if self.enforced or self.type == "json_schema":
            return Grammar("json_schema", json.dumps(self.enforced))
        return Grammar("json_object")


class ResponseFormat(TextFormat):
    """A chat's format, whose schema is in `json_schema`, or beside the type as in /v1/responses."""

    schema_field = "json_schema"

    json_schema: JsonSchemaFormat | None = None

    @property
    def enforced(self) -> dict[str, Any] | None:
        return self.schema_ if self.json_schema is None else self.json_schema.schema_

    @model_validator(mode="after")
    def check_one_schema(self) -> Self:
        if self.json_schema is not None and (self.type != "json_schema" or self.schema_ is not None):
            raise field_error("json_schema", "goes with type: json_schema, and not together with schema")
        return self


class StructuredOutputs(Strict):
    """vLLM's structured output; exactly one of the fields that ask for a form is set."""

    accepted = frozenset({"disable_fallback"})  # to another library
    refused: ClassVar[dict[str, Unless]] = dict.fromkeys(("whitespace_pattern", "structural_tag"), Unless())

    json_: JsonObject | GrammarText | None = Field(default=None, alias="json")
    regex: GrammarText | None = None
    choice: Annotated[list[str], Field(min_length=1, max_length=MAX_CHOICES)] | None = None
    grammar_: GrammarText | None = Field(default=None, alias="grammar")
    json_object: bool | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None

    @model_validator(mode="after")
    def check_one(self) -> StructuredOutputs:
        provided = [self.json_ is not None, self.regex, self.choice, self.grammar_, self.json_object]
        if sum(map(bool, provided)) != 1:
            raise field_error("", "give one of json, regex, choice, grammar, json_object")
        if isinstance(self.json_, str):
            try:
                Grammar("json_schema", self.json_)
            except ValueError as error:
                raise field_error("json", str(error)) from error
        return self

    @property
    def grammar(self) -> Grammar:
        options: dict[str, Any] = {
            "compact": self.disable_any_whitespace is True,
            "closed": self.disable_additional_properties is True,
        }
        if self.json_ is not None:
            text = self.json_ if isinstance(self.json_, str) else json.dumps(self.json_)
            return Grammar("json_schema", text, **options)
        if self.regex:
            return Grammar("regex", self.regex)
        if self.choice:
            return Grammar("choice", json.dumps(self.choice))
        return Grammar("lark", self.grammar_) if self.grammar_ else Grammar("json_object", **options)


def check_size(grammar: Grammar, param: str) -> None:
    """Raises ApiError for a grammar that is too large or too deep to be checked at all."""
    size = len(grammar.text.encode("utf-8", "replace"))
    if size > MAX_GRAMMAR_BYTES:
        raise invalid_field(param, f"{size} bytes; at most {MAX_GRAMMAR_BYTES}", "grammar_too_large")
    if grammar.kind == "json_schema":
        check_depth(json.loads(grammar.text), param, param)


def check_depth(schema: Any, subject: str, param: str) -> None:
    if depth(schema) > MAX_SCHEMA_DEPTH:
        message = f"{subject}: nested deeper than {MAX_SCHEMA_DEPTH} levels"
        raise ApiError(400, message, param=param, code="grammar_too_large")
