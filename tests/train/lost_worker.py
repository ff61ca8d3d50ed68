"""A training process of two, of which the test kills one: `lost_worker.py loading|collective SETTING ...`

It prints `ready` to standard output once it loads the target or is in a step, and is then there for ever: in a step, as
the host waits for a collective of NCCL that never ends.
"""

from __future__ import annotations

import sys
import threading
from typing import Any

import train.distributed.liveness
import train.loop
from infer.options.cli import compose
from infer.processes.process_end import run_process
from train.config import TrainConfig


def forever(*arguments: Any, **options: Any) -> None:
    print("ready", flush=True)
    threading.Event().wait()


def main() -> None:
    scenario, *settings = sys.argv[1:]
    train.distributed.liveness.GRACE_S = 0.0  # nothing here would end by itself
    if scenario == "loading":
        train.loop.start_engine = forever  # type: ignore[assignment]
    else:
        train.loop.Run._forward_backward = forever  # type: ignore[assignment]
    train.loop.train(compose("train", TrainConfig, settings))


if __name__ == "__main__":
    run_process(main)
