"""Paged attention for plain decoding, chains, trees and prefill chunks: one contract, one code path.

Contract: a row's bits depend on its own request alone - not on how many rows its request verifies, nor on the batch.
Keys are read in tiles of KV_TILE positions at fixed offsets; each tile is one matrix product of fixed inner shape,
and partial results are combined in tile order. A masked key weighs exactly zero. Softmax and sums are fp32.

A row sees every committed position of its request, and of the rows of this step only its ancestors-or-self (the bits
of its ancestor word, or simply the rows before it when no words are given).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

KV_TILE = 256
MIN_GEMM_ROWS = 8  # a product of fewer rows takes another path in the CPU's library (probed: fewer than 4 differ)
MASKED = -1e30  # finite, so that a tile in which a row sees nothing yields weight 0 and no NaN


@dataclass
class AttentionPlan:
    """What one step's attention needs, the same for every layer. B requests, N rows at most, S tiles in all."""

    gather: Tensor  # [S * KV_TILE] slots to read, tile after tile
    bias: Tensor  # [kv_heads * S, N * group, KV_TILE] 0 or MASKED
    tile_request: Tensor  # [S] which request a tile belongs to
    rows: Tensor | None  # [R] where row r of the flat batch stands in [B * N]; None when they coincide
    requests: int
    width: int  # N, padded
    merge: Tensor | None  # [B, T] tile of each request in order, or None when every request has one tile
    merge_valid: Tensor | None  # [B, T] bool


def plan_attention(
    block_table: Tensor,
    committed: Tensor,
    counts: Tensor,
    *,
    page_size: int,
    num_kv_heads: int,
    group: int,
    ancestors: Tensor | None = None,
) -> AttentionPlan:
    """block_table `[B, P]` page ids, committed `[B]` positions before this step, counts `[B]` rows of this step.

    `ancestors` `[B, N]` int64 (DraftTree); None means causal among the step's rows.
    """
    device = block_table.device
    requests, width = counts.shape[0], int(counts.max())
    ragged = int(counts.min()) != width
    padded = max(width, -(-MIN_GEMM_ROWS // group))
    ends = committed + counts
    tiles = (ends + KV_TILE - 1) // KV_TILE  # [B]
    most = int(tiles.max())
    tile_request = torch.repeat_interleave(torch.arange(requests, device=device), tiles)  # [S]
    first = torch.cumsum(tiles, 0) - tiles
    tile_index = torch.arange(len(tile_request), device=device) - first[tile_request]
    key = tile_index[:, None] * KV_TILE + torch.arange(KV_TILE, device=device)  # [S, KV_TILE] positions
    page = (key // page_size).clamp(max=block_table.shape[1] - 1)
    slots = block_table[tile_request].gather(1, page) * page_size + key % page_size
    node = torch.arange(padded, device=device)
    offset = (key - committed[tile_request, None])[:, None, :]  # [S, 1, KV_TILE] position within the step's rows
    if ancestors is None:
        seen = offset <= node[:, None]
    else:
        words = F.pad(ancestors, (0, padded - ancestors.shape[1]))[tile_request]  # [S, N]
        seen = (offset < 0) | ((words[:, :, None] >> offset.clamp(0, 63)) & 1).bool() & (offset < 64)
    visible = seen & (key < ends[tile_request, None])[:, None, :]
    bias = torch.zeros(visible.shape, device=device).masked_fill_(~visible, MASKED)
    bias = bias.repeat_interleave(group, dim=1).repeat(num_kv_heads, 1, 1)
    rows = merge = merge_valid = None
    if ragged or padded != width:
        local = torch.arange(width, device=device)
        rows = (torch.arange(requests, device=device)[:, None] * padded + local)[local < counts[:, None]]
    if most > 1:
        step = torch.arange(most, device=device)
        merge_valid = step < tiles[:, None]
        merge = torch.where(merge_valid, first[:, None] + step, 0)
    return AttentionPlan(slots.flatten(), bias, tile_request, rows, requests, padded, merge, merge_valid)


def node_plan(plan: AttentionPlan, node: int, width: int) -> AttentionPlan:
    """The plan of one row per request, row `node` of the `width` rows that `plan` was made for (none of them ragged).

    A chain is drafted row by row over the same keys: one plan of the whole chain serves every row of it.
    """
    assert plan.width >= width > node
    tiles, _, keys = plan.bias.shape
    padded = -(-MIN_GEMM_ROWS // (plan.bias.shape[1] // plan.width))
    own = plan.bias.view(tiles, plan.width, -1, keys)[:, node : node + 1]
    bias = own.expand(-1, padded, -1, -1).reshape(tiles, -1, keys)
    rows = None if padded == 1 else torch.arange(plan.requests, device=bias.device) * padded
    return replace(plan, bias=bias, rows=rows, width=padded)


def paged_attention(q: Tensor, cache: Tensor, plan: AttentionPlan, scale: float) -> Tensor:
    """q `[R, nh, D]`, cache `[2, nkv, slots, D]` of one layer -> `[R, nh * D]` in q's dtype."""
    _, heads, dim = q.shape
    kv_heads, tiles = cache.shape[1], len(plan.tile_request)
    group, B, N = heads // kv_heads, plan.requests, plan.width
    if plan.rows is not None:
        q = q.new_zeros(B * N, heads, dim).index_copy_(0, plan.rows, q)
    q = q.view(B, N, kv_heads, group, dim).permute(2, 0, 1, 3, 4).reshape(kv_heads, B, N * group, dim).float()
    if plan.merge is not None:
        q = q.index_select(1, plan.tile_request)  # [nkv, S, N * group, D]
    keys, values = cache.index_select(2, plan.gather).float().view(2, kv_heads * tiles, KV_TILE, dim)
    scores = torch.baddbmm(plan.bias, q.view(-1, N * group, dim), keys.transpose(1, 2), alpha=scale)
    out = torch.bmm(scores.softmax(-1), values)  # [nkv * S, N * group, D]
    if plan.merge is not None:
        assert plan.merge_valid is not None
        out = _merge(out, scores, plan.merge, plan.merge_valid, kv_heads)
    out = out.view(kv_heads, B, N, group, dim).permute(1, 2, 0, 3, 4).reshape(B * N, heads * dim)
    if plan.rows is not None:
        out = out.index_select(0, plan.rows)
    return out.to(cache.dtype)


def _merge(out: Tensor, scores: Tensor, merge: Tensor, valid: Tensor, kv_heads: int) -> Tensor:
    """Combines the tiles of a request, each normalised in itself, by their log-sum-exp."""
    B, T = merge.shape
    log_sum = scores.logsumexp(-1).view(kv_heads, -1, scores.shape[1])[:, merge.flatten()]  # [nkv, B * T, M]
    log_sum = log_sum.view(kv_heads, B, T, -1).masked_fill(~valid[None, :, :, None], MASKED)
    weight = (log_sum - log_sum.amax(2, keepdim=True)).exp()  # [nkv, B, T, M]
    parts = out.view(kv_heads, -1, *out.shape[1:])[:, merge.flatten()].view(kv_heads, B, T, *out.shape[1:])
    weight = weight * valid[None, :, :, None]
    return (parts * weight[..., None]).sum(2) / weight.sum(2)[..., None]


def write_cache(cache: Tensor, slots: Tensor, k: Tensor, v: Tensor) -> None:
    """Puts k and v `[R, nkv, D]` into `cache` `[2, nkv, slots, D]` at `slots` `[R]`."""
    cache[0].index_copy_(1, slots, k.transpose(0, 1))
    cache[1].index_copy_(1, slots, v.transpose(0, 1))


def assert_rows_independent(
    num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Probes the contract on this machine: a row among 1 to 300, alone and beside another request; answers that row.

    Raises ValueError if it fails.
    """
    generator = torch.Generator().manual_seed(0)
    page_size, length = 16, 2 * KV_TILE + 40
    pages = -(-length // page_size)
    cache = torch.randn(2, num_kv_heads, (2 * pages + 1) * page_size, head_dim, generator=generator)
    cache = cache.to(device, dtype)
    q = torch.randn(length, num_heads, head_dim, generator=generator).to(device, dtype)
    table = 1 + torch.arange(2 * pages, device=device).view(2, pages)

    def last_row(width: int, beside: int) -> Tensor:
        """The output at the last position when it is verified among `width` rows, `beside` rows of a second request."""
        counts = [width] + ([beside] if beside else [])
        starts = torch.tensor([length - width] + ([9] if beside else []), device=device)
        plan = plan_attention(
            table[: len(counts)],
            starts,
            torch.tensor(counts, device=device),
            page_size=page_size,
            num_kv_heads=num_kv_heads,
            group=num_heads // num_kv_heads,
        )
        rows = torch.cat([q[length - width :], q[:beside]])
        return paged_attention(rows, cache, plan, head_dim**-0.5)[width - 1]

    alone = last_row(1, 0)
    for width in (1, 2, 3, 5, 8, 17, 64, 300):
        for beside in (0, 1, 6):
            if not torch.equal(last_row(width, beside), alone):
                raise ValueError(
                    f"engine.exact=true: on this machine attention ({num_heads} heads, head size {head_dim}, {dtype}) "
                    f"gives other bits in a block of {width} rows; engine.exact=false serves without the promise"
                )
    return alone
