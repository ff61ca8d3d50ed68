"""Speculation over HTTP: chosen per request, counted in the response, and never visible in the text."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.harness import MODEL, MakeServer, Server
from tests.server.test_wire import read_events

BODY: dict[str, Any] = {"prompt": "x = 1\n" * 8, "max_tokens": 40, "temperature": 0, "ignore_eos": True}


def test_a_request_chooses_what_drafts_for_it(server: Server) -> None:
    responses = {
        name: server.complete(**BODY, speculative=choice).json()
        for name, choice in (
            ("default", None),
            ("off", {"enabled": False}),
            ("none", {"proposer": "none"}),
            ("ngram", {"proposer": "ngram"}),
            ("short", {"max_draft_tokens": 1}),
        )
    }
    assert len({response["choices"][0]["text"] for response in responses.values()}) == 1
    for name in ("off", "none"):
        assert "completion_tokens_details" not in responses[name]["usage"]
        assert "metrics" not in responses[name]
    assert responses["short"]["metrics"]["speculative_decoding"]["num_spec_tokens"] == 1
    assert responses["ngram"]["metrics"] != responses["default"]["metrics"]


def test_how_the_drafts_fared(server: Server) -> None:
    response = server.complete(**BODY, n=2).json()
    report, usage = response["metrics"]["speculative_decoding"], response["usage"]
    details = usage["completion_tokens_details"]
    assert report["num_accepted_draft_tokens"] == details["accepted_prediction_tokens"] > 0
    assert report["num_draft_tokens"] == sum(details.values())
    assert report["draft_acceptance_rate"] == report["num_accepted_draft_tokens"] / report["num_draft_tokens"]
    histogram = report["acceptance_histogram"]
    assert sum(histogram) == report["num_spec_steps"]
    assert sum(accepted * steps for accepted, steps in enumerate(histogram)) == report["num_accepted_draft_tokens"]
    # the first token of each output comes from prefill, which verifies nothing
    emitted = usage["completion_tokens"] - 2
    assert report["mean_acceptance_length"] == emitted / report["num_spec_steps"]


def test_the_report_ends_a_stream(server: Server) -> None:
    full = server.complete(**BODY).json()
    events = read_events(server.complete(**BODY, stream=True, stream_options={"include_usage": True}).text)
    assert events[-1]["choices"] == []
    assert events[-1]["metrics"] == full["metrics"]
    assert all("metrics" not in event for event in events[:-1])


@pytest.mark.parametrize("stop", [None, ["1"]])
def test_every_token_says_whether_it_was_drafted(server: Server, stop: list[str] | None) -> None:
    body = BODY | {"stop": stop, "speculative": {"detail": True}, "return_token_ids": True}
    (choice,) = server.complete(**body).json()["choices"]
    tokens = choice["tokens"]
    assert "".join(token["text"] for token in tokens) == choice["text"]
    assert [token["id"] for token in tokens] == choice["token_ids"]
    events = read_events(server.complete(**body, stream=True).text)
    streamed = [token for event in events for token in event["choices"][0].get("tokens", ())]
    assert streamed == tokens
    for event in events[:-1]:  # a step: accepted drafts by rising depth, then the bonus token
        depths = [token["accepted_depth"] for token in event["choices"][0]["tokens"]]
        assert depths in ([*range(1, len(depths)), 0], [*range(1, len(depths) + 1)])
    if stop is None:
        accepted = server.complete(**BODY).json()["usage"]["completion_tokens_details"]["accepted_prediction_tokens"]
        assert sum(token["accepted_depth"] > 0 for token in tokens) == accepted > 0


def test_a_server_without_a_proposer_may_be_asked_for_one(make_server: MakeServer) -> None:
    with make_server(proposer="none") as plain:
        before = plain.metrics()
        off = plain.complete(**BODY).json()
        assert "metrics" not in off
        assert "completion_tokens_details" not in off["usage"]
        on = plain.complete(**BODY, speculative={"proposer": "ngram"}).json()
        assert on["choices"][0]["text"] == off["choices"][0]["text"]
        assert on["metrics"]["speculative_decoding"]["num_draft_tokens"] > 0
        assert [name for name in before if "spec_decode" in name] == []
        assert plain.metrics()["vllm:spec_decode_num_drafts_total"] > 0


def test_chats_say_it_too(server: Server) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "x = 1\n" * 8}], "max_tokens": 20}
    response = server.post("/v1/chat/completions", body | {"temperature": 0, "speculative": {"detail": True}}).json()
    assert response["metrics"]["speculative_decoding"]["num_spec_steps"] > 0
    tokens = response["choices"][0]["tokens"]
    assert "".join(token["text"] for token in tokens) == response["choices"][0]["message"]["content"]
