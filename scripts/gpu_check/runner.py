"""Runs groups of checks in processes of their own, started anew after a check that ended them, until time is up."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import torch

from infer.graphs import warm_up
from infer.options.paths import REPO_ROOT
from kernels.triton import in_use
from scripts.gpu_check import ENDS, EXTRA, STAGES, compiling, plan
from scripts.gpu_check.measure import copy_bandwidth, rated, shortest_ms
from scripts.gpu_check.plan import Check, Group, LeftOut
from scripts.gpu_check.report import Report, card, circumstances, file_name

SPOILT = 75  # exit code of a process whose GPU context no longer works
STALLED = 60  # seconds beyond four times those of a check after which it hangs, and beyond a part's limit its process


def run(args: argparse.Namespace, argv: Sequence[str]) -> int:
    """Run the parts and return the exit code: 0 if nothing failed. `argv` is the command line that `args` come from.

    Raises ValueError if a GPU is needed and there is none.
    """
    begin, device = time.monotonic(), device_of(args.interpret)
    facts = circumstances(device, args.commit)
    name = "all" if args.only == [part for stage in STAGES for part in stage] else "-".join(args.only)
    report = Report.new(args.out.resolve() / file_name(facts["hardware"], name), facts)
    with ExitStack() as stack:
        work = args.work or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        command = [sys.executable, "-m", "scripts.gpu_check", *argv, "--work", str(work)]
        for stage, end in stages(args.only):
            until = None if args.interpret else begin + args.seconds * end
            started = time.monotonic()
            run_stage(Stage(command, report, plan.groups(stage, device, args), until, device))
            report.document["seconds"][", ".join(stage)] = round(time.monotonic() - started, 1)
            report.save()
    print(card(report.document))
    wrong = {"failures": report.failures, "compile_failures": report.compile_failures}
    print(json.dumps({"report": str(report.path), **wrong, "left_out": len(report.document["left_out"])}))
    return 1 if any(wrong.values()) else 0


def stages(parts: Sequence[str]) -> list[tuple[list[str], float]]:
    """Return the stages of these parts, and the share of all seconds after which each must end."""
    chosen = [
        ([part for part in stage if part in parts], end)
        for stage, end in zip((*STAGES, EXTRA), (*ENDS, 1.0), strict=True)
    ]
    chosen = [(stage, end) for stage, end in chosen if stage]
    return [*chosen[:-1], (chosen[-1][0], 1.0)]


def device_of(interpret: bool) -> torch.device:
    device = torch.device("cpu" if interpret else "cuda")
    if not interpret and not torch.cuda.is_available():
        raise ValueError("this machine has no usable GPU; --interpret runs the kernels in Triton's interpreter")
    assert in_use(device), "what is checked is Triton"
    return device


@dataclass(frozen=True)
class Stage:
    """Groups that run side by side until `until`, each in a process and a report of its own, merged into `report`."""

    command: Sequence[str]
    report: Report
    groups: Sequence[Group]
    until: float | None
    device: torch.device


def run_stage(stage: Stage) -> None:
    """Compile the kernels of all groups on all cores, then work through the groups side by side."""
    parts = {group.name: Report.new(stage.report.part_path(group.name), {}) for group in stage.groups}
    at_once = max(1, len(stage.groups))
    with ThreadPoolExecutor(max_workers=at_once) as pool:
        compiling_groups = [group for group in stage.groups if group.compiled]
        for done in [pool.submit(compile_group, stage, group, parts[group.name]) for group in compiling_groups]:
            done.result()
        running = {
            group.name: pool.submit(run_group, stage, group, parts[group.name].path)
            for group in stage.groups
            if group.checks
        }
        for name, part in parts.items():
            stage.report.merge(running[name].result() if name in running else part)
            part.path.unlink(missing_ok=True)


def compile_group(stage: Stage, group: Group, report: Report) -> None:
    """Compile the group's kernels in processes, as many as its share of all that is to be compiled allows."""
    limit, workers = None, 1
    if stage.until is not None:
        limit = min(compiling.SECONDS, (stage.until - time.monotonic()) / 3)
        everything = sum(len(each.compiled) for each in stage.groups)
        workers = max(1, round((os.cpu_count() or 1) * len(group.compiled) / everything))
    command = [*stage.command, "--group", group.name]
    report.document["compile"] = compiling.compile_kernels(command, workers, limit, environment_of(group, threads=1))
    report.save()


def environment_of(group: Group, threads: int) -> dict[str, str]:
    """`threads`: of the process on the CPU, unless the user has said; those of many processes wait for each other."""
    return {"OMP_NUM_THREADS": str(threads), **os.environ, **group.environment}


def run_group(stage: Stage, group: Group, file: Path) -> Report:
    """Work through the checks of a group; return its report, which grows in `file`."""
    command = [*stage.command, "--group", group.name, "--report", str(file), "--until", str(stage.until or "inf")]
    threads = max(1, (os.cpu_count() or 1) // len(stage.groups))
    return run_process(group.name, command, file, stage.until, environment_of(group, threads))


def run_process(
    name: str, command: Sequence[str], file: Path, until: float | None, environment: Mapping[str, str] | None = None
) -> Report:
    """Run `command`, which works through a group, until it has; what is running when it ends has failed.

    Returns the report of `file`, to which the command writes.
    """
    while True:
        code = watch(command, file, until, environment)
        report = Report.read(file)
        if code == 0:
            return report
        if running := report.document["running"]:
            report.fail(running["label"], f"its process ended with exit code {code}")
        elif code != SPOILT:  # not in a check, so it would end the same way again
            report.fail(name, f"its process ended with exit code {code}")
            return report


def watch(command: Sequence[str], file: Path, until: float | None, environment: Mapping[str, str] | None = None) -> int:
    """Return the command's exit code; with `until` it is killed when a check hangs, or long after that time."""
    process = subprocess.Popen(command, cwd=REPO_ROOT, env=environment)
    while True:
        try:
            return process.wait(None if until is None else 1)
        except subprocess.TimeoutExpired:
            if until is not None and (time.monotonic() > until + STALLED or hangs(file)):
                process.kill()
                return process.wait()


def hangs(file: Path) -> bool:
    """Return whether the check that is running began too long ago; the file is written when it begins."""
    since = time.time() - file.stat().st_mtime
    if since < STALLED:
        return False
    running = Report.read(file).document["running"]
    return running is not None and since > STALLED + 4 * running["seconds"]


def work(args: argparse.Namespace) -> int:
    """Work through one group, continuing its report; return 0 when done, or SPOILT."""
    device = device_of(args.interpret)
    report = Report.read(args.report)
    (group,) = [group for group in plan.groups(args.only, device, args) if group.name == args.group]
    if group.part in ("bench", "timings") and "copy_gb_s" not in report.document:
        report.document["copy_gb_s"] = round(copy_bandwidth(device), 1)
        report.document["shortest_ms"] = shortest_ms(device)
        report.save()
    with nullcontext() if group.warms_up else patch.object(warm_up, "compiles", lambda device: False):
        return 0 if work_through(group, report, device, args.until) else SPOILT


def work_through(group: Group, report: Report, device: torch.device, until: float) -> bool:
    """Run the group's checks that are not settled and for which there is time; return whether the GPU still works."""
    for check in group.checks:
        if check.label in report.settled:
            continue
        left = until - time.monotonic()
        if check.needs in report.document["failed"]:
            report.leave_out(check.label, f"{check.needs} failed")
        elif device.type == "cuda" and left < check.seconds:
            report.leave_out(check.label, f"it takes up to {check.seconds:.0f} s, and {max(0, left):.0f} s were left")
        else:
            attempt(check, report)
            if device.type == "cuda" and not usable(device):
                return False
    group.close()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return True


def attempt(check: Check, report: Report) -> None:
    """Run a check and put into the report what came of it."""
    report.begin(check)
    begin = time.monotonic()
    try:
        lines = check.run()
    except LeftOut as reason:
        report.leave_out(check.label, str(reason))
    except Exception as error:
        traceback.print_exc()
        fail = report.fail_to_compile if compiling.is_compile_failure(error) else report.fail
        fail(check.label, compiling.describe(error), time.monotonic() - begin)
    else:
        if check.place[-1] == "timings":
            lines = [rated(line, report.document["copy_gb_s"]) for line in lines]
        report.end(check, time.monotonic() - begin, lines)


def usable(device: torch.device) -> bool:
    """Return whether this process can still use the GPU: an illegal access spoils its context for good."""
    try:
        torch.cuda.synchronize(device)
    except RuntimeError:
        return False
    return True


def dry_run(args: argparse.Namespace) -> int:
    """Print what each part would run on a GPU, how long that takes at most, and what its time does not suffice for."""
    document, begin = {}, 0.0
    for stage, end in stages(args.only):
        longest = begin
        for group in plan.groups(stage, torch.device("cuda"), args):
            now, left_out = begin + (compiling.EXPECTED if group.compiled else 0.0), []
            print(f"{group.part}, {group.name}: {len(group.checks)} checks")
            for check in group.checks:
                fits = now + check.seconds <= args.seconds * end
                now += check.seconds if fits else 0.0
                print(f"  {check.seconds:6.1f} s  {check.label}{'' if fits else ' (no time)'}")
                left_out += [] if fits else [check.label]
            document[group.name] = {"checks": len(group.checks), "until": round(now, 1), "left_out": left_out}
            longest = max(longest, now)
        begin = longest
    print(json.dumps(document))
    return 0
