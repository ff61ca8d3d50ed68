"""Paged attention for plain decoding, chains, trees and prefill chunks: one contract, three implementations.

Contract: a row's output bits depend only on the keys of its own request, in order of position - not on how many rows
its request verifies, on the shape of the draft, or on the batch. Softmax and sums are fp32. `plan_attention` computes
the addresses of a step's rows once; the plan is then called per layer with the rotated q, k, v of these rows: it writes
k and v into the cache and returns the attention output.

CUDA devices use Triton kernels (kernels/triton/attention.py), CPUs a C kernel (kernels/cpu/attention.c); the torch
implementation (kernels/tiles.py) is for machines without a C compiler and for sizes that the others do not support.
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from kernels.cpu.declarations import structure
from kernels.cpu.library import library
from kernels.dispatch import KINDS, LANES, address, threads, uses_triton
from kernels.operands import QKNorm
from kernels.rows import AttentionRows
from kernels.tiles import KV_TILE, TiledAttention

AttentionArguments = structure("attention_args")  # of attention.h


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
        self, q: Tensor, k: Tensor, v: Tensor, cache: Tensor, scale: float, window: int | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """q `[R, nh, D]`, k and v `[R, nkv, D]`, cache `[2, nkv, slots, D]` of one layer -> `[R, nh * D]`.

        Of a cache `[1, nkv, slots, D]` the values are the first numbers of the keys, as v `[R, nkv, Dv]` of k; the
        result is `[R, nh * Dv]`. With `window` a row sees only the last `window` of its keys. `sinks` `[nh]` are scores
        that take part in the softmax of each head beside those of its keys, with a value of zero.
        """
        ...


@runtime_checkable
class ProjectedAttention(PagedAttention, Protocol):
    """An implementation that takes a layer's raw projections and fuses QK norm, rotation and the cache write."""

    def project(
        self, qkv: Tensor, rotary: tuple[Tensor, Tensor], norm: QKNorm | None, cache: Tensor, scale: float,
        window: int | None = None, sinks: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """qkv `[R, nh + 2 nkv, D]`, rotary: cos and sin `[R, 1, D]` -> `[R, nh * D]`; the rest as in the call."""
        ...


def plan_attention(
    rows: AttentionRows, num_heads: int, cached: LayerShape, dtype: torch.dtype, cache_dtype: torch.dtype | None = None
) -> PagedAttention:
    """Return the attention plan of a step.

    `dtype` is that of q, k, v and the output, `cache_dtype` the cache's if different: fp8 (kernels/copies.py).
    """
    num_kv_heads, head_dim, value_dim = cached
    if uses_triton(rows.table.device):
        from kernels.triton.attention import TritonAttention
        from kernels.triton.attention_tiles import supported

        if supported(num_heads, num_kv_heads, head_dim, dtype, value_dim):
            return TritonAttention(rows, num_heads, num_kv_heads, head_dim, dtype, value_dim)
    if cache_dtype in (None, dtype) and runs_in_c(head_dim, dtype, rows.table.device, value_dim):
        return NativeAttention(rows, num_heads, num_kv_heads, head_dim)
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
        plan = plan_attention(rows, num_heads, LayerShape(num_kv_heads, head_dim, value_dim), dtype, cache_dtype)
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


def runs_in_c(head_dim: int, dtype: torch.dtype, device: torch.device, value_dim: int | None = None) -> bool:
    lib = library() if device.type == "cpu" and dtype in KINDS else None
    return lib is not None and bool(lib.attention_takes(head_dim, value_dim or head_dim))


def slots_between(cache: Tensor) -> int:
    """Return how many slots of `[2, nkv, slots, D]` lie from a head's to those of the next."""
    return cache.stride(1) // cache.shape[3]


class NativeAttention:
    """The plan of one step in C: addresses are computed once, then there is one call per layer.

    `arguments` are for a decoder that runs all layers in one call (kernels/decoder.py).
    """

    def __init__(self, rows: AttentionRows, num_heads: int, num_kv_heads: int, head_dim: int) -> None:
        lib = library()
        assert lib is not None
        self._call = lib.paged_attention
        longest = -(-rows.longest // LANES) * LANES
        table = rows.table
        assert table.stride(1) == 1, "a request's pages lie beside each other"
        request, committed, offset = (tensor.contiguous() for tensor in (rows.request, rows.committed, rows.offset))
        mask = None if rows.tree_mask is None else rows.tree_mask.contiguous()
        count = rows.request.shape[0]
        team = threads(count * num_heads * rows.longest * head_dim)
        scratch = torch.empty(team * lib.attention_scratch(longest))
        self._keep = (table, request, committed, offset, mask, scratch)  # keeps them alive: C holds pointers to them
        self._shape = count, num_heads
        self.arguments = AttentionArguments(
            table=table.data_ptr(),
            request=request.data_ptr(),
            committed=committed.data_ptr(),
            offset=offset.data_ptr(),
            words=address(mask),
            scratch=scratch.data_ptr(),
            rows=count,
            heads=num_heads,
            kv_heads=num_kv_heads,
            dim=head_dim,
            pages=table.stride(0),
            page_size=rows.page_size,
            longest=longest,
            first=rows.first,
            threads=team,
        )
        self._address = ctypes.addressof(self.arguments)

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, cache: Tensor, scale: float, window: int | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        rows, heads = self._shape
        out = torch.empty(rows, heads * v.shape[-1], dtype=cache.dtype)
        a = self.arguments
        a.q, a.k, a.v, a.cache, a.out = q.data_ptr(), k.data_ptr(), v.data_ptr(), cache.data_ptr(), out.data_ptr()
        a.q_stride, a.k_stride, a.v_stride = q.stride(0), k.stride(0), v.stride(0)
        a.slots, a.kind, a.scale, a.window = slots_between(cache), KINDS[cache.dtype], scale, window or 0
        sinks = None if sinks is None else sinks.float().contiguous()
        a.sinks = address(sinks)
        self._call(self._address)
        return out
