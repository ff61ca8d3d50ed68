"""One of two processes that train in every parallel mode in turn: `modes_worker.py MODE,... SETTING ...`

Each mode: a run without interruption, and one that stops after its third step and is resumed.
"""

from __future__ import annotations

import os
import sys

from accelerate.state import AcceleratorState

import train.loop
from infer.cli import compose
from train.config import TrainConfig
from train.loop import Run
from train.loop import train as run
from train.stopping import Interrupted

REAL = Run._between_steps


def forget(accelerator: object) -> None:
    """What `train.parallel.release` does, but for the process group, which cannot be opened twice in a process."""
    os.environ.pop("ACCELERATE_USE_DEEPSPEED", None)
    AcceleratorState._reset_state(reset_partial_state=True)


def stopping(own: Run) -> None:
    REAL(own)
    if own.step == 3:
        raise Interrupted


def main() -> None:
    train.loop.release = forget
    modes, *settings = sys.argv[1:]
    for mode in modes.split(","):
        own = [*settings, f"parallel={mode}"]
        assert run(compose("train", TrainConfig, [*own, f"run={mode}"])) is not None
        torn = [*own, f"run={mode}-torn"]
        Run._between_steps = stopping
        assert run(compose("train", TrainConfig, torn)) is None
        Run._between_steps = REAL
        assert run(compose("train", TrainConfig, torn)) is not None


main()
