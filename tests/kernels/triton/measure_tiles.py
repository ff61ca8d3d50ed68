"""Times the tiles that linear layers could have beside those they take, to choose the rules of `tile_for` from.

`gpu_check.sh --only tiles` runs it. No tile changes a bit of a result, but a launch may fail, for lack of shared memory
or registers; its line says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from itertools import product
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from kernels.linear import PackedLinear
from kernels.triton import ggml, linear
from kernels.triton.linear import Tile
from kernels.weights.ggml_tiles import WIDTH
from tests.device import BF16, DEVICE, describe, orders, sized
from tests.kernels.timing import timing
from tests.kernels.triton.test_linear import LAYERS as SHAPES
from tests.kernels.triton.test_packed_weights import packed, random_rows

NARROW = ("int4 in groups of 128", "int8 by rows", "fp8 by rows", "Q4_K blocks", "Q8_0 blocks")
LAYERS = ("qkv", "o", "gate and up", "down")
CHOSEN = "as chosen"
CASES = [(name, rows) for name in NARROW for rows in (1, 16, 64, 256)]
CASES += [("bf16", rows) for rows in (16, 64, 80, 128, 256, 512, 1024)]


@pytest.mark.gpu(seconds=8)
@pytest.mark.parametrize(("name", "rows"), sized([("bf16", 16), (NARROW[0], 1)], CASES))
def measure_tiles(timed, record_property, pytestconfig, name, rows):
    for layer_name in LAYERS:
        inputs, outputs = SHAPES[layer_name]
        if orders(pytestconfig).get("compiles"):  # sizes do not tell variants apart
            outputs = 1024
        layer = made(name, sized((256, 64), (inputs, outputs)))
        call = called(layer, layer_name, rows)
        for tile, choose in candidates(name, rows):
            with choose:
                if orders(pytestconfig).get("compiles"):
                    with suppress(Exception):  # the measurement itself reports it
                        call()
                else:
                    facts = {"layer": layer_name, "weights": name, "rows": rows, "tile": tile}
                    record_property("tiles", facts | outcome(call, layer.bytes))


def made(name: str, shape: tuple[int, int]) -> PackedLinear:
    if name == "bf16":
        return PackedLinear((torch.randn(shape[1], shape[0], device=DEVICE) * shape[0] ** -0.5).to(BF16))
    return packed(random_rows(name, shape), BF16)


def candidates(name: str, rows: int) -> Iterator[tuple[str, AbstractContextManager[None]]]:
    """Yield the rule's choice and others, each with its name and a context in which it is launched."""
    yield CHOSEN, nullcontext()
    if name == "bf16":
        for tile in dense_tiles(rows):
            yield str(tuple(tile)), dense_chosen(tile)
    else:
        for tile, parts in product(narrow_tiles(rows), (1, ggml.PARTS)):
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
    with forgotten(linear._variant), patch.object(linear, "tile_for", lambda *sizes: tile):
        yield


@contextmanager
def narrow_chosen(tile: Tile, parts: int) -> Iterator[None]:
    chosen = patch.object(ggml, "block_tile_for", lambda *sizes: tile)
    with forgotten(ggml._launch_for), chosen, patch.object(ggml, "divided", lambda *sizes: parts):
        yield


@contextmanager
def forgotten(choice: Any) -> Iterator[None]:
    """Let a cached choice be made anew inside the block and after it."""
    choice.cache_clear()
    try:
        yield
    finally:
        choice.cache_clear()


def called(layer: PackedLinear, name: str, rows: int) -> Callable[[], Tensor]:
    """Return the call of a layer as a step makes it: with the gate's activation, or added to the residual stream."""
    x = torch.randn(rows, layer.in_features, device=DEVICE).to(BF16)
    if name == "gate and up":
        return partial(layer.gated, x, "silu")
    if name == "qkv":
        return partial(layer, x)
    return partial(layer.add, torch.randn(rows, layer.out_features, device=DEVICE).to(BF16), x)


def outcome(call: Callable[[], Tensor], moved: int) -> dict[str, Any]:
    try:
        ms = timing("tiles", "", DEVICE, moved, call)["ms"]
    except Exception as error:  # too much shared memory, too many registers
        return {"error": describe(error)[:120]}
    return {"us": round(1000 * ms, 2), "gb_s": round(moved / ms / 1e6)}
