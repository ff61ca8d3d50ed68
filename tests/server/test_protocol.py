"""The values that fields of completions and chats may have; everything else is refused with the field's name."""

from __future__ import annotations

import contextlib
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from infer.server.api.tokens import DetokenizeRequest, TokenizeRequest
from infer.server.protocol.chat import MAX_MESSAGES, MAX_PARTS, ChatRequest
from infer.server.protocol.completions import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_WORDS,
    MAX_BIASES,
    MAX_LOGPROBS,
    MAX_N,
    MAX_STOP_TOKEN_IDS,
    MAX_STOPS,
    CompletionRequest,
    GenerationRequest,
)
from infer.server.protocol.errors import from_validation
from infer.server.protocol.fields import Strict
from infer.server.protocol.messages import CountTokensRequest, MessagesRequest
from infer.server.protocol.responses import ResponsesRequest

REQUESTS = (
    ChatRequest, CompletionRequest, CountTokensRequest, DetokenizeRequest, MessagesRequest, ResponsesRequest,
    TokenizeRequest,
)  # fmt: skip
PLAIN: dict[str, Any] = {"model": "m", "prompt": "x"}
CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "x"}]}


def refusal(kind: type[GenerationRequest], body: Any) -> dict[str, Any]:
    with pytest.raises(ValidationError) as caught:
        kind.model_validate(body)
    error = from_validation(caught.value.errors(), body)
    assert error.status == 400
    return error.body["error"]


def test_a_boolean_is_no_number() -> None:
    assert refusal(CompletionRequest, PLAIN | {"n": True})["param"] == "n"
    assert refusal(CompletionRequest, PLAIN | {"echo": 0})["param"] == "echo"
    assert refusal(CompletionRequest, PLAIN | {"best_of": True})["param"] == "best_of"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("temperature", float("nan")),
        ("temperature", "1"),
        ("temperature", True),
        ("top_p", 0),
        ("top_p", 1.1),
        ("top_k", -2),
        ("top_k", 1.5),
        ("seed", -2),
        ("seed", 2**63),
        ("seed", 1.0),
        ("max_tokens", 0),
        ("max_tokens", "5"),
        ("stream", "yes"),
        ("stop_token_ids", [1] * (MAX_STOP_TOKEN_IDS + 1)),
        ("allowed_token_ids", []),
        ("allowed_token_ids", [1] * (MAX_ALLOWED_TOKEN_IDS + 1)),
        ("stop", ""),
        ("stop", ["a", ""]),
        ("stop", ["a"] * (MAX_STOPS + 1)),
        ("stop", ["a" * 2000]),
        ("stop", [1]),
        ("n", 0),
        ("n", MAX_N + 1),
        ("min_p", 1.5),
        ("presence_penalty", 2.5),
        ("frequency_penalty", float("inf")),
        ("repetition_penalty", 0),
        ("logit_bias", {"a": 1}),
        ("logit_bias", {"-1": 1}),
        ("logit_bias", {"1": 101}),
        ("logit_bias", {"1": None}),
        ("logit_bias", [1]),
        ("logit_bias", {str(token): 1 for token in range(MAX_BIASES + 1)}),
        ("bad_words", [""]),
        ("bad_words", ["a"] * (MAX_BAD_WORDS + 1)),
        ("logprobs", MAX_LOGPROBS + 1),
        ("logprobs", -1),
        ("prompt_logprobs", MAX_LOGPROBS + 1),
        ("min_tokens", -1),
        ("priority", 2**40),
        ("cache_salt", ""),
        ("timeout_s", 0),
        ("speculative", True),
        ("speculative", {"max_draft_tokens": 0}),
        ("speculative", {"max_draft_tokens": 64}),
        ("model", 5),
        ("prompt", ""),
        ("prompt", []),
        ("prompt", [[]]),
        ("prompt", ["a", 1]),
        ("prompt", [1, [2]]),
        ("prompt", [True]),
        ("prompt", [1.5]),
        ("prompt", {"text": "a"}),
        ("prompt", None),
    ],
)
def test_values_out_of_bounds_are_refused_by_name(field: str, value: Any) -> None:
    if (field, value) == ("prompt", ""):
        CompletionRequest.model_validate(PLAIN | {"prompt": ""})  # some tokenizers encode it as a begin token
        return
    error = refusal(CompletionRequest, PLAIN | {field: value})
    assert re.split(r"[.\[]", error["param"])[0] == field
    assert error["message"].startswith(field)


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "robot", "content": "x"}, "role"),
        ({"role": "tool", "content": "x"}, "tool_call_id"),
        ({"role": "user", "content": "x", "tool_call_id": "a"}, "tool_call_id"),
        ({"role": "user", "content": "x", "reasoning_content": "a"}, "reasoning_content"),
        ({"content": "x"}, "role"),
        ({"role": "user"}, "content"),
        ({"role": "user", "content": 5}, "content"),
        ({"role": "user", "content": [{"type": "text", "text": 5}]}, "content[0].text"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}, "content[0].type"),
        ({"role": "user", "content": "x", "name": 5}, "name"),
        ({"role": "assistant", "content": "x", "tool_calls": [{}]}, "tool_calls[0].id"),
        ({"role": "assistant", "function_call": {"name": "f", "arguments": ""}}, "function_call"),
        ("hello", ""),
    ],
)
def test_messages_are_checked(message: Any, param: str) -> None:
    expected = f"messages[0].{param}" if param else "messages[0]"
    assert refusal(ChatRequest, CHAT | {"messages": [message]})["param"] == expected


def test_an_answer_may_be_sent_back_as_openai_s_client_dumps_it() -> None:
    message = {"role": "assistant", "content": "x", "refusal": None, "annotations": [], "tool_calls": None}
    (parsed,) = ChatRequest.model_validate(CHAT | {"messages": [message]}).messages
    assert parsed.for_template() == {"role": "assistant", "content": "x"}


def test_lists_are_bounded() -> None:
    message, part = CHAT["messages"][0], {"type": "text", "text": "x"}
    ChatRequest.model_validate(CHAT | {"messages": [message] * MAX_MESSAGES})
    assert refusal(ChatRequest, CHAT | {"messages": [message] * (MAX_MESSAGES + 1)})["param"] == "messages"
    assert refusal(ChatRequest, CHAT | {"messages": []})["param"] == "messages"
    oversized = {"role": "user", "content": [part] * (MAX_PARTS + 1)}
    assert refusal(ChatRequest, CHAT | {"messages": [oversized]})["param"] == "messages[0].content"
    CompletionRequest.model_validate(PLAIN | {"stop_token_ids": [1] * MAX_STOP_TOKEN_IDS})


def unbounded(schema: Any, path: str = "") -> list[str]:
    """Return where a JSON schema has lists of any length."""
    if isinstance(schema, list):
        return [found for place, item in enumerate(schema) for found in unbounded(item, f"{path}/{place}")]
    if not isinstance(schema, dict):
        return []
    lists = [path] if schema.get("type") == "array" and "maxItems" not in schema else []
    return lists + [found for key, item in schema.items() for found in unbounded(item, f"{path}/{key}")]


@pytest.mark.parametrize("kind", REQUESTS)
def test_no_list_of_any_request_is_unbounded(kind: type[Strict]) -> None:
    assert unbounded({"type": "array", "items": {"type": "array", "maxItems": 1}}, "all") == ["all"]
    assert unbounded(kind.model_json_schema()) == []


def test_contradictions_are_refused() -> None:
    assert refusal(ChatRequest, CHAT | {"max_tokens": 1, "max_completion_tokens": 2})["param"] == "max_tokens"
    assert ChatRequest.model_validate(CHAT | {"max_tokens": 2, "max_completion_tokens": 2}).limit == 2
    assert refusal(ChatRequest, CHAT | {"top_logprobs": 2})["param"] == "top_logprobs"
    assert refusal(ChatRequest, CHAT | {"echo": True})["param"] == "echo"
    assert refusal(CompletionRequest, PLAIN | {"max_tokens": 0})["param"] == "max_tokens"
    assert CompletionRequest.model_validate(PLAIN | {"max_tokens": 0, "echo": True}).max_tokens == 0
    streamed = {"stream": True, "prompt_logprobs": 1}
    assert refusal(CompletionRequest, PLAIN | streamed)["param"] == "prompt_logprobs"


def test_defaults_are_openai_s() -> None:
    params = CompletionRequest.model_validate(PLAIN).sampling_params(16)
    assert (params.temperature, params.top_p, params.top_k, params.ignore_eos) == (1.0, 1.0, 0, False)
    assert params.seed is None  # the server draws one
    assert CompletionRequest.model_validate(PLAIN | {"top_k": -1}).sampling_params(1).top_k == 0
    assert CompletionRequest.model_validate(PLAIN | {"temperature": 0}).sampling_params(1).temperature == 0


def test_prompts_are_one_list_whatever_their_form() -> None:
    forms: list[tuple[Any, Any]] = [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1], [2]], [[1], [2]]),
    ]
    for prompt, expected in forms:
        assert CompletionRequest.model_validate(PLAIN | {"prompt": prompt}).prompts == expected


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
FIELDS = st.sampled_from(
    sorted({name for kind in (ChatRequest, CompletionRequest) for name in (*kind.model_fields, *kind.refused)})
)


@settings(max_examples=300, deadline=None)
@given(body=JSON | st.dictionaries(FIELDS, JSON, max_size=6))
def test_any_document_is_a_request_or_a_400(body: Any) -> None:
    for kind, base in ((CompletionRequest, PLAIN), (ChatRequest, CHAT)):
        for document in (body, {**base, **body} if isinstance(body, dict) else body):
            with contextlib.suppress(ValidationError):
                kind.model_validate(document)
                continue
            assert set(refusal(kind, document)) == {"message", "type", "param", "code"}
