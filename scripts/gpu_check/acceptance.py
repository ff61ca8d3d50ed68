"""Block verification and typical acceptance: checks that the GPU decides as torch does on the CPU, and times them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from infer.sampling.params import SamplingParams
from kernels import acceptance
from scripts.gpu_check.measure import Item, close, same, timed
from scripts.gpu_check.plan import BF16, KernelCheck


def chains(batch: int, drafted: int, size: int, device: torch.device) -> tuple[Any, ...]:
    """Return target probabilities, tokens, draft probabilities, seeds and positions; every fourth chain has no draft
    probabilities (a deterministic draft).
    """
    generator = torch.Generator().manual_seed(batch)
    target_probs = (torch.randn(batch, drafted + 1, size, generator=generator) * 2).softmax(-1)
    draft_probs = 0.7 * target_probs[:, :-1] + 0.3 * (
        torch.randn(batch, drafted, size, generator=generator) * 2
    ).softmax(-1)
    tokens = draft_probs.flatten(0, 1).multinomial(1, generator=generator).view(batch, drafted).tolist()
    proposals = [None if b % 4 == 3 else probs for b, probs in enumerate(draft_probs.to(device))]
    seeds = [b * 7919 + (b << 33) for b in range(batch)]
    return target_probs.flatten(0, 1).to(device), tokens, proposals, seeds, [100 + b for b in range(batch)]


def typical(probs: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return inputs of `typical_mask` with two tokens per row of `probs`, likely ones for every other row."""
    above = torch.arange(2 * len(probs), device=probs.device) // 2
    tokens = torch.where(above % 2 == 0, probs.argmax(-1)[above], above % probs.shape[1])
    threshold, alpha = (torch.full_like(tokens, limit, dtype=torch.float64) for limit in SamplingParams().typical)
    return probs, above, tokens, threshold, alpha


def sizes(device: torch.device) -> tuple[int, int, int]:
    return (32, 5, 128256) if device.type == "cuda" else (4, 3, 150)


def checks(device: torch.device) -> Iterator[KernelCheck]:
    yield KernelCheck("correctness", "block verification and typical acceptance", 8, BF16, partial(compare, device))
    yield KernelCheck("timings", "block verification and typical acceptance", 4, BF16, partial(time, device))


def compare(device: torch.device) -> Iterator[Item]:
    batch, drafted, size = sizes(device)
    target_probs, tokens, draft_probs, *rest = chains(batch, drafted, size, device)
    case = f"{batch} chains of {drafted}, vocabulary {size}"

    def true() -> Tensor:
        parts = target_probs.cpu().split(drafted + 1)
        cpu_probs = [chain if chain is None else chain.cpu() for chain in draft_probs]
        verified = zip(parts, cpu_probs, tokens, *rest, strict=True)
        return torch.tensor([acceptance.verify_block(*chain) for chain in verified])

    accepted = acceptance.block(target_probs, tokens, draft_probs, *rest)
    yield same("block verification", case, torch.tensor(accepted), true)
    inputs = typical(target_probs)

    def typical_true() -> Tensor:
        entropy, above, ids = acceptance.entropy_of(target_probs.cpu()), inputs[1].cpu(), inputs[2].cpu()
        threshold, alpha = SamplingParams().typical
        thresholds = (alpha * torch.exp(-entropy)).clamp(max=threshold)
        return target_probs.cpu()[above, ids].double() > thresholds[above]

    yield same("typical acceptance", case, acceptance.typical_mask(*inputs), typical_true)
    if device.type == "cuda":
        from kernels.triton.acceptance import entropy as fused

        yield close("entropies", case, fused(target_probs), lambda: acceptance.entropy_of(target_probs.cpu()), 1e-12)


def time(device: torch.device) -> Iterator[Item]:
    batch, drafted, size = sizes(device)
    inputs = chains(batch, drafted, size, device)
    target_probs, moved = inputs[0], 4 * batch * size * (2 * drafted + 1)
    typical_inputs = typical(target_probs)
    case = f"{batch} chains of {drafted}, vocabulary {size}"
    # The host reads what block verification accepts.
    yield timed("block verification", case, device, moved, acceptance.block, *inputs, capture=False)
    read = 4 * target_probs.numel()
    yield timed("typical acceptance", case, device, read, acceptance.typical_mask, *typical_inputs)
