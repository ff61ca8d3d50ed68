"""OpenAI's Python client against the server, used as users do."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest

from infer.request import SamplingParams
from tests.server.harness import MODEL, MakeServer, Server

SAMPLING: dict[str, Any] = {"temperature": 1.0, "seed": 7}
MESSAGES: list[Any] = [{"role": "user", "content": "wrap this text"}]
FULL: dict[str, Any] = {"ignore_eos": True}  # exactly max_tokens tokens, whatever the random target generates


def test_completion(client: openai.OpenAI) -> None:
    completion = client.completions.create(
        model=MODEL, prompt="def wrap(text):", max_tokens=20, **SAMPLING, extra_body=FULL
    )
    assert completion.object == "text_completion"
    assert completion.model == MODEL
    (choice,) = completion.choices
    assert (choice.index, choice.finish_reason, choice.logprobs) == (0, "length", None)
    assert completion.usage is not None
    assert completion.usage.completion_tokens == 20
    assert completion.usage.total_tokens == completion.usage.prompt_tokens + 20


def test_the_text_is_the_engine_s_own(client: openai.OpenAI, plain_engine: Any) -> None:
    """Speculation, batching and the server do not change the output."""
    options = FULL | {"return_token_ids": True}
    completion = client.completions.create(
        model=MODEL, prompt="def f(x):", max_tokens=24, **SAMPLING, extra_body=options
    )
    (expected,) = plain_engine.generate(["def f(x):"], SamplingParams(1.0, seed=7, max_tokens=24, ignore_eos=True))
    assert completion.choices[0].text == expected.text
    assert completion.choices[0].to_dict()["token_ids"] == expected.token_ids


@pytest.mark.parametrize("sampling", [SAMPLING, {"temperature": 0}, {"temperature": 0.7, "top_p": 0.9, "seed": 3}])
def test_streamed_text_is_the_text(client: openai.OpenAI, sampling: dict[str, Any]) -> None:
    request: dict[str, Any] = {"model": MODEL, "prompt": "class Text", "max_tokens": 40, **sampling}
    full = client.completions.create(**request).choices[0]
    chunks = list(client.completions.create(**request, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == full.text
    reasons = [chunk.choices[0].finish_reason for chunk in chunks]
    assert reasons == [None] * (len(chunks) - 1) + [full.finish_reason]
    assert len({chunk.id for chunk in chunks}) == 1


def test_streamed_chat_is_the_chat(client: openai.OpenAI) -> None:
    request: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "max_tokens": 40, **SAMPLING}
    full = client.chat.completions.create(**request)
    chunks = list(client.chat.completions.create(**request, stream=True, stream_options={"include_usage": True}))
    deltas = [chunk.choices[0].delta for chunk in chunks[:-1]]
    assert (deltas[0].role, deltas[0].content) == ("assistant", "")
    assert "".join(delta.content or "" for delta in deltas) == full.choices[0].message.content
    assert full.choices[0].message.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-2]] == [None] * (len(chunks) - 2)
    assert chunks[-2].choices[0].finish_reason == full.choices[0].finish_reason
    assert chunks[-1].choices == []
    for usage in (chunks[-1].usage, full.usage):
        assert usage is not None
        usage.prompt_tokens_details = None  # the second request hits the first one's prefix in the cache
    assert chunks[-1].usage == full.usage
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_chat_goes_through_the_template(client: openai.OpenAI) -> None:
    chat = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_completion_tokens=12, **SAMPLING)
    plain = client.completions.create(
        model=MODEL, prompt="# user: wrap this text\n# assistant:", max_tokens=12, **SAMPLING
    )
    assert chat.choices[0].message.content == plain.choices[0].text
    parts: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "wrap this text"}]}]
    again = client.chat.completions.create(model=MODEL, messages=parts, max_tokens=12, **SAMPLING)
    assert again.choices == chat.choices


def test_a_chat_without_max_tokens_may_fill_the_context(server: Server, client: openai.OpenAI) -> None:
    long: list[Any] = [{"role": "user", "content": "é" * 220}]  # two tokens each
    completion = client.chat.completions.create(model=MODEL, messages=long, **SAMPLING, extra_body=FULL)
    assert completion.choices[0].finish_reason == "length"
    assert completion.usage is not None
    assert completion.usage.prompt_tokens > 440
    assert completion.usage.total_tokens == server.engine.context


@pytest.mark.parametrize("stream", [False, True])
def test_prompts_in_every_form(client: openai.OpenAI, tiny_tokenizer: Any, stream: bool) -> None:
    texts = ["def f(", "import os\n", "é€"]
    ids = [tiny_tokenizer.encode(text) for text in texts]

    def texts_of(prompt: Any) -> list[str]:
        request: dict[str, Any] = {"model": MODEL, "prompt": prompt, "max_tokens": 10, **SAMPLING}
        if not stream:
            choices = client.completions.create(**request).choices
            assert [choice.index for choice in choices] == list(range(len(choices)))
            return [choice.text for choice in choices]
        outputs = [""] * len(texts)
        ended = []
        for chunk in client.completions.create(**request, stream=True):
            outputs[chunk.choices[0].index] += chunk.choices[0].text
            ended += [chunk.choices[0].index] * (chunk.choices[0].finish_reason is not None)
        assert len(ended) == len(set(ended))
        return [text for index, text in enumerate(outputs) if index in ended]

    expected = [text for prompt in texts for text in texts_of(prompt)]
    assert texts_of(texts) == expected
    assert texts_of(ids) == expected
    assert texts_of(ids[0]) == expected[:1]


def test_a_random_seed_is_returned_and_repeats_the_text(client: openai.OpenAI) -> None:
    request: dict[str, Any] = {"model": MODEL, "prompt": "for ", "max_tokens": 16}
    first, second = (client.completions.create(**request).to_dict() for _ in range(2))
    assert first["seed"] != second["seed"]
    again = client.completions.create(**request, seed=first["seed"])  # type: ignore[arg-type]
    assert again.to_dict()["choices"] == first["choices"]
    streamed = next(iter(client.completions.create(**request, seed=5, stream=True)))
    assert streamed.to_dict()["seed"] == 5


def test_a_stop_token_ends_the_text_and_is_no_part_of_it(
    client: openai.OpenAI, plain_engine: Any, tiny_tokenizer: Any
) -> None:
    (free,) = plain_engine.generate(["return "], SamplingParams(1.0, seed=7, max_tokens=30, ignore_eos=True))
    stop = free.token_ids[12]
    end = free.token_ids.index(stop)
    completion = client.completions.create(
        model=MODEL, prompt="return ", max_tokens=30, **SAMPLING, extra_body={**FULL, "stop_token_ids": [stop]}
    )
    assert completion.choices[0].finish_reason == "stop"
    assert completion.choices[0].text == tiny_tokenizer.decode(free.token_ids[:end])
    assert completion.usage is not None
    assert completion.usage.completion_tokens == end + 1


def test_speculation_is_counted_in_usage(client: openai.OpenAI, make_server: MakeServer) -> None:
    request: dict[str, Any] = {"model": MODEL, "prompt": "x = 1\n" * 8, "max_tokens": 40, "temperature": 0}
    usage = client.completions.create(**request, extra_body=FULL).usage
    assert usage is not None
    details = usage.completion_tokens_details
    assert details is not None
    assert details.accepted_prediction_tokens is not None
    assert details.rejected_prediction_tokens is not None
    assert details.rejected_prediction_tokens > 0
    assert 0 <= details.accepted_prediction_tokens < 40
    with make_server(proposer="none") as plain:
        plain_usage = plain.openai.completions.create(**request, extra_body=FULL).usage
    assert plain_usage is not None
    assert plain_usage.completion_tokens == 40
    assert plain_usage.completion_tokens_details is None


def test_models(client: openai.OpenAI, server: Server) -> None:
    (card,) = client.models.list().data
    assert (card.id, card.object) == (MODEL, "model")
    assert card.to_dict()["max_model_len"] == server.engine.context
    assert client.models.retrieve(MODEL) == card
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-4")


def test_errors_are_openai_s(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        client.completions.create(model="gpt-4", prompt="x")
    assert (unknown.value.code, unknown.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError) as unsupported:
        client.completions.create(model=MODEL, prompt="x", best_of=2)
    assert (unsupported.value.code, unsupported.value.param) == ("unsupported_parameter", "best_of")
    with pytest.raises(openai.BadRequestError) as streamed:
        client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=10**6, stream=True)
    assert streamed.value.code == "context_length_exceeded"


def test_many_at_once_get_what_each_gets_alone(server: Server) -> None:
    """More requests than the engine's batch, streaming and not, from the asynchronous client."""
    seeds = range(12)

    async def complete(client: openai.AsyncOpenAI, seed: int) -> str:
        request: dict[str, Any] = {"model": MODEL, "prompt": f"# {seed}\n", "max_tokens": 24, "seed": seed}
        if seed % 2:
            return (await client.completions.create(**request)).choices[0].text
        stream = await client.completions.create(**request, stream=True)
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def gather() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(complete(client, seed) for seed in seeds))

    async def one_by_one() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            return [await complete(client, seed) for seed in seeds]

    assert asyncio.run(gather()) == asyncio.run(one_by_one())
