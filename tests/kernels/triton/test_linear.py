"""Linear layers in Triton against float64, in every weight format, and their row invariance."""

from __future__ import annotations

import pytest
import torch

from kernels.elementwise import add_rms_norm, gelu_mul, silu_mul
from kernels.linear import PackedLinear, assert_row_invariant
from kernels.quantise import quantise, widen
from kernels.triton import device
from tests.kernels.narrow import ERROR

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SCALES = {"int8": 1, "fp8": 1, "int4": 8}  # of an output with 256 inputs; int4 has groups of 32 for 160 inputs
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def make(inputs, outputs, dtype, bias=True, **options):
    generator = torch.Generator().manual_seed(inputs)
    weight = (torch.randn(outputs, inputs, generator=generator) * inputs**-0.5).to(DEVICE, dtype)
    offset = torch.randn(outputs, generator=generator).to(DEVICE, dtype) if bias else None
    return weight, offset, PackedLinear(weight, offset, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("inputs", "outputs", "bias"), [(64, 130, True), (200, 64, False)])
def test_it_matches_float64_for_any_number_of_rows(in_triton, dtype, inputs, outputs, bias):
    weight, offset, linear = make(inputs, outputs, dtype, bias)
    for shape in [(1,), (17,), (2, 35)]:
        x = torch.randn(*shape, inputs, device=DEVICE).to(dtype)
        expected = x.double() @ weight.double().T + (0 if offset is None else offset.double())
        actual = linear(x)
        assert actual.shape == (*shape, outputs)
        assert actual.dtype == dtype
        assert (actual.double() - expected).abs().max() / expected.abs().max() < TOLERANCE[dtype]


@pytest.mark.parametrize(
    ("dtype", "weight_format"), [(torch.float32, "same"), (torch.float16, "int8"), (torch.float16, "int4")]
)
def test_a_row_has_the_same_bits_alone_and_in_a_prompt(in_triton, dtype, weight_format):
    _, _, linear = make(96, 128, dtype, weight_format=weight_format)
    assert_row_invariant(linear, dtype, DEVICE)


@pytest.mark.skipif(torch.cuda.is_available(), reason="pretends to have another device")
@pytest.mark.parametrize("weight_format", ["same", "int8", "int4"])
def test_bits_do_not_depend_on_the_tile(in_triton, monkeypatch, weight_format):
    """A device with few multiprocessors takes tiles of 128 lines for many rows, one with many of 64 lines."""
    _, _, linear = make(256, 192, torch.float16, weight_format=weight_format)
    x = torch.randn(70, 256, device=DEVICE).half()
    expected = linear(x)
    monkeypatch.setattr(device, "without_gpu", device.HOPPER._replace(multiprocessors=1))
    assert torch.equal(linear(x), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("weight_format", ERROR)
def test_weights_of_8_and_4_bits(in_triton, dtype, weight_format):
    """The input is a slice of wider rows."""
    weight, offset, linear = make(160, 64, dtype, weight_format=weight_format)
    stored, scale = quantise(weight, weight_format)
    assert offset is not None
    x = torch.randn(5, 320, device=DEVICE).to(dtype)[:, 160:]
    expected = x.double() @ widen(stored, scale).double().T + offset.double()
    assert (linear(x).double() - expected).abs().max() / expected.abs().max() < TOLERANCE[dtype]
    padded = 64 * 256  # outputs and inputs of whole tiles
    assert linear.bytes == padded // (2 if weight_format == "int4" else 1) + 4 * 64 * SCALES[weight_format]


FORMATS = [*((dtype, "same") for dtype in TOLERANCE), *((torch.float16, weight_format) for weight_format in ERROR)]


@pytest.mark.parametrize(("dtype", "weight_format"), FORMATS)
@pytest.mark.parametrize("bias", [False, True])
@torch.no_grad()
def test_a_sum_has_the_bits_of_the_separate_operations(in_triton, dtype, weight_format, bias):
    """The residual stream is a slice of wider rows."""
    _, _, linear = make(96, 72, dtype, bias, weight_format=weight_format)
    x, residual = torch.randn(19, 96, device=DEVICE).to(dtype), torch.randn(19, 150, device=DEVICE).to(dtype)[:, 75:147]
    assert torch.equal(linear.add(residual, x), _sum(residual, linear(x)))
    assert torch.equal(linear.add(residual[3:4], x[3:4]), linear.add(residual, x)[3:4])


def _sum(x, y):
    """x + y, as kernels/triton/elementwise.py rounds it: Triton's interpreter truncates to bf16."""
    return add_rms_norm(x, y, torch.ones_like(x[0]), 1e-5)[1]


@pytest.mark.parametrize(("dtype", "weight_format"), FORMATS)
@pytest.mark.parametrize(("gate", "separate"), [("silu", silu_mul), ("gelu", gelu_mul)])
@torch.no_grad()
def test_a_gated_layer_has_the_bits_of_the_separate_operations(in_triton, dtype, weight_format, gate, separate):
    """Outputs that fill no tile: 52 of each half."""
    _, _, linear = make(96, 104, dtype, gate == "gelu", weight_format=weight_format)
    x = 4 * torch.randn(2, 10, 96, device=DEVICE).to(dtype)
    gated = linear.gated(x, gate)
    assert gated.shape == (2, 10, 52)
    assert torch.equal(gated, separate(linear(x)))
    assert torch.equal(linear.gated(x[1, 3], gate), gated[1, 3])


@pytest.mark.skipif(torch.cuda.is_available(), reason="pretends to have another device")
@pytest.mark.parametrize("rows", [1, 70])
@torch.no_grad()
def test_gated_layers_of_every_tile(in_triton, monkeypatch, rows):
    _, _, linear = make(128, 544, torch.float16)
    x = torch.randn(rows, 128, device=DEVICE).half()
    expected = silu_mul(linear(x))
    assert torch.equal(linear.gated(x, "silu"), expected)
    monkeypatch.setattr(device, "without_gpu", device.HOPPER._replace(multiprocessors=1))
    assert torch.equal(linear.gated(x, "silu"), expected)
