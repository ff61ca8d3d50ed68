"""precision=auto: bf16 products where they are faster, which is measured, and a resumed run keeps its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from infer.options.cli import compose
from tests.train.running import run
from train.config import TrainConfig
from train.planning import precision as module
from train.planning.precision import Precision, choose_precision, compare_products, compute_dtype, time_product
from train.publishing.trackers import read_metrics
from train.storage.run_folder import stored_config


def timing(fp32: float, bf16: float) -> Callable[[torch.dtype], float]:
    return lambda dtype: {torch.float32: fp32, torch.bfloat16: bf16}[dtype]


@pytest.mark.parametrize(
    ("fp32", "bf16", "name", "reason"),
    [
        (3.0, 1.0, "bf16", "a product in bf16 is 3.0 times as fast as in fp32 here"),
        (1.0, 6.0, "fp32", "a product in bf16 takes 6.0 times as long as in fp32 here"),
        (1.1, 1.0, "fp32", "a product in bf16 takes 0.9 times as long as in fp32 here"),  # casts take more
    ],
)
def test_the_faster_products_are_chosen(fp32: float, bf16: float, name: str, reason: str) -> None:
    assert compare_products(timing(fp32, bf16)) == (name, reason)


def test_a_disturbed_timing_does_not_decide() -> None:
    times = {torch.float32: iter([5.0, 1.0, 1.0]), torch.bfloat16: iter([2.0, 30.0, 3.0])}
    assert compare_products(lambda dtype: next(times[dtype])).name == "fp32"


def test_a_product_is_timed_by_the_clock() -> None:
    ticks = iter([10.0, 12.5])
    assert time_product(torch.bfloat16, lambda: next(ticks)) == 2.5


def test_what_is_configured_is_not_measured(settings: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "faster_on_cpu", lambda: Precision("fp32", "measured"))
    config = compose("train", TrainConfig, [*settings, "precision=bf16"])
    assert choose_precision(config) == ("bf16", "")
    assert compute_dtype(config) == torch.bfloat16
    config = compose("train", TrainConfig, [*settings, "precision=auto"])
    assert choose_precision(config) == ("fp32", "measured")
    assert compute_dtype(config) == torch.float32


def test_processes_on_cpus_agree_without_measuring(settings: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "faster_on_cpu", lambda: Precision("bf16", "measured"))
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert choose_precision(compose("train", TrainConfig, [*settings, "precision=auto"])).name == "fp32"


def test_a_resumed_run_keeps_its_precision(
    settings: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*settings, "run=one", "precision=auto"]
    monkeypatch.setattr(module, "faster_on_cpu", lambda: Precision("bf16", "measured"))
    run(words, "steps=2")
    assert "precision=bf16: measured" in capsys.readouterr().err
    monkeypatch.setattr(module, "faster_on_cpu", lambda: Precision("fp32", "measured"))
    run(words, "steps=4")
    assert "precision=bf16: the run was begun with it" in capsys.readouterr().err
    stored = stored_config(compose("train", TrainConfig, words))
    assert stored is not None
    assert stored.precision == "bf16"
    assert max(row["step"] for row in read_metrics(tmp_path / "one")) == 4
    with pytest.raises(ValueError, match=r"run=one: .* begun with other settings: precision=fp32 \(the run has bf16\)"):
        run([*words[:-1], "precision=fp32"])
