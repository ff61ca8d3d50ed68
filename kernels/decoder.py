"""All layers of a decoder or a head at once, for serving. Contract: the bits of the operations that it joins.

It exists on a CPU alone (kernels/cpu/decoder.c), where an operation's call costs more than its work on few rows. What
it does not take (experts, parts of divided layers, other sizes and dtypes) runs operation by operation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from kernels.cpu.decoder import NativeDecoder, supported
from kernels.linear import PackedLinear
from kernels.rotary import QKNorm

__all__ = ["LayerParts", "NativeDecoder", "join_layers"]


class LayerParts(NamedTuple):
    """Norm, attention with rotary embedding, norm and gated MLP, each half added to the residual stream.

    Attention reads the layer's input normed; as it is; or normed, with an embedding normed by itself before it.
    """

    input_norm: Tensor | None  # [H]
    qkv: PackedLinear
    qk_norm: QKNorm | None
    output: PackedLinear
    post_norm: Tensor  # [H]
    gate_up: PackedLinear
    down: PackedLinear
    window: int | None = None
    token_norm: Tensor | None = None  # [H], of the embedding
    residual_normed: bool = False  # the normed input is what the halves are added to
    attended_norm: Tensor | None = None  # [H], of what attention adds to the stream
    mlp_norm: Tensor | None = None  # [H], of what the MLP adds to it
    centred: bool = False  # of all norms: kernels.elementwise.rms_norm
    gelu: bool = False  # what gates the MLP; otherwise SiLU
    scale: float | None = None  # of attention's scores; None: 1/sqrt(D)
    rotary: int = 0  # which of the rotary tables it reads

    @property
    def linears(self) -> tuple[PackedLinear, ...]:
        return self.qkv, self.output, self.gate_up, self.down


def join_layers(
    layers: Sequence[LayerParts], final_norm: Tensor | None, eps: float, head_dim: int
) -> NativeDecoder | None:
    """`eps` of all norms, `final_norm` `[H]` or none. None if no kernel takes these layers."""
    if layers[0].post_norm.device.type != "cpu" or not supported(layers, final_norm, head_dim):
        return None
    return NativeDecoder(layers, final_norm, eps, head_dim)
