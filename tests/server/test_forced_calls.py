"""Forced calls with the added tokens of published tokenizers: each mark is written as its token, whatever its flags."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tests.conftest import VOCAB_SIZE, MakeTarget
from tests.server.harness import MODEL, MakeServer, Server
from tests.server.talking import style_folder
from tests.server.test_call_round_trip import chat_message, content_of, content_of_items, response_items
from tests.server.test_tools import ADD, NOW, PARAMETERS
from tests.vocabularies import FAMILIES, MOST_ADDED, write_family

FORCED: dict[str, Any] = {"temperature": 1.0, "seed": 3}
TOOLS = [ADD, NOW]


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def family_server(
    make_target_folder: MakeTarget, make_server: MakeServer, tmp_path_factory: pytest.TempPathFactory, family: str
) -> Iterator[Server]:
    source = make_target_folder(seed=5, num_hidden_layers=2, vocab_size=VOCAB_SIZE + MOST_ADDED)
    folder = write_family(family, tmp_path_factory.mktemp(family), source=source)
    styled: Path = style_folder(folder, FAMILIES[family][1], tmp_path_factory.mktemp("styled"))
    with make_server(target=styled, proposer="ngram") as server:
        yield server


@pytest.fixture(scope="module")
def no_space(family_server: Server) -> dict[str, Any]:
    """Return a bias against white space, with which a random model would fill its output."""
    return {"logit_bias": {str(token): -100 for form in (" ", "\n", "\t", "\r") for token in family_server.ids(form)}}


def check(calls: list[tuple[str, str]], names: set[str], *, most: int) -> None:
    assert 1 <= len(calls) <= most
    for name, arguments in calls:
        assert name in names
        jsonschema.validate(json.loads(arguments), PARAMETERS if name == "add" else {"maxProperties": 0})


def test_a_call_can_be_forced_at_every_endpoint(family_server: Server, family: str, no_space: dict[str, Any]) -> None:
    """Streamed for every other family."""
    fields, stream = FORCED | no_space, list(FAMILIES).index(family) % 2 == 1
    for choice, names, most in (("required", {"add", "now"}, 8), ("named", {"add"}, 1)):
        named: Any = {"type": "function", "function": {"name": "add"}} if choice == "named" else choice
        message, reason = chat_message(
            family_server, stream=stream, **fields, tools=TOOLS, tool_choice=named, max_tokens=400
        )
        content, calls = content_of(message)
        assert (content, reason) == ("", "tool_calls")
        check(calls, names, most=most)
        flat: Any = {"type": "function", "name": "add"} if choice == "named" else choice
        tools = [{"type": "function", **tool["function"]} for tool in TOOLS]
        items = response_items(family_server, stream=stream, **fields, tools=tools, tool_choice=flat)
        content, of_response = content_of_items(items)
        assert (content, of_response) == ("", calls)  # the same prompt, grammar and seed
        anthropic = {
            "tools": [
                {"name": tool["function"]["name"], "input_schema": tool["function"]["parameters"]} for tool in TOOLS
            ],
            "tool_choice": {"type": "tool", "name": "add"} if choice == "named" else {"type": "any"},
        }
        messages = [{"role": "user", "content": "What is 1+2?"}]
        body = {"model": MODEL, "messages": messages, "max_tokens": 400, **fields, **anthropic}
        response = family_server.post("/v1/messages", body)
        assert response.status_code == 200, response.text
        assert response.json()["stop_reason"] == "tool_use"
        blocks = response.json()["content"]
        assert [(block["name"], block["input"]) for block in blocks] == [(n, json.loads(a)) for n, a in calls]


def test_marks_are_single_tokens_and_drafts_change_nothing(
    family_server: Server, family: str, no_space: dict[str, Any]
) -> None:
    body = {
        **{"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "tools": TOOLS, "tool_choice": "required"},
        **{"max_tokens": 400, "return_token_ids": True},
        **(FORCED | no_space),
    }
    ids = [
        family_server.post("/v1/chat/completions", body | {"speculative": {"enabled": enabled}}).json()["choices"][0]
        for enabled in (True, False)
    ]
    assert ids[0]["token_ids"] == ids[1]["token_ids"]
    backend = family_server.service.tokenizer.backend
    marks = [mark for mark in family_server.service.tool_style.marks if mark in dict(FAMILIES[family][0])]
    assert marks
    if FAMILIES[family][1] != "llama3":  # whose forced calls are bare
        assert backend.token_to_id(marks[0]) in ids[0]["token_ids"]


def test_a_client_s_grammar_refers_to_tokens_by_name(family_server: Server, family: str) -> None:
    """A name in quotes, in a regular expression or in a comment is text."""
    backend = family_server.service.tokenizer.backend
    for mark, _ in FAMILIES[family][0][1:]:
        if mark.startswith("<"):
            pattern = mark.replace("|", "[|]").replace("/", r"\/")
            lark = f'start: {mark} "a{mark}" /b{pattern}/ // {mark}\n'
            fields = {"structured_outputs": {"grammar": lark}, "return_token_ids": True, "skip_special_tokens": False}
            response = family_server.complete(**fields, max_tokens=100, **FORCED)
            assert response.status_code == 200, response.text
            (choice,) = response.json()["choices"]
            assert choice["text"] == f"{mark}a{mark}b{mark}"
            assert choice["token_ids"].count(backend.token_to_id(mark)) == 1


def test_a_number_in_a_forced_call_ends(family_server: Server) -> None:
    digits = {str(token): 100 for text in "0123456789" for token in family_server.ids(text)}
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema | {"additionalProperties": False}}}
    fields: dict[str, Any] = {"temperature": 0, "logit_bias": digits, "max_tokens": 200, "tools": [tool]}
    for parallel in (True, False):
        choice: dict[str, Any] = {"tool_choice": "required", "parallel_tool_calls": parallel}
        message, _ = chat_message(family_server, stream=parallel, **fields, **choice)
        calls = [arguments for _, arguments in content_of(message)[1] if arguments.endswith("}")]
        assert calls
        for arguments in calls:
            assert 1 <= len(str(json.loads(arguments)["n"])) <= 50


@pytest.mark.parametrize("field", ["choice", "json", "regex", "grammar", "name"])
def test_the_text_of_an_added_token_is_text_elsewhere(
    family_server: Server, family: str, no_space: dict[str, Any], field: str
) -> None:
    """In a client's grammar, a schema or a tool's parameters it is spelled in ordinary tokens, never an error."""
    for mark, _ in FAMILIES[family][0]:
        text = f"a{mark}b"
        grammar: Any = {"choice": [text], "json": {"const": text}, "grammar": f'start: "{text}"'}
        grammar["regex"] = "".join(f"\\{letter}" if letter in "[]/" else f"[{letter}]" for letter in text)
        schema = {"type": "object", "properties": {text: {"enum": [mark]}}, "required": [text]}
        if field == "name":
            tool = {
                "type": "function",
                "function": {"name": "f", "parameters": schema | {"additionalProperties": False}},
            }
            message, reason = chat_message(
                family_server,
                **{"stream": False, "tools": [tool], "tool_choice": "required", "parallel_tool_calls": False},
                **{"max_tokens": 200, **FORCED, **no_space},
            )
            assert reason == "tool_calls"
            assert json.loads(content_of(message)[1][0][1]) == {text: mark}
            continue
        response = family_server.complete(structured_outputs={field: grammar[field]}, max_tokens=100, **FORCED)
        assert response.status_code == 200, response.text
        expected = json.dumps(text, ensure_ascii=False) if field == "json" else text
        assert response.json()["choices"][0]["text"] == expected


def test_reasoning_marks_that_are_special_tokens_are_read(
    make_target_folder: MakeTarget, make_server: MakeServer, tmp_path: Path
) -> None:
    """As marks of calls are: what a tokenizer drops from its texts by default is kept where a parser needs it."""
    source = make_target_folder(seed=5, num_hidden_layers=2, vocab_size=VOCAB_SIZE + MOST_ADDED)
    added = ((("<|im_end|>", True), ("<think>", True), ("</think>", True)), "hermes")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(FAMILIES, "special thoughts", added)
        folder = write_family("special thoughts", tmp_path, source=source)
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}<think>")
    with make_server(target=folder, proposer="ngram") as server:
        end, letter = server.ids("</think>") + server.ids("q")
        fields = {"allowed_token_ids": [end, letter], "bad_words": ["</think></think>", "q</think>"], "max_tokens": 5}
        body = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "logit_bias": {str(end): 100}, **fields}
        message = server.post("/v1/chat/completions", body | {"temperature": 0}).json()["choices"][0]["message"]
        assert (message.get("reasoning_content"), message["content"]) == (None, "qqqq")
        thinking = {"logit_bias": {str(letter): 100}, "bad_words": ["qqq"]} | {"temperature": 0}
        message = server.post("/v1/chat/completions", body | thinking).json()["choices"][0]["message"]
        assert message["reasoning_content"] == "qq"
