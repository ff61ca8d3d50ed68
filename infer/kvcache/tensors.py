"""The KV pool's tensors, layer by layer: attention writes and reads slots; slots can be moved and copied.

Slot = page * page_size + offset. Ownership of pages is managed by the pool (infer/kvcache/pool.py).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kernels.attention import LayerShape, NativeAttention, PagedAttention, ProjectedAttention, plan_attention, runs_in_c
from kernels.copies import move_slots, write_kv
from kernels.cpu.memory import zeros
from kernels.decoder import NativeDecoder
from kernels.operands import QKNorm
from kernels.rows import AttentionRows
from kernels.slots import SlotRuns
from models.attention import WriteKeys


def kv_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    """Return the KV dtype that engine.kv_dtype=`name` selects for a target in `dtype`."""
    return torch.float8_e4m3fn if name == "fp8" else dtype


class KVLayers:
    """KV tensors of `num_pages` pages and the null block.

    Slots are stored as `kv_dtype`; attention computes in `dtype`. The first `tree_layers` layers are the target's: only
    in these is an accepted path moved to the front.
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
        self._shapes = tuple(shapes)
        # Adjacent layers of one shape share a tensor [layers, 2, kv_heads, slots, D], so that a move is one operation.
        stacks = [(len(list(group)), shape) for shape, group in itertools.groupby(shapes[:tree_layers])]
        others = [(1, shape) for shape in shapes[tree_layers:]]
        memory = SlotRuns(stacks or others, num_pages + 1, page_size, device)
        self.page_ids = memory.page_ids
        self._tree_stacks = [memory.zeros(*stack, self._kv_dtype) for stack in stacks]
        tensors = [*self._tree_stacks, *(memory.zeros(*other, self._kv_dtype) for other in others)]
        self.caches = [cache for tensor in tensors for cache in tensor]

    def zeros(self, *shape: int, dtype: torch.dtype) -> Tensor:
        return zeros(shape, dtype) if self.device.type == "cpu" else torch.zeros(shape, dtype=dtype, device=self.device)

    def free(self) -> None:
        """Free the memory, whoever still refers to these layers."""
        self.caches.clear()
        self._tree_stacks.clear()

    def move(self, source: Tensor, destination: Tensor) -> None:
        """Move slots `source` `[M]` to slots `destination` in the target's layers; the two may overlap."""
        for stack in self._tree_stacks:
            move_slots(stack, source, destination)

    def copy(self, source: int, destination: int, count: int) -> None:
        """Copy `count` slots from `source` on to `destination` on, in every layer; the ranges must not overlap."""
        for cache in self.caches:
            cache[:, :, destination : destination + count] = cache[:, :, source : source + count]

    def writer(self, rows: AttentionRows, *, first_layer: int = 0) -> WriteKeys:
        """Return the callable that stores keys and values of these rows, which attend to nothing."""
        in_c = self._kv_dtype is self._dtype and runs_in_c(self._shapes[first_layer].head_dim, self._dtype, self.device)
        caches, slots = self.caches[first_layer:], rows.slots
        return lambda layer, k, v: write_kv(caches[layer], slots, k, v, shared_tiles=not in_c)

    def attention(self, rows: AttentionRows, num_heads: int, *, first_layer: int = 0) -> PooledAttention:
        """Return the attention callable for these rows; `first_layer` is where the model's layers begin in the pool."""
        plan = plan_attention(rows, num_heads, self._shapes[first_layer], self._dtype, self._kv_dtype)
        return attention_class_for(type(plan))(self.caches, first_layer, plan)


class PooledAttention:
    """Implements models.attention.Attention over the pool: writes the rows' KV, then attends to their requests' KV."""

    def __init__(self, caches: Sequence[Tensor], first_layer: int, plan: PagedAttention) -> None:
        self._caches, self._first, self._plan = caches, first_layer, plan

    def __call__(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, window: int | None = None, scale: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        return self._plan(q, k, v, self._caches[self._first + layer], scale or q.shape[-1] ** -0.5, window, sinks)


class PooledProjections(PooledAttention):
    """Implements models.attention.Project: attention that takes a layer's raw QKV projections."""

    _plan: ProjectedAttention

    def project(
        self, layer: int, qkv: Tensor, rotary: tuple[Tensor, Tensor], norm: QKNorm | None, *,
        window: int | None = None, scale: float | None = None, sinks: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        cache = self._caches[self._first + layer]
        return self._plan.project(qkv, rotary, norm, cache, scale or qkv.shape[-1] ** -0.5, window, sinks)


class PooledDecoding(PooledAttention):
    """Implements models.attention.Decode: attention that runs inside a fused decoder."""

    _plan: NativeAttention

    def decode(
        self, decoder: NativeDecoder, x: Tensor, rotary: tuple[Tensor, Tensor], *others: Any, **named: Any
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        caches = self._caches[self._first : self._first + decoder.attention_layers]
        return decoder(x, rotary, self._plan.arguments, caches, *others, **named)


@functools.cache  # a protocol's issubclass takes longer than a head's layer
def attention_class_for(plan: type[PagedAttention]) -> type[PooledAttention]:
    """Return the attention class that models get for plans of this type."""
    if issubclass(plan, ProjectedAttention):
        return PooledProjections
    return PooledDecoding if issubclass(plan, NativeAttention) else PooledAttention
