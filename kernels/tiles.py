"""Paged attention in torch, for devices and machines without a native kernel.

Keys are read in tiles of KV_TILE positions at fixed offsets. A tile is multiplied by QUERIES queries at a time, so that
every matrix product has one shape: with other shapes a library may sum in another order. Partial results are combined
in tile order by their log-sum-exp. A masked key weighs exactly zero. Rows that see the same sequence (a prompt, a
chain) share its tiles; each row of a tree gathers its ancestors in order of position, which costs a gather per row and
preserves the bits of plain decoding.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.copies import read_slots, write_kv
from kernels.rows import WORD_BITS, AttentionRows, set_bit_positions

KV_TILE = 256
QUERIES = 16  # of a matrix product, the last ones zeros; with other numbers libraries sum in another order
MASKED = -1e30  # finite, so that a tile without visible keys yields weight 0 and no NaN


class TiledAttention:
    """The plan of one step: G sequences of keys with at most N rows each, S tiles in total."""

    def __init__(self, rows: AttentionRows, num_heads: int, num_kv_heads: int) -> None:
        device, group = rows.table.device, num_heads // num_kv_heads
        nth = None
        if rows.tree_mask is None:
            counts = torch.tensor(rows.counts, device=device)
            last = counts.cumsum(0) - 1
            request, committed = rows.request[last], rows.committed[last] - rows.first
            ends = committed + counts
        else:
            request, committed = rows.request, rows.committed - rows.first
            counts = torch.ones_like(request)
            nth, set_bits = set_bit_positions(rows.tree_mask)
            ends = committed + set_bits
        width = int(counts.max())
        self._width = width
        self._sequences, self._kv_heads, self._group = len(counts), num_kv_heads, group
        tiles = (ends + KV_TILE - 1) // KV_TILE  # [G]
        self._tile_of = torch.repeat_interleave(torch.arange(len(counts), device=device), tiles)  # [S]
        first = tiles.cumsum(0) - tiles
        index = torch.arange(len(self._tile_of), device=device) - first[self._tile_of]
        key = index[:, None] * KV_TILE + torch.arange(KV_TILE, device=device)  # [S, KV_TILE] in order of position
        place = key + rows.first
        if nth is not None:
            past_committed = key - committed[self._tile_of, None]
            bit = nth[self._tile_of].gather(1, past_committed.clamp(0, WORD_BITS - 1))
            place = torch.where(past_committed < 0, place, committed[self._tile_of, None] + rows.first + bit)
        page = (place // rows.page_size).clamp(max=rows.table.shape[1] - 1)
        pages = rows.table[request[self._tile_of]].gather(1, page)
        self._gather = (pages * rows.page_size + place % rows.page_size).flatten()
        limit = (ends - counts)[:, None] + torch.arange(1, self._width + 1, device=device)  # [G, N] keys a row sees
        self._key = key
        self._limit = torch.minimum(limit, ends[:, None])[self._tile_of]  # [S, N]
        self._biases: dict[int | None, Tensor] = {}
        local = torch.arange(self._width, device=device)
        starts = torch.arange(len(counts), device=device)[:, None] * self._width
        self._rows = (starts + local)[local < counts[:, None]]  # [R] index of row r in [G * N]
        self._slots = rows.slots
        step = torch.arange(int(tiles.max()), device=device)
        self._valid = step < tiles[:, None]  # [G, T]
        self._merge = torch.where(self._valid, first[:, None] + step, 0)  # [G, T] tiles of each sequence in order

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, cache: Tensor, scale: float, window: int | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        write_kv(cache, self._slots, k, v)
        dtype, values_dim = q.dtype, v.shape[-1]
        _, heads, dim = q.shape
        G, N, kv_heads, group = self._sequences, self._width, self._kv_heads, self._group
        q = q.new_zeros(G * N, heads, dim).index_copy_(0, self._rows, q)
        q = q.view(G, N, kv_heads, group, dim).permute(2, 0, 1, 3, 4).reshape(kv_heads, G, N * group, dim).float()
        q = q.index_select(1, self._tile_of).view(-1, N * group, dim)  # [nkv * S, N * group, D]
        tiles = read_slots(cache, self._gather).float().view(len(cache), -1, KV_TILE, dim)
        keys, values = tiles[0], tiles[-1, ..., :values_dim]
        q = F.pad(q, (0, 0, 0, -q.shape[1] % QUERIES))
        bias, keys = self._bias(window).split(QUERIES, 1), keys.transpose(1, 2)
        parts = zip(bias, q.split(QUERIES, 1), strict=True)
        scores = torch.cat([torch.baddbmm(hidden, part, keys, alpha=scale) for hidden, part in parts], 1)
        # NaN of a key that a row does not see (of another row's draft, of what was in a page) must not reach it; the
        # values in the cache are finite (kernels/copies.py)
        scores = torch.where(self._bias(window) < 0, MASKED, scores)
        out = torch.cat([torch.bmm(part, values) for part in scores.softmax(-1).split(QUERIES, 1)], 1)
        if self._merge.shape[1] > 1 or sinks is not None:
            out = self._combine(out, scores, sinks)
        out = out[..., : N * group, :].reshape(kv_heads, G, N, group, values_dim)
        out = out.permute(1, 2, 0, 3, 4).reshape(G * N, heads * values_dim)
        return out.index_select(0, self._rows).to(dtype)

    def _bias(self, window: int | None) -> Tensor:
        """Additive mask [nkv * S, M, KV_TILE] of the keys that a row does not see; cached, shared by layers.

        M: the N * group queries, filled up to a multiple of QUERIES.
        """
        if window not in self._biases:
            key, limit = self._key[:, None, :], self._limit[:, :, None]
            hidden = key >= limit
            if window is not None:
                hidden |= key < limit - window
            bias = torch.zeros(hidden.shape, device=key.device).masked_fill_(hidden, MASKED)
            bias = bias.repeat_interleave(self._group, dim=1).repeat(self._kv_heads, 1, 1)
            self._biases[window] = F.pad(bias, (0, 0, 0, -bias.shape[1] % QUERIES))
        return self._biases[window]

    def _combine(self, out: Tensor, scores: Tensor, sinks: Tensor | None) -> Tensor:
        """Combine the separately normalized tiles of each sequence by their log-sum-exp, and the sinks `[nh]`."""
        G, T = self._merge.shape
        kv_heads, flat = self._kv_heads, self._merge.flatten()
        valid = self._valid[None, :, :, None]
        log_sum = scores.logsumexp(-1).view(kv_heads, -1, scores.shape[1])[:, flat]  # [nkv, G * T, M]
        log_sum = log_sum.view(kv_heads, G, T, -1).masked_fill(~valid, MASKED)
        peak, sink = log_sum.amax(2, keepdim=True), None
        if sinks is not None:  # lines are [N, group], filled up
            lines = torch.arange(scores.shape[1], device=sinks.device) % self._group
            sink = sinks.float().view(kv_heads, 1, 1, -1)[..., lines]
            peak = peak.maximum(sink)
        weight = (log_sum - peak).exp() * valid  # [nkv, G, T, M]
        parts = out.view(kv_heads, -1, *out.shape[1:])[:, flat].view(kv_heads, G, T, *out.shape[1:])
        total, weights = parts[:, :, 0] * weight[:, :, 0, :, None], weight[:, :, 0]
        for tile in range(1, T):  # in this order, however many tiles the longest sequence has
            total = total + parts[:, :, tile] * weight[:, :, tile, :, None]
            weights = weights + weight[:, :, tile]
        if sink is not None:
            weights = weights + (sink - peak).exp()[:, :, 0]
        return total / weights[..., None]
