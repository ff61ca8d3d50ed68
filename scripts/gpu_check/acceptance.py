"""Block verification and typical acceptance: the GPU decides what the CPU's torch form does, and the time."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernels import acceptance
from scripts.gpu_check.measure import close, same, timed


def chains(batch: int, drafted: int, size: int, device: torch.device) -> tuple[Any, ...]:
    """Laws, tokens and the laws they were drawn from, seeds and positions; every fourth draft is certain."""
    generator = torch.Generator().manual_seed(batch)
    laws = (torch.randn(batch, drafted + 1, size, generator=generator) * 2).softmax(-1)
    drawn = 0.7 * laws[:, :-1] + 0.3 * (torch.randn(batch, drafted, size, generator=generator) * 2).softmax(-1)
    tokens = drawn.flatten(0, 1).multinomial(1, generator=generator).view(batch, drafted).tolist()
    known = [None if b % 4 == 3 else own for b, own in enumerate(drawn.to(device))]
    seeds = [b * 7919 + (b << 33) for b in range(batch)]
    return laws.flatten(0, 1).to(device), tokens, known, seeds, [100 + b for b in range(batch)]


def typical(laws: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Likely tokens and others after every row."""
    above = torch.arange(2 * len(laws), device=laws.device) // 2
    tokens = torch.where(above % 2 == 0, laws.argmax(-1)[above], above % laws.shape[1])
    return laws, above, tokens


def sizes(device: torch.device) -> tuple[int, int, int]:
    return (32, 5, 128256) if device.type == "cuda" else (4, 3, 150)


def correctness(device: torch.device) -> list[dict[str, Any]]:
    batch, drafted, size = sizes(device)
    laws, tokens, drawn, *rest = chains(batch, drafted, size, device)
    found = acceptance.block(laws, tokens, drawn, *rest)
    parts = laws.cpu().split(drafted + 1)
    known = [own if own is None else own.cpu() for own in drawn]
    true = [acceptance.block_of(*own) for own in zip(parts, known, tokens, *rest, strict=True)]
    case = f"{batch} chains of {drafted}, vocabulary {size}"
    given = typical(laws)
    likely = acceptance.likely(*given)
    entropy = acceptance.entropy_of(laws.cpu())
    least = (acceptance.TYPICAL_DELTA * torch.exp(-entropy)).clamp(max=acceptance.TYPICAL_EPSILON)
    above, ids = given[1].cpu(), given[2].cpu()
    lines = [same("block verification", case, torch.tensor(found), torch.tensor(true))]
    lines.append(same("typical acceptance", case, likely, laws.cpu()[above, ids].double() > least[above]))
    if device.type == "cuda":
        from kernels.triton.acceptance import entropy as fused

        lines.append(close("entropies", case, fused(laws), entropy, 1e-12))
    return lines


def timings(device: torch.device) -> list[dict[str, Any]]:
    batch, drafted, size = sizes(device)
    given = chains(batch, drafted, size, device)
    laws, moved = given[0], 4 * batch * size * (2 * drafted + 1)
    asked = typical(laws)
    case = f"{batch} chains of {drafted}, vocabulary {size}"
    return [
        timed("block verification", case, lambda: acceptance.block(*given), device, moved=moved),
        timed("typical acceptance", case, lambda: acceptance.likely(*asked), device, moved=4 * laws.numel()),
    ]
