"""Matrices in groups: their weights are exactly those of the formats; the layers match float64, row by row."""

from __future__ import annotations

import pytest
import torch

from kernels.cpu.library import library
from kernels.linear import PackedLinear
from kernels.weights.groups import GroupedMatrix, GroupedRows, why_unread
from tests.kernels.grouped import make_groups
from tests.kernels.test_blocks import threads

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16]
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2}
KINDS = {  # weight format, group, dtype of scales, with zeros, columns in another order
    "int4, fp16": ("int4", 32, torch.float16, False, False),
    "int4, fp16, zeros": ("int4", 16, torch.float16, True, False),
    "int4, bf16, order": ("int4", 64, torch.bfloat16, False, True),
    "int4, bf16, zeros": ("int4", 384, torch.bfloat16, True, False),
    "int4, fp32, order": ("int4", 128, torch.float32, False, True),
    "int8, fp16, zeros, order": ("int8", 48, torch.float16, True, True),
    "int8, bf16, by rows": ("int8", 384, torch.bfloat16, False, False),
    "int8, fp32, zeros": ("int8", 128, torch.float32, True, False),
    "fp8, bf16, by rows": ("fp8", 384, torch.bfloat16, False, False),
}
pytestmark = pytest.mark.skipif(library() is None, reason="no C compiler on this machine")
__all__ = ["threads"]  # a fixture


def states(rows, columns, dtype):
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows)).to(dtype)


@pytest.mark.parametrize("name", KINDS)
def test_every_weight_is_exactly_the_formats(name):
    rows = make_groups(150, 384, *KINDS[name])
    weight = PackedLinear(GroupedMatrix([rows], torch.float32))(torch.eye(384)).T
    if name != "int8, fp32, zeros":
        assert torch.equal(weight, rows.widened())
    else:  # the offset is rounded to fp32
        assert torch.allclose(weight, rows.widened(), rtol=0, atol=2e-7 * float(weight.abs().max()))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", KINDS)
def test_it_matches_float64_and_a_rows_bits_depend_on_it_alone(name, dtype, threads):
    rows = make_groups(200, 384, *KINDS[name])
    bias, x = torch.randn(200, generator=torch.Generator().manual_seed(5)).to(dtype), states(300, 384, dtype)
    linear = PackedLinear(GroupedMatrix([rows], dtype), bias)
    expected, oracle = linear(x), x.double() @ rows.widened().double().T + bias.double()
    assert (expected.double() - oracle).abs().max() < TOLERANCE[dtype] * oracle.abs().max()
    assert linear.unpacked_weight() is None
    for count in (1, 2):
        threads(count)
        for width in (*range(1, 20), 95, 96, 97, 200):
            assert torch.equal(linear(x[:width]), expected[:width]), (count, width)
            assert torch.equal(linear(x[-width:]), expected[-width:]), (count, width)


@pytest.mark.parametrize("dtype", DTYPES)
def test_parts_of_several_formats_are_computed_as_layers_of_their_own(dtype, threads):
    parts = [make_groups(40 + 30 * index, 384, *kind, seed=index) for index, kind in enumerate(KINDS.values())]
    merged, x = PackedLinear(GroupedMatrix(parts, dtype)), states(100, 384, dtype)
    alone = torch.cat([PackedLinear(GroupedMatrix([rows], dtype))(x) for rows in parts], dim=1)
    for count, width in ((1, 1), (2, 1), (2, 100), (1, 7), (4, 7), (4, 100)):
        threads(count)
        assert torch.equal(merged(x[:width]), alone[:width])


@pytest.mark.parametrize("name", KINDS)
def test_it_takes_the_memory_that_was_published(name):
    weight_format, group, scales, zeros, ordered = KINDS[name]
    linear = PackedLinear(GroupedMatrix([make_groups(256, 384, *KINDS[name])], torch.bfloat16))
    integers = 256 * 384 * (4 if weight_format == "int4" else 8) // 8
    assert linear.bytes == integers + 256 * 384 // group * (scales.itemsize + zeros) + 4 * 384 * ordered


def test_weights_are_replaced_in_place():
    kind = KINDS["int8, fp16, zeros, order"]
    first, other = (PackedLinear(GroupedMatrix([make_groups(70, 384, *kind, seed=s)], torch.float32)) for s in (0, 1))
    x = states(3, 384, torch.float32)
    assert not torch.equal(first(x), other(x))
    first.copy_(other)
    assert torch.equal(first(x), other(x))


def test_a_weight_that_is_no_number_is_an_error():
    values = torch.ones(64, 32).to(torch.float8_e4m3fn)
    values[3, 5] = torch.nan
    rows = GroupedRows("fp8", 32, torch.ones(64, 1), None, lambda: (values, None), "a: layer")
    with pytest.raises(ValueError, match="a: layer: damaged: a weight is not a number"):
        PackedLinear(GroupedMatrix([rows], torch.float32))


def test_what_no_kernel_reads_is_named():
    rows = make_groups(64, 384, "int4", 32, torch.float16, False, True)
    assert why_unread(rows, torch.bfloat16, CPU) is None
    text = why_unread(rows, torch.float16, CPU)
    assert text == "no kernel reads int4 in groups of 32 (a matrix in groups) for float16 on cpu"
    assert "groups of 24, which is no multiple of 16" in why_unread(
        make_groups(64, 384, "int4", 24, torch.float16, False, False), torch.float32, CPU
    )
    unequal = GroupedRows("int4", 384, rows.scales, torch.arange(384) // 33, rows.integers)
    assert "groups of different sizes" in why_unread(unequal, torch.float32, CPU)
    wide = GroupedRows("int4", 384, rows.scales.double(), None, rows.integers)
    assert "scales of torch.float64" in why_unread(wide, torch.float32, CPU)
