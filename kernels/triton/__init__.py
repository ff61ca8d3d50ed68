"""Triton kernels for GPUs: one file per operation, with its kernels and the function that launches them.

Contracts and dispatch are in kernels/<operation>.py, which import these files only if `in_use` returns True: importing
this package does not import triton, unless TRITON_INTERPRET=1.

HEADWAY_KERNELS says where they run:

    auto    (default) on tensors of a CUDA device
    torch   nowhere: a CUDA device runs the torch implementations
    triton  on the CPU too, in Triton's interpreter, which TRITON_INTERPRET=1 must enable before the process starts;
            slow, for tests: except for speed, the engine then runs as on a GPU
"""

from __future__ import annotations

import os

import torch

SWITCH = "HEADWAY_KERNELS"
INTERPRET = "TRITON_INTERPRET"

INTERPRETED = os.environ.get(INTERPRET) == "1"
if INTERPRETED:
    import kernels.triton.interpreter  # noqa: F401


def in_use(device: torch.device) -> bool:
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
