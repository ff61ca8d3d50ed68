"""scripts/gpu_check.sh in Triton's interpreter, its plan for a GPU, and what its report says and survives."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from infer.settings.paths import REPO_ROOT
from kernels.triton.assembler import VARIABLES, version_of
from models.heads import HEADS
from tests import gpu_check, gpu_hook
from tests.gpu_check import CALLS, FILES, PROCESSES, card, files_of, jobs_of, main, parse, work
from tests.kernels.comparing import Comparisons
from tests.kernels.timing import rated, timing
from tests.kernels.triton.compiled import B200
from tests.kernels.triton.measure_engines import union_length


def results_of(lines):
    """Return what tests recorded, by place."""
    results = {}
    for place, result in (pair for line in lines for pair in line.get("results", ())):
        results.setdefault(place, []).append(result)
    return results


@pytest.fixture
def checked(tmp_path):
    """`checked(*options)`: runs gpu_check.sh in the interpreter, from another folder; returns its report's lines."""

    def run(*options):
        command = [str(REPO_ROOT / "scripts/gpu_check.sh"), "--interpret", "--commit", "abc", *options]
        environment = {"PYTHON": sys.executable, "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
        environment |= {"HOME": os.environ["HOME"], "OUT": str(tmp_path / "out")}
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        last = json.loads(done.stdout.splitlines()[-1])
        assert [str(file) for file in (tmp_path / "out").iterdir()] == [last["report"]]
        lines = gpu_hook.read(Path(last["report"]))
        assert lines[0]["commit"] == "abc"
        assert lines[0]["triton"]
        assert last["failed"] == [line["test"] for line in lines if line.get("outcome") == "failed"] == []
        assert sorted(last["left_out"]) == sorted(line["test"] for line in lines if line.get("outcome") == "skipped")
        return lines

    return run


TIMED = {
    *("choose", "draft top-m", "accept", "penalties, bias and mask", "Medusa's residual blocks", "walk", "move"),
    *("training-time test", "block drafter", "block verification", "typical acceptance", "two taps", "early exit"),
    *("attention", "attention, tree", "linear, library", "linear, Q4_K blocks", "decoder layers"),
}


@pytest.mark.slow
def test_every_kernel_and_engine_is_measured(checked):
    results = results_of(checked("--only", "bench", "--only", "timings"))
    timings = results["kernels/timings"]
    assert {line["kernel"] for line in timings} >= TIMED
    assert all(line["ms"] > 0 and line["of_copy"] >= 0 for line in timings)
    graphed = {line["system"]: line for line in results["bench/runs"] if line["graphs"] == "on"}
    assert set(graphed) == {"plain", "head, chain 2"}
    assert all(line["ok"] and line["round_ms"] > 0 and line["recorded"] > 0 for line in graphed.values())
    assert graphed["head, chain 2"]["tau"] >= graphed["plain"]["tau"] == 1
    assert "recorded" not in next(line for line in results["bench/runs"] if line["graphs"] == "off")
    assert all(line["kernels"] > 0 and line["gpu_ms"] > 0 for line in results["bench/profiles"])


@pytest.mark.slow
def test_adaptive_drafts_exactness_training_and_learning_are_measured(checked):
    results = results_of(checked("--only", "scaling", "--only", "training", "--only", "learning"))
    assert [line["chain_tau"] for line in results["scaling/auto"]] == [2.2, 3.0]
    assert all(line["auto_of_best"]["median"] > 0 for line in results["scaling/auto"])
    assert [line.get("system", "prompts") for line in results["scaling/price"]] == ["plain", "chain", "prompts"]
    assert all(line["exact_of_library"]["least"] > 0 for line in results["scaling/price"])
    trained = results["training/updates"]
    assert len(trained) == 6
    assert all(line["tokens_per_s"] > 0 and line["head_tflops"] > 0 for line in trained)
    assert {line["features"] for line in trained} == {"stored", "the library", "the engine's kernels"}
    refused, graphed, served, taken = results["learning"]
    assert refused["refused"]
    assert "recorded" not in graphed
    assert served["recorded"]["round_ms"] > 0
    assert taken["taken_over_s"] > 0


@pytest.mark.slow
def test_a_run_ends_in_time_and_names_what_it_left_out(checked):
    ended = [line for line in checked("--seconds", "20") if "outcome" in line]
    labels = [line["test"] for line in ended]
    assert len(labels) == len(set(labels))
    files = [file for part in parse([]).only for file in files_of(part)]
    assert {f"tests/{label.partition('::')[0]}" for label in labels} == set(files)
    left_out = [line for line in ended if line["outcome"] == "skipped" and line["test"].rpartition("/")[2] not in TRAIN]
    assert left_out
    assert all(line["why"].startswith("it takes up to ") for line in left_out)


TRAIN = "test_training_run.py::test_a_head_for_the_demo_target"


@pytest.fixture(scope="module")
def plan():
    """What a dry run prints for a GPU: unit and seconds of every test, in their order."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert main(["--dry-run"]) == 0
    return json.loads(printed.getvalue())


def planned(plan, part, index):
    """Return the tests of a process on a GPU, in their order, with their seconds."""
    tests = {label: test for label, test in plan.items() if f"tests/{label.partition('::')[0]}" in files_of(part)}
    place = gpu_hook.share([unit for unit, _ in tests.values()], index, PROCESSES.get(part, 1))
    mine = sorted((label for label in tests if tests[label][0] in place), key=lambda label: place[tests[label][0]])
    return {label: tests[label][1] for label in mine}


@pytest.mark.parametrize("call", CALLS)
def test_the_parts_of_a_call_fit_ten_minutes_on_a_gpu(plan, call):
    """But for profiles, which come last, if every test takes as long as it may."""
    taken, given, seconds = 0.0, 0.0, parse(["--call", str(call)]).seconds
    assert sum(seconds for _, seconds in CALLS[call]) == seconds <= 600 - 60
    for stage, seconds in CALLS[call]:
        shares = [planned(plan, part, index) for part in stage for index in range(PROCESSES.get(part, 1))]
        assert all(shares)
        taken += max(sum(s for label, s in share.items() if "measure_profile" not in label) for share in shares)
        given += seconds
        assert taken <= given, stage


def test_parts_are_of_one_call_or_of_both_or_named():
    assert parse([]).only == [part for part in gpu_check.PARTS if part != "tiles"]
    assert parse([]).seconds == 2 * parse(["--call", "1"]).seconds
    assert parse(["--call", "2"]).only == ["training", "learning", "bench", "timings"]
    assert parse(["--only", "tiles"]).only == ["tiles"]


def test_what_serves_an_8b_model_in_bf16_comes_first_on_a_gpu(plan):
    for index in range(PROCESSES["kernels"]):
        labels = list(planned(plan, "kernels", index))
        fp32 = [place for place, label in enumerate(labels) if "float32" in label]
        assert fp32
        assert all(after > place for after in fp32 for place, label in enumerate(labels) if "bfloat16" in label)
    assert "test_the_engine_starts[8B shape, random, bf16]" in "".join(planned(plan, "exact", 0))
    assert all(any(f"demo, bf16, {kind}, head, tree" in label for label in plan) for kind in HEADS)


TESTS = """
import os, pytest, torch
from tests.device import orders
from tests.gpu_hook import read
from pathlib import Path
pytestmark = pytest.mark.gpu

@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sorted(dtype, record_property):
    record_property("kernels/correctness", {"ok": True, "dtype": str(dtype)})

@pytest.mark.gpu(served=True)
def test_first(pytestconfig):
    assert read(Path(orders(pytestconfig)["report"]))[-1]["begun"].endswith("test_first")

def test_wrong(record_property):
    record_property("kernels/correctness", {"ok": False})
    assert 1 == 2

def test_dies():
    os._exit(11)

def test_without():
    pytest.skip("not installed: hydra")

@pytest.fixture(scope="module")
def engine():
    raise RuntimeError("out of memory")

def test_engine(engine): ...

@pytest.mark.gpu(seconds=1e6)
def test_long():
    raise AssertionError("begun")
"""


@pytest.fixture
def job(tmp_path):
    """Return `job(text, until, **orders)`: a process that runs the tests in `text` has ended; returns its report."""

    def run(text, until=3600.0, *options, **orders):
        file, report = tmp_path / "test_some.py", tmp_path / "report.jsonl"
        file.write_text(text)
        told = {"process": "some", "files": [str(file)], "until": time.monotonic() + until, **orders}
        work(report, ["-p", "tests.conftest", *options], 1, told)
        return gpu_hook.read(report)

    return run


def test_a_report_survives_what_tests_do(job):
    """A wrong result, an error, a process that ends, and what cannot run."""
    lines = job(TESTS)
    ended = {line["test"].rpartition("::")[2]: line for line in lines if "outcome" in line}
    why = {name: line["why"] for name, line in ended.items() if line["outcome"] == "failed"}
    assert set(why) == {"test_wrong", "test_dies", "test_engine"}
    assert why["test_engine"] == "RuntimeError: out of memory"
    assert why["test_wrong"].startswith("AssertionError")
    assert why["test_dies"] == "its process ended in it, or it hung"
    left_out = {name: line["why"] for name, line in ended.items() if line["outcome"] == "skipped"}
    assert left_out["test_without"] == "not installed: hydra"
    assert left_out["test_long"].startswith("it takes up to 1000000 s, and ")
    passed = [name for name, line in ended.items() if line["outcome"] == "passed"]
    assert passed == ["test_first", "test_sorted[torch.bfloat16]", "test_sorted[torch.float32]"]
    text, totals = card(lines)
    assert "test_dies: its process ended in it" in text
    assert "(not installed: hydra)" in text
    assert "kernels: 2 of 3 comparisons hold" in text
    assert len(totals["failed"]) == 3
    assert len(totals["left_out"]) == 2


def test_what_cannot_be_collected_or_started_is_a_failure(job):
    assert any("no_such_module" in line.get("why", "") for line in job("import no_such_module\n"))
    (failure,) = (line for line in job("import os\nos._exit(3)\n") if line.get("test") == "some")
    assert "exit code 3" in failure["why"]


def test_what_is_not_reached_in_time_is_left_out(job, monkeypatch):
    monkeypatch.setattr(gpu_hook, "STALLED", 0.0)
    head = "import time, pytest\npytestmark = pytest.mark.gpu(seconds=0)\n"
    lines = job(head + "def test_hangs():\n    time.sleep(3600)\ndef test_after(): ...\n", 20.0)
    _, totals = card(lines)
    assert [test.rpartition("::")[2] for test in totals["left_out"]] == ["test_after", "test_hangs"]


BROKEN = """
import os
from collections import Counter
from contextlib import contextmanager
import pytest

@contextmanager
def waiting():
    yield Counter({"infer/kvcache/pool.py:118 table[slot, place] = page": 50})

def dies(*arguments, **options):
    raise RuntimeError("dead")

@pytest.fixture(autouse=True)
def broken(monkeypatch, request):
    monkeypatch.setattr("infer.speculation.proposers.head.HeadProposer.propose", dies)
    monkeypatch.setattr(request.module, "counted_waits", waiting)
    draft = request.module.Running.draft  # in graphs the proposer is not called again
    monkeypatch.setattr(request.module.Running, "draft", lambda self, way: draft(self, way._replace(graphs="off")))
"""


def test_a_dead_drafter_and_a_round_that_waits_fail(tmp_path):
    (tmp_path / "broken_plugin.py").write_text(BROKEN)
    told = {"process": "exact", "files": [FILES["exact"]], "until": None}
    told["environment"] = {"PYTHONPATH": f"{tmp_path}:{REPO_ROOT}"}
    work(tmp_path / "report.jsonl", ["-p", "broken_plugin", "-k", "chain or waits"], 1, told)
    lines = gpu_hook.read(tmp_path / "report.jsonl")
    dead, waits = (line["why"] for line in lines if line.get("outcome") == "failed")
    assert "drafting failed in 2 requests, which went on without" in dead
    assert "the host waited for the GPU at infer/kvcache/pool.py:118 table[slot, place] = page" in waits


def test_a_process_that_compiles_or_has_another_assembler_takes_the_kernels_alone(job):
    text = """
import pytest, torch
@pytest.fixture
def compare(): ...
@pytest.mark.gpu(served=True)
def test_accept(compare): ...
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32])
def test_wide(compare, dtype): ...
@pytest.mark.gpu
def test_engine(): ...
"""
    lines = job(text, ptxas="ptxas 13.1.80")
    (test,) = (line["test"] for line in lines if "outcome" in line)
    assert test.startswith("ptxas 13.1.80 ")
    assert test.endswith("test_accept")
    compiled = [line["test"] for line in job(text, compiles=True) if line.get("test", "").startswith("compile ")]
    assert [test.rpartition("::")[2] for test in compiled] == ["test_accept", "test_wide[float32]"]


@pytest.mark.parametrize(("capability", "own"), [(80, "12.8.93"), (100, "13.1.80")])
def test_other_assemblers_are_given_to_triton_for_every_gpu(tmp_path, monkeypatch, capability, own):
    for version in ("12.8.93", "13.1.80"):
        tool = tmp_path / f"cuda-{version}" / "bin" / "ptxas"
        tool.parent.mkdir(parents=True)
        tool.write_text(f"#!/bin/sh\necho Cuda compilation tools, release {version[:4]}, V{version}\n")
        tool.chmod(0o755)
    monkeypatch.setattr(gpu_check, "TOOLKITS", tmp_path)
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.setattr("kernels.triton.device.limits", lambda device: B200._replace(capability=capability))
    for name in VARIABLES:  # of either capability's assembler: the other one's has no say
        in_use = name == VARIABLES[capability >= 100]
        monkeypatch.setenv(name, str(tmp_path / f"cuda-{own}/bin/ptxas") if in_use else "/none")
    (other,) = {"12.8.93", "13.1.80"} - {own}
    (job,) = (job for job in jobs_of(["kernels"], [], on_gpu=True) if "ptxas" in job)
    assert job["ptxas"] == f"ptxas {other}"
    assert [job["environment"][name] for name in VARIABLES] == 2 * [str(tmp_path / f"cuda-{other}/bin/ptxas")]
    assert version_of(str(tmp_path)) is None


def test_comparisons():
    lines, infinite = [], torch.tensor([1.0, -torch.inf])
    compare = Comparisons(lambda name, line: lines.append(line), compiles=False)
    compare.close("k", "c", infinite, infinite, 0.0)
    compare.close("k", "c", torch.tensor([1.01, 2.0]), lambda: torch.tensor([1.0, 2.0]), 0.006)
    compare.same("k", "c", torch.arange(4), torch.arange(4))
    compare.check()
    compare.close("k", "c", torch.tensor([1.0, torch.nan]), infinite, 1.0)
    compare.close("k", "c", torch.tensor([1.01, 2.0]), torch.tensor([1.0, 2.0]), 0.004)
    compare.same("k", "c", torch.arange(4), torch.tensor([0, 1, 2, 4]))
    assert [line["ok"] for line in lines] == [True, True, True, False, False, False]
    assert lines[-1]["error"] == 0.25
    with pytest.raises(AssertionError, match="error 0.25 > 0.0"):
        compare.check()


def test_times():
    line = timing("k", "c", torch.device("cpu"), 1000, int)
    assert rated(line | {"ms": 1.0}, 2.0) == line | {"ms": 1.0, "gb_s": 0.0, "of_copy": 0.0005}
    assert union_length([(0, 2), (1, 3), (5, 6)]) == 4
    assert union_length([]) == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [([], "no usable GPU; --interpret"), (["--head", "/nowhere"], "--head /nowhere: no head lies there")],
)
def test_a_users_error_is_one_line(words, message, capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(words) == 2
    assert message in capsys.readouterr().err


def test_without_pytest_it_says_what_to_bring(monkeypatch, capsys):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "pytest" else name)
    assert main(["--interpret"]) == 2
    assert "not installed: pytest; scripts/README.md says which wheels to bring along" in capsys.readouterr().err


# Packages of this environment that a lent GPU machine does not have; of its own, scripts/gpu_environment.sh lists some.
LACKED = ("hydra", "omegaconf", "antlr4", "gguf", "wandb", "datasets", "deepspeed", "fastapi", "uvicorn", "llguidance")


def test_every_test_of_a_gpu_is_collected_without_what_such_a_machine_lacks(tmp_path):
    blocked = "import sys\n" + "".join(f"sys.modules[{name!r}] = None\n" for name in LACKED)  # importing it raises
    (tmp_path / "blocked_plugin.py").write_text(blocked)
    files = [file for part in gpu_check.PARTS for file in files_of(part)]
    environment = {"PYTHONPATH": f"{tmp_path}:{REPO_ROOT}", "HEADWAY_TEST_DEVICE": "cuda"}
    told = {"process": "plan", "files": files, "until": None, "environment": environment}
    work(tmp_path / "report.jsonl", ["-p", "blocked_plugin", "--collect-only"], 1, told)
    (line,) = gpu_hook.read(tmp_path / "report.jsonl")
    assert {f"tests/{label.partition('::')[0]}" for label in line["planned"]} == set(files)
