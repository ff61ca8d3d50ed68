"""A server stops at every end token named in its target's files and reports the stop reason as vLLM does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.gguf_writing import Kind, write_gguf
from tests.server import patient
from tests.server.harness import MODEL, MakeServer, Server
from tests.server.test_wire import read_events
from tests.vocabularies import TURN_END, TURN_START, write_chat_ml, write_end_tokens

OF_CONFIG, OF_GENERATION, OF_TOKENIZER = 5, 9, 0  # as Llama 3 Instruct: one token ends texts, two end turns
ENDS = (OF_CONFIG, OF_GENERATION, OF_TOKENIZER)
WORD = 70


@pytest.fixture(scope="module")
def instruct(
    make_server: MakeServer, tiny_target_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("instruct")
    write_end_tokens(tiny_target_folder, folder, OF_CONFIG, [OF_CONFIG, OF_GENERATION])
    with make_server(target=folder, proposer="ngram") as server:
        yield server


def chat(server: Server, **fields: Any) -> httpx.Response:
    messages = [{"role": "user", "content": "hi"}]
    return server.post("/v1/chat/completions", {"model": MODEL, "messages": messages, **fields})


def ending(choice: dict[str, Any]) -> tuple[str, Any]:
    return choice["finish_reason"], choice["stop_reason"]


@pytest.mark.parametrize("end", ENDS)
def test_any_of_them_ends_an_answer(instruct: Server, end: int) -> None:
    """`stop_reason` is null for the tokenizer's eos_token and the token id for any other end token."""
    expected = "stop", None if end == OF_TOKENIZER else end
    forced = {"allowed_token_ids": [end], "max_tokens": 9}
    for send in (instruct.complete, lambda **fields: chat(instruct, **fields)):
        response = send(**forced).json()
        (choice,) = response["choices"]
        assert ending(choice) == expected
        assert (choice["text"] if "text" in choice else choice["message"]["content"]) == ""
        assert response["usage"]["completion_tokens"] == 1
        last = read_events(send(**forced, stream=True).text)[-1]["choices"][0]
        assert ending(last) == expected


@pytest.mark.parametrize("end", ENDS)
def test_what_heeds_them_heeds_all(instruct: Server, end: int) -> None:
    favoured: dict[str, Any] = {"logit_bias": {str(end): 100}, "temperature": 0, "return_token_ids": True}
    forced = favoured | {"allowed_token_ids": [end, WORD], "max_tokens": 6}
    (choice,) = instruct.complete(**forced, min_tokens=2).json()["choices"]
    assert choice["token_ids"] == [WORD, WORD, end]
    (choice,) = instruct.complete(**forced, ignore_eos=True).json()["choices"]
    assert (choice["token_ids"], ending(choice)) == ([end] * 6, ("length", None))
    (choice,) = instruct.complete(**forced, ignore_eos=True, stop_token_ids=[end]).json()["choices"]
    assert (choice["token_ids"], ending(choice)) == ([end], ("stop", end))
    unlikely = {str(token): -100 for token in ENDS if token != end}
    structured = favoured | {"logit_bias": {str(end): 100} | unlikely, "structured_outputs": {"regex": "[ab]{2,5}"}}
    (choice,) = instruct.complete(**structured, max_tokens=9).json()["choices"]
    assert (choice["token_ids"][-1], choice["finish_reason"], len(choice["text"])) == (end, "stop", 2)


def test_they_are_listed(instruct: Server) -> None:
    assert sorted(patient.get(f"{instruct.url}/tokenizer_info").json()["eos_token_ids"]) == sorted(ENDS)


@pytest.fixture(scope="module", params=["gguf", "gguf, as text", "folder", "folder, not special"])
def unnamed(
    request: pytest.FixtureRequest,
    make_server: MakeServer,
    tiny_target_folder: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Server]:
    """A target whose files name <|endoftext|> alone, while its chat template ends every turn with <|im_end|>."""
    plain = "text" not in request.param and "not" not in request.param
    target = write_chat_ml(tiny_target_folder, tmp_path_factory.mktemp("unnamed"), special=plain)
    if request.param.startswith("gguf"):
        folder, target = target, target / "target.gguf"
        write_gguf(folder, target, (Kind.F32,), tokenizer=True)
    with make_server(target=target, proposer="ngram") as server:
        yield server


def test_the_end_of_a_turn_that_no_file_names_ends_an_answer(unnamed: Server) -> None:
    assert set(unnamed.engine.end_tokens) == {0, TURN_END}
    assert set(unnamed.engine.tokenizer.eos_ids) == {0, TURN_END}
    favoured: dict[str, Any] = {"logit_bias": {str(TURN_END): 100}, "temperature": 0}
    chosen = favoured | {"return_token_ids": True, "allowed_token_ids": [TURN_END, WORD], "max_tokens": 6}
    (choice,) = chat(unnamed, **chosen).json()["choices"]
    assert (choice["message"]["content"], ending(choice)) == ("", ("stop", TURN_END))
    (choice,) = unnamed.complete(**chosen, min_tokens=2).json()["choices"]
    assert choice["token_ids"] == [WORD, WORD, TURN_END]
    structured = {"logit_bias": {str(TURN_END): 100, "0": -100}, "structured_outputs": {"regex": "[ab]{2,5}"}}
    (choice,) = unnamed.complete(**structured, temperature=0, max_tokens=9).json()["choices"]
    assert (choice["finish_reason"], len(choice["text"])) == ("stop", 2)


def test_the_template_writes_the_mark_as_one_token(unnamed: Server) -> None:
    ids = unnamed.post("/tokenize", {"messages": [{"role": "user", "content": "hi"}]}).json()["tokens"]
    assert [token for token in ids if token >= TURN_START] == [TURN_START, TURN_END, TURN_START]
