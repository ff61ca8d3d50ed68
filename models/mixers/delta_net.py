"""Gated delta net (arXiv 2412.06464), as Qwen3-Next and Qwen3.5 have it: a linear recurrence behind a convolution."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from kernels.elementwise import silu_mul, uniform
from kernels.recurrence import softplus
from models.config import RECURRENT, TargetConfig
from models.layers import Linear, RMSNorm
from models.mixers.convolution import CausalConvolution
from models.recurrence import Recurrence


class GatedDeltaNet(nn.Module):
    """Queries, keys and values of the convolution; per value head a decay and a gain; an output gate.

    What decides decay and gain is kept in fp32, or as projected in fp32 from weights that are never quantized.
    """

    def __init__(self, config: TargetConfig, layer: int) -> None:
        super().__init__()
        sizes = config.recurrent
        assert sizes is not None
        self.layer, self.key_size, self.value_size = config.index(layer, RECURRENT), sizes.key_size, sizes.value_size
        self.widths = [sizes.groups * sizes.key_size] * 2 + [sizes.heads * sizes.value_size]  # of q, k, v
        self.in_proj = Linear(config.hidden_size, sizes.channels, bias=False)
        self.z_proj = Linear(config.hidden_size, self.widths[2], bias=False)
        self.ba_proj = Linear(config.hidden_size, 2 * sizes.heads, bias=False)
        self.ba_proj.out_dtype, self.ba_proj.narrows = torch.float32, False
        self.conv = CausalConvolution(config, layer)
        self.A_log = nn.Parameter(torch.zeros(sizes.heads))
        self.dt_bias = nn.Parameter(torch.zeros(sizes.heads))
        self.norm = RMSNorm(sizes.value_size, config.rms_norm_eps)
        self.o_proj = Linear(self.widths[2], config.hidden_size, bias=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> GatedDeltaNet:
        super()._apply(fn, recurse)
        for parameter in (self.A_log, self.dt_bias):
            parameter.data = parameter.data.float()
        return self

    def forward(self, x: Tensor, recurrence: Recurrence, residual: Tensor) -> Tensor:
        """Return residual + the layer's output `[..., H]`."""
        qkv, z = self.conv(self.in_proj(x), recurrence, silu=True), self.z_proj(x)
        q, k, v = qkv.split(self.widths, dim=-1)
        q, k = (part.unflatten(-1, (-1, self.key_size)) for part in (q, k))
        v, z = (part.unflatten(-1, (-1, self.value_size)) for part in (v, z))
        b, a = self.ba_proj(x).chunk(2, dim=-1)
        decay = torch.exp(-self.A_log.exp() * softplus(a + self.dt_bias))
        out = recurrence.scan(self.layer, q, k, v, decay, uniform(torch.sigmoid, b), delta=True)
        gated = silu_mul(torch.cat([z, self.norm(out.to(x.dtype))], dim=-1).float())
        return self.o_proj.add(residual, gated.to(x.dtype).flatten(-2))

    def parts(self) -> None:
        """No kernel runs such a layer."""
