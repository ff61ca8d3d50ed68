"""`model.device` and `model.dtype` as torch's device and dtype; the memory that an engine may use of a device."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import torch

from infer.config import EngineConfig, ModelConfig
from models.checkpoint import stated_dtype
from models.targets import resolve_checkpoint


def resolve_dtype(model: ModelConfig) -> torch.dtype:
    """Return `model.dtype`, or for `auto` the checkpoint's. Raises ValueError for a checkpoint dtype not supported."""
    if model.dtype != "auto":
        return getattr(torch, model.dtype)
    return stated_dtype(resolve_checkpoint(model.path_or_hub_id, model.revision, weights=False))


def dtype_name(model: ModelConfig) -> str:
    return str(resolve_dtype(model)).removeprefix("torch.")


def use_device(device: torch.device) -> None:
    """Make a GPU the current device of this thread: Triton launches on that one, wherever the tensors are.

    Every thread begins with the first GPU. Call it in each that runs an engine.
    """
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)


def resolve_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"model.device={name}: this machine has no usable GPU; model.device=cpu runs without")
    return torch.device(name)


def memory_left(config: EngineConfig, device: torch.device, free: int | None, weights: int) -> int | None:
    """Return the bytes that may still be allocated: of the share that the engine may use what the weights leave.

    `free`: bytes that can be allocated; None if unknown, which the result is then too unless a share is set.
    """
    if config.memory_share is None:
        return free
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
    else:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    left = max(int(config.memory_share * total) - weights, 0)
    return left if free is None else min(left, free)


def free_bytes(device: torch.device) -> int | None:
    if device.type == "cuda":
        gc.collect()  # reference cycles may keep alive what is being replaced
        torch.cuda.empty_cache()  # memory in torch's cache counts as free
        return torch.cuda.mem_get_info(device)[0]
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)
