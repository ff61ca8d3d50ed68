"""The report: a JSON document. Each process of a run has one of its own, which the run's is made of."""

from __future__ import annotations

import importlib
import json
import os
import platform
import sys
import tomllib
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from kernels.triton.assembler import version_in_use
from kernels.triton.device import limits
from scripts.doctor import ROOT, check_package, installed_version, requirements
from train.publishing.provenance import git_state, versions

Document = dict[str, Any]


def empty() -> Document:
    """Return a report in which nothing has run.

    `done` holds the tests that ran with their seconds, `running` the one that has begun. Wrong results and errors are
    `failures`, kernels that do not compile `compile_failures` by test, what was not run `left_out`, with the reason.
    """
    return {"failures": [], "compile_failures": {}, "left_out": [], "done": {}, "running": None}


def settled(document: Document) -> set[str]:
    """Return the tests that need not be begun."""
    return {*document["done"], *(entry["what"] for entry in document["left_out"])}


def read(path: Path) -> Document:
    return json.loads(path.read_text(encoding="utf-8"))


def save(path: Path, document: Document) -> None:
    """Replace the file in one step."""
    path.parent.mkdir(parents=True, exist_ok=True)
    staging = path.with_name(f".{path.name}.new")
    staging.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    os.replace(staging, path)


def add_to(document: Document, other: Document) -> None:
    """Add to lists and dicts of `document` what those of `other` hold; anything else is replaced."""
    for key, value in other.items():
        if isinstance(value, dict) and isinstance(document.get(key), dict):
            add_to(document[key], value)
        elif isinstance(value, list):
            document[key] = [*document.get(key, ()), *value]
        else:
            document[key] = value


def circumstances(device: torch.device, commit: str | None) -> Document:
    """Return what is checked, where and with which packages; `commit` is what a copy of the tree was made of.

    `packages` are those of Headway's own requirements that this machine lacks or has in another version.
    """
    git = git_state() if commit is None else {"commit": commit, "dirty": None}
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "Triton's interpreter"
    packages = versions() | {"triton": importlib.import_module("triton").__version__, "cuda": torch.version.cuda}
    packages["ptxas"] = version_in_use(limits(device).capability)
    machine = {"hardware": name, "cores": os.cpu_count(), "system": platform.platform(), "python": sys.version}
    created = datetime.now(UTC).isoformat(timespec="seconds")
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    needed = (requirement for extra, requirement in requirements(pyproject) if not extra)
    checks = (check_package("", requirement, installed_version(requirement.name)) for requirement in needed)
    amiss = [f"{check.name}: {check.detail}" for check in checks if check.status != "ok"]
    return {**machine, "created": created, "git": git, "versions": packages, "packages": amiss}


def card(document: Document) -> str:
    """Return the report as text, what matters most at the end."""
    lines = []
    for line in document.get("kernels", {}).get("timings", ()):
        reached = f"{line['gb_s']:9.1f} GB/s  {100 * line['of_copy']:5.1f} % of a copy"
        lines.append(f"  {line['kernel'] + ', ' + line['case']:<64} {line['ms']:8.3f} ms {reached}")
    for line in document.get("bench", {}).get("runs", ()):
        numbers = ", ".join(f"{key} {value}" for key, value in line.items() if key not in ("system", "batch", "graphs"))
        name = f"{line['system']} at batch {line['batch']}, graphs {line['graphs']}"
        lines.append(f"  {name:<44} {numbers}")
    tiles = [line for line in document.get("tiles", ()) if "us" in line]
    cases = dict.fromkeys((line["weights"], line["rows"], line["layer"]) for line in tiles)
    for weights, rows, layer in cases:
        first, *others = (t for t in tiles if (t["weights"], t["rows"], t["layer"]) == (weights, rows, layer))
        shortest = sorted(others, key=lambda each: each["us"])[:3]
        shown = "; ".join(f"{each['us']} {each['tile']}" for each in shortest)
        # the tile that was chosen comes first
        lines.append(f"  {weights}, {rows} rows, {layer}: {first['us']} us {first['tile']}; {shown}")
    lines.append(f"{document['hardware']}: a copy moves {document.get('copy_gb_s')} GB/s")
    for name, correct in document.get("kernels", {}).items():
        if name != "timings":
            ptxas = document.get("versions", {}).get("ptxas")
            made = f" as {name} makes them" if name.startswith("ptxas") else f", {ptxas}"
            lines.append(f"kernels{made}: {sum(line['ok'] for line in correct)} of {len(correct)} comparisons hold")
    if tried := document.get("exact"):
        same = sum(line["ok"] for line in tried)
        lines.append(f"exactness: {same} of {len(tried)} ways of drafting give the ids of plain decoding")
    lines += [f"not as Headway wants it: {package}" for package in document["packages"]]
    lines += [f"left out: {entry['what']} ({entry['why']})" for entry in document["left_out"]]
    compiled = document.get("compile", {}).values()
    lines += [f"compiling did not end: {text}" for group in compiled for text in group["unfinished"]]
    lines += [f"DOES NOT COMPILE {label}: {reason}" for label, reason in document["compile_failures"].items()]
    lines += [f"FAILED {failure}" for failure in document["failures"]]
    return "\n".join(lines)
