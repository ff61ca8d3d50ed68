"""Runs processes of pytest side by side, started anew after a test that ended them, until time is up."""

from __future__ import annotations

import argparse
import copy
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from infer.options.paths import REPO_ROOT
from kernels.dispatch import uses_triton
from kernels.triton.assembler import VARIABLES
from kernels.triton.device import limits
from tests.gpu_check.plugin import SPOILT, share
from tests.gpu_check.ptxas import other_ptxas
from tests.gpu_check.report import Document, add_to, card, circumstances, empty, read, save, settled

STALLED = 60  # seconds beyond four times those of a test after which it hangs, and beyond a stage's end its process
COMPILING = 120  # seconds that compiling may take on a GPU, and a third of the first stage's
COMPILED = 40  # seconds that it takes with 16 cores
POLL = 1.0  # seconds between looks at the processes
COMPLETE = (0, 1, 5)  # exit codes of pytest: all passed, some failed, none was left to run
KEPT = 1500  # characters of what a process printed last
TRITON = "tests/kernels/triton"  # where measure_*.py are collected only when they are named
LIBRARIES = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONUNBUFFERED": "1"}


class Part(NamedTuple):
    """A part of the check: the files of its tests, and how many processes share them on a GPU."""

    files: Sequence[str]
    processes: int = 1
    compiled: bool = False  # in processes of their own, before the tests run


def marked_files(folder: str) -> list[str]:
    """Return the test files in which a test is marked `gpu`: the only ones worth importing."""
    files = sorted((REPO_ROOT / folder).rglob("test_*.py"))
    return [str(file.relative_to(REPO_ROOT)) for file in files if "mark.gpu" in file.read_text(encoding="utf-8")]


EXACT, TRAIN = (f"{TRITON}/test_{name}.py" for name in ("engine", "training_run"))
PARTS = {
    "kernels": Part([file for file in marked_files("tests/kernels") if file not in (EXACT, TRAIN)], 4, compiled=True),
    "exact": Part([EXACT], 6),
    "train": Part([TRAIN]),
    "bench": Part([f"{TRITON}/measure_engines.py"]),
    "timings": Part([f"{TRITON}/measure_kernels.py"], compiled=True),
    "tiles": Part([f"{TRITON}/measure_tiles.py"], compiled=True),
}
# The parts of the first stage only ask whether results are right, so they run side by side; what is timed runs alone.
# Each stage ends after a share of all seconds; what it does not use is left to the next.
STAGES = ((("kernels", "exact", "train"), 0.5), (("bench",), 0.8), (("timings",), 1.0), (("tiles",), 1.0))


@dataclass
class Job:
    """A process that works through tests, `orders` (see `plugin.Worker`) telling it which, and its report in `folder`.

    One that `compiles` ends when it ends; another is started again after a test that ended it. Either is killed after
    `until`, or when a test hangs; with None it is waited for.
    """

    name: str
    files: Sequence[str]
    folder: Path
    orders: dict[str, Any]
    environment: Mapping[str, str] = field(default_factory=dict)
    until: float | None = None
    options: Sequence[str] = ()
    ended: bool = False
    process: subprocess.Popen[bytes] | None = None

    def __post_init__(self) -> None:
        self.report = self.folder / f"{self.name}.json"
        save(self.report, empty())

    def start(self) -> None:
        orders = json.dumps(self.orders | {"report": str(self.report)})
        command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.gpu_check.plugin", "-p", "no:cacheprovider"]
        command += ["-m", "gpu", "-o", "python_functions=test measure", "--continue-on-collection-errors"]
        command += ["--tb=short", "--gpu-orders", orders, *self.options, *self.files]
        with self.report.with_suffix(".log").open("ab") as log:
            environment = {**os.environ, **LIBRARIES, **self.environment}
            self.process = subprocess.Popen(command, cwd=REPO_ROOT, env=environment, stdout=log, stderr=log)

    def look(self) -> None:
        """See whether the process has ended, and end it if it hangs; what is running when it ends has failed."""
        assert self.process is not None
        code = self.process.poll()
        if code is None:
            if self.hangs():
                self.process.kill()
            return
        document = read(self.report)
        running, complete = document["running"], document.get("ended") and code in COMPLETE
        said = self.report.with_suffix(".log").read_text(encoding="utf-8", errors="replace")[-KEPT:]
        self.ended = complete or bool(self.orders.get("compiles"))
        if complete:
            pass
        elif self.ended:
            label = running["label"] if running else "not in a test"
            document["unfinished"] = [f"{label} (exit code {code}): {said if code > 0 else ''}"]
        elif running:
            document["failures"].append(f"{running['label']}: its process ended with exit code {code}")
            document["done"][running["label"]], document["running"] = 0.0, None
            self.ended = self.overdue()
        elif code != SPOILT:  # not in a test, so it would end the same way again
            document["failures"].append(f"{self.name}: its process ended with exit code {code}: {said}")
            self.ended = True
        if self.ended:
            left = {test["label"] for test in document.get("planned", ())} - settled(document)
            document["left_out"] += [{"what": label, "why": "its process had ended"} for label in sorted(left)]
        save(self.report, document)
        if not self.ended:
            self.start()

    def overdue(self) -> bool:
        """Return whether it should have ended by itself."""
        spare = 0 if self.orders.get("compiles") else STALLED
        return self.until is not None and time.monotonic() > self.until + spare

    def hangs(self) -> bool:
        """Return whether its time is up, or its test began too long ago; the report is written when one begins."""
        since, running = time.time() - self.report.stat().st_mtime, read(self.report)["running"]
        stalls = running is not None and since > STALLED + 4 * running["seconds"]
        return self.until is not None and (stalls or self.overdue())


def run_jobs(jobs: Sequence[Job], publish: Callable[[], None] = lambda: None) -> None:
    """Run jobs side by side until each has ended; `publish` is called after every look at them."""
    for job in jobs:
        job.start()
    while not all(job.ended for job in jobs):
        time.sleep(POLL)
        for job in jobs:
            if not job.ended:
                job.look()
        publish()


def run(args: argparse.Namespace) -> int:
    """Run the parts and return the exit code: 0 if nothing failed.

    Raises ValueError if a GPU is needed and there is none.
    """
    begin, device = time.monotonic(), torch.device("cpu" if args.interpret else "cuda")
    if not args.interpret:
        if not torch.cuda.is_available():
            raise ValueError("this machine has no usable GPU; --interpret runs the kernels in Triton's interpreter")
        torch.zeros(1, device=device)  # raises here if the driver does not work
    assert uses_triton(device), "what is checked is Triton"
    document = {"what": "gpu_check", **circumstances(device, args.commit), **empty(), "compile": {}, "seconds": {}}
    hardware = re.sub(r"[^a-z0-9]+", "-", document["hardware"].lower()).strip("-")
    whole = [part for stage, _ in STAGES[:-1] for part in stage]
    name = "all" if args.only == whole else "-".join(args.only)
    path = args.out.resolve() / f"gpu-check-{name}_{hardware}_{time.strftime('%Y-%m-%d')}.json"
    save(path, document)
    with tempfile.TemporaryDirectory() as folder:
        make = Jobs(args, device, Path(folder))
        limit = None if args.interpret else begin + min(COMPILING, args.seconds * stages(args.only)[0][1] / 3)
        compiling = make.compiling(limit)
        run_jobs(compiling)
        add_compiled(document, compiling, round(time.monotonic() - begin, 1))
        for stage, end in stages(args.only):
            until = None if args.seconds is None else begin + args.seconds * end
            started, jobs = time.monotonic(), make.testing(stage, until)
            run_jobs(jobs, lambda before=document, jobs=jobs: save(path, merged(before, jobs)))
            document = merged(document, jobs)
            document["seconds"][", ".join(stage)] = round(time.monotonic() - started, 1)
            save(path, document)
    print(card(document))
    wrong = {"failures": document["failures"], "compile_failures": list(document["compile_failures"])}
    print(json.dumps({"report": str(path), **wrong, "left_out": len(document["left_out"])}))
    return 1 if any(wrong.values()) else 0


def stages(parts: Sequence[str]) -> list[tuple[list[str], float]]:
    """Return the stages of these parts, and the share of all seconds after which each must end."""
    chosen = [([part for part in stage if part in parts], end) for stage, end in STAGES]
    chosen = [(stage, end) for stage, end in chosen if stage]
    return [*chosen[:-1], (chosen[-1][0], 1.0)]


class Jobs:
    """Makes the jobs of a run; reports and what is trained lie in `folder`."""

    def __init__(self, args: argparse.Namespace, device: torch.device, folder: Path) -> None:
        self._args, self._folder, self._on_gpu = args, folder, device.type == "cuda"
        self._cores = os.cpu_count() or 1
        cache = f"{tempfile.gettempdir()}/headway-ptxas-"
        others = self._on_gpu and not args.bundled_ptxas and "kernels" in args.only
        # by the name of another ptxas of this machine, what makes kernels by it
        self._assemblers = {
            f"ptxas {version}": {**dict.fromkeys(VARIABLES, path), "TRITON_CACHE_DIR": cache + version}
            for version, path in (other_ptxas(limits(device).capability).items() if others else ())
        }

    def _job(self, name: str, files: Sequence[str], until: float | None, threads: int, **orders: Any) -> Job:
        args = self._args
        environment = self._assemblers.get(orders.get("ptxas", ""), {})
        environment = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads)), **environment}
        orders |= {"minutes": args.minutes, "head": args.head and str(args.head), "work": str(self._folder)}
        # how long a test takes in the interpreter is not known
        return Job(name, files, self._folder, orders | {"until": until}, environment, until if self._on_gpu else None)

    def compiling(self, until: float | None) -> list[Job]:
        """Return processes, one for each core, that launch all kernels that are compared or timed.

        The interpreter compiles nothing: one of them shows that this works.
        """
        files = [file for part in self._args.only if PARTS[part].compiled for file in PARTS[part].files]
        pools: dict[str, tuple[Sequence[str], dict[str, Any]]] = {"kernels": (files, {})} if files else {}
        pools |= {name: (PARTS["kernels"].files, {"ptxas": name}) for name in self._assemblers}
        processes = max(1, self._cores // max(1, len(pools))) if self._on_gpu else 1
        shares = processes if self._on_gpu else 60
        return [
            self._job(f"compile {name} {index}", files, until, 1, compiles=name, index=index, count=shares, **ptxas)
            for name, (files, ptxas) in pools.items()
            for index in range(processes)
        ]

    def testing(self, parts: Sequence[str], until: float | None) -> list[Job]:
        made = list[tuple[str, str, dict[str, Any]]]()
        for part in parts:
            if part == "train" and not (self._on_gpu and self._args.minutes > 0):
                continue
            count = PARTS[part].processes if self._on_gpu else 1
            for index in range(count):
                made.append((part if count == 1 else f"{part} {index + 1}", part, {"index": index, "count": count}))
        if "kernels" in parts:
            made += [(f"kernels, {name}", "kernels", {"ptxas": name}) for name in self._assemblers]
        threads = max(1, self._cores // max(1, len(made)))
        return [self._job(name, PARTS[part].files, until, threads, **orders) for name, part, orders in made]


def merged(document: Document, jobs: Sequence[Job]) -> Document:
    """Return the report with what those of the jobs hold, and what is running in each."""
    whole, running = copy.deepcopy(document), {}
    for job in jobs:
        part = read(job.report)
        if part["running"]:
            running[job.name] = part["running"]["label"]
        add_to(whole, {key: value for key, value in part.items() if key not in ("running", "ended", "planned")})
    return whole | {"running": running or None}


def add_compiled(document: Document, jobs: Sequence[Job], seconds: float) -> None:
    """Add what the processes that compiled say: variants by kernel, what does not compile and what did not end."""
    for name in dict.fromkeys(job.orders["compiles"] for job in jobs):
        parts = [read(job.report) for job in jobs if job.orders["compiles"] == name]
        variants = {variant for part in parts for variant in part.get("variants", ())}
        document["compile"][name] = {
            "processes": len(parts),
            "seconds": seconds,
            "variants": dict(Counter(variant.split()[0] for variant in sorted(variants))),
            "unfinished": [text for part in parts for text in part.get("unfinished", ())],
        }
        for part in parts:
            document["compile_failures"].update(part["compile_failures"])


def dry_run(args: argparse.Namespace) -> int:
    """Print what each part would run on a GPU, how long that takes at most, and what its time does not suffice for."""
    files = [file for part in args.only for file in PARTS[part].files]
    with tempfile.TemporaryDirectory() as folder:
        job = Job("plan", files, Path(folder), {}, {"HEADWAY_TEST_DEVICE": "cuda"}, options=["--collect-only"])
        run_jobs([job])
        plan = read(job.report)
    if plan["failures"]:
        raise ValueError("; ".join(plan["failures"]))
    document, begin = {}, 0.0
    for stage, end in stages(args.only):
        ends = [begin]
        for part in stage:
            tests = [test for test in plan["planned"] if test["file"] in PARTS[part].files]
            for index in range(PARTS[part].processes):
                now, left_out = begin + (COMPILED if part == "kernels" else 0.0), []
                places = share([test["unit"] for test in tests], index, PARTS[part].processes)
                print(f"{part} {index + 1}: {len(places)} tests")
                for test in (tests[place] for place in places):
                    fits = now + test["seconds"] <= args.seconds * end
                    now += test["seconds"] if fits else 0.0
                    print(f"  {test['seconds']:6.1f} s  {test['label']}{'' if fits else ' (no time)'}")
                    left_out += [] if fits else [test["label"]]
                document[f"{part} {index + 1}"] = {"tests": len(places), "until": round(now, 1), "left_out": left_out}
                ends.append(now)
        begin = max(ends)
    print(json.dumps(document))
    return 0
