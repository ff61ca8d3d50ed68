"""scripts/gpu_check.sh in Triton's interpreter, its plan for a GPU, and what its report says and survives."""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from infer.config_checks import REPO_ROOT
from scripts.gpu_check import PARTS, compiling, plan, runner
from scripts.gpu_check.arguments import parse
from scripts.gpu_check.measure import close, rated, same, timed
from scripts.gpu_check.plan import Check, Group, LeftOut
from scripts.gpu_check.report import Report, card
from scripts.gpu_check.verify import compare

CPU, GPU = torch.device("cpu"), torch.device("cuda")
OPTIONS = argparse.Namespace(head=None, minutes=1.0)


def test_every_part_runs_without_a_gpu(tmp_path):
    command = [str(REPO_ROOT / "scripts/gpu_check.sh"), "--interpret", "--commit", "abc"]
    environment = {"PYTHON": sys.executable, "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1", "HOME": str(tmp_path)}
    environment["OUT"] = str(tmp_path / "out")
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    last = json.loads(done.stdout.splitlines()[-1])
    assert Path(last["report"]).parent == tmp_path / "out"
    report = json.loads(Path(last["report"]).read_text(encoding="utf-8"))
    assert report["failures"] == last["failures"] == last["compile_failures"] == report["compile"]["failures"] == []
    assert report["compile"]["unfinished"] == report["left_out"] == []
    assert report["running"] is None
    assert list(report["done"]) == [check.label for part in PARTS for check in checks_of(part, CPU)]
    assert set(report["seconds"]) == set(PARTS)
    assert report["versions"]["triton"]
    assert report["git"]["commit"]
    checked = {line["kernel"] for line in report["kernels"]["correctness"]}
    assert {"choose", "draft top-m", "accept", "penalties, bias and mask", "Medusa's residual blocks"} <= checked
    assert {"training-time test", "block drafter", "block verification", "typical acceptance"} <= checked
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


def checks_of(part: str, device: torch.device) -> list[Check]:
    return [check for group in plan.groups(part, device, OPTIONS) for check in group.checks]


def dry_run(capsys, *words):
    """Return what the last line of a dry run says of each part."""
    assert runner.dry_run(parse(["--dry-run", *words])) == 0
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_each_part_fits_a_call_of_nine_minutes_on_a_gpu(capsys):
    counted = dry_run(capsys)
    assert list(counted) == list(PARTS)
    for call, part in enumerate(PARTS, start=1):
        checks = checks_of(part, GPU)
        seconds = sum(check.seconds for check in checks) + (compiling.SECONDS if part == "kernels" else 0)
        assert counted[part] == {"checks": len(checks), "seconds": round(seconds, 1), "left_out": []}
        assert seconds < 7.5 * 60
        assert dry_run(capsys, str(call)) == {part: counted[part]}


def test_what_serves_an_8b_model_in_bf16_comes_first_on_a_gpu():
    labels = [check.label for check in checks_of("kernels", GPU)]
    assert len(labels) == len(set(labels))
    assert labels[0].startswith("linear, qkv")
    fp32 = [index for index, label in enumerate(labels) if "float32" in label]
    assert min(fp32) > max(index for index, label in enumerate(labels) if "bfloat16" in label)
    assert checks_of("exact", GPU)[0].label.startswith("exact: 8B shape, random, bf16")
    assert checks_of("exact", GPU)[-1].label.startswith("exact: demo, fp32")


def test_a_dry_run_says_what_there_is_no_time_for(capsys):
    counted = dry_run(capsys, "--only", "exact", "--seconds", "60")["exact"]
    assert counted["seconds"] <= 60
    assert 0 < len(counted["left_out"]) < counted["checks"]


@pytest.fixture
def report(tmp_path):
    facts = {"hardware": "h", "packages": [], "copy_gb_s": 2.0}
    return Report.new(tmp_path / "out" / "report.json", facts)


def check(label, run, seconds=1.0):
    return Check(label, ("kernels", "correctness"), seconds, run)


def work_through(report, *checks, device=CPU, until=math.inf):
    return runner.work_through(Group(checks), report, device, until)


def on_disk(report):
    return json.loads(report.path.read_text(encoding="utf-8"))


def test_the_report_on_disk_grows_with_every_check(report):
    seen = []

    def first():
        seen.append(on_disk(report))
        return [{"ok": True}]

    def second():
        seen.append(on_disk(report))
        return [{"ok": True}]

    work_through(report, check("first", first), check("second", second))
    assert [state["running"]["label"] for state in seen] == ["first", "second"]
    assert [list(state["done"]) for state in seen] == [[], ["first"]]
    assert seen[1]["kernels"] == {"correctness": [{"ok": True}]}
    assert list(on_disk(report)["done"]) == ["first", "second"]
    assert [file.name for file in report.path.parent.iterdir()] == ["report.json"]


def test_a_wrong_kernel_is_a_failure(monkeypatch, report):
    monkeypatch.setattr("scripts.gpu_check.verify.accept", lambda *tensors: torch.zeros(len(tensors[0])))
    accept = plan.KernelCheck("correctness", "accept", 1, plan.SERVED, lambda: compare(3, 16, CPU)).check()
    work_through(report, accept)
    (failure,) = on_disk(report)["failures"]
    assert failure.startswith("accept: correctness: accept, 3 trees of up to 16: error ")
    assert f"FAILED {failure}" in card(report.document)


def test_a_failure_of_one_check_leaves_the_others(report):
    def breaks():
        raise RuntimeError("broken")

    work_through(report, check("one", breaks), check("two", lambda: [{"ok": True}]))
    assert on_disk(report)["failures"] == ["one: RuntimeError: broken"]
    assert list(on_disk(report)["done"]) == ["one", "two"]


def test_a_kernel_that_does_not_compile_is_no_wrong_result(report):
    from triton.runtime.errors import OutOfResources

    def breaks():
        raise OutOfResources(300_000, 232_448, "shared memory")

    report.document["compile"]["failures"].append("found before: OutOfResources")
    work_through(report, check("found before", breaks), check("found now", breaks))
    document = on_disk(report)
    assert document["failures"] == []
    assert [failure.partition(":")[0] for failure in document["compile"]["failures"]] == ["found before", "found now"]
    assert "DOES NOT COMPILE found now: OutOfResources" in card(document)


def test_what_there_is_no_time_or_package_for_is_left_out(monkeypatch, report):
    monkeypatch.setattr(runner, "usable", lambda device: True)

    def cannot():
        raise LeftOut("not installed: hydra")

    checks = (check("long", lambda: [], 300), check("short", lambda: [], 0), check("impossible", cannot, 0))
    work_through(report, *checks, device=GPU, until=time.monotonic() + 200)
    assert list(on_disk(report)["done"]) == ["short"]
    long, impossible = on_disk(report)["left_out"]
    assert long["what"] == "long"
    assert long["why"].startswith("it takes up to 300 s, and ")
    assert impossible == {"what": "impossible", "why": "not installed: hydra"}
    assert "left out: impossible (not installed: hydra)" in card(report.document)


def test_a_spoilt_gpu_ends_the_process_after_the_check(monkeypatch, report):
    monkeypatch.setattr(runner, "usable", lambda device: False)
    assert not work_through(report, check("one", lambda: []), check("two", lambda: []), device=GPU)
    assert list(on_disk(report)["done"]) == ["one"]


DYING = """
import os, sys
from pathlib import Path
from scripts.gpu_check.plan import Check
from scripts.gpu_check.report import Report
report = Report.read(Path(sys.argv[1]))
for label in ("one", "two", "three"):
    if label not in report.settled:
        check = Check(label, ("kernels", "correctness"), 1, list)
        report.begin(check)
        if label == "two":
            os._exit(11)
        report.end(check, 0.0, [])
"""


def test_a_process_that_dies_in_a_check_is_started_again_after_it(report):
    command = [sys.executable, "-c", DYING, str(report.path)]
    document = runner.run_part("kernels", command, report.path, None).document
    assert list(document["done"]) == ["one", "two", "three"]
    assert document["failures"] == ["two: its process ended with exit code 11"]


def test_a_process_that_cannot_start_is_a_failure_of_the_part(report):
    document = runner.run_part("exact", [sys.executable, "-c", "raise SystemExit(2)"], report.path, None).document
    assert document["failures"] == ["exact: its process ended with exit code 2"]


def test_a_process_that_hangs_is_killed(monkeypatch, report):
    monkeypatch.setattr(runner, "hangs", lambda file: True)
    command = [sys.executable, "-c", "import time; time.sleep(3600)"]
    assert runner.watch(command, report.path, time.monotonic() + 3600) < 0


def test_a_share_that_dies_says_in_which_check(tmp_path):
    file = tmp_path / "share.jsonl"
    lines = [
        {"label": "one"},
        {"label": "one", "variants": ["attend 1", "attend 2"], "failure": None},
        {"label": "two"},
        {"label": "two", "variants": [], "failure": "CompilationError: at 1:1"},
        {"label": "three"},
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"lab')
    assert compiling.read_share(file, -11) == {
        "variants": ["attend 1", "attend 2"],
        "failures": ["two: CompilationError: at 1:1"],
        "unfinished": "three (exit code -11)",
    }


def test_without_a_gpu_it_says_what_to_do(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ValueError, match="--interpret"):
        runner.device_of(interpret=False)


def test_lines_of_the_report():
    infinite = torch.tensor([1.0, -torch.inf])
    assert close("k", "c", infinite, infinite, 0.0).line()["ok"]
    assert not close("k", "c", torch.tensor([1.0, torch.nan]), infinite, 1.0).line()["ok"]
    assert close("k", "c", torch.tensor([1.01, 2.0]), lambda: torch.tensor([1.0, 2.0]), 0.006).line()["ok"]
    assert not close("k", "c", torch.tensor([1.01, 2.0]), torch.tensor([1.0, 2.0]), 0.004).line()["ok"]
    assert same("k", "c", torch.arange(4), torch.tensor([0, 1, 2, 4])).line()["error"] == 0.25
    line = timed("k", "c", CPU, 1000, int).line()
    assert rated(line | {"ms": 1.0}, 2.0) == line | {"ms": 1.0, "gb_s": 0.0, "of_copy": 0.0005}


# Packages of this environment that a lent GPU machine does not have; of its own, scripts/gpu_environment.sh lists some.
LACKED = ("hydra", "omegaconf", "antlr4", "gguf", "wandb", "datasets", "deepspeed", "fastapi", "uvicorn", "llguidance")
WITHOUT = """
import importlib, sys
for name in {names!r}:
    sys.modules[name] = None  # importing it raises ModuleNotFoundError
from scripts.gpu_check import compiling, exactness, plan, runner, speculation
for name in plan.OPERATIONS:
    importlib.import_module("scripts.gpu_check." + name)
"""


def test_the_check_imports_nothing_that_a_gpu_machine_lacks():
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT.format(names=LACKED)], capture_output=True, text=True, cwd=REPO_ROOT, check=False
    )
    assert done.returncode == 0, done.stderr
