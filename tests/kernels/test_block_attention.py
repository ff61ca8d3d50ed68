"""Attention of block drafters in training against a dense float64 form, written row by row from its rules."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels import block_attention as module
from kernels.block_attention import block_attention

B, T, M, N, HEADS, KV_HEADS, D = 2, 19, 7, 4, 6, 2, 8
STARTS = torch.tensor([[0] * 8 + [8] * 11, [0] * 19])
CASES = [(causal, window, packed) for causal in (False, True) for window in (None, 3, 6) for packed in (False, True)]


def dense(
    q: Tensor, context: tuple[Tensor, Tensor], block: tuple[Tensor, Tensor], slots: Tensor, starts: Tensor | None,
    causal: bool, window: int | None,
) -> Tensor:  # fmt: skip
    out = torch.zeros_like(q)
    for b in range(B):
        for m in range(M):
            slot = int(slots[b, m])
            begin = 0 if starts is None else int(starts[b, slot])
            for n in range(N):
                rows = range(n + 1 if causal else N)
                for head in range(HEADS):
                    kv = head // (HEADS // KV_HEADS)
                    keys, values = (
                        torch.stack([*x[b, begin : slot + 1, kv], *(rows_of_block[b, m, row, kv] for row in rows)])[
                            -(window or 10**6) :
                        ]
                        for x, rows_of_block in zip(context, block, strict=True)
                    )
                    weights = (keys @ q[b, m, n, head] * D**-0.5).softmax(0)
                    out[b, m, n, head] = weights @ values
    return out


@pytest.mark.parametrize(("causal", "window", "packed"), CASES)
def test_rows_see_their_context_and_their_block(causal: bool, window: int | None, packed: bool) -> None:
    generator = torch.Generator().manual_seed(1)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator).requires_grad_()

    q, context = random(B, M, N, HEADS, D), (random(B, T, KV_HEADS, D), random(B, T, KV_HEADS, D))
    block = random(B, M, N, KV_HEADS, D), random(B, M, N, KV_HEADS, D)
    slots = torch.stack([torch.randperm(T, generator=generator)[:M] for _ in range(B)])
    starts = STARTS if packed else None
    expected = dense(q, context, block, slots, starts, causal, window)
    actual = block_attention(q, context, block, slots, starts, causal=causal, window=window)
    assert torch.allclose(actual, expected, atol=1e-6)  # scores and weights are fp32

    inputs = (q, *context, *block)
    weight = torch.randn(expected.shape, dtype=torch.float64, generator=generator)
    gradients = torch.autograd.grad((actual * weight).sum(), inputs)
    for gradient, wanted in zip(gradients, torch.autograd.grad((expected * weight).sum(), inputs), strict=True):
        assert torch.allclose(gradient, wanted, atol=1e-5)


def test_groups_of_blocks_give_what_all_at_once_give(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(2)
    shapes = (B, M, N, HEADS, D), *((B, T, KV_HEADS, D),) * 2, *((B, M, N, KV_HEADS, D),) * 2
    inputs = [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]
    slots = torch.randint(T, (B, M), generator=generator)

    def run() -> list[Tensor]:
        q, context_k, context_v, k, v = inputs
        out = block_attention(q, (context_k, context_v), (k, v), slots, STARTS)
        return [out, *torch.autograd.grad(out.square().sum(), inputs)]

    at_once = run()
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", 2 * B * HEADS * N * (T + N))
    for one, other in zip(at_once, run(), strict=True):
        assert torch.allclose(one, other, atol=1e-5)
