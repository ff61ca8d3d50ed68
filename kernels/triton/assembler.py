# pyright: reportCallIssue=false, reportArgumentType=false
"""The assembler that Triton calls: which one it is, and whether it keeps apart what PTX rounds twice.

Kernels that must round as a CPU does, or alike in two kernels, are compiled without contraction, and their PTX says
`mul.rn` and `add.rn`. ptxas of CUDA 12.9 and 13.0 makes fused instructions of the packed ones, `mul.rn.f32x2` and
`add.rn.f32x2`, which exist from capability 100 on, whatever `--fmad=false` says; 13.1 does not. PTX does not show it,
so an engine asks the device itself at start.
"""

from __future__ import annotations

import re
import subprocess

import torch
import triton
import triton.language as tl
from triton.backends.nvidia.compiler import get_ptxas

from kernels.triton.device import limits

VARIABLES = "TRITON_PTXAS_PATH", "TRITON_PTXAS_BLACKWELL_PATH"  # Triton's, by capability: other files than it brings
CURE = f"pip install 'triton>=3.7', or set {VARIABLES[1]} to the ptxas of CUDA 13.1 or later"
PROBED = 256  # numbers, eight of a thread: so many that two share an instruction


@triton.jit(do_not_specialize=["count"])
def multiply_add(x, out, factor, summand, count, N: tl.constexpr):
    """Replace x by x * factor + summand `count` times; what a loop carries is packed from capability 100 on."""
    index = tl.arange(0, N)
    value = tl.load(x + index)
    for _ in range(count):
        value = value * factor + summand
    tl.store(out + index, value)


def launch_multiply_add(x: torch.Tensor, factor: float, summand: float) -> torch.Tensor:
    out = torch.empty_like(x)
    multiply_add[1,](x, out, factor, summand, 1, N=PROBED, num_warps=1, enable_fp_fusion=False)
    return out


def contracts(device: torch.device) -> bool:
    """Return whether kernels of this device fuse a multiplication and an addition that are to round apart."""
    small = 2.0**-12  # (1 + small)^2 rounds to 1 + 2 small, and the remainder, small^2, shows only if that is left out
    x = torch.full((PROBED,), 1 + small, device=device)
    return bool(launch_multiply_add(x, 1 + small, -(1 + 2 * small)).any())


def assert_not_contracted(device: torch.device) -> None:
    """Raise ValueError, with what to do, if the assembler fuses operations that kernels round apart."""
    if contracts(device):
        capability = limits(device).capability
        raise ValueError(
            f"engine.exact=true: ptxas {version_in_use(capability)}, which Triton {triton.__version__} calls for "
            f"sm_{capability}, fuses multiplications and additions that kernels round apart, so a row may get other "
            f"bits in a prompt than alone: {CURE}; or engine.exact=false, which serves without the promise"
        )


def ptxas(capability: int) -> str | None:
    """Return the path of the assembler that Triton calls for this capability, None if there is none that runs."""
    try:
        return get_ptxas(capability).path
    except RuntimeError:
        return None


def version_in_use(capability: int) -> str | None:
    """Return the version of the ptxas that Triton calls for this capability, None if there is none that runs."""
    path = ptxas(capability)
    return path and version_of(path)


def version_of(path: str) -> str | None:
    """Return the version that the program states, as in 12.8.93; None if it does not run."""
    try:
        said = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    match = re.search(r"V(\d+\.\d+\.\d+)", said)
    return match and match[1]
