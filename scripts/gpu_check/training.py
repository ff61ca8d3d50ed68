"""Kernels of training: checks values and gradients against the dense form in float64, and times both passes.

They are the fused LM head and KL, which processes a chunk of slots at a time, and the attention of training-time test
and of block drafters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kernels.block_attention import block_attention, dense_block_attention
from kernels.ttt_attention import dense, ttt_attention
from scripts.gpu_check.measure import Item, close, timed
from scripts.gpu_check.plan import BF16, FP32, KernelCheck
from train.objectives.losses.functions import SoftCrossEntropy
from train.objectives.losses.fused import SharedGradients, chunked_sums


def make(device: torch.device, slots: int, width: int, drafts: int) -> tuple[Tensor, nn.Parameter, Tensor, Tensor]:
    """Return the head's states and the target's hidden states `[slots, width]`, and both LM heads `[drafts, width]`.

    The order is states, the head's LM head, hidden states, the target's LM head.
    """
    generator = torch.Generator().manual_seed(0)
    x, weight, hidden, target_weight = (
        torch.randn(rows, width, generator=generator).to(device) / width**0.25
        for rows in (slots, drafts, slots, drafts)
    )
    return x.requires_grad_(), nn.Parameter(weight), hidden, target_weight


def fused(x: Tensor, weight: nn.Parameter, hidden: Tensor, target_weight: Tensor, chunk: int) -> Tensor:
    """Return the cross-entropy summed over slots, differentiable with respect to x and weight."""

    def compare(states: Tensor, weights: Tensor, rows: Tensor) -> tuple[Tensor, ...]:
        probs = (hidden[rows] @ target_weight.T).softmax(-1)
        return ((SoftCrossEntropy.apply(states @ weight.T, probs) * weights).sum(),)

    slot_weights, rows = torch.ones(len(x), device=x.device), torch.arange(len(x), device=x.device)
    gradients, factor = SharedGradients([weight]), torch.ones((), device=x.device)
    return gradients.attach(chunked_sums(compare, x, slot_weights, rows, chunk, gradients, factor)[0])


def checks(device: torch.device) -> Iterator[KernelCheck]:
    small = Unrolled(2, 40, 30, 4, 2, 20, 2, torch.float32)
    cases = [(small, 1e-5)]
    if device.type == "cuda":
        large = Unrolled(2, 700, 500, 8, 2, 128, 3, torch.bfloat16)
        cases += [(large._replace(dim=dim), 0.02) for dim in (128, 64, 80, 96, 256)]
        cases.append((large._replace(dtype=torch.float32, heads=6), 1e-4))
    for case, bound in cases:
        rank = BF16 if case.dtype == torch.bfloat16 else FP32
        label = f"training-time test, head size {case.dim}, {case.dtype}"
        yield KernelCheck("correctness", label, 4, rank, partial(compare_attention, case, bound, device))
    for blocks, bound in block_cases(device):
        rank = BF16 if blocks.dtype == torch.bfloat16 else FP32
        check = partial(compare_blocks, blocks, bound, device)
        yield KernelCheck("correctness", f"block drafter, {blocks}", 4, rank, check)
    yield KernelCheck("correctness", "fused LM head and KL", 3, BF16, partial(compare_loss, device))
    yield KernelCheck("timings", "fused LM head and KL", 3, BF16, partial(time_loss, device))
    yield KernelCheck("timings", "training-time test", 5, BF16, partial(time_attention, device))
    yield KernelCheck("timings", "block drafter", 5, BF16, partial(time_blocks, device))


def compare_loss(device: torch.device) -> Iterator[Item]:
    slots, width, drafts, chunk = (700, 512, 4000, 256) if device.type == "cuda" else (20, 16, 50, 7)
    inputs = make(device, slots, width, drafts)
    x, weight, *_ = inputs
    loss = fused(*inputs, chunk)
    loss.backward()
    wide_x, wide, hidden, target_weight = (value.detach().double().cpu() for value in inputs)
    wide_x.requires_grad_()
    wide.requires_grad_()
    true = F.cross_entropy(wide_x @ wide.T, (hidden @ target_weight.T).softmax(-1), reduction="sum")
    true.backward()
    case = f"{slots} x {width} x {drafts}"
    values = {"": (loss, true), ", by the states": (x.grad, wide_x.grad), ", by the weight": (weight.grad, wide.grad)}
    for name, (actual, expected) in values.items():
        assert actual is not None
        assert expected is not None
        # A GPU computes fp32 matrix products in TF32 only if the user enables that; here it is off.
        yield close("fused LM head and KL" + name, case, actual, expected, 1e-4)


def time_loss(device: torch.device) -> Iterator[Item]:
    slots, width, drafts, chunk = (4096, 4096, 32000, 2048) if device.type == "cuda" else (20, 16, 50, 7)
    inputs = make(device, slots, width, drafts)

    def step() -> None:
        with torch.autocast(device.type, torch.bfloat16):
            loss = fused(*inputs, chunk)
        loss.backward()

    moved = 4 * sum(value.numel() for value in inputs)  # each once, in fp32; compute-bound
    case = f"{slots} x {width} x {drafts}, bf16"
    yield timed("fused LM head and KL", case, device, moved, step, capture=False)


class Unrolled(NamedTuple):
    """Sizes of one step of training-time test: rows for some slots, two documents in each sequence."""

    batch: int
    length: int
    rows: int
    heads: int
    kv_heads: int
    dim: int
    later: int
    dtype: torch.dtype

    def tensors(self, device: torch.device) -> tuple[Tensor, list[Tensor], list[Tensor], Tensor, Tensor]:
        """Return q, keys, values, slots and starts."""
        generator = torch.Generator().manual_seed(0)

        def random(rows: int, heads: int) -> Tensor:
            tensor = torch.randn(self.batch, rows, heads, self.dim, generator=generator)
            return tensor.to(device, self.dtype).requires_grad_()

        q = random(self.rows, self.heads)
        sizes = [self.length, *[self.rows] * self.later]
        keys, values = ([random(size, self.kv_heads) for size in sizes] for _ in range(2))
        slots = torch.randperm(self.length, generator=generator)[: self.rows].sort().values.expand(self.batch, -1)
        starts = torch.zeros(self.batch, self.length, dtype=torch.int64)
        starts[:, self.length // 3 :] = self.length // 3
        return q, keys, values, slots.to(device), starts.to(device)


def both_passes(
    attention: Callable[..., Tensor], q: Tensor, keys: list[Tensor], values: list[Tensor], *indices: Tensor
) -> tuple[Tensor, ...]:
    """Return the output, and the gradients of q, keys and values for an output gradient of ones."""
    out = attention(q, keys, values, *indices)
    return out, *torch.autograd.grad(out, [q, *keys, *values], torch.ones_like(out))


def compare_attention(case: Unrolled, bound: float, device: torch.device) -> Iterator[Item]:
    q, keys, values, *indices = case.tensors(device)
    parts = both_passes(ttt_attention, q, keys, values, *indices)

    @cache
    def true() -> tuple[Tensor, ...]:
        wide = [x.detach().double().cpu().requires_grad_() for x in (q, *keys, *values)]
        count, slots = len(keys), [x.cpu() for x in indices]
        return both_passes(dense, wide[0], wide[1 : count + 1], wide[count + 1 :], *slots)

    names = ["", ", by the queries"] + [
        f", by {kind} of step {n}" for kind in ("keys", "values") for n in range(len(keys))
    ]
    label = f"{case.rows} of {case.length} slots, step {case.later}, head size {case.dim}, {case.dtype}"
    for index, name in enumerate(names):
        yield close("training-time test" + name, label, parts[index], partial(lambda n: true()[n], index), bound)


def time_attention(device: torch.device) -> Iterator[Item]:
    """Time a head of Llama-3.1-8B's sizes in the last of seven steps, and the torch form, which stores all scores."""
    case = Unrolled(1, 40, 30, 4, 2, 16, 2, torch.bfloat16)
    if device.type == "cuda":
        case = Unrolled(1, 4096, 4096, 32, 8, 128, 6, torch.bfloat16)
    inputs = case.tensors(device)
    label = f"{case.rows} rows, step {case.later}, {case.heads} heads, both passes"
    moved = 2 * 2 * sum(x.numel() for x in (inputs[0], *inputs[1], *inputs[2]))  # read; gradient written
    for name, form in (("training-time test", ttt_attention), ("training-time test, torch", dense)):
        yield timed(name, label, device, moved, both_passes, form, *inputs, capture=False)


class Blocks(NamedTuple):
    """Sizes of a layer of a block drafter: blocks of `rows` rows, two documents in each sequence."""

    batch: int
    length: int
    blocks: int
    rows: int
    heads: int
    kv_heads: int
    dim: int
    dtype: torch.dtype
    causal: bool = False
    window: int | None = None

    def __str__(self) -> str:
        mask = f"{'causal' if self.causal else 'whole'} blocks, window {self.window}"
        return f"{self.blocks} x {self.rows} rows over {self.length} slots, head size {self.dim}, {self.dtype}, {mask}"

    def tensors(self, device: torch.device) -> tuple[list[Tensor], Tensor, Tensor]:
        """Return q with keys and values of the context and of the blocks, slots, and starts."""
        generator = torch.Generator().manual_seed(0)

        def random(*shape: int) -> Tensor:
            tensor = torch.randn(self.batch, *shape, self.dim, generator=generator)
            return tensor.to(device, self.dtype).requires_grad_()

        q = random(self.blocks, self.rows, self.heads)
        keys = [random(self.length, self.kv_heads) for _ in range(2)]
        keys += [random(self.blocks, self.rows, self.kv_heads) for _ in range(2)]
        slots = torch.randperm(self.length, generator=generator)[: self.blocks].sort().values.expand(self.batch, -1)
        starts = torch.zeros(self.batch, self.length, dtype=torch.int64)
        starts[:, self.length // 3 :] = self.length // 3
        return [q, *keys], slots.to(device), starts.to(device)

    def both_passes(
        self, attention: Callable[..., Tensor], inputs: list[Tensor], slots: Tensor, starts: Tensor
    ) -> tuple[Tensor, ...]:
        """Return the output, and the gradients of all inputs for an output gradient of ones."""
        q, context_k, context_v, k, v = inputs
        masks = {"causal": self.causal, "window": self.window}
        out = attention(q, (context_k, context_v), (k, v), slots, starts, **masks)
        return out, *torch.autograd.grad(out, inputs, torch.ones_like(out))


def block_cases(device: torch.device) -> Iterator[tuple[Blocks, float]]:
    """Yield cases with the bounds of their errors."""
    small = Blocks(2, 40, 5, 6, 4, 2, 20, torch.float32)
    yield small, 1e-5
    yield small._replace(causal=True, window=9), 1e-5
    if device.type == "cuda":
        large = Blocks(2, 700, 60, 8, 8, 2, 128, torch.bfloat16)
        for dim in (128, 64, 80, 96, 256):
            yield large._replace(dim=dim), 0.02
        yield large._replace(causal=True, window=200), 0.02
        yield large._replace(dtype=torch.float32, heads=6), 1e-4


def compare_blocks(case: Blocks, bound: float, device: torch.device) -> Iterator[Item]:
    inputs, *indices = case.tensors(device)
    parts = case.both_passes(block_attention, inputs, *indices)

    @cache
    def true() -> tuple[Tensor, ...]:
        wide = [x.detach().double().cpu().requires_grad_() for x in inputs]
        return case.both_passes(dense_block_attention, wide, *[x.cpu() for x in indices])

    inputs_of = ("queries", "context's keys", "context's values", "rows' keys", "rows' values")
    for index, name in enumerate(["", *[f", by the {each}" for each in inputs_of]]):
        yield close("block drafter" + name, str(case), parts[index], partial(lambda n: true()[n], index), bound)


def time_blocks(device: torch.device) -> Iterator[Item]:
    """Time a layer of Qwen3-8B's sizes over 512 blocks, and the torch form, which recomputes scores group by group."""
    case = Blocks(1, 40, 5, 6, 4, 2, 16, torch.bfloat16)
    if device.type == "cuda":
        case = Blocks(1, 4096, 512, 16, 32, 8, 128, torch.bfloat16)
    inputs = case.tensors(device)
    label = f"{case}, both passes"
    moved = 2 * 2 * sum(x.numel() for x in inputs[0])  # read; gradient written
    for name, form in (("block drafter", block_attention), ("block drafter, torch", dense_block_attention)):
        yield timed(name, label, device, moved, case.both_passes, form, *inputs, capture=False)
