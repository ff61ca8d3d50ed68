"""The result document of a measurement: what states where it comes from, how it is saved, and its tables."""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from infer.console.command_words import portable_path
from infer.settings.paths import REPO_ROOT
from kernels.cpu.level import level, machine_level, processor_flags
from train.storage.provenance import git_state, versions

RESULTS = REPO_ROOT / "scripts" / "results"
ZEN = {"23": "Zen 2 or older", "26": "Zen 5"}  # AMD's families of processors but one, which holds two kinds


def generation(cpuinfo: str) -> str | None:
    """Return which Zen the text of /proc/cpuinfo describes, None for another processor: virtual machines hide names."""
    lines = (line.partition(":") for line in cpuinfo.splitlines())
    facts = {key.strip(): value.strip() for key, _, value in lines}
    if facts.get("vendor_id") != "AuthenticAMD":
        return None
    if facts.get("cpu family") == "25":
        return "Zen 4" if "avx512f" in processor_flags(cpuinfo) else "Zen 3"
    return ZEN.get(facts.get("cpu family", ""))


def describe_machine() -> dict[str, Any]:
    """Return the machine's part of a document; `level`: the processor's in use, `lowered`: by the switch."""
    import torch

    from scripts.doctor import read_cpu

    packages, gpu, file = versions(), torch.cuda.is_available(), Path("/proc/cpuinfo")
    zen = generation(file.read_text() if file.exists() else "")
    return {
        "cpu": read_cpu()[0] + (f" ({zen})" if zen else ""),
        "level": None if gpu else level(),
        "lowered": not gpu and level() != machine_level(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if gpu else None,
        **{name: packages[name] for name in ("python", "torch", "transformers")},
        "commit": git_state()["commit"],
    }


def document(config: Any, fingerprint: str, results: Any) -> dict[str, Any]:
    """Return the document of a measurement with `config` on the target with this fingerprint."""
    named = {"path": without_folders(config.model.path), "fingerprint": fingerprint}
    made = {"date": datetime.date.today().isoformat(), "machine": describe_machine(), "target": named}
    return made | {"config": without_folders(asdict(config)), "results": results}


def without_folders(value: Any) -> Any:
    """Return `value` without this machine's folders: paths become relative to the repository, outside it bare names."""
    if isinstance(value, dict):
        return {key: without_folders(item) for key, item in value.items()}
    if isinstance(value, list):
        return [without_folders(item) for item in value]
    if not isinstance(value, str) or not Path(value).is_absolute():
        return value
    return portable_path(value) or Path(value).name


def result_file(save: str, model: str, machine: Mapping[str, Any]) -> Path:
    """Return the file `save` under scripts/results/, named by target, hardware and today's date.

    A CPU's level is a part of the hardware's name, and whether the switch lowered it.
    """
    cpu = f"{machine['cores']}-core-{machine['level']}" + ("-lowered" if machine["lowered"] else "")
    hardware = (machine["gpu"] or cpu).replace(" ", "-").lower()
    return RESULTS / f"{save}-{model}_{hardware}_{datetime.date.today().isoformat()}.json"


def publish(report: Mapping[str, Any], save: str | None, model: str) -> None:
    """Write the document to `result_file`, if `save` names one, and print it, as the last line of standard output, even
    if the file cannot be written.
    """
    try:
        if save:
            file = result_file(save, model, report["machine"])
            file.parent.mkdir(exist_ok=True)
            file.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
            print(f"written: {file.relative_to(REPO_ROOT)}")
    finally:
        print(json.dumps(report), flush=True)


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]], *, pad: bool = False) -> str:
    """Return a Markdown table, each line with a newline; with `pad` its columns are aligned, for a terminal."""
    lines = [list(header), *map(list, rows)]
    widths = [max(map(len, column)) if pad else 0 for column in zip(*lines, strict=True)]
    lines.insert(1, ["-" * (width or 3) for width in widths])
    cells = ((cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)
    return "".join(f"| {' | '.join(line)} |\n" for line in cells)


def table(records: Sequence[Mapping[str, Any]], *, pad: bool = False) -> str:
    """Return a Markdown table of records with the same keys, which are its header; None is an empty cell."""

    def text(value: Any) -> str:
        if isinstance(value, bool):
            return "yes" if value else "NO"
        if isinstance(value, float):
            return f"{value:.1f}" if value >= 100 else f"{value:.3g}"
        return " ".join(map(text, value)) if isinstance(value, list) else "" if value is None else str(value)

    return markdown(list(records[0]), [[text(value) for value in record.values()] for record in records], pad=pad)
