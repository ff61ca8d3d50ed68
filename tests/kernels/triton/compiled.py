"""Compiles Triton kernels as they would be launched, without a GPU; not in a process with TRITON_INTERPRET.

    python -m tests.kernels.triton.compiled MODULE [CAPABILITY]

calls the cases of MODULE (`CASES`: name -> function without arguments, on tensors of device "meta"), records kernel,
arguments and options in place of each launch, compiles them for a device of DEVICES (90 if none is named), and prints a
JSON object: name -> the compiler's report, registers and shared memory among it. Of the kernels that MODULE names in
`DISASSEMBLED` it has the tensor cores' instructions.
"""

from __future__ import annotations

import importlib
import importlib.metadata
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

from kernels.cache import cache_folder
from kernels.triton import device
from kernels.triton.device import HOPPER, Limits

ROOT = Path(__file__).resolve().parents[3]
A100 = Limits(capability=80, multiprocessors=108, shared_memory=163 * 1024)
L40S = Limits(capability=89, multiprocessors=142, shared_memory=99 * 1024)
B200 = Limits(capability=100, multiprocessors=148, shared_memory=227 * 1024)
RTX_PRO = Limits(capability=120, multiprocessors=188, shared_memory=99 * 1024)  # RTX PRO 6000 Blackwell
DEVICES = {
    limits.capability: limits for limits in (A100, L40S, HOPPER, B200, RTX_PRO)
}  # the compiler does not check shared memory


def allowed_tritons(pyproject: str) -> tuple[str, str]:
    """Return the oldest and the newest Triton that it allows, as in 3.6 and 3.9."""
    ((oldest, major, minor),) = re.findall(r'"triton>=([\d.]+),<(\d+)\.(\d+)', pyproject)
    return oldest, f"{major}.{int(minor) - 1}"


INSTALLED = "installed"
OLDEST, NEWEST = allowed_tritons((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
TRITONS = (INSTALLED, *os.environ.get("HEADWAY_TRITONS", OLDEST).split())  # that most tests compile with


def most_spilled(triton: str = INSTALLED) -> int:
    """Return how many bytes of a thread that Triton's compiler spills at most, in kernels that 3.7 compiles without."""
    version = importlib.metadata.version("triton") if triton == INSTALLED else triton
    return 16 if version.startswith("3.9") else 0


def compile_in_new_process(
    module: str, capability: int = 90, *, triton: str = INSTALLED
) -> dict[str, list[dict[str, Any]]]:
    """Return, per case and kernel launched, what `compile_launch` reports; `triton`: the version that compiles."""
    return run_in_new_process("tests.kernels.triton.compiled", module, str(capability), triton=triton)


def run_in_new_process(*command: str, triton: str = INSTALLED, interprets: bool = False) -> dict[str, Any]:
    """Return what a module prints, run by that Triton, compiled or interpreted. Skips the test if it is not there."""
    environment = {**os.environ, "TRITON_INTERPRET": str(int(interprets))}
    if triton != INSTALLED:
        folder = cache_folder() / f"triton-{triton}-{sys.implementation.cache_tag}"
        if not folder.is_dir():
            pytest.skip(f"Triton {triton} does not lie at {folder}: HEADWAY_TRITONS={triton} scripts/test.sh gets it")
        environment["PYTHONPATH"] = str(folder)
    arguments = [sys.executable, "-m", *command]
    result = subprocess.run(arguments, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
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


def compile_launch(
    kernel: Any, arguments: dict[str, Any], capability: int, *, disassembles: bool, counts_fused: bool = False
) -> dict[str, Any]:
    """Return name, shared memory, registers, spilled bytes and options of a kernel, and how it sums: certain PTX
    instructions, the tensor cores' `products` in order if it `disassembles`, which takes as long as to compile,
    `float_sums` and `cyclic` products. `specialized`: its integers that are. `fused`: products that the assembler
    fused with sums, if it `counts_fused`, which takes as long again.
    `early`: the pointers from which memory is accessed ahead of the wait for the kernel before; None if there is no
    such wait.
    """
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
        elif parameter.is_constexpr or value is None or (value == 1 and specialized(parameter, value)):
            signature[parameter.name], constants[parameter.name] = "constexpr", value
        elif isinstance(value, float):
            signature[parameter.name] = "fp32"
        else:
            signature[parameter.name] = "i32"
            if value % 16 == 0 and specialized(parameter, value):
                attributes[(index,)] = [["tt.divisibility", 16]]
    options = {name: value for name, value in arguments.items() if name not in kernel.arg_names and name != "debug"}
    variant = repr((kernel.__name__, signature, constants, attributes, options))
    if variant in COMPILED:
        return COMPILED[variant]
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    cubin, ptx = compiled.asm["cubin"], compiled.asm["ptx"]
    marks = {mark: mark in ptx for mark in ("wgmma", "tcgen05.mma", "mma.sync", "cp.async", "fma.rn")}
    before, wait, _ = ptx.partition("griddepcontrol.wait")
    passed = [(name, kind) for name, kind in signature.items() if kind != "constexpr"]
    report = {
        "kernel": kernel.__name__,
        "early": early_accesses(before, passed) if wait else None,
        "shared": compiled.metadata.shared,
        **resources(cubin),
        **marks,
        "products": products(cubin) if disassembles and (marks["wgmma"] or marks["mma.sync"]) else [],
        "fused": fused(ptx, cubin, capability) if counts_fused else 0,
        "float_sums": float_sums(compiled.asm["ttgir"]),
        "cyclic": cyclic_products(compiled.asm["ttir"]),
        "specialized": [p.name for p in kernel.params if not p.is_constexpr and specialized(p, arguments[p.name])],
        "options": options | {p.name: arguments[p.name] for p in kernel.params if p.is_constexpr},
    }
    return COMPILED.setdefault(variant, report)


def specialized(parameter: Any, value: Any) -> bool:
    """Return whether Triton compiles a kernel apart for an integer argument of 1 or of a multiple of 16."""
    return type(value) is int and not parameter.do_not_specialize


def early_accesses(ptx: str, types: list[tuple[str, str]]) -> list[list[str]]:
    """Return the kind of each access to memory in a kernel's first lines, and the pointers that its address is
    computed from. types: name and type of each parameter.
    """
    sources = {f"param_{index}": {name} for index, (name, kind) in enumerate(types) if kind.startswith("*")}
    accesses = set()
    for name, operands in re.findall(r"^\s*(?:@!?%p\d+ )?([a-z][\w.:]+)[ \t]+(\S.*);", ptx, re.MULTILINE):
        places = re.findall(r"%rd?\d+|param_\d+", operands)
        if re.fullmatch(ACCESS, name) and ".shared" not in name:
            address = re.findall(r"\[ ?(%rd\d+)", operands)[0]
            accesses.add((name.partition(".")[0], *sorted(sources[address])))
        elif places:
            written, *read = places
            sources[written] = set().union(*(sources.get(place, set()) for place in read))
    return sorted(map(list, accesses))


def float_sums(ttgir: str) -> list[str]:
    """Return the operand's type of each reduction that adds floating-point numbers, its layout written out.

    The layout decides in which order the numbers are added, so two variants of a kernel sum alike if it is the same.
    """
    layouts = dict(re.findall(r"^(#\w+) = (.*)$", ttgir, re.MULTILINE))
    reductions = re.findall(r'"tt\.reduce"\(.*?\}\) : \((.*?)\) ->', ttgir, re.DOTALL)
    bodies = re.findall(r'"tt\.reduce"\((.*?)\}\) : ', ttgir, re.DOTALL)
    adding = [operand for operand, body in zip(reductions, bodies, strict=True) if "arith.addf" in body]
    return [re.sub(r"#\w+", lambda name: layouts.get(name[0], name[0]), operand) for operand in adding]


def cyclic_products(ttir: str) -> list[str]:
    """Return the products that add to a loop's accumulator and whose sum another product adds to in the same iteration.

    On Blackwell Triton 3.6 to 3.8 lets the first of the next iteration overtake the second (triton 10821, 10858).
    """
    carried = set(re.findall(r"(%\w+) = ", " ".join(re.findall(r"iter_args\((.*?)\)", ttir))))
    dots = re.findall(r"(%\w+) = tt\.dot (%\w+), (%\w+), (%\w+)", ttir)
    into = {accumulator for *_, accumulator in dots}
    return [product for product, _, _, accumulator in dots if accumulator in carried and product in into]


def resources(cubin: bytes) -> dict[str, int]:
    registers, stack, local = (int(n) for n in re.findall(r"(?:REG|STACK|LOCAL):(\d+)", dump(cubin, "-res-usage")))
    return {"registers": registers, "spilled": stack + local}


def products(cubin: bytes) -> list[tuple[str, str, str]]:
    """Return the tensor cores' instructions as ("HGMMA.64x16x16.F32.BF16", register of the sum, register added to)."""
    lines = re.findall(r"\*/\s+((?:HGMMA|HMMA)\S+) ([^;]*)", dump(cubin, "-sass"))
    operands = [(name, [part for part in rest.split(", ") if re.match(r"R(Z|\d+)", part)]) for name, rest in lines]
    return [(name, registers[0], registers[-1].split()[0]) for name, registers in operands]


def fused(ptx: str, cubin: bytes, capability: int) -> int:
    """Return how many fused multiply-adds the assembler made of multiplications and additions that PTX rounds apart.

    A division has fused ones as well, so the kernel is assembled once more with products that are rounded to zero,
    which no addition that rounds to nearest can take up.
    """
    from triton.backends.nvidia.compiler import sm_arch_from_capability

    from kernels.triton.assembler import ptxas

    product = r"\bmul\.rn(?=\.f(?:32|64))"
    if not re.search(product, ptx):
        return 0
    with tempfile.TemporaryDirectory() as folder:
        source, out = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        source.write_text(re.sub(product, "mul.rz", ptx), encoding="utf-8")
        flags = ["--fmad=false", f"--gpu-name={sm_arch_from_capability(capability)}"]
        command = [str(ptxas(capability)), *flags, str(source), "-o", str(out)]
        subprocess.run(command, capture_output=True, check=True)
        made, apart = (len(re.findall(r"\b[FD]FMA2?\b", dump(each, "-sass"))) for each in (cubin, out.read_bytes()))
    return made - apart


def dump(cubin: bytes, option: str) -> str:
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([tool, option, file.name], capture_output=True, text=True, check=True).stdout


def main(module: str, capability: int) -> None:
    import torch

    POINTERS.update({
        torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.float8_e4m3fn: "fp8e4nv",
        torch.float64: "fp64", torch.int8: "i8", torch.int16: "i16", torch.int32: "i32",
        torch.int64: "i64", torch.bool: "i1",
    })  # fmt: skip
    device.without_gpu = DEVICES[capability]  # a module's cases may depend on it
    launched = importlib.import_module(module)
    cases, disassembled, counts_fused = launched.CASES, launched.DISASSEMBLED, getattr(launched, "COUNTS_FUSED", False)
    compiled = {
        name: [
            compile_launch(
                kernel, arguments, capability, disassembles=kernel.__name__ in disassembled, counts_fused=counts_fused
            )
            for kernel, arguments in launches_of(case)
        ]
        for name, case in cases.items()
    }
    print(json.dumps(compiled))


ACCESS = r"\b(?:ld|st|cp|red|atom|prefetch)\.(?!param)[\w.:]+"  # to memory, in PTX
POINTERS: dict[Any, str] = {}
COMPILED: dict[str, dict[str, Any]] = {}  # reports by variant

if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 90)
