"""The GPU's kernels, in Triton: one file per operation, its kernels and the function that launches them.

Contracts and dispatch are in kernels/<operation>.py, which import these files only where `in_use` says so: importing
this package does not import triton, unless the interpreter is asked for.

HEADWAY_KERNELS says where they run:

    auto    (default) on tensors of a CUDA device
    torch   nowhere: a CUDA device runs the torch forms
    triton  on the CPU too, in Triton's interpreter, which TRITON_INTERPRET=1 must turn on before the process starts;
            slow, and for tests: the engine then runs as on a GPU but for speed
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
    """Whether operations on tensors of this device run in Triton. Raises ValueError if the switch makes no sense."""
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
