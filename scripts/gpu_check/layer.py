"""A few decoder layers of an 8B target as a step runs them, with kernels that wait for the one ahead and without.

The time of a layer is what a step of few rows consists of: that of LAYERS layers, by their number. Two do in the
interpreter.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from infer.kvcache.tensors import KVLayers, LayerShape
from kernels.rows import AttentionRows
from kernels.triton.dependent import SWITCH, switched_on
from models.layers import Linear, pack
from models.targets.llama import LlamaTarget
from scripts.gpu_check.measure import Item, captured, same, timed
from scripts.gpu_check.plan import SERVED, KernelCheck
from scripts.gpu_check.targets import config_of, randomised

LAYERS = 4
CONTEXT, PAGE = 1024, 16
REPLAYS = 20
KERNEL = "decoder layers"


def checks(device: torch.device) -> Iterator[KernelCheck]:
    on_gpu = device.type == "cuda"
    dtype = torch.bfloat16 if on_gpu else torch.float32
    for rows in (1, 8, 80) if on_gpu else (3,):
        yield KernelCheck("correctness", f"{KERNEL}, {rows} rows", 2, SERVED, partial(compare, rows, dtype, device))
    for rows in (1, 8, 64) if on_gpu else (3,):
        yield KernelCheck("timings", f"{KERNEL}, {rows} rows", 2, SERVED, partial(time, rows, dtype, device))


class Layers:
    """The layers over a full context, of which the last `rows` positions are computed."""

    def __init__(self, rows: int, dtype: torch.dtype, device: torch.device) -> None:
        config = config_of("llama3.1-8b" if device.type == "cuda" else "tiny")
        self.count = count = LAYERS if device.type == "cuda" else 2
        config = replace(config, num_layers=count, vocab_size=1024, tie_word_embeddings=False)
        self._target = randomised(LlamaTarget, config, dtype, device)
        pack(self._target)
        context = CONTEXT if device.type == "cuda" else 40
        pages, shapes = -(-context // PAGE), [LayerShape(config.num_kv_heads, config.head_dim)] * count
        pool = partial(KVLayers, num_pages=pages, page_size=PAGE, dtype=dtype, device=device)
        self._kv = pool(shapes, tree_layers=count)
        generator = torch.Generator(device).manual_seed(1)
        for cache in self._kv.caches:
            cache.normal_(generator=generator)
        self._ids = torch.arange(rows, device=device)
        self._positions = torch.arange(context - rows, context, device=device)
        table = 1 + torch.arange(pages, device=device)[None]
        self._rows = AttentionRows.blocks(table, [context - rows], [rows], page_size=PAGE)
        linears = [module for module in self._target.layers.modules() if isinstance(module, Linear)]
        self.moved = sum(linear.packed.bytes for linear in linears if linear.packed is not None)
        self.moved += 2 * count * context * config.num_kv_heads * config.head_dim * dtype.itemsize

    @torch.no_grad()
    def run(self, pdl: bool = True) -> Tensor:
        with programmatic(pdl):
            attention = self._kv.attention(self._rows, *self._target.heads)
            return self._target(self._ids, self._positions, attention).hidden


@contextmanager
def programmatic(on: bool) -> Iterator[None]:
    """Launch kernels inside the block with programmatic dependent launch, where the GPU has it, or without."""
    before = os.environ.get(SWITCH)
    os.environ[SWITCH] = "1" if on else "0"
    switched_on.cache_clear()
    try:
        yield
    finally:
        del os.environ[SWITCH]
        if before is not None:
            os.environ[SWITCH] = before
        switched_on.cache_clear()


def compare(rows: int, dtype: torch.dtype, device: torch.device) -> Iterator[Item]:
    """Compare launches that overlap, one after another and in a replayed graph, with ordinary ones."""
    layers = Layers(rows, dtype, device)
    expected, case = layers.run(pdl=False).clone(), f"{rows} rows, {dtype}"
    yield same(KERNEL, f"launched ahead, {case}", layers.run(), expected)
    if device.type != "cuda":
        return
    graph, out = captured(layers.run, device)
    wrong = torch.zeros((), dtype=torch.bool, device=device)
    for _ in range(REPLAYS):
        out.zero_()
        graph.replay()
        wrong |= (out != expected).any()
    yield same(KERNEL, f"launched ahead, {REPLAYS} replays of a graph, {case}", wrong, torch.zeros_like(wrong))


def time(rows: int, dtype: torch.dtype, device: torch.device) -> Iterator[Item]:
    layers = Layers(rows, dtype, device)
    for name, pdl in ((KERNEL, True), (f"{KERNEL}, ordinary launches", False)):
        yield timed(name, f"{layers.count} layers, {rows} rows, {dtype}", device, layers.moved, layers.run, pdl)
