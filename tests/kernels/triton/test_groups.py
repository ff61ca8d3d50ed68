"""Linear layers of weights in groups, in Triton: the formats' numbers, float64, equal bits for any number of rows."""

from __future__ import annotations

import pytest
import torch

from kernels.elementwise import silu_mul
from kernels.linear import PackedLinear
from kernels.triton import SWITCH
from kernels.weights.groups import GroupedMatrix, GroupedRows, why_unread
from models.attention import CausalAttention
from models.targets import load_target
from tests.kernels.grouped import make_groups
from tests.kernels.triton.test_blocks import DEVICE, TOLERANCE, error, states
from tests.unit.quantized_writers import gptq, gptq_config, write

KINDS = {  # columns; weight format, group, dtype of scales, with zeros, columns in another order
    "int4, fp16": (160, "int4", 32, torch.float16, False, False),
    "int4, fp16, zeros, order": (208, "int4", 16, torch.float16, True, True),
    "int4, bf16, zeros": (256, "int4", 128, torch.bfloat16, True, False),
    "int4, bf16, by rows": (144, "int4", 144, torch.bfloat16, False, False),
    "int4, fp16, large groups": (512, "int4", 256, torch.float16, True, False),
    "int4, fp32, zeros, order": (192, "int4", 64, torch.float32, True, True),
    "int8, fp16, zeros": (160, "int8", 32, torch.float16, True, False),
    "int8, bf16": (256, "int8", 64, torch.bfloat16, False, False),
    "int8, fp32, by rows": (300, "int8", 300, torch.float32, False, False),
    "int8, fp16, zeros, short rows": (40, "int8", 40, torch.float16, True, False),
    "int4, fp16, short rows": (100, "int4", 100, torch.float16, False, False),
    "fp8, bf16, by rows": (256, "fp8", 256, torch.bfloat16, False, False),
}
BIASED = "int4, bf16, zeros"


def make(name, rows, seed=0):
    columns, *kind = KINDS[name]
    return make_groups(rows, columns, *kind, seed=seed)


def pack(parts, dtype, bias=None):
    return PackedLinear(GroupedMatrix(parts, dtype, DEVICE), bias)


@pytest.mark.parametrize("name", KINDS)
def test_every_weight_is_exactly_the_formats(in_triton, name):
    rows = make(name, 70)
    order = slice(None) if rows.order() is None else rows.order()
    assert torch.equal(pack([rows], torch.float32).whole_weight().cpu(), rows.widened()[:, order])


@pytest.mark.parametrize("name", KINDS)
def test_it_matches_float64_and_a_rows_bits_depend_on_it_alone(in_triton, name):
    dtype = torch.bfloat16 if "bf16" in name else torch.float16
    rows, columns = make(name, 72), KINDS[name][0]
    bias = states(1, 72, dtype)[0] if name == BIASED else None
    linear, x = pack([rows], dtype, bias), states(40, 2 * columns, dtype)[:, columns:]
    expected = linear(x)
    assert error(expected, x, rows.widened(), bias) < TOLERANCE[dtype]
    for some in (slice(0, 1), slice(39, 40), slice(20, 37)):
        assert torch.equal(linear(x[some]), expected[some]), some


@pytest.mark.parametrize("name", ["int4, fp32, zeros, order", "fp8, bf16, by rows"])
def test_rows_in_fp32(in_triton, name):
    rows, x = make(name, 40), states(18, KINDS[name][0], torch.float32)
    assert error(pack([rows], torch.float32)(x), x, rows.widened()) < TOLERANCE[torch.float32]


@torch.no_grad()
def test_parts_that_are_stored_alike_are_joined_and_others_have_launches_of_their_own(in_triton, monkeypatch):
    """Packed in several chunks, whose ends are not those of the parts."""
    monkeypatch.setattr("kernels.weights.group_tiles.CHUNK", 64 * 64)
    name, dtype, x = "int4, bf16, zeros", torch.float16, states(5, 256, torch.float16)
    first, second, other = make(name, 90), make(name, 70, seed=1), make("int8, bf16", 24)
    joined, several = pack([first, second], dtype), pack([first, other, second], dtype)
    assert [len(linear.formats) for linear in (joined, several)] == [1, 3]
    alone = [pack([rows], dtype)(x) for rows in (first, other, second)]
    assert torch.equal(joined(x), torch.cat([alone[0], alone[2]], dim=1))
    assert torch.equal(several(x), torch.cat(alone, dim=1))
    residual = states(5, 160, dtype)
    assert torch.equal(joined.add(residual, x), residual + joined(x))
    assert torch.equal(joined.gated(x, "silu"), silu_mul(joined(x)))
    ordered = make("int4, fp16, zeros, order", 64)
    reordered = make("int4, fp16, zeros, order", 64, seed=1)
    assert len(pack([ordered, ordered], dtype).formats) == 1
    assert len(pack([ordered, reordered], dtype).formats) == 2


def test_it_takes_the_memory_that_was_published(in_triton):
    """But a zero point of 4 bits takes 16."""
    for name, bits in (("int4, fp16", 4 + 16 / 32), ("int4, bf16, zeros", 4 + 32 / 128), ("int8, bf16", 8 + 16 / 64)):
        _, weight_format, group, *kind = KINDS[name]
        linear = pack([make_groups(64, 512, weight_format, group, *kind)], torch.bfloat16)
        assert linear.bytes == 64 * 512 * bits / 8


def test_a_weight_that_is_no_number_is_an_error(in_triton):
    values = torch.ones(64, 32).to(torch.float8_e4m3fn)
    values[3, 5] = torch.nan
    rows = GroupedRows("fp8", 32, torch.ones(64, 1), None, lambda: (values, None), "a: layer")
    with pytest.raises(ValueError, match="a: layer: damaged: a weight is not a number"):
        pack([rows], torch.float32)


def test_what_a_gpu_reads(monkeypatch):
    cuda, dtype = torch.device("cuda"), torch.float16
    assert all(why_unread(make(name, 8), dtype, cuda) is None for name in KINDS)
    text = why_unread(make_groups(8, 384, "int8", 48, dtype, False, False), dtype, cuda)
    assert text == (
        "no kernel for GPUs reads int8 in groups of 48 (a matrix in groups): a group must be a row, a multiple of 128, "
        "or a part of 128 that is a multiple of 32"
    )
    assert why_unread(make_groups(8, 384, "int8", 16, dtype, False, False), dtype, cuda) is not None
    monkeypatch.setenv(SWITCH, "torch")
    assert "for float16 on cuda" in str(why_unread(make("int4, fp16", 8), dtype, cuda))


@torch.no_grad()
def test_a_gptq_target(in_triton, make_target_folder, tmp_path):
    """Columns in an order of activations, with zero points."""
    source = make_target_folder(num_hidden_layers=1, seed=6)
    section, quantize = gptq_config(32, desc_act=True, sym=False), gptq(4, 32, symmetric=False, shuffled=True)
    write(source, section, quantize, tmp_path / "tiny", tmp_path / "dense")
    native, widened = (load_target(str(tmp_path / "tiny"), native=native, device=DEVICE) for native in (True, False))
    assert native.ggml_formats == ("int4 in groups of 32",)
    ids = torch.tensor([[3, 9, 127]], device=DEVICE)
    logits = [
        target.logits(target(ids, torch.arange(3, device=DEVICE)[None], CausalAttention()).hidden).double()
        for target in (native, widened)
    ]
    assert (logits[0] - logits[1]).abs().max() < 1e-5 * logits[1].abs().max()
