"""Every dtype, weight format and level of processor, with and without C kernels: right, row-invariant, never an error.

Each level runs in processes of its own, in which torch, oneDNN and the compiler are restricted (kernels/cpu/level.py).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
import torch

from kernels import capabilities, slower
from kernels.attention import assert_rows_independent
from kernels.cpu.level import LEVELS, level
from kernels.cpu.library import library
from kernels.elementwise import Gate, gate_mul
from kernels.linear import PackedLinear

ROOT = Path(__file__).resolve().parents[2]
REACHED = LEVELS[: LEVELS.index(level()) + 1]
FORMATS = ("same", "int8", "fp8", "int4", "q8_0", "q4_0", "q5_1")
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def run_sweep() -> None:
    """Check every combination in this process; print what computed it, as JSON. The body of the test below."""
    from kernels.linear import assert_row_invariant
    from kernels.weights.groups import GroupedMatrix, why_unread
    from kernels.weights.quantize import quantize, widen
    from tests.kernels.grouped import make_groups

    generator, cpu, kernels = torch.Generator().manual_seed(0), torch.device("cpu"), dict[str, str]()
    for dtype, weight_format, bias in product(TOLERANCE, FORMATS, (False, True)):
        for inputs, outputs in ((64, 96), (96, 40), (100, 24)):
            if inputs % 32 and weight_format not in ("same", "int8", "fp8"):
                continue
            weight = (torch.randn(outputs, inputs, generator=generator) * inputs**-0.5).to(dtype)
            offset = torch.randn(outputs, generator=generator).to(dtype) if bias else None
            layer = PackedLinear(weight, offset, weight_format=weight_format)
            stored = weight.float()
            if weight_format in ("int8", "fp8", "int4"):
                stored = widen(*quantize(weight, weight_format))
            elif weight_format != "same":
                stored = None  # tests/kernels/test_blocks.py checks the values
            check(layer, dtype, stored, offset)
            kernels[f"{dtype} {weight_format} {inputs}"] = layer.kernel
            assert torch.equal(assert_row_invariant(layer, dtype, cpu), assert_row_invariant(layer, dtype, cpu))
        groups = make_groups(70, 384, "int4", 32, torch.float16, True, True)
        if why_unread(groups, dtype, cpu) is None:
            layer = PackedLinear(GroupedMatrix([groups], dtype))
            check(layer, dtype, groups.widened(), None)
            assert_row_invariant(layer, dtype, cpu)
    for dtype, dim in product(TOLERANCE, (8, 16, 64)):
        assert_rows_independent(4, 2, dim, dtype, cpu)
    print(json.dumps(kernels))


def check(layer: PackedLinear, dtype: torch.dtype, weight: torch.Tensor | None, bias: torch.Tensor | None) -> None:
    x = torch.randn(9, layer.in_features, generator=torch.Generator().manual_seed(1)).to(dtype)
    out = layer(x)
    assert (out.shape, out.dtype) == ((9, layer.out_features), dtype)
    if weight is not None:
        expected = x.double() @ weight.double().T + (0 if bias is None else bias.double())
        assert (out.double() - expected).abs().max() <= TOLERANCE[dtype] * expected.abs().max()


@pytest.mark.sources("kernels", "tests/kernels/grouped.py")
@pytest.mark.parametrize("kernels", ["c", "torch"])
@pytest.mark.parametrize("level", REACHED)
def test_every_combination_computes(level: str, kernels: str) -> None:
    switch = {"HEADWAY_CPU_KERNELS": "torch"} if kernels == "torch" else {}
    program = "import infer.options.environment\nfrom tests.kernels.test_slower_paths import run_sweep\nrun_sweep()"
    result = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "HEADWAY_CPU_LEVEL": level, **switch},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    computed = json.loads(result.stdout.splitlines()[-1])
    assert computed["torch.float16 same 64"] != "torch", "torch multiplies 16-bit rows some sixty times slower"
    if kernels == "torch":
        assert "a kernel in C" not in computed.values()


def test_16_bit_rows_are_widened_where_the_library_lacks_their_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """The result is that of fp32, rounded once; the weight comes out as it went in, and the bias may change."""
    monkeypatch.setattr("kernels.linear.runs_in_c", lambda *parts: False)
    monkeypatch.setattr("kernels.linear.product_dtype", lambda dtype: torch.float32)
    weight, bias, x = torch.randn(40, 64).bfloat16(), torch.randn(40).bfloat16(), torch.randn(7, 64).bfloat16()
    layer = PackedLinear(weight, bias)
    assert layer.kernel in ("oneDNN in float32", "torch in float32")
    unpacked = layer.unpacked_weight()
    assert unpacked is not None
    assert torch.equal(unpacked, weight)
    assert layer.bytes == 4 * weight.numel()
    bias.copy_(torch.randn(40))
    expected = x.double() @ weight.double().T + bias.double()
    assert ((layer(x).double() - expected).abs() <= 2**-8 * expected.abs() + 1e-4).all()


def test_without_onednn_torch_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*tensors: object) -> None:
        raise AttributeError("'_OpNamespace' 'mkldnn' object has no attribute '_reorder_linear_weight'")

    monkeypatch.setattr(capabilities, "prepack", missing)
    monkeypatch.setattr("kernels.linear.runs_in_c", lambda *parts: False)
    capabilities.onednn_multiplies.cache_clear()
    try:
        layer = PackedLinear(torch.randn(40, 64).half())
    finally:
        capabilities.onednn_multiplies.cache_clear()
    assert layer.kernel == "torch in float32"
    x = torch.randn(70, 64).half()
    assert torch.equal(layer(x)[:3], layer(x[:3]))


def test_attention_is_invariant_with_a_library_that_sums_in_an_order_by_shape() -> None:
    """Under MKL_CBWR=COMPATIBLE, MKL's products of few rows have other bits than those of many."""
    program = (
        "import infer.options.environment, torch\nfrom kernels.attention import assert_rows_independent\n"
        "for dim in (8, 16, 64): assert_rows_independent(4, 2, dim, torch.float32, torch.device('cpu'))"
    )
    switches = {"HEADWAY_CPU_KERNELS": "torch", "MKL_CBWR": "COMPATIBLE"}
    subprocess.run([sys.executable, "-c", program], env={**os.environ, **switches}, cwd=ROOT, timeout=900, check=True)


@pytest.mark.parametrize("gate", ["silu", "gelu"])
def test_activations_in_torch_do_not_depend_on_rows_or_threads(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch divides large tensors among threads anywhere, and computes the end of a part by other functions."""
    monkeypatch.setattr("kernels.elementwise.library", lambda: None)
    before, x = torch.get_num_threads(), torch.randn(513, 2 * 1544, generator=torch.Generator().manual_seed(0))
    try:
        with torch.no_grad():
            alone = torch.cat([gate_mul(row[None], gate) for row in x])
            for threads in (1, 2, 3):
                torch.set_num_threads(threads)
                assert all(torch.equal(gate_mul(x[:count], gate), alone[:count]) for count in (1, 7, 64, 333, 513))
    finally:
        torch.set_num_threads(before)


def test_what_computes_slower_is_said_once_with_what_is_faster(monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    wide, half = PackedLinear(torch.zeros(8, 64)), PackedLinear(torch.zeros(8, 64).half())
    monkeypatch.setattr(wide, "native", None)
    monkeypatch.setattr(type(wide), "kernel", "oneDNN")
    monkeypatch.setattr(type(wide), "on_cpu", True)
    monkeypatch.setattr(slower, "library", lambda: None)
    monkeypatch.setattr(slower, "compiler", lambda: None)
    slower.say_once.cache_clear()
    lines = slower.slower_layers([wide, half, half], "engine.weights")
    assert len(lines) == 2
    assert lines[0].endswith("faster: install a C compiler (Debian: apt-get install gcc)")
    assert "float16" in lines[1]
    assert "model.dtype=bfloat16" in lines[1]
    slower.say_slower(lines)
    slower.say_slower(lines)
    assert len(caplog.records) == 2
    monkeypatch.setenv("HEADWAY_CPU_KERNELS", "torch")
    assert "unset HEADWAY_CPU_KERNELS" in slower.slower_layers([wide], "engine.weights")[0]


def test_attention_names_its_own_options() -> None:
    cpu = torch.device("cpu")
    assert "engine.kv_dtype=same" in slower.slower_attention(64, torch.bfloat16, cpu, torch.float8_e4m3fn)[0]
    assert "model.dtype=" in slower.slower_attention(64, torch.float16, cpu)[0]
    assert (slower.slower_attention(64, torch.bfloat16, cpu) == []) == (library() is not None)


def test_probes_ask_the_machine() -> None:
    assert capabilities.product_dtype(torch.float32) is torch.float32
    assert capabilities.product_dtype(torch.float64) is torch.float64
