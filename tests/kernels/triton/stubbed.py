"""Launches with a driver that records them, without a GPU; not in a process with TRITON_INTERPRET.

    python -m tests.kernels.triton.stubbed

compiles the kernels of CASES for sm_90 and prints a JSON object: name -> what Triton's own launch and this repository's
give to the driver, how often Triton launched, and microseconds of Python for a call.
"""

from __future__ import annotations

import json
import sys
import timeit
from collections.abc import Callable
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from kernels.operands import QKNorm
from kernels.rows import AttentionRows
from kernels.triton import launch
from kernels.triton.attention import TritonAttention
from kernels.triton.elementwise import add_rms_norm, norm_beside, rms_norm
from kernels.triton.ggml import ggml_linear
from kernels.triton.linear import linear
from kernels.triton.residual import residual_silu
from kernels.triton.rotary import rotate_and_write
from kernels.weights.ggml_tiles import empty_tiles

RECORDED: list[list[Any]] = []
BY_TRITON: list[str] = []
DEVICES = [0]  # the last is current


class Utils:
    def load_binary(self, name: str, binary: bytes, shared: int, device: int) -> tuple[object, ...]:
        return None, hash((binary, device)), 32, 0, 1024

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 232448, "warpSize": 32, "max_num_regs": 65536}


class Launcher:
    def __init__(self, source: Any, metadata: Any) -> None:
        self.options = metadata.num_warps, metadata.num_stages, metadata.launch_pdl

    def __call__(self, x: int, y: int, z: int, stream: int, function: int, packed: Any, _: Any, *rest: Any) -> None:
        RECORDED.append([[x, y, z], stream, function, list(map(str, packed)), *self.options, rest[2:]])


class Driver:
    launcher_cls, utils = Launcher, Utils()

    def get_current_device(self) -> int:
        return DEVICES[-1]

    def get_current_stream(self, device: int) -> int:
        return 7 + device

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


def described(argument: Any) -> object:
    if isinstance(argument, torch.Tensor):
        return [str(argument.dtype), list(argument.shape), list(argument.stride()), argument.data_ptr() % 16]
    return argument


def multiply(rows: int, shift: int = 0, *, added: bool = False, gate: Any = None) -> Callable[[], object]:
    """`shift`: columns by which x's rows begin past an aligned address."""
    x, weight = torch.zeros(rows, 272, dtype=torch.bfloat16), torch.zeros(512, 256, dtype=torch.bfloat16)
    residual = torch.zeros(rows, 512, dtype=torch.bfloat16) if added else None
    return lambda: linear(x[:, shift : shift + 256], weight, residual=residual, gate=gate)


def multiply_blocks() -> Callable[[], object]:
    tiles = empty_tiles("Q6_K", 512, 256, torch.device("cpu"))
    x, residual = torch.zeros(3, 256, dtype=torch.bfloat16), torch.zeros(3, 512, dtype=torch.bfloat16)
    return lambda: ggml_linear(x, [tiles], residual=residual)


def residuals() -> Callable[[], object]:
    x, weight = torch.zeros(2, 3, 256, dtype=torch.bfloat16), torch.zeros(2, 256, 256, dtype=torch.bfloat16)
    return lambda: residual_silu(x, weight)


def attend(tree: bool, *, whole: bool = False) -> Callable[[], object]:
    rows, table = 3, torch.arange(128)[None] + 1
    tree_mask = torch.tensor([1, 3, 5]) if tree else None
    index = torch.zeros(rows, dtype=torch.int64)
    laid_out = AttentionRows(table, index, index + 600, torch.arange(rows), tree_mask, 16, 2048, (rows,))
    cache = torch.zeros(2, 2, 16 * 129, 64, dtype=torch.bfloat16)
    plan = TritonAttention(laid_out, 8, 2, 64, torch.bfloat16, whole=whole)
    q = torch.zeros(rows, 8, 64, dtype=torch.bfloat16)
    return lambda: plan.read(q, cache, 0.125)


def rotate() -> Callable[[], object]:
    qkv, angles = torch.zeros(3, 12, 64, dtype=torch.bfloat16), torch.zeros(3, 1, 64, dtype=torch.bfloat16)
    cache, slots = torch.zeros(2, 2, 64, 64, dtype=torch.bfloat16), torch.arange(3)
    norm = QKNorm(angles[0, 0], angles[1, 0], 1e-5)
    return lambda: rotate_and_write(qkv, angles, angles, norm, slots, cache, 8)


def norm(add: bool) -> Callable[[], object]:
    x, weight = torch.zeros(3, 256, dtype=torch.bfloat16), torch.zeros(256, dtype=torch.bfloat16)
    return (lambda: add_rms_norm(x, x, weight, 1e-5)) if add else lambda: rms_norm(x, weight, 1e-5)


def norms() -> Callable[[], object]:
    x, weight = torch.zeros(3, 256, dtype=torch.bfloat16), torch.zeros(256, dtype=torch.bfloat16)
    return lambda: norm_beside(x, x, weight, weight, 1e-5)


CASES = {
    "linear, 1 row": multiply(1),
    "linear, 16 rows": multiply(16),
    "linear, rows that are not aligned": multiply(16, 1),
    "linear, added": multiply(3, added=True),
    "linear, activated": multiply(3, gate="silu"),
    "linear, blocks": multiply_blocks(),
    "residual blocks": residuals(),
    "norms beside each other": norms(),
    "norm": norm(False),
    "sum and norm": norm(True),
    "rotation": rotate(),
    "attention": attend(False),
    "attention, whole": attend(False, whole=True),
    "attention, tree": attend(True),
}


def recorded(case: Callable[[], object]) -> tuple[list[list[object]], int]:
    """Return what the driver was given, and how many of these launches were Triton's own."""
    RECORDED.clear()
    BY_TRITON.clear()
    case()
    return [[*launched, [described(each) for each in passed]] for *launched, passed in RECORDED], len(BY_TRITON)


def main(repeats: int) -> None:
    driver.set_active(Driver())  # pyright: ignore[reportArgumentType]
    original, observed = JITFunction.run, launch.observed

    def run(self: Any, *args: Any, **options: Any) -> Any:
        BY_TRITON.append(self.__name__)
        return original(self, *args, **options)

    JITFunction.run = run  # type: ignore[method-assign]
    report = {}
    for name, case in CASES.items():
        launch.observed = lambda kernel: True
        expected, _ = recorded(case)
        launch.observed = observed
        actual, by_triton = recorded(case)
        DEVICES.append(1)
        elsewhere, first = recorded(case)
        DEVICES.pop()
        report[name] = {"expected": expected, "actual": actual, "by_triton": by_triton, "elsewhere": elsewhere}
        report[name] |= {"first": first}
        if repeats:
            report[name]["us"] = min(timeit.repeat(case, RECORDED.clear, number=repeats, repeat=20)) / repeats * 1e6
    print(json.dumps(report))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 0)
