"""One of two processes that share a target (ZeRO-3): `sharded_worker.py FOLDER TARGET SETTING ...`

Each processes its own batches, one of them more than the other, and saves its results.
"""

from __future__ import annotations

import gc
import sys
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState

import train.loop
from infer.options.cli import compose
from infer.processes.process_end import run_process
from infer.request import SamplingParams
from models.targets import load_target
from tests.train.running import leave_out_plots
from tests.train.test_sharded_target import AUX, PROMPTS, batches_of, outputs_of
from train.config import TrainConfig
from train.distributed.collectives import ProcessExchange, make_accelerator
from train.loop import train as run
from train.preparation.models import open_engine


def forget(accelerator: object) -> None:
    """Do what `release` in train/distributed/collectives.py does, but keep the process group: it can open only once."""
    AcceleratorState._reset_state(reset_partial_state=True)


def held_bytes() -> int:
    """Return the bytes of all live CPU tensors, with shared storage counted once."""
    gc.collect()
    storages = dict[int, int]()
    for obj in gc.get_objects():
        if issubclass(type(obj), torch.Tensor) and obj.device.type == "cpu":
            storage = obj.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def main() -> None:
    folder, target_folder, *settings = sys.argv[1:]
    config = compose("train", TrainConfig, [*settings, "features.target=sharded"])
    accelerator = make_accelerator(config)
    rank = accelerator.process_index
    exchange = ProcessExchange(accelerator)
    before = held_bytes()
    target = load_target(target_folder, exchange=exchange)
    num_bytes = held_bytes() - before
    del target
    engine = open_engine(config, accelerator.device, exchange)
    features = outputs_of(engine.target, batches_of(rank), AUX)
    engine.target.join_gathers()
    token_ids = []
    if rank == 0:
        token_ids = [c.token_ids for c in engine.generate(PROMPTS, SamplingParams(max_tokens=12, seed=1))]
    engine.target.join_gathers()
    torch.save({"held": num_bytes, "found": features, "answers": token_ids}, Path(folder) / f"rank-{rank}.pt")
    engine.close()
    train.loop.release = forget
    leave_out_plots(pytest.MonkeyPatch())
    forget(accelerator)
    for name, more in (
        ("whole", []),
        ("online", ["features.target=sharded", "features.cache_gb=0"]),
        # computed, as those of the whole target are
        ("offline", ["features.target=sharded", "features=offline", "features.record=false", "data.top_k=1000"]),
        ("recorded", ["features.target=sharded", "features=offline", "data.top_k=999"]),
    ):
        assert run(compose("train", TrainConfig, [*settings, *more, f"run={name}"])) is not None
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    run_process(main)
