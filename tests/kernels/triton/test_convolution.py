"""Convolution along the rows of a block in Triton."""

from __future__ import annotations

import pytest
import torch

from kernels.convolution import INPUT, OUTPUT, two_taps
from tests.kernels.test_convolution import ROWS, operands


@pytest.mark.parametrize("group", [16, 8])
@pytest.mark.parametrize("side", [INPUT, OUTPUT])
def test_it_computes_what_torch_does(in_triton, side, group):
    z, base, deltas = operands(torch.float32, group)
    with torch.no_grad():
        computed = two_taps(z, base, deltas, side, ROWS)
    expected = two_taps(z, base, deltas, side, ROWS)  # by torch, since gradients may be needed
    torch.testing.assert_close(computed, expected, atol=1e-6, rtol=1e-6)
