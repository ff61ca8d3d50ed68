"""Masks over HTTP that together leave no token: a 400 beforehand where that can be known, else an error at the end."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.harness import MODEL, Server, named_events
from tests.server.test_call_round_trip import events_of

MESSAGES = [{"role": "user", "content": "hi"}]
LETTER, OTHER = "q", "z"  # which this tokenizer has as tokens, alone and doubled as two


def one(server: Server, text: str) -> int:
    (token,) = server.ids(text)
    return token


def send_everywhere(server: Server, **fields: Any) -> list[Any]:
    body = {"model": MODEL, **fields}
    return [
        server.complete(**fields),
        server.post("/v1/chat/completions", body | {"messages": MESSAGES}),
        server.post("/v1/responses", body | {"input": "hi"}),
        server.post("/v1/messages", body | {"messages": MESSAGES, "max_tokens": 20}),
    ]


@pytest.mark.parametrize("stream", [False, True])
def test_what_can_be_known_beforehand_is_a_400(server: Server, stream: bool) -> None:
    letter, end = one(server, LETTER), server.engine.end_tokens[0]
    for fields in (
        {"allowed_token_ids": [letter], "bad_words": [LETTER]},
        {"allowed_token_ids": [letter, one(server, OTHER)], "bad_words": [LETTER, OTHER]},
        {"allowed_token_ids": [end], "min_tokens": 5},
        {"allowed_token_ids": [letter], "stop_token_ids": [letter], "min_tokens": 5},
        {"allowed_token_ids": [letter], "structured_outputs": {"choice": [OTHER]}},
        {"allowed_token_ids": [letter], "bad_words": [LETTER], "n": 2},
    ):
        for response in (
            send_everywhere(server, **fields, stream=stream)
            if "n" not in fields
            else [server.complete(**fields, stream=stream)]
        ):
            assert response.status_code == 400, response.text
            error = response.json()["error"]
            assert "no token can come first: allowed_token_ids, " in error["message"]
            assert error.get("param", "allowed_token_ids") == "allowed_token_ids"


@pytest.mark.parametrize("drafts", [True, False])
@pytest.mark.parametrize("structured", [False, True])
def test_what_shows_later_ends_the_answer_with_an_error(server: Server, drafts: bool, structured: bool) -> None:
    """A bad word of two tokens, alone and under a grammar: one letter may come, and then nothing."""
    letter = one(server, LETTER)
    assert server.ids(LETTER * 2) == [letter] * 2
    fields: dict[str, Any] = {"allowed_token_ids": [letter], "bad_words": [LETTER * 2]}
    fields |= {"speculative": {"enabled": drafts}}
    if structured:
        fields["structured_outputs"] = {"regex": f"{LETTER}{{3}}"}
    for response in send_everywhere(server, **fields):
        assert response.status_code == 400, response.text
        error = response.json()["error"]
        assert "no token can follow: allowed_token_ids, bad_words" in error["message"]
        assert error.get("code", "no_token_allowed") == "no_token_allowed"
    completion, chat, response, message = send_everywhere(server, **fields, stream=True)
    for events in (events_of(completion.text), events_of(chat.text)):
        *pieces, last = events
        shown = [piece["choices"][0].get("text") or piece["choices"][0]["delta"].get("content") for piece in pieces]
        assert "".join(text or "" for text in shown) == LETTER
        assert last["error"]["code"] == "no_token_allowed"
    for events in (named_events(response.text), named_events(message.text)):
        assert events[-1]["type"] == "error"
        assert "no token can follow" in str(events[-1])
    assert server.complete(max_tokens=2).status_code == 200


def test_masks_beside_a_grammar(server: Server) -> None:
    letter, other = one(server, LETTER), one(server, OTHER)
    fields: dict[str, Any] = {"structured_outputs": {"regex": f"[{LETTER}{OTHER}x]{{4}}"}, "temperature": 0}
    both = server.complete(**fields, allowed_token_ids=[letter, other], bad_words=[LETTER * 2]).json()["choices"][0]
    assert both["finish_reason"] == "stop"
    assert len(both["text"]) == 4
    assert set(both["text"]) <= {LETTER, OTHER}
    assert LETTER * 2 not in both["text"]
