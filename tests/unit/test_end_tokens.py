"""End tokens are one set, collected from three files; generation and training end at each of them."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from infer.batch.grammar import Grammar
from infer.batch.params import SamplingParams
from infer.config import EngineConfig, ModelConfig, ProposerConfig
from infer.console.card import describe_end_tokens
from infer.engine import Engine
from infer.settings.paths import REPO_ROOT
from models.config import TargetConfig
from models.end_tokens import ends_among, read_end_tokens
from models.targets import load_target
from models.tokenizer import Tokenizer
from tests.vocabularies import CHAT_ML, TURN_END, write_chat_ml, write_end_tokens
from train.data.dialogue import Dialogue
from train.data.examples import Example

OF_CONFIG, OF_GENERATION, OF_TOKENIZER = 5, 9, 0  # as Llama 3 Instruct: one that ends texts, two that end turns
ENDS = {OF_CONFIG, OF_GENERATION, OF_TOKENIZER}
WORD = 70
PROMPT = [11, 12, 13]

Write = Callable[..., Path]


@pytest.fixture(scope="module")
def write(tiny_target_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Write:
    """Return a function that copies the tiny target, with these end tokens in its files; None: the file names none."""

    def write(config: Any, generation: Any, *, tokenizer: bool = True) -> Path:
        folder = write_end_tokens(tiny_target_folder, tmp_path_factory.mktemp("ends"), config, generation)
        if not tokenizer:
            (folder / "tokenizer.json").unlink()
        return folder

    return write


@pytest.fixture(scope="module")
def folder(write: Write) -> Path:
    return write(OF_CONFIG, [OF_CONFIG, OF_GENERATION])


@pytest.fixture(scope="module")
def engine(folder: Path) -> Engine:
    settings = ProposerConfig(name="ngram", max_draft_tokens=3)
    return Engine.load(ModelConfig(name="x", path=str(folder), device="cpu"), None, EngineConfig(), settings)


def complete(engine: Engine, **params: Any) -> Any:
    (completion,) = engine.generate([PROMPT], SamplingParams(**{"max_tokens": 8, **params}))
    return completion


@pytest.mark.parametrize(
    ("config", "generation", "eos_id", "wanted"),
    [
        (2, None, None, {2}),
        (None, 2, None, {2}),
        (2, [2, 3], None, {2, 3}),
        ([2, 4], 3, 4, {2, 3, 4}),
        (None, None, 4, {4}),
        (None, None, None, set()),
        ([], [], None, set()),
    ],
)
def test_what_each_file_names(tmp_path: Path, config: Any, generation: Any, eos_id: int | None, wanted: Any) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 9, "eos_token_id": config}))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    ids = read_end_tokens(tmp_path, eos_id)
    assert (set(ids), len(ids)) == (wanted, len(wanted))


@pytest.mark.parametrize("value", [True, "2", [2, True], [2, "3"], [2, None], 2.0, {"id": 2}])
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_what_is_no_token_id_is_refused(write: Write, name: str, value: Any) -> None:
    folder = write(value, None) if name == "config.json" else write(2, value)
    for load in (Tokenizer.load, load_target):
        with pytest.raises(ValueError, match=rf"{name}: eos_token_id=.*must be a token id"):
            load(str(folder))
    with pytest.raises(ValueError, match="eos_token_id"):
        TargetConfig.from_json(json.loads((folder / "config.json").read_text()) | {"eos_token_id": value})


def test_an_id_outside_the_vocabulary_ends_nothing(write: Write, caplog: pytest.LogCaptureFixture) -> None:
    folder = write([OF_CONFIG, 10**6], -1)
    with caplog.at_level(logging.WARNING):
        tokenizer, target = Tokenizer.load(folder), load_target(str(folder))
    assert set(tokenizer.eos_ids) == {OF_CONFIG, OF_TOKENIZER}
    assert "config.json: eos_token_id: 1000000 is outside the vocabulary of 384" in caplog.text
    assert "generation_config.json: eos_token_id: -1 is outside" in caplog.text
    engine = Engine(target, tokenizer=tokenizer, proposer="none")
    assert complete(engine, min_tokens=4, max_tokens=4).finish_reason == "length"


def test_nothing_reads_config_json_s_alone() -> None:
    for package in ("infer", "train", "scripts"):
        for file in (REPO_ROOT / package).rglob("*.py"):
            assert "eos_token_ids" not in file.read_text(encoding="utf-8") or file.name == "tokens.py", file


def test_the_card_names_them(engine: Engine) -> None:
    assert set(engine.end_tokens) == ENDS
    assert engine.tokenizer is not None
    assert describe_end_tokens((0, 5), engine.tokenizer) == f"0 <|endoftext|>, 5 {engine.tokenizer.decode([5])}"
    assert "none" in describe_end_tokens((), engine.tokenizer)


@pytest.mark.parametrize("end", sorted(ENDS))
def test_any_of_them_ends_a_request(engine: Engine, end: int) -> None:
    """As in vLLM, the tokenizer's eos_token gives no stop reason and any other end token does."""
    completion = complete(engine, allowed_token_ids=(end,))
    reason = None if end == OF_TOKENIZER else end
    assert (completion.token_ids, completion.finish_reason, completion.stop_reason) == ([end], "stop", reason)
    assert completion.text == ""  # even if the end token is not special


@pytest.mark.parametrize("end", sorted(ENDS))
def test_min_tokens_and_ignore_eos_heed_all_of_them(engine: Engine, end: int) -> None:
    biased = {"allowed_token_ids": (end, WORD), "logit_bias": {end: 100.0}}
    completion = complete(engine, min_tokens=3, **biased)
    assert completion.token_ids == [WORD, WORD, WORD, end]
    assert complete(engine, ignore_eos=True, **biased).token_ids == [end] * 8
    ignored = complete(engine, ignore_eos=True, stop_token_ids=(end,), **biased)
    assert (ignored.token_ids, ignored.stop_reason) == ([end], end)  # here as the request's stop token


def test_a_request_s_own_stop_token(engine: Engine) -> None:
    for also in ((), (OF_TOKENIZER,)):
        completion = complete(engine, allowed_token_ids=(WORD,), stop_token_ids=(WORD, *also))
        assert (completion.token_ids, completion.text, completion.stop_reason) == ([WORD], "", WORD)
    completion = complete(engine, allowed_token_ids=(OF_TOKENIZER,), stop_token_ids=(OF_TOKENIZER,))
    assert completion.stop_reason is None  # as in vLLM, which checks for its EOS token first


@pytest.mark.parametrize("end", sorted(ENDS))
def test_a_finished_grammar_may_be_followed_by_any_of_them(engine: Engine, end: int) -> None:
    bias = {end: 100.0} | dict.fromkeys(ENDS - {end}, -100.0)
    completion = complete(engine, grammar=Grammar("regex", "[ab]{2,5}"), logit_bias=bias)
    assert completion.token_ids[-1] == end
    assert (completion.text[:2].strip("ab"), len(completion.text)) == ("", 2)


def test_a_target_without_a_tokenizer(write: Write) -> None:
    target = load_target(str(write(OF_CONFIG, [OF_CONFIG, OF_GENERATION], tokenizer=False)))
    engine = Engine(target, proposer="ngram")
    assert set(engine.end_tokens) == {OF_CONFIG, OF_GENERATION}
    for end in engine.end_tokens:
        completion = complete(engine, allowed_token_ids=(end,))
        assert (completion.token_ids, completion.stop_reason, completion.text) == ([end], end, None)


@pytest.mark.parametrize("end", sorted(ENDS))
def test_training_ends_a_turn_at_any_of_them(folder: Path, end: int) -> None:
    tokenizer = Tokenizer.load(folder)
    talk = ({"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"})
    dialogue = Dialogue(Example(messages=talk), tokenizer, longest_prompt=200)
    assert dialogue.next_prompt() is not None
    dialogue.take([*tokenizer.encode("yes"), end])
    following = dialogue.next_prompt()
    assert following is not None
    assert tokenizer.decode(following) == "# user: a\n# assistant: yes\n# user: c\n# assistant:"


def test_training_ends_a_turn_where_the_template_does(tiny_target_folder: Path, tmp_path: Path) -> None:
    """The files name <|endoftext|> alone; every turn of the template ends with <|im_end|>."""
    tokenizer = Tokenizer.load(write_chat_ml(tiny_target_folder, tmp_path))
    assert tokenizer.eos_ids == (0, TURN_END)
    talk = ({"role": "user", "content": "a"}, {"role": "assistant", "content": "b"})
    dialogue = Dialogue(Example(messages=talk), tokenizer, longest_prompt=200, provided=True)
    assert dialogue.next_prompt() is not None
    dialogue.take_provided()
    (row,) = dialogue.rows
    learnt = [token for token, is_learnt in zip(row.ids, row.loss_mask, strict=True) if is_learnt]
    assert learnt == [*tokenizer.encode("b"), TURN_END]


@pytest.mark.parametrize(
    ("template", "extra"),
    [
        (CHAT_ML.replace("<|im_end|>", ""), set()),  # it writes no mark
        (CHAT_ML.replace("<|im_end|>", "</answer>"), set()),  # it writes a text
        (CHAT_ML + "<|im_start|>assistant", {TURN_END}),  # it always begins the next turn
        ("{% if messages[1:] %}{{ raise_exception('one turn') }}{% endif %}{{ messages[0].content }}", set()),
        ("{{ no_function() }}", set()),
    ],
)
def test_only_a_mark_after_an_answer_ends_turns(
    template: str, extra: set[int], tiny_target_folder: Path, tmp_path: Path
) -> None:
    write_chat_ml(tiny_target_folder, tmp_path)
    (tmp_path / "chat_template.jinja").write_text(template)
    assert set(Tokenizer.load(tmp_path).eos_ids) == {0} | extra


def test_a_mark_that_ends_a_part_of_a_turn_is_no_end() -> None:
    """OpenAI's harmony closes the reasoning with <|end|>, and the answer with <|return|>."""
    assert ends_among({"<|end|>", "<|endoftext|>", "x"}) == ["<|end|>", "<|endoftext|>"]
    assert ends_among({"<|end|>", "<|return|>", "<|call|>"}) == ["<|return|>", "<|call|>"]
