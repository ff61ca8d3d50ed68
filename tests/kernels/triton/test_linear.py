"""Linear layers in Triton against float64, in every weight format, and their row invariance."""

from __future__ import annotations

import pytest
import torch

from kernels.elementwise import add_rms_norm, gelu_mul, silu_mul
from kernels.linear import PackedLinear
from kernels.triton import device
from kernels.weights.quantize import quantize, widen
from tests.device import BF16, DEVICE, FP16, FP32, served, sized
from tests.kernels.narrow import ERROR

DTYPES = (BF16, FP16, FP32)
SCALES = {"int8": 1, "fp8": 1, "int4": 8}  # of an output with 256 inputs; int4 has groups of 32 for 160 inputs
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def make(inputs, outputs, dtype, bias=True, **options):
    generator = torch.Generator().manual_seed(inputs)
    weight = (torch.randn(outputs, inputs, generator=generator) * inputs**-0.5).to(DEVICE, dtype)
    offset = torch.randn(outputs, generator=generator).to(DEVICE, dtype) if bias else None
    return weight, offset, PackedLinear(weight, offset, **options)


@pytest.mark.skipif(torch.cuda.is_available(), reason="pretends to have another device")
@pytest.mark.parametrize("weight_format", ["same", "int8", "int4"])
def test_bits_do_not_depend_on_the_tile(in_triton, monkeypatch, weight_format):
    """A device with few multiprocessors takes tiles of 128 lines for many rows, one with many of 64 lines."""
    _, _, linear = make(256, 192, torch.float16, weight_format=weight_format)
    x = torch.randn(70, 256, device=DEVICE).half()
    expected = linear(x)
    monkeypatch.setattr(device, "without_gpu", device.HOPPER._replace(multiprocessors=1))
    assert torch.equal(linear(x), expected)


@pytest.mark.parametrize("weight_format", ["same", "int4", "q8_0"])
@pytest.mark.parametrize("rows", [1, 70, 150])
@torch.no_grad()
def test_a_residual_stream_in_fp32_gets_the_sums_unrounded(in_triton, monkeypatch, rows, weight_format):
    """In the bits of the separate operations, by every kind of tile."""
    _, _, linear = make(160, 192, torch.float16, weight_format=weight_format, out_dtype=torch.float32)
    x, residual = torch.randn(rows, 160, device=DEVICE).half(), torch.randn(rows, 200, device=DEVICE)[:, 8:]
    expected = residual + linear(x)
    assert torch.equal(linear.add(residual, x), expected)
    if not torch.cuda.is_available():
        monkeypatch.setattr(device, "without_gpu", device.HOPPER._replace(multiprocessors=1))
        assert torch.equal(linear.add(residual, x), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("weight_format", ERROR)
def test_weights_of_8_and_4_bits(in_triton, dtype, weight_format):
    """The input is a slice of wider rows."""
    weight, offset, linear = make(160, 64, dtype, weight_format=weight_format)
    stored, scale = quantize(weight, weight_format)
    assert offset is not None
    x = torch.randn(5, 320, device=DEVICE).to(dtype)[:, 160:]
    expected = x.double() @ widen(stored, scale).double().T + offset.double()
    assert (linear(x).double() - expected).abs().max() / expected.abs().max() < TOLERANCE[dtype]
    padded = 64 * 256  # outputs and inputs of whole tiles
    assert linear.bytes == padded // (2 if weight_format == "int4" else 1) + 4 * 64 * SCALES[weight_format]


FORMATS = ("same", *ERROR)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("weight_format", [*FORMATS, "q8_0", "q4_0"])
def test_logits_are_sums_that_nothing_has_rounded(in_triton, dtype, weight_format):
    """In fp16 they round to the layer's usual output; the interpreter truncates to bf16."""
    weight, _, lm_head = make(160, 200, dtype, bias=False, weight_format=weight_format, out_dtype=torch.float32)
    layer = PackedLinear(weight, weight_format=weight_format)
    x = torch.randn(70, 160, device=DEVICE).to(dtype)
    logits = lm_head(x)
    assert logits.dtype is torch.float32
    if weight_format in FORMATS:
        stored = weight if weight_format == "same" else widen(*quantize(weight, weight_format))
        expected = x.double() @ stored.double().T
        assert (logits.double() - expected).abs().max() < 2e-6 * expected.abs().max()
    if dtype is torch.float16:
        assert torch.equal(layer(x), logits.to(dtype))
    for count in (1, 17):
        assert torch.equal(lm_head(x[-count:]), logits[-count:])


ROWS = sized((1, 17, 65), (1, 2, 15, 16, 17, 33, 64, 65, 80, 128, 200, 256))  # on both sides of every change of tile
LAYERS = {  # of Llama-3.1-8B: inputs and outputs
    "qkv": (4096, 6144),
    "o": (4096, 4096),
    "gate and up": (4096, 28672),
    "down": (14336, 4096),
    "LM head": (4096, 128256),
}
ODD = sized((96, 40), (4096, 1000))
APART = sized(75, 0)  # the residual stream is a slice of wider rows
BOUND = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}
CASES = [("odd sizes", dtype, weight_format) for dtype in DTYPES for weight_format in FORMATS]
CASES += sized(
    [], [served(name, BF16, form) for name in LAYERS for form in FORMATS if "LM" not in name or form == "same"]
)


@pytest.mark.gpu(seconds=1)
@pytest.mark.parametrize(("layer", "dtype", "weight_format"), CASES)
@torch.no_grad()
def test_rows_and_fused_operations(in_triton, compare, layer, dtype, weight_format):
    """Rows match float64, few of them have the bits of many, and fused operations those of separate ones."""
    inputs, outputs = LAYERS.get(layer, ODD)
    most = sized(70, 300 if layer in LAYERS else 700)
    weight = (torch.randn(outputs, inputs, device=DEVICE) * inputs**-0.5).to(dtype)
    x, bias = torch.randn(most, inputs, device=DEVICE).to(dtype), torch.randn(outputs, device=DEVICE).to(dtype)
    case = f"{inputs} x {outputs}, {dtype}, weights {weight_format}"
    linear = PackedLinear(weight, bias, weight_format=weight_format)

    def true():
        wide = weight if weight_format == "same" else widen(*quantize(weight, weight_format))
        return x.double() @ wide.double().T + bias.double()

    output = linear(x)
    compare.close("linear", case, output, true, BOUND[dtype])
    residual = torch.randn(most, outputs + APART, device=DEVICE).to(dtype)[:, APART:]
    total = _sum(residual, output) if layer in ("o", "down", "odd sizes") else None
    gates = {"silu": silu_mul, "gelu": gelu_mul} if layer in ("gate and up", "odd sizes") else {}
    gated = {gate: separate(output) for gate, separate in gates.items()}
    for count in (*ROWS, most):
        few, rows = f"{count} rows of {most}, {case}", x[-count:]
        compare.same("linear, bits", few, linear(rows), output[-count:])
        if total is not None:
            compare.same("linear and sum, bits", few, linear.add(residual[-count:], rows), total[-count:])
        for gate in gates:
            compare.same(f"linear and {gate}, bits", few, linear.gated(rows, gate), gated[gate][-count:])


def _sum(x, y):
    """x + y, as kernels/triton/elementwise.py rounds it: Triton's interpreter truncates to bf16."""
    return add_rms_norm(x, y, torch.ones_like(x[0]), 1e-5)[1]


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
