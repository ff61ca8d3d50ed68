"""Triton kernels for GPUs: one file per operation, with its kernels and the function that launches them.

Contracts and dispatch are in kernels/<operation>.py, which import these files only if `uses_triton` of
kernels/dispatch.py returns True: importing this package does not import triton, unless TRITON_INTERPRET=1.

HEADWAY_KERNELS says where they run:

    auto    (default) on tensors of a CUDA device
    torch   nowhere: a CUDA device runs the torch implementations
    triton  on the CPU too, in Triton's interpreter, which TRITON_INTERPRET=1 must enable before the process starts;
            slow, for tests: except for speed, the engine then runs as on a GPU
"""

from __future__ import annotations

import os

SWITCH = "HEADWAY_KERNELS"
INTERPRET = "TRITON_INTERPRET"

INTERPRETED = os.environ.get(INTERPRET) == "1"
if INTERPRETED:
    import kernels.triton.interpreter  # noqa: F401
