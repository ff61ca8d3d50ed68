"""One of two processes that exchange values: each must get what both have sent."""

from __future__ import annotations

from infer.options.cli import compose
from infer.processes.process_end import run_process
from train.config import TrainConfig
from train.distributed.collectives import broadcast, gather, make_accelerator


def main() -> None:
    accelerator = make_accelerator(compose("train", TrainConfig, ["parallel=ddp", "model.device=cpu"]))
    values = [{"é": [1, None, 2.5]}, [[7, "a longer one"]] * 50]
    assert gather(accelerator, values[accelerator.process_index]) == values
    assert gather(accelerator, []) == [[], []]
    assert broadcast(accelerator, values[accelerator.process_index]) == values[0]


if __name__ == "__main__":
    run_process(main)
