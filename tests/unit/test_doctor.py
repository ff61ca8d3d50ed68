"""doctor.py: each trap is recognised, each finding has a fix, and this environment has nothing broken."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from kernels.triton.assembler import version_in_use
from scripts import doctor
from tests.forking import Run

ROOT = Path(__file__).resolve().parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
GIB = 2**30


def run_doctor(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "scripts" / "doctor.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)


def test_this_environment_is_sound() -> None:
    result = run_doctor("--json")
    report = json.loads(result.stdout)
    assert [check for check in report["checks"] if check["status"] == "broken"] == []
    assert (result.returncode, report["ok"]) == (0, True)
    names = [check["name"] for check in report["checks"]]
    assert len(names) == len(set(names))
    for name in ("python", "torch", "kernels package", "demo target", "devices", "cpu", "threads"):
        assert name in names


def test_the_table_shows_every_check_and_its_fix(forked: Run) -> None:
    result = forked(["scripts/doctor.py"], env={**os.environ, "TRITON_INTERPRET": "1"})
    assert result.returncode == 0  # a warning is no failure
    line = next(i for i, text in enumerate(result.stdout.splitlines()) if "TRITON_INTERPRET=1" in text)
    assert result.stdout.splitlines()[line].startswith("warn")
    assert result.stdout.splitlines()[line + 1].strip() == "fix: unset TRITON_INTERPRET"


def test_unknown_options_are_refused() -> None:
    result = run_doctor("--jsn")
    assert (result.returncode, result.stdout) == (2, "")
    assert "unrecognized arguments: --jsn" in result.stderr


def test_requirements_are_those_of_the_pyproject() -> None:
    extras = {requirement.name: extra for extra, requirement in doctor.requirements(PYPROJECT)}
    assert extras["torch"] == ""
    assert extras["accelerate"] == "train"
    assert extras["fastapi"] == "serve"
    assert extras["pytest"] == "dev"
    assert "headway" not in extras


@pytest.mark.parametrize(
    ("version", "allowed"),
    [
        ("2.13.0+cpu", True),
        ("2.13.0", True),
        ("2.11.0", True),
        ("2.10.0", False),
        ("2.14.1", True),
        ("2.15.0", False),
        (None, False),
    ],
)
def test_torch_bound(version: str | None, allowed: bool) -> None:
    requirement = next(r for _, r in doctor.requirements(PYPROJECT) if r.name == "torch")
    check = doctor.check_package("", requirement, version)
    assert (check.status == "ok") == allowed
    assert bool(check.fix) != allowed


@pytest.mark.parametrize(
    ("torch", "triton"), [("2.11", "3.6.0"), ("2.12", "3.7.0"), ("2.13", "3.7.1"), ("2.14", "3.8.0")]
)
def test_the_triton_that_each_torch_brings_is_allowed(torch: str, triton: str) -> None:
    bounds = {r.name: r.specifier for _, r in doctor.requirements(PYPROJECT)}
    assert bounds["torch"].contains(torch)
    assert bounds["triton"].contains(triton)
    assert not bounds["triton"].contains("3.10.0")


def test_missing_extra_is_a_warning_and_says_which() -> None:
    check = doctor.check_package("train", Requirement("wandb>=0.28"), None)
    assert (check.status, check.fix) == ("warning", "pip install -e '.[train]'")


def test_python_bound() -> None:
    assert doctor.check_python(PYPROJECT, "3.11.0").status == "ok"
    assert doctor.check_python(PYPROJECT, "3.14.0").status == "ok"
    assert doctor.check_python(PYPROJECT, "3.10.9").status == "broken"


def test_foreign_kernels_is_broken(tmp_path: Path) -> None:
    here = ROOT / "kernels" / "__init__.py"
    assert doctor.check_kernels(None, here).status == "ok"
    assert doctor.check_kernels("0.18.2", here).fix == "pip uninstall kernels"
    assert doctor.check_kernels(None, tmp_path / "kernels" / "__init__.py").status == "broken"


def test_torch_build_against_the_machine() -> None:
    assert doctor.check_torch_build("2.13.0+cpu", False, False, None).status == "ok"
    assert doctor.check_torch_build("2.13.0+cpu", True, False, None).status == "warning"
    assert doctor.check_torch_build("2.13.0", True, True, "0.28.0").status == "ok"
    assert doctor.check_torch_build("2.13.0+cpu", False, False, "0.28.0").fix == "pip uninstall torchvision torchaudio"


def test_threads_disk_and_interpreter(tmp_path: Path) -> None:
    assert doctor.check_threads(2, 2, None).status == "ok"
    assert doctor.check_threads(2, 8, "8").status == "warning"
    assert doctor.check_disk(10 * GIB, tmp_path).status == "ok"
    assert doctor.check_disk(3 * GIB, tmp_path).status == "warning"
    assert doctor.check_disk(0.5 * GIB, tmp_path).status == "broken"
    assert doctor.check_triton_interpret(None).status == "ok"
    assert doctor.check_triton_interpret("0").status == "ok"
    assert doctor.check_triton_interpret("1").status == "warning"


def test_cpu_kernels() -> None:
    assert doctor.check_cpu_kernels(object(), "/usr/bin/cc", None).status == "ok"
    assert "unset" in doctor.check_cpu_kernels(None, "/usr/bin/cc", "torch").fix
    assert "install a C compiler" in doctor.check_cpu_kernels(None, None, None).fix
    assert "says what failed" in doctor.check_cpu_kernels(None, "/usr/bin/cc", None).fix


def test_demo_weights(tmp_path: Path) -> None:
    check = doctor.check_demo(tmp_path)
    assert check.status == "broken"
    assert check.detail == "models/demo lacks config.json, tokenizer.json, model.safetensors"
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (tmp_path / name).write_bytes(b"x")
    assert doctor.check_demo(tmp_path).status == "ok"


def test_cpu_facts_are_read_from_either_architecture() -> None:
    x86 = "processor : 0\nmodel name\t: EPYC\nflags\t\t: fpu avx2 avx512f avx512_bf16 amx_tile\n"
    arm = "processor : 0\nFeatures\t: fp asimd bf16\n"
    assert doctor.cpu_facts(x86) == ("EPYC", ["avx2", "avx512f", "avx512_bf16", "amx_tile"])
    assert doctor.cpu_facts(arm) == ("", ["asimd", "bf16"])
    assert doctor.cpu_facts("") == ("", [])


def test_an_assembler_is_known_or_to_be_checked():
    assert doctor.check_ptxas("sm_90", "/x/ptxas", "12.8.93", contracts=False).status == "ok"
    for architecture, version in (("sm_90", "13.1.80"), ("sm_100", "12.8.93"), ("sm_90", None)):
        check = doctor.check_ptxas(architecture, "/x/ptxas", version, contracts=False)
        assert check.status == "warning"
        assert architecture in check.detail
        assert "(/x/ptxas)" in check.detail
        assert "gpu_check.sh --only kernels" in check.fix


def test_an_assembler_that_fuses_is_broken_and_the_cure_is_named():
    check = doctor.check_ptxas("sm_100", "/x/ptxas-blackwell", "12.9.86", contracts=True)
    assert check.status == "broken"
    assert "12.9.86 (/x/ptxas-blackwell) fuses" in check.detail
    assert "triton>=3.7" in check.fix
    assert "TRITON_PTXAS_BLACKWELL_PATH" in check.fix


def test_the_assembler_in_use_is_the_one_that_is_named(monkeypatch, tmp_path):
    """Triton calls another program from capability 100 on, which another variable names."""
    versions = {"TRITON_PTXAS_PATH": "13.5.80", "TRITON_PTXAS_BLACKWELL_PATH": "13.6.80"}
    bundled = version_in_use(80), version_in_use(100)
    for name, version in versions.items():
        tool = tmp_path / name
        tool.write_text(f"#!/bin/sh\necho Cuda compilation tools, release {version[:4]}, V{version}\n")
        tool.chmod(0o755)
        monkeypatch.setenv(name, str(tool))
    assert (version_in_use(80), version_in_use(100), version_in_use(120)) == ("13.5.80", "13.6.80", "13.6.80")
    for name in versions:
        monkeypatch.delenv(name)
    assert (version_in_use(80), version_in_use(100)) == bundled
    assert set(versions.values()).isdisjoint(bundled)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads memory as Linux counts it")
def test_memory_is_told_by_part():
    parts = list(doctor.memory_by_part("demo", None, "none", tokens=4))
    assert sum(more for _, more, _ in parts) == pytest.approx(parts[-1][2])
    assert [name.split(" (")[0] for name, *_ in parts][-3:] == [
        "answers: first", "answers: next seven", "answers: eight at once"
    ]  # fmt: skip
    assert all(now > 0 for _, _, now in parts)
