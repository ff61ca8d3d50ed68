"""Launches whose tiles, warps and grids depend on the device: every kind of linear layer's tile, and attention."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from kernels.triton import device
from kernels.triton.device import HOPPER
from tests.kernels.triton.launches import (
    FP8,
    INT4,
    INT8,
    attend,
    attend_ranges,
    multiply,
    multiply_and_add,
    multiply_blocks,
    residuals,
)

ROWS = (1, 17, 33, 65, 200, 300, 1000)  # one of each kind of tile; more than 200 are those of a prompt
FEW, MANY = 4096, 28672  # outputs: so few that each program has a multiprocessor to itself (but for 300 rows), and many
LINEAR = [  # what precedes an epilogue is the same with each: all tiles without one, the smallest and the largest with
    *((multiply, rows, outputs, "") for rows in ROWS for outputs in (FEW, MANY)),
    *((multiply, rows, MANY, ", activated") for rows in (1, 65, 200, 300)),
    *((multiply, rows, FEW, ", activated") for rows in (17, 33)),
    *((multiply, rows, FEW, ", added") for rows in (17, 300, 1000)),
]
EPILOGUES: dict[str, Callable[..., Callable[[], None]]] = {
    "": lambda launch, rows, outputs: partial(launch, rows, outputs=outputs),
    ", activated": lambda launch, rows, outputs: partial(launch, rows, outputs=outputs, gate="silu"),
    ", added": lambda launch, rows, outputs: partial(multiply_and_add, rows, launch, outputs),
}

DISASSEMBLED = ("linear_kernel", "ggml_linear_kernel", "attend", "branch")
CASES = {
    **{
        f"linear, {rows} rows, {outputs} outputs{epilogue}": EPILOGUES[epilogue](launch, rows, outputs)
        for launch, rows, outputs, epilogue in LINEAR
    },
    "residual blocks": partial(residuals, 16),
    "blocks, 300 rows, Q6_K": partial(multiply_blocks, 300, "Q6_K"),
    "blocks, 300 rows, int4 in groups, activated": partial(
        multiply_blocks, 300, "int4", 28672, storage=INT4, gate="silu"
    ),
    "blocks, 17 rows, int4 in groups, in parts": partial(multiply_blocks, 17, "int4", storage=INT4),
    "blocks, 64 rows, fp8 by rows, activated": partial(multiply_blocks, 64, "fp8", 28672, storage=FP8, gate="silu"),
    "blocks, 300 rows, int8 by rows": partial(multiply_blocks, 300, "int8", storage=INT8),
    "blocks, 300 rows, Q5_K, activated": partial(multiply_blocks, 300, "Q5_K", 28672, gate="silu"),
    **{
        f"attention, head size {dim}, {'all splits' if whole else 'one split'}{', tree' if tree else ''}": partial(
            attend, dim, whole=whole, tree=tree
        )
        for dim in (64, 128, 256)
        for whole in (False, True)
        for tree in (False, True)
        if dim <= 128 or not (whole and tree)
    },
}
if device.without_gpu is not HOPPER:  # launches.py has Hopper's
    CASES |= {f"attention of training, head size {dim}": partial(attend_ranges, dim) for dim in (64, 128, 256)}
