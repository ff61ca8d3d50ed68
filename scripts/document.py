"""The result document of a measurement: what states where it comes from, how it is saved, and its tables."""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from infer.config_checks import REPO_ROOT
from infer.options.command_words import portable_path
from train.publishing.provenance import git_state, versions

RESULTS = REPO_ROOT / "scripts" / "results"
TRAINING = ("steps", "tokens", "seconds", "trained_parameters", "acceptance_length", "acceptance_length_sampled")


def describe_machine() -> dict[str, Any]:
    import torch

    from scripts.doctor import read_cpu

    packages = versions()
    return {
        "cpu": read_cpu()[0],
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        **{name: packages[name] for name in ("python", "torch", "transformers")},
        "commit": git_state()["commit"],
    }


def document(config: Any, target: Any, heads: Mapping[str, Path], results: Any) -> dict[str, Any]:
    """Return the document of a measurement with `config` on `target`; `heads` are folders of exported heads by name."""
    return {
        "date": datetime.date.today().isoformat(),
        "machine": describe_machine(),
        "target": {"path": without_folders(config.model.path), "fingerprint": target.fingerprint},
        "heads": head_summaries(heads),
        "config": without_folders(asdict(config)),
        "results": results,
    }


def without_folders(value: Any) -> Any:
    """Return `value` without this machine's folders: paths become relative to the repository, outside it bare names."""
    if isinstance(value, dict):
        return {key: without_folders(item) for key, item in value.items()}
    if isinstance(value, list):
        return [without_folders(item) for item in value]
    if not isinstance(value, str) or not Path(value).is_absolute():
        return value
    return portable_path(value) or Path(value).name


def head_summaries(folders: Mapping[str, Path]) -> dict[str, dict[str, Any]]:
    """Return what the heads' provenance.json states about their training, by name, for heads that have that file."""
    kept = ("run", *TRAINING, "data_hash", "git")
    summaries = {}
    for name, folder in folders.items():
        path = folder / "provenance.json"
        if path.is_file():
            record = json.loads(path.read_text(encoding="utf-8"))
            summaries[name] = {key: record[key] for key in kept if key in record}
    return summaries


def result_file(save: str, model: str, machine: Mapping[str, Any]) -> Path:
    """Return the file `save` under scripts/results/, named by target, hardware and today's date."""
    hardware = (machine["gpu"] or f"{machine['cores']}-core-cpu").replace(" ", "-").lower()
    return RESULTS / f"{save}-{model}_{hardware}_{datetime.date.today().isoformat()}.json"


def write(report: Mapping[str, Any], save: str | None, model: str) -> None:
    """Write the document to `result_file`, if `save` names one."""
    if save:
        file = result_file(save, model, report["machine"])
        file.parent.mkdir(exist_ok=True)
        file.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
        print(f"written: {file.relative_to(REPO_ROOT)}")


def publish(report: Mapping[str, Any], save: str | None, model: str) -> None:
    """Write the document as `write` does and print it, as the last line of standard output."""
    write(report, save, model)
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


def by_format(report: Mapping[str, Any]) -> str:
    """Return a table with one row per weight format: bits per weight, and GB/s with their share of the machine's."""
    machine = report["read_gb_s"]
    rows = [["plain read", "", *(f"{speed:.1f}" for speed in machine.values())]]
    for name, item in report["formats"].items():
        speeds = (f"{speed:.1f} ({100 * speed / machine[count]:.0f} %)" for count, speed in item["gb_s"].items())
        rows.append([name, f"{item['bits']:.2f}", *speeds])
    threads = (f"GB/s, {count} thread{'s' if count != '1' else ''}" for count in machine)
    return markdown(["weights", "bits each", *threads], rows)
