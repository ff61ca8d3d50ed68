"""What computes slower on this CPU than a kernel in C would, and what would be faster; said once at start.

A missing kernel is no error: oneDNN or torch computes the same layer (kernels/linear.py, kernels/tiles.py).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from functools import cache

import torch

from kernels.attention import runs_in_c
from kernels.cpu.library import SWITCH, compiler, library
from kernels.dispatch import KINDS, uses_triton
from kernels.linear import PackedLinear

log = logging.getLogger(__name__)

TILES = "torch, in tiles"  # how attention is computed without a kernel


def without_library() -> str:
    """Return what to do about missing C kernels; only where there are none."""
    if os.environ.get(SWITCH) == "torch":
        return f"unset {SWITCH}"
    if compiler() is None:
        return "install a C compiler (Debian: apt-get install gcc)"
    return "python -c 'from kernels.cpu.library import library; library()' says why the C kernels were not built"


def cure(dtype: torch.dtype, otherwise: str = "") -> str:
    """Return what would be faster for rows of `dtype` that no kernel of a CPU reads; `otherwise` if dtype is none."""
    if dtype not in KINDS:
        return "model.dtype=bfloat16 or float32, which kernels in C read"
    return without_library() if library() is None else otherwise


def slower_layers(layers: Iterable[PackedLinear], option: str) -> list[str]:
    """Return a line for each kind of linear layer that no kernel reads. `option`: the key that quantizes their weights.

    Layers on other devices than a CPU are none.
    """
    kinds = {(layer.dtype, layer.kernel): layer for layer in layers if layer.on_cpu and layer.native is None}
    lines = []
    for (dtype, kernel), layer in kinds.items():
        eighth = layer.in_features % 8 == 0
        advice = cure(dtype, f"{option}=int8, which a kernel in C reads" if eighth and not layer.narrow else "")
        lines.append(slower_line(f"linear layers ({name_of(dtype)})", kernel, advice))
    return lines


def slower_attention(
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
    cache_dtype: torch.dtype | None = None,
    value_dim: int | None = None,
) -> list[str]:
    """Return a line if no kernel computes attention for this head size and these dtypes on a CPU."""
    if device.type != "cpu" or uses_triton(device):
        return []
    if cache_dtype in (None, dtype):
        if runs_in_c(head_dim, dtype, device, value_dim):
            return []
        advice = cure(dtype)
    else:
        advice = "engine.kv_dtype=same"
    return [slower_line(f"attention (head size {head_dim}, {name_of(dtype)})", TILES, advice)]


def slower_line(what: str, kernel: str, advice: str) -> str:
    return f"{what}: no kernel in C, computed by {kernel}, which is slower" + (f"; faster: {advice}" if advice else "")


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@cache
def say_once(line: str) -> None:
    log.warning("%s", line)


def say_slower(lines: Iterable[str]) -> None:
    """Log each line, once in a process."""
    for line in lines:
        say_once(line)
