"""Every field of OpenAI's, Anthropic's and vLLM's schemas is classified (docs/design.md); how a class is treated."""

from __future__ import annotations

import logging
import typing
from collections.abc import Iterator
from typing import Any

import pytest
from anthropic.types import message_count_tokens_params as anthropic_counts
from anthropic.types import message_create_params as anthropic_messages
from anthropic.types.beta import message_count_tokens_params as anthropic_beta_counts
from anthropic.types.beta import message_create_params as anthropic_beta_messages
from openai.types import completion_create_params as openai_completions
from openai.types.chat import completion_create_params as openai_chats
from openai.types.responses import response_create_params as openai_responses
from pydantic import BaseModel, ValidationError
from typing_extensions import get_type_hints, is_typeddict

from infer.server.api.tokens import DetokenizeRequest, TokenizeRequest
from infer.server.protocol.chat import ChatRequest
from infer.server.protocol.completions import GUIDED, CompletionRequest, GenerationRequest
from infer.server.protocol.errors import ApiError, from_validation
from infer.server.protocol.fields import MAX_WARNINGS, Strict, UnknownFields
from infer.server.protocol.messages import CountTokensRequest, MessagesRequest
from infer.server.protocol.responses import ResponsesRequest
from infer.server.protocol.tools import OtherTool
from models.chat import content_text, normalize_message

COMPLETION: dict[str, Any] = {"model": "m", "prompt": "x"}
CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
RESPONSE: dict[str, Any] = {"model": "m", "input": "x"}
MESSAGES: dict[str, Any] = CHAT | {"max_tokens": 5}
REQUESTS: tuple[tuple[type[Strict], dict[str, Any]], ...] = (
    (CompletionRequest, COMPLETION),
    (ChatRequest, CHAT),
    (ResponsesRequest, RESPONSE),
    (MessagesRequest, MESSAGES),
)
# Fields that vLLM 0.32's protocol files add to OpenAI's; the last lines of `VLLM` are names from earlier releases.
VLLM = """
use_beam_search top_k min_p repetition_penalty watermarking length_penalty stop_token_ids include_stop_str_in_output
ignore_eos min_tokens skip_special_tokens spaces_between_special_tokens truncate_prompt_tokens truncation_side
prompt_logprobs logprob_token_ids allowed_token_ids bad_words response_format structured_outputs priority request_id
session_id return_tokens_as_token_ids return_token_ids routed_experts_prompt_start return_token_offsets
return_mm_kwargs cache_salt kv_transfer_params ec_transfer_params vllm_xargs repetition_detection
thinking_token_budget stream_interval add_special_tokens
guided_json guided_regex guided_choice guided_grammar guided_decoding_backend guided_whitespace_pattern
logits_processors best_of
"""
VLLM_CHAT = """
add_generation_prompt continue_final_message documents chat_template chat_template_kwargs media_io_kwargs
mm_processor_kwargs include_reasoning echo return_prompt_text
"""
VLLM_RESPONSES = """
logit_bias top_k skip_special_tokens include_stop_str_in_output mm_processor_kwargs priority cache_salt request_id
enable_response_messages previous_input_messages previous_response structured_outputs repetition_penalty seed stop
ignore_eos vllm_xargs
"""
VLLM_TOKENIZE = """
model prompt messages add_special_tokens return_token_strs add_generation_prompt continue_final_message chat_template
chat_template_kwargs mm_processor_kwargs tools
"""


def refusal(kind: type[Strict], body: Any) -> dict[str, Any]:
    with pytest.raises(ValidationError) as caught:
        kind.model_validate(body)
    return from_validation(caught.value.errors(), body).body["error"]


def sorted_names(model: type[Strict]) -> set[str]:
    implemented = {field.alias or name for name, field in model.model_fields.items()}
    other_names = set(GUIDED) if issubclass(model, GenerationRequest) else set()
    return implemented | model.accepted | set(model.refused) | other_names


def parts_of(annotation: Any) -> Iterator[Any]:
    """Yield a type and, recursively, its type arguments."""
    yield annotation
    for inner in typing.get_args(annotation):
        if not isinstance(inner, str):
            yield from parts_of(inner)


def models_in(annotation: Any) -> list[type[Strict]]:
    return [part for part in parts_of(annotation) if isinstance(part, type) and issubclass(part, Strict)]


def typed_dicts_in(annotation: Any) -> list[Any]:
    return [part for part in parts_of(annotation) if is_typeddict(part)]


def tags(annotation: Any) -> set[str]:
    """Return the literal strings that a field `type` or `role` may have."""
    return {value for part in parts_of(annotation) for value in typing.get_args(part) if isinstance(value, str)}


def unsorted(schema: Any, models: list[type[Strict]], path: str, visited: set[Any]) -> Iterator[str]:
    """Yield the fields of one of OpenAI's typed dicts, and of objects nested in it, that no model classifies."""
    hints = get_type_hints(schema)
    for tag in ("type", "role"):
        reads = [tags(model.model_fields[tag].annotation) for model in models if tag in model.model_fields]
        if tag in hints and reads and not tags(hints[tag]) & set().union(*reads):
            return  # objects of this type are refused or left out, whatever they hold
    if (schema, tuple(models)) in visited:
        return
    visited.add((schema, tuple(models)))
    for name, hint in hints.items():
        having = [model for model in models if name in sorted_names(model)]
        if not having:
            yield f"{path}.{name}"
        for model in having:
            if name in model.model_fields and name not in model.refused and name not in model.accepted:
                inner = [kind for kind in models_in(model.model_fields[name].annotation) if kind is not OtherTool]
                for nested in typed_dicts_in(hint) if inner else ():
                    yield from unsorted(nested, inner, f"{path}.{name}", visited)


@pytest.mark.parametrize(
    ("schema", "model"),
    [
        (openai_completions.CompletionCreateParamsBase, CompletionRequest),
        (openai_chats.CompletionCreateParamsBase, ChatRequest),
        (openai_responses.ResponseCreateParamsBase, ResponsesRequest),
        (anthropic_messages.MessageCreateParamsBase, MessagesRequest),
        (anthropic_counts.MessageCountTokensParams, CountTokensRequest),
        (anthropic_beta_messages.MessageCreateParamsBase, MessagesRequest),
        (anthropic_beta_counts.MessageCountTokensParams, CountTokensRequest),
    ],
)
def test_every_field_of_the_schemas_is_sorted(schema: Any, model: type[Strict]) -> None:
    visited: set[Any] = set()
    assert list(unsorted(schema, [model], "", visited)) == []
    assert len(visited) > 2 or model is CompletionRequest, "nothing nested was looked at"


@pytest.mark.parametrize(
    ("names", "model"),
    [
        (VLLM, CompletionRequest),
        (VLLM + VLLM_CHAT, ChatRequest),
        (VLLM_RESPONSES, ResponsesRequest),
        (VLLM_TOKENIZE, TokenizeRequest),
        ("model tokens", DetokenizeRequest),
    ],
)
def test_every_field_of_vllm_s_schemas_is_sorted(names: str, model: type[Strict]) -> None:
    assert [name for name in names.split() if name not in sorted_names(model)] == []


REFUSED = [(kind, body, name) for kind, body in REQUESTS for name in kind.refused]


@pytest.mark.parametrize(("kind", "body", "name"), REFUSED, ids=lambda value: value if isinstance(value, str) else "")
def test_what_is_not_implemented_is_refused_unless_it_asks_for_nothing(
    kind: type[Strict], body: dict[str, Any], name: str
) -> None:
    defaults = kind.refused[name].defaults
    numeric = any(isinstance(default, int | float) for default in defaults)
    for value in (None, [], {}, "", *defaults, *(() if numeric else (0, False))):
        assert not kind.model_validate(body | {name: value})._unknown
    opposites = [not default for default in defaults if isinstance(default, bool)]
    for value in ("something", 17, [1], {"a": 1}, *opposites):
        error = refusal(kind, body | {name: value})
        assert (error["param"], error["code"]) == (name, "unsupported_parameter")
        assert error["message"].startswith(f"{name}: not implemented by this server; ")


def test_a_boolean_is_no_number_among_defaults() -> None:
    assert refusal(CompletionRequest, COMPLETION | {"best_of": True})["param"] == "best_of"
    assert refusal(CompletionRequest, COMPLETION | {"best_of": 0})["param"] == "best_of"
    CompletionRequest.model_validate(COMPLETION | {"best_of": 1})


@pytest.mark.parametrize(("kind", "body"), REQUESTS)
def test_what_changes_nothing_is_accepted(kind: type[Strict], body: dict[str, Any]) -> None:
    for name in kind.accepted:
        for value in (None, "x", 5, True, ["x"], {"a": {"b": 1}}):
            assert not kind.model_validate(body | {name: value})._unknown


@pytest.mark.parametrize(("kind", "body"), REQUESTS)
def test_only_false_says_that_nothing_is_learnt(kind: type[Strict], body: dict[str, Any]) -> None:
    def learn(**fields: Any) -> bool:
        request = kind.model_validate(body | fields)
        assert isinstance(request, GenerationRequest)
        return request.sampling_params(5).learn

    assert all(learn(**{name: value}) for name in ("store", "learn") for value in (None, True))
    assert not any((learn(store=False), learn(learn=False), learn(store=True, learn=False), learn(cache_salt="mine")))
    assert all(refusal(kind, body | {name: "no"})["param"] == name for name in ("store", "learn"))


# What real clients were observed to send: cases/README.md, section E.
COMMON: list[dict[str, Any]] = [
    {"metadata": {"user": "1"}, "client_metadata": {"a": "b"}, "store": True, "user": "me", "service_tier": "flex"},
    {"prompt_cache_key": "k", "prompt_cache_retention": "24h", "safety_identifier": "s"},
    {"seed": -1, "stop": [], "logit_bias": {}, "bad_words": [], "stream_options": {"include_usage": True}},
    {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0, "n": 1, "presence_penalty": 0},
    {"repetition_penalty": 1.0, "min_tokens": 0, "ignore_eos": False, "skip_special_tokens": True, "stream": False},
    {"structured_outputs": {}, "response_format": None, "priority": 0, "spaces_between_special_tokens": True},
    {"include_stop_str_in_output": False, "use_beam_search": False, "length_penalty": 1.0, "request_id": "r"},
]
ONLY_COMPLETIONS: list[dict[str, Any]] = [
    {"echo": False, "best_of": 1, "suffix": None, "logprobs": None, "stop": [str(i) for i in range(32)]},
    {"logprobs": False, "suffix": "", "stop": "x"},
]
ONLY_CHATS: list[dict[str, Any]] = [
    {"tools": [], "tool_choice": "auto", "functions": [], "function_call": None, "parallel_tool_calls": True},
    {"top_logprobs": 0, "logprobs": False, "verbosity": "low", "modalities": ["text"], "audio": None},
    {"reasoning_effort": "high", "stop": [str(i) for i in range(32)], "prediction": {"type": "content"}},
    {"max_tokens": None, "max_completion_tokens": None, "chat_template_kwargs": {}, "continue_final_message": False},
    {"tools": [{"type": "web_search"}, {"type": "custom", "custom": {"name": "x"}}], "tool_choice": "auto"},
]
ONLY_RESPONSES: list[dict[str, Any]] = [
    {"reasoning": {"summary": "auto", "effort": None}, "include": ["reasoning.encrypted_content"], "text": {}},
    {"tools": [{"type": "web_search", "x": 1}, {"type": "namespace", "name": "n", "tools": []}], "truncation": "auto"},
    {"text": {"verbosity": "medium", "format": {"type": "text"}}, "background": False, "max_output_tokens": None},
    {"previous_response_id": None, "conversation": None, "prompt": None, "max_tool_calls": 3, "n": 1},
]


@pytest.mark.parametrize(
    ("kind", "body", "fields"),
    [(kind, body, fields) for kind, body in REQUESTS for fields in COMMON]
    + [(CompletionRequest, COMPLETION, fields) for fields in ONLY_COMPLETIONS]
    + [(ChatRequest, CHAT, fields) for fields in ONLY_CHATS]
    + [(ResponsesRequest, RESPONSE, fields) for fields in ONLY_RESPONSES],
)
def test_what_clients_send_passes(kind: type[Strict], body: dict[str, Any], fields: dict[str, Any]) -> None:
    UnknownFields(strict=True).check(kind.model_validate(body | fields))


CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
MESSAGES: list[tuple[dict[str, Any], str]] = [  # message, and its text for the template
    ({"role": "user", "content": "x", "name": "me", "cache_control": {"type": "ephemeral"}}, "x"),
    ({"role": "user", "content": [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}]}, "x"),
    ({"role": "user", "content": None}, ""),
    ({"role": "user", "content": []}, ""),
    ({"role": "assistant", "content": [], "tool_calls": [CALL | {"index": 0, "provider_specific_fields": {}}]}, ""),
    ({"role": "assistant", "content": None, "tool_calls": None, "function_call": None, "refusal": None}, ""),
    ({"role": "assistant", "content": None, "refusal": "no"}, "no"),
    ({"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}, "no"),
    ({"role": "assistant", "content": "x", "audio": None, "annotations": [], "id": "1", "status": "done"}, "x"),
    ({"role": "assistant", "content": "x", "reasoning": "why", "provider_specific_fields": {"a": 1}}, "x"),
    ({"role": "assistant", "tool_calls": [CALL]}, ""),
    ({"role": "tool", "tool_call_id": "c", "content": None, "name": "f"}, ""),
]


@pytest.mark.parametrize(("message", "text"), MESSAGES)
def test_messages_of_clients_pass(message: dict[str, Any], text: str) -> None:
    body = ChatRequest.model_validate(CHAT | {"messages": [message]})
    UnknownFields(strict=True).check(body)
    (rendered,) = [message.for_template() for message in body.messages]
    assert content_text(normalize_message(rendered)) == text
    assert rendered.get("name") == message.get("name")
    assert rendered.get("reasoning_content") == message.get("reasoning")
    assert not {"refusal", "reasoning", "cache_control", "id", "status"} & set(rendered)


def test_tools_that_are_no_functions_are_left_out_with_a_line_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    function = {"type": "function", "name": "f", "parameters": {"type": "object"}}
    body = RESPONSE | {"tools": [{"type": "web_search"}, function], "tool_choice": "required"}
    request = ResponsesRequest.model_validate(body)
    assert [tool.name for tool in request.tool_use.allowed] == ["f"]
    policy = UnknownFields(strict=False)
    with caplog.at_level(logging.WARNING):
        policy.check(request)
        policy.check(request)
    (record,) = caplog.records
    assert "'web_search' are ignored" in record.getMessage()


PARTS = [{"type": "text", "text": "x"}, {"type": "text", "text": "y", "hue": 2}]
UNKNOWN: dict[str, tuple[dict[str, Any], str]] = {  # path -> request fields that contain it, its name in the log
    "color": ({"color": 1}, "color"),
    "messages[0].content[1].hue": (
        {"messages": [{"role": "user", "content": PARTS}]},
        "messages[].content[].hue",
    ),
    "tools[0].function.shade": (
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"free": True}, "shade": 4}}]},
        "tools[].function.shade",
    ),
    "stream_options.tint": ({"stream_options": {"tint": 3}}, "stream_options.tint"),
}


@pytest.mark.parametrize("path", UNKNOWN)
def test_a_field_of_no_schema_is_ignored_with_one_warning(path: str, caplog: pytest.LogCaptureFixture) -> None:
    fields, logged = UNKNOWN[path]
    policy = UnknownFields(strict=False)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            policy.check(ChatRequest.model_validate(CHAT | fields))
    (record,) = caplog.records
    assert record.getMessage().startswith(f"request: {logged} is an unknown field and is ignored")


@pytest.mark.parametrize("path", UNKNOWN)
def test_a_strict_server_refuses_it_by_name(path: str) -> None:
    with pytest.raises(ApiError) as caught:
        UnknownFields(strict=True).check(ChatRequest.model_validate(CHAT | UNKNOWN[path][0]))
    error = caught.value.body["error"]
    assert (caught.value.status, error["param"], error["code"]) == (400, path, "unknown_parameter")


def test_warnings_are_bounded_and_printable(caplog: pytest.LogCaptureFixture) -> None:
    policy = UnknownFields(strict=False)
    with caplog.at_level(logging.WARNING):
        policy.check(CompletionRequest.model_validate(COMPLETION | {"a\n\x1b[31mb\ud800": 1, "x" * 5000: 1}))
        for number in range(2 * MAX_WARNINGS):
            policy.check(CompletionRequest.model_validate(COMPLETION | {f"f{number}": 1}))
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == MAX_WARNINGS + 1
    assert "no more" in messages[-1]
    assert all(message.isascii() and message.isprintable() and len(message) < 400 for message in messages)


def test_every_model_of_a_request_has_the_tables() -> None:
    visited: list[type] = []
    stack: list[type] = [*(kind for kind, _ in REQUESTS), CountTokensRequest, TokenizeRequest, DetokenizeRequest]
    while stack:
        model = stack.pop()
        assert issubclass(model, Strict), model
        visited.append(model)
        for field in model.model_fields.values():
            kinds = [kind for kind in parts_of(field.annotation) if isinstance(kind, type)]
            stack += [kind for kind in kinds if issubclass(kind, BaseModel) and kind not in visited]
    assert len(set(visited)) > 20


def test_the_warning_says_what_a_field_of_other_servers_is_here(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        UnknownFields(strict=False).check(ChatRequest.model_validate(CHAT | {"num_speculative_tokens": 3}))
    assert "ignored; the server calls it proposer.max_draft_tokens, in a request speculative.max_draft" in caplog.text
