"""Runs the checks in a process of their own, which is started anew after a check that ended it, until time is up."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

import torch

from infer.config_checks import REPO_ROOT
from kernels.triton import in_use
from scripts.gpu_check import PARTS, compiling, plan
from scripts.gpu_check.measure import copy_bandwidth, rated, shortest_ms
from scripts.gpu_check.plan import Check, Group, LeftOut
from scripts.gpu_check.report import Report, card, circumstances, file_name

SPOILT = 75  # exit code of a process whose GPU context no longer works
STALLED = 60  # seconds beyond four times those of a check after which it hangs, and beyond a part's limit its process


def run(args: argparse.Namespace, argv: Sequence[str]) -> int:
    """Run the parts and return the exit code: 0 if nothing failed. `argv` is the command line that `args` come from.

    Raises ValueError if a GPU is needed and there is none.
    """
    device = device_of(args.interpret)
    facts = circumstances(device, args.commit)
    name = "all" if len(args.only) == len(PARTS) else "-".join(args.only)
    report = Report.new(args.out.resolve() / file_name(facts["hardware"], name), facts)
    command = [sys.executable, "-m", "scripts.gpu_check", *argv, "--report", str(report.path)]
    for part in args.only:
        begin = time.monotonic()
        limit = None if args.interpret else args.seconds
        if part == "kernels":
            workers, most = (1, None) if limit is None else (os.cpu_count() or 1, min(compiling.SECONDS, limit / 3))
            report.document["compile"] = compiling.compile_kernels(command, workers, most)
            report.save()
        until = None if limit is None else begin + limit
        report = run_part(part, [*command, "--part", part, "--until", str(until or "inf")], report.path, until)
        report.document["seconds"][part] = round(time.monotonic() - begin, 1)
        report.save()
    print(card(report.document))
    wrong = {"failures": report.failures, "compile_failures": report.document["compile"]["failures"]}
    print(json.dumps({"report": str(report.path), **wrong, "left_out": len(report.document["left_out"])}))
    return 1 if any(wrong.values()) else 0


def device_of(interpret: bool) -> torch.device:
    device = torch.device("cpu" if interpret else "cuda")
    if not interpret and not torch.cuda.is_available():
        raise ValueError("this machine has no usable GPU; --interpret runs the kernels in Triton's interpreter")
    assert in_use(device), "what is checked is Triton"
    return device


def run_part(part: str, command: Sequence[str], file: Path, until: float | None) -> Report:
    """Run `command`, which works through the part, until it has; what is running when it ends has failed.

    Returns the report of `file`, to which the command writes.
    """
    while True:
        code = watch(command, file, until)
        report = Report.read(file)
        if code == 0:
            return report
        if running := report.document["running"]:
            report.fail(running["label"], f"its process ended with exit code {code}")
        elif code != SPOILT:  # not in a check, so it would end the same way again
            report.fail(part, f"its process ended with exit code {code}")
            return report


def watch(command: Sequence[str], file: Path, until: float | None) -> int:
    """Return the command's exit code; with `until` it is killed when a check hangs, or long after that time."""
    process = subprocess.Popen(command, cwd=REPO_ROOT)
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
    """Work through one part, continuing the report; return 0 when done, or SPOILT."""
    device = device_of(args.interpret)
    report = Report.read(args.report)
    if "copy_gb_s" not in report.document:
        report.document["copy_gb_s"] = round(copy_bandwidth(device), 1)
        report.document["shortest_ms"] = shortest_ms(device)
        report.save()
    for group in plan.groups(args.part, device, args):
        if not work_through(group, report, device, args.until):
            return SPOILT
    return 0


def work_through(group: Group, report: Report, device: torch.device, until: float) -> bool:
    """Run the group's checks that are not settled and for which there is time; return whether the GPU still works."""
    for check in group.checks:
        if check.label in report.settled:
            continue
        left = until - time.monotonic()
        if device.type == "cuda" and left < check.seconds:
            report.leave_out(check.label, f"it takes up to {check.seconds:.0f} s, and {max(0, left):.0f} s were left")
            continue
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
    document = {}
    for part in args.only:
        checks = [check for group in plan.groups(part, torch.device("cuda"), args) for check in group.checks]
        seconds, left_out = compiling.SECONDS if part == "kernels" else 0.0, []
        for check in checks:
            if seconds + check.seconds > args.seconds:
                left_out.append(check.label)
            else:
                seconds += check.seconds
        print(f"{part}: {len(checks)} checks, up to {seconds:.0f} of {args.seconds:.0f} s")
        print("\n".join(f"  {check.seconds:6.1f} s  {check.label}" for check in checks))
        document[part] = {"checks": len(checks), "seconds": round(seconds, 1), "left_out": left_out}
    print(json.dumps(document))
    return 0
