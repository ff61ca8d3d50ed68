"""Runs the parts one after another, even if some fail, and writes the report."""

from __future__ import annotations

import argparse
import importlib
import json
import re
import time
import traceback
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch

from kernels.triton import in_use
from scripts.gpu_check.measure import copy_bandwidth, rated
from train.publishing.provenance import git_state, versions

OPERATIONS = ("attention", "linear", "elementwise", "choose", "verify", "acceptance", "training")
SECONDS = {"kernels": 130, "exact": 130, "bench": 250}  # time limit of a part on a GPU; what it leaves out is reported


def run(args: argparse.Namespace) -> int:
    """Run the parts, write the report and return the exit code: 0 if nothing failed.

    Raises ValueError if a GPU is needed and there is none.
    """
    device = torch.device("cpu" if args.interpret else "cuda")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError("this machine has no usable GPU; --interpret runs the kernels in Triton's interpreter")
    assert in_use(device), "what is checked is Triton"
    begin = time.monotonic()
    bandwidth = copy_bandwidth(device)
    report: dict[str, Any] = {"what": "gpu_check", **circumstances(args, device), "copy_gb_s": round(bandwidth, 1)}
    failures: list[str] = []
    for part in args.only:
        started = time.monotonic()
        deadline = started + SECONDS[part]
        report[part] = PARTS[part](args, device, bandwidth, deadline, failures)
        report.setdefault("seconds", {})[part] = round(time.monotonic() - started, 1)
    report["failures"] = failures
    report["seconds"]["all"] = round(time.monotonic() - begin, 1)
    file = write(report, args.out)
    print(card(report))
    print(json.dumps({"report": str(file), "failures": failures}))
    return 1 if failures else 0


def kernels(
    args: argparse.Namespace, device: torch.device, bandwidth: float, deadline: float, failures: list[str]
) -> dict[str, Any]:
    correct: list[dict[str, Any]] = []
    times: list[dict[str, Any]] = []
    for operation in OPERATIONS:
        for into, name in ((correct, "correctness"), (times, "timings")):
            label = f"kernels: {operation}.{name}"
            if time.monotonic() > deadline:
                failures.append(f"{label}: no time was left")
                continue
            into += attempt(label, partial(call, operation, name, device), failures) or []
    for line in correct:
        if not line["ok"]:
            failures.append(f"kernels: {line['kernel']}, {line['case']}: error {line['error']} > {line['bound']}")
    return {"correctness": correct, "timings": [rated(line, bandwidth) for line in times]}


def call(operation: str, name: str, device: torch.device) -> list[dict[str, Any]]:
    return getattr(importlib.import_module(f"scripts.gpu_check.{operation}"), name)(device)


def exact(
    args: argparse.Namespace, device: torch.device, bandwidth: float, deadline: float, failures: list[str]
) -> list[dict[str, Any]]:
    from scripts.gpu_check import exactness

    lines = attempt("exact", lambda: exactness.check(device, deadline), failures) or []
    for line in lines:
        if not line.get("ok", True):
            label = ", ".join(f"{line[key]}" for key in ("target", "sampling", "drafts"))
            label += f", batch {line['batch']}, graphs {line['graphs']}"
            failures.append(f"exact: {label}: {line['different']} of {line['prompts']} prompts differ")
    return lines


def bench(
    args: argparse.Namespace, device: torch.device, bandwidth: float, deadline: float, failures: list[str]
) -> dict[str, Any] | None:
    from scripts.gpu_check import speculation

    run_bench = partial(speculation.bench, device, bandwidth, deadline, args.head, args.minutes)
    document = attempt("bench", run_bench, failures)
    if "training_failed" in (document or {}):
        failures.append(f"bench: {document['training_failed']}")
    for line in (document or {}).get("runs", ()):
        if not line.get("ok", True):
            name = f"{line['system']} at batch {line['batch']}, graphs {line['graphs']}"
            failures.append(f"bench: {name}: other token ids than plain decoding")
    return document


PARTS: dict[str, Callable[..., Any]] = {"kernels": kernels, "exact": exact, "bench": bench}


def attempt(label: str, call: Callable[[], Any], failures: list[str]) -> Any:
    """Return the call's result; an exception is added to `failures`, and None is returned."""
    try:
        return call()
    except Exception as error:
        traceback.print_exc()
        failures.append(f"{label}: {type(error).__name__}: {str(error)[:500]}")
        return None


def circumstances(args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    git = git_state()
    if git["commit"] is None:
        git["commit"] = args.commit
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "Triton's interpreter"
    packages = versions() | {"triton": importlib.import_module("triton").__version__, "cuda": torch.version.cuda}
    created = datetime.now(UTC).isoformat(timespec="seconds")
    return {"hardware": name, "created": created, "git": git, "versions": packages}


def write(report: dict[str, Any], out: Path) -> Path:
    hardware = re.sub(r"[^a-z0-9]+", "-", report["hardware"].lower()).strip("-")
    file = out / f"gpu-check_{hardware}_{report['created'][:10]}.json"
    out.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return file


def card(report: dict[str, Any]) -> str:
    lines = [f"{report['hardware']}: a copy moves {report['copy_gb_s']} GB/s"]
    if "kernels" in report:
        correct = report["kernels"]["correctness"]
        lines.append(f"kernels: {sum(line['ok'] for line in correct)} of {len(correct)} comparisons hold")
        for line in report["kernels"]["timings"]:
            reached = f"{line['gb_s']:9.1f} GB/s  {100 * line['of_copy']:5.1f} % of a copy"
            lines.append(f"  {line['kernel'] + ', ' + line['case']:<64} {line['ms']:8.3f} ms {reached}")
    if "exact" in report:
        tried = [line for line in report["exact"] if "ok" in line]
        left_out = len(report["exact"]) - len(tried)
        same = sum(line["ok"] for line in tried)
        lines.append(
            f"exactness: {same} of {len(tried)} ways of drafting give the ids of plain decoding; {left_out} left out"
        )
    for line in (report.get("bench") or {}).get("runs", ()):
        numbers = ", ".join(f"{key} {value}" for key, value in line.items() if key not in ("system", "batch", "graphs"))
        name = f"{line['system']} at batch {line['batch']}, graphs {line['graphs']}"
        lines.append(f"  {name:<44} {numbers}")
    lines += [f"FAILED {failure}" for failure in report["failures"]]
    return "\n".join(lines)
