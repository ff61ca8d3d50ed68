"""Weights in 8 and 4 bits: their rounding, and the CPU kernel that reads them, against float64."""

from __future__ import annotations

import pytest
import torch

from kernels.capabilities import product_dtype
from kernels.cpu.library import SWITCH, library
from kernels.cpu.segments import quantized_segment
from kernels.dispatch import uses_triton
from kernels.linear import NativeLinear, PackedLinear, assert_row_invariant
from kernels.weights.quantize import group_size, quantize, widen
from tests.kernels.narrow import ERROR
from tests.pairwise import parametrize_pairs

CPU = torch.device("cpu")
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}


def make(inputs, outputs, dtype=torch.float32):
    generator = torch.Generator().manual_seed(inputs)
    weight = torch.randn(outputs, inputs, generator=generator) * inputs**-0.5
    return weight.to(dtype), torch.randn(outputs, generator=generator).to(dtype)


@pytest.fixture(params=["c", "torch"])
def kernels(request, monkeypatch):
    library.cache_clear()
    if request.param == "torch":
        monkeypatch.setenv(SWITCH, "torch")
    elif library() is None:
        pytest.fail("no C compiler on this machine")
    yield request.param
    library.cache_clear()


@pytest.mark.parametrize("weight_format", ERROR)
def test_every_weight_is_the_nearest_multiple_of_its_scale(weight_format):
    weight, _ = make(320, 50)
    weight[:, :64] *= 30  # of the first group alone
    stored, scale = quantize(weight, weight_format)
    groups = weight.unflatten(1, (-1, 64 if weight_format == "int4" else 320))
    largest = groups.abs().amax(-1, keepdim=True)
    error = (widen(stored, scale).view_as(groups) - groups).abs() / largest
    assert 0 < error.max() <= ERROR[weight_format] * 1.001
    assert scale.shape == ((50, 5) if weight_format == "int4" else (50,))


@pytest.mark.parametrize("weight_format", ERROR)
def test_a_weight_of_zeros_stays_zero(weight_format):
    stored, scale = quantize(torch.zeros(2, 32), weight_format)
    assert stored.float().count_nonzero() == 0
    assert scale.unique().tolist() == [1]


def test_groups_are_the_largest_that_divide_a_row():
    assert [group_size(inputs) for inputs in (256, 4096, 192, 160, 32)] == [128, 128, 64, 32, 32]
    with pytest.raises(ValueError, match=r"int4: .* 100 inputs.*use int8 \(engine\.weights, or engine\.head_weights"):
        PackedLinear(torch.zeros(8, 100), weight_format="int4")


@parametrize_pairs(
    {
        "dtype": list(TOLERANCE),
        "weight_format": list(ERROR),
        "inputs, outputs": [(64, 130), (160, 16), (384, 64)],
    }
)
def test_it_matches_float64_for_any_leading_shape(kernels, dtype, weight_format, inputs, outputs):
    weight, bias = make(inputs, outputs, dtype)
    wide = widen(*quantize(weight, weight_format)).double()
    for offset in (None, bias):
        linear = PackedLinear(weight, offset, weight_format=weight_format)
        for shape in [(1,), (2, 3), (17,)]:
            x = torch.randn(*shape, inputs).to(dtype)
            expected = x.double() @ wide.T + (0 if offset is None else offset.double())
            actual = linear(x)
            assert (actual.shape, actual.dtype) == ((*shape, outputs), dtype)
            assert (actual.double() - expected).abs().max() / expected.abs().max() < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weight_format", ERROR)
def test_a_rows_bits_depend_neither_on_the_rows_beside_it_nor_on_threads(dtype, weight_format):
    linear = PackedLinear(make(1024, 320, dtype)[0], weight_format=weight_format)
    x, before = torch.randn(33, 1024).to(dtype), torch.get_num_threads()
    outputs = []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            outputs.append(linear(x))
            assert_row_invariant(linear, dtype, CPU)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*outputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weight_format", ERROR)
def test_a_rows_bits_are_those_of_every_width_of_a_tile_and_a_block_of_rows(weight_format, dtype):
    for inputs in (96, 640):  # groups of 32 in batches, the last one not full; groups of 128
        linear, x = (
            PackedLinear(make(inputs, 70, dtype)[0], weight_format=weight_format),
            torch.randn(109, inputs).to(dtype),
        )
        expected = linear(x)
        for width in (*range(1, 27), 36, 37, 95, 96, 97, 108):
            assert torch.equal(linear(x[-width:]), expected[-width:]), (inputs, width)


def test_every_8_bit_weight_is_exact_in_bf16():
    stored = torch.arange(-128, 128, dtype=torch.int8)
    for weight_format, values in (("int8", stored), ("fp8", stored.view(torch.float8_e4m3fn))):
        finite = values[values.float().isfinite()].repeat_interleave(2)  # both halves of a pair
        weight = torch.zeros(1, 512, dtype=values.dtype)
        weight[0, : len(finite)] = finite
        segment = quantized_segment(weight.expand(3, -1).contiguous(), torch.ones(3), weight_format)
        linear = NativeLinear([segment], 512, None, torch.bfloat16)
        identity = torch.eye(512, dtype=torch.bfloat16)
        for rows in (1, 4, 8, 12):
            parts = [linear(part) for part in identity.split(rows)]
            assert torch.equal(torch.cat(parts)[:, 0], weight[0].to(torch.bfloat16)), (weight_format, rows)


@pytest.mark.parametrize(("weight_format", "bits"), [("int8", 8), ("fp8", 8), ("int4", 4)])
def test_it_is_held_in_few_bits_where_the_kernel_reads_them(kernels, weight_format, bits):
    weight, _ = make(512, 256, torch.bfloat16)
    bits_per_weight = PackedLinear(weight, weight_format=weight_format).bytes * 8 / weight.numel()
    packed = kernels == "c" or uses_triton(weight.device)
    assert bits_per_weight < bits * 1.1 if packed else bits_per_weight == 8 * product_dtype(weight.dtype).itemsize
