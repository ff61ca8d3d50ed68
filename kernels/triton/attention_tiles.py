"""Tiles, warps, stages and grids of paged attention on a GPU (kernels/triton/attention.py), by sizes and device."""

from __future__ import annotations

from typing import NamedTuple

import torch

from kernels.rows import WORD_BITS
from kernels.triton.device import Limits

RESIDENT = 2  # programs of `attend` that a multiprocessor runs at once
ROOMY = 160 * 1024  # bytes of shared memory that hold several tiles under way at every head size
FEW_SPLITS = 4  # so few that a step need not wait long for a program that processes all of them
MOST_STATES = 16384  # of a head that are stored, rows times splits: 270 MB with 32 heads of 128


class Blocking(NamedTuple):
    """Bits depend on `tile` and `split`, in positions; `lines` of a product, warps and stages only affect speed.

    Of `2 n + 1` stages a program has `n` tiles under way: the slots of a tile's keys are loaded stages ahead of it.
    """

    lines: int
    tile: int
    split: int
    warps: int
    stages: int


def blocking(head_dim: int, dtype: torch.dtype, group: int, device: Limits) -> Blocking:
    """`group`: query heads of a KV head."""
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


def stages_of_attend(shape: Blocking, padded: int, dtype: torch.dtype, cache: torch.dtype, device: Limits) -> int:
    """Return the stages of a grid so small that each program has a multiprocessor, and its shared memory, to itself.

    It must keep the memory busy alone, so it has more tiles under way; four of them suffice, two if they are widened.
    """
    if dtype == torch.float32:
        return shape.stages
    elements = 2 * shape.tile * padded
    tile = elements * cache.itemsize + 1024  # keys, values and their slots
    widened = elements * dtype.itemsize if cache.itemsize == 1 else 0
    room = device.shared_memory - shape.lines * padded * dtype.itemsize - widened - 4096  # less the queries
    under_way = min(2 if widened else 4, room // tile - 1)  # beside the tile in use
    return max(shape.stages, 2 * under_way + 1)


def merges_itself(
    programs: int, counts: tuple[int, ...], splits: int, head_dim: int, dtype: torch.dtype, tree: bool, device: Limits
) -> bool:
    """Return whether a program processes all splits: if programs fill the device and two states fit in registers.

    But a step waits for its longest context, so several programs share the splits of long ones, unless rows are so many
    that storing states takes too long or too much memory: those of prompts, of which each block is long.
    """
    fits = dtype != torch.float32 and (head_dim <= 128 or not tree)
    many = max(counts) > WORD_BITS or sum(counts) * splits > MOST_STATES
    return fits and programs >= device.multiprocessors and (many or splits <= FEW_SPLITS)


def split_programs(programs: int, splits: int, device: Limits) -> int:
    """Return among how many programs the splits of a block and KV head are divided: enough to fill the device, and some
    where blocks do, for contexts that are longer than others.

    If several share a block's, each has a multiprocessor to itself where that has memory for more tiles under way
    (`stages_of_attend`). In a CUDA graph `splits` is that of the longest context, and most of them are empty.
    """
    alone = device.multiprocessors // programs if device.shared_memory >= ROOMY else 0
    several = alone if alone >= FEW_SPLITS else max(FEW_SPLITS, -(-RESIDENT * device.multiprocessors // programs))
    return min(splits, several)
