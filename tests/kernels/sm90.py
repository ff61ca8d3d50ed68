"""Compiles Triton kernels for sm_90, which needs no GPU: registers, spills and shared memory of each.

A process of its own, because a kernel that was imported for the interpreter cannot be compiled:

    usage(["kernels.triton.choose:best_of_block", ...])
"""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

MOST_SHARED = 232448  # bytes that a block of an H100 or H200 can have; the compiler does not check
ROOT = Path(__file__).resolve().parents[2]


def usage(cases: list[dict[str, Any]]) -> list[dict[str, int]]:
    """Each case: `kernel` ("module:name"), `types` by argument, `constants`, `options`. Answers registers, spills
    (bytes a thread keeps in local memory), shared (bytes) and fused (multiply-adds that are rounded once).
    """
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("TRITON_", "HEADWAY_"))}
    command = [sys.executable, "-m", "tests.kernels.sm90"]
    done = subprocess.run(
        command, input=json.dumps(cases), capture_output=True, text=True, cwd=ROOT, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def compile_case(case: dict[str, Any]) -> dict[str, int]:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    module, name = case["kernel"].split(":")
    kernel = getattr(importlib.import_module(module), name)
    constants = case.get("constants", {})
    signature = {arg: "constexpr" if arg in constants else case["types"][arg] for arg in kernel.arg_names}
    aligned: Any = {
        (index,): [["tt.divisibility", 16]] for index, arg in enumerate(kernel.arg_names) if signature[arg][0] == "*"
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=case.get("options", {}))
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        shown = subprocess.run([str(tool), "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", shown)
    assert found, shown
    registers, stack, local = map(int, found.groups())
    fused = compiled.asm["ptx"].count("fma.rn")
    return {"registers": registers, "spills": stack + local, "shared": compiled.metadata.shared, "fused": fused}


if __name__ == "__main__":
    print(json.dumps([compile_case(case) for case in json.load(sys.stdin)]))
