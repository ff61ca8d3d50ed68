"""Multi-head latent attention (arXiv 2405.04434, section 2.1): what is cached of a token is one latent for all heads.

A head's keys and values are projections of the latent. They are never computed: a query is projected to the latent's
space before the scores (q k = q (W c) = (Wᵀ q) c), and the mean of the latents, not of values, is projected back. So
attention has one KV head, whose key is the latent and the rotated part, and whose value is the latent. This is done for
prompts too, since a row's bits must not depend on how it was computed.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kernels.elementwise import rotate
from models.attention import Attention
from models.config import TargetConfig
from models.layers import Divisible, Linear, RMSNorm

EPS = 1e-6  # of the norms of latents, whatever the config states for others


class LatentProjections(Divisible):
    """Each head's matrices from the latent to its key and to its value: weight `[heads * (key + value), rank]`."""

    def __init__(self, heads: int, key_size: int, value_size: int, rank: int) -> None:
        super().__init__()
        self._sizes = heads, key_size, value_size
        self.weight = nn.Parameter(torch.empty(heads * (key_size + value_size), rank))
        self.keys, self.values = nn.ModuleList(), nn.ModuleList()  # a layer per head, after `divide`

    def heads_of(self, heads: int) -> LatentProjections:
        """Return new projections of so many heads."""
        return LatentProjections(heads, *self._sizes[1:], self.weight.shape[1])

    def matrices(self) -> tuple[Tensor, Tensor]:
        """Return the keys' matrices transposed, `[heads, rank, key]`, and the values', `[heads, value, rank]`."""
        heads, *sizes = self._sizes
        keys, values = self.weight.unflatten(0, (heads, -1)).split(sizes, 1)
        return keys.transpose(1, 2), values

    @torch.no_grad()
    def divide(self) -> None:
        """Make a linear layer of every matrix: in a product over all heads bits would depend on the number of rows."""
        if self.keys:
            return
        for matrices, layers in zip(self.matrices(), (self.keys, self.values), strict=True):
            for matrix in matrices:
                layer = Linear(matrix.shape[1], matrix.shape[0], bias=False, device="meta")
                layer.weight = nn.Parameter(matrix.contiguous(), requires_grad=False)
                layers.append(layer)
        self.weight = nn.Parameter(self.weight.new_empty(0), requires_grad=False)

    def absorb(self, q: Tensor) -> Tensor:
        """Return queries of the latent `[..., heads, rank]` for queries of keys `[..., heads, key]`."""
        return self._each(self.keys, 0, q)

    def expand(self, latents: Tensor) -> Tensor:
        """Return values `[..., heads, value]` for latents `[..., heads, rank]`."""
        return self._each(self.values, 1, latents)

    def _each(self, layers: nn.ModuleList, which: int, x: Tensor) -> Tensor:
        if not layers:
            return torch.einsum("...hk,hnk->...hn", x, self.matrices()[which])
        return torch.stack([layer(x[..., head, :]) for head, layer in enumerate(layers)], dim=-2)


class LatentAttention(nn.Module):
    """In place of models.decoder.SelfAttention. Its names are those of DeepSeek's checkpoints."""

    def __init__(self, config: TargetConfig, layer: int) -> None:
        super().__init__()
        latent, rotated = config.latent, config.rotary_dim
        assert latent is not None
        assert rotated is not None
        self.layer, self.latent, self.rotary_dim = layer, latent, rotated
        self.num_heads, self.num_kv_heads, self.head_dim = config.num_heads, 1, latent.rank + rotated
        self.scale, self.window, self.rotary_table = config.attention_scale, None, 0
        size, bias, query_rank = config.hidden_size, config.attention_bias, latent.query_rank
        queries = config.num_heads * (latent.key_size + rotated)
        if query_rank is None:
            self.q_proj = Linear(size, queries, bias=False)
        else:
            self.q_a_proj = Linear(size, query_rank, bias=bias)
            self.q_a_layernorm = RMSNorm(query_rank, EPS)
            self.q_b_proj = Linear(query_rank, queries, bias=False)
        self.kv_a_proj_with_mqa = Linear(size, self.head_dim, bias=bias)
        self.kv_a_layernorm = RMSNorm(latent.rank, EPS)
        self.kv_b_proj = LatentProjections(config.num_heads, latent.key_size, latent.value_size, latent.rank)
        self.o_proj = Linear(config.num_heads * latent.value_size, size, bias=config.output_bias)

    def parts(self) -> None:
        """No kernel runs such layers whole: models.decoder.parts_of."""

    def forward(
        self,
        x: Tensor,
        rotary: tuple[Tensor, Tensor],
        attention: Attention,
        residual: Tensor | None = None,
        reach: int = 0,
    ) -> Tensor:
        """Return the projected output `[..., H]`, added to `residual` if there is one."""
        rank, rotated = self.latent.rank, self.rotary_dim
        ranked = None if self.latent.query_rank is None else self.q_a_layernorm(self.q_a_proj(x))
        projected = self.q_proj(x) if ranked is None else self.q_b_proj(ranked)
        q, q_rotated = projected.unflatten(-1, (self.num_heads, -1)).split([self.latent.key_size, rotated], -1)
        latent, k_rotated = self.kv_a_proj_with_mqa(x).unsqueeze(-2).split([rank, rotated], -1)
        rotated_parts = torch.cat([q_rotated, k_rotated], -2)
        if self.latent.interleaved:
            rotated_parts = rotated_parts.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
        rotated_parts = rotate(rotated_parts, *rotary)
        q = torch.cat([self.kv_b_proj.absorb(q), rotated_parts[..., :-1, :]], -1)
        k = torch.cat([self.kv_a_layernorm(latent), rotated_parts[..., -1:, :]], -1)
        latents = attention(self.layer, q, k, k[..., :rank], scale=self.scale)
        attended = self.kv_b_proj.expand(latents.unflatten(-1, (self.num_heads, -1))).flatten(-2)
        return self.o_proj(attended) if residual is None else self.o_proj.add(residual, attended)
