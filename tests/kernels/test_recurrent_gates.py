"""Gates of hybrids' layers: close to float64, and of their row alone."""

from __future__ import annotations

import pytest
import torch

from kernels import recurrent_gates

BF16, FP32 = torch.bfloat16, torch.float32
BOUND = {FP32: 1e-5, BF16: 2**-8}


@pytest.mark.parametrize("in_c", [True, False])
@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize(("heads", "size"), [(1, 16), (6, 48), (33, 128)])
def test_gates_and_norm_of_delta_nets_match_float64_and_depend_on_their_row_alone(
    heads, size, dtype, in_c, monkeypatch
):
    if not in_c:
        monkeypatch.setattr(recurrent_gates, "native_for", lambda *sizes: None)
    torch.manual_seed(heads)
    ba, A_log, dt_bias = 30 * torch.randn(9, 2 * heads), 3 * torch.randn(heads), torch.randn(heads)
    ba[0], ba[1] = torch.linspace(-1e-3, 1e-3, 2 * heads), torch.linspace(-120, 120, 2 * heads)
    with torch.no_grad():
        gates = recurrent_gates.delta_gates(ba, A_log, dt_bias)
        b, a = ba.double().chunk(2, dim=-1)
        decay = torch.exp(-A_log.double().exp() * torch.nn.functional.softplus(a + dt_bias, threshold=50))
        for actual, expected in zip(gates, (decay, torch.sigmoid(b)), strict=True):
            torch.testing.assert_close(actual.double(), expected, rtol=3e-5, atol=1e-30)
        x, z, weight = torch.randn(9, heads, size), torch.randn(9, heads, size).to(dtype), torch.randn(size).to(dtype)
        out, wide = recurrent_gates.gated_norm(x, z, weight, 1e-5), x.to(dtype).double()
        normed = wide * (wide.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight.double()
        expected = normed * z.double() * torch.sigmoid(z.double())
        torch.testing.assert_close(out.double(), expected, rtol=3 * BOUND[dtype], atol=BOUND[dtype] / 8)
        for row in (0, 8):
            alone = recurrent_gates.gated_norm(x[row], z[row], weight, 1e-5)
            parts = [*recurrent_gates.delta_gates(ba[row], A_log, dt_bias), alone]
            assert all(map(torch.equal, parts, [part[row] for part in (*gates, out)]))


@pytest.mark.parametrize("in_c", [True, False])
@pytest.mark.parametrize("dtype", [FP32, BF16])
@torch.no_grad()
def test_an_output_gate_scales_by_a_sigmoid(dtype, in_c, monkeypatch):
    if not in_c:
        monkeypatch.setattr(recurrent_gates, "native_for", lambda *sizes: None)
    torch.manual_seed(1)
    x, gate = torch.randn(9, 48).to(dtype), (30 * torch.randn(9, 48)).to(dtype)
    actual, expected = recurrent_gates.sigmoid_mul(x, gate), x.double() * torch.sigmoid(gate.double())
    torch.testing.assert_close(actual.double(), expected, rtol=BOUND[dtype], atol=1e-30)
    assert torch.equal(recurrent_gates.sigmoid_mul(x[4:5], gate[4:5]), actual[4:5])
