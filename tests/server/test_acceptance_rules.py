"""Clients choose the acceptance rule of drafts and its thresholds; the server's seed fixes those of its requests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from infer.config import EngineConfig
from tests.server.harness import MODEL, MakeServer, Server

SAMPLED: dict[str, Any] = {"temperature": 1.0, "max_tokens": 40, "ignore_eos": True, "return_token_ids": True}


@pytest.fixture(scope="module")
def seeded(make_server: MakeServer) -> Iterator[Server]:
    with make_server(proposer="head", engine=EngineConfig(max_batch=4, seed=9, max_model_len=128)) as server:
        yield server


def drafted(server: Server, **fields: Any) -> tuple[list[int], float]:
    """Return a completion's ids and the share of its drafts that was accepted."""
    response = server.complete(**SAMPLED, seed=5, **fields).json()
    return response["choices"][0]["token_ids"], response["metrics"]["speculative_decoding"]["draft_acceptance_rate"]


def test_a_request_chooses_its_rule_and_thresholds(server: Server) -> None:
    exact, rate = drafted(server)
    assert drafted(server, acceptance="rejection") == drafted(server, acceptance="exact") == (exact, rate)
    _, everything = drafted(server, acceptance="typical", posterior_threshold=0)
    _, little = drafted(server, acceptance="typical", posterior_threshold=1, posterior_alpha=1)
    assert rate < everything > little
    assert everything > 0.9  # but for the last step
    messages = [{"role": "user", "content": "hi"}]
    body = {"model": MODEL, "messages": messages, **SAMPLED, "acceptance": "typical", "posterior_threshold": 0}
    chat = server.post("/v1/chat/completions", body).json()
    assert chat["metrics"]["speculative_decoding"]["draft_acceptance_rate"] > 0.9


@pytest.mark.parametrize(
    ("field", "value"),
    [("acceptance", "mostly"), ("acceptance", 1), ("posterior_threshold", 1.5), ("posterior_alpha", -1)],
)
def test_what_is_no_rule_is_a_400_that_names_the_field(server: Server, field: str, value: Any) -> None:
    response = server.complete(**{field: value})
    assert (response.status_code, response.json()["error"]["param"]) == (400, field)


def test_the_servers_seed_fixes_those_of_its_requests(seeded: Server, make_server: MakeServer) -> None:
    def answers(server: Server) -> list[tuple[int, list[list[int]]]]:
        bodies: list[dict[str, Any]] = [{}, {"n": 2}, {}]
        responses = [server.complete(**SAMPLED, **body).json() for body in bodies]
        return [(each["seed"], [choice["token_ids"] for choice in each["choices"]]) for each in responses]

    first = answers(seeded)
    assert len({seed for seed, _ in first}) == 3
    assert all(0 <= seed < 2**53 for seed, _ in first)  # a JavaScript number can represent it
    with make_server(proposer="head", engine=EngineConfig(max_batch=4, seed=9)) as again:
        assert answers(again) == first


def test_the_servers_context_is_the_one_that_was_set(seeded: Server) -> None:
    (model,) = seeded.openai.models.list().data
    assert model.model_extra is not None
    assert model.model_extra["max_model_len"] == 128
    response = seeded.complete(max_tokens=128)
    assert (response.status_code, response.json()["error"]["code"]) == (400, "context_length_exceeded")
