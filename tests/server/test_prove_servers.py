"""scripts/prove.py asks running servers: what it shows of a sound one, of one with a planted fault, and of others."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from infer.options.cli import compose
from infer.sampling import choose
from scripts import prove
from scripts.proof.config import ProveConfig
from scripts.proof.servers.answers import Reply, compare, read_reply, summary
from tests.server.harness import MODEL

SWITCH = "plain_fields={speculative:{enabled:false}}"

Asked = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture(scope="module")
def url(make_server):
    with make_server(proposer="ngram") as running:
        yield running.url.rstrip("/")


@pytest.fixture
def asked(url, tmp_path, monkeypatch) -> Asked:
    """Return `asked(*overrides)`: runs the command on a tiny server; returns its exit code and what it wrote."""
    rows = [{"prompt": f"def name_{number}(a, b): return a, b, a, b, a, b, "} for number in range(4)]
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = [f"servers=[{url}]", "endpoint=completions", "num_prompts=4", "requests=[1,4]", "max_tokens=24"]
    words += [f"files=[{file}]", f"output_dir={tmp_path}", "fields={ignore_eos: true}"]

    def call(*overrides: str) -> tuple[int, dict[str, Any]]:
        monkeypatch.setattr("sys.argv", ["scripts/prove.py", *words, *overrides])
        code = 0
        try:
            prove.run(compose("prove", ProveConfig, sys.argv[1:]))
        except SystemExit as stop:
            code = int(stop.code or 0)
        written = tmp_path / "proofs" / f"server-{MODEL}"
        page = (written / "servers.html").read_text()
        assert not re.search(r"src=|href=|url\(|@import", page)
        return code, json.loads((written / "servers.json").read_text())

    return call


def test_a_sound_server(asked: Asked, capsys) -> None:
    code, record = asked(SWITCH)
    assert code == 0, record["said"]
    cells = record["cells"]
    assert [(each["sampling"], each["clients"], each["side"]) for each in cells] == [
        (sampling, clients, side)
        for sampling in ("greedy", "seeded")
        for clients in (1, 4)
        for side in ("plain", "drafted")
    ]
    assert all(each["answers"] == 4 and each["noise"] == 0.0 for each in cells)
    greedy = [each for each in cells if each["side"] == "drafted" and each["sampling"] == "greedy"]
    assert all(each["result"] == "equal" and 0 < each["accepted"] < each["drafted"] for each in greedy)
    assert all(": ids, " in said for said in record["servers"].values())
    assert capsys.readouterr().out.splitlines()[:2] == [
        "greedy, plain: no answer parts at up to 4 clients",
        "greedy, drafted: no answer parts at up to 4 clients",
    ]


def test_answers_that_depend_on_the_batch(asked: Asked, monkeypatch) -> None:
    exact = choose.sampled_parameters

    def keyed(requests, device, counts, *, drafting):
        result = exact(requests, device, counts, drafting=drafting)
        return replace(result, temperature=result.temperature * (1 + len(requests) / 4))

    monkeypatch.setattr(choose, "sampled_parameters", keyed)
    code, record = asked()
    assert code == 1
    together = [each for each in record["cells"] if each["clients"] == 4 and each["sampling"] == "seeded"]
    assert [each["side"] for each in together] == ["plain"]
    assert together[0]["parted"] > 0
    assert together[0]["shown"][0]["place"] >= 0
    assert record["said"][0] == "greedy, plain: no answer parts at up to 4 clients"
    assert re.fullmatch(r"seeded, plain: from 4 clients on answers part, \d of 4 at 4", record["said"][1])


def test_ctrl_c_leaves_what_was_asked(asked: Asked, monkeypatch, tmp_path) -> None:
    def interrupted(*parts):
        raise KeyboardInterrupt

    monkeypatch.setattr("scripts.proof.servers.answers.record", interrupted)
    with pytest.raises(KeyboardInterrupt):
        asked()
    record = json.loads((tmp_path / "proofs" / f"server-{MODEL}" / "servers.json").read_text())
    assert record["said"] == ["Incomplete: it was interrupted"]


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["servers=[http://127.0.0.1:9]"], "servers=http://127.0.0.1:9: does not answer /v1/models"),
        (["servers=[a,b,c]"], "give one address, or two"),
        (["plain_fields={temperature: 9}"], "/v1/completions: 400: .*temperature"),
        (["plain_fields=3"], "plain_fields=3: must be fields of a request"),
        (["endpoint=embeddings"], "endpoint=embeddings"),
        (["files=[none.jsonl]"], "none.jsonl: no such file"),
    ],
)
def test_what_is_wrong_is_said(asked: Asked, overrides: list[str], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        asked(*overrides)


VLLM = {
    "choices": [
        {
            "message": {"content": "Hi!"},
            "token_ids": [5, 6],
            "logprobs": {"content": [{"token": "Hi", "logprob": -0.5}, {"token": "!", "logprob": -1}]},
        }
    ]
}
LLAMA_CPP = {
    "choices": [
        {
            "message": {"content": "Hi!"},
            "logprobs": {
                "content": [{"id": 5, "token": "Hi", "logprob": -0.5}, {"id": 6, "token": "!", "logprob": -1}]
            },
        }
    ],
    "timings": {"draft_n": 4, "draft_n_accepted": 1},
}
TOKENS = {"choices": [{"text": "Hi!", "logprobs": {"tokens": ["Hi", "!"], "token_logprobs": [-0.5, -1]}}]}
TEXT = {"choices": [{"message": {"content": "Hi!"}, "logprobs": None}]}


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (VLLM, ("ids", Reply((5, 6), (-0.5, -1.0)))),
        (LLAMA_CPP, ("ids", Reply((5, 6), (-0.5, -1.0), (4, 1)))),
        (TOKENS, ("tokens", Reply(("Hi", "!"), (-0.5, -1.0)))),
        (TEXT, ("text", Reply(("H", "i", "!")))),
    ],
)
def test_answers_of_other_servers(body: dict[str, Any], expected: tuple[str, Reply]) -> None:
    assert read_reply(body) == expected


def test_where_answers_part() -> None:
    left = [Reply((1, 2, 3), (-1.0, -2.0, -3.0)), Reply((1, 2), (-1.0, -2.0)), Reply((1,), (-1.0,))]
    right = [Reply((1, 2, 4), (-1.0, -2.5, -3.25)), Reply((1, 2), (-1.0, -2.125)), Reply(error="gone")]
    partings, noise, other = compare(left, right)
    assert [tuple(each) for each in partings] == [(0, 2, 3, 3, 4, 0.25)]
    assert (noise, other) == (0.5, 1)
    (ended,), *_ = compare([Reply((1, 2))], [Reply((1,))])
    assert (ended.place, ended.expected, ended.got, ended.gap) == (1, 2, None, None)


def test_a_server_that_never_drafted_shows_nothing() -> None:
    cell = {"sampling": "greedy", "side": "drafted", "clients": 1, "answers": 4, "parted": 0, "other_logprobs": 0}
    idle = {**cell, "result": "not exercised", "drafted": 0}
    assert summary([idle])[0].endswith("; but nothing was drafted, accepted and rejected")
    assert summary([{**cell, "result": "equal", "drafted": None}])[0].endswith("; whether it drafted it does not say")
