"""Linear layers with weights in the blocks of GGUF files or in the groups of GPTQ and AWQ, and rows of such weights."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from kernels.block_tiles import STORAGE, dequantise
from kernels.blocks import BLOCK, BLOCK_BYTES, FORMATS, BlockMatrix, BlockRows
from kernels.elementwise import silu_mul
from kernels.groups import GroupedMatrix, GroupedRows
from kernels.linear import PackedLinear
from scripts.gpu_check.linear import BOUND, ROWS
from scripts.gpu_check.measure import Item, close, same, timed
from scripts.gpu_check.plan import BF16, RANKS, KernelCheck

SHAPE = (4096, 6144)  # inputs and outputs: queries, keys and values of Llama-3.1-8B
TIMED = {"down": (14336, 4096), "gate and up": (4096, 28672)}
TIMED_ROWS = (1, 16, 64, 256)
GROUPS = {  # weight format, group (None: a row), with zero points, columns in another order
    "int4 in groups of 128": ("int4", 128, True, False),
    "int4 in ordered groups of 32": ("int4", 32, False, True),
    "int8 by rows": ("int8", None, False, False),
    "fp8 by rows": ("fp8", None, False, False),
}
ALL = (*(f"{name} blocks" for name in FORMATS), *GROUPS)
TIMED_FORMATS = ALL[: len(FORMATS) + 1]


def checks(device: torch.device) -> Iterator[KernelCheck]:
    if device.type != "cuda":
        for name in ALL:
            items = partial(compare, name, (256, 40), torch.float32, (1, 17), 20, device)
            yield KernelCheck("correctness", f"linear, {name}", 1, BF16, items)
        yield KernelCheck("timings", "linear, blocks", 1, BF16, partial(time, "tiny", (256, 96), (2,), device))
        return
    for name in ALL:
        items = partial(compare, name, SHAPE, torch.bfloat16, ROWS, 300, device)
        yield KernelCheck("correctness", f"linear, {torch.bfloat16}, {name}", 1, BF16, items)
    for layer, shape in TIMED.items():
        items = partial(time, layer, shape, TIMED_ROWS, device)
        yield KernelCheck("timings", f"linear, {layer}, {torch.bfloat16}, blocks", 4, BF16, items)
    for dtype in (torch.float16, torch.float32):
        for name in ("Q4_1 blocks", "Q6_K blocks", "int4 in groups of 128"):
            items = partial(compare, name, (768, 1000), dtype, ROWS, 300, device)
            yield KernelCheck("correctness", f"linear, {dtype}, {name}", 1, RANKS[dtype], items)


def random_rows(name: str, shape: tuple[int, int]) -> BlockRows | GroupedRows:
    """Return a random matrix whose weights have about the size that weights of so many inputs have."""
    return random_groups(name, shape) if name in GROUPS else random_blocks(name.removesuffix(" blocks"), shape)


def random_groups(name: str, shape: tuple[int, int]) -> GroupedRows:
    (weight_format, group, zeros, ordered), (inputs, outputs) = GROUPS[name], shape
    count, half = inputs // (group or inputs), 8 if weight_format == "int4" else 128
    values = torch.randint(-half, half, (outputs, inputs), dtype=torch.int8)
    scales = (torch.rand(outputs, count) + 0.5) * inputs**-0.5 / half
    zero = torch.randint(-half, half, (outputs, count), dtype=torch.int8) if zeros else None
    stored = values.to(torch.float8_e4m3fn) if weight_format == "fp8" else values
    order = torch.randperm(inputs) * count // inputs if ordered else None
    return GroupedRows(weight_format, inputs, scales.half(), order, lambda: (stored, zero))


def random_blocks(name: str, shape: tuple[int, int]) -> BlockRows:
    inputs, outputs = shape
    storage, large = STORAGE[name], BLOCK[name] == 256
    half = 2 ** (storage.bits + storage.upper - 1)
    scale = inputs**-0.5 / half / (32 if large else 1)  # a large block's scale is that times an integer around 32
    numbers = torch.tensor([scale, half * scale if large else -half * scale]).half().view(torch.uint8)
    data = torch.randint(0, 256, (outputs, inputs // BLOCK[name], BLOCK_BYTES[name]), dtype=torch.uint8)
    first = 208 if name == "Q6_K" else 0
    data[..., first : first + 2] = numbers[:2]
    if storage.offset:
        data[..., 2:4] = numbers[2:]
    return BlockRows(name, data.flatten(1))


def packed(
    rows: BlockRows | GroupedRows, dtype: torch.dtype, device: torch.device, bias: Tensor | None
) -> PackedLinear:
    grouped = isinstance(rows, GroupedRows)
    return PackedLinear(GroupedMatrix([rows], dtype, device) if grouped else BlockMatrix([rows], dtype, device), bias)


def weights(rows: BlockRows | GroupedRows) -> tuple[Tensor, Tensor | None]:
    """Return the weights `[N, K]` in fp32, and the order in which the kernel has their columns."""
    return (rows.widened(), rows.order()) if isinstance(rows, GroupedRows) else (dequantise(rows), None)


@torch.no_grad()
def compare(
    name: str, shape: tuple[int, int], dtype: torch.dtype, rows: tuple[int, ...], most: int, device: torch.device
) -> Iterator[Item]:
    """Compare `most` rows with float64, fewer of them with those, fused operations with separate ones, and weights."""
    inputs, outputs = shape
    stored = random_rows(name, shape)
    x, bias = torch.randn(most, inputs, device=device).to(dtype), torch.randn(outputs, device=device).to(dtype)
    case = f"{inputs} x {outputs}, {dtype}, {name}"
    linear = packed(stored, dtype, device, bias)
    ids = torch.arange(outputs - 1, -1, -7, device=device)

    def weight(*, sorted_columns: bool = False) -> Tensor:
        values, order = weights(stored)
        return (values[:, order] if sorted_columns and order is not None else values).to(device)

    output, residual = linear(x), torch.randn(most, outputs, device=device).to(dtype)
    yield close("linear, blocks", case, output, lambda: x.double() @ weight().double().T + bias.double(), BOUND[dtype])
    yield same("rows of blocks", case, linear.weight_rows(ids), lambda: weight(sorted_columns=True)[ids].to(dtype))
    total, gated = residual + output, silu_mul(output)
    for count in (*rows, most):
        few = f"{count} rows of {most}, {case}"
        yield same("linear, blocks, bits", few, linear(x[-count:]), output[-count:])
        yield same("linear, blocks, and sum, bits", few, linear.add(residual[-count:], x[-count:]), total[-count:])
        yield same("linear, blocks, and activation, bits", few, linear.gated(x[-count:], "silu"), gated[-count:])


def time(layer: str, shape: tuple[int, int], rows: tuple[int, ...], device: torch.device) -> Iterator[Item]:
    """Time every format, in bf16 on a GPU."""
    inputs, outputs = shape
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    for name in TIMED_FORMATS:
        linear = packed(random_rows(name, shape), dtype, device, None)
        for count in rows:
            x = torch.randn(count, inputs, device=device).to(dtype)
            moved = linear.bytes + (x.numel() + count * outputs) * x.element_size()
            yield timed(f"linear, {name}", f"{layer}, {count} rows, {dtype}", device, moved, linear, x)
