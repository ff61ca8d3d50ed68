"""Launches whose tiles, warps and grids depend on the device: every kind of linear layer's tile, and attention."""

from __future__ import annotations

from functools import partial

from tests.kernels.triton.launches import (
    attend,
    draft_blocks,
    multiply,
    multiply_and_add,
    multiply_blocks,
    multiply_int4,
    residuals,
    unrolled,
)

ROWS = (1, 17, 33, 65, 300)  # one of each kind of tile; 300 are those of a prompt
OUTPUTS = (4096, 28672)  # so few that each program has a multiprocessor to itself (but for 300 rows), and many
FORMATS = {"16 bits": multiply, "int8": partial(multiply, weight_format="int8"), "int4": multiply_int4}

CASES = {
    **{
        f"linear, {rows} rows, {outputs} outputs, {name}": partial(launch, rows, outputs=outputs)
        for name, launch in FORMATS.items()
        for outputs in OUTPUTS
        for rows in ROWS
    },
    **{
        f"linear, {rows} rows, {outputs} outputs, {name}, activated": partial(
            launch, rows, outputs=outputs, gate="silu"
        )
        for name, launch in FORMATS.items()
        for outputs in OUTPUTS
        for rows in ROWS
    },
    **{
        f"linear, {rows} rows, 4096 outputs, {name}, added": partial(multiply_and_add, rows, launch)
        for name, launch in FORMATS.items()
        for rows in ROWS
    },
    **{
        f"linear, {rows} rows, 4096 outputs, int4 in small groups": partial(multiply_int4, rows, group=32)
        for rows in (1, 300)
    },
    "residual blocks": partial(residuals, 16),
    "blocks, 300 rows, Q6_K": partial(multiply_blocks, 300, "Q6_K"),
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
    **{f"block drafter, head size {dim}": partial(draft_blocks, dim) for dim in (64, 128, 256)},
    "training-time test": partial(unrolled, 128),
}
