"""Rows quantized to 8 bits: integer products match float64 over the quantized values; a row's bits are its own."""

from __future__ import annotations

import pytest
import torch

from kernels.cpu.level import level
from kernels.cpu.library import library
from kernels.linear import PackedLinear
from kernels.weights.ggml import FORMATS, GgmlMatrix, GgmlRows
from kernels.weights.groups import GroupedMatrix
from kernels.weights.quantize import quantize, widen
from tests.kernels.grouped import make_groups
from tests.kernels.test_blocks import error, make, states, threads

GROUPED = {  # weight format, group, dtype of scales, with zeros, columns in another order
    "groups of int4 with zeros": ("int4", 64, torch.float16, True, False),
    "groups of int8 with zeros, in order": ("int8", 32, torch.bfloat16, True, True),
    "groups of int4, in order": ("int4", 128, torch.float32, False, True),
}
DTYPES = [torch.float32, torch.bfloat16]
FAST_BUILD = ("-O1", "-fexpensive-optimizations")  # the second: fused multiply-adds as with -O3
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1e-2}
pytestmark = pytest.mark.skipif(library() is None, reason="no C compiler on this machine")
__all__ = ["threads"]  # a fixture


def quantized(x):
    """Return x as the kernel reads it, in float64: 32 inputs at a time, multiples of their largest magnitude / 127."""
    blocks = x.float().unflatten(-1, (-1, 32))
    largest = blocks.abs().amax(-1, keepdim=True)
    factor = torch.full_like(largest, 127) / largest  # a number over a tensor is its reciprocal's multiple in torch
    integers = (blocks * torch.where(largest > 0, factor, 0)).round()  # ties to even
    return (integers.double() * (largest / 127).double()).flatten(-2)


def make_linear(name, outputs, inputs, dtype, bias=None):
    """Return an integer layer, its weights with columns in the order in which it reads x, and that order."""
    order = torch.arange(inputs)
    if name in GROUPED:
        grouped = make_groups(outputs, inputs, *GROUPED[name])
        linear, order = PackedLinear(GroupedMatrix([grouped], dtype), bias), grouped.order()
        order = torch.arange(inputs) if order is None else order
        weight = grouped.widened()[:, order]
    elif name in FORMATS:
        rows, weight = make(name, outputs, inputs)
        linear = PackedLinear(GgmlMatrix([rows], dtype), bias)
    else:
        weight = torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(1)).to(dtype) * inputs**-0.5
        linear = PackedLinear(weight, bias, weight_format=name)
        weight = widen(*quantize(weight, name))
    assert linear.quantize_rows()
    return linear, weight, order


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", [*FORMATS, *GROUPED, "int8", "int4"])
def test_it_matches_float64_and_a_rows_bits_depend_on_it_alone(name, dtype, threads):
    bias, x = torch.randn(200, generator=torch.Generator().manual_seed(5)).to(dtype), states(512, 768, dtype)
    x[3], x[5, 64:] = 0, 0
    linear, weight, order = make_linear(name, 200, 768, dtype, bias)
    expected, read = linear(x), x[:, order]
    assert error(expected, quantized(read), weight, bias) < TOLERANCE[dtype]
    assert 1e-4 < error(expected.float(), read, weight, bias) < 2e-2
    for count in (1, 2):
        threads(count)
        for width in (*range(1, 20), 95, 96, 97, 200, 511):
            assert torch.equal(linear(x[:width]), expected[:width]), (count, width)
            assert torch.equal(linear(x[-width:]), expected[-width:]), (count, width)
    assert torch.equal(linear(x.view(2, 256, 768)), expected.view(2, 256, -1))


@pytest.mark.parametrize("name", FORMATS)
def test_sums_of_the_largest_products_are_exact(name):
    """Every integer is the largest or smallest of its format, every q 127 or -127: no sum may saturate."""
    (rows, _), patterns = make(name, 64, 256), (0x00, 0xFF, 0x80, 0x7F)
    for pattern in patterns:
        data = rows.data.clone()
        size, scales = {"Q6_K": (210, [208, 209]), "Q4_K": (144, range(4)), "Q5_K": (176, range(4))}.get(
            name, (data.shape[1] * 32 // 256, range(4 if name.endswith("_1") else 2))
        )
        blocks = data.view(-1, size)
        kept = blocks[:, list(scales)].clone()
        blocks[:] = pattern
        blocks[:, list(scales)] = kept
        linear = PackedLinear(GgmlMatrix([GgmlRows(name, data)], torch.float32))
        assert linear.quantize_rows()
        weight = linear.weight_rows(torch.arange(64))
        for x in (torch.ones(1, 256), -torch.ones(1, 256), torch.ones(1, 256) * torch.tensor([1.0, -1.0]).repeat(128)):
            wanted = quantized(x) @ weight.double().T
            bound = 1e-6 * (quantized(x).abs() @ weight.double().abs().T)
            assert ((linear(x).double() - wanted).abs() <= bound).all(), pattern


def test_parts_of_several_formats_are_computed_as_layers_of_their_own(threads):
    parts = {name: make(name, count, 256)[0] for name, count in (("Q4_1", 40), ("Q6_K", 70), ("Q8_0", 24))}
    merged, x = PackedLinear(GgmlMatrix(list(parts.values()), torch.bfloat16)), states(100, 256, torch.bfloat16)
    assert merged.quantize_rows()
    alone = []
    for rows in parts.values():
        linear = PackedLinear(GgmlMatrix([rows], torch.bfloat16))
        assert linear.quantize_rows()
        alone.append(linear(x))
    for count, width in ((1, 1), (2, 1), (2, 100), (1, 7)):
        threads(count)
        assert torch.equal(merged(x[:width]), torch.cat(alone, dim=1)[:width])


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_what_is_not_finite_spoils_its_row_only(value):
    linear, *_ = make_linear("Q4_1", 64, 256, torch.float32)
    x = states(5, 256, torch.float32)
    expected = linear(x)
    x[2, 77] = value
    out = linear(x)
    assert out[2].isnan().all()
    assert torch.equal(out[[0, 1, 3, 4]], expected[[0, 1, 3, 4]])
    tiny = torch.full((1, 256), 1e-38)
    assert torch.equal(linear(tiny), torch.zeros(1, 64))


@pytest.mark.parametrize(("name", "inputs"), [("same", 64), ("fp8", 64), ("int8", 40)])
def test_other_weights_stay_as_they_are(name, inputs):
    weight, x = states(96, inputs, torch.float32), states(3, inputs, torch.float32)
    linear = PackedLinear(weight, weight_format=name)
    before = linear(x)
    assert not linear.quantize_rows()
    assert torch.equal(linear(x), before)


@pytest.mark.sources("kernels", "tests/kernels")
@pytest.mark.parametrize("processor", ["skylake-avx512", "x86-64-v3"])
def test_other_processors_give_the_same_integers(processor, compiled):
    """AVX-512 without VNNI, and AVX2, compiled for them and run here; test_lower_levels.py has those without fused
    multiply-adds, whose sums are others.
    """
    layers = [(name, dtype) for name in (*FORMATS, *GROUPED) for dtype in DTYPES]
    x = {dtype: states(9, 256, dtype) for dtype in DTYPES}
    expected = [make_linear(name, 70, 256, dtype)[0](x[dtype]) for name, dtype in layers]
    fused = level() != "baseline"
    compiled(f"-march={processor}", *FAST_BUILD)
    for (name, dtype), wanted in zip(layers, expected, strict=True):
        linear, weight, order = make_linear(name, 70, 256, dtype)
        out = linear(x[dtype])
        assert error(out, quantized(x[dtype][:, order]), weight) < TOLERANCE[dtype]
        assert torch.equal(linear(x[dtype][:1]), out[:1])
        if fused:
            assert torch.equal(out, wanted), (name, dtype)
