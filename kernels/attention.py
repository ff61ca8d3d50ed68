"""Paged attention for plain decoding, chains, trees and prefill chunks: one contract, three implementations.

Contract: a row's output bits depend only on the keys of its own request, in order of position - not on how many rows
its request verifies, on the shape of the draft, or on the batch. Softmax and sums are fp32. `plan_attention` computes
the addresses of a step's rows once; the plan is then called per layer with the rotated q, k, v of these rows: it writes
k and v into the cache and returns the attention output.

CUDA devices use Triton kernels (kernels/triton/attention.py), CPUs a C kernel (kernels/cpu/attention.c); the torch
implementation (kernels/tiles.py) is for machines without a C compiler and for sizes that the others do not support.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from kernels.cpu import attention as cpu
from kernels.decoder import NativeDecoder
from kernels.rotary import QKNorm
from kernels.rows import AttentionRows
from kernels.tiles import KV_TILE, TiledAttention
from kernels.triton import in_use


class LayerShape(NamedTuple):
    """What a layer caches of a token."""

    kv_heads: int
    head_dim: int
    value_dim: int | None = None  # a value is the first numbers of its key, so many; None: stored beside it

    @property
    def vectors(self) -> int:
        """Of a KV head in a slot: key and value."""
        return 2 if self.value_dim is None else 1


class PagedAttention(Protocol):
    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, cache: Tensor, scale: float, window: int | None = None
    ) -> Tensor:
        """q `[R, nh, D]`, k and v `[R, nkv, D]`, cache `[2, nkv, slots, D]` of one layer -> `[R, nh * D]`.

        Of a cache `[1, nkv, slots, D]` the values are the first numbers of the keys, as v `[R, nkv, Dv]` of k; the
        result is `[R, nh * Dv]`. With `window` a row sees only the last `window` of its keys.
        """
        ...


@runtime_checkable
class ProjectedAttention(PagedAttention, Protocol):
    """An implementation that takes a layer's raw projections and fuses QK norm, rotation and the cache write."""

    def project(
        self,
        qkv: Tensor,
        rotary: tuple[Tensor, Tensor],
        norm: QKNorm | None,
        cache: Tensor,
        scale: float,
        window: int | None = None,
    ) -> Tensor:
        """qkv `[R, nh + 2 nkv, D]`, rotary: cos and sin `[R, 1, D]` -> `[R, nh * D]`; the rest as in the call."""
        ...


@runtime_checkable
class DecodingAttention(PagedAttention, Protocol):
    """An implementation with which all layers of a decoder run in one call (kernels/decoder.py)."""

    def decode(
        self,
        decoder: NativeDecoder,
        x: Tensor,
        rotary: tuple[Tensor, Tensor],
        caches: Sequence[Tensor],
        entering: Sequence[int],
        tokens: Tensor | None,
        block: int,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Run all layers. caches: one per layer; the rest as in the decoder's call."""
        ...


def plan_attention(
    rows: AttentionRows,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    cache_dtype: torch.dtype | None = None,
    value_dim: int | None = None,
) -> PagedAttention:
    """Return the attention plan of a step.

    `dtype` is that of q, k, v and the output, `cache_dtype` the cache's if different: fp8 (kernels/move.py).
    `value_dim`: how many numbers of a key are its value; None: the cache has both.
    """
    if in_use(rows.table.device):
        from kernels.triton import attention as gpu

        if gpu.supported(num_heads, num_kv_heads, head_dim, dtype, value_dim):
            return gpu.TritonAttention(rows, num_heads, num_kv_heads, head_dim, dtype, value_dim)
    if cache_dtype in (None, dtype) and cpu.supported(head_dim, dtype, rows.table.device, value_dim):
        return cpu.NativeAttention(rows, num_heads, num_kv_heads, head_dim)
    return TiledAttention(rows, num_heads, num_kv_heads)


def assert_rows_independent(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
    cache_dtype: torch.dtype | None = None,
    value_dim: int | None = None,
) -> Tensor:
    """Check the contract on this machine: a row alone, among up to 300 rows, beside another request, and in a tree.

    Returns the row's output. Raises ValueError if its bits differ.
    """
    generator = torch.Generator().manual_seed(0)
    page_size, length = 16, 2 * KV_TILE + 40
    pages = -(-length // page_size)
    vectors = 2 if value_dim is None else 1
    cache = torch.randn(vectors, num_kv_heads, (2 * pages + 1) * page_size, head_dim, generator=generator)
    cache = cache.to(device, cache_dtype or dtype)
    q = torch.randn(length, num_heads, head_dim, generator=generator).to(device, dtype)
    k, v = torch.randn(2, length, num_kv_heads, head_dim, generator=generator).to(device, dtype)
    v = v if value_dim is None else k[..., :value_dim]
    table = 1 + torch.arange(2 * pages, device=device).view(2, pages)

    def attend(rows: AttentionRows, index: Tensor) -> Tensor:
        plan = plan_attention(rows, num_heads, num_kv_heads, head_dim, dtype, cache_dtype, value_dim)
        return plan(q[index], k[index], v[index], cache, head_dim**-0.5)

    def last_row(width: int, extra_rows: int) -> Tensor:
        """Return the last position's output, verified among `width` rows, with `extra_rows` of a second request."""
        counts = [width] + ([extra_rows] if extra_rows else [])
        starts = [length - width] + ([9] if extra_rows else [])
        rows = AttentionRows.blocks(table[: len(counts)], starts, counts, page_size=page_size)
        index = torch.cat([torch.arange(length - width, length), torch.arange(extra_rows)]).to(device)
        return attend(rows, index)[width - 1]

    def tree_row() -> Tensor:
        """Return the same position's output as the deepest node of a tree with other nodes between its ancestors."""
        parents = [-1, 0, 0, 1, 2, 2, 5]  # the last three positions are nodes 2, 5 and 6 under the root
        tree_mask = [1]
        for node, parent in enumerate(parents[1:], start=1):
            tree_mask.append(tree_mask[parent] | 1 << node)
        start = length - 4
        rows = AttentionRows.blocks(
            table[:1], [start], [len(parents)], page_size=page_size, tree_mask=torch.tensor(tree_mask, device=device)
        )
        positions = torch.tensor([start, 0, start + 1, 1, 2, start + 2, start + 3], device=device)
        return attend(rows, positions)[-1]

    attend(AttentionRows.blocks(table[:1], [0], [length], page_size=page_size), torch.arange(length, device=device))
    alone = last_row(1, 0)
    others = [last_row(width, extra_rows) for width in (1, 2, 3, 5, 8, 17, 64, 300) for extra_rows in (0, 1, 6)]
    if not all(torch.equal(other, alone) for other in [*others, tree_row()]):
        raise ValueError(
            f"engine.exact=true: on this machine attention ({num_heads} heads, head size {head_dim}, {dtype}) gives a "
            "row other bits in other company; engine.exact=false serves without the promise"
        )
    return alone
