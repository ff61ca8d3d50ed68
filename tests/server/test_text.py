"""The text of completions with tokenizers that drop a text's first space, or that split characters into bytes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from infer.batch.grammar import Grammar
from infer.batch.params import SamplingParams
from infer.config import EngineConfig, ModelConfig, ProposerConfig
from infer.console.display import Display
from infer.engine import Engine
from tests.conftest import MakeTarget
from tests.server.harness import MODEL, MakeServer, Server
from tests.server.test_wire import read_events
from tests.vocabularies import MAKERS, SIZE, write_tokenizer
from train.data.dialogue import Dialogue
from train.data.examples import Example

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
PROMPT = "Hello"
MakeFolder = Callable[[str], Path]


@pytest.fixture(scope="module")
def make_folder(make_target_folder: MakeTarget, tmp_path_factory: pytest.TempPathFactory) -> MakeFolder:
    source = make_target_folder(seed=5, vocab_size=SIZE, num_hidden_layers=2)
    (source / "chat_template.jinja").write_text(TEMPLATE)
    return lambda kind: write_tokenizer(kind, tmp_path_factory.mktemp(kind), source=source)


@pytest.fixture(scope="module")
def llama(make_server: MakeServer, make_folder: MakeFolder) -> Iterator[Server]:
    with make_server(target=make_folder("llama"), proposer="ngram") as server:
        yield server


def token_of(server: Server, text: str) -> int:
    """Return the token whose bytes are this text inside a longer one."""
    return server.engine.tokenizer.token_bytes.index(text.encode() if text.isprintable() else text.encode("latin1"))


def complete(server: Server, path: str = "/v1/completions", **fields: Any) -> dict[str, Any]:
    """Return the one choice of a response, and check that it is the same when streamed."""
    body: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_tokens": 3, **fields}
    if path == "/v1/completions":
        body = {"prompt": PROMPT, **body}
    (choice,) = server.post(path, body).json()["choices"]
    events = read_events(server.post(path, body | {"stream": True}).text)
    parts = [event["choices"][0] for event in events]
    if path == "/v1/completions":
        assert "".join(part["text"] for part in parts) == choice["text"]
        offsets = [offset for part in parts if part["logprobs"] for offset in part["logprobs"]["text_offset"]]
        assert offsets == (choice["logprobs"] or {"text_offset": []})["text_offset"]
    else:
        assert "".join(part["delta"].get("content") or "" for part in parts) == choice["message"]["content"]
    assert (parts[-1]["finish_reason"], parts[-1]["stop_reason"]) == (choice["finish_reason"], choice["stop_reason"])
    return choice


def test_the_first_word_keeps_its_space(llama: Server) -> None:
    world = token_of(llama, " world")
    choice = complete(llama, allowed_token_ids=[world], logprobs=1)
    assert choice["text"] == " world world world"
    assert choice["logprobs"]["text_offset"] == [0, 6, 12]
    assert choice["logprobs"]["tokens"] == [" world"] * 3
    echoed = complete(llama, allowed_token_ids=[world], echo=True, logprobs=1)
    assert echoed["text"] == "Hello world world world"
    assert echoed["logprobs"]["text_offset"][-3:] == [5, 11, 17]
    assert echoed["logprobs"]["tokens"][-3:] == [" world"] * 3
    assert complete(llama, prompt=llama.engine.tokenizer.encode(PROMPT), echo=True, max_tokens=0)["text"] == PROMPT


def test_a_stop_string_is_looked_for_in_the_completion(llama: Server) -> None:
    forced: dict[str, Any] = {"allowed_token_ids": [token_of(llama, " world")], "logprobs": 0}
    choice = complete(llama, **forced, stop=[" wor"])
    assert (choice["text"], choice["stop_reason"], choice["finish_reason"]) == ("", " wor", "stop")
    choice = complete(llama, **forced, stop=["ld wor"], echo=True)
    assert (choice["text"], choice["stop_reason"]) == ("Hello wor", "ld wor")
    for elsewhere in ("lo wor", "Hello", "o w"):  # in the prompt, or over its end
        choice = complete(llama, **forced, stop=[elsewhere])
        assert (choice["text"], choice["finish_reason"]) == (" world world world", "length")


def test_a_character_that_a_prompt_leaves_unfinished(llama: Server) -> None:
    tokenizer = llama.engine.tokenizer
    ids = tokenizer.encode("Hello 🎉")[:-1]
    forced: dict[str, Any] = {"prompt": ids, "allowed_token_ids": [token_of(llama, "\x89")], "logprobs": 0}
    choice = complete(llama, **forced, max_tokens=1)
    assert choice["text"] == "🎉"
    assert complete(llama, **forced, max_tokens=1, stop=["🎉"])["stop_reason"] == "🎉"
    echoed = complete(llama, **forced, max_tokens=1, echo=True)
    assert echoed["text"] == "Hello 🎉"
    assert echoed["logprobs"]["text_offset"][-1] == len("Hello ")
    assert complete(llama, **forced, max_tokens=0, echo=True)["text"] == "Hello \ufffd\ufffd\ufffd"


def test_a_chat_s_first_word_is_vllm_s(llama: Server) -> None:
    """The template's header precedes it: the tokens decode as `[/INST] world`, so ` world` is the added text."""
    messages = [{"role": "user", "content": PROMPT}]
    chat = {"messages": messages, "allowed_token_ids": [token_of(llama, " world")], "logprobs": True}
    choice = complete(llama, "/v1/chat/completions", **chat)
    assert choice["message"]["content"] == " world world world"
    assert bytes(choice["logprobs"]["content"][0]["bytes"]) == b" world"


def test_a_prompt_that_the_tokenizer_does_not_write_back(llama: Server) -> None:
    """The prompt is echoed as it was sent, and text offsets are positions in it."""
    text = "<s>Hello  <s>world é"
    choice = complete(llama, prompt=text, echo=True, logprobs=0, allowed_token_ids=[token_of(llama, " world")])
    assert choice["text"] == text + " world" * 3
    assert choice["logprobs"]["text_offset"] == [0, 0, 3, 8, 9, 10, 13, 18, 19, 19, 20, 26, 32]


@pytest.mark.parametrize("kind", [kind for kind in MAKERS if kind != "llama"])
def test_text_goes_on_after_its_prompt(make_server: MakeServer, make_folder: MakeFolder, kind: str) -> None:
    with make_server(target=make_folder(kind), proposer="ngram") as server:
        tokenizer = server.engine.tokenizer
        prompt = tokenizer.encode(PROMPT)
        allowed = [token for token, text in enumerate(tokenizer.token_bytes) if text.isascii() and token > 2]
        fields = {"temperature": 1.5, "max_tokens": 12, "allowed_token_ids": allowed, "return_token_ids": True}
        for seed in range(2):
            echoed = complete(server, **fields, seed=seed, echo=True, logprobs=0)
            alone = complete(server, **fields, seed=seed)
            assert echoed["text"] == PROMPT + alone["text"]
            assert alone["text"] == tokenizer.decode(alone["token_ids"], context=prompt)
            offsets, names = (echoed["logprobs"][name][len(prompt) :] for name in ("text_offset", "tokens"))
            for offset, name in zip(offsets, names, strict=True):
                assert echoed["text"][offset:].startswith(name)


@pytest.fixture(scope="module")
def engine(make_folder: MakeFolder) -> Engine:
    settings = ProposerConfig(name="ngram", max_draft_tokens=3)
    return Engine.load(ModelConfig(name="x", path=str(make_folder("llama"))), None, EngineConfig(), settings)


def world_of(engine: Engine) -> int:
    assert engine.tokenizer is not None
    return engine.tokenizer.token_bytes.index(b" world")


def test_without_a_server(engine: Engine) -> None:
    """With Engine.generate and generate.py's display."""
    tokenizer = engine.tokenizer
    assert tokenizer is not None
    prompt, out = tokenizer.encode(PROMPT), StringIO()
    display = Display(tokenizer, [prompt], first=0, total=1, color=False, out=out)
    params = SamplingParams(max_tokens=3, allowed_token_ids=(world_of(engine),))
    (completion,) = engine.generate([prompt], params, on_output=display.on_output)
    assert completion.text == " world world world"
    assert out.getvalue() == PROMPT + " world world world"
    for stop in (" wor", "lo wor"):
        (completion,) = engine.generate([PROMPT], replace(params, stop=(stop,)))
        assert completion.text == ("" if stop == " wor" else " world world world")
        assert completion.stop_reason == (stop if stop == " wor" else None)


@pytest.mark.parametrize("text", [" world", "world", " é 🎉", "日本"])
def test_a_grammar_s_text_is_the_completion_s(engine: Engine, text: str) -> None:
    grammar = Grammar("choice", json.dumps([text]))
    (completion,) = engine.generate([PROMPT], SamplingParams(max_tokens=20, grammar=grammar))
    assert completion.text == text


def test_training_keeps_the_same_text(engine: Engine) -> None:
    tokenizer = engine.tokenizer
    assert tokenizer is not None
    world = world_of(engine)
    talk = ({"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"})
    dialogue = Dialogue(Example(messages=talk), tokenizer, longest_prompt=200)
    assert dialogue.next_prompt() is not None
    dialogue.take([world, world, *tokenizer.eos_ids[:1]])
    following = dialogue.next_prompt()
    assert following is not None
    assert tokenizer.decode(following) == "[INST] a [/INST] world world[INST] c [/INST]"
