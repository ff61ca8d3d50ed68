"""Matrices in blocks: their weights are exactly those of the package gguf; the layers match float64, row by row."""

from __future__ import annotations

import ctypes
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf import quants

from kernels.cpu import library as building
from kernels.cpu.level import level
from kernels.cpu.library import SWITCH, library
from kernels.linear import PackedLinear
from kernels.weights.ggml import BLOCK, FORMATS, GGML_BLOCK_BYTES, GGML_FORMATS, GgmlMatrix, GgmlRows, reads_ggml
from kernels.weights.groups import GroupedMatrix
from tests.gguf_writing import random_blocks
from tests.kernels.grouped import make_groups

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16]
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2}
GROUPS = [("int4", 32, torch.float16, True, True), ("int8", 64, torch.bfloat16, True, False)]
LARGEST = 1.04  # of the file's size: K scales of 6 bits become bytes
pytestmark = pytest.mark.skipif(library() is None, reason="no C compiler on this machine")


def make(name, rows, columns, seed=0):
    """Return random rows in blocks, and their weights in fp32 as the package dequantizes them."""
    raw = random_blocks(Kind[name], rows, columns, columns**-0.5, seed)
    return GgmlRows(name, torch.from_numpy(raw)), torch.from_numpy(quants.dequantize(raw, Kind[name]).copy())


def states(rows, columns, dtype):
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows)).to(dtype)


def error(actual, x, weight, bias=None):
    expected = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    return ((actual.double() - expected).abs().max() / expected.abs().max()).item()


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", FORMATS)
def test_every_weight_is_exactly_the_packages(name):
    rows, weight = make(name, 150, 512)
    ids = torch.tensor([149, 0, 63, 64, 7, 7])
    for dtype in DTYPES:
        linear = PackedLinear(GgmlMatrix([rows], dtype))
        assert torch.equal(linear.weight_rows(ids), weight[ids].to(dtype))
        assert linear.unpacked_weight() is None
    assert weight.std() == pytest.approx(512**-0.5, rel=0.6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FORMATS)
def test_it_matches_float64_and_a_rows_bits_depend_on_it_alone(name, dtype, threads):
    rows, weight = make(name, 200, 768)
    bias, x = torch.randn(200, generator=torch.Generator().manual_seed(5)).to(dtype), states(512, 768, dtype)
    linear = PackedLinear(GgmlMatrix([rows], dtype), bias)
    expected = linear(x)
    assert error(expected, x, weight, bias) < TOLERANCE[dtype]
    for count in (1, 2):
        threads(count)
        for width in (*range(1, 20), 23, 24, 25, 36, 37, 95, 96, 97, 108, 192, 200, 511):
            assert torch.equal(linear(x[:width]), expected[:width]), (count, width)
            assert torch.equal(linear(x[-width:]), expected[-width:]), (count, width)
    assert torch.equal(linear(x.view(2, 256, 768)), expected.view(2, 256, -1))


@pytest.mark.parametrize("dtype", DTYPES)
def test_parts_of_several_formats_are_computed_as_layers_of_their_own(dtype, threads):
    sizes = {"Q4_1": 40, "Q8_0": 70, "Q6_K": 24, "Q4_K": 130}
    parts = {name: make(name, count, 256, index) for index, (name, count) in enumerate(sizes.items())}
    bias = torch.randn(sum(sizes.values()), generator=torch.Generator().manual_seed(6)).to(dtype)
    merged, x = PackedLinear(GgmlMatrix([rows for rows, _ in parts.values()], dtype), bias), states(100, 256, dtype)
    ends = [0, *np.cumsum(list(sizes.values())).tolist()]
    alone = [
        PackedLinear(GgmlMatrix([rows], dtype), bias[first:end])(x)
        for (rows, _), (first, end) in zip(parts.values(), pairwise(ends), strict=True)
    ]
    for count, width in ((1, 1), (2, 1), (2, 100), (1, 7)):
        threads(count)
        assert torch.equal(merged(x[:width]), torch.cat(alone, dim=1)[:width])


def test_parts_of_one_format_are_joined_and_rows_reordered():
    order = torch.randperm(90, generator=torch.Generator().manual_seed(1))[:50]
    (first, weight), (second, other) = make("Q5_0", 90, 64), make("Q5_0", 33, 64, seed=1)
    matrix = GgmlMatrix([GgmlRows("Q5_0", first.data, order), second], torch.float32)
    linear = PackedLinear(matrix)
    assert matrix.shape == (83, 64)
    assert torch.equal(linear.weight_rows(torch.arange(83)), torch.cat([weight[order], other]))


@pytest.mark.parametrize("name", FORMATS)
def test_it_takes_the_memory_of_the_file(name):
    rows, _ = make(name, 256, 1024)
    packed, stored = PackedLinear(GgmlMatrix([rows], torch.bfloat16)).bytes, rows.data.numel()
    assert stored <= packed <= stored * LARGEST


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("name", FORMATS)
def test_a_damaged_block_is_an_error_that_names_matrix_and_place(name, value, threads):
    threads(2)
    rows, _ = make(name, 100, 512)
    size, blocks = GGML_BLOCK_BYTES[name], 512 // BLOCK[name]
    place = (57 * blocks + 1) * size
    scale = place + (size - 2 if name == "Q6_K" else 0)
    rows.data.view(-1)[scale : scale + 2] = torch.from_numpy(np.array([value], np.float16).view(np.uint8))
    damaged = GgmlRows(name, rows.data, source="a.gguf: blk.0.x", offset=1000)
    with pytest.raises(ValueError, match=rf"a\.gguf: blk\.0\.x: damaged: the {name} block at byte {1000 + place:,} "):
        PackedLinear(GgmlMatrix([damaged], torch.float32))


def test_what_no_kernel_reads(monkeypatch):
    assert reads_ggml("Q4_0", torch.bfloat16, CPU)
    assert not reads_ggml("IQ4_XS", torch.bfloat16, CPU)
    assert not reads_ggml("Q4_0", torch.float16, CPU)
    library.cache_clear()
    monkeypatch.setenv(SWITCH, "torch")
    assert not reads_ggml("Q4_0", torch.bfloat16, CPU)
    library.cache_clear()


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16])
@pytest.mark.parametrize("ggml_format", GGML_FORMATS)
def test_a_weight_is_quantized_as_the_package_does(ggml_format, dtype):
    """Rows of fp16, which no kernel reads, get the same weights, dequantized."""
    weight, x = (0.1 * states(130, 96, dtype)).to(dtype), states(5, 96, dtype)
    kind = Kind[ggml_format.upper()]
    expected = torch.from_numpy(quants.dequantize(quants.quantize(weight.float().numpy(), kind), kind).copy())
    linear = PackedLinear(weight, weight_format=ggml_format)
    assert linear.unpacked_weight() is None
    assert error(linear(x), x, expected.to(dtype)) < TOLERANCE.get(dtype, 2e-3)
    assert torch.equal(linear(x[:1]), linear(x)[:1])
    if dtype is not torch.float16:
        assert torch.equal(linear.weight_rows(torch.arange(130)), expected.to(dtype))
        assert linear.bytes < 192 * 96 * 34 / 32 * 1.01  # outputs are padded to a multiple of 64
    steps = 2 ** int(ggml_format[1])
    assert 0 < (expected - weight.float()).abs().max() < 1.2 * weight.abs().max() / (steps / 2)


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (torch.zeros(8, 100), "a linear layer has 100 inputs, no multiple of a block of 32; use engine.head_weights="),
        (torch.full((8, 64), 1e6), r"a weight of 1e\+06 is beyond the range of fp16.*; use engine.head_weights=int8"),
        (torch.zeros(8, 64, device="meta"), "no kernel reads it on meta; use engine.head_weights=int8 or int4"),
    ],
)
def test_a_weight_that_cannot_be_in_blocks_is_an_error(weight, message):
    with pytest.raises(ValueError, match=f"engine.head_weights=q8_0: {message}"):
        PackedLinear(weight, weight_format="q8_0")


def other_layers(dtype):
    """Return layers of 256 inputs in all formats, with the weights as floats."""
    for name in FORMATS:
        rows, weight = make(name, 70, 256)
        yield PackedLinear(GgmlMatrix([rows], dtype)), weight
    for groups in (make_groups(70, 256, *kind) for kind in GROUPS):
        yield PackedLinear(GroupedMatrix([groups], dtype)), groups.widened()


@pytest.mark.sources("kernels", "tests/kernels")
@pytest.mark.skipif(
    level() in ("baseline", "avx2") or "avx512_bf16" not in building.processor(),
    reason="weights are not widened to bf16 here",
)
def test_with_tiles_every_format_matches_float64_in_any_number_of_rows(compiled):
    """linear_tiles.c, with its instructions computed in C."""
    native = compiled("-O1", "-D__AMX_BF16__", "-include", str(Path(__file__).with_name("tile_instructions.h")))
    x = states(230, 256, torch.bfloat16)
    dense = torch.randn(70, 256).bfloat16()
    for linear, weight in (*other_layers(torch.bfloat16), (PackedLinear(dense), dense)):
        assert native.takes_tiles(ctypes.addressof(linear.native._arguments))
        full = linear(x)
        assert error(full, x, weight) < TOLERANCE[torch.bfloat16]
        for count in (1, 2, 15, 16, 17, 33, 97, 193):
            assert torch.equal(linear(x[:count]), full[:count])
            assert torch.equal(linear(x[-count:]), full[-count:])
