"""Layers of hybrids: of a mixer in attention's place, and of attention with an output gate."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from kernels.decoder import LayerParts
from kernels.recurrent_gates import sigmoid_mul
from models.attention import Attention, Rotary
from models.config import TargetConfig
from models.decoder import SelfAttention, parts_of
from models.layers import GatedMLP, RMSNorm


class GatedAttention(SelfAttention):
    """Attention whose output the sigmoid of a gate scales, which is projected behind each head's query (Qwen3.5)."""

    def forward(
        self, x: Tensor, rotary: Rotary, attention: Attention, residual: Tensor | None = None, reach: int = 0
    ) -> Tensor:
        qkv, gate = self._split(self.qkv_proj(x).unflatten(-1, (-1, self.head_dim)))
        attended = self._attend(qkv, rotary, attention, reach)
        attended = sigmoid_mul(attended, gate.flatten(-2))
        return self.o_proj(attended) if residual is None else self.o_proj.add(residual, attended)

    @property
    def qkv_weight(self) -> Tensor:
        return self._split(self.qkv_proj.weight.T.unflatten(-1, (-1, self.head_dim)))[0].flatten(-2).T

    def parts(self) -> dict[str, Any]:
        return super().parts() | {"gated": True}

    def _split(self, qkv: Tensor) -> tuple[Tensor, Tensor]:
        """Return queries, keys and values `[..., nh + 2 nkv, D]`, and gates `[..., nh, D]`."""
        q, gate = qkv[..., : 2 * self.num_heads, :].unflatten(-2, (-1, 2)).unbind(-2)
        return torch.cat([q, qkv[..., 2 * self.num_heads :, :]], dim=-2), gate


class RecurrentLayer(nn.Module):
    """A decoder layer whose rows are mixed by a recurrence (models/mixers/)."""

    rotary_table = 0

    def __init__(self, config: TargetConfig, mixer: nn.Module, mlp: nn.Module | None = None) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.norm_eps, centered=config.centered_norms)
        self.mixer = mixer
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm_eps, centered=config.centered_norms)
        self.mlp = mlp or GatedMLP(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)

    def forward(self, x: Tensor, rotary: Rotary, attention: Attention) -> Tensor:
        """As of DecoderLayer; `attention` implements models.recurrence.Recurrence too."""
        x = self.mixer(self.input_layernorm(x), attention, x)
        return self.mlp(self.post_attention_layernorm(x), x)

    def parts(self) -> LayerParts | None:
        """As of DecoderLayer."""
        return parts_of(self.mixer, self.mlp, self.post_attention_layernorm, input_norm=self.input_layernorm)
