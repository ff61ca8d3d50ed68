"""All layers of a decoder's forward at once, for serving. Contract: the bits of the operations that it joins.

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
    """Norm, attention with rotary embedding, norm and gated MLP, each half added to the residual stream."""

    input_norm: Tensor  # [H]
    qkv: PackedLinear
    qk_norm: QKNorm | None
    output: PackedLinear
    post_norm: Tensor  # [H]
    gate_up: PackedLinear
    down: PackedLinear
    window: int | None

    @property
    def linears(self) -> tuple[PackedLinear, ...]:
        return self.qkv, self.output, self.gate_up, self.down


def join_layers(layers: Sequence[LayerParts], final_norm: Tensor, eps: float, head_dim: int) -> NativeDecoder | None:
    """`eps` of all norms, `final_norm` `[H]`. None if no kernel takes these layers."""
    if final_norm.device.type != "cpu" or not layers or not supported(layers, head_dim, final_norm.dtype):
        return None
    return NativeDecoder(layers, final_norm, eps, head_dim)
