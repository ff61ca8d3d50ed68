"""Attention of block drafters in training, in C, torch and Triton's interpreter, against a dense float64 form.

The dense form is written row by row from the rules.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from infer.processes.threads import cpu_threads
from kernels.block_attention import block_attention
from kernels.triton.range_attention import RangesAttention
from models.targets.llama import LlamaTarget
from tests.heads import make_head, make_objective
from tests.kernels.comparing import FORMS, choose_form
from tests.pairwise import parametrize_pairs
from train.data.sequences import Sequences
from train.features.online import compute_features
from train.features.teacher import teach

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Sizes(NamedTuple):
    batch: int = 2
    length: int = 19
    blocks: int = 7
    rows: int = 4
    heads: int = 6
    kv_heads: int = 2
    dim: int = 16

    def inputs(self, dtype: torch.dtype, generator: torch.Generator) -> list[Tensor]:
        """Return random queries, keys and values of the context, and of the blocks' rows."""
        context = (self.batch, self.length, self.kv_heads, self.dim)
        block = (self.batch, self.blocks, self.rows, self.kv_heads, self.dim)
        shapes = ((self.batch, self.blocks, self.rows, self.heads, self.dim), context, context, block, block)
        return [torch.randn(shape, generator=generator).to(DEVICE, dtype).requires_grad_() for shape in shapes]

    def starts(self) -> Tensor:
        """Return the starts of two documents in the first sequence and of one in each other."""
        starts = torch.zeros(self.batch, self.length, dtype=torch.int64, device=DEVICE)
        starts[0, self.length // 2 :] = self.length // 2
        return starts


def dense(inputs: list[Tensor], slots: Tensor, starts: Tensor | None, causal: bool, window: int | None) -> Tensor:
    q, context_k, context_v, block_k, block_v = (x.double() for x in inputs)
    out = []
    for b, m, n, head in torch.cartesian_prod(*(torch.arange(size) for size in q.shape[:4])).tolist():
        slot, kv = int(slots[b, m]), head // (q.shape[3] // context_k.shape[2])
        begin, end = 0 if starts is None else int(starts[b, slot]), n + 1 if causal else q.shape[2]
        keys, values = (
            torch.cat([context[b, begin : slot + 1, kv], block[b, m, :end, kv]])[-(window or 10**6) :]
            for context, block in ((context_k, block_k), (context_v, block_v))
        )
        out.append((keys @ q[b, m, n, head] * q.shape[4] ** -0.5).softmax(0) @ values)
    return torch.stack(out).view(q.shape)


def compare(sizes: Sizes, causal: bool, window: int | None, packed: bool, dtype: torch.dtype, bound: float) -> None:
    """Compare outputs and gradients with the dense form's; `bound` is relative to its largest value, one at least."""
    generator = torch.Generator().manual_seed(1)
    inputs = sizes.inputs(dtype, generator)
    slots = torch.stack([torch.randperm(sizes.length, generator=generator)[: sizes.blocks] for _ in range(sizes.batch)])
    slots, starts = slots.to(DEVICE), sizes.starts() if packed else None
    expected = dense(inputs, slots, starts, causal, window)
    actual = block_attention(
        inputs[0], (inputs[1], inputs[2]), (inputs[3], inputs[4]), slots, starts, causal=causal, window=window
    )
    assert actual.dtype == dtype
    upstream = torch.randn(expected.shape, generator=generator).to(DEVICE, dtype)
    outputs = [actual, *torch.autograd.grad(actual, inputs, upstream)]
    references = [expected, *torch.autograd.grad(expected, inputs, upstream.double())]
    for output, reference in zip(outputs, references, strict=True):
        error = (output.double() - reference.double()).abs().max() / reference.abs().max().clamp(min=1)
        assert error < bound


@pytest.fixture(params=FORMS)
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    choose_form(monkeypatch, request.param)
    return request.param


@parametrize_pairs({"causal": [False, True], "window": [None, 3, 6], "packed": [False, True]})
def test_rows_see_their_context_and_their_block(form: str, causal: bool, window: int | None, packed: bool) -> None:
    compare(Sizes(), causal, window, packed, torch.float32, 4e-6)


@pytest.mark.parametrize("causal", [False, True])
def test_blocks_that_lie_across_tiles(form: str, causal: bool) -> None:
    """Three tiles of context keys, and of rows of blocks of which none ends where a tile does."""
    compare(Sizes(1, 80, 14, 5, 2, 1), causal, 40, True, torch.float32, 4e-6)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float16, 3e-3), (torch.bfloat16, 2e-2)])
def test_narrow_dtypes(form: str, dtype: torch.dtype, bound: float) -> None:
    compare(Sizes(1, 140, 18, 8, 2, 1), False, None, True, dtype, bound)


def test_the_number_of_threads_changes_no_bit() -> None:
    generator, sizes = torch.Generator().manual_seed(2), Sizes()
    q, context_k, context_v, k, v = inputs = sizes.inputs(torch.bfloat16, generator)
    slots = torch.randint(sizes.length, (sizes.batch, sizes.blocks), generator=generator).to(DEVICE)
    results = []
    for count in (1, 3):
        with cpu_threads(count):
            out = block_attention(q, (context_k, context_v), (k, v), slots, sizes.starts())
            results.append([out, *torch.autograd.grad(out.float().square().sum(), inputs)])
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("options", [{}, {"causal": True, "window": 5}], ids=["whole blocks", "causal, window"])
@pytest.mark.parametrize("packed", [False, True])
def test_an_objective_learns_the_same(
    monkeypatch: pytest.MonkeyPatch, tiny_target: LlamaTarget, options: dict[str, Any], packed: bool
) -> None:
    masks = [[True] * 9, [False] * 4 + [True] * 8, [False] * 2 + [True] * 9]
    documents = Sequences.of([(list(range(7, 7 + len(mask))), mask) for mask in masks])
    batch = documents.packed([[2, 0], [1]]) if packed else documents.batch(range(3))
    objective = make_objective(make_head(tiny_target, "dflash", **options), "dflash", steps=5)
    features = compute_features(tiny_target, batch, objective.head.config.aux_layers)
    teacher = teach(tiny_target, features.hidden, batch, objective.head.target_ids)
    launched, losses, gradients = [], [], []
    original = RangesAttention.forward
    monkeypatch.setattr(RangesAttention, "forward", lambda ctx, *args: launched.append(1) or original(ctx, *args))
    for form in FORMS:
        choose_form(monkeypatch, form)
        generator = torch.Generator().manual_seed(0)
        loss, _ = objective(batch, features, teacher, objective.denominators(batch), generator=generator)
        objective.zero_grad()
        loss.backward()
        losses.append(loss.detach())
        gradients.append(torch.cat([p.grad.flatten() for p in objective.parameters() if p.grad is not None]))
    for loss, gradient in zip(losses[1:], gradients[1:], strict=True):
        torch.testing.assert_close(loss, losses[0], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(gradient, gradients[0], rtol=1e-4, atol=1e-6)
    assert len(launched) == 2  # one per layer


def test_autocast_decides_the_dtype(form: str) -> None:
    q, *keys = Sizes().inputs(torch.float32, torch.Generator().manual_seed(0))
    slots = torch.arange(7, device=DEVICE).expand(2, -1)
    with torch.autocast(DEVICE.type, torch.bfloat16):
        out = block_attention(q, (keys[0], keys[1].bfloat16()), (keys[2], keys[3]), slots)
    assert out.dtype == torch.bfloat16
    assert (out - dense([q, *keys], slots, None, False, None)).abs().max() < 0.05
