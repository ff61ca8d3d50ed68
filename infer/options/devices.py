"""`model.device` and `model.dtype` as torch's device and dtype."""

from __future__ import annotations

import torch

from infer.config import ModelConfig
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
