"""Linear layers of weights in the blocks of GGUF files and in the groups of GPTQ and AWQ, in Triton: float64, equal
bits for any number of rows, fused operations, and rows of such weights.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.elementwise import add_rms_norm, silu_mul
from kernels.linear import PackedLinear
from kernels.weights.ggml import BLOCK, FORMATS, GGML_BLOCK_BYTES, GgmlMatrix, GgmlRows
from kernels.weights.ggml_tiles import STORAGE
from kernels.weights.groups import GroupedMatrix, GroupedRows
from tests.device import BF16, DEVICE, FP16, FP32, ON_GPU, sized
from tests.kernels.dequantized import dequantize
from tests.kernels.grouped import make_groups
from tests.kernels.triton.test_linear import BOUND, DTYPES, ROWS

GROUPS = {  # weight format, group (None: a row), with zero points, columns in another order
    "int4 in groups of 128": ("int4", 128, True, False),
    "int4 in ordered groups of 32": ("int4", 32, False, True),
    "int8 by rows": ("int8", None, False, False),
    "fp8 by rows": ("fp8", None, False, False),
}
ALL = (*(f"{name} blocks" for name in FORMATS), *GROUPS)
SHAPE = sized((256, 40), (4096, 6144))  # inputs and outputs: queries, keys and values of Llama-3.1-8B
OTHER = (768, 1000)
CASES = [(name, sized(DTYPES[1 + index % 2], BF16), SHAPE) for index, name in enumerate(ALL)]
CASES += [
    (name, dtype, OTHER)
    for dtype in sized((), (FP16, FP32))
    for name in ("Q4_1 blocks", "Q6_K blocks", "int4 in groups of 128")
]


def random_rows(name: str, shape: tuple[int, int]) -> GgmlRows | GroupedRows:
    """Return a random matrix whose weights have about the size that weights of so many inputs have."""
    if name not in GROUPS:
        return random_blocks(name.removesuffix(" blocks"), shape)
    (weight_format, group, zeros, ordered), (inputs, outputs) = GROUPS[name], shape
    return make_groups(outputs, inputs, weight_format, group or inputs, torch.float16, zeros, ordered)


def random_blocks(name: str, shape: tuple[int, int]) -> GgmlRows:
    inputs, outputs = shape
    storage, large = STORAGE[name], BLOCK[name] == 256
    half = 2 ** (storage.bits + storage.upper - 1)
    scale = inputs**-0.5 / half / (32 if large else 1)  # a large block's scale is that times an integer around 32
    numbers = torch.tensor([scale, half * scale if large else -half * scale]).half().view(torch.uint8)
    data = torch.randint(0, 256, (outputs, inputs // BLOCK[name], GGML_BLOCK_BYTES[name]), dtype=torch.uint8)
    first = 208 if name == "Q6_K" else 0
    data[..., first : first + 2] = numbers[:2]
    if storage.offset:
        data[..., 2:4] = numbers[2:]
    return GgmlRows(name, data.flatten(1))


def packed(rows: GgmlRows | GroupedRows, dtype: torch.dtype, bias: Tensor | None = None) -> PackedLinear:
    matrix = GroupedMatrix if isinstance(rows, GroupedRows) else GgmlMatrix
    return PackedLinear(matrix([rows], dtype, DEVICE), bias)


@pytest.mark.gpu(seconds=1)
@pytest.mark.parametrize(("name", "dtype", "shape"), CASES)
@torch.no_grad()
def test_rows_and_fused_operations(in_triton, compare, name, dtype, shape):
    inputs, outputs = shape
    most, stored = sized(20, 300), random_rows(name, shape)
    x, bias = torch.randn(most, inputs, device=DEVICE).to(dtype), torch.randn(outputs, device=DEVICE).to(dtype)
    case = f"{inputs} x {outputs}, {dtype}, {name}"
    linear, ids = packed(stored, dtype, bias), torch.arange(outputs - 1, -1, -7, device=DEVICE)

    def weight() -> Tensor:
        return (stored.widened() if isinstance(stored, GroupedRows) else dequantize(stored)).to(DEVICE)

    def some_rows() -> Tensor:
        order = stored.order() if isinstance(stored, GroupedRows) else None
        return (weight() if order is None else weight()[:, order.to(DEVICE)])[ids].to(dtype)

    output, residual = linear(x), torch.randn(most, outputs, device=DEVICE).to(dtype)
    true = lambda: x.double() @ weight().double().T + bias.double()  # noqa: E731
    compare.close("linear, blocks", case, output, true, BOUND[dtype])
    compare.same("rows of blocks", case, linear.weight_rows(ids), some_rows)
    total, gated = add_rms_norm(residual, output, torch.ones_like(bias), 1e-5)[1], silu_mul(output)
    for count in (*(ROWS if ON_GPU else ROWS[:2]), most):
        few = f"{count} rows of {most}, {case}"
        compare.same("linear, blocks, bits", few, linear(x[-count:]), output[-count:])
        compare.same("linear, blocks, and sum, bits", few, linear.add(residual[-count:], x[-count:]), total[-count:])
        compare.same("linear, blocks, and activation, bits", few, linear.gated(x[-count:], "silu"), gated[-count:])
