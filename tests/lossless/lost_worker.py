"""A tensor parallel rank of two, of which the test kills one: `lost_worker.py loading|idle|collective FOLDER`.

It prints `ready` to standard output once it is loading, idle or in a collective, and is then there for ever.
"""

from __future__ import annotations

import os
import sys
import threading

import torch

from infer.config import EngineConfig, ModelConfig
from infer.engine import Engine
from infer.processes import comm, launch
from infer.processes.process_end import run_process


class Unfinished:
    """A collective of NCCL with a lost rank: the host goes on, and the device never finishes."""

    def wait(self) -> None:
        pass

    def is_completed(self) -> bool:
        return False


class Group:
    def _allgather_base(self, received: torch.Tensor, sent: torch.Tensor) -> Unfinished:
        return Unfinished()


def forever() -> None:
    print("ready", flush=True)
    threading.Event().wait()


def in_collective(ranks: comm.Ranks) -> None:
    ranks._data, ranks._raises = Group(), False
    ranks.gather(torch.zeros(1), [1, 1])
    forever()  # as the host waits for results of the device


def main() -> None:
    scenario, folder = sys.argv[1:]
    comm.GRACE_S = 0.0  # nothing here would end by itself
    model = ModelConfig(name="tiny", path=folder, dtype="float32", device="cpu")
    engine = EngineConfig(tensor_parallel=2, max_tokens_in_cache=104, page_size=8, max_batch=4)
    load_shard, follow = launch.load_shard, launch.follow

    def loading(*arguments):
        if scenario == "loading":
            forever()
        return load_shard(*arguments)

    def following(shard, ranks):
        if scenario == "collective":
            in_collective(ranks)
        print("ready", flush=True)
        follow(shard, ranks)

    launch.load_shard, launch.follow = loading, following
    if int(os.environ["RANK"]):
        return launch.follow_launched(model, engine)
    if scenario == "loading":
        ranks = launch.lead(model, engine)
        print("ready", flush=True)
        ranks.connect()
    if scenario == "collective":
        with launch.ranks_of(model, engine) as ranks:
            ranks.connect()
            in_collective(ranks)
    served = Engine.load(model, None, engine, "none")
    print("ready", flush=True)
    while True:
        served.check_ranks()
        threading.Event().wait(0.05)


if __name__ == "__main__":
    run_process(main)
