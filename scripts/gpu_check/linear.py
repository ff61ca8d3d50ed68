"""Linear layers: checks against float64 and for batch invariance, and times beside those of the library."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.elementwise import silu_mul
from kernels.linear import PackedLinear
from kernels.quantise import TargetFormat, quantise, widen
from scripts.gpu_check.measure import Item, close, same, timed
from scripts.gpu_check.plan import RANKS, SERVED, KernelCheck

BOUND = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}
SHAPES = {  # of Llama-3.1-8B: inputs and outputs
    "qkv": (4096, 6144),
    "o": (4096, 4096),
    "gate and up": (4096, 28672),
    "down": (14336, 4096),
    "LM head": (4096, 128256),
}
ODD_SIZES, ODD = "odd sizes", (4096, 1000)
FORMATS: tuple[TargetFormat, ...] = ("same", "int8", "fp8", "int4")
ROWS = (1, 2, 15, 16, 17, 33, 64, 65, 80, 128, 200, 256)  # on both sides of every change of tile
TIMED_ROWS = (1, 16, 32, 64, 80, 128, 256, 512)


def checks(device: torch.device) -> Iterator[KernelCheck]:
    if device.type != "cuda":
        for weight_format in FORMATS:
            items = partial(compare, ODD_SIZES, (96, 40), torch.float32, weight_format, (1, 17, 65), 70, device)
            yield KernelCheck("correctness", f"linear, weights {weight_format}", 1, SERVED, items)
        yield KernelCheck("timings", "linear", 1, SERVED, partial(time, "tiny", (64, 96), torch.float32, (2,), device))
        return
    for name, shape in SHAPES.items():
        formats = FORMATS if name != "LM head" else FORMATS[:1]  # packing it takes several GB
        for weight_format in formats:
            items = partial(compare, name, shape, torch.bfloat16, weight_format, ROWS, 300, device)
            yield KernelCheck("correctness", f"linear, {name}, weights {weight_format}", 1, SERVED, items)
        items = partial(time, name, shape, torch.bfloat16, TIMED_ROWS, device)
        yield KernelCheck("timings", f"linear, {name}", 5 if name == "LM head" else 2, SERVED, items)
    for dtype, rank in RANKS.items():
        for weight_format in FORMATS:
            items = partial(compare, ODD_SIZES, ODD, dtype, weight_format, ROWS, 700, device)
            yield KernelCheck("correctness", f"linear, {ODD_SIZES}, {dtype}, weights {weight_format}", 1, rank, items)


@torch.no_grad()
def compare(
    layer: str,
    shape: tuple[int, int],
    dtype: torch.dtype,
    weight_format: TargetFormat,
    rows: tuple[int, ...],
    most: int,
    device: torch.device,
) -> Iterator[Item]:
    """Compare `most` rows with float64, fewer of them with those, and fused operations with separate ones."""
    inputs, outputs = shape
    weight = (torch.randn(outputs, inputs, device=device) * inputs**-0.5).to(dtype)
    x, bias = torch.randn(most, inputs, device=device).to(dtype), torch.randn(outputs, device=device).to(dtype)
    case = f"{inputs} x {outputs}, {dtype}, weights {weight_format}"
    linear = PackedLinear(weight, bias, weight_format=weight_format)

    def true() -> Tensor:
        wide = weight if weight_format == "same" else widen(*quantise(weight, weight_format))
        return x.double() @ wide.double().T + bias.double()

    output = linear(x)
    yield close("linear", case, output, true, BOUND[dtype])
    for count in rows:
        yield same("linear, bits", f"{count} rows of {most}, {case}", linear(x[-count:]), output[-count:])
    if layer in ("o", "down", ODD_SIZES):
        residual = torch.randn(most, outputs, device=device).to(dtype)
        total = residual + output
        for count in (*rows, most):
            actual = linear.add(residual[-count:], x[-count:])
            yield same("linear and sum, bits", f"{count} rows of {most}, {case}", actual, total[-count:])
    if layer in ("gate and up", ODD_SIZES):
        gated = silu_mul(output)
        for count in (*rows, most):
            actual = linear.gated(x[-count:], "silu")
            yield same("linear and activation, bits", f"{count} rows of {most}, {case}", actual, gated[-count:])


def time(
    name: str, shape: tuple[int, int], dtype: torch.dtype, rows: tuple[int, ...], device: torch.device
) -> Iterator[Item]:
    """Time every weight format, and F.linear as "linear, library": the difference is the cost of batch invariance."""
    inputs, outputs = shape
    weight = (torch.randn(outputs, inputs, device=device) * inputs**-0.5).to(dtype)
    linears = {f"linear, weights {fmt}": PackedLinear(weight, weight_format=fmt) for fmt in FORMATS}
    for count in rows:
        x = torch.randn(count, inputs, device=device).to(dtype)
        case = f"{name}, {count} rows, {dtype}"
        others = (x.numel() + count * outputs) * x.element_size()
        for kernel, linear in linears.items():
            yield timed(kernel, case, device, linear.bytes + others, linear, x)
        moved = weight.numel() * weight.element_size() + others
        yield timed("linear, library", case, device, moved, F.linear, x, weight)
