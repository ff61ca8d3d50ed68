"""Attention of training-time test, in C, torch and Triton's interpreter: outputs and gradients of the oracle."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from kernels.triton.range_attention import RangesAttention
from kernels.ttt_attention import ttt_attention
from models.attention import TrainingTimeTestAttention
from tests.heads import OBJECTIVE_OF, make_head, make_objective
from tests.kernels.comparing import FORMS, choose_form
from tests.kernels.reference.ttt_attention import ttt_attention as oracle
from train.data.sequences import Sequences
from train.features.online import compute_features
from train.features.teacher import teach

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def output_and_gradients(attention: Any, q: Any, keys: Any, values: Any, *rows: Any) -> list[torch.Tensor]:
    """Return the output, and the gradients of all inputs for a random gradient of the output."""
    out = attention(q, keys, values, *rows)
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
    return [out.detach(), *torch.autograd.grad(out, [q, *keys, *values], upstream)]


def compare(
    batch: int, length: int, rows: int | None, heads: tuple[int, int], dim: int, later_steps: int, *, seed: int = 0,
    packed: bool = True, window: int | None = None, dtype: torch.dtype = torch.float32, bound: float = 4e-6,
) -> None:  # fmt: skip
    """Compare with the oracle. `rows` None: every slot has a row, and `slots` is not passed."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(DEVICE, dtype).requires_grad_()

    positions = torch.arange(length, device=DEVICE).expand(batch, -1)
    slots = torch.stack([torch.randperm(length, generator=generator)[:rows] for _ in range(batch)]).to(DEVICE)
    begins = torch.rand(batch, length, generator=generator).to(DEVICE) < 0.1
    starts = torch.where(begins, positions, 0).cummax(1).values if packed else torch.zeros_like(positions)
    wide = random(batch, length, 2 * heads[1] + 1, dim)  # keys and values may be views of the projections
    q = random(batch, slots.shape[1], heads[0], dim)
    keys, values = ([random(batch, slots.shape[1], heads[1], dim) for _ in range(later_steps)] for _ in range(2))
    keys, values = [wide[:, :, 1 : heads[1] + 1], *keys], [wide[:, :, heads[1] + 1 :], *values]
    expected = output_and_gradients(oracle, q, keys, values, positions if rows is None else slots, starts, window)
    given_rows = None if rows is None else slots, starts if packed else None, window
    actual = output_and_gradients(ttt_attention, q, keys, values, *given_rows)
    assert actual[0].dtype == dtype
    for output, reference in zip(actual, expected, strict=True):
        error = (output.double() - reference.double()).abs().max() / reference.abs().max().clamp(min=1)
        assert error < bound


@pytest.fixture(params=FORMS)
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    choose_form(monkeypatch, request.param)
    return request.param


SHAPES = st.tuples(
    st.integers(1, 2), st.integers(1, 70), st.none() | st.integers(1, 70),
    st.sampled_from([(2, 2), (4, 2), (3, 1)]), st.sampled_from([16, 20]), st.integers(0, 3),
)  # fmt: skip


@pytest.mark.parametrize("form_", FORMS)
@settings(max_examples=12, deadline=None)
@given(SHAPES, st.booleans(), st.none() | st.integers(1, 40), st.integers(0, 99))
def test_any_shape(form_: str, shape: Any, packed: bool, window: int | None, seed: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        choose_form(patch, form_)
        compare(*shape, packed=packed, window=window, seed=seed)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float16, 3e-3), (torch.bfloat16, 2e-2)])
def test_narrow_dtypes(form: str, dtype: torch.dtype, bound: float) -> None:
    """With more than one tile of keys and more than one block of rows."""
    compare(1, 140, 135, (2, 1), 16, 2, dtype=dtype, bound=bound)


def test_autocast_decides_the_dtype(form: str) -> None:
    q, k, v = (torch.randn(1, 8, 2, 16, device=DEVICE) for _ in range(3))
    with torch.autocast(DEVICE.type, torch.bfloat16):
        out = ttt_attention(q, [k, k], [v, v.bfloat16()])
    assert (out - oracle(q, [k, k], [v, v], torch.arange(8)[None], torch.zeros(1, 8).long())).abs().max() < 0.03
    assert out.dtype == torch.bfloat16


@pytest.mark.parametrize("name", ["eagle3", "eagle3, window", "p-eagle, one layer", "p-eagle, window"])
@pytest.mark.parametrize("packed", [False, True])
def test_an_objective_learns_the_same(monkeypatch: Any, tiny_target: Any, name: str, packed: bool) -> None:
    """Loss and gradients of a head's whole unrolling, without prompts; in P-EAGLE with fewer slots at each depth."""
    masks = [[True] * 9, [False] * 4 + [True] * 8, [False] * 2 + [True] * 9]
    documents = Sequences.of([(list(range(7, 7 + len(mask))), mask) for mask in masks])
    batch = documents.packed([[2, 0], [1]]) if packed else documents.batch(range(3))
    windowed, depths = "window" in name, {"num_depths": 3, "num_layers": 1} if "p-eagle" in name else {}
    head = make_head(tiny_target, name, **({"window": 5} if windowed else {}), **depths)
    objective = make_objective(head, OBJECTIVE_OF[head.config.name], steps=3)
    features = compute_features(tiny_target, batch, head.config.aux_layers)
    teacher = teach(tiny_target, features.hidden, batch, head.target_ids)
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
    # step 0 with one document per row, of which all is seen, is plain causal attention
    assert len(launched) == (3 if packed or windowed or "eagle3" in name else 2)


@pytest.mark.parametrize("kernel", ["native", "triton"])
def test_keys_are_cast_once(monkeypatch: pytest.MonkeyPatch, kernel: str) -> None:
    """Under autocast rotated keys are fp32, and every step of the unrolling reads those of all steps before it."""
    choose_form(monkeypatch, kernel)
    attention, generator = TrainingTimeTestAttention(), torch.Generator().manual_seed(0)
    with CountedCasts() as casts, torch.autocast(DEVICE.type, torch.bfloat16):
        for step in range(4):
            attention.begin_step(step)
            q, k = (torch.randn(1, 8, heads, 16, generator=generator).to(DEVICE) for heads in (4, 2))
            attention(0, q, k, torch.zeros_like(k, dtype=torch.bfloat16))
    assert casts.shapes.count((1, 8, 2, 16)) == 4


class CountedCasts(TorchDispatchMode):
    """Collects the shapes of what is cast from fp32 to bf16."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and (args[0].dtype, out.dtype) == (torch.float32, torch.bfloat16):
            self.shapes.append(tuple(out.shape))
        return out
