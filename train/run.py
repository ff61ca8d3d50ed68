"""Trains a speculator head and exports it: python train/run.py model=demo head=eagle3 [key=value ...]

The keys are in conf/train.yaml and its groups. The last line of standard output is one JSON document.
"""

import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:] = [os.path.dirname(HERE)] + [p for p in sys.path if os.path.abspath(p or ".") != HERE]
import infer.options.environment

# An update's products are long, and beside a busy process it is a fifth faster if threads yield after 0.01 ms.
if os.environ.get("GOMP_SPINCOUNT") == infer.options.environment.SPINS:
    os.environ["GOMP_SPINCOUNT"] = "1000"

# isort: split

import json

from infer.options.cli import entry_point
from infer.processes.process_end import run_process
from train.config import TrainConfig


@entry_point("train", TrainConfig)
def main(config: TrainConfig) -> float | None:
    """Run training; return the acceptance length in the engine, for sweeps (`-m`)."""
    from train.loop import train  # command-line errors are reported before torch is imported

    result = train(config, sys.argv[1:])
    if result is not None and int(os.environ.get("RANK", "0")) == 0:
        print(json.dumps(result), flush=True)
    return (result or {}).get("acceptance_length", {}).get("engine")


if __name__ == "__main__":
    run_process(main)
