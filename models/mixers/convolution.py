"""Causal depthwise convolution, of all recurrent layers; and LFM2's layer, which is no more than a gated one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from models.config import RECURRENT, TargetConfig
from models.layers import Linear
from models.mixers.sharding import Mixer
from models.recurrence import Recurrence


class CausalConvolution(nn.Module):
    """Its weight `[C, 1, K]` has the shape of torch's Conv1d, the oldest tap first."""

    def __init__(self, config: TargetConfig, layer: int, *, bias: bool = False) -> None:
        super().__init__()
        assert config.recurrent is not None
        self.layer = config.index(layer, RECURRENT)
        self.weight = nn.Parameter(torch.zeros(config.recurrent.channels, 1, config.recurrent.taps))
        self.bias = nn.Parameter(torch.zeros(config.recurrent.channels)) if bias else None

    @property
    def by_taps(self) -> Tensor:
        """The weight as kernels that run whole layers read it, `[K, C]`."""
        return self.weight[:, 0].t().contiguous()

    def forward(self, x: Tensor, recurrence: Recurrence, *, silu: bool = False) -> Tensor:
        """Convolve x `[..., C]` along each row's ancestors."""
        return recurrence.convolve(self.layer, x, self.weight[:, 0], self.bias, silu=silu)


class ShortConvolution(Mixer):
    """Gated short convolution: out = o(c * conv(b * x)) of b, c, x projected from the layer's input."""

    def __init__(self, config: TargetConfig, layer: int, *, bias: bool = False) -> None:
        super().__init__()
        self.in_proj = Linear(config.hidden_size, 3 * config.hidden_size, bias=bias)
        self.conv = CausalConvolution(config, layer, bias=bias)
        self.o_proj = Linear(config.hidden_size, config.hidden_size, bias=bias)
        self.rows = {"in_proj": ((config.hidden_size, 1),) * 3, "conv": ((config.hidden_size, 1),)}

    def forward(self, x: Tensor, recurrence: Recurrence, residual: Tensor) -> Tensor:
        """Return residual + the layer's output `[..., H]`."""
        b, c, x = self.in_proj(x).chunk(3, dim=-1)
        return self.o_proj.add(residual, c * self.conv(b * x, recurrence))

    def parts(self) -> dict[str, Any] | None:
        own = {"qkv": self.in_proj, "output": self.o_proj, "conv": self.conv.by_taps}
        return own if self.conv.bias is None else None
