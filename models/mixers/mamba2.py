"""Mamba-2 (arXiv 2405.21060): a gated linear recurrence whose decay and gain depend on the token.

One projection `[z | x | B | C | dt]` of the layer's input. A causal convolution with SiLU over x, B and C; then, per
head, dt = softplus(dt + bias), S <- exp(-exp(A_log) dt) S + B (dt x)^T, y = S^T C + D x. The output is y SiLU(z),
normed in groups. All is in fp32 from the convolution's output to that of the norm.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from kernels.elementwise import rms_norm, silu_mul
from kernels.recurrent_gates import softplus
from models.config import RecurrentConfig, TargetConfig
from models.fields import Fields
from models.layers import Linear, RMSNorm
from models.mixers.convolution import CausalConvolution
from models.mixers.sharding import Mixer, units_of
from models.recurrence import Recurrence
from models.sharding import Part, even

MOST_HEADS = 2**12
# Of the time step: as Python writes the infinite number, and as transformers does
NO_LIMIT = ([0.0, math.inf], [0.0, {"__float__": "Infinity"}])


Norm = Literal["after the gate", "before the gate", "none"]


@dataclass(frozen=True)
class Mamba2Config(RecurrentConfig):
    """`heads` of P = `value_size` numbers, whose states have N = `key_size` rows; B and C are shared in `groups`."""

    bias: bool = False  # of the projection of the input
    output_bias: bool = False
    convolution_bias: bool = True
    norm: Norm = "after the gate"
    scales: tuple[float, ...] = (1.0,) * 5  # of z, x, B, C and dt as projected


class Keys(NamedTuple):
    """What a family's config.json calls the sizes and options of the mixer."""

    heads: str = "mamba_n_heads"
    head_size: str = "mamba_d_head"
    groups: str = "mamba_n_groups"
    state: str = "mamba_d_state"
    taps: str = "mamba_d_conv"
    convolution_bias: str = "mamba_conv_bias"
    bias: str = "mamba_proj_bias"


GRANITE = Keys()
NEMOTRON = Keys(
    *("mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size", "conv_kernel", "use_conv_bias", "use_bias")
)


def read_mamba2(config: Mapping[str, Any], inner_size: int | None = None, keys: Keys = GRANITE) -> Mamba2Config:
    """Read the mixer's sizes; heads times their size is `inner_size`, if given. Raises ValueError naming a key."""
    heads = Fields(config).size(keys.heads, limit=MOST_HEADS)
    automatic = inner_size is not None and config.get(keys.head_size) in (None, "auto")
    fields = Fields(dict(config) | ({keys.head_size: (inner_size or 0) // heads} if automatic else {}))
    size, groups, state = fields.size(keys.head_size), fields.size(keys.groups), fields.size(keys.state)
    if inner_size is not None and heads * size != inner_size:
        raise ValueError(f"config.json: {keys.heads}={heads}: {keys.head_size}={size} times it must be {inner_size}")
    if heads % groups:
        raise ValueError(f"config.json: {keys.groups}={groups}: must divide {keys.heads}={heads}")
    return Mamba2Config(
        channels=heads * size + 2 * groups * state,
        taps=fields.size(keys.taps, limit=16),
        heads=heads,
        groups=groups,
        key_size=state,
        value_size=size,
        bias=(bias := fields.take(keys.bias, bool, False)),
        output_bias=bias,
        convolution_bias=fields.take(keys.convolution_bias, bool, True),
    )


class GroupNorm(RMSNorm):
    """RMSNorm of each of `groups` equal parts of a row by itself."""

    def __init__(self, size: int, groups: int, eps: float) -> None:
        super().__init__(size, eps)
        self.groups, self.group_size = groups, size // groups

    def forward(self, x: Tensor) -> Tensor:
        if self.groups == 1:
            return super().forward(x)
        parts = x.unflatten(-1, (-1, self.group_size))
        normed = rms_norm(parts, torch.ones(parts.shape[-1], dtype=x.dtype, device=x.device), self.eps)
        return (normed.flatten(-2) * self.weight.to(x.dtype)).to(x.dtype if self.inside else self.weight.dtype)


class SpanningNorm(GroupNorm):
    """A norm whose groups span ranks: the input is gathered first. Every rank has the whole output or, if a gate
    follows, its own part.
    """

    def __init__(self, norm: GroupNorm, part: Part) -> None:
        super().__init__(len(norm.weight), norm.groups, norm.eps)
        self.inside, self.part, self.sizes = norm.inside, part, even(len(norm.weight), part.ranks)

    def forward(self, x: Tensor) -> Tensor:
        normed = super().forward(self.part.gather(x, self.sizes))
        return normed.split(self.sizes, dim=-1)[self.part.rank] if self.inside else normed


class Mamba2(Mixer):
    config: Mamba2Config

    def __init__(self, config: TargetConfig, layer: int) -> None:
        super().__init__()
        assert isinstance(config.recurrent, Mamba2Config)
        self.config = own = config.recurrent
        size, (keys, values, numbers) = own.heads * own.value_size, units_of(own)
        self.rows = {"in_proj": (values, values, keys, keys, numbers), "conv": (values, keys, keys), "norm": (values,)}
        self.rows |= dict.fromkeys(("A_log", "D", "dt_bias"), (numbers,))
        self.in_proj = Linear(config.hidden_size, size + own.channels + own.heads, bias=own.bias)
        self.conv = CausalConvolution(config, layer, bias=own.convolution_bias)
        self.A_log, self.D, self.dt_bias = (nn.Parameter(torch.zeros(own.heads)) for _ in range(3))
        self.o_proj = Linear(size, config.hidden_size, bias=own.output_bias)
        if own.norm != "none":
            self.norm = GroupNorm(size, own.groups, config.rms_norm_eps)
            self.norm.inside = own.norm == "before the gate"

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Mamba2:
        super()._apply(fn, recurse)
        for parameter in (self.A_log, self.D, self.dt_bias):  # in fp32 whatever the model's dtype is
            parameter.data = parameter.data.float()
        return self

    def forward(self, x: Tensor, recurrence: Recurrence, residual: Tensor | None = None) -> Tensor:
        """Return the layer's output `[..., H]`, added to `residual` if there is one."""
        mixed = self._mix(x, recurrence)
        return self.o_proj(mixed) if residual is None else self.o_proj.add(residual, mixed)

    def _mix(self, x: Tensor, recurrence: Recurrence) -> Tensor:
        """Return the input of the output projection, in the dtype of x `[..., H]`."""
        own, dtype = self.config, x.dtype
        size = own.heads * own.value_size
        z, xbc, dt = self.in_proj(x).split([size, own.channels, own.heads], dim=-1)
        sizes, (z_scale, *xbc_scales, dt_scale) = [size, *[own.groups * own.key_size] * 2], own.scales
        if any(scale != 1 for scale in xbc_scales):
            xbc = torch.cat([part * s for part, s in zip(xbc.split(sizes, dim=-1), xbc_scales, strict=True)], dim=-1)
        values, b, c = self.conv(xbc, recurrence, silu=True).split(sizes, dim=-1)
        values = values.unflatten(-1, (own.heads, own.value_size))
        b, c = (each.unflatten(-1, (own.groups, own.key_size)) for each in (b, c))
        dt = softplus(dt.float() * dt_scale + self.dt_bias)
        decay = torch.exp(dt * -torch.exp(self.A_log))
        y = recurrence.scan(self.conv.layer, c, b, values, decay, dt, delta=False)
        y = (y + self.D[:, None] * values.float()).flatten(-2)
        y = self.norm(y) if own.norm == "before the gate" else y
        y = silu_mul(torch.cat([z if z_scale == 1 else z.float() * z_scale, y], dim=-1))  # in fp32, as y is
        return self.norm(y) if own.norm == "after the gate" else y.to(dtype)
