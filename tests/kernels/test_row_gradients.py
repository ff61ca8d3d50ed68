"""Norm, gated activation and rotary embedding in training in C: outputs and gradients of torch in float64."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import elementwise, row_gradients
from kernels.cpu.library import library

pytestmark = pytest.mark.skipif(library() is None, reason="no C compiler on this machine")
BOUNDS = {torch.float32: 2e-6, torch.bfloat16: 1e-2}
Operation = Callable[..., Tensor]


def norm(centered: bool, x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, weight.shape, weight + centered, 1e-5)


def gate(activation: Operation, x: Tensor) -> Tensor:
    left, right = x.chunk(2, dim=-1)
    return activation(left) * right


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], -1) * sin


GELU = partial(F.gelu, approximate="tanh")
TABLES = (2, 75, 1, 64), (75, 1, 64)  # of every row; of every slot, for all sequences
CASES: dict[str, tuple[Operation, Operation, tuple[tuple[int, ...], ...]]] = {
    "norm": (partial(elementwise.rms_norm, eps=1e-5), partial(norm, False), ((2, 75, 144), (144,))),
    "centered norm": (partial(elementwise.rms_norm, eps=1e-5, centered=True), partial(norm, True), ((3, 64), (64,))),
    "silu": (elementwise.silu_mul, partial(gate, F.silu), ((2, 75, 2 * 48),)),
    "gelu": (elementwise.gelu_mul, partial(gate, GELU), ((150, 2 * 48),)),
    "rotate": (elementwise.rotate, rotate, ((2, 75, 5, 64), *TABLES[:1] * 2)),
    "rotate, one table": (elementwise.rotate, rotate, ((2, 75, 5, 64), *TABLES[1:] * 2)),
}


def output_and_gradients(operation: Operation, inputs: list[Tensor]) -> list[Tensor]:
    """Return the output and the gradients, of all inputs but tables, for a fixed gradient of the output."""
    trained = [x for x in inputs if x.requires_grad]
    out = operation(*inputs)
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
    return [out.detach(), *torch.autograd.grad(out, trained, upstream)]


def make(name: str, dtype: torch.dtype) -> list[Tensor]:
    """Return random inputs; x is a part of a wider tensor, and all others are in fp32."""
    generator, (shape, *others) = torch.Generator().manual_seed(0), CASES[name][2]
    wide = torch.randn(*shape[:-2], shape[-2] + 2, shape[-1], generator=generator).to(dtype)
    rest = [torch.randn(other, generator=generator).requires_grad_(len(other) == 1) for other in others]
    return [wide[..., 1:-1, :].requires_grad_(), *rest]


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("name", CASES)
def test_outputs_and_gradients_are_those_of_torch(
    monkeypatch: pytest.MonkeyPatch, name: str, dtype: torch.dtype
) -> None:
    operation, reference, _ = CASES[name]
    inputs, called = make(name, dtype), []
    call = row_gradients.call
    monkeypatch.setattr(row_gradients, "call", lambda *given, **named: called.append(1) or call(*given, **named))
    actual = output_and_gradients(operation, inputs)
    wide = [x.detach().double().requires_grad_(x.requires_grad) for x in inputs]
    for mine, true in zip(actual, output_and_gradients(reference, wide), strict=True):
        assert (mine.double() - true).abs().max() < BOUNDS[dtype] * true.abs().max().clamp(min=1)
    assert len(called) == 2
    assert [x.dtype for x in actual[:2]] == [dtype, dtype]


@pytest.mark.parametrize("name", CASES)
def test_threads_change_no_bit(name: str) -> None:
    inputs, results, count = make(name, torch.float32), [], torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(output_and_gradients(CASES[name][0], inputs))
    finally:
        torch.set_num_threads(count)
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))


def test_under_autocast_a_norm_rounds_its_output_alone() -> None:
    x, weight = make("norm", torch.float32)
    exact = output_and_gradients(CASES["norm"][0], [x, weight])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rounded = output_and_gradients(CASES["norm"][0], [x, weight])
        stays = elementwise.rms_norm(x, weight, 1e-5, out_dtype=x.dtype)
    assert torch.equal(rounded[0], exact[0].bfloat16())
    assert torch.equal(stays, exact[0])
    assert [gradient.dtype for gradient in rounded[1:]] == [torch.float32] * 2
    for mine, true in zip(rounded[1:], exact[1:], strict=True):  # the output's gradient was rounded
        assert (mine - true).abs().max() < 1e-2 * true.abs().max()


@pytest.mark.parametrize("name", CASES)
def test_a_gradient_may_be_one_number_for_all(name: str) -> None:
    """As that of a sum is, whose strides are 0."""
    inputs = make(name, torch.float32)
    wide = [x.detach().double().requires_grad_(x.requires_grad) for x in inputs]
    CASES[name][0](*inputs).sum().backward()
    CASES[name][1](*wide).sum().backward()
    assert (inputs[0].grad - wide[0].grad).abs().max() < 1e-5


@pytest.mark.parametrize("shape", [(3, 24), (0, 64)])
def test_other_sizes_have_gradients_too(shape: tuple[int, int]) -> None:
    x, weight = torch.randn(shape, requires_grad=True), torch.randn(shape[1], requires_grad=True)
    actual = output_and_gradients(partial(elementwise.rms_norm, eps=1e-5), [x, weight])
    for mine, true in zip(actual, output_and_gradients(partial(norm, False), [x, weight]), strict=True):
        assert torch.allclose(mine, true, atol=1e-5)
