"""Error messages are plain sentences about a field of the request, without the validator's own wording."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from pydantic import ValidationError

from infer.server.api.tokens import DetokenizeRequest, TokenizeRequest
from infer.server.protocol.chat import ChatRequest, Message, TextPart
from infer.server.protocol.completions import CompletionRequest, Speculative, StreamOptions
from infer.server.protocol.errors import from_validation, shown
from infer.server.protocol.fields import Strict
from infer.server.protocol.messages import (
    Block,
    CountTokensRequest,
    CustomTool,
    MessagesRequest,
    OutputConfig,
    OutputFormat,
    TextBlock,
    Thinking,
    ToolChoice,
    Turn,
)
from infer.server.protocol.responses import (
    InputItem,
    InputPart,
    Reasoning,
    ResponsesRequest,
    ResponsesTool,
    TextFormat,
    TextOptions,
)
from infer.server.protocol.structure import JsonSchemaFormat, ResponseFormat, StructuredOutputs
from infer.server.protocol.tools import CalledFunction, FunctionTool, OtherTool, Tool, ToolCall
from tests.server import patient
from tests.server.harness import MODEL, Server

FUNCTION: dict[str, Any] = {"name": "f", "description": "d", "parameters": {"type": "object"}}
CALL: dict[str, Any] = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
SCHEMA: dict[str, Any] = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}}
PART: dict[str, Any] = {"type": "text", "text": "x"}
INPUT_PART: dict[str, Any] = {"type": "input_text", "text": "x"}
COMPLETION: dict[str, Any] = {"model": "m", "prompt": "x"}
CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
RESPONSE: dict[str, Any] = {"model": "m", "input": "x"}
MESSAGES: dict[str, Any] = CHAT | {"max_tokens": 5}


def items(**fields: Any) -> dict[str, Any]:
    return RESPONSE | {"input": [fields]}


def blocks(role: str, block: dict[str, Any]) -> dict[str, Any]:
    return MESSAGES | {"messages": [{"role": role, "content": [block]}, *MESSAGES["messages"]]}


# Request class, request body, path of an object in it, and that object's model, whose fields are set to wrong values.
TURN_OF_CALLS = CHAT | {"messages": [{"role": "assistant", "tool_calls": [CALL]}]}
WITH_TOOL = CHAT | {"tools": [{"type": "function", "function": FUNCTION}]}
LOCATIONS: list[tuple[type[Strict], dict[str, Any], tuple[str | int, ...], type[Strict]]] = [
    (CompletionRequest, COMPLETION, (), CompletionRequest),
    (CompletionRequest, COMPLETION | {"stream": True, "stream_options": {}}, ("stream_options",), StreamOptions),
    (CompletionRequest, COMPLETION | {"speculative": {}}, ("speculative",), Speculative),
    (
        CompletionRequest,
        COMPLETION | {"structured_outputs": {"regex": "a"}},
        ("structured_outputs",),
        StructuredOutputs,
    ),
    (CompletionRequest, COMPLETION | {"response_format": SCHEMA}, ("response_format",), ResponseFormat),
    (CompletionRequest, COMPLETION | {"response_format": SCHEMA}, ("response_format", "json_schema"), JsonSchemaFormat),
    (ChatRequest, CHAT, (), ChatRequest),
    (ChatRequest, CHAT, ("messages", 0), Message),
    (ChatRequest, CHAT | {"messages": [{"role": "user", "content": [PART]}]}, ("messages", 0, "content", 0), TextPart),
    (ChatRequest, TURN_OF_CALLS, ("messages", 0), Message),
    (ChatRequest, TURN_OF_CALLS, ("messages", 0, "tool_calls", 0), ToolCall),
    (ChatRequest, TURN_OF_CALLS, ("messages", 0, "tool_calls", 0, "function"), CalledFunction),
    (
        ChatRequest,
        CHAT | {"messages": [{"role": "tool", "tool_call_id": "c", "content": ""}]},
        ("messages", 0),
        Message,
    ),
    (ChatRequest, WITH_TOOL, ("tools", 0), Tool),
    (ChatRequest, WITH_TOOL, ("tools", 0, "function"), FunctionTool),
    (ChatRequest, CHAT | {"tools": [{"type": "web_search"}]}, ("tools", 0), OtherTool),
    (ResponsesRequest, RESPONSE, (), ResponsesRequest),
    (ResponsesRequest, items(role="user", content="x"), ("input", 0), InputItem),
    (ResponsesRequest, items(role="user", content=[INPUT_PART]), ("input", 0, "content", 0), InputPart),
    (ResponsesRequest, items(type="function_call", call_id="c", name="f", arguments="{}"), ("input", 0), InputItem),
    (ResponsesRequest, items(type="function_call_output", call_id="c", output="x"), ("input", 0), InputItem),
    (ResponsesRequest, RESPONSE | {"tools": [{"type": "function", **FUNCTION}]}, ("tools", 0), ResponsesTool),
    (ResponsesRequest, RESPONSE | {"text": {}}, ("text",), TextOptions),
    (ResponsesRequest, RESPONSE | {"text": {"format": {"type": "text"}}}, ("text", "format"), TextFormat),
    (ResponsesRequest, RESPONSE | {"reasoning": {}}, ("reasoning",), Reasoning),
    (MessagesRequest, MESSAGES, (), MessagesRequest),
    (CountTokensRequest, CHAT, (), CountTokensRequest),
    (MessagesRequest, MESSAGES | {"system": [PART]}, ("system", 0), TextBlock),
    (MessagesRequest, MESSAGES, ("messages", 0), Turn),
    (MessagesRequest, blocks("user", PART), ("messages", 0, "content", 0), Block),
    (
        MessagesRequest,
        blocks("user", {"type": "tool_result", "tool_use_id": "c", "content": [PART]}),
        ("messages", 0, "content", 0),
        Block,
    ),
    (
        MessagesRequest,
        blocks("assistant", {"type": "tool_use", "id": "c", "name": "f", "input": {}}),
        ("messages", 0, "content", 0),
        Block,
    ),
    (MessagesRequest, MESSAGES | {"tools": [{"name": "f", "input_schema": {}}]}, ("tools", 0), CustomTool),
    (MessagesRequest, MESSAGES | {"tool_choice": {"type": "auto"}}, ("tool_choice",), ToolChoice),
    (MessagesRequest, MESSAGES | {"thinking": {"type": "adaptive"}}, ("thinking",), Thinking),
    (MessagesRequest, MESSAGES | {"output_config": {}}, ("output_config",), OutputConfig),
    (
        MessagesRequest,
        MESSAGES | {"output_config": {"format": {"type": "json_schema", "schema": {}}}},
        ("output_config", "format"),
        OutputFormat,
    ),
    (TokenizeRequest, {"prompt": "x"}, (), TokenizeRequest),
    (DetokenizeRequest, {"tokens": [1]}, (), DetokenizeRequest),
]
WRONG: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 5, 10**30, 1.5, float("inf"), float("nan"), "", "x", "x" * 5000, "\ud800"),
    *([], [5], [None], ["x"], [[]], [{}], [[5]], [1.5], ["x"] * 5000, {}, {"a": 5}, {"type": "x"}, {"type": 5}),
    *({"type": "function", "function": 5}, {"type": "function", "function": {"name": 5}}, {"1": "x"}, {"": None}),
    *([{"type": "text"}], [{"type": "text", "text": 5}], [{"role": 5}], [{"role": "user", "content": {"a": 1}}]),
)
VALIDATORS = (
    *(
        "function-",
        "literal[",
        "[type=",
        ".str.",
        ".str:",
        ".list[",
        "<function>",
        "<other>",
        "<custom>",
        "tagged-union",
        "Input should",
        "valid dictionary",
    ),
    *("instance of", "constrained", "pydantic", "union", "<class", "Extra inputs", "valid string", "another value"),
)


def names_of_models() -> set[str]:
    stack: list[type] = [Strict]
    names: set[str] = set()
    while stack:
        kinds = stack.pop().__subclasses__()
        names |= {kind.__name__ for kind in kinds}
        stack += kinds
    return names - {"Message", "Tool", "Reasoning"}  # English words


def at(document: Any, location: tuple[str | int, ...]) -> Any:
    for part in location:
        document = document[part]
    return document


def path_of(location: tuple[str | int, ...]) -> str:
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location).removeprefix(".")


@pytest.mark.parametrize(
    ("kind", "body", "location", "model"),
    LOCATIONS,
    ids=[f"{kind.__name__}-{path_of(location)}" for kind, _, location, _ in LOCATIONS],
)
def test_a_wrong_value_is_a_sentence_about_its_field(
    kind: type[Strict], body: dict[str, Any], location: tuple[str | int, ...], model: type[Strict]
) -> None:
    refused = set()
    hidden = names_of_models()
    names = {field.alias or name for name, field in model.model_fields.items()}
    for name in sorted(names | set(model.refused)):
        for value in WRONG:
            document = copy.deepcopy(body)
            at(document, location)[name] = value
            try:
                kind.model_validate(document)
            except ValidationError as caught:
                error = from_validation(caught.errors(), document)
                check(error.message, error.param, path_of((*location, name)), path_of(location))
                assert not [word for word in hidden if word in error.message]
                refused.add(name)
    assert refused == names | set(model.refused)


def check(message: str, param: str | None, path: str, around: str) -> None:
    context = (path, param, message)
    assert param is not None, context
    assert message.startswith(f"{param}: "), context
    assert len(message) < 400, context
    assert "\n" not in message, context
    assert not [word for word in VALIDATORS if word in message], context
    inside = param == path or param.startswith((f"{path}.", f"{path}["))
    beside = "missing" in message or "not together" in message or "only " in message or "one of" in message
    # Where two fields of one object conflict, the error may name the other one.
    assert inside or (param.startswith(around) and (beside or "goes with" in message or "needs" in message)), context


COMPLETIONS, CHATS, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"


def turns(content: Any, role: str = "user") -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content}]}


@pytest.mark.parametrize(
    ("path", "body", "param", "message"),
    [
        (COMPLETIONS, {"temperature": 3}, "temperature", "must be at most 2, not 3"),
        (COMPLETIONS, {"n": 1.5}, "n", "must be a whole number, not 1.5"),
        (COMPLETIONS, {"echo": "yes"}, "echo", 'must be true or false, not "yes"'),
        (COMPLETIONS, {"stop": [1]}, "stop[0]", "must be a string, not 1"),
        (COMPLETIONS, {"bad_words": [""]}, "bad_words[0]", 'must be a string of at least 1 character, not ""'),
        (COMPLETIONS, {"logit_bias": {"5": "x"}}, 'logit_bias["5"]', 'must be a number, not "x"'),
        (
            COMPLETIONS,
            {"structured_outputs": {"json": 5}},
            "structured_outputs.json",
            "must be an object or a string, not 5",
        ),
        (CHATS, turns(5), "messages[0].content", "must be a string or a list, not 5"),
        (CHATS, turns([PART, PART | {"text": 5}]), "messages[0].content[1].text", "must be a string, not 5"),
        (
            CHATS,
            turns("x", role="bot"),
            "messages[0].role",
            "must be 'system', 'developer', 'user', 'assistant' or 'tool', not \"bot\"",
        ),
        (CHATS, {"tool_choice": 5}, "tool_choice", "must be 'none', 'auto' or 'required' or an object, not 5"),
        (CHATS, {"tools": [{"type": "function"}]}, "tools[0].function", "missing; this field is required"),
        (RESPONSES, {"input": [{"role": "user", "content": "x"}, 5]}, "input[1]", "must be an object, not 5"),
        (
            RESPONSES,
            {"input": [{"type": "item_reference", "id": "x"}]},
            "input[0].type",
            "item_reference: nothing is stored here; send the items themselves (clients do with store: false)",
        ),
        ("/detokenize", {"tokens": [1, "x"]}, "tokens[1]", 'must be a whole number, not "x"'),
        ("/tokenize", {"prompt": 5}, "prompt", "must be a string, not 5"),
    ],
)
def test_what_a_client_reads(server: Server, path: str, body: dict[str, Any], param: str, message: str) -> None:
    base = {COMPLETIONS: COMPLETION, CHATS: CHAT, RESPONSES: RESPONSE}.get(path, {})
    response = server.post(path, base | body)
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["message"], error["param"]) == (f"{param}: {message}", param)


def test_values_are_shortened() -> None:
    assert shown("x" * 100) == '"' + "x" * 40 + "..."
    assert shown(10**100) == str(10**40)[:40] + "..."
    assert (shown([1]), shown({"a": 1}), shown([]), shown(None)) == ("a list", "an object", "[]", "null")


def test_unknown_endpoints_and_methods_say_what_there_is(server: Server) -> None:
    missing = patient.post(f"{server.url}/v1/embeddings", json={})
    assert (missing.status_code, missing.json()["error"]["type"]) == (404, "not_found_error")
    assert missing.json()["error"]["message"] == "POST /v1/embeddings: no such endpoint"
    wrong = patient.get(f"{server.url}/v1/chat/completions")
    assert (wrong.status_code, wrong.headers["allow"]) == (405, "POST")
    assert wrong.json()["error"]["message"] == "GET /v1/chat/completions: this endpoint takes POST"


def test_paths_may_end_in_a_slash(server: Server) -> None:
    body = {"model": MODEL, "prompt": "x", "max_tokens": 1}
    assert server.post("/v1/completions/", body).status_code == 200
    assert patient.get(f"{server.url}/v1/models/").json() == patient.get(f"{server.url}/v1/models").json()
    assert patient.get(f"{server.url}/v1/models/{MODEL}/").json()["id"] == MODEL
    unknown = patient.get(f"{server.url}/v1/models/owner/name")
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")


@pytest.mark.parametrize("path", ["/", "/health", "/v1/models", f"/v1/models/{MODEL}", "/version", "/metrics"])
def test_head_is_get_without_the_body(server: Server, path: str) -> None:
    head, get = patient.head(server.url + path), patient.get(server.url + path)
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-type"] == get.headers["content-type"]
