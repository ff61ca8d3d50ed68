"""One of two processes that train in every parallel mode in turn: `modes_worker.py MODE,... SETTING ...`

Each mode has an uninterrupted run of a block drafter, one that stops after its third step and is resumed, and one of
EAGLE-3 with bad steps.
"""

from __future__ import annotations

import math
import os
import sys
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState

import train.loop
from infer.options.cli import compose
from infer.processes.process_end import run_process
from tests.train.running import leave_out_plots
from train.config import TrainConfig
from train.distributed.strategies import Zero
from train.features.online import Features
from train.loop import Run, StepResult
from train.loop import train as run
from train.signals import Interrupted

# its confidence bias, of one element, no two processes can divide
BLOCK = ["head=dspark", "head.num_layers=1", "head.block_size=4"]
REAL, REAL_PASS, REAL_CLOSE = Run._between_steps, Run._forward_backward, Zero.close


def forget(accelerator: object) -> None:
    """Do what `release` in train/distributed/collectives.py does, but keep the process group: it can open only once."""
    os.environ.pop("ACCELERATE_USE_DEEPSPEED", None)
    AcceleratorState._reset_state(reset_partial_state=True)


def stopping(training_run: Run) -> None:
    REAL(training_run)
    if training_run.step == 3:
        raise Interrupted


def poisoned(training_run: Run, **options: Any) -> StepResult:
    """Make the second step's features and the third step's gradients non-finite, on the last process alone."""
    prepared, last = training_run.prepared, training_run.accelerator.num_processes - 1
    features, backward = prepared.features, prepared.placement.backward

    def bad_features(batch: Any) -> Features:
        clean = features(batch)
        return Features(tuple(states * math.nan for states in clean.aux), clean.hidden * math.nan)

    if training_run.accelerator.process_index == last:
        if training_run.step == 1:
            prepared.features = bad_features
        if training_run.step == 2:
            prepared.placement.backward = lambda loss, **kwargs: backward(loss * math.nan, **kwargs)
    try:
        return REAL_PASS(training_run, **options)
    finally:
        prepared.features, prepared.placement.backward = features, backward


def main() -> None:
    train.loop.release = forget
    leave_out_plots(pytest.MonkeyPatch())
    closed = []
    Zero.close = lambda current, *, together: (closed.append(together), REAL_CLOSE(current, together=together))[1]
    modes, *settings = sys.argv[1:]
    for mode in modes.split(","):
        common = [*settings, f"parallel={mode}"]
        assert run(compose("train", TrainConfig, [*common, *BLOCK, f"run=block-{mode}"])) is not None
        torn = [*common, *BLOCK, f"run=block-{mode}-torn"]
        Run._between_steps = stopping
        assert run(compose("train", TrainConfig, torn)) is None
        Run._between_steps = REAL
        assert run(compose("train", TrainConfig, torn)) is not None
        Run._forward_backward = poisoned
        assert run(compose("train", TrainConfig, [*common, f"run=eagle3-{mode}-bad", "steps=4"])) is not None
        Run._forward_backward = REAL_PASS
        assert closed == [True] * (4 if mode.startswith("zero") else 0), "DeepSpeed is ended however a run ends"
        closed.clear()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    run_process(main)
