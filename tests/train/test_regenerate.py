"""Responses are the target's own, made once, and an interruption costs none that was finished."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from infer.engine import Engine
from infer.request import SamplingParams
from train import regenerate
from train.config import DataConfig
from train.prompts import Row
from train.regenerate import collect_parts, continue_rows, read_parts, sampling_params
from train.stopping import Interrupted

DATA = DataConfig(name="demo", max_new_tokens=12, temperatures=[0.0, 0.7, 1.0])


@pytest.fixture
def rows() -> list[Row]:
    generator = torch.Generator().manual_seed(1)
    return [Row(torch.randint(1, 384, (5 + index % 4,), generator=generator).tolist()) for index in range(10)]


def params(index: int) -> SamplingParams:
    return sampling_params(index, DATA, seed=3)


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(regenerate, "PART", 3)


def test_sampling_is_dealt_out_in_turn_and_seeded_by_the_row() -> None:
    assert [params(index).temperature for index in range(4)] == [0.0, 0.7, 1.0, 0.0]
    assert len({sampling_params(index, DATA, seed).seed for index in range(9) for seed in (0, 3)}) == 18


def test_ids_and_mask_are_what_was_generated(engine: Engine, rows: list[Row], tmp_path: Path) -> None:
    continue_rows(engine, rows, params, tmp_path)
    data = collect_parts(tmp_path, len(rows))
    completions = engine.generate([row.ids for row in rows], [params(index) for index in range(len(rows))])
    for index, completion in enumerate(completions):
        ids, assistant = data.row(index)
        assert ids[~assistant].tolist() == rows[index].ids
        assert ids[assistant].tolist() == completion.token_ids
        assert ids.tolist() == rows[index].ids + completion.token_ids


def test_sequences_given_whole_are_taken_as_they_are(engine: Engine, rows: list[Row], tmp_path: Path) -> None:
    given = Row([7, 8, 9, 10], [False, True, True, False])
    continue_rows(engine, [given, rows[0]], params, tmp_path)
    data = collect_parts(tmp_path, 2)
    assert data.row(0)[0].tolist() == given.ids
    assert data.row(0)[1].tolist() == given.loss_mask


def test_an_interruption_loses_nothing_that_was_finished(engine: Engine, rows: list[Row], tmp_path: Path) -> None:
    continue_rows(engine, rows, params, tmp_path / "whole")
    calls = 0

    def stop() -> None:
        nonlocal calls
        calls += 1
        if calls == 100:
            raise Interrupted

    with pytest.raises(Interrupted):
        continue_rows(engine, rows, params, tmp_path / "cut", check=stop)
    assert not engine.has_work
    kept = read_parts(tmp_path / "cut")
    assert 0 < len(kept) < len(rows)
    continue_rows(engine, rows, params, tmp_path / "cut")
    whole, cut = (collect_parts(tmp_path / name, len(rows)) for name in ("whole", "cut"))
    assert cut.content_hash() == whole.content_hash()


def test_processes_share_the_rows(engine: Engine, rows: list[Row], tmp_path: Path) -> None:
    continue_rows(engine, rows, params, tmp_path / "alone")
    for rank in range(3):
        continue_rows(engine, rows, params, tmp_path / "shared", share=(rank, 3))
    alone, shared = (collect_parts(tmp_path / name, len(rows)) for name in ("alone", "shared"))
    assert shared.content_hash() == alone.content_hash()
