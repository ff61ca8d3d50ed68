"""Convolution along the rows of a block: its formula, the borders of blocks, and the fused decoder's form of it."""

from __future__ import annotations

import pytest
import torch

from kernels.convolution import INPUT, OUTPUT, two_taps
from kernels.cpu.library import library
from kernels.dispatch import KINDS

HIDDEN, ROWS, BLOCKS = 96, 5, 3


def written_out(z: torch.Tensor, base: torch.Tensor, deltas: torch.Tensor, side: int) -> torch.Tensor:
    out = torch.zeros(z.shape, dtype=torch.float64)
    group = 4 * HIDDEN // deltas.shape[1]
    for row in range(len(z)):
        for channel in range(HIDDEN):
            for tap in (0, 1):
                if row % ROWS < tap:
                    continue
                kernel = float(base[side, tap, channel]) + float(
                    deltas.unflatten(1, (2, 2, -1))[row, side, tap, channel // group]
                )
                out[row, channel] += kernel * float(z[row - tap, channel])
    return out


def operands(dtype: torch.dtype, group: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = (BLOCKS * ROWS, HIDDEN), (2, 2, HIDDEN), (BLOCKS * ROWS, 4 * HIDDEN // group)
    z, base, deltas = (torch.randn(*shape, generator=generator).to(dtype) for shape in shapes)
    return z, base, deltas


@pytest.mark.parametrize("group", [16, 32, 8, 1])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2**-8)])
@pytest.mark.parametrize("side", [INPUT, OUTPUT])
def test_it_is_its_formula_in_torch_and_in_c(side, dtype, tolerance, group):
    z, base, deltas = operands(dtype, group)
    expected = written_out(z, base, deltas, side)
    out = two_taps(z, base, deltas, side, ROWS)
    assert out.dtype is dtype
    torch.testing.assert_close(out.double(), expected, atol=tolerance, rtol=tolerance)
    native = library()
    assert native is not None
    in_c = torch.empty_like(z)
    for first, end in ((0, 4), (4, len(z))):  # as two threads do it
        native.two_taps(
            z.data_ptr(), base.data_ptr(), deltas.data_ptr(), in_c.data_ptr(),
            first, end, ROWS, HIDDEN, group, side, 0, KINDS[dtype],
        )  # fmt: skip
    torch.testing.assert_close(in_c.double(), expected, atol=tolerance, rtol=tolerance)


def test_it_has_gradients():
    operand = [value.double().requires_grad_() for value in operands(torch.float32, 16)]
    z, base, deltas = operand
    two_taps(z, base, deltas, INPUT, ROWS).sum().backward()
    assert all(value.grad is not None and value.grad.any() for value in operand)
