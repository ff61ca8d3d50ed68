"""Logits leave an LM head as the fp32 sums that they are, in every format and without a kernel, packed or not."""

from __future__ import annotations

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf import quants

from kernels.cpu.library import SWITCH, library
from kernels.dispatch import KINDS
from kernels.linear import PackedLinear, assert_row_invariant
from kernels.weights.ggml import GgmlMatrix, GgmlRows
from kernels.weights.groups import GroupedMatrix
from kernels.weights.quantize import quantize, widen
from models.layers import make_lm_head
from tests.gguf_writing import random_blocks
from tests.kernels.grouped import make_groups
from tests.pairwise import parametrize_pairs

CPU = torch.device("cpu")
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.fixture(params=["c", "torch"])
def kernels(request, monkeypatch):
    library.cache_clear()
    if request.param == "torch":
        monkeypatch.setenv(SWITCH, "torch")
    elif library() is None:
        pytest.fail("no C compiler on this machine")
    yield request.param
    library.cache_clear()


def stored_as(form, outputs, inputs, dtype):
    """Return what a layer is packed from, its `weight_format`, and the weights in fp32."""
    if form in ("Q8_0", "Q4_K"):
        raw = random_blocks(Kind[form], outputs, inputs, inputs**-0.5, 0)
        return (
            GgmlMatrix([GgmlRows(form, torch.from_numpy(raw))], dtype),
            "same",
            torch.as_tensor(quants.dequantize(raw, Kind[form])),
        )
    if form == "groups":
        rows = make_groups(outputs, inputs, "int4", 32, torch.float16, True, False)
        return GroupedMatrix([rows], dtype), "same", rows.widened()
    weight = (torch.randn(outputs, inputs) * inputs**-0.5).to(dtype)
    return weight, form, weight.float() if form == "same" else widen(*quantize(weight, form))


@parametrize_pairs(
    {
        "form": ["same", "int8", "int4", "Q8_0", "Q4_K", "groups"],
        "dtype": DTYPES,
        "sizes": [(256, 192), (512, 130)],
        "exact": [True, False],
    }
)
def test_logits_are_sums_that_nothing_has_rounded(kernels, form, dtype, sizes, exact):
    (inputs, outputs), in_c = sizes, kernels == "c" and dtype in KINDS
    if not (in_c or form in ("same", "int8", "int4")):
        pytest.skip("dequantized by whoever loads it")
    weight, weight_format, stored = stored_as(form, outputs, inputs, dtype)
    options = {"exact": exact, "weight_format": weight_format}
    lm_head, layer = PackedLinear(weight, **options, out_dtype=torch.float32), PackedLinear(weight, **options)
    if not in_c:
        stored = stored.to(dtype)
    x = torch.randn(70, inputs).to(dtype)
    logits, expected = lm_head(x), x.double() @ stored.double().T
    assert logits.dtype is torch.float32
    assert (logits.double() - expected).abs().max() < 2e-6 * expected.abs().max()
    assert lm_head(x.view(7, 10, inputs)).shape == (7, 10, outputs)
    if layer.native is not None:  # the same sums: the other layer rounds them
        assert layer(x).dtype is dtype
        assert torch.equal(layer(x), logits.to(dtype))
    residual = torch.randn(70, outputs)
    assert torch.equal(lm_head.add(residual, x), residual + logits)  # as a residual stream in fp32
    if exact:
        assert_row_invariant(lm_head, dtype, CPU)


@pytest.mark.skipif(library() is None, reason="no C compiler on this machine")
def test_rows_of_a_tied_embedding_keep_the_models_dtype():
    matrix, _, stored = stored_as("Q8_0", 64, 256, torch.bfloat16)
    rows = PackedLinear(matrix, out_dtype=torch.float32).weight_rows(torch.tensor([3, 0, 63]))
    assert torch.equal(rows, stored[[3, 0, 63]].bfloat16())


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_lm_head_that_is_not_packed(dtype):
    """As in training's evaluation; its gradients are those of a plain layer."""
    lm_head = make_lm_head(96, 200).to(dtype)
    x = torch.randn(3, 5, 96).to(dtype).requires_grad_()
    logits, target = lm_head(x), torch.randn(3, 5, 200)
    expected = x.double() @ lm_head.weight.double().T
    assert logits.dtype is torch.float32
    assert (logits.double() - expected).abs().max() < 2e-6 * expected.abs().max()
    logits.backward(target)
    wanted = target.double() @ lm_head.weight.double(), target.double().flatten(0, 1).T @ x.double().flatten(0, 1)
    for gradient, other in zip((x.grad, lm_head.weight.grad), wanted, strict=True):
        assert gradient is not None
        assert gradient.dtype is dtype
        assert (gradient.double() - other).abs().max() < 2e-2 * other.abs().max()


@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES if dtype in KINDS])
def test_packing_an_lm_head_keeps_its_dtype(dtype):
    lm_head, x = make_lm_head(96, 200).to(dtype), torch.randn(4, 96).to(dtype)
    before = lm_head(x)
    lm_head.pack()
    assert lm_head.packed is not None
    assert lm_head.packed.dtype is dtype
    after = lm_head(x)
    assert after.dtype is torch.float32
    assert (after - before).abs().max() < 1e-5


def test_autocast_rounds_no_logits_of_16_bits():
    lm_head, x = make_lm_head(64, 40).bfloat16(), torch.randn(4, 64).bfloat16()
    expected = lm_head(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(lm_head(x), expected)
