"""Runs what is marked `gpu` in processes of pytest side by side, within a call of ten minutes: scripts/gpu_check.sh.

Each process has a share of the tests (tests/gpu_hook.py); after a test that ended it, another goes on.
"""

from __future__ import annotations

import infer.options.environment  # noqa: F401

# isort: split

import argparse
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from scripts.errors import reports_errors

ROOT = Path(__file__).resolve().parents[1]
TOOLKITS = Path("/usr/local")
NEEDED = ("torch", "triton", "transformers", "pytest", "hypothesis")
TRITON = "tests/kernels/triton"  # where measure_*.py are collected only when they are named
MEASURES = {name: name for name in ("scaling", "training", "learning")}
MEASURES |= {"bench": "engines", "timings": "kernels", "tiles": "tiles"}
FILES = {"exact": f"{TRITON}/test_engine.py", "train": f"{TRITON}/test_training_run.py"}
FILES |= {part: f"{TRITON}/measure_{name}.py" for part, name in MEASURES.items()}
PARTS = ("kernels", *FILES)  # the last runs only where it is named
# What two calls of ten minutes run, less one to start and to end: the parts of a stage, and its seconds, to which those
# are added that the stages before it have not used. The parts of the first stage only ask whether results are right, so
# they run side by side; what is timed runs alone.
CALLS = {
    1: ((("kernels", "exact", "train"), 220.0), (("scaling",), 320.0)),
    2: ((("training",), 115.0), (("learning",), 85.0), (("bench",), 205.0), (("timings",), 135.0)),
}
STAGES = (*CALLS[1], *CALLS[2], (("tiles",), 135.0))
SECONDS = sum(seconds for _, seconds in CALLS[1])  # of a call
PROCESSES = {"kernels": 8, "exact": 6}  # that share a part on a GPU; others have one


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="./scripts/gpu_check.sh", description=__doc__, allow_abbrev=False)
    out = Path(os.environ.get("OUT") or ROOT / "scripts" / "results")
    parser.add_argument("--call", type=int, choices=CALLS, help="the parts of one of two calls; default: of both")
    parser.add_argument("--only", action="append", choices=PARTS, help="one part; may be given more than once")
    parser.add_argument("--out", type=Path, default=out, metavar="FOLDER", help="of the report; default: $OUT if set")
    parser.add_argument("--seconds", type=float, help=f"of all parts together; default: {SECONDS:.0f} a call on a GPU")
    parser.add_argument("--dry-run", action="store_true", help="list what would run, and how long it takes at most")
    parser.add_argument("--interpret", action="store_true", help="on a CPU, in Triton's interpreter, with tiny shapes")
    parser.add_argument("--head", type=Path, metavar="FOLDER", help="an EAGLE-3 head of the demo target; else trained")
    parser.add_argument("--commit", help="what is checked, where the tree is a copy without its history")
    args = parser.parse_args(argv)
    calls = 2 if args.call is args.only is None else 1
    called = [part for stage, _ in (CALLS[args.call] if args.call else STAGES[:-1]) for part in stage]
    args.only = [part for part in PARTS if part in (args.only or called)]
    args.seconds = args.seconds or (None if args.interpret else calls * SECONDS)
    args.head = args.head and str(args.head.resolve())
    if args.head and not Path(args.head, "config.json").is_file():
        raise ValueError(f"--head {args.head}: no head lies there; give the folder with its config.json")
    return args


def files_of(part: str) -> list[str]:
    """Return the files of a part; `kernels`: those in which a test is marked `gpu`, but those of other parts."""
    files = sorted((ROOT / "tests/kernels").rglob("test_*.py")) if part == "kernels" else []
    marked = (str(file.relative_to(ROOT)) for file in files if "mark.gpu" in file.read_text(encoding="utf-8"))
    return [FILES[part]] if part in FILES else [file for file in marked if file not in FILES.values()]


def other_ptxas() -> dict[str, dict[str, str]]:
    """Return what makes Triton call each ptxas of this machine but its own, by version: one may make wrong code of a
    kernel of which another makes right code.
    """
    import torch

    from kernels.triton.assembler import VARIABLES, version_in_use, version_of
    from kernels.triton.device import limits

    found = [*sorted(TOOLKITS.glob("cuda*/bin/ptxas")), shutil.which("ptxas")]
    versions = {version_of(str(path)): str(Path(path).resolve()) for path in found if path}
    others = {*versions} - {None, version_in_use(limits(torch.device("cuda")).capability)}
    cache = f"{tempfile.gettempdir()}/headway-ptxas-"
    made = ((f"ptxas {version}", cache + str(version), versions[version]) for version in sorted(map(str, others)))
    return {name: {**dict.fromkeys(VARIABLES, path), "TRITON_CACHE_DIR": folder} for name, folder, path in made}


def jobs_of(parts: Sequence[str], later: Sequence[str], *, on_gpu: bool) -> list[dict[str, Any]]:
    """Return the processes of a stage, as orders of the hook, with their files; `later` parts are compiled there."""
    jobs: list[dict[str, Any]] = []
    for part in parts:
        count = PROCESSES.get(part, 1) if on_gpu else 1
        shares = ({"process": f"{part} {index + 1}", "index": index, "count": count} for index in range(count))
        jobs += [share | {"files": files_of(part)} for share in shares]
    if "kernels" in parts and on_gpu:
        more = {"files": files_of("kernels")}
        jobs += [more | {"process": name, "ptxas": name, "environment": env} for name, env in other_ptxas().items()]
        jobs += [{"process": f"compile {part}", "files": files_of(part), "compiles": True} for part in later]
    return jobs


def work(report: Path, options: Sequence[str], threads: int, job: dict[str, Any]) -> None:
    """Run the process, and another after each that a test ended, until its tests have ended or its time is over."""
    from tests.gpu_hook import STALLED, read, write

    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-o", "python_functions=test measure", "--tb=short"]
    command += ["-p", "no:cacheprovider", "--continue-on-collection-errors", *options, *job["files"]]
    command += ["--gpu-orders", json.dumps(job | {"report": str(report)})]
    environment = {"OMP_NUM_THREADS": str(threads), **os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    environment["HEADWAY_COMPILE_ALL"] = "1"  # what passed before, on this machine or another, is checked anew
    environment |= {**job.get("settings", {}), **job.get("environment", {})}
    begun, code = -1, None
    while code not in (0, 1, 5):  # of pytest: all passed, some failed, none was left to run
        timeout = None if job["until"] is None else max(1.0, job["until"] - time.monotonic()) + STALLED
        try:
            done = subprocess.run(command, timeout=timeout, cwd=ROOT, env=environment, capture_output=True, check=False)
        except subprocess.TimeoutExpired:
            return
        before, code = begun, done.returncode
        begun = sum("begun" in line and line["process"] == job["process"] for line in read(report))
        if code not in (0, 1, 5) and begun <= max(before, 0):  # not in a test, so it would end the same way again
            said = (done.stdout + done.stderr).decode(errors="replace")[-1500:]
            write(report, test=job["process"], outcome="failed", why=f"its process ended with exit code {code}: {said}")
            return


def circumstances(args: argparse.Namespace) -> dict[str, Any]:
    """Return what is checked, where and with which packages. Raises ValueError where a GPU is asked for and missing."""
    import torch
    import triton

    from kernels.triton.assembler import version_in_use
    from kernels.triton.device import limits
    from scripts.benchmarks.document import describe_machine

    if not args.interpret and not torch.cuda.is_available():
        raise ValueError("this machine has no usable GPU; --interpret runs the kernels in Triton's interpreter")
    ptxas = version_in_use(limits(torch.device("cpu" if args.interpret else "cuda")).capability)
    versions = {"triton": triton.__version__, "cuda": torch.version.cuda, "ptxas": ptxas}
    return describe_machine() | versions | ({"commit": args.commit} if args.commit else {})


def card(lines: Sequence[dict[str, Any]]) -> tuple[str, dict[str, list[str]]]:
    """Return the report as text, what matters most at the end, and the tests that failed and that were left out."""
    ended = {line["test"]: line for line in lines if "outcome" in line}
    planned = {label for line in lines for label in line.get("planned", ())}
    results = [result for line in ended.values() for result in line.get("results", ())]
    compared = [result["ok"] for place, result in results if place == "kernels/correctness"]
    said = (f"{place}: {json.dumps(result)}" for place, result in results if place != "kernels/correctness")
    text = [*dict.fromkeys(said)]  # what all of a process are compared with stands in each of their lines
    text.append(f"kernels: {sum(compared)} of {len(compared)} comparisons hold")
    left = {test: line["why"] for test, line in ended.items() if line["outcome"] == "skipped"}
    left |= dict.fromkeys(sorted(planned - set(ended)), "its process had ended")
    failed = {test: line["why"] for test, line in ended.items() if line["outcome"] == "failed"}
    text += [f"left out: {test} ({why})" for test, why in left.items()]
    text += [f"FAILED {test}: {why}" for test, why in failed.items()]
    return "\n".join(text), {"failed": [*failed], "left_out": [*left]}


@reports_errors
def main(argv: Sequence[str]) -> int:
    args, begin = parse(argv), time.monotonic()
    if missing := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
        raise ValueError(f"not installed: {', '.join(missing)}; scripts/README.md says which wheels to bring along")
    settings = {"TRITON_INTERPRET": "1", "HEADWAY_KERNELS": "triton"} if args.interpret else {}
    settings |= {"HEADWAY_TEST_DEVICE": "cuda"} if args.dry_run else {}
    from tests.gpu_hook import read, write

    with tempfile.TemporaryDirectory() as folder:
        more: dict[str, Any] = {"until": None, "head": args.head, "work": folder, "settings": settings}
        if args.dry_run:
            report, files = Path(folder, "report.jsonl"), [file for part in args.only for file in files_of(part)]
            work(report, ["--collect-only"], 1, more | {"process": "plan", "files": files})
            print(json.dumps(read(report)[-1]["planned"], indent=1))
            return 0
        facts = circumstances(args)
        hardware = (facts["gpu"] or "interpreter").lower().replace(" ", "-")
        name = f"gpu-check-{'-'.join(args.only)}_{hardware}_{time.strftime('%Y-%m-%d')}.jsonl"
        report = args.out.resolve() / name
        report.parent.mkdir(parents=True, exist_ok=True)
        report.unlink(missing_ok=True)
        write(report, **facts)
        chosen = [([part for part in stage if part in args.only], seconds) for stage, seconds in STAGES]
        chosen = [(stage, seconds) for stage, seconds in chosen if stage]
        ended, total = 0.0, sum(seconds for _, seconds in chosen)
        for stage, seconds in chosen:
            ended += seconds / total
            more["until"] = begin + args.seconds * ended if args.seconds else None
            later = [part for part in args.only if part in ("timings", "tiles")]
            jobs = jobs_of(stage, later, on_gpu=not args.interpret)
            threads = max(1, (os.cpu_count() or 1) // len(jobs))
            with ThreadPoolExecutor(len(jobs)) as pool:
                list(pool.map(partial(work, report, [], threads), (job | more for job in jobs)))
        text, totals = card(read(report))
    print(text, json.dumps({"report": str(report), **totals}), sep="\n")
    return 1 if totals["failed"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
