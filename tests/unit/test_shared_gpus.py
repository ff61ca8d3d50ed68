"""Processes that share a GPU: they generate responses, and do nothing else."""

from __future__ import annotations

import os

import pytest

from infer.options.cli import compose
from train.config import TrainConfig
from train.distributed.collectives import shares_gpus


def config_of(*words: str) -> TrainConfig:
    return compose("train", TrainConfig, ["model=demo", "parallel=ddp", *words])


def rank(monkeypatch: pytest.MonkeyPatch, number: int, count: int) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(count))
    monkeypatch.setenv("LOCAL_RANK", str(number))


def test_a_process_takes_a_gpu_that_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of("stage=regenerate")
    places = []
    for number in range(5):
        rank(monkeypatch, number, 5)
        assert shares_gpus(config, 2)
        places.append(os.environ["LOCAL_RANK"])
    assert places == ["0", "1", "0", "1", "0"]


def test_one_process_a_gpu_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for words in ([], ["stage=regenerate"]):
        rank(monkeypatch, 1, 2)
        assert not shares_gpus(config_of(*words), 2)
        assert os.environ["LOCAL_RANK"] == "1"


def test_training_wants_a_gpu_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    rank(monkeypatch, 3, 8)
    with pytest.raises(ValueError, match=r"parallel=ddp: 8 processes on 1 GPUs, which only stage=regenerate may share"):
        shares_gpus(config_of(), 1)
    assert os.environ["LOCAL_RANK"] == "3"
