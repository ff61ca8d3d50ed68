"""Kernels of training: values and gradients against the dense form in float64.

They are the fused LM head and KL, which processes a chunk of slots at a time, and the attention of training-time test
and of block drafters.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kernels import block_attention as blocks
from kernels import ttt_attention as unrolled
from kernels.block_attention import block_attention
from kernels.range_attention import dense_ranges
from kernels.ttt_attention import ttt_attention
from tests.device import BF16, DEVICE, FP32, sized
from train.objectives.losses import SharedGradients, SoftCrossEntropy, chunked_sums

SLOTS, WIDTH, DRAFTS, CHUNK = sized((20, 16, 50, 7), (700, 512, 4000, 256))
DIMS = (128, 64, 80, 96, 256)


def loss_case(slots: int, width: int, drafts: int) -> tuple[Tensor, nn.Parameter, Tensor, Tensor]:
    """Return the head's states and the target's hidden states `[slots, width]`, and both LM heads `[drafts, width]`.

    The order is states, the head's LM head, hidden states, the target's LM head.
    """
    generator = torch.Generator().manual_seed(0)
    x, weight, hidden, target_weight = (
        torch.randn(rows, width, generator=generator).to(DEVICE) / width**0.25
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


@pytest.mark.gpu(seconds=3)
def test_fused_lm_head_and_kl(compare):
    inputs = loss_case(SLOTS, WIDTH, DRAFTS)
    loss = fused(*inputs, CHUNK)
    loss.backward()
    wide_x, wide, wide_hidden, wide_target = (value.detach().double().cpu() for value in inputs)
    wide_x.requires_grad_()
    wide.requires_grad_()
    true = F.cross_entropy(wide_x @ wide.T, (wide_hidden @ wide_target.T).softmax(-1), reduction="sum")
    true.backward()
    values = {
        "": (loss, true),
        ", by the states": (inputs[0].grad, wide_x.grad),
        ", by the weight": (inputs[1].grad, wide.grad),
    }
    for name, (actual, expected) in values.items():
        # A GPU computes fp32 matrix products in TF32 only if the user enables that; here it is off.
        compare.close(f"fused LM head and KL{name}", f"{SLOTS} x {WIDTH} x {DRAFTS}", actual, expected, 1e-4)


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

    def tensors(self) -> tuple[Tensor, list[Tensor], list[Tensor], Tensor, Tensor]:
        """Return q, keys, values, slots and starts."""
        generator = torch.Generator().manual_seed(0)

        def random(rows: int, heads: int) -> Tensor:
            tensor = torch.randn(self.batch, rows, heads, self.dim, generator=generator)
            return tensor.to(DEVICE, self.dtype).requires_grad_()

        q = random(self.rows, self.heads)
        sizes = [self.length, *[self.rows] * self.later]
        keys, values = ([random(size, self.kv_heads) for size in sizes] for _ in range(2))
        slots = torch.randperm(self.length, generator=generator)[: self.rows].sort().values.expand(self.batch, -1)
        starts = torch.zeros(self.batch, self.length, dtype=torch.int64)
        starts[:, self.length // 3 :] = self.length // 3
        return q, keys, values, slots.to(DEVICE), starts.to(DEVICE)


def dense(q: Tensor, *arguments: Any) -> Tensor:
    """As `ttt_attention`, in torch."""
    return dense_ranges(*unrolled.in_ranges(q, *arguments))


def dense_block_attention(q: Tensor, *arguments: Any, **options: Any) -> Tensor:
    """As `block_attention`, in torch."""
    return dense_ranges(*blocks.in_ranges(q, *arguments, **options)).view(q.shape)


def both_passes(
    attention: Callable[..., Tensor], q: Tensor, keys: list[Tensor], values: list[Tensor], *indices: Tensor
) -> tuple[Tensor, ...]:
    """Return the output, and the gradients of q, keys and values for an output gradient of ones."""
    out = attention(q, keys, values, *indices)
    return out, *torch.autograd.grad(out, [q, *keys, *values], torch.ones_like(out))


UNROLLED = sized(Unrolled(2, 40, 30, 4, 2, 20, 2, FP32), Unrolled(2, 700, 500, 8, 2, 128, 3, BF16))
UNROLLINGS = sized(
    [(UNROLLED, FP32, 1e-5), *((Unrolled(1, 40, 35, 2, 1, dim, 2, FP32), FP32, 1e-5) for dim in DIMS)],
    [
        *((UNROLLED._replace(dim=dim), BF16, 0.02) for dim in DIMS),
        (UNROLLED._replace(dtype=FP32, heads=6), FP32, 1e-4),
    ],
)


@pytest.mark.gpu(seconds=4)
@pytest.mark.parametrize(("sizes", "dtype", "bound"), UNROLLINGS)
def test_training_time_test(in_triton, compare, sizes, dtype, bound):
    q, keys, values, *indices = sizes.tensors()
    parts = both_passes(ttt_attention, q, keys, values, *indices)
    count = len(keys)

    @cache
    def true() -> tuple[Tensor, ...]:
        wide = [x.detach().double().cpu().requires_grad_() for x in (q, *keys, *values)]
        return both_passes(dense, wide[0], wide[1 : count + 1], wide[count + 1 :], *[x.cpu() for x in indices])

    names = ["", ", by the queries", *(f", by {of} of step {n}" for of in ("keys", "values") for n in range(count))]
    label = f"{sizes.rows} of {sizes.length} slots, step {sizes.later}, head size {sizes.dim}, {dtype}"
    for index, (name, actual) in enumerate(zip(names, parts, strict=True)):
        compare.close("training-time test" + name, label, actual, lambda index=index: true()[index], bound)


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

    def tensors(self) -> tuple[list[Tensor], Tensor, Tensor]:
        """Return q with keys and values of the context and of the blocks, slots, and starts."""
        generator = torch.Generator().manual_seed(0)

        def random(*shape: int) -> Tensor:
            tensor = torch.randn(self.batch, *shape, self.dim, generator=generator)
            return tensor.to(DEVICE, self.dtype).requires_grad_()

        q = random(self.blocks, self.rows, self.heads)
        keys = [random(self.length, self.kv_heads) for _ in range(2)]
        keys += [random(self.blocks, self.rows, self.kv_heads) for _ in range(2)]
        slots = torch.randperm(self.length, generator=generator)[: self.blocks].sort().values.expand(self.batch, -1)
        starts = torch.zeros(self.batch, self.length, dtype=torch.int64)
        starts[:, self.length // 3 :] = self.length // 3
        return [q, *keys], slots.to(DEVICE), starts.to(DEVICE)

    def both_passes(
        self, attention: Callable[..., Tensor], inputs: list[Tensor], slots: Tensor, starts: Tensor
    ) -> tuple[Tensor, ...]:
        """Return the output, and the gradients of all inputs for an output gradient of ones."""
        q, context_k, context_v, k, v = inputs
        masks = {"causal": self.causal, "window": self.window}
        out = attention(q, (context_k, context_v), (k, v), slots, starts, **masks)
        return out, *torch.autograd.grad(out, inputs, torch.ones_like(out))


BLOCKS = sized(Blocks(2, 40, 5, 6, 4, 2, 20, FP32), Blocks(2, 700, 60, 8, 8, 2, 128, BF16))
LAYERS = sized(
    [
        (BLOCKS, FP32, 1e-5),
        (BLOCKS._replace(causal=True, window=9), FP32, 1e-5),
        *((Blocks(1, 40, 6, 6, 2, 1, dim, FP32), FP32, 1e-5) for dim in DIMS),
    ],
    [
        *((BLOCKS._replace(dim=dim), BF16, 0.02) for dim in DIMS),
        (BLOCKS._replace(causal=True, window=200), BF16, 0.02),
        (BLOCKS._replace(dtype=FP32, heads=6), FP32, 1e-4),
    ],
)


@pytest.mark.gpu(seconds=4)
@pytest.mark.parametrize(("sizes", "dtype", "bound"), LAYERS)
def test_block_drafters(in_triton, compare, sizes, dtype, bound):
    inputs, *indices = sizes.tensors()
    parts = sizes.both_passes(block_attention, inputs, *indices)

    @cache
    def true() -> tuple[Tensor, ...]:
        wide = [x.detach().double().cpu().requires_grad_() for x in inputs]
        return sizes.both_passes(dense_block_attention, wide, *[x.cpu() for x in indices])

    inputs_of = ("queries", "context's keys", "context's values", "rows' keys", "rows' values")
    names = ["", *(f", by the {each}" for each in inputs_of)]
    for index, (name, actual) in enumerate(zip(names, parts, strict=True)):
        compare.close("block drafter" + name, str(sizes), actual, lambda index=index: true()[index], bound)
