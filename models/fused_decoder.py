"""The fused decoder: the layers of a target or a head run by one kernel (kernels/decoder.py), once they are packed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from kernels.decoder import LayerParts, NativeDecoder, fuse_layers
from kernels.draft import DraftParts
from kernels.linear import PackedLinear
from models.attention import Attention, decode_of
from models.layers import GatedMLP, Linear, PackedEmbedding, RMSNorm

if TYPE_CHECKING:
    from models.targets.llama import SelfAttention


def parts_of(
    attention: SelfAttention,
    mlp: nn.Module,
    post_norm: RMSNorm,
    *,
    input_norm: RMSNorm | None = None,
    token_norm: RMSNorm | None = None,
    residual_normed: bool = False,
    attended_norm: RMSNorm | None = None,
    mlp_norm: RMSNorm | None = None,
) -> LayerParts | None:
    """Return a layer's weights for the fused decoder; None if no kernel runs such a layer."""
    if type(mlp) is not GatedMLP or attention.rotary_dim is not None:
        return None
    linears = (attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj)
    packed = [linear.packed for linear in linears if type(linear) is Linear and linear.packed is not None]
    if len(packed) < len(linears):
        return None
    qkv, output, gate_up, down = packed
    return LayerParts(
        input_norm=None if input_norm is None else input_norm.weight,
        qkv=qkv,
        qk_norm=attention.head_norm,
        output=output,
        post_norm=post_norm.weight,
        gate_up=gate_up,
        down=down,
        window=attention.window,
        token_norm=None if token_norm is None else token_norm.weight,
        residual_normed=residual_normed,
        attended_norm=None if attended_norm is None else attended_norm.weight,
        mlp_norm=None if mlp_norm is None else mlp_norm.weight,
        centered=post_norm.centered,
        gelu=mlp.gelu,
        scale=attention.scale,
        rotary=attention.rotary_table,
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
            modules: list[Any] = list(layers)
            parts = [layer_parts for layer in modules if (layer_parts := layer.parts()) is not None]
            if len(parts) == len(modules):
                weight = None if norm is None else norm.weight
                eps, head_dim = modules[0].post_attention_layernorm.eps, modules[0].self_attn.head_dim
                self._decoder = fuse_layers(parts, weight, eps, head_dim)
            self._built = True
        return self._decoder

    def over(
        self, attention: Attention, layers: Iterable[nn.Module], norm: RMSNorm | None, *, packed: bool
    ) -> Callable[..., tuple[Tensor, tuple[Tensor, ...]]] | None:
        """Return models.attention.Decode bound to these layers; None where they run one after another."""
        decode = decode_of(attention)
        if decode is None or torch.is_grad_enabled():
            return None
        decoder = self.decoder(layers, norm, packed=packed)
        return None if decoder is None else partial(decode, decoder)
