"""Kernels whose exactness rests on products that are rounded before they are added: one launch of each."""

from __future__ import annotations

import torch

from kernels.triton.assembler import PROBED, launch_multiply_add
from tests.kernels.triton import launches
from tests.kernels.triton.launches import empty

NAMES = (
    *("choose, sampled", "walk along chains", "top-k and top-p", "shape", "entropies", "block verification"),
    *("verify, sinks", "prefill, sinks", "norms", "rotary and QK norm", "silu", "gelu", "gelu of all outputs, by tanh"),
    *("recurrence of chains", "recurrence of trees", "recurrence, Mamba-2"),
)
PROBE = "the engine's own question"
DISASSEMBLED = ()
COUNTS_FUSED = True
CASES = {
    PROBE: lambda: launch_multiply_add(empty(PROBED, dtype=torch.float32), 1.0, 1.0),
    **{name: launches.CASES[name] for name in NAMES},
}
