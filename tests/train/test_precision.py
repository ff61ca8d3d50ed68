"""precision=auto: bf16 products where the processor has them, and a resumed run keeps its own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from infer.options.cli import compose
from tests.train.running import run
from train.config import TrainConfig
from train.planning import precision as module
from train.planning.precision import Precision, choose_precision, compute_dtype, faster_on_cpu
from train.publishing.trackers import read_metrics
from train.storage.run_folder import stored_config


@pytest.mark.parametrize(
    ("line", "level", "name"),
    [
        ("flags\t\t: fpu avx2 avx512f avx512_bf16", "", "bf16"),
        ("flags\t\t: fpu avx2 avx512f avx512_bf16", "avx512", "bf16"),
        ("flags\t\t: fpu avx2 avx512f avx512_bf16", "avx2", "fp32"),
        ("flags\t\t: fpu avx2 avx512f", "", "fp32"),
        ("Features\t: asimd bf16", "", "bf16"),
        ("Features\t: asimd", "", "fp32"),
    ],
)
def test_products_are_in_bf16_where_the_processor_has_them(
    line: str, level: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADWAY_CPU_LEVEL", level)
    (tmp_path / "cpuinfo").write_text(f"processor\t: 0\n{line}\n")
    assert faster_on_cpu(tmp_path / "cpuinfo").name == name


def test_what_is_configured_is_taken(settings: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "faster_on_cpu", lambda: Precision("fp32", "measured"))
    config = compose("train", TrainConfig, [*settings, "precision=bf16"])
    assert choose_precision(config) == ("bf16", "")
    assert compute_dtype(config) == torch.bfloat16
    config = compose("train", TrainConfig, [*settings, "precision=auto"])
    assert choose_precision(config) == ("fp32", "measured")
    assert compute_dtype(config) == torch.float32


def test_processes_on_cpus_agree(settings: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
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
