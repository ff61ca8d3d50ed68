from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from kernels.cpu.library import library
from kernels.linear import PackedLinear, assert_row_invariant
from kernels.weights.quantize import quantize, widen


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2), (torch.float16, 2e-3)])
@pytest.mark.parametrize(("inputs", "outputs"), [(64, 96), (256, 1280), (640, 256), (320, 40)])
@pytest.mark.parametrize("bias", [False, True])
def test_packed_linear_matches_float64_for_any_leading_shape(dtype, tolerance, inputs, outputs, bias):
    weight = (torch.randn(outputs, inputs) * inputs**-0.5).to(dtype)
    offset = torch.randn(outputs).to(dtype) if bias else None
    linear = PackedLinear(weight, offset)
    for shape in [(1,), (2,), (65,), (3, 5)]:
        x = torch.randn(*shape, inputs).to(dtype)
        expected = F.linear(x.double(), weight.double(), None if offset is None else offset.double())
        actual = linear(x)
        assert actual.shape == (*shape, outputs)
        assert actual.dtype == dtype
        assert ((actual.double() - expected).abs().max() / expected.abs().max()) < tolerance


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("inputs", "outputs"), [(256, 512), (256, 2048), (640, 256), (2048, 512), (320, 40)])
def test_row_bits_do_not_depend_on_the_number_of_rows(dtype, inputs, outputs):
    linear = PackedLinear(torch.randn(outputs, inputs).to(dtype))
    full = assert_row_invariant(linear, dtype, torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(200, inputs, generator=generator).to(dtype)  # the rows of `assert_row_invariant`
    for count in range(1, 40):  # every way of splitting rows into blocks
        assert torch.equal(linear(x[:count]), full[:count])


@pytest.mark.parametrize("tiles", [False, True])
@pytest.mark.parametrize(
    ("weight_format", "inputs", "outputs"),
    [
        *(
            (name, *size)
            for name in ("same", "int8", "fp8", "int4")
            for size in [(32, 16), (320, 200), (1024, 96), (192, 130)]
        ),
        *((name, 336, 64) for name in ("same", "int8", "fp8")),  # sizes that tiles do not support
    ],
)
def test_with_a_processors_tiles_and_without_rows_of_16_bits_are_right_and_alike_for_any_number(
    tiles, weight_format, inputs, outputs
):
    native = library()
    if native is None or bool(native.linear_tiles(tiles)) is not tiles:
        pytest.skip("this processor multiplies no tiles")
    try:
        weight, bias = torch.randn(outputs, inputs).bfloat16(), torch.randn(outputs).bfloat16()
        linear, x = PackedLinear(weight, bias, weight_format=weight_format), torch.randn(600, inputs).bfloat16()
        full = linear(x)
        stored = weight if weight_format == "same" else widen(*quantize(weight, weight_format))
        expected = x.double() @ stored.double().T + bias.double()
        assert ((full.double() - expected).abs() <= 2**-8 * expected.abs() + 1e-5 * inputs).all()
        for count in (*range(1, 70), 97, 192, 193, 511, 513):
            assert torch.equal(linear(x[:count]), full[:count])
            assert torch.equal(linear(x[600 - count :]), full[600 - count :])
    finally:
        native.linear_tiles(True)


def test_the_kernels_use_torchs_openmp():
    if "OpenMP" not in torch.__config__.parallel_info():
        pytest.skip("this torch has no OpenMP")
    weight = torch.randn(2048, 256)
    linear = PackedLinear(weight)
    if linear.native is None:
        pytest.skip("no C compiler on this machine")
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        linear(torch.randn(16, 256))
        assert linear.native._arguments.threads == 2, "C sets it to 1 without OpenMP"
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_weight_can_be_taken_out_again(dtype):
    weight = torch.randn(130, 64).to(dtype)
    assert torch.equal(PackedLinear(weight).unpacked_weight(), weight)
    assert PackedLinear(weight, weight_format="int8").unpacked_weight() is None


def test_the_probe_notices_a_linear_whose_bits_depend_on_rows():
    class Drifting(PackedLinear):
        def __call__(self, x):
            return super().__call__(x) * (1 + 1e-6 * (x.shape[0] > 3))

    with pytest.raises(ValueError, match=r"engine\.exact=true.*engine\.exact=false"):
        assert_row_invariant(Drifting(torch.randn(64, 64)), torch.float32, torch.device("cpu"))
