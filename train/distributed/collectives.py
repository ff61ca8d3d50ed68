"""Set-up of processes and devices through accelerate: one process, or one per device.

Refuses launches that look distributed but are not. Independent of heads and data.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import InitProcessGroupKwargs
from torch import Tensor

from train.config import TrainConfig
from train.signals import Interrupted

T = TypeVar("T")
# Timeout of collectives: processes wait for each other while one generates responses or evaluates, which takes hours.
PATIENCE = timedelta(hours=6)
LAUNCH = "torchrun --nproc_per_node 2 train/run.py parallel={name} ..."


def make_accelerator(config: TrainConfig) -> Accelerator:
    """Make the accelerator. Raises ValueError if the launch contradicts `parallel` or processes would not cooperate."""
    name, world = config.parallel.name, int(os.environ.get("WORLD_SIZE", "1"))
    if name != "single" and world == 1:
        raise ValueError(f"parallel={name}: started as a single process; start it with {LAUNCH.format(name=name)}")
    if name == "single" and world > 1:
        raise ValueError(f"parallel=single: started as {world} processes; say parallel=ddp, or start one process")
    on_cpu = config.model.device == "cpu" or not torch.cuda.is_available()
    if config.model.device.startswith("cuda") and on_cpu:
        raise ValueError(f"model.device={config.model.device}: torch sees no CUDA device here; say model.device=cpu")
    if config.model.device.startswith("cuda:"):
        if world > 1:
            raise ValueError(
                f"model.device={config.model.device}: parallel={name} gives each process its own; say auto"
            )
        torch.cuda.set_device(config.model.device)
    zero = name.startswith("zero")
    if on_cpu:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # deepspeed, if installed, would warn on standard output
        if zero:
            os.environ.pop("ACCELERATE_USE_CPU", None)  # if set, accelerate ignores DeepSpeed
        else:
            os.environ["ACCELERATE_USE_CPU"] = "true"  # without it two processes silently never synchronise
    # without an explicit backend accelerate sees a single process under DeepSpeed on a CPU
    gloo = on_cpu or shares_gpus(config, torch.cuda.device_count())
    group = InitProcessGroupKwargs(backend="gloo" if gloo else None, timeout=PATIENCE)
    accelerator = Accelerator(
        cpu=on_cpu and not zero,
        mixed_precision="bf16" if config.precision == "bf16" and not zero else "no",
        kwargs_handlers=[group] if world > 1 else None,
        deepspeed_plugin=zero_plugin(config) if zero else None,
    )
    try:
        refuse_other_launch(accelerator, name, world)
    except ValueError:
        release(accelerator)
        raise
    return accelerator


def shares_gpus(config: TrainConfig, gpus: int) -> bool:
    """Return whether processes of this machine share its GPUs, which they may to generate responses: NCCL, without
    which they would train slowly, gives each its own. LOCAL_RANK then names the GPU. Raises ValueError.
    """
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if local <= gpus:
        return False
    if config.stage != "regenerate":
        raise ValueError(
            f"parallel={config.parallel.name}: {local} processes on {gpus} GPUs, which only stage=regenerate may share"
        )
    os.environ["LOCAL_RANK"] = str(int(os.environ["LOCAL_RANK"]) % gpus)
    return True


def refuse_other_launch(accelerator: Accelerator, name: str, world: int) -> None:
    """Raises ValueError if accelerate's launcher or environment variables configured what `parallel` does not say."""
    kind, zero = str(accelerator.distributed_type.value), name.startswith("zero")
    wanted = "NO" if name == "single" else "DEEPSPEED" if zero else "MULTI"  # else gradients would not be averaged
    cure = f"start it with {LAUNCH.format(name=name)}, and without accelerate's config file or ACCELERATE_ variables"
    if accelerator.num_processes != world:
        raise ValueError(
            f"parallel={name}: WORLD_SIZE says {world} processes, accelerate found {accelerator.num_processes}; {cure}"
        )
    if not kind.startswith(wanted):
        raise ValueError(f"parallel={name}: accelerate was told to use {kind}, and not {wanted}; {cure}")
    if not zero and accelerator.gradient_accumulation_steps != 1:
        raise ValueError(
            f"parallel={name}: accelerate was told to accumulate over {accelerator.gradient_accumulation_steps} steps; "
            f"say accumulate={accelerator.gradient_accumulation_steps} instead, and {cure}"
        )


def zero_plugin(config: TrainConfig) -> Any:
    """Return the accelerate plugin for DeepSpeed. Raises ValueError if DeepSpeed is not installed."""
    try:
        import deepspeed
        from accelerate.utils import DeepSpeedPlugin
    except ImportError as error:
        raise ValueError(
            f"parallel={config.parallel.name}: {error}; pip install deepspeed, or parallel=fsdp"
        ) from error
    if config.model.device == "cpu" or not torch.cuda.is_available():
        # else DeepSpeed compiles its shared-memory communication op at the first start, and fails without a compiler
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    settings = zero_settings(config)
    if int(os.environ.get("RANK", "0")) == 0:
        print(f"DeepSpeed: {json.dumps(settings)}", file=sys.stderr, flush=True)
    return DeepSpeedPlugin(hf_ds_config=settings)


def zero_settings(config: TrainConfig) -> dict[str, Any]:
    """Return DeepSpeed's configuration. Parameters stay fp32; with precision=bf16 the computation is autocast."""
    return {
        "train_micro_batch_size_per_gpu": config.batch_size,
        "gradient_accumulation_steps": 1,  # our micro-batch losses are already weighted parts of one sum
        "gradient_clipping": config.optim.clip,
        "zero_optimization": {
            "stage": int(config.parallel.name[-1]),
            "contiguous_gradients": True,
            "overlap_comm": False,
            "stage3_param_persistence_threshold": 0,
        },
        "zero_allow_untested_optimizer": True,
        "torch_autocast": {"enabled": config.precision == "bf16", "dtype": "bfloat16"},
        "steps_per_print": 10**9,
    }


def lost_process(error: Exception) -> bool:
    """Return whether a collective failed because another process has ended or timed out."""
    if isinstance(error, torch.distributed.DistError):
        return True
    text = str(error)
    return any(sign in text for sign in ("Connection closed by peer", "Connection reset", "gloo", "NCCL", "Timed out"))


def release(accelerator: Accelerator) -> None:
    """Destroy the process group and reset accelerate's global state, so that this process can start another run."""
    if accelerator.num_processes > 1:
        accelerator.end_training()
    os.environ.pop("ACCELERATE_USE_DEEPSPEED", None)
    AcceleratorState._reset_state(reset_partial_state=True)


def broadcast(accelerator: Accelerator, value: T) -> T:
    """Return the main process's value, of JSON's types, on every process. Nothing is pickled."""
    return gather(accelerator, value)[0]


def gather(accelerator: Accelerator, value: T) -> list[T]:
    """Return the values of all processes, of JSON's types, by rank, on every process. Nothing is pickled."""
    count, device = accelerator.num_processes, accelerator.device
    if count == 1:
        return [value]
    content = json.dumps(value).encode()
    length = torch.tensor(len(content), device=device)
    lengths = [torch.empty_like(length) for _ in range(count)]
    torch.distributed.all_gather(lengths, length)
    longest = max(map(int, lengths))
    text = torch.frombuffer(bytearray(content.ljust(longest)), dtype=torch.uint8).to(device)
    texts = [torch.empty_like(text) for _ in range(count)]
    torch.distributed.all_gather(texts, text)  # JSON may end in spaces
    return [json.loads(one.cpu().numpy().tobytes()) for one in texts]


def total(accelerator: Accelerator, value: Tensor) -> Tensor:
    """Return the sum over processes, on all of them (all-reduce)."""
    summed = accelerator.reduce(value, "sum")
    assert isinstance(summed, Tensor)
    return summed


def any_process(accelerator: Accelerator, flag: bool) -> bool:
    """Return whether `flag` is true on any process, so that all of them stop at the same step."""
    return bool(total(accelerator, torch.tensor(float(flag), device=accelerator.device)) > 0)


@contextmanager
def stopping_together(accelerator: Accelerator, before: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Raise Interrupted on all processes if the block is interrupted on one, which the others would wait for.

    Each process calls `before` when its block has ended, before the processes exchange whether they were interrupted.
    """
    cut = False
    try:
        yield
    except Interrupted:
        cut = True
    before()
    if any_process(accelerator, cut):
        raise Interrupted


def log_main(accelerator: Accelerator, text: str) -> None:
    """Print a log line from the main process to standard error; standard output is reserved for the result."""
    if accelerator.is_main_process:
        print(text, file=sys.stderr, flush=True)


class ProcessExchange:
    """The `Exchange` of models/targets/zero3.py, in process groups of its own: no other collective interleaves with it.

    Construct it on every process at the same point, after the process group exists.
    """

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
