"""Paged attention in C (attention.c): keys are processed in order of position, so a row's bits depend on no shape."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kernels.cpu.declarations import fields
from kernels.cpu.library import KINDS, LANES, address, library, threads
from kernels.rows import AttentionRows

if TYPE_CHECKING:
    from kernels.cpu.decoder import NativeDecoder  # it imports this module


class Arguments(ctypes.Structure):
    """attention_args of attention.h."""

    __slots__ = ()
    _fields_ = fields("attention_args")


def supported(head_dim: int, dtype: torch.dtype, device: torch.device, value_dim: int | None = None) -> bool:
    lib = library() if device.type == "cpu" and dtype in KINDS else None
    return lib is not None and bool(lib.attention_takes(head_dim, value_dim or head_dim))


class NativeAttention:
    """The plan of one step: addresses are computed once, then there is one call per layer."""

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
        self._arguments = Arguments(
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
        self._address = ctypes.addressof(self._arguments)

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
        return decoder(x, rotary, self._arguments, caches, entering, tokens, block)

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, cache: Tensor, scale: float, window: int | None = None
    ) -> Tensor:
        rows, heads = self._shape
        out = torch.empty(rows, heads * v.shape[-1], dtype=cache.dtype)
        a = self._arguments
        a.q, a.k, a.v, a.cache, a.out = q.data_ptr(), k.data_ptr(), v.data_ptr(), cache.data_ptr(), out.data_ptr()
        a.q_stride, a.k_stride, a.v_stride = q.stride(0), k.stride(0), v.stride(0)
        a.slots, a.kind, a.scale, a.window = cache.shape[2], KINDS[cache.dtype], scale, window or 0
        self._call(self._address)
        return out
