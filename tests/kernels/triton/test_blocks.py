"""Linear layers and rows of weights in blocks, in Triton: float64, equal bits for any number of rows, epilogues."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf import quants

from kernels.elementwise import add_rms_norm, gelu_mul, silu_mul
from kernels.linear import PackedLinear
from kernels.triton import SWITCH
from kernels.triton.ggml import block_tile_for, layout_of
from kernels.weights.ggml import BLOCK, FORMATS, GGML_BLOCK_BYTES, GgmlMatrix, GgmlRows, reads_ggml
from kernels.weights.ggml_tiles import empty_tiles
from models.attention import CausalAttention
from models.layers import PackedEmbedding
from models.targets import load_target
from tests.gguf_writing import random_blocks, write_gguf
from tests.kernels.dequantized import dequantize
from tests.kernels.triton.compiled import DEVICES

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}
LARGEST = 1.03  # of the file's size: the factor of a Q6_K block is in fp32, for either half


def make(name, rows, columns, seed=0):
    """Return random rows in blocks, and their weights in fp32 as the package gguf dequantizes them."""
    raw = random_blocks(Kind[name], rows, columns, columns**-0.5, seed)
    return GgmlRows(name, torch.from_numpy(raw)), torch.from_numpy(quants.dequantize(raw, Kind[name]).copy())


def pack(parts, dtype, bias=None):
    return PackedLinear(GgmlMatrix(parts, dtype, DEVICE), bias)


def states(rows, columns, dtype):
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows)).to(DEVICE, dtype)


def error(actual, x, weight, bias=None):
    expected = x.double() @ weight.to(DEVICE).double().T + (0 if bias is None else bias.double())
    return ((actual.double() - expected).abs().max() / expected.abs().max()).item()


def inputs_of(name):
    """A size that fills no tile where a format has such sizes."""
    return 512 if BLOCK[name] == 256 else 160


@pytest.mark.parametrize(("name", "dtype"), [*((name, torch.float32) for name in FORMATS), ("Q4_1", torch.float16)])
def test_every_weight_is_exactly_the_packages(in_triton, name, dtype):
    rows, weight = make(name, 70, inputs_of(name))
    ids = torch.tensor([69, 0, 63])
    assert torch.equal(pack([rows], dtype).weight_rows(ids.to(DEVICE)).cpu(), weight[ids].to(dtype))
    assert torch.equal(dequantize(rows), weight)


def test_a_tile_fits_and_has_no_more_than_two_kinds():
    """Rows of one kind share its instructions; two stages at least hide the reads."""
    meta = torch.device("meta")
    for limits in DEVICES.values():
        for name in FORMATS:
            for dtype in (torch.bfloat16, torch.float32):
                part = layout_of(empty_tiles(name, 4096, 14336, meta))
                tiles = {block_tile_for(rows, dtype, part, limits)._replace(stages=0) for rows in range(1, 513)}
                assert len(tiles) == 2
                assert min(block_tile_for(rows, dtype, part, limits).stages for rows in (1, 17, 512)) >= 2


@pytest.mark.parametrize("names", [("Q8_0",), ("Q4_1", "Q8_0", "Q6_K")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@torch.no_grad()
def test_parts_and_epilogues_have_the_bits_of_separate_operations(in_triton, dtype, names):
    """One format, and parts of several; the residual stream is a slice of wider rows."""
    parts = {name: make(name, 104 // len(names), 256, index) for index, name in enumerate(names)}
    outputs = sum(rows.count for rows, _ in parts.values())
    bias, x = states(1, outputs, dtype)[0], states(19, 256, dtype)
    linear = pack([rows for rows, _ in parts.values()], dtype, bias)
    out, first = linear(x), 0
    for rows, _ in parts.values():
        last = first + rows.count
        assert torch.equal(out[:, first:last], pack([rows], dtype, bias[first:last])(x))
        first = last
    residual = states(19, 2 * outputs, dtype)[:, outputs:]
    total = add_rms_norm(residual, out, torch.ones_like(out[0]), 1e-5)[1]
    assert torch.equal(linear.add(residual, x), total)
    assert torch.equal(linear.add(residual[3:4], x[3:4]), total[3:4])
    for gate, separate in (("silu", silu_mul), ("gelu", gelu_mul)):
        assert torch.equal(linear.gated(x, gate), separate(out))
        assert torch.equal(linear.gated(x[5], gate), separate(out)[5])


def test_parts_of_one_format_are_joined_and_rows_reordered(in_triton, monkeypatch):
    """Packed in several chunks, whose ends are not those of the parts."""
    monkeypatch.setattr("kernels.weights.ggml_tiles.CHUNK", 64 * 64)
    order = torch.randperm(90, generator=torch.Generator().manual_seed(1))[:50]
    (first, weight), (second, other) = make("Q5_0", 90, 64), make("Q5_0", 133, 64, seed=1)
    linear = pack([GgmlRows("Q5_0", first.data, order), second], torch.float32)
    assert len(linear.formats) == 1
    ids = torch.tensor([0, 49, 50, 63, 64, 127, 128, 182])
    assert torch.equal(linear.weight_rows(ids.to(DEVICE)).cpu(), torch.cat([weight[order], other])[ids])


@torch.no_grad()
def test_a_target_of_several_formats(in_triton, make_target_folder, tmp_path):
    """Queries, keys and values, and gate and up, differ in theirs; the tied LM head is the embedding's memory."""
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1, "vocab_size": 128}
    folder, file = make_target_folder(seed=2, tie_word_embeddings=True, **sizes), tmp_path / "tiny.gguf"
    write_gguf(folder, file, (Kind.Q4_K, Kind.Q6_K, Kind.Q5_K, Kind.Q8_0))
    native, widened = load_target(str(file), native=True, device=DEVICE), load_target(str(file), device=DEVICE)
    assert isinstance(native.embed_tokens, PackedEmbedding)
    assert native.embed_tokens.packed is native.lm_head.packed
    assert len(native.layers[0].self_attn.qkv_proj.packed.formats) > 1
    ids = torch.tensor([3, 9, 127], device=DEVICE)
    assert torch.equal(native.embed(ids), widened.embed(ids))
    logits = [
        target.logits(target(ids[None], torch.arange(3, device=DEVICE)[None], CausalAttention()).hidden).double()
        for target in (native, widened)
    ]
    assert (logits[0] - logits[1]).abs().max() < 1e-5 * logits[1].abs().max()


def test_copying_keeps_addresses(in_triton):
    (first, _), (second, weight) = make("Q5_K", 4, 256), make("Q5_K", 4, 256, seed=1)
    linear, other = pack([first], torch.float32), pack([second], torch.float32)
    assert linear.unpacked_weight() is None
    addresses = [tensor.data_ptr() for tensor in linear._tiles[0].tensors]
    linear.copy_(other)
    assert torch.equal(linear.whole_weight().cpu(), weight)
    assert [tensor.data_ptr() for tensor in linear._tiles[0].tensors] == addresses


@pytest.mark.parametrize("name", FORMATS)
def test_it_takes_the_memory_of_the_file(in_triton, name):
    rows, _ = make(name, 256, 1024)
    packed, stored = pack([rows], torch.bfloat16).bytes, rows.data.numel()
    assert stored <= packed <= stored * LARGEST


@pytest.mark.parametrize(("name", "value"), [("Q4_0", np.inf), ("Q5_1", -np.inf), ("Q6_K", np.nan)])
def test_a_damaged_block_is_an_error_that_names_matrix_and_place(in_triton, name, value):
    (sound, _), (rows, _) = make(name, 30, 512), make(name, 100, 512)
    size, blocks = GGML_BLOCK_BYTES[name], 512 // BLOCK[name]
    place = (57 * blocks + 1) * size
    scale = place + (size - 2 if name == "Q6_K" else 0)
    rows.data.view(-1)[scale : scale + 2] = torch.from_numpy(np.array([value], np.float16).view(np.uint8))
    damaged = GgmlRows(name, rows.data, source="a.gguf: blk.0.x", offset=1000)
    with pytest.raises(ValueError, match=rf"a\.gguf: blk\.0\.x: damaged: the {name} block at byte {1000 + place:,} "):
        pack([sound, damaged], torch.float32)


def test_what_a_gpu_reads(monkeypatch):
    cuda = torch.device("cuda")
    assert reads_ggml("Q4_0", torch.float16, cuda)
    assert not reads_ggml("IQ4_XS", torch.bfloat16, cuda)
    monkeypatch.setenv(SWITCH, "torch")
    assert not reads_ggml("Q4_0", torch.bfloat16, cuda)
