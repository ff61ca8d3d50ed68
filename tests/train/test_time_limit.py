"""minutes= as a budget of the whole command: on slow machines fewer answers and features, never a useless head in
silence. All clocks are the tests' own.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from infer.engine import Engine
from models.tokenizer import Tokenizer
from tests.train.running import run
from tests.train.test_regenerate import examples, params  # noqa: F401
from train.data.examples import Example
from train.data.folder import HELD_OUT, SOURCE, TRAIN
from train.data.regenerate import OUT_OF_TIME, EngineGenerator, read_parts, regenerate
from train.data.sequences import Sequences
from train.planning.time_limit import TimeLimit, spread
from train.publishing.publish import ENOUGH, USEFUL, verdict
from train.storage.run_folder import LIMITED, find_twin


class Clock:
    """Goes on by `tick` seconds whenever it is read."""

    def __init__(self, tick: float = 0.0) -> None:
        self.now, self.tick = 0.0, tick

    def __call__(self) -> float:
        self.now += self.tick
        return self.now


def test_answers_end_when_their_features_still_fit() -> None:
    clock = Clock()
    limit = TimeLimit(100.0, started=0.0, each=2.0, least=3, clock=clock)
    clock.now = 60.0
    assert not limit.over(19)
    assert limit.about(10) == 12  # each takes 6 s, and 2 for its features
    assert not limit.reached
    assert limit.over(20)
    assert limit.reached
    clock.now = 1000.0
    assert not limit.over(2), "so many are made in any case"
    assert limit.over(3)


def test_conversations_with_responses_are_as_many_as_there_is_time_for() -> None:
    clock = Clock()
    limit = TimeLimit(100.0, started=0.0, each=2.0, least=3, clock=clock)
    clock.now = 20.0
    assert limit.affordable(1000) == 40
    assert limit.affordable(7) == 7
    clock.now = 500.0
    assert limit.affordable(1000) == 3
    assert TimeLimit(100.0, started=0.0, clock=clock).affordable(1000) == 1000, "features take no time before updates"


def test_some_of_everything_are_taken() -> None:
    assert spread(range(10), 5) == [0, 2, 4, 6, 8]
    assert spread("abc", 3) == ["a", "b", "c"]
    assert spread(range(1000), 3) == [0, 333, 666]


@pytest.fixture
def respond(engine: Engine, examples: dict[int, Example], tiny_tokenizer: Tokenizer, tmp_path: Path) -> Any:  # noqa: F811
    return partial(regenerate, EngineGenerator(engine), examples, params, tmp_path, tiny_tokenizer, longest_prompt=400)


def test_a_slow_machine_answers_fewer(
    engine: Engine,
    examples: dict[int, Example],  # noqa: F811
    respond: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What was answered in time is what the machine would have answered; what was begun is kept as far as it came."""
    monkeypatch.setattr("train.data.regenerate.PART", 2)
    clock = Clock()
    step = engine.step

    def slow_step() -> Any:
        clock.now += 1.0
        return step()

    monkeypatch.setattr(engine, "step", slow_step)
    assert respond(limit=TimeLimit(16.0, started=0.0, clock=clock)) == {}
    kept = read_parts(tmp_path)
    assert not engine.has_work
    assert 8 <= len(kept) < len(examples) + 1
    monkeypatch.setattr(engine, "step", step)
    prompts = [list(example.ids) for example in examples.values()]
    whole = engine.generate(prompts, [params(number) for number in range(len(prompts))])
    cut = 0
    for completion, (key, example) in zip(whole, examples.items(), strict=True):
        if key not in kept:
            continue
        (row,) = kept[key].rows
        assert row.ids[: len(example.ids)] == list(example.ids)
        answer = row.ids[len(example.ids) :]
        assert answer == completion.token_ids[: len(answer)]
        if len(answer) < len(completion.token_ids):
            cut += 1
            assert kept[key].cut == f"cut within an answer of {len(answer)} tokens: {OUT_OF_TIME}"
    assert cut > 0


def test_a_quick_machine_answers_all(examples: dict[int, Example], respond: Any, tmp_path: Path) -> None:  # noqa: F811
    limit = TimeLimit(1e9, started=0.0, clock=Clock(tick=0.001))
    assert respond(limit=limit) == {}
    assert read_parts(tmp_path).keys() == examples.keys()
    assert not limit.reached


def test_a_run_trains_on_what_there_was_time_for(
    settings: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("train.data.regenerate.PART", 2)
    words = ["minutes=0.0001", "steps=2", "engine.max_batch=8", "data.max_new_tokens=24"]
    run(settings, "run=slow", *words)
    error = capsys.readouterr().err
    assert "minutes=0.0001: on this machine there was time for 8 of 24 conversations" in error
    data = tmp_path / "slow" / "data"
    record = json.loads((data / SOURCE).read_text())
    assert record[LIMITED] == {"minutes": 0.0001}
    assert record["counts"]["no_time"] == 24 - 8
    assert len(Sequences.load(data / TRAIN)) == 8, "one update's"
    assert "there was no time for 16 more" in (tmp_path / "heads" / "demo" / "eagle3" / "README.md").read_text()
    run(settings, "run=slow", *words, "steps=3")  # resumed on the same data
    assert "of 24 conversations" not in capsys.readouterr().err
    run(settings, "run=patient", "steps=1")
    assert "reusing" not in capsys.readouterr().err
    assert len(Sequences.load(tmp_path / "patient" / "data" / TRAIN)) == 24


def test_data_that_minutes_limited_are_reused_by_runs_with_no_more_minutes(tmp_path: Path) -> None:
    folder = tmp_path / "one" / "data"
    folder.mkdir(parents=True)
    for name in (SOURCE, HELD_OUT, TRAIN):
        (folder / name).write_text(json.dumps({"source": "s", "recipe": "r", LIMITED: {"minutes": 5.0}}))
    find = partial(find_twin, tmp_path, "r", SOURCE, (SOURCE, HELD_OUT, TRAIN))
    assert [find(minutes) for minutes in (None, 6.0, 5.0, 2.0)] == [None, None, folder, folder]


def test_features_of_reused_sequences_are_limited_too(
    settings: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(settings, "run=whole", "stage=regenerate")
    monkeypatch.setattr("train.planning.time_limit.feature_seconds", lambda config, engine: 1e6)
    run(settings, "run=short", "minutes=1", "steps=1")
    assert "there is time for the features of 8 of its 24 sequences" in capsys.readouterr().err
    whole, short = (Sequences.load(tmp_path / name / "data" / TRAIN) for name in ("whole", "short"))
    rows = [short.row(index)[0].tolist() for index in range(8)]
    assert rows == [whole.row(3 * index)[0].tolist() for index in range(8)]
    assert LIMITED in json.loads((tmp_path / "short" / "data" / SOURCE).read_text())


SPENT = {"tokens": 890, "seconds": 10.0, "other_seconds": 600.0}


@pytest.mark.parametrize(
    ("tau", "updates", "minutes", "line"),
    [
        (
            1.03, 1, 5.0,
            "τ 1.03 after 1 update means nothing yet: this machine made 89 tokens/s; minutes=44 would make about 200 "
            "updates",
        ),
        (
            1.2, 20, None,
            "τ 1.20 after 20 updates means nothing yet: this machine made 89 tokens/s; steps=200 would take about 12 "
            "minutes",
        ),
        (
            1.1, 180, 100.0,
            "τ 1.10 after 180 updates means nothing yet: this machine made 89 tokens/s; minutes=101 would make about "
            "200 updates",
        ),
        (
            1.1, ENOUGH, 5.0,
            "τ 1.10 after 200 updates: this head drafts hardly anything; train on more data, longer, or with another "
            "optim.lr",
        ),
        (USEFUL, 1, 5.0, None),
    ],
)  # fmt: skip
def test_what_means_nothing_is_said(tau: float, updates: int, minutes: float | None, line: str | None) -> None:
    assert verdict(tau, updates, **SPENT, minutes=minutes) == line


def test_a_run_that_learnt_nothing_says_so_before_its_last_line(
    settings: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    note = run(settings, "run=one", "steps=1", "optim.lr=1e-9")["note"]
    assert note.startswith("τ 1.0")
    assert " after 1 update means nothing yet: this machine made " in note
    lines = capsys.readouterr().err.splitlines()
    assert note in lines
    assert lines[-1].startswith("serve it: ")
