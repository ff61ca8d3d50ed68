# pyright: reportCallIssue=false
"""Linear layers on a GPU whose weights are in blocks or groups of 4 to 8 bits (weights/ggml_tiles.py), and their rows.

Chooses tiles, and whether the parts of K are programs of their own, and launches the kernels of block_kernels.py.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernels.elementwise import Gate
from kernels.triton import INTERPRETED
from kernels.triton.block_kernels import add_parts_kernel, block_rows_kernel, ggml_linear_kernel
from kernels.triton.dependent import launched, overlaps
from kernels.triton.device import Limits, limits
from kernels.triton.elementwise import gate_mul
from kernels.triton.launch import Variant
from kernels.triton.linear import Tile
from kernels.weights.ggml_tiles import WIDTH, GgmlTiles, Storage

PARTS = 4  # of K; it affects the bits
ADDED_LINES, ADDED_ROWS = 32, 16  # of a program that adds parts


class Layout(NamedTuple):
    """What a launch depends on of tiled weights."""

    storage: Storage
    outputs: int
    inputs: int
    columns: int  # words of an output in a tile
    words: int  # of an output's scales, for the tiles that share them


def layout_of(part: GgmlTiles) -> Layout:
    return Layout(part.storage, part.outputs, part.inputs, part.words.shape[3], part.scales.shape[2])


def block_tile_for(rows: int, x: torch.dtype, part: Layout, device: Limits) -> Tile:
    """Return the tile of a launch; `k` is that of the weights, which affects no bits.

    With three stages several programs fit on a multiprocessor, and one converts weights while others wait for theirs.
    """
    if x == torch.float32:  # no tensor cores
        return Tile(n=32, m=16 if rows <= 16 else 32, k=WIDTH, warps=4, stages=2)
    single = part.storage.group >= WIDTH and not part.storage.offset  # with more groups in a tile 64 rows spill
    m = min(64 if single and device.warpgroups else 32, max(16, 1 << (rows - 1).bit_length()))
    # Not on Blackwell, for which Triton 3.7.1 makes kernels of some formats that compute nothing.
    if m == 64 and device.capability == 90 and part.outputs > 128 * device.multiprocessors:
        return Tile(128, m, WIDTH, warps=8, stages=3)
    return Tile(64, m, WIDTH, warps=4, stages=3)


def ggml_linear(
    x: Tensor,
    parts: Sequence[GgmlTiles],
    bias: Tensor | None = None,
    *,
    residual: Tensor | None = None,
    gate: Gate | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """x `[M, K]` with any row stride, in fp32, fp16 or bf16, weights `[N, K]` of parts below one another -> `[M, N]`.

    The others as in kernels.triton.linear.linear. A launch for each part, and with a gate another one if there are
    several.
    """
    assert residual is None or gate is None, "no layer does both"
    if gate is not None and len(parts) > 1:
        return gate_mul(ggml_linear(x, parts, bias), gelu=gate == "gelu")
    outputs = sum(part.outputs for part in parts) // (2 if gate else 1)
    out, first = x.new_empty(x.shape[0], outputs, dtype=out_dtype), 0
    for part in parts:
        last = first + part.outputs
        columns = None if bias is None else bias[first:last]
        before = None if residual is None else residual[:, first:last]
        _launch(x, part, columns, before, gate, out[:, first:])
        first = last
    return out


def _launch(
    x: Tensor, part: GgmlTiles, bias: Tensor | None, residual: Tensor | None, gate: Gate | None, out: Tensor
) -> None:
    x = x if part.order is None else x[:, part.order]
    rows, columns = x.shape[0], part.outputs // 2 if gate else part.outputs
    flags = bias is not None, residual is not None, gate, overlaps(x.device)
    launch = _launch_for(rows, x.dtype, layout_of(part), limits(x.device), *flags)
    partial = None if launch.adding is None else x.new_empty(launch.parts, rows, launch.width, dtype=torch.float32)
    stride = 0 if residual is None else residual.stride(0)
    weights, sizes = (part.words, part.upper, part.scales), (rows, x.stride(0), stride, out.stride(0))
    launch.variant.launch(launch.grid, x, *weights, bias, residual, out, partial, *sizes, part.inputs, columns)
    if launch.adding is not None:
        grid = -(-rows // ADDED_ROWS), -(-launch.width // ADDED_LINES)
        sizes = rows, stride, out.stride(0), launch.parts, columns, launch.width
        launch.adding.launch(grid, partial, bias, residual, out, *sizes)


class Launch(NamedTuple):
    """What is launched for a layer and number of rows. `adding`: adds `parts` of `width` lines, if they are apart."""

    variant: Variant
    grid: tuple[int, int, int]
    parts: int
    width: int
    adding: Variant | None


@functools.cache
def _launch_for(
    rows: int, x: torch.dtype, part: Layout, device: Limits, biased: bool, added: bool, gate: Gate | None, pdl: bool
) -> Launch:
    tile = block_tile_for(rows, x, part, device)
    grid = -(-rows // tile.m), -(-part.outputs // tile.n)
    parts = divided(-(-part.inputs // WIDTH), grid[0] * grid[1], device)
    finished = biased, added, gate, pdl
    variant = _variant_of_tile(tile, part, parts > 1, x == torch.bfloat16 and INTERPRETED, *finished)
    adding = _adding(*finished) if parts > 1 else None
    return Launch(variant, (*grid, parts), parts, grid[1] * tile.n, adding)


def divided(tiles: int, programs: int, device: Limits) -> int:
    """Return how many programs share the `tiles` along K of each of so many programs: 1, or one for each part."""
    if programs > device.multiprocessors:
        return 1
    return -(-tiles // -(-tiles // PARTS))


@functools.cache
def _variant_of_tile(
    tile: Tile, part: Layout, split: bool, upcast: bool, biased: bool, added: bool, gate: Gate | None, pdl: bool
) -> Variant:
    constants = {
        "BLOCK_N": tile.n, "BLOCK_M": tile.m, "WHOLE_K": part.inputs % WIDTH == 0, "PARTS": PARTS, "SPLIT": split,
        "STAGES": tile.stages, "UPCAST": upcast, **_finishing(biased, added, gate, pdl), **_constants(part),
    }  # fmt: skip
    options = {"num_warps": tile.warps, "num_stages": tile.stages, "maxnreg": 255, "enable_fp_fusion": False}
    return Variant(ggml_linear_kernel, constants, **options, **launched(pdl))


@functools.cache
def _adding(biased: bool, added: bool, gate: Gate | None, pdl: bool) -> Variant:
    constants = {"BLOCK_N": ADDED_LINES, "BLOCK_M": ADDED_ROWS, **_finishing(biased, added, gate, pdl)}
    return Variant(add_parts_kernel, constants, num_warps=1, enable_fp_fusion=False, **launched(pdl))


def _finishing(biased: bool, added: bool, gate: Gate | None, pdl: bool) -> dict[str, Any]:
    return {"BIASED": biased, "ADDED": added, "GATED": gate is not None, "GELU": gate == "gelu", "PDL": pdl}


def block_rows(part: GgmlTiles, ids: Tensor, dtype: torch.dtype) -> Tensor:
    """Return rows `ids` int64 `[R]` of the weights, `[R, K]`, each value rounded once, in the order of the tiles."""
    out = torch.empty(len(ids), part.inputs, dtype=dtype, device=ids.device)
    tiles = part.words.shape[1]
    block_rows_kernel[(len(ids), tiles)](
        ids,
        part.words,
        part.upper,
        part.scales,
        out,
        part.inputs,
        tiles,
        enable_fp_fusion=False,
        num_warps=1,
        **_constants(layout_of(part)),
    )
    return out


def _constants(part: Layout) -> dict[str, int | str]:
    storage = part.storage
    return {
        "COLUMNS": part.columns,
        "WORDS": part.words,
        "SHARING": storage.sharing,
        "BITS": storage.bits,
        "UPPER": storage.upper,
        "SIGNED": storage.signed,
        "GROUP": min(storage.group, WIDTH),
        "SCALES": storage.scales,
        "OFFSET": storage.offset,
        "ZERO": storage.zero,
        "FLOATS": storage.floats,
    }
