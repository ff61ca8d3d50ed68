"""LM head and KL a chunk of slots at a time: value and gradients against the dense form in float64, and the time."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scripts.gpu_check.measure import close, timed
from train.objectives.fused import chunked_sums
from train.objectives.losses import SoftCrossEntropy


def make(device: torch.device, slots: int, width: int, drafts: int) -> tuple[Tensor, nn.Parameter, Tensor, Tensor]:
    """States and hidden states `[slots, width]`, the head's and the target's LM heads `[drafts, width]`."""
    generator = torch.Generator().manual_seed(0)
    x, own, hidden, theirs = (
        torch.randn(rows, width, generator=generator).to(device) / width**0.25
        for rows in (slots, drafts, slots, drafts)
    )
    return x.requires_grad_(), nn.Parameter(own), hidden, theirs


def fused(x: Tensor, weight: nn.Parameter, hidden: Tensor, theirs: Tensor, chunk: int) -> Tensor:
    """Σ over slots of the cross-entropy, differentiable by x and weight."""

    def compare(states: Tensor, weights: Tensor, rows: Tensor) -> tuple[Tensor, ...]:
        probs = (hidden[rows] @ theirs.T).softmax(-1)
        return ((SoftCrossEntropy.apply(states @ weight.T, probs) * weights).sum(),)

    ones, rows = torch.ones(len(x), device=x.device), torch.arange(len(x), device=x.device)
    return chunked_sums(compare, x, ones, rows, chunk, [weight])[0]


def correctness(device: torch.device) -> list[dict[str, Any]]:
    slots, width, drafts, chunk = (700, 512, 4000, 256) if device.type == "cuda" else (20, 16, 50, 7)
    given = make(device, slots, width, drafts)
    x, weight, *_ = given
    loss = fused(*given, chunk)
    loss.backward()
    wide_x, wide, hidden, theirs = (value.detach().double().cpu() for value in given)
    wide_x.requires_grad_()
    wide.requires_grad_()
    true = F.cross_entropy(wide_x @ wide.T, (hidden @ theirs.T).softmax(-1), reduction="sum")
    true.backward()
    case = f"{slots} x {width} x {drafts}"
    values = {"": (loss, true), ", by the states": (x.grad, wide_x.grad), ", by the weight": (weight.grad, wide.grad)}
    found = []
    for name, (ours, theirs_) in values.items():
        assert ours is not None
        assert theirs_ is not None
        # a GPU's matrix product of fp32 may be TF32 where the user asked for that; here nobody did
        found.append(close("fused LM head and KL" + name, case, ours, theirs_, 1e-4))
    return found


def timings(device: torch.device) -> list[dict[str, Any]]:
    slots, width, drafts, chunk = (4096, 4096, 32000, 2048) if device.type == "cuda" else (20, 16, 50, 7)
    given = make(device, slots, width, drafts)

    def step() -> None:
        with torch.autocast(device.type, torch.bfloat16):
            loss = fused(*given, chunk)
        loss.backward()

    moved = 4 * sum(value.numel() for value in given)  # each once, in fp32; its products bound it, not its bytes
    return [timed("fused LM head and KL", f"{slots} x {width} x {drafts}, bf16", step, device, moved=moved)]
