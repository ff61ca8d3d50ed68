"""A few decoder layers of an 8B target as a step runs them, with kernels that wait for the one ahead and without."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from infer.kvcache.tensors import KVLayers
from kernels.attention import LayerShape
from kernels.rows import AttentionRows
from kernels.triton.dependent import SWITCH, switched_on
from models.layers import Linear, pack
from models.targets.llama import LlamaTarget
from tests.device import DEVICE, ON_GPU, served, sized
from tests.kernels.timing import captured
from tests.kernels.triton.targets import config_of, randomised

COUNT = sized(2, 4)
CONTEXT, PAGE = sized(40, 1024), 16
DTYPE = sized(torch.float32, torch.bfloat16)
REPLAYS = 20
KERNEL = "decoder layers"


class Layers:
    """The layers over a full context, of which the last `rows` positions are computed. `moved`: bytes they read."""

    def __init__(self, rows: int) -> None:
        config = config_of(sized("tiny", "llama3.1-8b"))
        config = replace(config, num_layers=COUNT, vocab_size=1024, tie_word_embeddings=False)
        self._target = randomised(LlamaTarget, config, DTYPE, DEVICE)
        pack(self._target)
        pages, shapes = -(-CONTEXT // PAGE), [LayerShape(config.num_kv_heads, config.head_dim)] * COUNT
        pool = partial(KVLayers, num_pages=pages, page_size=PAGE, dtype=DTYPE, device=DEVICE)
        self._kv = pool(shapes, tree_layers=COUNT)
        generator = torch.Generator(DEVICE).manual_seed(1)
        for cache in self._kv.caches:
            cache.normal_(generator=generator)
        self._ids = torch.arange(rows, device=DEVICE)
        self._positions = torch.arange(CONTEXT - rows, CONTEXT, device=DEVICE)
        table = 1 + torch.arange(pages, device=DEVICE)[None]
        self._rows = AttentionRows.blocks(table, [CONTEXT - rows], [rows], page_size=PAGE)
        linears = [module for module in self._target.layers.modules() if isinstance(module, Linear)]
        self.moved = sum(linear.packed.bytes for linear in linears if linear.packed is not None)
        self.moved += 2 * COUNT * CONTEXT * config.num_kv_heads * config.head_dim * DTYPE.itemsize

    @torch.no_grad()
    def run(self, pdl: bool = True) -> Tensor:
        with programmatic(pdl):
            attention = self._kv.attention(self._rows, self._target.heads[0])
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


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [served(rows) for rows in sized((3,), (1, 8, 80))])
def test_launches_that_overlap_change_no_bit(in_triton, compare, rows):
    """One after another, and on a GPU in a replayed graph."""
    layers = Layers(rows)
    expected, case = layers.run(pdl=False).clone(), f"{rows} rows, {DTYPE}"
    compare.same(KERNEL, f"launched ahead, {case}", layers.run(), expected)
    if not ON_GPU:
        return
    graph, out = captured(layers.run, DEVICE)
    wrong = torch.zeros((), dtype=torch.bool, device=DEVICE)
    for _ in range(REPLAYS):
        out.zero_()
        graph.replay()
        wrong |= (out != expected).any()
    compare.same(KERNEL, f"launched ahead, {REPLAYS} replays of a graph, {case}", wrong, torch.zeros_like(wrong))
