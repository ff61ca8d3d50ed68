"""scripts/gpu_check.sh in Triton's interpreter, its plan for a GPU, and what its report says and survives."""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import time
from collections import Counter
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from infer.options.paths import REPO_ROOT
from models.heads import HEADS
from scripts.gpu_check import PARTS, STAGES, compiling, exactness, plan, ptxas, runner
from scripts.gpu_check.arguments import parse
from scripts.gpu_check.measure import close, rated, same, timed
from scripts.gpu_check.plan import Check, Group, LeftOut
from scripts.gpu_check.report import Report, card
from scripts.gpu_check.speculation import union_length
from scripts.gpu_check.verify import compare

CPU, GPU = torch.device("cpu"), torch.device("cuda")
OPTIONS = argparse.Namespace(head=None, minutes=0.5, work=None, only=list(PARTS), bundled_ptxas=False)


def test_every_part_runs_without_a_gpu(tmp_path):
    command = [str(REPO_ROOT / "scripts/gpu_check.sh"), "--interpret", "--commit", "abc"]
    environment = {"PYTHON": sys.executable, "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1", "HOME": str(tmp_path)}
    environment["OUT"] = str(tmp_path / "out")
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    last = json.loads(done.stdout.splitlines()[-1])
    assert Path(last["report"]).parent == tmp_path / "out"
    report = json.loads(Path(last["report"]).read_text(encoding="utf-8"))
    assert report["failures"] == last["failures"] == last["compile_failures"] == report["left_out"] == []
    assert [(group["failures"], group["unfinished"]) for group in report["compile"].values()] == [([], [])]
    assert report["running"] is None
    assert list(report["done"]) == [check.label for part in PARTS for check in checks_of(part, CPU)]
    assert set(report["seconds"]) == {", ".join(stage) for stage in STAGES}
    assert [file.name for file in Path(last["report"]).parent.iterdir()] == [Path(last["report"]).name]
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
    assert all(line["kernels"] > 0 and line["gpu_ms"] > 0 for line in report["bench"]["profiles"])
    assert {"walk", "two taps", "early exit, lengths"} <= checked
    assert all(engine.get("ok", True) for engine in report["engines"])
    assert report["waits"][0]["rounds"] > 0
    systems = {line["system"]: line for line in report["bench"]["runs"] if line["graphs"] == "off"} | {
        "head, chain 2": captured["head, chain 2"]
    }
    assert set(systems) == {"plain", "head, chain 2", "synthetic, chain 2"}
    assert systems["head, chain 2"]["ok"]
    assert "recorded" not in systems["plain"]
    assert systems["head, chain 2"]["tau"] >= systems["plain"]["tau"] == 1


def checks_of(part: str, device: torch.device) -> list[Check]:
    return [check for group in plan.groups([part], device, OPTIONS) for check in group.checks]


def dry_run(capsys, *words):
    """Return what the last line of a dry run says of each group."""
    assert runner.dry_run(parse(["--dry-run", *words])) == 0
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_all_parts_fit_a_call_of_ten_minutes_on_a_gpu(monkeypatch, capsys):
    """But for what comes last, fp32, profiles and some timings, if every check takes as long as it may."""
    monkeypatch.setattr(plan, "other_ptxas", lambda: [ptxas.Ptxas("/usr/bin/ptxas", "13.0.88")])
    counted = dry_run(capsys)
    labels = [check.label for part in PARTS for check in checks_of(part, GPU)]
    assert len(labels) == len(set(labels)) == sum(group["checks"] for group in counted.values())
    assert max(group["until"] for group in counted.values()) <= parse([]).seconds <= 600 - 60
    left_out = [label for group in counted.values() for label in group["left_out"]]
    assert [
        label for label in left_out if not any(word in label for word in ("profile", "synthetic", "float32", "timings"))
    ] == []
    assert "kernels, ptxas 13.0.88" in counted


def test_results_by_another_assembler_are_listed_under_its_name(report):
    line = {"kernel": "k", "case": "c", "error": 1.0, "bound": 0.5, "ok": False}
    kernel = plan.KernelCheck(
        "correctness", "accept", 1, plan.SERVED, lambda: iter([Line(line), Line(line | {"ok": True})])
    )
    work_through(report, kernel.check(), kernel.check("ptxas 13.1.80"))
    said = card(report.document)
    assert "FAILED ptxas 13.1.80: accept: correctness: k, c: error 1.0 > 0.5" in said
    assert "kernels as ptxas 13.1.80 makes them: 1 of 2 comparisons hold" in said


class Line:
    """An item of a check whose line is known."""

    def __init__(self, line):
        self._line = line

    def line(self):
        return self._line


def test_what_serves_an_8b_model_in_bf16_comes_first_on_a_gpu():
    for group in plan.groups(["kernels"], GPU, OPTIONS):
        labels = [check.label for check in group.checks]
        fp32 = [index for index, label in enumerate(labels) if "float32" in label]
        assert all(index > labels.index(label) for index in fp32 for label in labels if "bfloat16" in label)
    assert checks_of("kernels", GPU)[0].label.startswith("linear, qkv")
    assert checks_of("exact", GPU)[0].label == "exact: 8B shape, random, bf16, engine"


def test_every_kind_of_head_drafts_on_a_gpu():
    labels = " ".join(check.label for check in checks_of("exact", GPU))
    assert all(f"demo, bf16, {kind}, head, tree" in labels for kind in HEADS)


def test_processes_side_by_side_share_the_cores(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    group = plan.Group("g", "kernels", (), environment={"TRITON_PTXAS_PATH": "/ptxas"})
    environment = runner.environment_of(group, threads=2)
    assert (environment["OMP_NUM_THREADS"], environment["TRITON_PTXAS_PATH"]) == ("2", "/ptxas")
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert runner.environment_of(group, threads=2)["OMP_NUM_THREADS"] == "5"


def test_graphs_of_one_kind_follow_each_other():
    """So that each is captured once."""
    shapes = [(way.proposer, str(way.shape), way.graphs) for way in exactness.WAYS]
    assert len(set(shapes)) == len(
        [1 for shape, before in zip(shapes, [None, *shapes], strict=False) if shape != before]
    )


def test_a_dry_run_says_what_there_is_no_time_for(capsys):
    counted = dry_run(capsys, "--only", "exact", "--seconds", "80")["exact, 8B shape, random, bf16"]
    assert counted["until"] <= 80
    assert 0 < len(counted["left_out"]) < counted["checks"]


@pytest.fixture
def report(tmp_path):
    facts = {"hardware": "h", "packages": [], "copy_gb_s": 2.0}
    return Report.new(tmp_path / "out" / "report.json", facts)


def check(label, run, seconds=1.0):
    return Check(label, ("kernels", "correctness"), seconds, run)


def work_through(report, *checks, device=CPU, until=math.inf):
    return runner.work_through(Group("group", "kernels", checks), report, device, until)


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

    report.document["compile"]["failures"] = ["found before: OutOfResources"]
    work_through(report, check("found before", breaks), check("found now", breaks))
    document = on_disk(report)
    assert document["failures"] == []
    assert [failure.partition(":")[0] for failure in document["compile"]["failures"]] == ["found before", "found now"]
    whole = Report.new(report.path.with_name("whole.json"), {"hardware": "h", "packages": []})
    whole.merge(report)
    assert "DOES NOT COMPILE found now: OutOfResources" in card(whole.document)


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
    document = runner.run_process("kernels", command, report.path, None).document
    assert list(document["done"]) == ["one", "two", "three"]
    assert document["failures"] == ["two: its process ended with exit code 11"]


def test_a_process_that_cannot_start_is_a_failure_of_the_part(report):
    document = runner.run_process("exact", [sys.executable, "-c", "raise SystemExit(2)"], report.path, None).document
    assert document["failures"] == ["exact: its process ended with exit code 2"]


def test_a_process_that_hangs_is_killed(monkeypatch, report):
    monkeypatch.setattr(runner, "hangs", lambda file: True)
    command = [sys.executable, "-c", "import time; time.sleep(3600)"]
    assert runner.watch(command, report.path, time.monotonic() + 3600) < 0


def test_reports_of_groups_are_added_to_that_of_the_run(tmp_path):
    whole = Report.new(tmp_path / "whole.json", {"hardware": "h"})
    for name in ("a group", "another"):
        part = Report.new(whole.part_path(name), {})
        work_through(part, check(f"{name}: first", lambda: [{"ok": True, "of": 1}]), check(f"{name}: second", fails))
        whole.merge(part)
    document = on_disk(whole)
    assert document["kernels"]["correctness"] == 2 * [{"ok": True, "of": 1}]
    assert list(document["done"]) == ["a group: first", "a group: second", "another: first", "another: second"]
    assert document["failed"] == ["a group: second", "another: second"]
    assert document["hardware"] == "h"


def fails():
    raise RuntimeError("no")


def test_what_needs_a_check_that_failed_is_left_out(report):
    first, second = check("engine", fails), replace(check("ways", list), needs="engine")
    work_through(report, first, second)
    assert on_disk(report)["failures"] == ["engine: RuntimeError: no"]
    assert on_disk(report)["left_out"] == [{"what": "ways", "why": "engine failed"}]


@pytest.fixture
def made(tmp_path):
    """The tiny target's engine, made when it is first asked for."""
    return partial(exactness.tiny, CPU)


def ways_of(subject):
    ways = [exactness.Way("head, chain", "head", exactness.CHAIN, True, "off")]
    return subject.group(1, 1, ("greedy",), ways).checks


def test_an_engine_that_cannot_be_made_is_tried_once(report):
    tries = []

    def make(probe):
        tries.append(probe)
        raise RuntimeError("out of memory")

    work_through(report, *ways_of(exactness.Subject("t", make)))
    assert tries == [True, False]
    assert on_disk(report)["failures"] == ["exact: t, engine: RuntimeError: out of memory"]
    assert [entry["why"] for entry in on_disk(report)["left_out"]] == ["exact: t, engine failed"]


def test_an_engine_is_made_without_a_probe_that_raises(report, made):
    def make(probe):
        if probe:
            raise ValueError("engine.exact=true: other bits")
        return made(False)

    work_through(report, *ways_of(exactness.Subject("t", make, accepts=False)))
    (failure,) = on_disk(report)["failures"]
    assert "made without its start-up probe; with it: ValueError: engine.exact=true: other bits" in failure
    assert on_disk(report)["exact"][0]["ok"]


def test_a_dead_drafter_fails(report, made, monkeypatch):
    def dies(*arguments, **options):
        raise RuntimeError("dead")

    monkeypatch.setattr("infer.speculation.proposers.head.HeadProposer.propose", dies)
    subject = exactness.Subject("t", made, probe=False)
    work_through(report, *ways_of(subject))
    (failure,) = on_disk(report)["failures"]
    assert failure.endswith("drafting failed in 2 requests, which went on without")


def test_a_drafter_of_which_nothing_is_accepted_fails(report, made, monkeypatch):
    lost = lambda plain, completions: {"prompts": 2, "different": 0, "accepted_drafts": 0, "ok": True}  # noqa: E731
    monkeypatch.setattr(exactness, "difference", lost)
    work_through(report, *ways_of(exactness.Subject("t", made, probe=False)))
    assert on_disk(report)["failures"][0].endswith("no drafted token was accepted")


def test_a_round_that_waits_for_the_gpu_fails(report, made, monkeypatch):
    @contextmanager
    def waiting(device):
        yield Counter({"infer/kvcache/pool.py:118 table[slot, place] = page": 50})

    monkeypatch.setattr(exactness, "counted_waits", waiting)
    ways = [exactness.Way("head, chain", "head", exactness.CHAIN, True, "on")]
    checks = exactness.Subject("t", made, accepts=False, probe=False).group(1, 1, ("greedy",), ways).checks
    work_through(report, checks[0], checks[-1])
    (failure,) = on_disk(report)["failures"]
    assert failure.endswith("the host waited for the GPU at infer/kvcache/pool.py:118 table[slot, place] = page")


def test_overlapping_kernels_count_once():
    assert union_length([(0, 2), (1, 3), (5, 6)]) == 4
    assert union_length([]) == 0


def test_other_assemblers_are_found_by_their_version(tmp_path, monkeypatch):
    for version in ("12.8.93", "13.1.80"):
        tool = tmp_path / version / "bin" / "ptxas"
        tool.parent.mkdir(parents=True)
        tool.write_text(f"#!/bin/sh\necho Cuda compilation tools, release, V{version}\n")
        tool.chmod(0o755)
    monkeypatch.setattr(ptxas, "candidates", lambda: sorted(str(path) for path in tmp_path.glob("*/bin/ptxas")))
    monkeypatch.setattr(ptxas, "bundled_ptxas", lambda: ptxas.Ptxas("/triton/ptxas", "12.8.93"))
    assert [other.name for other in ptxas.other_ptxas()] == ["ptxas 13.1.80"]
    assert ptxas.version_of(str(tmp_path)) is None


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
    compiling.errors_of(file).write_text("Segmentation fault")
    assert compiling.read_share(file, -11) == {
        "variants": ["attend 1", "attend 2"],
        "failures": ["two: CompilationError: at 1:1"],
        "unfinished": "three (exit code -11): Segmentation fault",
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
