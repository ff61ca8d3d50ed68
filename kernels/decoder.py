"""Fused decoder: all layers of a decoder or head in one call, for serving, with the bits of the separate operations.

CPU only (kernels/cpu/decoder.c), where on few rows the call of an operation costs more than its arithmetic. Layers that
it does not support (experts, tensor-parallel shards, other sizes and dtypes) run operation by operation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from kernels.cpu.decoder import NativeDecoder, supported
from kernels.linear import PackedLinear
from kernels.rotary import QKNorm

__all__ = ["Convolution", "LayerParts", "NativeDecoder", "fuse_layers"]


class Convolution(NamedTuple):
    """A convolution of a sublayer's input and output along the rows of a block (kernels/convolution.py)."""

    base: Tensor  # [2, 2, H]
    projection: PackedLinear  # [4 H / group, H], of the normed input


class LayerParts(NamedTuple):
    """A layer: norm, attention with rotary embedding, norm and gated MLP, each half added to the residual stream.

    Attention reads the normed input; the raw input, without `input_norm`; or, with `token_norm`, the concatenation of
    the normed token embedding and the normed input.
    """

    input_norm: Tensor | None  # [H]
    qkv: PackedLinear
    qk_norm: QKNorm | None
    output: PackedLinear
    post_norm: Tensor  # [H]
    gate_up: PackedLinear
    down: PackedLinear
    window: int | None = None
    token_norm: Tensor | None = None  # [H], of the token embedding
    residual_normed: bool = False  # the residual stream is the normed input
    attended_norm: Tensor | None = None  # [H], of attention's output before it is added
    mlp_norm: Tensor | None = None  # [H], of the MLP's output before it is added
    centered: bool = False  # for all norms: kernels.elementwise.rms_norm
    gelu: bool = False  # the MLP is gated by GELU instead of SiLU
    scale: float | None = None  # of attention's scores; None: 1/sqrt(D)
    rotary: int = 0  # index of the rotary table
    attention_conv: Convolution | None = None
    mlp_conv: Convolution | None = None

    @property
    def convolutions(self) -> tuple[Convolution, ...]:
        return tuple(conv for conv in (self.attention_conv, self.mlp_conv) if conv is not None)

    @property
    def linears(self) -> tuple[PackedLinear, ...]:
        return self.qkv, self.output, self.gate_up, self.down


def fuse_layers(
    layers: Sequence[LayerParts], final_norm: Tensor | None, eps: float, head_dim: int
) -> NativeDecoder | None:
    """Return the fused decoder, None if no kernel supports these layers. `eps` is of all norms, `final_norm` `[H]`."""
    if layers[0].post_norm.device.type != "cpu" or not supported(layers, final_norm, head_dim):
        return None
    return NativeDecoder(layers, final_norm, eps, head_dim)
