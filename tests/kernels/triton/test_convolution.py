"""Convolution along the rows of a block in Triton."""

from __future__ import annotations

import pytest
import torch

from kernels.convolution import INPUT, OUTPUT, two_taps
from tests.device import BF16, DEVICE, FP32, sized

BOUND = {FP32: 1e-5, BF16: 1e-2}


def taps_case(hidden, rows, blocks, group, dtype):
    generator = torch.Generator().manual_seed(0)
    shapes = (blocks * rows, hidden), (2, 2, hidden), (blocks * rows, 4 * hidden // group)
    return [torch.randn(*shape, generator=generator).to(dtype).to(DEVICE) for shape in shapes]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", sized([FP32], [BF16, FP32]))
@pytest.mark.parametrize("group", [16, 8])
@pytest.mark.parametrize("side", [INPUT, OUTPUT])
@torch.no_grad()
def test_it_is_its_formula(in_triton, compare, side, group, dtype):
    hidden, rows, blocks = sized((96, 5, 2), (4096, 8, 5))
    z, base, deltas = taps_case(hidden, rows, blocks, group, dtype)
    wide = z.double().view(blocks, rows, hidden)
    kernels = base[side].double() + deltas.double().unflatten(1, (2, 2, -1))[:, side].repeat_interleave(group, -1)
    kernels = kernels.view(blocks, rows, 2, hidden)
    before = torch.cat([torch.zeros_like(wide[:, :1]), wide[:, :-1]], dim=1)
    true = (kernels[:, :, 0] * wide + kernels[:, :, 1] * before).view(z.shape)
    case = f"{blocks} blocks of {rows}, {hidden} channels in groups of {group}, side {side}, {dtype}"
    compare.close("two taps", case, two_taps(z, base, deltas, side, rows), true, BOUND[dtype])
