"""Compiles Triton kernels for sm_90 as they would be launched, without a GPU; not in a process with TRITON_INTERPRET.

    python -m tests.kernels.triton.compiled MODULE

calls the cases of MODULE (`CASES`: name -> function without arguments, on tensors of device "meta"), records kernel,
arguments and options in place of each launch, compiles them, and prints a JSON object: name -> the compiler's report.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kernels.cpu.library import cache_folder

ROOT = Path(__file__).resolve().parents[3]
SHARED_LIMIT = 227 * 1024  # of a block on sm_90; the compiler does not check it


def oldest_triton() -> Path | None:
    """Return the folder where scripts/setup_env.sh has installed the oldest Triton that pyproject.toml allows."""
    (version,) = re.findall(r'"triton>=([\d.]+),', (ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    folder = cache_folder() / f"triton-{version}-{sys.implementation.cache_tag}"
    return folder if folder.is_dir() else None


def compile_in_new_process(module: str, triton: Path | None = None) -> dict[str, list[dict[str, Any]]]:
    """Return, per case and kernel launched, what `compile_launch` reports; `triton`: a folder to import it from."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    if triton is not None:
        environment["PYTHONPATH"] = str(triton)
    command = [sys.executable, "-m", "tests.kernels.triton.compiled", module]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if result.returncode:
        pytest.fail(result.stderr[-4000:])
    return json.loads(result.stdout)


def launches_of(case: Callable[[], object]) -> list[tuple[Any, dict[str, Any]]]:
    """Return the kernels that the case launches, with their arguments and options by name."""
    from triton.runtime.jit import JITFunction

    launches: list[tuple[Any, dict[str, Any]]] = []
    original = JITFunction.run

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        launches.append((self, {**dict(zip(self.arg_names, args, strict=False)), **options}))

    JITFunction.run = run  # type: ignore[method-assign]
    try:
        case()
    finally:
        JITFunction.run = original  # type: ignore[method-assign]
    return launches


def compile_launch(kernel: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return name, registers, spilled bytes, shared memory, certain PTX instructions and `float_sums` of a kernel."""
    import torch
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature, constants, attributes = {}, {}, {}
    for index, parameter in enumerate(kernel.params):
        value = arguments[parameter.name]
        if isinstance(value, torch.Tensor):
            signature[parameter.name] = "*" + POINTERS[value.dtype]
            attributes[(index,)] = [["tt.divisibility", 16]]
        elif parameter.is_constexpr or value is None or (type(value) is int and value == 1):
            signature[parameter.name], constants[parameter.name] = "constexpr", value
        elif isinstance(value, float):
            signature[parameter.name] = "fp32"
        else:
            signature[parameter.name] = "i32"
            if value % 16 == 0:
                attributes[(index,)] = [["tt.divisibility", 16]]
    options = {name: value for name, value in arguments.items() if name not in kernel.arg_names and name != "debug"}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    usage = resources(compiled.asm["cubin"])
    ptx = compiled.asm["ptx"]
    marks = {mark: mark in ptx for mark in ("wgmma", "mma.sync", "cp.async", "fma.rn")}
    sums = float_sums(compiled.asm["ttgir"])
    return {"kernel": kernel.__name__, "shared": compiled.metadata.shared, "float_sums": sums, **usage, **marks}


def float_sums(ttgir: str) -> list[str]:
    """Return the operand's type of each reduction that adds floating-point numbers, its layout written out.

    The layout decides in which order the numbers are added, so two variants of a kernel sum alike if it is the same.
    """
    layouts = dict(re.findall(r"^(#\w+) = (.*)$", ttgir, re.MULTILINE))
    reductions = re.findall(r'"tt\.reduce"\(.*?\}\) : \((.*?)\) ->', ttgir, re.DOTALL)
    bodies = re.findall(r'"tt\.reduce"\((.*?)\}\) : ', ttgir, re.DOTALL)
    adding = [operand for operand, body in zip(reductions, bodies, strict=True) if "arith.addf" in body]
    return [re.sub(r"#\w+", lambda name: layouts.get(name[0], name[0]), operand) for operand in adding]


def resources(cubin: bytes) -> dict[str, int]:
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    registers, stack, local = (int(value) for value in re.findall(r"(?:REG|STACK|LOCAL):(\d+)", text))
    return {"registers": registers, "spilled": stack + local}


def main(module: str) -> None:
    import torch

    POINTERS.update({
        torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.float8_e4m3fn: "fp8e4nv",
        torch.float64: "fp64", torch.int8: "i8", torch.int32: "i32", torch.int64: "i64", torch.bool: "i1",
    })  # fmt: skip
    cases = importlib.import_module(module).CASES
    compiled = {name: [compile_launch(*launch) for launch in launches_of(case)] for name, case in cases.items()}
    print(json.dumps(compiled))


POINTERS: dict[Any, str] = {}

if __name__ == "__main__":
    main(sys.argv[1])
