"""Decoder layers, of targets and heads: attention and gated MLP; and the fused decoder.

The fused decoder runs all layers in one kernel (kernels/decoder.py), once they are packed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from kernels.decoder import LayerParts, NativeDecoder, fuse_layers
from kernels.draft import DraftParts
from kernels.elementwise import rotate
from kernels.linear import PackedLinear
from kernels.operands import QKNorm
from models.attention import Attention, Decode, Project, Rotary, select
from models.config import ATTENTION, TargetConfig
from models.layers import GatedMLP, Linear, PackedEmbedding, RMSNorm


class SelfAttention(nn.Module):
    """Projections and rotary embedding around `Attention`. `input_size` differs from H in an EAGLE-3 head."""

    def __init__(self, config: TargetConfig, layer: int, *, input_size: int | None = None) -> None:
        super().__init__()
        self.layer = config.index(layer, ATTENTION)
        self.num_heads, self.num_kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        queries, kv_heads = config.projected_heads
        rows = (queries + 2 * kv_heads) * config.head_dim
        self.qkv_proj = Linear(input_size or config.hidden_size, rows, bias=config.attention_bias)
        self.o_proj = Linear(config.num_heads * config.head_dim, config.hidden_size, bias=config.output_bias)
        self.window = config.window(layer)
        self.scale = config.attention_scale
        self.rotary_dim = config.rotary_dim
        self.rotary_table = int(config.local_rope is not None and self.window is not None)
        self.sinks = nn.Parameter(torch.zeros(config.num_heads)) if config.sinks else None
        self.qk_norm = config.qk_norm
        if config.qk_norm:
            self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps, centered=config.centered_norms)
            self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps, centered=config.centered_norms)

    @property
    def head_norm(self) -> QKNorm | None:
        if not self.qk_norm:
            return None
        return QKNorm(self.q_norm.weight, self.k_norm.weight, self.q_norm.eps, self.q_norm.centered)

    def forward(
        self, x: Tensor, rotary: Rotary, attention: Attention, residual: Tensor | None = None, reach: int = 0
    ) -> Tensor:
        """Return the output `[..., H]`, added to `residual` if there is one; a window reaches back `reach` further."""
        attended = self._attend(self.qkv_proj(x).unflatten(-1, (-1, self.head_dim)), rotary, attention, reach)
        # `kept`: in training the only rows whose outputs are read
        residual = residual if (kept := getattr(attention, "kept", None)) is None else select(residual, kept)
        return self.o_proj(attended) if residual is None else self.o_proj.add(residual, attended)

    def parts(self) -> dict[str, Any]:
        """Return what models.decoder.parts_of reads of a mixer."""
        fields = {"qk_norm": self.head_norm, "window": self.window, "scale": self.scale, "rotary": self.rotary_table}
        return {"qkv": self.qkv_proj, "output": self.o_proj, "rotary_dim": self.rotary_dim, **fields}

    @property
    def qkv_weight(self) -> Tensor:
        """The rows `[(nh + 2 nkv) D, H]` of the projection for heads that start from them."""
        return self.qkv_proj.weight

    def _attend(self, qkv: Tensor, rotary: tuple[Tensor, Tensor], attention: Attention, reach: int) -> Tensor:
        project: Project | None = getattr(attention, "project", None)  # None in training, and of most attentions
        scoring: Any = {"window": self.window and self.window + reach, "scale": self.scale, "sinks": self.sinks}
        if project is not None and self.rotary_dim is None:
            return project(self.layer, qkv, rotary, self.head_norm, **scoring)
        qk, v = qkv.split([self.num_heads + self.num_kv_heads, self.num_kv_heads], dim=-2)
        if self.qk_norm:
            q, k = qk.split([self.num_heads, self.num_kv_heads], dim=-2)
            qk = torch.cat([self.q_norm(q), self.k_norm(k)], dim=-2)
        qk = rotate(qk, *rotary)
        q, k = qk.split([self.num_heads, self.num_kv_heads], dim=-2)
        return attention(self.layer, q, k, v, **scoring)


class DecoderLayer(nn.Module):
    rotary_table = 0  # which of the target's tables it rotates by

    def __init__(self, config: TargetConfig, layer: int, mlp: nn.Module | None = None, attention: Any = None) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.norm_eps, centered=config.centered_norms)
        self.self_attn: SelfAttention = attention or SelfAttention(config, layer)
        self.rotary_table = self.self_attn.rotary_table
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm_eps, centered=config.centered_norms)
        self.mlp = mlp or GatedMLP(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor], attention: Attention, reach: int = 0) -> Tensor:
        x = self.self_attn(self.input_layernorm(x), rotary, attention, x, reach)
        return self.mlp(self.post_attention_layernorm(x), x)

    @property
    def forward_norm(self) -> RMSNorm:
        """The norm of the MLP's input."""
        return self.post_attention_layernorm

    def parts(self) -> LayerParts | None:
        """Return the weights for kernels that run whole layers; None where none can."""
        return parts_of(self.self_attn, self.mlp, self.post_attention_layernorm, input_norm=self.input_layernorm)


def parts_of(
    mixer: Any,
    mlp: nn.Module,
    post_norm: RMSNorm,
    *,
    input_norm: RMSNorm | None = None,
    token_norm: RMSNorm | None = None,
    residual_normed: bool = False,
    attended_norm: RMSNorm | None = None,
    mlp_norm: RMSNorm | None = None,
) -> LayerParts | None:
    """Return a layer's weights for the fused decoder; None if no kernel runs such a layer.

    mixer: attention, or what takes its place, with the fields of LayerParts that it decides in `parts()`.
    """
    own = mixer.parts()
    if type(mlp) is not GatedMLP or own is None:
        return None
    linears = (own.pop("qkv"), own.pop("output"), mlp.gate_up_proj, mlp.down_proj)
    packed = [linear.packed for linear in linears if type(linear) is Linear and linear.packed is not None]
    if len(packed) < len(linears):
        return None
    qkv, output, gate_up, down = packed
    return LayerParts(
        input_norm=None if input_norm is None else input_norm.weight,
        qkv=qkv,
        qk_norm=own.pop("qk_norm", None),
        output=output,
        post_norm=post_norm.weight,
        gate_up=gate_up,
        down=down,
        token_norm=None if token_norm is None else token_norm.weight,
        residual_normed=residual_normed,
        attended_norm=None if attended_norm is None else attended_norm.weight,
        mlp_norm=None if mlp_norm is None else mlp_norm.weight,
        centered=post_norm.centered,
        gelu=mlp.gelu,
        **own,
    )


def draft_parts_of(
    head: Any,
    decoder: NativeDecoder | None,
    embedding: nn.Module | Tensor,
    lm_head: nn.Module,
    *,
    joined: PackedLinear | None = None,
    norm: Tensor | None = None,
    **inputs: Any,
) -> DraftParts | None:
    """Return a recurrent head's weights for kernels that run whole levels; None where none runs these layers.

    `inputs`: fields of DraftParts on what `joined` reads.
    """
    if decoder is None or type(lm_head) is not Linear or lm_head.packed is None:
        return None
    if isinstance(embedding, PackedEmbedding):
        stored: Any = embedding.packed
    else:
        stored = embedding if isinstance(embedding, Tensor) else embedding.weight
    layer, ids = head.config.layer, head.target_ids
    rotary = head.rotary.tables(ids.device, decoder.dtype)
    return DraftParts(
        decoder, layer.num_heads, layer.num_kv_heads, stored, rotary, joined, norm, lm_head.packed, ids, **inputs
    )


class FusedDecoder:
    """The lazily built fused decoder of one module, whose layers have `parts()`. A copy of the module builds anew."""

    def __init__(self) -> None:
        self._decoder: NativeDecoder | None = None
        self._built = False

    def __deepcopy__(self, memo: dict[int, Any]) -> FusedDecoder:
        return FusedDecoder()

    def decoder(self, layers: Iterable[nn.Module], norm: RMSNorm | None, *, packed: bool) -> NativeDecoder | None:
        """Return the decoder of `layers`, followed by `norm`; None before they are `packed` or if no kernel fits."""
        if packed and not self._built:
            self._decoder, self._built = self._build(list(layers), norm), True
        return self._decoder

    @staticmethod
    def _build(layers: list[Any], norm: RMSNorm | None) -> NativeDecoder | None:
        parts = [layer_parts for layer in layers if (layer_parts := layer.parts()) is not None]
        if len(parts) < len(layers):
            return None
        eps, attending = layers[0].post_attention_layernorm.eps, (x for x in layers if hasattr(x, "self_attn"))
        head_dim = next(attending).self_attn.head_dim
        return fuse_layers(parts, None if norm is None else norm.weight, eps, head_dim)

    def over(
        self, attention: Attention, layers: Iterable[nn.Module], norm: RMSNorm | None, *, packed: bool
    ) -> Callable[..., tuple[Tensor, tuple[Tensor, ...]]] | None:
        """Return models.attention.Decode bound to these layers; None where they run one after another."""
        decode: Decode | None = getattr(attention, "decode", None)
        if decode is None or torch.is_grad_enabled():
            return None
        decoder = self.decoder(layers, norm, packed=packed)
        return None if decoder is None else partial(decode, decoder)
