"""The tensors of the KV pool, layer by layer: slots are written and read by attention, moved and copied.

Slot = page * page_size + offset. Who owns which page is the pool's business (infer/kvcache/pool.py).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.attention import DecodingAttention, PagedAttention, ProjectedAttention, plan_attention
from kernels.cpu.memory import zeros
from kernels.decoder import NativeDecoder
from kernels.move import move_slots
from kernels.rotary import QKNorm
from kernels.rows import AttentionRows


class LayerShape(NamedTuple):
    kv_heads: int
    head_dim: int


def kv_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    """What engine.kv_dtype says of a target in `dtype`."""
    return torch.float8_e4m3fn if name == "fp8" else dtype


class KVLayers:
    """Room for `num_pages` pages and the one that belongs to nobody.

    Slots hold `kv_dtype`; what reads and writes them is computed in `dtype`. The first `tree_layers` layers are the
    target's: in these alone an accepted path is moved to the front.
    """

    def __init__(
        self,
        shapes: Sequence[LayerShape],
        *,
        tree_layers: int,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        kv_dtype: torch.dtype | None = None,
        device: torch.device,
    ) -> None:
        self.num_pages, self.page_size, self.device = num_pages, page_size, device
        self._dtype, self._kv_dtype = dtype, kv_dtype or dtype
        slots = (num_pages + 1) * page_size
        # Layers of one shape lie in one tensor [layers, 2, kv_heads, slots, D], so that a move is one operation.
        self._tree_stacks = [
            self._zeros(len(list(group)), 2, shape.kv_heads, slots, shape.head_dim)
            for shape, group in itertools.groupby(shapes[:tree_layers])
        ]
        self.caches = [cache for stack in self._tree_stacks for cache in stack] + [
            self._zeros(2, shape.kv_heads, slots, shape.head_dim) for shape in shapes[tree_layers:]
        ]

    def _zeros(self, *shape: int) -> Tensor:
        if self.device.type == "cpu":
            return zeros(shape, self._kv_dtype)
        return torch.zeros(*shape, dtype=self._kv_dtype, device=self.device)

    def move(self, source: Tensor, destination: Tensor) -> None:
        """Slots `source` `[M]` to slots `destination` in the target's layers; the two may overlap."""
        for stack in self._tree_stacks:
            move_slots(stack, source, destination)

    def copy(self, source: int, destination: int, count: int) -> None:
        """`count` slots from `source` on to those from `destination` on, in every layer; they do not overlap."""
        for cache in self.caches:
            cache[:, :, destination : destination + count] = cache[:, :, source : source + count]

    def attention(
        self, rows: AttentionRows, num_heads: int, num_kv_heads: int, head_dim: int, *, first_layer: int = 0
    ) -> PooledAttention:
        """The attention seam over these rows; `first_layer` is where the model's layers begin."""
        plan = plan_attention(rows, num_heads, num_kv_heads, head_dim, self._dtype, self._kv_dtype)
        return seam_over(type(plan))(self.caches, first_layer, plan)


class PooledAttention:
    """Implements models.attention.Attention over the pool: writes the rows' KV, then reads their request's."""

    def __init__(self, caches: Sequence[Tensor], first_layer: int, plan: PagedAttention) -> None:
        self._caches, self._first, self._plan = caches, first_layer, plan

    def __call__(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, window: int | None = None, scale: float | None = None
    ) -> Tensor:
        return self._plan(q, k, v, self._caches[self._first + layer], scale or q.shape[-1] ** -0.5, window)


class PooledProjections(PooledAttention):
    """Over a form of attention that takes a layer's projections as they are (models.attention.Project)."""

    _plan: ProjectedAttention

    def project(
        self,
        layer: int,
        qkv: Tensor,
        rotary: tuple[Tensor, Tensor],
        norm: QKNorm | None,
        *,
        window: int | None = None,
        scale: float | None = None,
    ) -> Tensor:
        cache = self._caches[self._first + layer]
        return self._plan.project(qkv, rotary, norm, cache, scale or qkv.shape[-1] ** -0.5, window)


class PooledDecoding(PooledAttention):
    """Over a form of attention that whole decoders run over (models.attention.Decode)."""

    _plan: DecodingAttention

    def decode(
        self,
        decoder: NativeDecoder,
        x: Tensor,
        rotary: tuple[Tensor, Tensor],
        entering: Sequence[int] = (),
        tokens: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        caches = self._caches[self._first : self._first + decoder.layers]
        return self._plan.decode(decoder, x, rotary, caches, entering, tokens)


@functools.cache  # to look at a protocol takes longer than a head's layer
def seam_over(plan: type[PagedAttention]) -> type[PooledAttention]:
    """What a model is given over plans of this type."""
    if issubclass(plan, ProjectedAttention):
        return PooledProjections
    return PooledDecoding if issubclass(plan, DecodingAttention) else PooledAttention
