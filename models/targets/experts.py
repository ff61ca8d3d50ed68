"""A mixture of experts in place of the MLP, as Mixtral, Qwen3-MoE and gpt-oss have it.

A row's experts are applied in ascending order, whatever experts other rows use, so that its sum has a fixed order.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kernels.elementwise import silu_mul, uniform
from models.config import ExpertsConfig
from models.layers import GatedMLP, Linear


class ClampedMLP(GatedMLP):
    """gpt-oss's expert: `down((up + 1) * gate * sigmoid(alpha * gate))`, with biases, gate and up at most `limit`."""

    def __init__(self, hidden_size: int, intermediate_size: int, limit: float, alpha: float) -> None:
        super().__init__(hidden_size, intermediate_size, bias=True)
        self.limit, self.alpha = limit, alpha

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        assert residual is None, "an expert's output is weighted before it is added"
        gate, up = self.gate_up_proj(x).float().chunk(2, dim=-1)
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        # by silu, whose kernels give a row the same bits in any batch
        return self.down_proj(silu_mul(torch.cat([self.alpha * gate, (up + 1) / self.alpha], dim=-1)).to(x.dtype))


class MixtureOfExperts(nn.Module):
    """The weighted sum of the outputs of the `active` experts that are likeliest by the router's softmax over all."""

    def __init__(self, hidden_size: int, config: ExpertsConfig) -> None:
        super().__init__()
        self.config = config
        self.gate = Linear(hidden_size, config.count, bias=config.clamp is not None)
        self.experts = nn.ModuleList(self.make_expert(hidden_size, config) for _ in range(config.count))

    @staticmethod
    def make_expert(hidden_size: int, config: ExpertsConfig) -> nn.Module:
        size = config.intermediate_size
        return GatedMLP(hidden_size, size) if config.clamp is None else ClampedMLP(hidden_size, size, *config.clamp)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])  # [R, H]
        out = self.mix(rows, *self.route(rows), (x if residual is None else residual).dtype).view_as(x)
        return out if residual is None else residual + out

    def mix(self, rows: Tensor, weights: Tensor, chosen: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the sum `[R, H]` of the weighted outputs of each row's chosen experts."""
        out = torch.zeros_like(rows, dtype=dtype)
        trains = torch.is_grad_enabled() and self.gate.weight.requires_grad  # then each has a gradient, if of zeros
        for expert in range(self.config.count) if trains else chosen.unique().tolist():  # ascending
            row, rank = (chosen == expert).nonzero(as_tuple=True)
            output = self.experts[expert](rows[row])
            out.index_add_(0, row, (output * weights[row, rank, None].to(output.dtype)).to(out.dtype))
        return out

    def route(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weights, fp32, and the numbers of the experts of rows `[R, H]`, `[R, active]` each."""
        scores = self.gate(rows).float().softmax(-1)
        chosen = best(scores, self.config.active)
        weights = scores.gather(1, chosen)
        return weights / weights.sum(-1, keepdim=True) if self.config.normalize else weights, chosen


class GatedShareExperts(MixtureOfExperts):
    """Qwen's experts, beside an MLP that every token uses, scaled by a sigmoid of the input."""

    def __init__(self, hidden_size: int, config: ExpertsConfig) -> None:
        super().__init__(hidden_size, config)
        self.shared_expert = GatedMLP(hidden_size, config.shared_size)
        self.shared_expert_gate = Linear(hidden_size, 1, bias=False)
        self.shared_expert_gate.out_dtype, self.shared_expert_gate.narrows = torch.float32, False

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        shared = self.shared_expert(x) * uniform(torch.sigmoid, self.shared_expert_gate(x))
        return super().forward(x, shared if residual is None else residual + shared)


def best(scores: Tensor, count: int) -> Tensor:
    """Return the places of the `count` highest of scores `[R, N]`, highest first; of equal ones the first."""
    # Sorted, not topk: ties must be broken the same way in any batch.
    return scores.sort(dim=-1, descending=True, stable=True).indices[:, :count]
