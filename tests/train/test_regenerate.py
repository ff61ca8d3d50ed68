"""Responses are the target's own, made once, and an interruption costs none that was finished."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from infer.engine import Engine
from infer.request import SamplingParams
from models.tokenizer import Tokenizer
from train.config import DataConfig
from train.data import regenerate as module
from train.data.examples import Example
from train.data.regenerate import EngineGenerator, collect_parts, read_parts, regenerate, sampling_params
from train.data.sequences import Sequences
from train.signals import Interrupted

DATA = DataConfig(name="demo", max_new_tokens=12, temperatures=[0.0, 0.7, 1.0])


@pytest.fixture
def examples() -> dict[int, Example]:
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(1, 384, (5 + number % 4,), generator=generator).tolist() for number in range(10)]
    return {1000 - number: Example(ids=tuple(ids)) for number, ids in enumerate(prompts)}


def params(number: int) -> SamplingParams:
    return sampling_params(number, DATA, seed=3)


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PART", 3)


@pytest.fixture
def respond(engine: Engine, tiny_tokenizer: Tokenizer) -> Any:
    def respond(examples: dict[int, Example], folder: Path, *, longest: int = 400, **more: Any) -> Sequences:
        failed = regenerate(
            EngineGenerator(engine), examples, params, folder, tiny_tokenizer, longest_prompt=longest, **more
        )
        done = read_parts(folder)
        assert not done.keys() & failed.keys()
        if "share" not in more:
            assert done.keys() | failed.keys() == examples.keys()
        return collect_parts(folder, [key for key in examples if key in done], {}).sequences

    return respond


def test_sampling_is_dealt_out_in_turn_and_seeded_by_the_row() -> None:
    assert [params(number).temperature for number in range(4)] == [0.0, 0.7, 1.0, 0.0]
    assert len({sampling_params(number, DATA, seed).seed for number in range(9) for seed in (0, 3)}) == 18


def test_ids_and_mask_are_what_was_generated(
    engine: Engine, examples: dict[int, Example], respond: Any, tmp_path: Path
) -> None:
    data = respond(examples, tmp_path)
    prompts = [list(example.ids) for example in examples.values()]
    completions = engine.generate(prompts, [params(number) for number in range(len(prompts))])
    for number, completion in enumerate(completions):
        ids, assistant = data.row(number)
        assert ids[~assistant].tolist() == prompts[number]
        assert ids[assistant].tolist() == completion.token_ids
        assert ids.tolist() == prompts[number] + completion.token_ids


def test_every_turn_is_answered_on_the_targets_own_history(
    engine: Engine, tiny_tokenizer: Tokenizer, respond: Any, tmp_path: Path
) -> None:
    turns = ("def f(x):", "and then?", "so?")
    messages = [
        {"role": role, "content": text} for turn in turns for role, text in (("user", turn), ("assistant", "-"))
    ]
    data = respond({7: Example(messages=tuple(messages))}, tmp_path)
    history, rows = [], [data.row(number) for number in range(len(data))]
    learnt = [ids[mask].tolist() for ids, mask in rows]
    for turn in turns:
        history.append({"role": "user", "content": turn})
        prompt = tiny_tokenizer.apply_chat_template(history)
        (completion,) = engine.generate([prompt], params(0))
        assert any(completion.token_ids == span[-len(completion.token_ids) :] for span in learnt)
        assert any(ids[: len(prompt)].tolist() == prompt for ids, _ in rows)
        history.append({"role": "assistant", "content": tiny_tokenizer.decode(completion.token_ids)})


def test_sequences_given_whole_are_taken_as_they_are(
    examples: dict[int, Example], respond: Any, tmp_path: Path
) -> None:
    example = Example(ids=(7, 8, 9, 10), loss_mask=(False, True, True, False))
    data = respond({5: example, **examples}, tmp_path)
    assert data.row(0)[0].tolist() == [7, 8, 9, 10]
    assert data.row(0)[1].tolist() == [False, True, True, False]
    assert len(data) == 11


def test_what_cannot_be_asked_is_reported(
    engine: Engine, examples: dict[int, Example], tiny_tokenizer: Tokenizer, tmp_path: Path
) -> None:
    keys = list(examples)
    examples[keys[4]] = Example(ids=tuple(range(1, 60)))
    answerer = EngineGenerator(engine)
    failed = regenerate(answerer, examples, params, tmp_path, tiny_tokenizer, longest_prompt=50)
    assert failed == {keys[4]: "the prompt has 59 tokens; 1 to 50 are possible"}
    assert read_parts(tmp_path).keys() == set(keys) - {keys[4]}
    assert len(collect_parts(tmp_path, keys, failed).sequences) == 9


def test_every_conversation_is_done_skipped_or_failed(
    engine: Engine, examples: dict[int, Example], tiny_tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """Counted from the rows themselves: what was lost on the way does not pass for an answer."""
    first, second, *_ = examples
    examples[first] = Example(ids=tuple(range(1, 60)))
    answerer, short = EngineGenerator(engine), SamplingParams(max_tokens=1)  # of one token nothing can be learnt

    def some(number: int) -> SamplingParams:
        return short if number == 1 else params(number)

    failed = regenerate(answerer, examples, some, tmp_path, tiny_tokenizer, longest_prompt=50)
    counts = collect_parts(tmp_path, examples, failed).counts
    assert counts == {"conversations": 10, "done": 8, "skipped": 1, "failed": 1}
    for wrong in ({}, {**failed, second: "twice"}, {**failed, 5: "nobody asked"}):
        with pytest.raises(ValueError, match=r"of 10 conversations 8 were answered, 1 skipped and \d failed: "):
            collect_parts(tmp_path, examples, wrong)
    next(iter(tmp_path.glob("part-*"))).unlink()
    with pytest.raises(ValueError, match=r": 3 are in none of these or in two; run the same command again"):
        collect_parts(tmp_path, examples, failed)


def test_an_interruption_loses_nothing_that_was_finished(
    engine: Engine, examples: dict[int, Example], respond: Any, tmp_path: Path
) -> None:
    """Rows are known by their key: it does not matter which of them are asked for when the work goes on."""
    complete = respond(examples, tmp_path / "whole")
    calls = 0

    def stop() -> None:
        nonlocal calls
        calls += 1
        if calls == 20:
            raise Interrupted

    with pytest.raises(Interrupted):
        respond(examples, tmp_path / "cut", check=stop)
    assert not engine.has_work
    parts = read_parts(tmp_path / "cut")
    assert 0 < len(parts) < len(examples)
    assert respond(examples, tmp_path / "cut").content_hash() == complete.content_hash()


def test_processes_share_the_rows(examples: dict[int, Example], respond: Any, tmp_path: Path) -> None:
    alone = respond(examples, tmp_path / "alone")
    shared = [respond(examples, tmp_path / "shared", share=(rank, 3)) for rank in range(3)]
    assert shared[2].content_hash() == alone.content_hash()
