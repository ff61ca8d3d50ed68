"""scripts/gpu_check.sh end to end in Triton's interpreter, and its report of a wrong kernel."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from infer.config_checks import REPO_ROOT
from scripts.gpu_check import runner
from scripts.gpu_check.measure import close, rated, same, timed


def test_every_part_runs_without_a_gpu(tmp_path):
    command = [str(REPO_ROOT / "scripts/gpu_check.sh"), "--interpret", "--out", str(tmp_path), "--commit", "abc"]
    environment = {"PYTHON": sys.executable, "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1", "HOME": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    last = json.loads(done.stdout.splitlines()[-1])
    report = json.loads(Path(last["report"]).read_text(encoding="utf-8"))
    assert report["failures"] == last["failures"] == []
    assert report["versions"]["triton"]
    assert report["git"]["commit"]
    checked = {line["kernel"] for line in report["kernels"]["correctness"]}
    assert {"choose", "draft top-m", "accept", "penalties, bias and mask", "Medusa's residual blocks"} <= checked
    assert {"training-time test", "block verification", "typical acceptance"} <= checked
    assert {line["kernel"] for line in report["kernels"]["timings"]} >= {"choose", "accept"}
    assert {line["drafts"] for line in report["exact"]} == {"none", "head, chain", "head, tree"}
    assert all(line["ok"] for line in report["exact"])
    assert {line["graphs"] for line in report["exact"]} == {"on"}
    assert sum(line["accepted_drafts"] for line in report["exact"]) > 0
    captured = {line["system"]: line for line in report["bench"]["runs"] if line["graphs"] == "on"}
    assert set(captured) == {"plain", "head, chain 2"}
    assert all(line["ok"] and line["rounds_per_s"] > 0 for line in captured.values())
    assert all(line["recorded"] > 0 for line in captured.values())  # captured CUDA graphs
    assert "gap_us" in captured["plain"]
    systems = {line["system"]: line for line in report["bench"]["runs"] if line["graphs"] == "off"} | {
        "head, chain 2": captured["head, chain 2"]
    }
    assert set(systems) == {"plain", "head, chain 2", "synthetic, chain 2"}
    assert systems["head, chain 2"]["ok"]
    assert "recorded" not in systems["plain"]
    assert systems["head, chain 2"]["tau"] >= systems["plain"]["tau"] == 1


def test_a_wrong_kernel_is_a_failure(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(runner, "OPERATIONS", ("verify",))
    monkeypatch.setattr(runner, "in_use", lambda device: True)
    monkeypatch.setattr("scripts.gpu_check.verify.accept", lambda *tensors: torch.zeros(len(tensors[0])))
    args = argparse.Namespace(interpret=True, only=["kernels"], out=tmp_path, commit=None)
    assert runner.run(args) == 1
    (file,) = tmp_path.iterdir()
    report = json.loads(file.read_text())
    assert any("accept" in failure for failure in report["failures"])
    assert "FAILED" in capsys.readouterr().out


def test_a_failure_of_one_operation_leaves_the_others(monkeypatch, tmp_path):
    monkeypatch.setattr(runner, "OPERATIONS", ("no_such_operation", "verify"))
    monkeypatch.setattr(runner, "in_use", lambda device: True)
    args = argparse.Namespace(interpret=True, only=["kernels"], out=tmp_path, commit=None)
    assert runner.run(args) == 1
    report = json.loads(next(tmp_path.iterdir()).read_text())
    assert len(report["failures"]) == 2
    assert all("ModuleNotFoundError" in failure for failure in report["failures"])
    assert all(line["ok"] for line in report["kernels"]["correctness"])


def test_without_a_gpu_it_says_what_to_do(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ValueError, match="--interpret"):
        runner.run(argparse.Namespace(interpret=False))


def test_lines_of_the_report():
    infinite = torch.tensor([1.0, -torch.inf])
    assert close("k", "c", infinite, infinite, 0.0)["ok"]
    assert not close("k", "c", torch.tensor([1.0, torch.nan]), infinite, 1.0)["ok"]
    assert close("k", "c", torch.tensor([1.01, 2.0]), torch.tensor([1.0, 2.0]), 0.006)["ok"]
    assert not close("k", "c", torch.tensor([1.01, 2.0]), torch.tensor([1.0, 2.0]), 0.004)["ok"]
    assert same("k", "c", torch.arange(4), torch.tensor([0, 1, 2, 4]))["error"] == 0.25
    line = timed("k", "c", torch.device("cpu"), 1000, int)
    assert rated(line | {"ms": 1.0}, 2.0) == line | {"ms": 1.0, "gb_s": 0.0, "of_copy": 0.0005}
