"""Tiles, warps, stages and grids of paged attention on a GPU (kernels/triton/attention.py), by sizes and device."""

from __future__ import annotations

import functools
import itertools
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.copies import upload
from kernels.triton.device import Limits

LATENT_LINES = 16  # of a product with values of 512 numbers
RESIDENT = 2  # programs of `attend` that a multiprocessor runs at once


class Blocking(NamedTuple):
    """Bits depend on `tile` and `split`, in positions; `lines` of a product, warps and stages only affect speed."""

    lines: int
    tile: int
    split: int
    warps: int
    stages: int


def supported(
    num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, value_dim: int | None = None
) -> bool:
    most = {torch.float32: 16, torch.float16: 64, torch.bfloat16: 64}.get(dtype, 0)  # lines of a product
    if value_dim is not None:
        rest = head_dim - value_dim
        return most > 0 and num_kv_heads == 1 and 16 <= value_dim <= 512 and rest >= 16 and rest & (rest - 1) == 0
    return num_heads // num_kv_heads <= most and 16 <= head_dim <= 256


def blocking(head_dim: int, dtype: torch.dtype, group: int, device: Limits) -> Blocking:
    """`group`: query heads of a KV head."""
    if head_dim > 256:  # values that are parts of keys
        return Blocking(LATENT_LINES, tile=16 if dtype == torch.float32 else 32, split=512, warps=8, stages=2)
    if dtype == torch.float32:  # no tensor cores: small products
        return Blocking(lines=16, tile=32, split=512, warps=4, stages=2)
    lines = 64 if device.warpgroups or group > 32 else 32
    if head_dim > 128:
        return Blocking(lines, tile=32, split=512, warps=8, stages=2 if device.warpgroups else 3)  # 2 spill on sm_89
    # a warpgroup computes each score once; two would both compute all of them and fill a multiprocessor's registers
    return Blocking(lines, tile=64, split=512, warps=4 if head_dim <= 64 or device.warpgroups else 8, stages=3)


def warps_of_attend(shape: Blocking, head_dim: int, whole: bool, tree: bool, cache: torch.dtype) -> int:
    """Return how many warps run `attend`: with WHOLE it has two states, and four warps' registers may not suffice if
    both are stored or keys are widened.
    """
    crowded = whole and head_dim > 64 and (tree or cache.itemsize == 1)
    return max(shape.warps, 8 if crowded else 4)


def merges_itself(programs: int, head_dim: int, dtype: torch.dtype, tree: bool, device: Limits) -> bool:
    """Return whether a program processes all splits: if programs fill the device and two states fit in registers."""
    fits = dtype != torch.float32 and (head_dim <= 128 or not tree)
    return fits and programs >= device.multiprocessors


def split_programs(programs: int, splits: int, device: Limits) -> int:
    """Return among how many programs the splits of a block and KV head are divided: enough to fill the device.

    In a CUDA graph `splits` is that of the longest context, and most of them are empty.
    """
    return min(splits, -(-RESIDENT * device.multiprocessors // programs))


def row_blocks(counts: tuple[int, ...], nodes: int, device: torch.device) -> Tensor:
    """Return first row and number of rows of each block, `[blocks, 2]` int32, at most `nodes` rows of one request.

    A graph keeps the address of the tensor that was made before its capture.
    """
    if len(set(counts)) == 1:
        return _equal_blocks(len(counts), counts[0], nodes, device)
    return upload(_block_list(counts, nodes), device, torch.int32)


@functools.cache
def _equal_blocks(requests: int, count: int, nodes: int, device: torch.device) -> Tensor:
    return upload(_block_list((count,) * requests, nodes), device, torch.int32)


def _block_list(counts: tuple[int, ...], nodes: int) -> list[list[int]]:
    starts = itertools.accumulate(counts, initial=0)
    return [
        [start + offset, min(nodes, count - offset)]
        for start, count in zip(starts, counts, strict=False)
        for offset in range(0, count, nodes)
    ]
