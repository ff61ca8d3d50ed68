"""The choice rule: checks that the GPU chooses as the CPU, and times a pass over the vocabulary."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, partial

import torch
from torch import Tensor

from kernels.choose import NO_LIMITS, ChoiceParameters, Limits, choice_keys, choose, choose_best, logprobs
from kernels.shape import Shaping, packed, shape, shape_in_torch
from scripts.gpu_check.measure import Item, close, same, timed
from scripts.gpu_check.plan import BF16, FP32, SERVED, KernelCheck

LLAMA = 128256  # vocabulary of Llama-3.1-8B
CASES = (  # rows, vocabulary and dtype
    *((rows, size, torch.bfloat16) for size in (LLAMA, 32000, 2048, 262144) for rows in (1, 7, 64)),
    (16, LLAMA, torch.float32),
)
CPU_SECONDS = 6e-7  # of the reference for one logit, all kinds
KINDS = ("greedy", "sampled", "top-k and min-p", "top-p")


def checks(device: torch.device) -> Iterator[KernelCheck]:
    on_gpu = device.type == "cuda"
    cases = CASES if on_gpu else ((2, 150, torch.float32), (3, 2300, torch.bfloat16))
    for rows, size, dtype in cases:
        seconds, rank = 1 + rows * size * CPU_SECONDS, SERVED if size == LLAMA and dtype == torch.bfloat16 else BF16
        rank = FP32 if on_gpu and dtype == torch.float32 else rank
        items = partial(compare, rows, size, dtype, device)
        yield KernelCheck("correctness", f"choose, {rows} x {size}, {dtype}", seconds, rank, items)
    for rows in (1, 16, 64) if on_gpu else (2,):
        items = partial(time, rows, LLAMA if on_gpu else 150, torch.bfloat16 if on_gpu else torch.float32, device)
        yield KernelCheck("timings", f"choose, {rows} rows", 1, SERVED, items)
    items = partial(time_drafts, (1, 8), 32000, torch.bfloat16, device)
    if not on_gpu:
        items = partial(time_drafts, (1,), 90, torch.float32, device)
    yield KernelCheck("timings", "draft top-m", 1, SERVED, items)


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


def compare(rows: int, size: int, dtype: torch.dtype, device: torch.device) -> Iterator[Item]:
    logits, positions = make(rows, size, dtype, device)
    shaped = shape(logits, shaping(rows, size, device))
    plain = partial(shape_in_torch, logits.cpu(), shaping(rows, size, torch.device("cpu")))
    yield same("penalties, bias and mask", f"{rows} x {size}, {dtype}", shaped, plain)
    for kind in KINDS:
        yield from compare_kind(kind, logits, positions)


def compare_kind(kind: str, logits: Tensor, positions: Tensor) -> Iterator[Item]:
    rows, case = len(logits), f"{kind}, {len(logits)} x {logits.shape[1]}, {logits.dtype}"
    gpu = parameters(kind, rows, logits.device)

    @cache
    def keys() -> Tensor:
        return choice_keys(logits.cpu(), parameters(kind, rows, torch.device("cpu")), positions.cpu())

    @cache
    def best() -> tuple[Tensor, Tensor]:
        values, columns = keys().double().sort(dim=-1, descending=True, stable=True)
        return values[:, :8] - keys().double().logsumexp(-1, keepdim=True), columns[:, :8]

    yield same("choose", case, choose(logits, gpu, positions), lambda: keys().argmax(-1))
    if kind == "top-p":
        return
    columns, values = choose_best(logits, gpu, positions, None, 8)
    yield same("draft top-m", case, columns, lambda: best()[1])
    yield close("draft top-m log-probabilities", case, values, lambda: best()[0], 1e-5)


def time(rows: int, size: int, dtype: torch.dtype, device: torch.device) -> Iterator[Item]:
    logits, positions = make(rows, size, dtype, device)
    moved = logits.numel() * logits.element_size()
    p = shaping(rows, size, device)
    case, tensors = f"{rows} x {size}, {dtype}", (p.prompt, p.output, p.bias, p.allowed)
    read = moved + sum(tensor.numel() * tensor.element_size() for tensor in tensors if tensor is not None)
    yield timed("penalties, bias and mask", case, device, read + 4 * logits.numel(), shape, logits, p)
    chosen = logprobs, logits, positions % size, 8
    yield timed("log-probabilities", f"8 and the chosen, {case}", device, 2 * moved, *chosen)
    for kind in KINDS:
        chosen = choose, logits, parameters(kind, rows, device), positions
        yield timed("choose", f"{kind}, {case}", device, moved, *chosen)


def time_drafts(counts: tuple[int, ...], size: int, dtype: torch.dtype, device: torch.device) -> Iterator[Item]:
    """Time the best columns of a head's draft vocabulary of `size`."""
    for rows in counts:
        logits, positions = make(rows, size, dtype, device)
        p, ids = parameters("sampled", rows, device), torch.arange(size, device=device) * 2
        case, moved = f"{rows} x {size}, m = 8, {dtype}", logits.numel() * logits.element_size()
        yield timed("draft top-m", case, device, moved, choose_best, logits, p, positions, ids, 8)
