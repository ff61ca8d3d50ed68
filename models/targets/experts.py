"""A mixture of experts in place of the MLP, as Mixtral and Qwen3-MoE have it.

A row's experts are applied in ascending order, whatever experts other rows use, so that its sum has a fixed order.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from models.config import ExpertsConfig
from models.layers import GatedMLP, Linear


class MixtureOfExperts(nn.Module):
    """The weighted sum of the outputs of the `active` experts that are likeliest by the router's softmax over all."""

    def __init__(self, hidden_size: int, config: ExpertsConfig) -> None:
        super().__init__()
        self.config = config
        self.gate = Linear(hidden_size, config.count, bias=False)
        self.experts = nn.ModuleList(GatedMLP(hidden_size, config.intermediate_size) for _ in range(config.count))

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])  # [R, H]
        weights, chosen = self.route(rows)
        out = torch.zeros_like(rows)
        for expert in chosen.unique().tolist():  # ascending
            row, rank = (chosen == expert).nonzero(as_tuple=True)
            output = self.experts[expert](rows[row])
            out.index_add_(0, row, output * weights[row, rank, None].to(output.dtype))
        out = out.view_as(x)
        return out if residual is None else residual + out

    def route(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weights, fp32, and the numbers of the experts of rows `[R, H]`, `[R, active]` each."""
        scores = self.gate(rows).float().softmax(-1)
        chosen = best(scores, self.config.active)
        weights = scores.gather(1, chosen)
        return weights / weights.sum(-1, keepdim=True) if self.config.normalize else weights, chosen


def best(scores: Tensor, count: int) -> Tensor:
    """Return the places of the `count` highest of scores `[R, N]`, highest first; of equal ones the first."""
    # Sorted, not topk: ties must be broken the same way in any batch.
    return scores.sort(dim=-1, descending=True, stable=True).indices[:, :count]
