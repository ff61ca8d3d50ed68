"""In every parallel mode two processes learn what one learns, and a resumed run what an uninterrupted one does.

With a block drafter, which reads the target's embedding and LM head in place, and with `eagle3` in runs with bad steps.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file

from infer.options.cli import compose
from tests.train.launching import on_two_processes
from tests.train.modes_worker import BLOCK, poisoned
from tests.train.running import leave_out_plots
from train.checkpoint import find_checkpoint
from train.config import TrainConfig
from train.distributed.collectives import zero_settings
from train.loop import Run, train
from train.publishing.trackers import read_metrics

MODES = ("ddp", "fsdp", "zero2", "zero3")
SETTINGS = [
    "head.draft_vocab_size=200", "data.num_sequences=24", "data.max_new_tokens=24", "data.prompt_tokens=12",
    "sequence_length=40", "steps=5", "minutes=null", "eval_every=100", "checkpoint_every=3", "eval_prompts=2",
    "eval_max_tokens=8", "tracker=none", "engine.max_tokens_in_cache=1024", "precision=fp32", "objective.steps=3",
    "eval_draft_tokens=3", "optim.lr=0.001", "accumulate=2", "data.max_new_tokens=16", "overwrite=true",
]  # fmt: skip
KEYS = ("train/loss", "train/loss_2", "train/accuracy_0", "train/grad_norm", "train/tokens")


@pytest.fixture(scope="module")
def outputs(tiny_target_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of runs named block-MODE and block-single; those with `-bad` skip updates."""
    folder = tmp_path_factory.mktemp("outputs")
    common = [*SETTINGS, f"model.path={tiny_target_folder}", f"output_dir={folder}"]
    with pytest.MonkeyPatch.context() as patch:
        leave_out_plots(patch)
        single = [*common, *BLOCK, "run=block-single", "batch_size=8"]
        assert train(compose("train", TrainConfig, single)) is not None
        patch.setattr(Run, "_forward_backward", poisoned)
        bad = [*common, "run=eagle3-single-bad", "batch_size=8", "steps=4"]
        assert train(compose("train", TrainConfig, bad)) is not None
    on_two_processes(Path(__file__).with_name("modes_worker.py"), ",".join(MODES), *common, "batch_size=4")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_two_processes_learn_what_one_learns(mode: str, outputs: Path) -> None:
    """Up to the rounding of fp32 sums in another order: 0.2 %, and 1e-4 for parameters."""
    single, double = (read_metrics(outputs / f"block-{name}") for name in ("single", mode))
    for key in KEYS:
        values = [[row[key] for row in rows if key in row] for rows in (single, double)]
        assert len(values[0]) == 5
        assert values[1] == pytest.approx(values[0], rel=2e-3), key
    expected, actual = (last(outputs / f"block-{name}", "module") for name in ("single", mode))
    for name, value in expected.items():
        assert value.float().sub(actual[name].float()).abs().max() < 1e-4, name


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_a_resumed_run_has_the_same_bits(mode: str, outputs: Path) -> None:
    for file in ("module", "optimizer"):
        steady, torn = (last(outputs / f"block-{name}", file) for name in (mode, f"{mode}-torn"))
        assert steady.keys() == torn.keys()
        for name, value in steady.items():
            assert value.equal(torn[name]), name


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_a_step_that_is_bad_in_one_process_is_left_out_by_all(mode: str, outputs: Path) -> None:
    """Once for a non-finite loss, once for a non-finite gradient; later steps are as in one process that skips both."""
    single, double = (read_metrics(outputs / f"eagle3-{name}-bad") for name in ("single", mode))
    for rows in (single, double):
        skipped = [(row["step"], row["train/skipped_steps"]) for row in rows if "train/skipped_steps" in row]
        assert skipped == [(2, 1), (3, 2)]
    for key in KEYS:
        values = [[row[key] for row in rows if key in row] for rows in (single, double)]
        assert len(values[0]) == 2
        assert values[1] == pytest.approx(values[0], rel=2e-3), key
    expected, actual = (last(outputs / f"eagle3-{name}-bad", "module", step=4) for name in ("single", mode))
    for name, value in expected.items():
        assert value.float().sub(actual[name].float()).abs().max() < 1e-4, name


def last(run: Path, file: str, step: int = 5) -> dict:
    path = find_checkpoint(run / "checkpoints")
    assert path is not None
    assert path.name == f"step-{step:06d}"
    return load_file(path / f"{file}.safetensors")


def test_deepspeeds_configuration_comes_from_ours() -> None:
    config = compose("train", TrainConfig, ["parallel=zero3", "batch_size=4", "optim.clip=0.7", "precision=bf16"])
    settings = zero_settings(config)
    assert settings["zero_optimization"]["stage"] == 3
    assert settings["train_micro_batch_size_per_gpu"] == 4
    assert settings["gradient_clipping"] == 0.7
    assert settings["torch_autocast"] == {"enabled": True, "dtype": "bfloat16"}
