# pyright: reportArgumentType=false
"""Programmatic dependent launch: a kernel's programs start while the kernel ahead ends, and wait for what it writes.

Between two kernels of a CUDA graph a GPU stands still for about a microsecond: the last programs end, memory is
flushed, the next programs are placed and read their parameters. A kernel that begins with `follow` overlaps all of that
but the flush. Its programs are placed as soon as every program of the kernel ahead has started, and are then held at
the wait. Since the next kernel may start only after the wait, at most two kernels are under way, and the order of all
reads and writes behind the wait is that of ordinary launches. A kernel that knows nothing of this starts after all
before it have ended.

What programs touch ahead of the wait must not be written by the kernel ahead of theirs: weights, which are constant,
and what the step computed before its layers began, such as addresses of rows. All kernels before the one ahead have
ended: it let this one start only after its own wait, or knows nothing of this and itself started after they had ended.
Such reads are `load_ahead`.

It changes no value. HEADWAY_PDL=0 turns it off; tests/gpu_check compares both.
"""

from __future__ import annotations

import functools
import os

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.triton import INTERPRETED
from kernels.triton.device import limits

SWITCH = "HEADWAY_PDL"


def overlaps(device: torch.device) -> bool:
    """Return whether kernels that begin with `follow` overlap: on Hopper, and on Blackwell in data centres."""
    return not INTERPRETED and limits(device).warpgroups and switched_on()


@functools.cache  # launches ask; clear the cache after a change of the environment
def switched_on() -> bool:
    return os.environ.get(SWITCH) != "0"


def launched(pdl: bool) -> dict[str, bool]:
    """Return the option of a launch of a kernel whose constant PDL is `pdl`."""
    return {"launch_pdl": True} if pdl else {}


@triton.jit
def follow(PDL: tl.constexpr):
    """Wait until the kernel ahead has ended and its writes are visible, then let the next one's programs start."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def load_ahead(pointers, mask=None, other=None):
    """Load what the kernel ahead does not write, ahead of the wait: from L2, which no earlier value can be left in."""
    return tl.load(pointers, mask=mask, other=other, cache_modifier=".cg")


@triton.jit
def prefetch(pointers):
    """Fetch what lies at these addresses into L2, without waiting."""
    addresses = pointers.to(tl.int64)
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; // $0", "=r,l", [addresses], dtype=tl.int32, is_pure=False, pack=1
    )
