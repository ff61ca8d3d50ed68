"""doctor.py tries a layer of each kind: it names what computes it, and finds a kernel that is missing or wrong."""

from __future__ import annotations

import json
import os
from collections.abc import Callable

import pytest

from kernels.cpu.level import level
from kernels.cpu.library import library
from kernels.trials import Trial
from kernels.weights.ggml import FORMATS
from scripts.doctor import check_layer
from tests.forking import Run

PLANT = """
import sys
from scripts import doctor
from kernels.cpu.library import library
native = library()
native.attention_takes = lambda head_dim, value_dim: 0
native.linear = lambda arguments: None
sys.exit(doctor.main(["--json"]))
"""
needs_compiler = pytest.mark.skipif(library() is None, reason="no C compiler on this machine")


Doctor = Callable[..., tuple[int, dict[str, dict[str, str]]]]


@pytest.fixture
def doctor(forked: Run) -> Doctor:
    """Return what runs a command and returns the exit code and the checks of layers by their names."""

    def call(*command: str, **environment: str) -> tuple[int, dict[str, dict[str, str]]]:
        result = forked(command, env={**os.environ, "OMP_NUM_THREADS": "1", **environment})
        checks = {check["name"]: check for check in json.loads(result.stdout)["checks"]}
        return result.returncode, {name: check for name, check in checks.items() if name.startswith("layer: ")}

    return call


@needs_compiler
def test_every_kind_is_tried_and_named(doctor: Doctor) -> None:
    _, layers = doctor("scripts/doctor.py", "--json")
    kinds = [f"dense {dtype}" for dtype in ("float32", "bfloat16", "float16")]
    kinds += ["attention bfloat16", "int8", "int4", "fp8", *FORMATS, "int4 in groups", "layers in one call"]
    assert {f"layer: {kind}" for kind in [*kinds, "a head's level in one call"]} <= set(layers)
    assert all(check["status"] != "broken" for check in layers.values())
    assert layers["layer: Q4_1"]["detail"].startswith(f"C, {level()}, ")
    assert "GB/s" in layers["layer: Q4_1"]["detail"]
    assert "rows/s" in layers["layer: attention bfloat16"]["detail"]


@needs_compiler
def test_planted_kernels_that_are_missing_or_wrong_are_found(doctor: Doctor) -> None:
    code, layers = doctor("-c", PLANT)
    missing, wrong, sound = (layers[f"layer: {name}"] for name in ("attention float32", "Q4_K", "attention float16"))
    assert code == 1
    assert missing["status"] == "warning"
    assert missing["detail"].startswith("torch, in tiles")
    assert missing["fix"]
    assert wrong["status"] == "broken"
    assert "something else than float64" in wrong["detail"]
    assert "HEADWAY_CPU_KERNELS=torch" in wrong["fix"]
    assert sound["status"] == "ok"
    assert layers["layer: layers in one call"]["status"] == "warning"


def test_without_c_kernels_every_layer_is_computed_and_said_to_be_slow(doctor: Doctor) -> None:
    code, layers = doctor("scripts/doctor.py", "--json", HEADWAY_CPU_KERNELS="torch")
    assert code == 0
    assert {check["status"] for check in layers.values()} == {"ok"}, "the check `cpu kernels` has the one warning"
    assert all("slow (" in check["detail"] for check in layers.values())
    assert layers["layer: Q6_K"]["detail"].startswith("dequantized, ")


def test_a_trial_that_raises_is_broken_and_named() -> None:
    check = check_layer(Trial("Q4_0", "", fault="AttributeError: blocks_pack"), has_kernels=True)
    assert (check.name, check.status) == ("layer: Q4_0", "broken")
    assert check.detail == "nothing: AttributeError: blocks_pack"


def test_a_slow_layer_is_a_warning_unless_the_reason_is_another_checks() -> None:
    slow = Trial("int8", "a kernel in C", 1.0, slower="report it")
    warned = check_layer(slow, has_kernels=True)
    assert (warned.status, warned.fix) == ("warning", "report it")
    assert check_layer(slow, has_kernels=False).status == "ok"
    half = Trial("dense float16", "oneDNN in float32", 1.0, slower="another dtype")
    assert check_layer(half, has_kernels=True).status == "ok"
