"""Gated delta net (arXiv 2412.06464), as Qwen3-Next and Qwen3.5 have it: a linear recurrence behind a convolution."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from kernels.recurrent_gates import delta_gates, gated_norm
from kernels.recurrent_parts import DeltaParts
from models.config import RECURRENT, TargetConfig
from models.layers import Linear, RMSNorm
from models.mixers.convolution import CausalConvolution
from models.mixers.sharding import Mixer, units_of
from models.recurrence import Recurrence


class GatedDeltaNet(Mixer):
    """Queries, keys and values of the convolution; per value head a decay and a gain; an output gate.

    What decides decay and gain is kept in fp32, or as projected in fp32 from weights that are never quantized.
    """

    def __init__(self, config: TargetConfig, layer: int) -> None:
        super().__init__()
        sizes = config.recurrent
        assert sizes is not None
        self.layer, self.config, inner_size = config.index(layer, RECURRENT), sizes, sizes.heads * sizes.value_size
        keys, values, numbers = units_of(sizes)
        self.rows = {"in_proj": (keys, keys, values), "conv": (keys, keys, values), "z_proj": (values,)}
        self.rows |= {"ba_proj": (numbers,) * 2, "A_log": (numbers,), "dt_bias": (numbers,)}
        self.in_proj = Linear(config.hidden_size, sizes.channels, bias=False)
        self.z_proj = Linear(config.hidden_size, inner_size, bias=False)
        self.ba_proj = Linear(config.hidden_size, 2 * sizes.heads, bias=False)
        self.ba_proj.out_dtype, self.ba_proj.narrows = torch.float32, False
        self.conv = CausalConvolution(config, layer)
        self.A_log = nn.Parameter(torch.zeros(sizes.heads))
        self.dt_bias = nn.Parameter(torch.zeros(sizes.heads))
        self.norm = RMSNorm(sizes.value_size, config.rms_norm_eps)
        self.o_proj = Linear(inner_size, config.hidden_size, bias=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> GatedDeltaNet:
        super()._apply(fn, recurse)
        for parameter in (self.A_log, self.dt_bias):
            parameter.data = parameter.data.float()
        return self

    def forward(self, x: Tensor, recurrence: Recurrence, residual: Tensor) -> Tensor:
        """Return residual + the layer's output `[..., H]`."""
        qkv, z = self.conv(self.in_proj(x), recurrence, silu=True), self.z_proj(x)
        keys, values, _ = units_of(self.config)
        q, k, v = qkv.split([math.prod(units) for units in (keys, keys, values)], dim=-1)
        q, k = (part.unflatten(-1, keys) for part in (q, k))
        v, z = (part.unflatten(-1, values) for part in (v, z))
        gates = delta_gates(self.ba_proj(x), self.A_log, self.dt_bias)
        out = recurrence.scan(self.layer, q, k, v, *gates, delta=True)
        return self.o_proj.add(residual, gated_norm(out, z, self.norm.weight, self.norm.eps).flatten(-2))

    def parts(self) -> dict[str, Any] | None:
        z, ba = (linear.packed if type(linear) is Linear else None for linear in (self.z_proj, self.ba_proj))
        if z is None or ba is None:
            return None
        sizes = self.config.groups, self.config.key_size
        delta = DeltaParts(z, ba, self.A_log, self.dt_bias, self.norm.weight, self.norm.eps, *sizes)
        return {"qkv": self.in_proj, "output": self.o_proj, "conv": self.conv.by_taps, "delta": delta}
