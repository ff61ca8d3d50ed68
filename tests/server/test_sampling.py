"""Every sampling parameter has the same effect over HTTP as in the engine; log-probabilities, echo, several outputs."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from infer.batch.params import SamplingParams
from infer.config import EngineConfig
from infer.request import Request
from tests.server import patient
from tests.server.harness import MODEL, MakeServer, Server, slow_down, wait_until
from tests.server.test_wire import read_events

PROMPT = "def f("
BASE: dict[str, Any] = {"max_tokens": 24, "seed": 7, "ignore_eos": True}
# name -> fields of the request, parameters of the engine
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "top_k": ({"top_k": 5}, {"top_k": 5}),
    "top_p": ({"top_p": 0.5}, {"top_p": 0.5}),
    "min_p": ({"min_p": 0.3}, {"min_p": 0.3}),
    "presence": ({"presence_penalty": 1.5}, {"presence_penalty": 1.5}),
    "frequency": ({"frequency_penalty": -1.0}, {"frequency_penalty": -1.0}),
    "repetition": ({"repetition_penalty": 1.7}, {"repetition_penalty": 1.7}),
    "bias": ({"logit_bias": {"9": 8.5, "40": -50}}, {"logit_bias": {9: 8.5, 40: -50.0}}),
    "allowed": ({"allowed_token_ids": list(range(60, 90))}, {"allowed_token_ids": tuple(range(60, 90))}),
    "minimum": (
        {"min_tokens": 12, "stop_token_ids": list(range(1, 120))},
        {"min_tokens": 12, "stop_token_ids": tuple(range(1, 120))},
    ),
    "stop strings": ({"stop": ["e", "1"]}, {"stop": ("e", "1")}),
    "one stop string": ({"stop": "a"}, {"stop": ("a",)}),
    "greedy": ({"temperature": 0}, {"temperature": 0.0}),
}


def engine_text(plain_engine: Any, prompt: Any = PROMPT, **params: Any) -> Any:
    options = {"temperature": 1.0, "seed": 7, "max_tokens": 24, "ignore_eos": True} | params
    (completion,) = plain_engine.generate([prompt], SamplingParams(**options))
    return completion


@pytest.mark.parametrize("name", CASES)
def test_a_parameter_reaches_the_engine(server: Server, plain_engine: Any, name: str) -> None:
    """Speculation is on over HTTP and off in the reference; checked streamed and not."""
    fields, params = CASES[name]
    expected = engine_text(plain_engine, **params)
    response = server.complete(**BASE | fields, return_token_ids=True).json()
    (choice,) = response["choices"]
    assert (choice["text"], choice["token_ids"]) == (expected.text, expected.token_ids)
    assert (choice["finish_reason"], choice["stop_reason"]) == (expected.finish_reason, expected.stop_reason)
    assert response["usage"]["completion_tokens"] == len(expected.token_ids)
    if name != "one stop string":
        assert expected.token_ids != engine_text(plain_engine).token_ids  # otherwise this case shows nothing
    events = read_events(server.complete(**BASE | fields, return_token_ids=True, stream=True).text)
    choices = [event["choices"][0] for event in events]
    assert "".join(choice["text"] for choice in choices) == expected.text
    assert [token for choice in choices for token in choice.get("token_ids", ())] == expected.token_ids
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + [expected.finish_reason]


def test_bad_words_do_not_occur(server: Server) -> None:
    free = server.complete(**BASE).json()["choices"][0]["text"]
    bad_words = [word for word in ("e", "t", "s", "a", "i") if word in free]
    assert bad_words
    clean = server.complete(**BASE, bad_words=bad_words, return_token_ids=True).json()["choices"][0]
    forbidden = {token for word in bad_words for form in (word, " " + word) for token in server.ids(form)}
    assert set(clean["token_ids"]) & forbidden == set()


def test_logprobs_of_a_completion(server: Server, plain_engine: Any) -> None:
    expected = engine_text(plain_engine, logprobs=3)
    choice = server.complete(**BASE, logprobs=3).json()["choices"][0]
    logprobs = choice["logprobs"]
    assert logprobs["token_logprobs"] == [entry.logprob for entry in expected.logprobs]
    assert len(logprobs["tokens"]) == len(logprobs["text_offset"]) == 24
    for name, top, entry in zip(logprobs["tokens"], logprobs["top_logprobs"], expected.logprobs, strict=True):
        assert top[name] == entry.logprob
        assert sorted(top.values(), reverse=True)[:3] == [value for _, value in entry.top]
        assert len(top) in (3, 4)
    for name, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        if not name.startswith("bytes:") and "\ufffd" not in choice["text"]:
            assert choice["text"].startswith(name, offset)
    only_chosen = server.complete(**BASE, logprobs=0).json()["choices"][0]["logprobs"]
    assert only_chosen["top_logprobs"] is None
    assert only_chosen["token_logprobs"] == logprobs["token_logprobs"]


def test_streamed_logprobs_are_the_logprobs(server: Server) -> None:
    body = {**BASE, "logprobs": 2, "stop": ["e"], "temperature": 1.5}
    full = server.complete(**body).json()["choices"][0]["logprobs"]
    parts = [event["choices"][0]["logprobs"] for event in read_events(server.complete(**body, stream=True).text)]
    for key in full:
        assert [value for part in parts if part for value in part[key]] == full[key]


def test_logprobs_of_a_chat(server: Server) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], **BASE, "logprobs": True}
    plain = server.post("/v1/chat/completions", body).json()["choices"][0]
    assert all(entry["top_logprobs"] == [] for entry in plain["logprobs"]["content"])
    choice = server.post("/v1/chat/completions", body | {"top_logprobs": 2, "temperature": 0}).json()["choices"][0]
    content = choice["logprobs"]["content"]
    assert len(content) == 24
    assert b"".join(bytes(entry["bytes"]) for entry in content).decode(errors="replace") == choice["message"]["content"]
    for entry in content:  # greedy: the sampled token is the most likely
        assert len(entry["top_logprobs"]) == 2
        assert entry["top_logprobs"][0]["token"] == entry["token"]
    streamed = server.post("/v1/chat/completions", body | {"top_logprobs": 2, "temperature": 0, "stream": True}).text
    parts = [event["choices"][0]["logprobs"] for event in read_events(streamed)]
    assert [entry for part in parts if part for entry in part["content"]] == content


@pytest.mark.parametrize("as_ids", [False, True])
def test_echo_is_how_lm_eval_scores_a_text(server: Server, plain_engine: Any, as_ids: bool) -> None:
    """Token ids, one generated token that is discarded: the log-likelihoods of the prompt's tokens."""
    text = "import os\nprint(é)\n"
    ids = plain_engine.tokenizer.encode(text)
    expected = engine_text(plain_engine, text, max_tokens=1, temperature=0.0, prompt_logprobs=1, logprobs=1)
    body = {"max_tokens": 1, "temperature": 0, "logprobs": 1, "echo": True, "seed": 1234}
    response = server.complete(prompt=[ids, ids[:5]] if as_ids else text, **body).json()
    choice = response["choices"][0]
    logprobs = choice["logprobs"]
    assert logprobs["token_logprobs"][0] is logprobs["top_logprobs"][0] is None
    scores = [entry.logprob for entry in expected.prompt_logprobs]
    assert logprobs["token_logprobs"][1:-1] == scores
    assert len(logprobs["tokens"]) == len(ids) + 1
    assert choice["text"].startswith(text)
    for position in range(1, len(ids)):
        likeliest = max(logprobs["top_logprobs"][position], key=logprobs["top_logprobs"][position].get)
        assert (likeliest == logprobs["tokens"][position]) == (expected.prompt_logprobs[position - 1].rank == 1)
    if as_ids:
        assert response["choices"][1]["logprobs"]["token_logprobs"][1:-1] == scores[:4]
        assert response["usage"]["prompt_tokens"] == len(ids) + 5


def test_echo_and_no_token(server: Server) -> None:
    response = server.complete(prompt=PROMPT, max_tokens=0, echo=True, logprobs=1).json()
    (choice,) = response["choices"]
    assert (choice["text"], choice["finish_reason"]) == (PROMPT, "length")
    assert len(choice["logprobs"]["tokens"]) == response["usage"]["prompt_tokens"]
    assert response["usage"]["completion_tokens"] == 0
    events = read_events(server.complete(prompt=PROMPT, max_tokens=0, echo=True, stream=True).text)
    assert [event["choices"][0]["text"] for event in events] == [PROMPT, ""]


def test_echo_streams_the_prompt_first(server: Server) -> None:
    full = server.complete(**BASE, echo=True, logprobs=1).json()["choices"][0]
    events = read_events(server.complete(**BASE, echo=True, logprobs=1, stream=True).text)
    parts = [event["choices"][0] for event in events]
    assert parts[0]["text"].startswith(PROMPT)
    assert "".join(part["text"] for part in parts) == full["text"]
    offsets = [offset for part in parts if part["logprobs"] for offset in part["logprobs"]["text_offset"]]
    assert offsets == full["logprobs"]["text_offset"] == sorted(offsets)
    assert len(PROMPT) in offsets


def test_prompt_logprobs_are_vllm_s(server: Server, plain_engine: Any) -> None:
    expected = engine_text(plain_engine, prompt_logprobs=2).prompt_logprobs
    actual = server.complete(**BASE, prompt_logprobs=2).json()["choices"][0]["prompt_logprobs"]
    assert actual[0] is None
    for candidates, reference in zip(actual[1:], expected, strict=True):
        assert candidates[str(reference.token)]["logprob"] == reference.logprob
        assert candidates[str(reference.token)]["rank"] == reference.rank
        assert {1, 2} <= {entry["rank"] for entry in candidates.values()}
    body = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "max_tokens": 1, "prompt_logprobs": 1}
    assert server.post("/v1/chat/completions", body).json()["prompt_logprobs"][0] is None


@pytest.mark.parametrize("stream", [False, True])
def test_n_answers_to_each_prompt(server: Server, stream: bool) -> None:
    """Output i has seed + i; the prompt is counted once."""
    body: dict[str, Any] = {"prompt": ["for x in", "while "], **BASE, "n": 3, "stream": stream}
    if stream:
        events = read_events(server.complete(**body, stream_options={"include_usage": True}).text)
        texts, reasons, usage = [""] * 6, [], events[-1]["usage"]
        for event in events[:-1]:
            (choice,) = event["choices"]
            texts[choice["index"]] += choice["text"]
            reasons += [choice["index"]] * (choice["finish_reason"] is not None)
        assert sorted(reasons) == list(range(6))
    else:
        response = server.complete(**body).json()
        assert [choice["index"] for choice in response["choices"]] == list(range(6))
        texts, usage = [choice["text"] for choice in response["choices"]], response["usage"]
        assert response["seed"] == 7
    single = [
        server.complete(prompt=prompt, **BASE | {"seed": 7 + i}).json() for prompt in body["prompt"] for i in range(3)
    ]
    assert texts == [response["choices"][0]["text"] for response in single]
    assert usage["completion_tokens"] == 6 * 24
    assert usage["prompt_tokens"] == single[0]["usage"]["prompt_tokens"] + single[3]["usage"]["prompt_tokens"]


def test_the_usage_so_far_in_every_chunk(server: Server) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = read_events(server.complete(**BASE, stream=True, stream_options=options).text)
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts)
    assert counts[-1] == 24
    assert len(set(counts)) > 3


def test_a_prefix_that_is_known_is_counted(server: Server) -> None:
    before = server.metrics()
    prompt = "prefix " * 20 + str(before["vllm:prompt_tokens_total"])

    def cached(**fields: Any) -> int:
        usage = server.complete(prompt=prompt, ignore_eos=True, max_tokens=8, **fields).json()["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] < usage["prompt_tokens"]
        return usage["prompt_tokens_details"]["cached_tokens"]

    assert cached() == 0
    cached_tokens = cached()
    assert cached_tokens > 0
    assert cached(cache_salt="another tenant") == 0
    after = server.metrics()
    assert after["vllm:prefix_cache_hits_total"] - before["vllm:prefix_cache_hits_total"] == cached_tokens
    assert cached(n=2) == cached_tokens  # each prompt is counted once


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"allowed_token_ids": [10**6]}, "allowed_token_ids"),
        ({"logit_bias": {"99999": 1}}, "logit_bias"),
        ({"min_tokens": 30, "max_tokens": 20}, "min_tokens"),
        ({"echo": True, "prompt": [1, 10**6]}, "prompt"),
        ({"speculative": {"proposer": "oracle"}}, "speculative.proposer"),
    ],
)
def test_what_only_the_model_can_tell_is_a_400(server: Server, fields: dict[str, Any], param: str) -> None:
    response = server.complete(**{"max_tokens": 20, **fields})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


def test_priority_is_served_first(make_server: MakeServer) -> None:
    """A lower value goes first, as with vLLM. The engine says in which order requests ended: clients may hear late."""
    ended: list[int] = []
    with make_server(engine=EngineConfig(max_batch=1)) as server, ThreadPoolExecutor(4) as pool:
        forget = server.engine.speculator.forget

        def record(request: Request) -> None:
            if request.params.max_tokens == 4:
                ended.append(-request.params.priority)
            forget(request)

        server.engine.speculator.forget = record
        speed_up = slow_down(server)
        pool.submit(server.complete, max_tokens=250, ignore_eos=True)
        wait_until(lambda: server.metrics()["vllm:num_requests_running"] == 1)
        for waiting, priority in enumerate((5, 0, -5)):
            pool.submit(server.complete, max_tokens=4, ignore_eos=True, priority=priority)
            wait_until(lambda: server.metrics()["vllm:num_requests_waiting"] == waiting + 1)  # noqa: B023
        speed_up()
        wait_until(lambda: len(ended) == 3)
    assert ended == [-5, 0, 5]


def test_a_request_may_have_a_deadline_of_its_own(server: Server) -> None:
    response = server.complete(max_tokens=480, ignore_eos=True, timeout_s=0.01)
    assert (response.status_code, response.json()["error"]["code"]) == (504, "timeout")


def test_the_tokenizer(server: Server, plain_engine: Any) -> None:
    text = "x = 'é' # 日本\n"
    ids = plain_engine.tokenizer.encode(text)
    response = server.post("/tokenize", {"prompt": text, "return_token_strs": True}).json()
    assert (response["tokens"], response["count"], response["max_model_len"]) == (ids, len(ids), server.engine.context)
    assert len(response["token_strs"]) == len(ids)
    assert server.post("/detokenize", {"tokens": ids}).json() == {"prompt": text}
    messages = [{"role": "user", "content": "hi"}]
    chat = server.post("/tokenize", {"model": MODEL, "messages": messages}).json()["tokens"]
    assert chat == plain_engine.tokenizer.apply_chat_template(messages)
    info = patient.get(f"{server.url}/tokenizer_info").json()
    assert info["eos_token"] == "<|endoftext|>"
    assert server.post("/detokenize", {"tokens": [0]}).json() == {"prompt": info["eos_token"]}
    assert server.post("/tokenize", {"prompt": ""}).json()["tokens"] == []
    for path, body, status in (
        ("/tokenize", {}, 400),
        ("/tokenize", {"prompt": "x", "messages": messages}, 400),
        ("/tokenize", {"prompt": "x", "model": "gpt-4"}, 404),
        ("/tokenize", {"prompt": "x", "color": 1}, 200),
        ("/detokenize", {"tokens": [10**6]}, 400),
        ("/detokenize", {"tokens": [-1]}, 400),
        ("/detokenize", {"tokens": "x"}, 400),
    ):
        assert server.post(path, body).status_code == status, (path, body)


def test_version_and_ready(server: Server) -> None:
    assert patient.get(f"{server.url}/version").json()["version"]
    assert patient.get(f"{server.url}/ready").json() == {"status": "ready"}
