"""A conversation is encoded to the same ids over HTTP, in training, in evaluation and in generate.py."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from infer.console.show import prompt_ids
from models.tokenizer import Tokenizer
from tests.chats import ANSWER, CONVERSATIONS, LOOK, RESULT, TEMPLATES, USER, calling, with_templates
from tests.server.harness import MODEL, Server
from train.config import FilesDataConfig
from train.data.dialogue import provided_dialogue
from train.data.examples import parse_row
from train.data.prompts import Reader

LONGEST = 4000


@pytest.fixture
def speak(server: Server, tiny_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Return `speak(family)`, which makes the server's tokenizer use the family's templates and returns it."""

    def speak(family: str) -> Tokenizer:
        tokenizer = with_templates(tiny_tokenizer, family)
        monkeypatch.setattr(server.service, "tokenizer", tokenizer)
        monkeypatch.setattr(server.service, "max_characters", 100_000)
        return tokenizer

    return speak


def as_sent(message: dict[str, Any]) -> dict[str, Any]:
    """Return the message as a client sends it, with the arguments of calls as JSON text."""
    calls = [
        {**call, "function": {**call["function"], "arguments": as_text(call["function"]["arguments"])}}
        for call in message.get("tool_calls", ())
    ]
    return {**message, "tool_calls": calls} if calls else message


def as_text(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments)


def served(server: Server, messages: list[dict[str, Any]], tools: Any = None) -> list[int] | None:
    """Return the prompt's ids, or None if the server refuses the conversation because its template does."""
    body = {"messages": [as_sent(message) for message in messages]} | ({"tools": tools} if tools else {})
    response = server.post("/tokenize", body)
    if response.status_code == 400:
        assert response.json()["error"]["code"] == "chat_template", response.text
        return None
    assert response.status_code == 200, response.text
    return response.json()["tokens"]


def trained(row: dict[str, Any], tokenizer: Tokenizer, folder: Path) -> list[list[int]]:
    """Return the first prompts as training, evaluation and benchmarks read them from a file."""
    path = folder / "rows.jsonl"
    path.write_text(json.dumps(row), encoding="utf-8")
    data = FilesDataConfig(name="files", path=str(path), max_prompt_tokens=LONGEST)
    return Reader(data, tokenizer, LONGEST, 8).read_prompts()


@pytest.mark.parametrize("family", TEMPLATES)
def test_a_prompt_is_the_same_in_serving_and_in_training(
    family: str, server: Server, speak: Any, tmp_path: Path
) -> None:
    tokenizer, compared = speak(family), 0
    for name, conversation in CONVERSATIONS.items():
        messages, tools = conversation["messages"], conversation.get("tools")
        if messages[-1]["role"] == "assistant":
            continue
        # the first prompt ends at the first assistant message that calls no tool
        first = next((n for n, m in enumerate(messages) if m["role"] == "assistant" and "tool_calls" not in m), None)
        prompt = served(server, messages[:first], tools)
        if prompt is None:
            with pytest.raises(ValueError, match="no usable prompt"):
                trained(conversation, tokenizer, tmp_path)
            continue
        assert [prompt] == trained(conversation, tokenizer, tmp_path), name
        compared += 1
    assert compared >= 4


# Not minimax, whose prompt opens a reasoning span, nor hermes, whose history ends a tool result differently.
@pytest.mark.parametrize("family", ["deepseek", "glm4moe", "llama3_1", "mistral", "qwen2_5", "qwen3"])
def test_every_answer_is_learnt_behind_the_prompt_that_is_served(family: str, server: Server, speak: Any) -> None:
    tokenizer = speak(family)
    messages = [USER, calling(json.dumps({"city": "Zürich"})), RESULT, ANSWER, USER, {**ANSWER, "content": "Rain."}]
    row = {"messages": messages, "tools": json.dumps([LOOK])}
    _, example = parse_row(row, FilesDataConfig(name="files", path="x", responses="given"), tokenizer)
    rows = provided_dialogue(example, tokenizer, LONGEST).rows
    for index, message in enumerate(messages):
        if message["role"] == "assistant":
            prompt = served(server, messages[:index], [LOOK])
            assert prompt is not None
            learnt = [r for r in rows if r.ids[: len(prompt)] == prompt and len(r.ids) > len(prompt)]
            assert any(r.loss_mask[len(prompt)] and not r.loss_mask[len(prompt) - 1] for r in learnt), index


def test_chats_responses_and_generate_have_the_same_prompt(server: Server, speak: Any) -> None:
    tokenizer = speak("qwen2_5")
    expected = tokenizer.apply_chat_template([USER])
    body = {"model": MODEL, "messages": [USER], "max_tokens": 2, "return_token_ids": True}
    assert server.post("/v1/chat/completions", body).json()["prompt_token_ids"] == expected
    assert served(server, [USER]) == expected
    response = server.post("/v1/responses", {"model": MODEL, "input": USER["content"], "max_output_tokens": 2}).json()
    assert response["usage"]["input_tokens"] == len(expected)
    assert prompt_ids(USER["content"], tokenizer, chat=True) == expected
    assert prompt_ids(USER["content"], tokenizer, chat=False) == tokenizer.encode(USER["content"])
    assert prompt_ids(USER["content"], tokenizer, chat=None) == expected
    plain = Tokenizer(tokenizer.backend)
    assert prompt_ids(USER["content"], plain, chat=None) == plain.encode(USER["content"])
    with pytest.raises(ValueError, match="chat=true: .*has no chat template"):
        prompt_ids("x", plain, chat=True)


def test_tools_keep_the_order_in_which_they_were_sent(server: Server, speak: Any, tmp_path: Path) -> None:
    tokenizer, function = speak("qwen2_5"), LOOK["function"]
    turned = {"type": "function", "function": {name: function[name] for name in ("parameters", "name", "description")}}
    ids = served(server, [USER], [turned])
    assert ids != served(server, [USER], [LOOK])
    assert [ids] == trained({"messages": [USER], "tools": [turned]}, tokenizer, tmp_path)
    assert json.dumps(turned, ensure_ascii=False) in tokenizer.decode(ids or [], with_special=True)


def test_tokenize_takes_what_a_chat_takes(server: Server, speak: Any) -> None:
    tokenizer = speak("qwen3")
    for fields, options in (
        ({"add_generation_prompt": False}, {"generation_prompt": False}),
        ({"chat_template_kwargs": {"enable_thinking": False}}, {"enable_thinking": False}),
    ):
        response = server.post("/tokenize", {"messages": [USER], **fields})
        assert response.json()["tokens"] == tokenizer.apply_chat_template([USER], **options)
    response = server.post("/tokenize", {"prompt": "x", "tools": [LOOK]})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "tools")
