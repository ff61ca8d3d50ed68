"""Times the tiles that linear layers could have beside those they take, to choose the rules of `tile_for` from.

Not among the default parts: `gpu_check.sh --only tiles`. No tile changes a bit of a result, but a launch may fail, for
lack of shared memory or registers; its line says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from itertools import product
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from kernels.block_tiles import WIDTH
from kernels.linear import PackedLinear
from kernels.triton import blocks, linear
from kernels.triton.linear import Tile
from scripts.gpu_check.blocks import packed, random_rows
from scripts.gpu_check.compiling import describe
from scripts.gpu_check.linear import SHAPES
from scripts.gpu_check.measure import timed
from scripts.gpu_check.plan import Check, Group, Lines

DENSE_ROWS = (16, 64, 80, 128, 256, 512, 1024)
NARROW_ROWS = (1, 16, 64, 256)
NARROW = ("int4 in groups of 128", "int8 by rows", "fp8 by rows", "Q4_K blocks", "Q8_0 blocks")
LAYERS = ("qkv", "o", "gate and up", "down")
BF16 = torch.bfloat16
CHOSEN = "as chosen"


TINY = (256, 64)  # on a CPU
FEW = 1024  # outputs of the layers that are launched to be compiled: sizes do not tell variants apart


def groups(device: torch.device) -> list[Group]:
    """Return one check for each kind of weights; what it launches is compiled by several, one for a number of rows."""
    counts = {"bf16": DENSE_ROWS, **dict.fromkeys(NARROW, NARROW_ROWS)}
    if device.type != "cuda":
        counts = {"bf16": (16,), NARROW[0]: (1,)}
    checks, compiled = list[Check](), list[Check]()
    for name, rows in counts.items():
        checks.append(Check(f"tiles: {name}", ("tiles",), 30, partial(times, name, rows, device)))
        for count in rows:
            launch = partial(launch_all, name, count, device)
            compiled.append(Check(f"tiles: {name}, {count} rows", ("tiles",), 20, list, launch))
    return [Group("tiles", "tiles", checks, compiled=compiled)]


def times(name: str, counts: Sequence[int], device: torch.device) -> Lines:
    lines: Lines = []
    for layer_name in LAYERS:
        layer = made(name, SHAPES[layer_name] if device.type == "cuda" else TINY, device)
        for rows in counts:
            call = called(layer, layer_name, rows, device)
            facts = {"layer": layer_name, "weights": name, "rows": rows}
            for tile, choose in candidates(name, rows):
                with choose:
                    lines.append(facts | {"tile": tile} | outcome(call, layer.bytes, device))
    return lines


def launch_all(name: str, rows: int, device: torch.device) -> None:
    for layer_name in LAYERS:
        layer = made(name, (SHAPES[layer_name][0], FEW) if device.type == "cuda" else TINY, device)
        for _, choose in candidates(name, rows):
            with choose, suppress(Exception):  # the check itself reports it
                called(layer, layer_name, rows, device)()


def made(name: str, shape: tuple[int, int], device: torch.device) -> PackedLinear:
    if name == "bf16":
        return PackedLinear((torch.randn(shape[1], shape[0], device=device) * shape[0] ** -0.5).to(BF16))
    return packed(random_rows(name, shape), BF16, device, None)


def candidates(name: str, rows: int) -> Iterator[tuple[str, AbstractContextManager[None]]]:
    """Yield the rule's choice and others, each with its name and a context in which it is launched."""
    yield CHOSEN, nullcontext()
    if name == "bf16":
        for tile in dense_tiles(rows):
            yield str(tuple(tile)), dense_chosen(tile)
    else:
        for tile, parts in product(narrow_tiles(rows), (1, blocks.PARTS)):
            yield f"{tuple(tile)}, {parts} programs", narrow_chosen(tile, parts)


def dense_tiles(rows: int) -> Iterator[Tile]:
    for n, m, warps, stages in product((64, 128), (16, 64, 128, 256), (4, 8), (3, 4, 6, 8, 12)):
        sums = n * m // (32 * warps)  # registers of a thread
        room = stages * (n + m) * 128 <= 227 * 1024
        if suits(m, rows) and sums <= 128 and (n == 128 or warps == 4 or m == 256) and room:
            yield Tile(n, m, 64, warps, stages)


def narrow_tiles(rows: int) -> Iterator[Tile]:
    for (n, warps), m, stages in product(((64, 4), (128, 8)), (16, 32, 64), (2, 3, 4, 6, 8)):
        if suits(m, min(rows, 64)) and stages * (n * WIDTH + m * 2 * WIDTH) <= 220 * 1024:
            yield Tile(n, m, WIDTH, warps, stages)


def suits(m: int, rows: int) -> bool:
    return min(rows, 64) <= m < 2 * max(rows, 16)


@contextmanager
def dense_chosen(tile: Tile) -> Iterator[None]:
    with patch.object(linear, "tile_for", lambda *sizes: tile):
        yield


@contextmanager
def narrow_chosen(tile: Tile, parts: int) -> Iterator[None]:
    chosen = patch.object(blocks, "block_tile_for", lambda *sizes: tile)
    with chosen, patch.object(blocks, "divided", lambda *sizes: parts):
        yield


def called(layer: PackedLinear, name: str, rows: int, device: torch.device) -> Callable[[], Tensor]:
    """Return the call of a layer as a step makes it: with the gate's activation, or added to the residual stream."""
    x = torch.randn(rows, layer.in_features, device=device).to(BF16)
    if name == "gate and up":
        return partial(layer.gated, x, "silu")
    if name == "qkv":
        return partial(layer, x)
    return partial(layer.add, torch.randn(rows, layer.out_features, device=device).to(BF16), x)


def outcome(call: Callable[[], Tensor], moved: int, device: torch.device) -> dict[str, Any]:
    try:
        measured = timed("tiles", "", device, moved, call).line()
    except Exception as error:  # too much shared memory, too many registers
        return {"error": describe(error)[:120]}
    return {"us": round(1000 * measured["ms"], 2), "gb_s": round(moved / measured["ms"] / 1e6)}
