"""Where an operation runs: in Triton, in C or in torch; and what C reads of tensors."""

from __future__ import annotations

import os

import torch
from torch import Tensor

from kernels.triton import INTERPRET, SWITCH

LANES = 16  # floats of the longest vector of vec.h; sizes that are no multiple of it use torch
PARALLEL_WORK = 2**18  # multiply-adds below which waking a second thread costs more than it saves
KINDS = {torch.float32: 0, torch.bfloat16: 1}  # vec.h


def uses_triton(device: torch.device) -> bool:
    """Return whether operations on tensors of this device run in Triton. Raises ValueError for an invalid setting."""
    switch = os.environ.get(SWITCH, "auto")
    if switch not in ("auto", "torch", "triton"):
        raise ValueError(f"{SWITCH}={switch}: one of auto, torch, triton")
    if device.type == "cuda":
        return switch != "torch"
    if device.type != "cpu" or switch != "triton":
        return False
    if os.environ.get(INTERPRET) != "1":
        raise ValueError(f"{SWITCH}=triton: without a GPU it needs {INTERPRET}=1 as well, set before Python starts")
    return True


def address(tensor: Tensor | None) -> int | None:
    """Return the null pointer (None) for no tensor."""
    return None if tensor is None else tensor.data_ptr()


def threads(work: int) -> int:
    """Return on how many threads C should do this many multiply-adds."""
    return torch.get_num_threads() if work > PARALLEL_WORK else 1


def active_dtype(x: Tensor) -> torch.dtype:
    """Return autocast's dtype on x's device if that is on, else x's."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def norm_dtype(x: Tensor, weight: Tensor) -> torch.dtype:
    """Return the dtype of a norm's output: the weight's of a residual stream in fp32, else x's, as under autocast."""
    return weight.dtype if x.dtype is torch.float32 else x.dtype
