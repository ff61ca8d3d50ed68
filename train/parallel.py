"""Processes and devices, through accelerate: one process, or one per device with gradients averaged (ddp).

Refuses launches that look distributed and are not. Knows nothing about heads or data.
"""

from __future__ import annotations

import os
import sys
from datetime import timedelta

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedDataParallelKwargs, InitProcessGroupKwargs
from torch import Tensor

from train.config import TrainConfig

LAUNCH = "torchrun --nproc_per_node 2 train/run.py parallel=ddp ..."


def make_accelerator(config: TrainConfig) -> Accelerator:
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if config.parallel.name == "ddp" and world == 1:
        raise ValueError(f"parallel=ddp: started as a single process; start it with {LAUNCH}")
    if config.parallel.name == "single" and world > 1:
        raise ValueError(f"parallel=single: started as {world} processes; say parallel=ddp, or start one process")
    on_cpu = config.model.device == "cpu" or not torch.cuda.is_available()
    if config.model.device.startswith("cuda") and on_cpu:
        raise ValueError(f"model.device={config.model.device}: torch sees no CUDA device here; say model.device=cpu")
    if config.model.device.startswith("cuda:"):
        if world > 1:
            raise ValueError(f"model.device={config.model.device}: parallel=ddp gives each process its own; say auto")
        torch.cuda.set_device(config.model.device)
    if on_cpu:
        os.environ["ACCELERATE_USE_CPU"] = "true"  # without it two processes never synchronise, and nothing says so
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # deepspeed, if installed, would warn on standard output
    patience = timedelta(hours=6)  # the others wait while the main process evaluates
    group = InitProcessGroupKwargs(backend="gloo" if on_cpu else None, timeout=patience)
    # While Medusa-2 trains the heads alone, its adapters have no gradient.
    wrapper = DistributedDataParallelKwargs(find_unused_parameters=config.objective.name == "medusa-2")
    accelerator = Accelerator(
        cpu=on_cpu,
        mixed_precision="bf16" if config.precision == "bf16" else "no",
        kwargs_handlers=[group, wrapper] if world > 1 else None,
    )
    assert accelerator.num_processes == world, "accelerate and the launcher disagree on the number of processes"
    assert world == 1 or str(accelerator.distributed_type) != "DistributedType.NO", "gradients would not be averaged"
    return accelerator


def release(accelerator: Accelerator) -> None:
    """Ends the process group and forgets accelerate's global state, so that another run may begin in this process."""
    if accelerator.num_processes > 1:
        accelerator.end_training()
    AcceleratorState._reset_state(reset_partial_state=True)


def broadcast_text(accelerator: Accelerator, text: str) -> str:
    """The main process's text, on every process."""
    if accelerator.num_processes == 1:
        return text
    content = list(text.encode())
    length = torch.tensor([len(content)], device=accelerator.device)
    torch.distributed.broadcast(length, src=0)
    buffer = torch.zeros(int(length), dtype=torch.int64, device=accelerator.device)
    if accelerator.is_main_process:
        buffer.copy_(torch.tensor(content))
    torch.distributed.broadcast(buffer, src=0)
    return bytes(buffer.tolist()).decode()


def total(accelerator: Accelerator, value: Tensor) -> Tensor:
    """The sum over processes, on all of them."""
    if accelerator.num_processes == 1:
        return value
    summed = accelerator.reduce(value, "sum")
    assert isinstance(summed, Tensor)
    return summed


def any_process(accelerator: Accelerator, flag: bool) -> bool:
    """Whether `flag` holds on any process, so that all of them stop at the same step."""
    return bool(total(accelerator, torch.tensor(float(flag), device=accelerator.device)) > 0)


def say(accelerator: Accelerator, text: str) -> None:
    """A line for people, from the main process. Standard output is kept for the result."""
    if accelerator.is_main_process:
        print(text, file=sys.stderr, flush=True)
