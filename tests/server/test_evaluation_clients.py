"""Clients that evaluate a model through its server: lm-eval's local-completions, and what `vllm bench serve` sends."""

from __future__ import annotations

import json
import string
from pathlib import Path
from typing import Any

import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalChatCompletion, LocalCompletionsAPI

from tests.server import patient
from tests.server.harness import MODEL, Server

PAIRS = [
    ("def wrap(text):", " return text"),
    ("class Text", "Wrapper:\n    pass"),
    ("# é and 日本", " are characters of several bytes"),
    ("", "from the first token on"),
]


@pytest.fixture(scope="module")
def reference(tiny_target_folder: Path) -> Any:
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM.from_pretrained(tiny_target_folder, dtype=torch.float32)


def reference_loglikelihood(reference: Any, ids: list[int], start: int) -> tuple[float, bool]:
    """Return transformers' log-likelihood of `ids[start:]` after `ids[:start]`, and whether that is the greedy text."""
    with torch.inference_mode():
        logprobs = reference(torch.tensor([ids])).logits[0, start - 1 : -1].log_softmax(-1)
    targets = torch.tensor(ids[start:])
    return float(logprobs.gather(1, targets[:, None]).sum()), bool((logprobs.argmax(-1) == targets).all())


def greedy_pair(server: Server, tokenizer: Any) -> tuple[str, str]:
    """Return a context and the text of the target's greedy next token, which the tokenizer encodes as that token."""
    for context in string.ascii_lowercase:
        options = {"max_tokens": 1, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        (choice,) = server.complete(prompt=context, **options).json()["choices"]
        if tokenizer.encode(context + choice["text"]) == [*tokenizer.encode(context), *choice["token_ids"]]:
            return context, choice["text"]
    raise AssertionError("no such token")


@pytest.mark.parametrize(
    ("tokenizer", "together"), [("auto", {"batch_size": 3}), ("huggingface", {"num_concurrent": 4})]
)
def test_lm_eval_s_loglikelihoods(
    server: Server, reference: Any, tiny_target_folder: Path, tiny_tokenizer: Any, tokenizer: str, together: Any
) -> None:
    """Log-likelihoods equal transformers' with speculation on; `auto` detects that this server tokenizes."""
    client = LocalCompletionsAPI(
        base_url=f"{server.url}/v1/completions",
        model=MODEL,
        tokenizer_backend=tokenizer,
        tokenizer=str(tiny_target_folder),
        max_length=server.engine.context,
        max_retries=1,
        **together,
    )
    assert client.tokenizer_backend == ("remote" if tokenizer == "auto" else tokenizer)
    pairs = [*PAIRS, greedy_pair(server, tiny_tokenizer)]
    instances = [Instance("loglikelihood", {}, pair, index) for index, pair in enumerate(pairs)]
    results = client.loglikelihood(instances, disable_tqdm=True)
    for (context, text), (actual, is_greedy) in zip(pairs, results, strict=True):
        before = tiny_tokenizer.encode(context) if context else [0]  # lm-eval prepends this token itself
        ids = tiny_tokenizer.encode(context + text)
        ids = ids if context else [0, *ids]
        expected, expected_is_greedy = reference_loglikelihood(reference, ids, len(before))
        assert actual == pytest.approx(expected, abs=1e-3)
        assert is_greedy == expected_is_greedy
    assert results[-1][1]


def test_lm_eval_generates(server: Server, tiny_target_folder: Path) -> None:
    arguments = ("def wrap(text):", {"until": ["\n"], "max_gen_toks": 24, "do_sample": False})
    client = LocalCompletionsAPI(
        base_url=f"{server.url}/v1/completions", model=MODEL, tokenizer=str(tiny_target_folder), max_retries=1
    )
    (text,) = client.generate_until([Instance("generate_until", {}, arguments, 0)], disable_tqdm=True)
    response = server.complete(prompt=arguments[0], max_tokens=24, temperature=0, stop=["\n"])
    assert text == response.json()["choices"][0]["text"]
    chat = LocalChatCompletion(base_url=f"{server.url}/v1/chat/completions", model=MODEL, max_retries=1)
    messages = chat.apply_chat_template([{"role": "user", "content": "wrap"}])
    instance = Instance("generate_until", {}, (messages, arguments[1]), 0)
    (text,) = chat.generate_until([instance], disable_tqdm=True)
    body = {"model": MODEL, "messages": [{"role": "user", "content": "wrap"}], "temperature": 0, "max_tokens": 24}
    response = server.post("/v1/chat/completions", body | {"stop": ["\n"]})
    assert text == response.json()["choices"][0]["message"]["content"]


@pytest.mark.parametrize(
    ("chat", "sampling"), [(False, {"temperature": 0.7, "top_p": 0.9, "top_k": 20, "min_p": 0.05}), (True, {})]
)
def test_what_vllm_bench_serve_sends(server: Server, chat: bool, sampling: dict[str, Any]) -> None:
    """The server accepts what its OpenAI back ends send and returns what they read: chunks, [DONE], usage, /metrics."""
    body: dict[str, Any] = {"model": MODEL, "stream": True, "stream_options": {"include_usage": True}}
    if chat:
        path, content = "/v1/chat/completions", [{"type": "text", "text": "wrap this"}]
        body |= {"messages": [{"role": "user", "content": content}], "max_completion_tokens": 30}
    else:
        path = "/v1/completions"
        body |= {"prompt": "wrap this", "repetition_penalty": 1.0, "max_tokens": 30, "logprobs": None}
    body |= {"ignore_eos": True, **sampling}
    drafts = "vllm:spec_decode_num_drafts_total"
    before = server.metrics()[drafts]
    headers = {"x-request-id": "bench-17", "authorization": "Bearer none"}
    response = patient.post(f"{server.url}{path}", json=body, headers=headers)
    assert response.status_code == 200, response.text
    assert response.headers["x-request-id"] == "bench-17"
    messages = response.text.removesuffix("\n\n").split("\n\n")
    assert messages.pop() == "data: [DONE]"
    chunks = [json.loads(message.removeprefix("data: ")) for message in messages]
    usage = chunks.pop()
    assert (usage["choices"], usage["usage"]["completion_tokens"]) == ([], 30)
    assert usage["usage"]["prompt_tokens"] > 0
    choices = [chunk["choices"][0] for chunk in chunks]  # the client reads choices[0] of each chunk unconditionally
    texts = [choice["delta"].get("content") if chat else choice["text"] for choice in choices]
    assert "".join(text or "" for text in texts)
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["length"]
    assert server.metrics()[drafts] > before
