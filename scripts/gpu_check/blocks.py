"""Linear layers with weights in the blocks of GGUF files, and rows of such weights."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from kernels.block_tiles import STORAGE, dequantise
from kernels.blocks import BLOCK, BLOCK_BYTES, FORMATS, BlockMatrix, BlockRows
from kernels.elementwise import silu_mul
from kernels.linear import PackedLinear
from scripts.gpu_check.linear import BOUND, ROWS
from scripts.gpu_check.measure import Item, close, same, timed
from scripts.gpu_check.plan import BF16, RANKS, KernelCheck

SHAPE = (4096, 6144)  # inputs and outputs: queries, keys and values of Llama-3.1-8B
TIMED = {"down": (14336, 4096), "gate and up": (4096, 28672)}
TIMED_ROWS = (1, 16, 64, 256)


def checks(device: torch.device) -> Iterator[KernelCheck]:
    if device.type != "cuda":
        for name in FORMATS:
            items = partial(compare, name, (256, 40), torch.float32, (1, 17), 20, device)
            yield KernelCheck("correctness", f"linear, {name} blocks", 1, BF16, items)
        yield KernelCheck("timings", "linear, blocks", 1, BF16, partial(time, "tiny", (256, 96), (2,), device))
        return
    for name in FORMATS:
        items = partial(compare, name, SHAPE, torch.bfloat16, ROWS, 300, device)
        yield KernelCheck("correctness", f"linear, {torch.bfloat16}, {name} blocks", 1, BF16, items)
    for layer, shape in TIMED.items():
        items = partial(time, layer, shape, TIMED_ROWS, device)
        yield KernelCheck("timings", f"linear, {layer}, {torch.bfloat16}, blocks", 4, BF16, items)
    for dtype in (torch.float16, torch.float32):
        for name in ("Q4_1", "Q6_K"):
            items = partial(compare, name, (768, 1000), dtype, ROWS, 300, device)
            yield KernelCheck("correctness", f"linear, {dtype}, {name} blocks", 1, RANKS[dtype], items)


def random_rows(name: str, shape: tuple[int, int]) -> BlockRows:
    """Return random blocks whose weights have about the size that weights of so many inputs have."""
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


@torch.no_grad()
def compare(
    name: str, shape: tuple[int, int], dtype: torch.dtype, rows: tuple[int, ...], most: int, device: torch.device
) -> Iterator[Item]:
    """Compare `most` rows with float64, fewer of them with those, fused operations with separate ones, and weights."""
    inputs, outputs = shape
    stored = random_rows(name, shape)
    x, bias = torch.randn(most, inputs, device=device).to(dtype), torch.randn(outputs, device=device).to(dtype)
    case = f"{inputs} x {outputs}, {dtype}, {name}"
    linear = PackedLinear(BlockMatrix([stored], dtype, device), bias)
    ids = torch.arange(outputs - 1, -1, -7, device=device)

    def weight() -> Tensor:
        return dequantise(stored).to(device)

    output, residual = linear(x), torch.randn(most, outputs, device=device).to(dtype)
    yield close("linear, blocks", case, output, lambda: x.double() @ weight().double().T + bias.double(), BOUND[dtype])
    yield same("rows of blocks", case, linear.weight_rows(ids), lambda: weight()[ids].to(dtype))
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
    for name in FORMATS:
        linear = PackedLinear(BlockMatrix([random_rows(name, shape)], dtype, device))
        for count in rows:
            x = torch.randn(count, inputs, device=device).to(dtype)
            moved = linear.bytes + (x.numel() + count * outputs) * x.element_size()
            yield timed(f"linear, {name} blocks", f"{layer}, {count} rows, {dtype}", device, moved, linear, x)
