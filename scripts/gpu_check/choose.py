"""The choice rule: checks that the GPU chooses as the CPU, and times a pass over the vocabulary."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from kernels.choose import NO_LIMITS, ChoiceParameters, Limits, choice_keys, choose, choose_best, logprobs
from kernels.shape import Shaping, packed, shape, shape_in_torch
from scripts.gpu_check.measure import close, same, timed

KINDS = ("greedy", "sampled", "top-k and min-p", "top-p")


def cases(device: torch.device) -> Iterator[tuple[int, int, torch.dtype]]:
    """Yield rows, vocabulary size and dtype."""
    if device.type != "cuda":
        yield from ((2, 150, torch.float32), (3, 2300, torch.bfloat16))
        return
    for size in (2048, 32000, 128256, 262144):
        for rows in (1, 7, 64):
            yield rows, size, torch.bfloat16
    yield 16, 128256, torch.float32


def make(rows: int, size: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows * size)
    logits = (4 * torch.randn(rows, size, generator=generator)).to(dtype).to(device)
    return logits, torch.arange(rows, device=device) * 31 + 1000


def parameters(kind: str, rows: int, device: torch.device) -> ChoiceParameters | None:
    if kind == "greedy":
        return None
    seeds = torch.arange(rows, device=device) * 7919 + 11
    full = {"temperature": 0.8, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    full |= {"top-k and min-p": {"top_k": 50, "min_p": 0.01}, "top-p": {"top_p": 0.9}}.get(kind, {})
    values = {key: torch.full((rows,), value, device=device) for key, value in full.items()}
    return ChoiceParameters(
        **values,
        seed_low=seeds,
        seed_high=seeds + 1,
        limits=Limits() if kind.startswith("top") else NO_LIMITS,
        repeat=1,
    )


def shaping(rows: int, size: int, device: torch.device) -> Shaping:
    """Return all logits processing that precedes the temperature, for the rows of a draft."""
    generator = torch.Generator().manual_seed(size)
    output = torch.randint(0, 3, (size,), generator=generator).float()
    prompt, allowed = torch.rand(size, generator=generator) < 0.1, torch.rand(rows, size, generator=generator) < 0.5
    drafted = torch.randint(-1, size, (rows, 4), generator=generator)
    bias = torch.randn(size, generator=generator)
    tensors = (tensor.to(device) for tensor in (prompt, output, drafted, bias, packed(allowed)))
    return Shaping(1.2, 0.3, -0.2, *tensors)


def correctness(device: torch.device) -> list[dict[str, Any]]:
    results = []
    cpu = torch.device("cpu")
    for rows, size, dtype in cases(device):
        logits, positions = make(rows, size, dtype, device)
        plain = shape_in_torch(logits.cpu(), shaping(rows, size, cpu))
        shaped = shape(logits, shaping(rows, size, device))
        results.append(same("penalties, bias and mask", f"{rows} x {size}, {dtype}", shaped, plain))
        for kind in KINDS:
            case = f"{kind}, {rows} x {size}, {dtype}"
            keys = choice_keys(logits.cpu(), parameters(kind, rows, cpu), positions.cpu())
            chosen = choose(logits, parameters(kind, rows, device), positions)
            results.append(same("choose", case, chosen, keys.argmax(-1)))
            if kind == "top-p":
                continue
            columns, values = choose_best(logits, parameters(kind, rows, device), positions, None, 8)
            best = keys.double().sort(dim=-1, descending=True, stable=True)
            results.append(same("draft top-m", case, columns, best.indices[:, :8]))
            true = best.values[:, :8] - keys.double().logsumexp(-1, keepdim=True)
            results.append(close("draft top-m log-probabilities", case, values, true, 1e-5))
    return results


def timings(device: torch.device) -> list[dict[str, Any]]:
    on_gpu, results = device.type == "cuda", []
    size, dtype = (128256, torch.bfloat16) if on_gpu else (150, torch.float32)
    for rows in (1, 16, 64) if on_gpu else (2,):
        logits, positions = make(rows, size, dtype, device)
        moved = logits.numel() * logits.element_size()
        p = shaping(rows, size, device)
        case, tensors = f"{rows} x {size}, {dtype}", (p.prompt, p.output, p.bias, p.allowed)
        read = moved + sum(tensor.numel() * tensor.element_size() for tensor in tensors if tensor is not None)
        results.append(timed("penalties, bias and mask", case, device, read + 4 * logits.numel(), shape, logits, p))
        chosen = logprobs, logits, positions % size, 8
        results.append(timed("log-probabilities", f"8 and the chosen, {case}", device, 2 * moved, *chosen))
        for kind in KINDS:
            p = parameters(kind, rows, device)
            case = f"{kind}, {rows} x {size}, {dtype}"
            results.append(timed("choose", case, device, moved, choose, logits, p, positions))
    drafts = 32000 if on_gpu else 90
    for rows in (1, 8) if on_gpu else (1,):
        logits, positions = make(rows, drafts, dtype, device)
        p, ids = parameters("sampled", rows, device), torch.arange(drafts, device=device) * 2
        case, moved = f"{rows} x {drafts}, m = 8, {dtype}", logits.numel() * logits.element_size()
        results.append(timed("draft top-m", case, device, moved, choose_best, logits, p, positions, ids, 8))
    return results
