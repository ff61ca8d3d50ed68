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

from infer.options.paths import REPO_ROOT
from kernels.triton.assembler import VARIABLES
from models.heads import HEADS
from tests.gpu_check import ptxas, report, runner
from tests.gpu_check.command import main, parse
from tests.kernels.comparing import Comparisons
from tests.kernels.timing import rated, timing
from tests.kernels.triton.compiled import B200
from tests.kernels.triton.measure_engines import union_length

EXACT = f"{runner.TRITON}/test_engine.py"


@pytest.fixture
def checked(tmp_path):
    """`checked(*options)`: runs gpu_check.sh in the interpreter, from another folder; returns its report."""

    def run(*options):
        command = [str(REPO_ROOT / "scripts/gpu_check.sh"), "--interpret", "--commit", "abc", *options]
        environment = {"PYTHON": sys.executable, "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
        environment |= {"HOME": os.environ["HOME"], "OUT": str(tmp_path / "out")}
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        last = json.loads(done.stdout.splitlines()[-1])
        assert [str(file) for file in (tmp_path / "out").iterdir()] == [last["report"]]
        document = report.read(Path(last["report"]))
        assert document["failures"] == last["failures"] == last["compile_failures"] == []
        assert last["left_out"] == len(document["left_out"])
        assert document["running"] is None
        assert document["versions"]["triton"]
        assert document["git"]["commit"] == "abc"
        return document

    return run


TIMED = {
    *("choose", "draft top-m", "accept", "penalties, bias and mask", "Medusa's residual blocks", "walk", "move"),
    *("training-time test", "block drafter", "block verification", "typical acceptance", "two taps", "early exit"),
    *("attention", "attention, tree", "linear, library", "linear, Q4_K blocks", "decoder layers"),
}


@pytest.mark.slow
def test_every_kernel_and_engine_is_measured(checked):
    document = checked("--only", "bench", "--only", "timings")
    assert document["left_out"] == document["compile"]["kernels"]["unfinished"] == []
    assert set(document["seconds"]) == {"bench", "timings"}
    timings = document["kernels"]["timings"]
    assert {line["kernel"] for line in timings} >= TIMED
    assert all(line["ms"] > 0 and line["of_copy"] >= 0 for line in timings)
    graphed = {line["system"]: line for line in document["bench"]["runs"] if line["graphs"] == "on"}
    assert set(graphed) == {"plain", "head, chain 2"}
    assert all(line["ok"] and line["round_ms"] > 0 and line["recorded"] > 0 for line in graphed.values())
    assert graphed["head, chain 2"]["tau"] >= graphed["plain"]["tau"] == 1
    assert "recorded" not in next(line for line in document["bench"]["runs"] if line["graphs"] == "off")
    assert all(line["kernels"] > 0 and line["gpu_ms"] > 0 for line in document["bench"]["profiles"])


@pytest.mark.slow
def test_a_run_ends_in_time_and_names_what_it_left_out(checked):
    document = checked("--seconds", "20")
    assert set(document["seconds"]) == {"kernels, exact, train", "bench", "timings"}
    labels = [*document["done"], *(entry["what"] for entry in document["left_out"])]
    assert len(labels) == len(set(labels))
    parts = [part for name, part in runner.PARTS.items() if name not in ("train", "tiles")]
    assert {f"tests/{label.partition('::')[0]}" for label in labels} == {file for part in parts for file in part.files}
    assert document["left_out"]
    assert all(entry["why"].startswith("it takes up to ") for entry in document["left_out"])


@pytest.fixture(scope="module")
def plan():
    """What a dry run prints for a GPU, in all and as its last line."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert runner.dry_run(parse(["--dry-run"])) == 0
    return printed.getvalue(), json.loads(printed.getvalue().splitlines()[-1])


def test_all_parts_fit_a_call_of_ten_minutes_on_a_gpu(plan):
    """But for profiles, which come last, if every test takes as long as it may."""
    _, processes = plan
    assert max(process["until"] for process in processes.values()) <= parse([]).seconds <= 600 - 60
    left_out = [label for process in processes.values() for label in process["left_out"]]
    assert [label for label in left_out if "measure_profile" not in label] == []
    assert all(process["tests"] for process in processes.values())


def test_what_serves_an_8b_model_in_bf16_comes_first_on_a_gpu(plan):
    text, _ = plan
    parts = text.split("tests\n")[1:]
    assert "measure_" not in parts[0]
    for labels in (part.splitlines() for part in parts[: runner.PARTS["kernels"].processes]):
        fp32 = [index for index, label in enumerate(labels) if "float32" in label]
        assert fp32
        assert all(index > place for index in fp32 for place, label in enumerate(labels) if "bfloat16" in label)
    assert "test_the_engine_starts[8B shape, random, bf16]" in parts[runner.PARTS["kernels"].processes]
    assert all(f"demo, bf16, {kind}, head, tree" in text for kind in HEADS)


def test_a_dry_run_says_what_there_is_no_time_for(capsys):
    assert runner.dry_run(parse(["--dry-run", "--only", "exact", "--seconds", "80"])) == 0
    first = json.loads(capsys.readouterr().out.splitlines()[-1])["exact 1"]
    assert first["until"] <= 80
    assert 0 < len(first["left_out"]) < first["tests"]


TESTS = """
import os, pytest, torch
from pathlib import Path
from triton.runtime.errors import OutOfResources
from tests.gpu_check.report import read
from tests.device import orders
pytestmark = pytest.mark.gpu

@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sorted(dtype, record_property):
    record_property("exact", {"ok": True, "dtype": str(dtype)})

@pytest.mark.gpu(served=True)
def test_first(pytestconfig):
    assert read(Path(orders(pytestconfig)["report"]))["running"]["label"].endswith("test_first")

def test_wrong(record_property):
    record_property("exact", {"ok": False})
    assert 1 == 2

def test_dies():
    os._exit(11)

def test_large():
    raise OutOfResources(300_000, 232_448, "shared memory")

def test_without():
    pytest.skip("not installed: hydra")

@pytest.fixture(scope="module")
def engine():
    raise RuntimeError("out of memory")

@pytest.mark.parametrize("way", "ab")
def test_engine(engine, way): ...

@pytest.mark.gpu(seconds=1e6)
def test_long():
    raise AssertionError("begun")
"""


@pytest.fixture
def job(tmp_path):
    """Return `job(text, **options)`: a process that runs the tests in `text` has ended; returns its report."""

    def run(text, until=3600.0, **orders):
        file = tmp_path / "test_some.py"
        end = time.monotonic() + until
        made = runner.Job("some", [str(file)], tmp_path, orders | {"until": end}, until=end)
        file.write_text(text)
        runner.run_jobs([made])
        assert made.ended
        document = runner.merged(report.empty() | {"hardware": "h", "packages": []}, [made])
        return json.loads(json.dumps(document).replace(f"{file.name}::", ""))

    return run


def test_a_report_survives_what_tests_do(job):
    """A wrong result, an error, a process that ends, a kernel that does not compile, and what cannot run."""
    document = job(TESTS)
    wrong, died, unmade = document["failures"]
    assert unmade.endswith("test_engine[a]: RuntimeError: out of memory")
    assert "test_wrong: AssertionError" in wrong
    assert died.endswith("test_dies: its process ended with exit code 11")
    (label,) = document["compile_failures"]
    assert label.endswith("test_large")
    assert document["compile_failures"][label].startswith("OutOfResources")
    names = [label.rpartition("/")[2] for label in document["done"]]
    assert names[0] == "test_first"
    ran = ["test_first", "test_sorted[torch.bfloat16]", "test_sorted[torch.float32]", "test_wrong", "test_dies"]
    assert sorted(names) == sorted([*ran, "test_large", "test_engine[a]"])
    assert names.index("test_sorted[torch.bfloat16]") < names.index("test_sorted[torch.float32]")
    unmade, without, long = sorted((entry["why"] for entry in document["left_out"]), reverse=True)
    assert unmade == "what it needs could not be made: RuntimeError: out of memory"
    assert without == "not installed: hydra"
    assert long.startswith("it takes up to 1000000 s, and ")
    assert [line["ok"] for line in document["exact"]].count(False) == 1
    said = report.card(document)
    assert f"FAILED {died}" in said
    assert f"DOES NOT COMPILE {label}: OutOfResources" in said
    assert "(not installed: hydra)" in said
    assert "exactness: 2 of 3 ways" in said


def test_what_cannot_be_collected_or_started_is_a_failure(job):
    (failure,) = job("import no_such_module\n")["failures"]
    assert "it cannot be collected" in failure
    assert "no_such_module" in failure
    (failure,) = job("raise SystemExit(3)\n")["failures"]
    assert "3" in failure


def test_a_process_that_hangs_is_killed(job, monkeypatch):
    monkeypatch.setattr(runner.Job, "hangs", lambda self: report.read(self.report)["running"] is not None)
    monkeypatch.setattr(runner.Job, "overdue", lambda self: True)
    head = "import time, pytest\npytestmark = pytest.mark.gpu\n"
    document = job(head + "def test_hangs():\n    time.sleep(3600)\ndef test_after(): ...\n")
    (failure,) = document["failures"]
    assert failure.endswith("test_hangs: its process ended with exit code -9")
    (left,) = document["left_out"]
    assert left["what"].endswith("test_after")
    assert left["why"] == "its process had ended"


def test_a_process_that_only_compiles_says_where_it_ended(tmp_path):
    file = tmp_path / "test_some.py"
    file.write_text("import os, pytest\n@pytest.mark.gpu\ndef test_dies(compare):\n    os._exit(7)\n")
    conftest = tmp_path / "conftest.py"
    conftest.write_text("import pytest\n@pytest.fixture\ndef compare(): ...\n")
    made = runner.Job("compile", [str(file)], tmp_path, {"compiles": "kernels"})
    runner.run_jobs([made])
    document = report.empty() | {"compile": {}}
    runner.add_compiled(document, [made], 1.0)
    (unfinished,) = document["compile"]["kernels"]["unfinished"]
    assert "test_dies (exit code 7)" in unfinished


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
    environment, options = {"PYTHONPATH": f"{tmp_path}:{REPO_ROOT}"}, ["-p", "broken_plugin", "-k", "chain or waits"]
    made = runner.Job("exact", [EXACT], tmp_path, {}, environment, options=options)
    runner.run_jobs([made])
    dead, waits = report.read(made.report)["failures"]
    assert "drafting failed in 2 requests, which went on without" in dead
    assert "the host waited for the GPU at infer/kvcache/pool.py:118 table[slot, place] = page" in waits


def test_results_by_another_assembler_are_listed_under_its_name(job):
    text = """
import pytest
@pytest.fixture
def compare(record_property):
    return lambda ok: record_property("kernels/correctness", {"ok": ok})
@pytest.mark.gpu
def test_accept(compare):
    compare(False)
    compare(True)
@pytest.mark.gpu
def test_engine(): ...
"""
    document = job(text, ptxas="ptxas 13.1.80")
    assert list(document["kernels"]) == ["ptxas 13.1.80"]
    assert [label.startswith("ptxas 13.1.80: ") for label in document["done"]] == [True]
    assert "kernels as ptxas 13.1.80 makes them: 1 of 2 comparisons hold" in report.card(document)


def test_other_assemblers_are_found_by_their_version(tmp_path, monkeypatch):
    for version in ("12.8.93", "13.1.80"):
        tool = tmp_path / version / "bin" / "ptxas"
        tool.parent.mkdir(parents=True)
        tool.write_text(f"#!/bin/sh\necho Cuda compilation tools, release {version[:4]}, V{version}\n")
        tool.chmod(0o755)
    monkeypatch.setattr(ptxas, "candidates", lambda: sorted(str(path) for path in tmp_path.glob("*/bin/ptxas")))
    for capability, variable, in_use in ((80, VARIABLES[0], "12.8.93"), (100, VARIABLES[1], "13.1.80")):
        for name in VARIABLES:  # of either capability's assembler: the other one's has no say
            monkeypatch.setenv(name, str(tmp_path / in_use / "bin" / "ptxas") if name == variable else "/none")
        (other,) = {"12.8.93", "13.1.80"} - {in_use}
        assert ptxas.other_ptxas(capability) == {other: str(tmp_path / other / "bin" / "ptxas")}
    assert ptxas.version_of(str(tmp_path)) is None


def test_other_assemblers_are_given_to_triton_for_every_gpu(monkeypatch, tmp_path):
    monkeypatch.setattr(runner, "other_ptxas", lambda capability: {"13.9.1": "/there/ptxas"})
    monkeypatch.setattr(runner, "limits", lambda device: B200)
    jobs = runner.Jobs(parse(["--only", "kernels"]), torch.device("cuda"), tmp_path)
    (job,) = (job for job in jobs.testing(["kernels"], None) if "13.9.1" in job.name)
    assert [job.environment[name] for name in VARIABLES] == 2 * ["/there/ptxas"]


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
    files = [file for part in runner.PARTS.values() for file in part.files]
    environment = {"PYTHONPATH": f"{tmp_path}:{REPO_ROOT}", "HEADWAY_TEST_DEVICE": "cuda"}
    made = runner.Job("plan", files, tmp_path, {}, environment, options=["-p", "blocked_plugin", "--collect-only"])
    runner.run_jobs([made])
    document = report.read(made.report)
    assert document["failures"] == []
    assert {test["file"] for test in document["planned"]} == set(files)
