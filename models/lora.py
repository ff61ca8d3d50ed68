"""Low-rank adaptation (LoRA, arXiv 2106.09685) of a target's linear layers: W x + alpha / rank * B A x.

W stays unchanged and is shared, not copied, so that `unadapted` restores the original target at no cost. A merged
projection (QKV, gate and up) is adapted as one matrix.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.layers import Linear


class LoraLinear(Linear):
    """A linear layer with an adapter: A [rank, K] starts random, B [N, rank] at zero, so a new one changes nothing.

    Both are fp32.
    """

    adapted = True  # False: W alone

    def __init__(self, base: Linear, rank: int, alpha: float, generator: torch.Generator) -> None:
        super().__init__(base.in_features, base.out_features, bias=False, device="meta")
        assert base.packed is None, "packed weights cannot be differentiated through"
        self.weight, self.bias = base.weight, base.bias
        device = base.weight.device
        down = torch.randn(rank, base.in_features, generator=generator) * base.in_features**-0.5
        self.lora_a = nn.Parameter(down.to(device))
        self.lora_b = nn.Parameter(torch.zeros(base.out_features, rank, device=device))
        self.scale = alpha / rank

    def forward(self, input: Tensor) -> Tensor:
        out = F.linear(input, self.weight, self.bias)
        if not self.adapted:
            return out
        a, b = self.lora_a.to(input.dtype), self.lora_b.to(input.dtype)
        return out + self.scale * F.linear(F.linear(input, a), b)

    @torch.no_grad()
    def merged(self) -> Linear:
        """Return a plain layer that computes the same function, in W's dtype."""
        out = Linear(self.in_features, self.out_features, bias=self.bias is not None, device="meta")
        weight = self.weight.float() + self.scale * self.lora_b @ self.lora_a
        out.weight = nn.Parameter(weight.to(self.weight.dtype), requires_grad=False)
        out.bias = self.bias
        return out


def adapt(layers: nn.Module, names: Sequence[str], *, rank: int, alpha: float, seed: int = 0) -> None:
    """Add an adapter, in place, to every linear layer inside `layers` whose name is one of `names`.

    Raises ValueError for a name that no linear layer has.
    """
    refuse_unknown_layers(layers, names)
    generator = torch.Generator().manual_seed(seed)
    for parent, name, child in linear_layers(layers):
        if name in names:
            setattr(parent, name, LoraLinear(child, rank, alpha, generator))


def refuse_unknown_layers(layers: nn.Module, names: Sequence[str]) -> None:
    """Raise ValueError for a name that no linear layer has."""
    layer_names = sorted({name for _, name, _ in linear_layers(layers)})
    for name in names:
        if name not in layer_names:
            raise ValueError(f"objective.lora_on: {name}: this target's layers have {', '.join(layer_names)}")


def linear_layers(module: nn.Module) -> list[tuple[nn.Module, str, Linear]]:
    """Return every linear layer as (parent, name in the parent, layer)."""
    return [
        (parent, name, child)
        for parent in module.modules()
        for name, child in parent.named_children()
        if isinstance(child, Linear)
    ]


def merge(module: nn.Module) -> None:
    """Replace adapted layers by plain layers that compute the same function."""
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, LoraLinear):
                setattr(parent, name, child.merged())


@contextmanager
def unadapted(module: nn.Module) -> Iterator[None]:
    """Disable the adapters inside the context, so that the module computes what it did before `adapt`."""
    layers = [child for child in module.modules() if isinstance(child, LoraLinear)]
    for layer in layers:
        layer.adapted = False
    try:
        yield
    finally:
        for layer in layers:
            layer.adapted = True
