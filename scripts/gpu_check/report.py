"""The report: a JSON file that is complete after every check, whenever the process is killed."""

from __future__ import annotations

import importlib
import json
import os
import platform
import re
import sys
import time
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from scripts.doctor import ROOT, check_package, installed_version, requirements
from scripts.gpu_check.plan import Check
from scripts.gpu_check.ptxas import version_in_use
from train.publishing.provenance import git_state, versions


@dataclass
class Report:
    """`document` is what the file at `path` holds after each method that changes it.

    `done` lists the checks that ran and their seconds, `running` the one that has begun. Wrong results and errors are
    `failures`, kernels that do not compile `compile.failures`, the labels of both `failed`, and what was not begun
    `left_out`, with the reason. A group of checks has a report of its own, which `merge` adds to that of the run.
    """

    path: Path
    document: dict[str, Any]

    @classmethod
    def new(cls, path: Path, facts: dict[str, Any]) -> Report:
        state = {"compile": {}, "failures": [], "failed": [], "left_out": [], "done": {}, "running": None}
        report = cls(path, {"what": "gpu_check", **facts, **state, "seconds": {}})
        report.save()
        return report

    @classmethod
    def read(cls, path: Path) -> Report:
        return cls(path, json.loads(path.read_text(encoding="utf-8")))

    def save(self) -> None:
        """Replace the file in one step."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        staging = self.path.with_name(f".{self.path.name}.new")
        staging.write_text(json.dumps(self.document, indent=1) + "\n", encoding="utf-8")
        os.replace(staging, self.path)

    def begin(self, check: Check) -> None:
        self.document["running"] = {"label": check.label, "seconds": check.seconds}
        self.save()

    def end(self, check: Check, seconds: float, lines: list[dict[str, Any]]) -> None:
        """Add the lines of the check that has begun, and a failure for each that is not ok."""
        *parents, last = check.place
        place = self.document
        for key in parents:
            place = place.setdefault(key, {})
        place.setdefault(last, []).extend(lines)
        self.failures.extend(f"{check.label}: {wrong(line)}" for line in lines if not line.get("ok", True))
        self._finish(check.label, seconds)

    def fail(self, label: str, reason: str, seconds: float = 0.0) -> None:
        self.failures.append(f"{label}: {reason}")
        self.document["failed"].append(label)
        self._finish(label, seconds)

    def fail_to_compile(self, label: str, reason: str, seconds: float = 0.0) -> None:
        """Note a check whose kernels do not compile, once: its own run repeats what compiling in parallel found."""
        failures = self.document["compile"].setdefault("failures", [])
        if not any(failure.startswith(f"{label}: ") for failure in failures):
            failures.append(f"{label}: {reason}")
        self.document["failed"].append(label)
        self._finish(label, seconds)

    def leave_out(self, label: str, reason: str) -> None:
        self.document["left_out"].append({"what": label, "why": reason})
        self.document["running"] = None
        self.save()

    def part_path(self, name: str) -> Path:
        """Return where the report of the group of this name grows until it is merged."""
        return self.path.with_name(f"{self.path.stem}.{re.sub(r'[^a-z0-9]+', '-', name.lower())}.json")

    def merge(self, part: Report) -> None:
        """Add the report of a group; what it says of compiling lies under the group's name."""
        compiled = part.document.pop("compile")
        if compiled:
            name = part.path.stem.removeprefix(f"{self.path.stem}.")
            self.document["compile"][name] = compiled
        of_parts = {"what", "seconds", "running"}
        add_to(self.document, {key: value for key, value in part.document.items() if key not in of_parts})
        self.save()

    def _finish(self, label: str, seconds: float) -> None:
        self.document["done"][label] = round(seconds, 2)
        self.document["running"] = None
        self.save()

    @property
    def failures(self) -> list[str]:
        return self.document["failures"]

    @property
    def compile_failures(self) -> list[str]:
        return [failure for group in self.document["compile"].values() for failure in group["failures"]]

    @property
    def settled(self) -> set[str]:
        """Labels of checks that need not be begun."""
        return {*self.document["done"], *(entry["what"] for entry in self.document["left_out"])}


def add_to(document: dict[str, Any], other: dict[str, Any]) -> None:
    """Add to lists and dicts of `document` what those of `other` hold; anything else is replaced."""
    for key, value in other.items():
        if isinstance(value, dict) and isinstance(document.get(key), dict):
            add_to(document[key], value)
        elif isinstance(value, list) and isinstance(document.get(key), list):
            document[key].extend(value)
        else:
            document[key] = value


def wrong(line: dict[str, Any]) -> str:
    """Return what is not ok in a line."""
    if "error" in line:
        return f"{line['kernel']}, {line['case']}: error {line['error']} > {line['bound']}"
    if "why" in line:
        return line["why"]
    if line.get("different"):
        return f"{line['different']} of {line['prompts']} prompts have other token ids"
    if line.get("proposer_failures"):
        return f"drafting failed in {line['proposer_failures']} requests, which went on without"
    if "accepted_drafts" in line:
        return "no drafted token was accepted"
    return "other token ids than plain decoding"


def circumstances(device: torch.device, commit: str | None) -> dict[str, Any]:
    """Return what was checked, where and with which packages; `commit` is what a copy of the tree was made of."""
    git = git_state() if commit is None else {"commit": commit, "dirty": None}
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "Triton's interpreter"
    packages = versions() | {"triton": importlib.import_module("triton").__version__, "cuda": torch.version.cuda}
    created = datetime.now(UTC).isoformat(timespec="seconds")
    packages["ptxas"] = version_in_use()
    machine = {"hardware": name, "cores": os.cpu_count(), "system": platform.platform(), "python": sys.version}
    return {**machine, "created": created, "git": git, "versions": packages, "packages": packages_amiss()}


def packages_amiss() -> list[str]:
    """Return which of Headway's own requirements this machine lacks or has in another version."""
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    checks = [
        check_package(extra, requirement, installed_version(requirement.name))
        for extra, requirement in requirements(pyproject)
        if not extra
    ]
    return [f"{check.name}: {check.detail}" for check in checks if check.status != "ok"]


def file_name(hardware: str, name: str) -> str:
    """Return the report's file name; `name` says which parts it has."""
    hardware = re.sub(r"[^a-z0-9]+", "-", hardware.lower()).strip("-")
    return f"gpu-check-{name}_{hardware}_{time.strftime('%Y-%m-%d')}.json"


def card(document: dict[str, Any]) -> str:
    """Return the report as text, what matters most at the end."""
    lines = []
    for line in document.get("kernels", {}).get("timings", ()):
        reached = f"{line['gb_s']:9.1f} GB/s  {100 * line['of_copy']:5.1f} % of a copy"
        lines.append(f"  {line['kernel'] + ', ' + line['case']:<64} {line['ms']:8.3f} ms {reached}")
    for line in document.get("bench", {}).get("runs", ()):
        numbers = ", ".join(f"{key} {value}" for key, value in line.items() if key not in ("system", "batch", "graphs"))
        name = f"{line['system']} at batch {line['batch']}, graphs {line['graphs']}"
        lines.append(f"  {name:<44} {numbers}")
    lines += best_tiles(document.get("tiles", ()))
    lines.append(f"{document['hardware']}: a copy moves {document.get('copy_gb_s')} GB/s")
    for name, correct in document.get("kernels", {}).items():
        if name != "timings":
            made = (
                f" as {name} makes them"
                if name.startswith("ptxas")
                else f", {document.get('versions', {}).get('ptxas')}"
            )
            lines.append(f"kernels{made}: {sum(line['ok'] for line in correct)} of {len(correct)} comparisons hold")
    if tried := document.get("exact"):
        same = sum(line["ok"] for line in tried)
        lines.append(f"exactness: {same} of {len(tried)} ways of drafting give the ids of plain decoding")
    lines += [f"not as Headway wants it: {package}" for package in document["packages"]]
    lines += [f"left out: {entry['what']} ({entry['why']})" for entry in document["left_out"]]
    compiled = document["compile"].values()
    lines += [f"compiling did not end: {text}" for group in compiled for text in group.get("unfinished", ())]
    lines += [f"DOES NOT COMPILE {failure}" for group in compiled for failure in group["failures"]]
    lines += [f"FAILED {failure}" for failure in document["failures"]]
    return "\n".join(lines)


def best_tiles(lines: Iterable[dict[str, Any]]) -> list[str]:
    """Return for every layer the time of the tile that was chosen, and the three shortest."""
    cases: dict[tuple[str, int, str], list[dict[str, Any]]] = {}
    for line in lines:
        if "us" in line:
            cases.setdefault((line["weights"], line["rows"], line["layer"]), []).append(line)
    text = list[str]()
    for (weights, rows, layer), timed in cases.items():
        first, *others = timed  # the one chosen comes first
        shown = "; ".join(f"{each['us']} {each['tile']}" for each in sorted(others, key=lambda each: each["us"])[:3])
        text.append(f"  {weights}, {rows} rows, {layer}: {first['us']} us {first['tile']}; {shown}")
    return text
