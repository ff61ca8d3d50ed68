"""Linear layers: checks against float64 and for batch invariance, and times beside those of the library."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from kernels.linear import PackedLinear
from kernels.quantise import WeightFormat, quantise, widen
from scripts.gpu_check.measure import close, same, timed

BOUND = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}
SHAPES = {  # of Llama-3.1-8B: inputs and outputs
    "qkv": (4096, 6144),
    "o": (4096, 4096),
    "gate and up": (4096, 28672),
    "down": (14336, 4096),
    "LM head": (4096, 128256),
}
FORMATS: tuple[WeightFormat, ...] = ("same", "int8", "fp8", "int4")


def correctness(device: torch.device) -> list[dict[str, Any]]:
    results = []
    on_gpu = device.type == "cuda"
    inputs, outputs, max_rows = (4096, 1000, 700) if on_gpu else (96, 40, 70)
    for dtype in BOUND if on_gpu else (torch.float32,):
        weight = (torch.randn(outputs, inputs, device=device) * inputs**-0.5).to(dtype)
        x, bias = torch.randn(max_rows, inputs, device=device).to(dtype), torch.randn(outputs, device=device).to(dtype)
        for weight_format in FORMATS:
            case = f"{inputs} x {outputs}, {dtype}, weights {weight_format}"
            linear = PackedLinear(weight, bias, weight_format=weight_format)
            wide = weight if weight_format == "same" else widen(*quantise(weight, weight_format))
            output = linear(x)
            results.append(close("linear", case, output, x.double() @ wide.double().T + bias.double(), BOUND[dtype]))
            for rows in (1, 2, 15, 16, 17, 33, 64, 65, 200) if on_gpu else (1, 17, 65):
                results.append(
                    same("linear, bits", f"{rows} rows of {max_rows}, {case}", linear(x[-rows:]), output[-rows:])
                )
    return results


def timings(device: torch.device) -> list[dict[str, Any]]:
    """Time every weight format, and F.linear as "linear, library": the difference is the cost of batch invariance."""
    results = []
    on_gpu = device.type == "cuda"
    dtype = torch.bfloat16 if on_gpu else torch.float32
    for name, (inputs, outputs) in SHAPES.items() if on_gpu else [("tiny", (64, 96))]:
        weight = (torch.randn(outputs, inputs, device=device) * inputs**-0.5).to(dtype)
        linears = {f"linear, weights {fmt}": PackedLinear(weight, weight_format=fmt) for fmt in FORMATS}
        for rows in (1, 16, 32, 64, 512) if on_gpu else (2,):
            x = torch.randn(rows, inputs, device=device).to(dtype)
            case = f"{name}, {rows} rows, {dtype}"
            others = (x.numel() + rows * outputs) * x.element_size()
            for kernel, linear in linears.items():
                results.append(timed(kernel, case, device, linear.bytes + others, linear, x))
            moved = weight.numel() * weight.element_size() + others
            results.append(timed("linear, library", case, device, moved, F.linear, x, weight))
    return results
