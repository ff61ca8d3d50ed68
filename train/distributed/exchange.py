"""Collectives for a target that is sharded over processes (models/targets/zero3.py), through torch.distributed.

They run in separate process groups, so that no other collective interleaves with them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor

from train.distributed.collectives import PATIENCE


class ProcessExchange:
    """The `Exchange` of zero3.py. Construct it on every process at the same point, after the process group exists."""

    def __init__(self, accelerator: Accelerator) -> None:
        assert dist.is_initialized(), "a target is divided among several processes"
        self.rank: int = accelerator.process_index
        self.ranks: int = accelerator.num_processes
        self._weights = dist.new_group(timeout=PATIENCE)
        self._flags = dist.new_group(timeout=PATIENCE, backend="gloo")  # flags live on the CPU: no GPU synchronisation

    def gather(self, gathered: Tensor, shard: Tensor) -> Callable[[], Any]:
        bits = gathered.view(torch.uint8), shard.view(torch.uint8)  # gloo does not support bf16
        work = dist.all_gather_into_tensor(*bits, group=self._weights, async_op=True)
        assert work is not None
        return work.wait

    def any(self, flag: bool) -> bool:
        any_flag = torch.tensor(int(flag))
        dist.all_reduce(any_flag, dist.ReduceOp.MAX, group=self._flags)
        return bool(any_flag)
